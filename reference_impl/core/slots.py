"""What a worker keeps of the requests that have a slot: tokens, lengths, block tables, how they are sampled.

A slot here is a request's row in these tables. (A slot of the KV cache, as in slot_mapping, is a token's place in it.)
On the device lie the tokens, [slot, position], how many of them are computed, and per KV group the block tables. A step
changes a few entries and names the slots of its rows; what its batch needs is looked up on the device. So a token that
one step samples is there for the next without the host, and what is copied per step does not grow with the contexts.

Behind the last slot lies one more, for rows that only pad a batch: it has no block, so no keys are written for it, and
what is sampled for it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.sampler import SETTINGS, settings_of
from reference_impl.core.staging import Arrays, to_device
from reference_impl.interfaces import NO_BLOCK, KVSpec, Opened, Step


@dataclass
class _Writes:
    """Entries of a table on the device, to be set in one launch."""

    slot: list[NDArray[np.int64]] = field(default_factory=list)
    column: list[NDArray[np.int64]] = field(default_factory=list)
    value: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, slot: int, start: int, values: Sequence[int] | NDArray[np.int64]) -> None:
        new = np.asarray(values, np.int64)
        self.slot.append(np.full(len(new), slot))
        self.column.append(np.arange(start, start + len(new)))
        self.value.append(new)

    def arrays(self, name: str) -> Arrays:
        parts = {"slot": self.slot, "column": self.column, "value": self.value}
        return {f"{name}.{part}": np.concatenate(found) for part, found in parts.items()} if self.slot else {}


class Slots:
    """The tables of the requests with a slot. num_slots: how many may have one at a time. max_len: positions of a
    request."""

    def __init__(self, num_slots: int, max_len: int, specs: Sequence[KVSpec], device: torch.device):
        self.num_slots, self.specs, self.device = num_slots, specs, device
        self.host: dict[int, Opened] = {}  # with the tokens that the host has
        self.followers: list[Callable[[Step, Sequence[Opened]], None]] = []  # as `WorkerFeature.follow`
        rows = num_slots + 1
        # empty: of the padding slot only the first token is read, of others only what was written
        self.tokens = torch.empty(rows, max_len + 1, dtype=torch.int32, device=device)
        self.tokens[num_slots, 0] = 0
        self.computed = torch.zeros(rows, dtype=torch.int64, device=device)
        blocks = [-(-max_len // spec.block_size) for spec in specs]
        self.tables = [torch.full((rows, n), NO_BLOCK, dtype=torch.int32, device=device) for n in blocks]
        self.settings = np.zeros(rows, SETTINGS)  # on the host

    # --- what a step changes --------------------------------------------------------------------------------------

    def apply(self, step: Step) -> None:
        """Opens, closes and updates slots. ValueError if a slot's number is too high, or `Opened.fork_of` names a slot
        that is not open."""
        if not (step.opened or step.closed or step.appended or step.rewound or step.tables):
            return
        opened = [self._with_all_tokens(new) for new in step.opened]
        for slot in step.closed:
            self.host.pop(slot, None)
        for new in opened:
            self._open(new)
        for more in step.appended:
            self.host[more.slot].tokens.extend(more.tokens)
        self._write(to_device(self._changes(step, opened), self.device))
        if step.opened or step.closed or step.appended:
            for follow in self.followers:
                follow(step, opened)

    def _with_all_tokens(self, new: Opened) -> Opened:
        if new.fork_of is None:
            return new._replace(tokens=new.tokens[:])  # the message stays as it is
        slot, num_tokens = new.fork_of
        parent = self.host.get(slot)
        if parent is None or len(parent.tokens) < num_tokens:
            has = "which is not open" if parent is None else f"of which the host has {len(parent.tokens)}"
            raise ValueError(
                f"request {new.request_id!r} is to begin with {num_tokens} tokens of slot {slot}, {has}: expected one "
                "that was open before this step"
            )
        return new._replace(tokens=parent.tokens[:num_tokens] + new.tokens, fork_of=None)

    def _open(self, new: Opened) -> None:
        """Enters a request in the host's tables. ValueError if the slot's number is too high."""
        if new.slot >= self.num_slots:
            raise ValueError(
                f"request {new.request_id!r} is to have slot {new.slot}; this worker has {self.num_slots}: "
                "the scheduler lets more requests run than max_num_seqs, or takes blocks away without naming whose "
                "in StepPlan.preempted"
            )
        self.host[new.slot] = new
        self.settings[new.slot] = settings_of(new.sampling, new.seed, new.sample_index)

    def _changes(self, step: Step, opened: Sequence[Opened]) -> Arrays:
        """The arrays that `_write` sets on the device."""
        tokens, arrays = _Writes(), Arrays()
        for new in opened:
            tokens.add(new.slot, 0, np.frombuffer(new.tokens, np.int64).copy())
        for more in step.appended:
            tokens.add(more.slot, more.start, more.tokens)
        if opened:
            arrays["opened"] = np.array([new.slot for new in opened])
        if moved := [*((new.slot, new.num_computed_tokens) for new in opened), *step.rewound]:
            arrays["moved"], arrays["computed"] = np.array(moved).T.copy()
        arrays |= tokens.arrays("tokens")
        for group in range(len(self.specs)):
            writes = _Writes()
            for update in step.tables:
                if update.group == group:
                    writes.add(update.slot, update.start, update.blocks)
            arrays |= writes.arrays(f"table.{group}")
        return arrays

    def _write(self, t: Mapping[str, Tensor]) -> None:
        if "moved" in t:
            self.computed[t["moved"]] = t["computed"]
        if "opened" in t:
            for table in self.tables:
                table.index_fill_(0, t["opened"], NO_BLOCK)
        tables = {"tokens": self.tokens, **{f"table.{g}": table for g, table in enumerate(self.tables)}}
        for name, table in tables.items():
            if f"{name}.slot" in t:
                table[t[f"{name}.slot"], t[f"{name}.column"]] = t[f"{name}.value"].int()

    # --- what a step reads, and writes while it runs ---------------------------------------------------------------

    def look_up(self, t: Mapping[str, Tensor], longest: int) -> dict[str, Tensor]:
        """The fields of a `Batch` that depend on the slots of its rows, and "sample_positions" [logits], the position
        of the token that is sampled from each of the logits. Launches kernels only, and waits for nothing. Rows that
        pad read the slot behind the last one.

        t: slots, query_lens [rows]; for each token its slot, its place in the row and, in a tree, how far its position
        is before that: token_slots, offset, lag [tokens]; sampling_slots, sampling_lens [logits], unless each row has
        logits at its last token alone. longest: positions of the longest context, at least.
        """
        slot = t["token_slots"]
        at = self.computed.index_select(0, slot) + t["offset"]  # half the time of computed[slot], with one row
        ends = self.computed.index_select(0, t["slots"]) + t["query_lens"]
        positions = at - t["lag"] if "lag" in t else at
        found = {"input_ids": self.tokens[slot, at].long(), "positions": positions, "seq_lens": ends.int()}
        found["sample_positions"] = ends
        if "sampling_slots" in t:
            found["sample_positions"] = self.computed.index_select(0, t["sampling_slots"]) + t["sampling_lens"]
        for g, (spec, table) in enumerate(zip(self.specs, self.tables, strict=True)):
            size = spec.block_size
            found[f"slot_mapping.{g}"] = table[slot, at // size].long() * size + at % size  # < 0: there is no block
            found[f"block_table.{g}"] = table[t["slots"], : -(-longest // size)].clamp(min=0)
        return found

    def put(self, t: Mapping[str, Tensor], tokens: Tensor) -> None:
        """Writes the sampled tokens [logits], each at its sample position. What the host appends to a held request
        overwrites it. t: with what was looked up."""
        slots = t["sampling_slots"] if "sampling_slots" in t else t["slots"]
        self.tokens.index_put_((slots, t["sample_positions"]), tokens.int())

    def advance(self, t: Mapping[str, Tensor]) -> None:
        """Adds the rows' lengths to what is computed: kernels launched from here on see the new lengths."""
        self.computed.index_add_(0, t["slots"], t["query_lens"])
