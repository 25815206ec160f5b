"""Log-probabilities of a prompt's tokens, each given those before it, from the pass that computes the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.slots import Slots
from reference_impl.core.staging import to_device, to_host
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart
from reference_impl.interfaces import TokenLogprobs

Reports = Mapping[int, tuple[int, tuple[TokenLogprobs, ...]]]  # see `Reply.prompt_logprobs`


@dataclass(frozen=True)
class Scored:
    """The rows of a step that compute prompt tokens with another prompt token behind them.

    rows: (row of the step, first position, how many, alternatives to report). slots, positions: those of the tokens
    behind.
    sampling, scoring: which of the step's logits are sampled from, and which score a token.
    """

    rows: list[tuple[int, int, int, int]]
    slots: list[int]
    positions: list[int]
    sampling: NDArray[np.int64]
    scoring: NDArray[np.int64]


def add_scored(host: HostBatch, slots: Slots) -> Scored | None:
    """Adds the tokens behind which a prompt token is scored to the batch's logits_indices, in their order; None, and
    nothing changed, if there are none."""
    rows: list[tuple[int, int, int, int]] = []
    of_slots: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    first_tokens = host.arrays["query_start_loc"]
    for at, slot in enumerate(host.slots):
        request, start = slots.host[slot], host.context_lens[at] - host.query_lens[at]
        num = min(host.query_lens[at], request.num_prompt_tokens - 1 - start)
        if request.sampling.prompt_logprobs is None or num < 1:
            continue
        rows.append((host.order[at], start, num, request.sampling.prompt_logprobs))
        of_slots += [slot] * num
        positions += range(start + 1, start + num + 1)
        places += range(first_tokens[at], first_tokens[at] + num)
    if not rows:
        return None
    sampled, scored = host.arrays["logits_indices"], np.array(places)
    both = host.arrays["logits_indices"] = np.union1d(sampled, scored)
    return Scored(rows, of_slots, positions, np.searchsorted(both, sampled), np.searchsorted(both, scored))


def launch_scores(logits: Tensor, scored: Scored, slots: Slots) -> Callable[[], Reports]:
    """Starts to copy the scores to the host. Returns a function that gives them once the device is done. logits: all
    those of the step."""
    t = to_device(
        {"slots": np.array(scored.slots), "positions": np.array(scored.positions), "scoring": scored.scoring},
        logits.device,
    )
    tokens = slots.tokens[t["slots"], t["positions"]].long()
    logprobs = torch.log_softmax(logits[t["scoring"]].float(), dim=-1)
    most = min(max(alternatives for *_, alternatives in scored.rows), logits.shape[1])
    on_host = [to_host(x) for x in (tokens, logprobs.gather(1, tokens[:, None])[:, 0], *logprobs.topk(most))]

    def finish() -> Reports:
        columns = zip(*(t.tolist() for t in on_host), strict=True)
        return {
            row: (
                start,
                tuple(
                    TokenLogprobs(token, own, tuple(zip(ids[:k], values[:k], strict=True)))
                    for token, own, values, ids in (next(columns) for _ in range(num))
                ),
            )
            for row, start, num, k in scored.rows
        }

    return finish


class ScorePart(StepPart):
    scored: Scored | None = None

    def lay_out(self, run: StepRun) -> None:
        self.scored = add_scored(run.batch, run.worker.slots)

    def after_model(self, run: StepRun) -> None:
        if self.scored is not None:
            run.reports["prompt_logprobs"] = launch_scores(run.logits, self.scored, run.worker.slots)
            rows = to_device({"sampling": self.scored.sampling}, run.logits.device)["sampling"]
            run.logits = run.scores = run.logits[rows]
