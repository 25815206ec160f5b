"""Each request's lookahead window, and the n-grams that its iterations gave (`lookahead.py`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.staging import to_device
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.interfaces import Opened, Step

POOLED = 256  # n-grams of a request that are kept, the newest
NOTHING = -1  # in place of an n-gram's tokens


class Lookahead:
    """A window and a pool for each slot of a worker, on the device. It follows `Slots`."""

    def __init__(self, shape: Shape, num_slots: int, device: torch.device):
        self.shape, rows, n = shape, num_slots + 1, shape.length
        self.window = torch.zeros(rows, n - 1, shape.columns, dtype=torch.int64, device=device)
        self.pool = torch.full((rows, POOLED, n), NOTHING, device=device)
        self.begin = torch.zeros(rows, dtype=torch.int64, device=device)  # where the next n-gram goes
        self.source = torch.tensor(shape.source, device=device)

    def follow(self, step: Step, opened: Sequence[Opened]) -> None:
        if not opened:
            return
        levels, columns = self.window.shape[1:]
        last = [np.frombuffer(new.tokens, np.int64)[-levels * columns :] for new in opened]
        window = np.stack([np.resize(tokens, (levels, columns)) for tokens in last])
        arrays = {"slots": np.array([new.slot for new in opened]), "window": window}
        t = to_device(arrays, self.window.device)
        self.window[t["slots"]] = t["window"]
        self.pool[t["slots"]] = NOTHING
        self.begin[t["slots"]] = 0

    def propose(self, slots: Tensor, last: Tensor) -> Tensor:
        """The drafts, [rows, nodes] int64. slots [rows]; last [rows]: the last known tokens. Where the pool has too few
        n-grams, the other candidates consist of token 0."""
        pool, place = self.pool[slots], torch.arange(POOLED, device=slots.device)
        age = (self.begin[slots][:, None] - 1 - place) % POOLED
        rank, at = torch.where(pool[:, :, 0] == last[:, None], age, POOLED).sort(dim=1, stable=True)
        rank, at = rank[:, : self.shape.candidates, None], at[:, : self.shape.candidates, None]
        found = torch.where(rank < POOLED, pool.take_along_dim(at, 1)[:, :, 1:], 0)
        return torch.cat((self.window[slots].flatten(1), found.flatten(1)), 1)[:, self.source]

    def iterate(self, slots: Tensor, newest: Tensor, num_kept: Tensor) -> None:
        """Updates windows and pools after a step. slots [rows]; newest [rows, columns]: what follows the newest level's
        tokens; num_kept [rows]: how many drafts were kept."""
        rows, columns = newest.shape
        grams = torch.cat((self.window[slots], newest[:, None]), 1).mT  # [rows, columns, length]
        pool, place = self.pool[slots], torch.arange(columns, device=slots.device)
        known = (pool[:, :, None] == grams[:, None]).all(3).any(2)  # as new again
        again = (grams[:, :, None] == grams[:, None]).all(3).triu(1).any(2)
        pool = pool.masked_fill(known[:, :, None], NOTHING)
        at = (self.begin[slots][:, None] + place) % POOLED
        pool[torch.arange(rows, device=slots.device)[:, None], at] = grams.masked_fill(again[:, :, None], NOTHING)
        self.pool[slots], self.begin[slots] = pool, (self.begin[slots] + columns) % POOLED
        moved = (place + num_kept[:, None]).clamp(max=columns - 1)
        self.window[slots] = grams[:, :, 1:].take_along_dim(moved[:, :, None], 1).mT
