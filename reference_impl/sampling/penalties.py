"""Repetition (CTRL, Keskar et al. 2019), presence and frequency penalties, on the device.

The host may not know a request's last token yet, the device does. So the host says which tokens a request has before
its last one, and the device adds that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.interfaces import Request
from reference_impl.staging import to_device


@dataclass(frozen=True)
class Penalties:
    """Of the rows that have any, P of them.

    rows [P]; repetition, presence, frequency [P] float64; last_counts [P]: 1 where the last token is of the output.
    Their tokens but the last, one after another: owner (which of the P), token, counts (1 if of the output).
    """

    arrays: Mapping[str, NDArray[Any]]


def read_penalties(requests: Sequence[Request]) -> Penalties | None:
    found = [
        (row, r, r.sampling) for row, r in enumerate(requests)
        if r.sampling.repetition_penalty != 1 or r.sampling.presence_penalty or r.sampling.frequency_penalty
    ]  # fmt: skip
    if not found:
        return None
    known = [np.array(r.tokens[:-1], np.int64) for _, r, _ in found]
    outputs = [np.arange(len(tokens)) >= r.num_prompt_tokens for tokens, (_, r, _) in zip(known, found, strict=True)]
    return Penalties(
        {
            "rows": np.array([row for row, _, _ in found], np.int64),
            "repetition": np.array([p.repetition_penalty for _, _, p in found]),
            "presence": np.array([p.presence_penalty for _, _, p in found]),
            "frequency": np.array([p.frequency_penalty for _, _, p in found]),
            "last_counts": np.array([r.num_tokens > r.num_prompt_tokens for _, r, _ in found], np.float64),
            "owner": np.repeat(np.arange(len(found)), [len(tokens) for tokens in known]),
            "token": np.concatenate(known),
            "counts": np.concatenate(outputs).astype(np.float64),
        }
    )


def penalised(logits: Tensor, penalties: Penalties | None, last_tokens: Tensor) -> Tensor:
    """A new tensor, in float32 at least, where there are penalties. logits [rows, vocab_size], last_tokens [rows].

    Divided (multiplied, if negative) by the repetition penalty where a token was seen; then less the presence penalty
    where it was written, and less the frequency penalty as often as it was.
    """
    if penalties is None:
        return logits
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    t = to_device(penalties.arrays, logits.device)
    rows, vocab_size = t["rows"], scores.shape[1]

    def column(name: str) -> Tensor:
        return t[name].to(scores.dtype)[:, None]

    at = torch.cat((t["owner"] * vocab_size + t["token"], _first(rows, vocab_size) + last_tokens[rows]))
    nothing = scores.new_zeros(rows.numel() * vocab_size)
    seen = nothing.index_fill(0, at, 1).view(-1, vocab_size)
    # Whole numbers: their sum is the same in any order.
    count = nothing.scatter_add(0, at, torch.cat((t["counts"], t["last_counts"])).to(scores.dtype)).view_as(seen)
    s, repetition = scores.index_select(0, rows), column("repetition")
    s = torch.where((seen > 0) & (repetition != 1), torch.where(s > 0, s / repetition, s * repetition), s)
    s = torch.where(count > 0, s - (column("presence") + column("frequency") * count), s)
    return scores.index_copy_(0, rows, s)


def _first(rows: Tensor, vocab_size: int) -> Tensor:
    """Where each of the P rows begins in a flat [P * vocab_size]."""
    return torch.arange(rows.numel(), device=rows.device) * vocab_size
