"""From a plan to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from reference_impl.interfaces import NO_BLOCK, Batch, GroupTables, KVSpec, Request, Row, StepPlan


def build_batch(
    plan: StepPlan, requests: Mapping[str, Request], specs: Sequence[KVSpec], device: torch.device
) -> Batch:
    """Lays the rows of a plan side by side: rows of one token first, of these the longest context first."""
    rows = sorted(plan.rows, key=lambda row: (row.num_tokens > 1, -row.start))
    input_ids: list[int] = []
    positions: list[int] = []
    query_start_loc = [0]
    logits_indices: list[int] = []
    for row in rows:
        end = row.start + row.num_tokens
        input_ids += requests[row.request_id].tokens[row.start : end]
        positions += range(row.start, end)
        query_start_loc.append(len(input_ids))
        if row.samples:
            logits_indices.append(len(input_ids) - 1)
    context_lens = tuple(row.start + row.num_tokens for row in rows)
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        logits_indices=torch.tensor(logits_indices, dtype=torch.int64, device=device),
        request_ids=tuple(row.request_id for row in rows),
        query_lens=tuple(row.num_tokens for row in rows),
        context_lens=context_lens,
        num_decode_rows=sum(row.num_tokens == 1 for row in rows),
        block_size=specs[0].block_size,
        groups=tuple(
            GroupTables(
                spec.window,
                _slot_mapping(rows, [requests[row.request_id].block_tables[g] for row in rows], spec, device),
                _block_table([requests[row.request_id].block_tables[g] for row in rows], context_lens, spec, device),
            )
            for g, spec in enumerate(specs)
        ),
        group_of_layer=group_of_layer(specs),
    )


def group_of_layer(specs: Sequence[KVSpec]) -> tuple[int, ...]:
    """Per layer of the model, the KV group it belongs to."""
    groups = {layer: g for g, spec in enumerate(specs) for layer in spec.layers or range(spec.num_layers)}
    return tuple(groups[layer] for layer in sorted(groups))


def _slot_mapping(rows: Sequence[Row], tables: Sequence[Sequence[int]], spec: KVSpec, device: torch.device) -> Tensor:
    size = spec.block_size
    slots = [
        table[p // size] * size + p % size
        for row, table in zip(rows, tables, strict=True)
        for p in range(row.start, row.start + row.num_tokens)
    ]
    return torch.tensor(slots, dtype=torch.int64, device=device)


def _block_table(
    tables: Sequence[Sequence[int]], context_lens: Sequence[int], spec: KVSpec, device: torch.device
) -> Tensor:
    """[num_rows, max_blocks]; blocks that were given up, and padding, are 0 and never read."""
    width = -(-max(context_lens) // spec.block_size)
    padded = [[*table[:width], *[0] * (width - len(table))] for table in tables]
    if spec.window is not None:
        padded = [[0 if block == NO_BLOCK else block for block in table] for table in padded]
    return torch.tensor(padded, dtype=torch.int32, device=device)
