"""What an engine does besides: grammars, page stores, drafts and more are objects with some of these hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from reference_impl.interfaces import Reply, Request, Step, StepOutput, StepPlan


@dataclass(frozen=True, eq=False)
class Flight:
    """A step submitted and not collected. requests: by id, those of the plan's rows at least."""

    plan: StepPlan
    requests: Mapping[str, Request]
    step: Step
    ticket: Any


class FinishedStep(NamedTuple):
    """A step that was collected, and what it gave. num_sampled: as of `StepDone`."""

    plan: StepPlan
    output: StepOutput
    finished: Sequence[Request]
    num_sampled: tuple[int, ...] = ()


# What is left to do for a collected step when its requests have their tokens; None: nothing.
Afterwards: TypeAlias = Callable[[FinishedStep], FinishedStep] | None


class EngineFeature:
    """What an engine does besides. Features stand side by side, and know nothing of one another. A feature has some of
    these hooks; of each, those of all features are called in their order."""

    def has_work(self) -> bool:
        """Whether there is something to do beside tokens to compute."""
        return False

    def begin(self, now: float) -> None:
        """A step begins: nothing is scheduled yet."""

    def needs_step(self) -> bool:
        """Whether a step is to be submitted although nothing was scheduled."""
        return False

    def message(self, step: Step, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """The message for the worker, before it is submitted."""
        return step

    def submitted(self, flight: Flight) -> None:
        """The step runs, and all that it depends on was collected."""

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        """The reply, before the scheduler has it."""
        return reply, None

    def close(self) -> None:
        """Before the executor is closed."""
