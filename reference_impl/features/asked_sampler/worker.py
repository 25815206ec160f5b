"""Samplers that are asked for tokens, with logits and requests, and waited for: any function `Sampler` describes.

What the engine's own samplers need of a request lies in arrays. A function of a lab, or one of your own, reads the
request itself (`interfaces.Asking`), so its tokens are kept up to date on the host, and steps cannot overlap. Extends
`StepRun.stage`, which then has no columns to copy, `sample` and `take`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun, Worker, not_finite
from reference_impl.interfaces import Opened, Sampled, SamplingParams, Step
from reference_impl.interfaces.sampling_fields import BY_SAMPLER


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


class SeenSlots:
    """By slot, the requests that have one. Follows them whatever the sampler is: another may be installed later."""

    def __init__(self) -> None:
        self.of: dict[int, Seen] = {}

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        for slot in step.closed:
            self.of.pop(slot, None)
        for new in opened:
            self.of[new.slot] = Seen(
                new.request_id, list(new.tokens), new.num_prompt_tokens, new.sampling, new.seed, new.sample_index,
                new.holds,
            )  # fmt: skip
        for more in step.appended:
            self.of[more.slot].tokens += more.tokens


class AskingWorker(Worker):
    """sampler: a `TorchSampler`, or any `Sampler`."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.seen = SeenSlots()
        self.slots.followers.append(self.seen)

    @property
    def asks(self) -> bool:
        return not isinstance(self.sampler, TorchSampler)

    @property
    def reads(self) -> Collection[str]:
        """A sampler that is asked reads the request itself."""
        return [field.name for field in BY_SAMPLER] if self.asks else super().reads

    @property
    def max_in_flight(self) -> int:
        """1 where the sampler is asked, and waited for, at each step."""
        return 1 if self.asks else super().max_in_flight


class AskedRun(StepRun):
    worker: AskingWorker
    sampled: Sampled | None = None

    def stage(self) -> None:
        if self.worker.asks:
            self.tensors = self.batch.on(self.worker.model.device)
        else:
            super().stage()

    def sample(self) -> None:
        if not self.worker.asks:
            return super().sample()
        sampler: Any = self.worker.sampler
        self.broken = not_finite(self.logits)
        self.sampled = sampler(self.scores, self._asking())
        chosen = np.array(self.sampled.tokens, np.int64)
        tokens = to_device({"tokens": chosen}, self.worker.model.device)["tokens"]
        self.worker.slots.put(self.tensors, tokens)
        reports = self.sampled.logprobs
        self.read_logprobs = lambda: reports
        self.take(tokens)

    def _asking(self) -> list[Seen]:
        """Of each of the logits its request, as it is if the drafts before are right."""
        seen = [self.worker.seen.of[self.batch.slots[row]] for row in self.batch.sampling]
        if not self.batch.drafts:
            return seen
        first, asking = 0, []
        guesses = iter(self.tensors["draft.tokens"].tolist())
        while first < len(seen):
            num = self.batch.drafts[self.batch.sampling[first]]
            mine = [next(guesses) for _ in range(num)]
            asking += [replace(seen[first], tokens=seen[first].tokens + mine[:i]) for i in range(num + 1)]
            first += num + 1
        return asking

    def take(self, tokens: Tensor, kept: Tensor | None = None) -> None:
        super().take(tokens, kept)
        if self.sampled is None:
            return
        is_kept = [True] * len(tokens) if kept is None else kept.tolist()
        for row, token, mine in zip(self.batch.sampling, self.sampled.tokens, is_kept, strict=True):
            seen = self.worker.seen.of[self.batch.slots[row]]
            if mine and not seen.holds:
                seen.tokens.append(token)

    def end(self) -> None:
        super().end()
        if self.sampled is not None and self.finished_at is None:
            self.finished_at = self.worker.clock.now()  # it was waited for
