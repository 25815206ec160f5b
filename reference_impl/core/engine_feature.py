"""What an engine does besides: grammars, page stores, drafts and more are objects with some of these hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from reference_impl.interfaces import Reply, Request, Step, StepOutput, StepPlan


@dataclass(frozen=True, eq=False)
class Flight:
    """A step that was submitted and not collected yet. requests: by id, at least those of the plan's rows."""

    plan: StepPlan
    requests: Mapping[str, Request]
    step: Step
    ticket: Any


class FinishedStep(NamedTuple):
    """A step that was collected, and what it gave. num_sampled: see `StepDone`."""

    plan: StepPlan
    output: StepOutput
    finished: Sequence[Request]
    num_sampled: tuple[int, ...] = ()


# What is left to do for a collected step when its requests have their tokens; None: nothing.
Afterwards: TypeAlias = Callable[[FinishedStep], FinishedStep] | None


class EngineFeature:
    """What an engine does besides. Features are independent of one another. A feature implements some of these hooks;
    each hook is called for all features that have it, in their order."""

    def has_work(self) -> bool:
        """Whether there is something to do beside tokens to compute."""
        return False

    def begin(self, now: float) -> None:
        """Called when a step begins, before anything is scheduled."""

    def needs_step(self) -> bool:
        """Whether a step is to be submitted although nothing was scheduled."""
        return False

    def message(self, step: Step, plan: StepPlan, requests: Mapping[str, Request]) -> Step:
        """The message for the worker, or another in its place; called before it is submitted."""
        return step

    def submitted(self, flight: Flight) -> None:
        """Called when the step runs and every step that it depends on was collected."""

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        """The reply for the scheduler, and what is to be done once the requests have their tokens."""
        return reply, None

    def close(self) -> None:
        """Called before the executor is closed."""
