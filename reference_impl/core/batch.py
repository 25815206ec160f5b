"""From a step's rows to the tensors of a batch: a few arrays from the host, the rest looked up on the device."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.core.sampler import SETTINGS, Settings
from reference_impl.core.slots import Slots
from reference_impl.core.staging import Arrays, to_device
from reference_impl.interfaces import Batch, GroupTables, KVSpec, StepRow

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class HostBatch:
    """A step's rows in the order in which they are computed. arrays: what `Slots` looks up and writes by, and the
    fields of `Batch` that do not depend on the slots."""

    arrays: Arrays
    slots: tuple[int, ...]  # [rows]
    request_ids: tuple[str, ...]  # [rows]
    query_lens: tuple[int, ...]  # [rows]
    context_lens: tuple[int, ...]  # [rows]
    order: tuple[int, ...]  # [rows], the row's place in the step
    sampling: tuple[int, ...]  # [logits], which of the rows is sampled from them
    lengths: Ints  # [logits], how many tokens the row's request has there
    settings: Settings  # [logits]
    drafts: tuple[int, ...] = ()  # [rows], how many of its tokens are draft tokens; () where no row has any

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The arrays as tensors. On a CPU they share the arrays' memory, so neither may be changed afterwards."""
        if device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return to_device(self.arrays, device)


NO_ROWS = HostBatch({}, (), (), (), (), (), (), np.zeros(0, np.int64), np.zeros(0, SETTINGS))


def lay_out(rows: Sequence[StepRow], slots: Slots) -> HostBatch:
    """The rows in the order of a batch: those with fewer tokens first, among equals the longest context first."""
    if not rows:
        return NO_ROWS
    of_row, starts, num_tokens, samples, num_drafts, _ = zip(*rows, strict=True)
    if any(num_drafts) or not num_tokens.count(1) == samples.count(True) == len(rows):
        return ragged(rows, slots)
    # Most steps: every row has one token, and samples behind it. A third of the time of `ragged`.
    start = np.array(starts)
    order = np.argsort(-start, kind="stable")
    slot, lengths, number = np.array(of_row)[order], start[order] + 1, np.arange(len(rows) + 1)
    arrays: Arrays = {
        "slots": slot,
        "query_lens": np.ones(len(rows), np.int64),
        "token_slots": slot,
        "offset": np.zeros(len(rows), np.int64),
        "query_start_loc": number.astype(np.int32),
        "logits_indices": number[:-1],
    }
    return HostBatch(
        arrays, ids := tuple(slot.tolist()), tuple([slots.host[slot].request_id for slot in ids]), (1,) * len(rows),
        tuple(lengths.tolist()), tuple(order.tolist()), tuple(range(len(rows))), lengths, slots.settings[slot],
    )  # fmt: skip


def ragged(rows: Sequence[StepRow], slots: Slots, order: Ints | None = None) -> HostBatch:
    """`lay_out` for rows of any length. order: see `HostBatch`, in place of its own; rows of one token come first."""
    *columns, _ = zip(*rows, strict=True)
    slot, start, num_tokens, samples, num_drafts = map(np.array, columns)  # [rows] each
    length = num_tokens + num_drafts
    order = np.lexsort((-start, length)) if order is None else order
    slot, start, length, num_drafts = slot[order], start[order], length[order], num_drafts[order]
    query_start_loc = np.concatenate(([0], np.cumsum(length)))
    row = np.repeat(np.arange(len(slot)), length)  # of each token
    offset = np.arange(len(row)) - query_start_loc[row]
    # A row that samples has logits at its last known token, and at each draft behind it.
    (indices,) = (samples[order][row] & (offset >= (length - num_drafts - 1)[row])).nonzero()
    sampling, lens = row[indices], offset[indices] + 1
    arrays: Arrays = {
        "slots": slot,
        "query_lens": length,
        "token_slots": slot[row],
        "offset": offset,
        "query_start_loc": query_start_loc.astype(np.int32),
        "logits_indices": indices,
    }
    drafts = tuple(num_drafts.tolist()) if num_drafts.any() else ()
    if drafts or len(sampling) < len(slot):
        arrays |= {"sampling_slots": slot[sampling], "sampling_lens": lens}
    return HostBatch(
        arrays, ids := tuple(slot.tolist()), tuple([slots.host[slot].request_id for slot in ids]),
        tuple(length.tolist()), tuple((start + length).tolist()), tuple(order.tolist()), tuple(sampling.tolist()),
        start[sampling] + lens, slots.settings[slot[sampling]], drafts,
    )  # fmt: skip


def as_batch(host: HostBatch, tensors: Mapping[str, Tensor], specs: Sequence[KVSpec]) -> Batch:
    """The `Batch` of these rows. tensors: host.arrays on the device, and what `Slots.look_up` found."""
    return Batch(
        input_ids=tensors["input_ids"],
        positions=tensors["positions"],
        query_start_loc=tensors["query_start_loc"],
        seq_lens=tensors["seq_lens"],
        logits_indices=tensors["logits_indices"],
        request_ids=host.request_ids,
        query_lens=host.query_lens,
        context_lens=host.context_lens,
        num_decode_rows=host.query_lens.count(1),
        block_size=specs[0].block_size,
        groups=tuple(
            GroupTables(spec.window, tensors[f"slot_mapping.{g}"], tensors[f"block_table.{g}"])
            for g, spec in enumerate(specs)
        ),
        group_of_layer=group_of_layer(tuple(specs)),
        ancestors=tensors.get("ancestors"),
    )


@functools.lru_cache(maxsize=64)
def group_of_layer(specs: tuple[KVSpec, ...]) -> tuple[int, ...]:
    """The KV group that each layer of the model belongs to, by its number; 0 for one that another stage has."""
    groups = {layer: g for g, spec in enumerate(specs) for layer in spec.layers or range(spec.num_layers)}
    return tuple(groups.get(layer, 0) for layer in range(max(groups) + 1))
