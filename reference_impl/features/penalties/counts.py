"""Repetition (CTRL, Keskar et al. 2019), presence and frequency penalties, on the device.

They ask how often a request's text has each token. A worker keeps that count for each request that has penalties, and
adds to it what it samples: the host need not know the token, and the text is not counted again in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.staging import Arrays, to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import DraftPositions, StepPart
from reference_impl.features.penalties.worker import has_penalties
from reference_impl.interfaces import Opened, SamplingParams, Step


@dataclass(frozen=True)
class Penalties:
    """The penalties of those rows that have any, P of them.

    arrays: rows, places [P] (in the batch, and in the counts); repetition, presence, frequency [P] float64.
    """

    arrays: Arrays
    counts: TokenCounts


class TokenCounts:
    """Counts for each request with penalties which tokens its prompt or output has, and how often the output has each.

    A request has a place, a row of `seen` and `written`, while it is open. Both grow when no place is left, and are
    made when the first logits are seen: only then is the size of the vocabulary known.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.seen = torch.empty(0, 0, dtype=torch.bool, device=device)  # [places, vocab_size]
        self.written = torch.empty(0, 0, dtype=torch.int32, device=device)
        self.places: dict[int, int] = {}  # by slot, of requests with penalties
        self._free: list[int] = []
        self._uncounted: list[tuple[int, Sequence[int], int]] = []  # (place, tokens, of them prompt)
        self._emptied: set[int] = set()  # places whose counts are an earlier request's

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        """Opens and closes places, and adds tokens, like the step for slots. opened: step.opened, with all tokens."""
        for slot in step.closed:
            self.close(slot)
        for new in opened:
            if has_penalties(new.sampling):
                self.open(new.slot, new.tokens[:], new.num_prompt_tokens)
            else:
                self.close(new.slot)
        for more in step.appended:
            self.append(more.slot, more.tokens)

    def open(self, slot: int, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        self.close(slot)
        place = self._free.pop() if self._free else len(self.places)
        self.places[slot] = place
        self._emptied.add(place)
        self._uncounted.append((place, tokens, num_prompt_tokens))

    def close(self, slot: int) -> None:
        if slot in self.places:
            place = self.places.pop(slot)
            self._free.append(place)
            self._uncounted = [new for new in self._uncounted if new[0] != place]

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Adds output that the worker did not sample."""
        if slot in self.places:
            self._uncounted.append((self.places[slot], tokens, 0))

    def of(self, slots: Sequence[int], params: Sequence[SamplingParams]) -> Penalties | None:
        """The penalties of requests in these slots, with these parameters; None: none of them has any."""
        found = [(row, slot, p) for row, (slot, p) in enumerate(zip(slots, params, strict=True)) if has_penalties(p)]
        if not found:
            return None
        arrays: Arrays = {
            "rows": np.array([row for row, _, _ in found]),
            "places": np.array([self.places[slot] for _, slot, _ in found]),
            "repetition": np.array([p.repetition_penalty for _, _, p in found]),
            "presence": np.array([p.presence_penalty for _, _, p in found]),
            "frequency": np.array([p.frequency_penalty for _, _, p in found]),
        }
        return Penalties(arrays, self)

    def catch_up(self, vocab_size: int) -> None:
        """Counts the tokens that came since the last call."""
        self._grow(vocab_size)
        if self._emptied:
            places = to_device({"places": np.array(sorted(self._emptied))}, self.device)["places"]
            self.seen.index_fill_(0, places, False)
            self.written.index_fill_(0, places, 0)
        if self._uncounted:
            place = np.repeat([p for p, _, _ in self._uncounted], [len(tokens) for _, tokens, _ in self._uncounted])
            token = np.concatenate([np.asarray(tokens, np.int64) for _, tokens, _ in self._uncounted])
            output = np.concatenate([np.arange(len(tokens)) >= prompt for _, tokens, prompt in self._uncounted])
            t = to_device({"place": place, "token": token, "output": output.astype(np.int32)}, self.device)
            self._count(t["place"], t["token"], t["output"])
        self._emptied, self._uncounted = set(), []

    def _grow(self, vocab_size: int) -> None:
        needed = len(self.places) + len(self._free)
        places, tokens = self.seen.shape
        if needed > places or vocab_size > tokens:
            seen, written = self.seen, self.written
            size = (max(needed, 2 * places), max(vocab_size, tokens))
            self.seen, self.written = seen.new_zeros(size), written.new_zeros(size)
            self.seen[:places, :tokens], self.written[:places, :tokens] = seen, written

    def add(self, penalties: Penalties, tokens: Tensor, holds: Sequence[bool], kept: Tensor | None = None) -> None:
        """Adds what was sampled, tokens [rows of the batch] on the device, except for requests that are held. kept
        [rows]: False where the token is not the request's, because a draft before it was wrong."""
        arrays = penalties.arrays
        free = [at for at, row in enumerate(arrays["rows"]) if not holds[row]]
        if free:
            t = to_device({name: arrays[name][free] for name in ("rows", "places")}, self.device)
            places, new = t["places"], tokens[t["rows"]]
            if kept is not None:
                mine = kept[t["rows"]]
                places, new = places[mine], new[mine]
            self._count(places, new, torch.ones_like(places, dtype=torch.int32))

    def _count(self, places: Tensor, tokens: Tensor, output: Tensor) -> None:
        at = places * self.seen.shape[1] + tokens
        self.seen.view(-1).index_fill_(0, at, True)
        self.written.view(-1).scatter_add_(0, at, output)  # whole numbers: their sum is the same in any order


def penalised(logits: Tensor, penalties: Penalties, drafted: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """The logits [rows, vocab_size] with penalties: a new tensor, float32 at least. drafted: (which of the P rows,
    token), tokens that count as written for that row alone: drafts before its position.

    A logit is divided (multiplied, if negative) by the repetition penalty where its token was seen; then the presence
    penalty is subtracted where it was written, and the frequency penalty as often as it was.
    """
    counts = penalties.counts
    counts.catch_up(logits.shape[1])
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    t = to_device(penalties.arrays, logits.device)

    def column(name: str) -> Tensor:
        return t[name].to(scores.dtype)[:, None]

    seen, count = counts.seen[t["places"]], counts.written[t["places"]].to(scores.dtype)
    if drafted is not None:
        rows, _ = drafted
        seen.index_put_(drafted, torch.ones_like(rows, dtype=torch.bool))
        count.index_put_(drafted, torch.ones_like(rows, dtype=count.dtype), accumulate=True)
    s, repetition = scores.index_select(0, t["rows"]), column("repetition")
    s = torch.where(seen & (repetition != 1), torch.where(s > 0, s / repetition, s * repetition), s)
    s = torch.where(count > 0, s - (column("presence") + column("frequency") * count), s)
    s = s.clamp(torch.finfo(s.dtype).min, torch.finfo(s.dtype).max)  # 1e300 is a penalty, too; infinities have no order
    return scores.index_copy_(0, t["rows"], s)


class PenaltyPart(StepPart):
    penalties: Penalties | None = None

    def __init__(self, counts: TokenCounts):
        self.counts = counts

    def needs_logits(self, run: StepRun) -> bool:
        return True

    def move_scores(self, run: StepRun) -> None:
        slots = [run.batch.slots[row] for row in run.batch.sampling]
        self.penalties = self.counts.of(slots, [run.worker.slots.host[slot].sampling for slot in slots])
        if self.penalties is not None:
            before = None if run.drafts_before is None else run.drafts_before(run, self.penalties.arrays["rows"])
            run.scores = penalised(run.scores, self.penalties, before)

    def taken(self, run: StepRun, tokens: Tensor) -> None:
        if self.penalties is not None:
            holds = [run.worker.slots.host[run.batch.slots[row]].holds for row in run.batch.sampling]
            self.counts.add(self.penalties, tokens, holds, run.kept)


def drafts_before(penalties: Penalties, at: DraftPositions) -> tuple[Tensor, Tensor] | None:
    """The drafts before the positions of rows with penalties, in the form of `penalised`: (which of the P rows, token);
    None: there are none."""
    rows, before = penalties.arrays["rows"], at.before
    if isinstance(before, Tensor):
        t = to_device({"rows": rows, "which": np.repeat(np.arange(len(rows)), before.shape[1])}, before.device)
        return (t["which"], before[t["rows"]].flatten()) if before.shape[1] else None
    if not before:
        return None
    which, back = np.repeat(np.arange(len(rows)), before), np.tile(np.arange(before, 0, -1), len(rows))
    arrays = {"which": which, "row": rows[which], "slot": np.array(at.slots)[rows[which]], "back": back}
    t = to_device(arrays, at.tables.device)
    return t["which"], at.tables.tokens[t["slot"], at.positions[t["row"]] - t["back"]].long()
