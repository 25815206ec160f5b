"""Samplers that are called with logits and requests, and waited for: any function that `Sampler` describes.

The engine's own samplers read arrays. A lab's function, or one of your own, reads the request itself
(`interfaces.Asking`), so its tokens are kept up to date on the host, and steps cannot overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart, WorkerFeature
from reference_impl.interfaces import Opened, SamplingParams, Step


@dataclass(eq=False)
class Seen:
    """A request, as a sampler may read it (`Asking`)."""

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    sample_index: int
    holds: bool

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


class SeesRequests(WorkerFeature):
    """Keeps requests on the host, by slot, with any sampler, since one that is asked may be installed later."""

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        for slot in step.closed:
            self.seen.pop(slot, None)
        for new in opened:
            self.seen[new.slot] = Seen(
                new.request_id, list(new.tokens), new.num_prompt_tokens, new.sampling, new.seed, new.sample_index,
                new.holds,
            )  # fmt: skip
        for more in step.appended:
            self.seen[more.slot].tokens += more.tokens

    def part(self, run: StepRun) -> StepPart | None:
        sampler: Any = run.worker.sampler
        if isinstance(sampler, TorchSampler):
            return None
        from reference_impl.features.asked_sampler.asking import AskingPart

        return AskingPart(sampler, self.seen)
