"""Drafts in a step: a proposer's tokens lie behind a row's known tokens, and the model computes them with it.

What each position samples is then what it would have sampled without them, as long as all drafts before it were right.
So the tokens up to the first wrong draft, and the one sampled in its place, are those of plain decoding: greedy, or
drawn with the position's own random number. A request without a seed is promised no text, only its distribution; what
its positions get is drawn by rejection, which keeps more drafts (`rejection.py`). Either way a draft token is kept if
it is what its position got, with all before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.slots import Slots
from reference_impl.core.staging import Arrays
from reference_impl.interfaces import Proposer, Step

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def draft_arrays(batch: HostBatch, step: Step) -> Arrays:
    """The arrays that `propose` and `verify` use. For the R rows with drafts, D drafts in all, of a step with F logits:

    slots, known, num [R]: the row's slot, its tokens without drafts, its number of drafts.
    row, nth [D]: which of the R rows, which of its drafts. at [D]: the logits that verify it. tokens [D]: the drafts,
    where the step names them.
    """
    drafted = [row for row, num in enumerate(batch.drafts) if num]
    num = np.array([batch.drafts[row] for row in drafted])
    first = np.searchsorted(batch.sampling, drafted)  # of each row's logits
    nth = np.concatenate([np.arange(n) for n in num])
    given = [token for row in drafted for token in step.rows[batch.order[row]].drafts]
    return ({"draft.tokens": np.array(given, np.int64)} if given else {}) | {
        "draft.slots": np.array([batch.slots[row] for row in drafted]),
        "draft.known": np.array([batch.query_lens[row] for row in drafted]) - num,
        "draft.num": num,
        "draft.row": np.repeat(np.arange(len(drafted)), num),
        "draft.nth": nth,
        "draft.at": np.repeat(first, num) + nth,
    }


def propose(proposer: Proposer, slots: Slots, t: Mapping[str, Tensor], k: int, vocab_size: int, longest: int) -> Tensor:
    """The proposer's drafts, [D] int64. longest: positions of the longest of these rows, or a bound. ValueError if they
    are not whole numbers, [R, k], on the same device, or, on a CPU, not of the vocabulary; a GPU, which would have to
    be waited for, fails by itself.

    The proposer is given copies: what it writes into them would otherwise become the text that the model reads."""
    rows, row, nth = t["draft.slots"], t["draft.row"], t["draft.nth"]
    lengths = slots.computed.index_select(0, rows) + t["draft.known"]
    drafts = proposer.propose(rows.clone(), lengths, slots.tokens[:, :longest].clone(), k)
    expected = f"{type(proposer).__name__}.propose: expected"
    if not isinstance(drafts, Tensor) or drafts.shape != (len(rows), k):
        got = list(drafts.shape) if isinstance(drafts, Tensor) else type(drafts).__name__
        raise ValueError(f"{expected} {k} tokens for each of {len(rows)} rows, [{len(rows)}, {k}], got {got}")
    if drafts.dtype not in _WHOLE or drafts.device != rows.device:
        raise ValueError(
            f"{expected} tokens, which are int64, on {rows.device}; got {drafts.dtype} on {drafts.device}: return "
            "drafts.to(slots.device, torch.int64), if these are tokens"
        )
    found = drafts.to(torch.int64)[row, nth]
    if found.device.type == "cpu" and found.numel() and not 0 <= int(found.min()) <= int(found.max()) < vocab_size:
        wrong = next(token for token in found.tolist() if not 0 <= token < vocab_size)
        raise ValueError(f"{expected} tokens of the vocabulary [0, {vocab_size}), got {wrong}")
    return found


def put_drafts(slots: Slots, t: Mapping[str, Tensor]) -> None:
    """Writes draft.tokens [D] behind the tokens of their slots, where the batch finds them."""
    slots.tokens.index_put_(_places(slots, t), t["draft.tokens"].int())


def take_drafts(slots: Slots, t: Mapping[str, Tensor]) -> Tensor:
    """The drafts that are in their slots already, [D] int64."""
    return slots.tokens[_places(slots, t)].long()


def _places(slots: Slots, t: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The (slot, position) of each draft token, [D] each."""
    row = t["draft.row"]
    of_token = t["draft.slots"][row]
    return of_token, slots.computed.index_select(0, of_token) + t["draft.known"][row] + t["draft.nth"]


@dataclass(frozen=True)
class Verified:
    """What verification found. accepted [R]: how many of a row's drafts are kept. kept [F]: which of the sampled tokens
    are the request's."""

    accepted: Tensor
    kept: Tensor


def verify(chosen: Tensor, t: Mapping[str, Tensor], k: int) -> Verified:
    """Compares the drafts with chosen [F], what was sampled at each of the logits. t: with the drafts. k: see
    `propose`."""
    row, nth, at, num = t["draft.row"], t["draft.nth"], t["draft.at"], t["draft.num"]
    right = torch.zeros(len(num), k, dtype=torch.int64, device=chosen.device)
    right[row, nth] = (chosen[at] == t["draft.tokens"]).long()
    right = right.cumprod(dim=1)
    kept = torch.ones(len(chosen), dtype=torch.bool, device=chosen.device)
    kept[at + 1] = right[row, nth].bool()
    return Verified(right.sum(dim=1), kept)
