"""Samplers that are called with logits and requests, and waited for: any function that `Sampler` describes.

The engine's own samplers read arrays. A lab's function, or one of your own, reads the request itself
(`interfaces.Asking`), so its tokens are kept up to date on the host, and steps cannot overlap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.sampler import Settings, TorchSampler
from reference_impl.core.staging import Arrays, to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart, WorkerFeature
from reference_impl.interfaces import Opened, Sampler, SamplingParams, Step, TokenLogprobs


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
        return None if isinstance(sampler, TorchSampler) else AskingPart(sampler, self.seen)


class AskingPart(StepPart):
    def __init__(self, sampler: Sampler, seen: Mapping[int, Seen]):
        self.sampler, self.seen = Asked(sampler), seen

    def lay_out(self, run: StepRun) -> None:
        run.sampler = self.sampler

    def move_scores(self, run: StepRun) -> None:
        """Gives the sampler its requests. This part is the last, so the sampler is called next."""
        self.sampler.requests = self._asking(run)

    def _asking(self, run: StepRun) -> list[Seen]:
        """The request of each of the logits, with the drafts before it as its own tokens."""
        seen = [self.seen[run.batch.slots[row]] for row in run.batch.sampling]
        if not run.batch.drafts:
            return seen
        first, asking = 0, []
        drafts = iter(run.tensors["draft.tokens"].tolist())
        while first < len(seen):
            num = run.batch.drafts[run.batch.sampling[first]]
            mine = [next(drafts) for _ in range(num)]
            asking += [replace(seen[first], tokens=seen[first].tokens + mine[:i]) for i in range(num + 1)]
            first += num + 1
        return asking

    def chosen(self, run: StepRun, tokens: Tensor) -> Tensor:
        reports = self.sampler.logprobs
        run.read_logprobs = lambda: reports
        return tokens

    def taken(self, run: StepRun, tokens: Tensor) -> None:
        is_kept = [True] * len(tokens) if run.kept is None else run.kept.tolist()
        for row, token, mine in zip(run.batch.sampling, tokens.tolist(), is_kept, strict=True):
            seen = self.seen[run.batch.slots[row]]
            if mine and not seen.holds:
                seen.tokens.append(token)

    def ended(self, run: StepRun) -> None:
        if run.batch.sampling:
            run.finished_at = run.worker.clock.now()  # it was waited for


class Asked(TorchSampler):
    """Stands for one step in the place of a sampler that is launched. requests: one for each of the logits."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.requests: Sequence[Seen] = ()
        self.logprobs: list[TokenLogprobs | None] = []

    def columns(self, settings: Settings, lengths: NDArray[np.int64]) -> Arrays:
        return {}

    def choose(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        sampled = self.sampler(scores, self.requests)
        self.logprobs = list(sampled.logprobs)
        return to_device({"tokens": np.array(sampled.tokens, np.int64)}, scores.device)["tokens"]
