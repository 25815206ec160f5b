"""A step whose sampler is asked: it is called with the logits, and with requests as they are at each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.sampler import Settings, TorchSampler
from reference_impl.core.staging import Arrays, to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart
from reference_impl.features.asked_sampler.worker import Seen
from reference_impl.interfaces import Sampler, TokenLogprobs


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
