"""From a step to tensors: a few arrays on the host, one copy to the device, and there the rest is looked up."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.executor.slots import Slots
from reference_impl.interfaces import Batch, GroupTables, KVSpec, Request, StepPlan, StepRow
from reference_impl.planner import Planner
from reference_impl.staging import Arrays, to_device


@dataclass(frozen=True)
class HostBatch:
    """A step's rows in the order in which they are computed. arrays: what `Slots` looks up and
    writes by, and the fields of `Batch` that do not depend on the slots."""

    arrays: Arrays
    slots: tuple[int, ...]  # [rows], as all that follow
    request_ids: tuple[str, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    order: tuple[int, ...]  # the row's place in the step
    sampling: tuple[int, ...]  # which of the rows sample
    drafts: tuple[int, ...] = ()  # of each row how many; () where no row has any
    given: tuple[int, ...] = ()  # the drafts of all rows that sample, one after another, if the step names them


def lay_out(rows: Sequence[StepRow], slots: Slots) -> HostBatch:
    """Side by side: rows of one token first, of these the longest context first."""
    *columns, num_drafts, named = zip(*rows, strict=True)
    of_row, start, length, samples = columns
    if length.count(1) == len(rows) == samples.count(True) and not any(num_drafts):
        return _decoding(np.array(of_row), np.array(start), slots)
    return _ragged(np.array(of_row), np.array(start), np.array(length), np.array(samples), num_drafts, named, slots)


def _decoding(of_row: NDArray[np.int64], start: NDArray[np.int64], slots: Slots) -> HostBatch:
    """`lay_out` of rows of one token each, all of which sample: most steps are made of these."""
    num_rows, order = len(of_row), np.argsort(-start, kind="stable")
    of_row, number = of_row[order], np.arange(num_rows + 1)
    arrays: Arrays = {
        "slots": of_row,
        "query_lens": np.ones(num_rows, np.int64),
        "token_slots": of_row,
        "offset": np.zeros(num_rows, np.int64),
        "query_start_loc": number.astype(np.int32),
        "logits_indices": number[:-1],
    }
    ids = tuple(of_row.tolist())
    names = tuple([slots.host[slot].id for slot in ids])
    context_lens = tuple((start[order] + 1).tolist())
    return HostBatch(arrays, ids, names, (1,) * num_rows, context_lens, tuple(order.tolist()), tuple(range(num_rows)))


def _ragged(
    of_row: NDArray[np.int64], start: NDArray[np.int64], length: NDArray[np.int64], samples: NDArray[np.bool_],
    num_drafts: Sequence[int], named: Sequence[tuple[int, ...]], slots: Slots,
) -> HostBatch:  # fmt: skip
    drafts = np.array(num_drafts) if any(num_drafts) else None
    if drafts is not None:
        length = length + drafts
    order = np.lexsort((-start, length > 1))
    of_row, start, length, samples = of_row[order], start[order], length[order], samples[order]
    (sampling,) = samples.nonzero()
    query_start_loc = np.concatenate(([0], np.cumsum(length)))
    arrays: Arrays = {
        "slots": of_row,
        "query_lens": length,
        "token_slots": np.repeat(of_row, length),
        "offset": np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], length),
        "query_start_loc": query_start_loc.astype(np.int32),
        "logits_indices": query_start_loc[1:][sampling] - 1,
    }
    if len(sampling) < len(of_row):
        arrays |= {"sampling_slots": of_row[sampling], "sampling_lens": length[sampling]}
    verified: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    if drafts is not None:
        drafts = drafts[order]
        verified = tuple(drafts.tolist())
        given = tuple([token for at in sampling for token in named[order[at]]])
        # A row that samples has logits at its last known token, and at each draft.
        behind = [length[row] - drafts[row] + np.arange(drafts[row] + 1) for row in sampling]
        of_logits = np.repeat(sampling, drafts[sampling] + 1)
        lens = np.concatenate(behind) if behind else np.zeros(0, np.int64)
        arrays |= {
            "logits_indices": query_start_loc[of_logits] + lens - 1,
            "sampling_slots": of_row[of_logits],
            "sampling_lens": lens,
        }
    ids = tuple(of_row.tolist())
    return HostBatch(
        arrays, ids, tuple([slots.host[slot].id for slot in ids]), tuple(length.tolist()),
        tuple((start + length).tolist()), tuple(order.tolist()), tuple(sampling.tolist()), verified,
        given,
    )  # fmt: skip


def as_batch(host: HostBatch, tensors: Mapping[str, Tensor], specs: Sequence[KVSpec]) -> Batch:
    """tensors: host.arrays on the device, and what `Slots.look_up` found."""
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
    )


def build_batch(
    plan: StepPlan, requests: Mapping[str, Request], specs: Sequence[KVSpec], device: torch.device
) -> Batch:
    """The batch of a single plan, as an engine's worker would build it."""
    size, asked = specs[0].block_size, [requests[row.request_id] for row in plan.rows]
    longest = max(max(r.num_tokens, *(len(table) * size for table in r.block_tables)) for r in asked)
    slots = Slots(len(plan.rows), longest, specs, device)
    step = Planner(size).step(plan, requests)
    slots.apply(step)
    return batch_of(step.rows, slots)


def batch_of(rows: Sequence[StepRow], slots: Slots) -> Batch:
    """The batch of rows whose slots are open. Changes nothing."""
    host = lay_out(rows, slots)
    tensors = to_device(host.arrays, slots.device)
    return as_batch(host, {**tensors, **slots.look_up(tensors, max(host.context_lens))}, slots.specs)


@functools.lru_cache(maxsize=64)
def group_of_layer(specs: tuple[KVSpec, ...]) -> tuple[int, ...]:
    """Per layer of the model, the KV group it belongs to."""
    groups = {layer: g for g, spec in enumerate(specs) for layer in spec.layers or range(spec.num_layers)}
    return tuple(groups[layer] for layer in sorted(groups))
