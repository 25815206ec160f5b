"""From a plan to tensors: first arrays on the host, then one copy to the device."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_impl.interfaces import Batch, GroupTables, KVSpec, Request, StepPlan
from reference_impl.staging import to_device

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class HostBatch:
    """A batch on the host. arrays: as the fields of `Batch`, and of KV group g slot_mapping.g and block_table.g."""

    arrays: Arrays
    request_ids: tuple[str, ...]
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    samples: tuple[bool, ...]

    @property
    def sampling_ids(self) -> list[str]:
        return [request_id for request_id, samples in zip(self.request_ids, self.samples, strict=True) if samples]


def build_batch(
    plan: StepPlan, requests: Mapping[str, Request], specs: Sequence[KVSpec], device: torch.device
) -> Batch:
    """Lays the rows of a plan side by side: rows of one token first, of these the longest context first."""
    host = lay_out(plan, requests, specs)
    return as_batch(host, to_device(host.arrays, device), specs)


def lay_out(plan: StepPlan, requests: Mapping[str, Request], specs: Sequence[KVSpec]) -> HostBatch:
    """All that a step needs of its requests, which may change afterwards."""
    rows = sorted(plan.rows, key=lambda row: (row.num_tokens > 1, -row.start))
    ids, starts, lens, samples = zip(*rows, strict=True)
    who = [requests[request_id] for request_id in ids]
    tokens: list[int] = []
    for request, start, length in zip(who, starts, lens, strict=True):
        tokens += request.tokens[start : start + length]
    start, length = np.array(starts, np.int64), np.array(lens, np.int64)
    query_start_loc = np.concatenate(([0], np.cumsum(length)))
    owner = np.repeat(np.arange(len(rows)), length)  # of each token, its row
    positions = np.arange(len(owner)) + (start - query_start_loc[:-1])[owner]
    arrays: Arrays = {
        "input_ids": np.array(tokens, np.int64),
        "positions": positions,
        "query_start_loc": query_start_loc.astype(np.int32),
        "seq_lens": (start + length).astype(np.int32),
        "logits_indices": query_start_loc[1:][np.array(samples)] - 1,
    }
    for g, spec in enumerate(specs):
        table = _block_table([request.block_tables[g] for request in who], start + length, spec.block_size, ids)
        block = table[owner, positions // spec.block_size].astype(np.int64)
        arrays[f"slot_mapping.{g}"] = block * spec.block_size + positions % spec.block_size
        arrays[f"block_table.{g}"] = np.maximum(table, 0)  # blocks that were given up are never read
    return HostBatch(arrays, ids, lens, tuple((start + length).tolist()), samples)


def _block_table(
    tables: Sequence[list[int]], ends: NDArray[np.int64], block_size: int, ids: Sequence[str]
) -> NDArray[np.int32]:
    """[rows, blocks of the longest context] from tables of any length; 0 behind a row's last block."""
    needed, held = -(-ends // block_size), np.array([len(table) for table in tables])
    if (held < needed).any():
        row = int((held < needed).argmax())
        raise IndexError(
            f"request {ids[row]!r} holds {held[row]} blocks; its step ends at position {ends[row]}, which takes "
            f"{needed[row]} of {block_size} tokens: KVManager.reserve and admit must give them before"
        )
    flat = array("i")  # takes a list in half the time that NumPy needs
    for table in tables:
        flat.fromlist(table)
    padded = np.zeros((len(tables), held.max()), np.int32)
    padded[np.arange(padded.shape[1]) < held[:, None]] = np.frombuffer(flat, np.int32)
    return padded[:, : needed.max()]


def as_batch(host: HostBatch, tensors: Mapping[str, Tensor], specs: Sequence[KVSpec]) -> Batch:
    """tensors: host.arrays on the device."""
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
        group_of_layer=group_of_layer(specs),
    )


def group_of_layer(specs: Sequence[KVSpec]) -> tuple[int, ...]:
    """Per layer of the model, the KV group it belongs to."""
    groups = {layer: g for g, spec in enumerate(specs) for layer in spec.layers or range(spec.num_layers)}
    return tuple(groups[layer] for layer in sorted(groups))
