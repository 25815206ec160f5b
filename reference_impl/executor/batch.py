"""From a plan to tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from reference_impl.interfaces import Batch, Request, StepPlan


def build_batch(
    plan: StepPlan,
    requests: Mapping[str, Request],
    block_size: int,
    device: torch.device,
) -> Batch:
    """Lays the rows of a plan side by side: rows of one token first, of these the longest context first."""
    rows = sorted(plan.rows, key=lambda row: (row.num_tokens > 1, -row.start))
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    logits_indices: list[int] = []
    for row in rows:
        request = requests[row.request_id]
        end = row.start + row.num_tokens
        input_ids += request.tokens[row.start : end]
        positions += range(row.start, end)
        table = request.block_table
        slots += [table[p // block_size] * block_size + p % block_size for p in range(row.start, end)]
        query_start_loc.append(len(input_ids))
        if row.samples:
            logits_indices.append(len(input_ids) - 1)
    context_lens = tuple(row.start + row.num_tokens for row in rows)
    width = max(-(-n // block_size) for n in context_lens)
    tables = [requests[row.request_id].block_table[:width] for row in rows]

    def tensor(values: list[int] | tuple[int, ...] | list[list[int]], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Batch(
        input_ids=tensor(input_ids, torch.int64),
        positions=tensor(positions, torch.int64),
        query_start_loc=tensor(query_start_loc, torch.int32),
        seq_lens=tensor(context_lens, torch.int32),
        slot_mapping=tensor(slots, torch.int64),
        block_table=tensor([table + [0] * (width - len(table)) for table in tables], torch.int32),
        logits_indices=tensor(logits_indices, torch.int64),
        request_ids=tuple(row.request_id for row in rows),
        query_lens=tuple(row.num_tokens for row in rows),
        context_lens=context_lens,
        num_decode_rows=sum(row.num_tokens == 1 for row in rows),
        block_size=block_size,
    )
