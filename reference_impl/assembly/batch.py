"""A batch without a worker, to measure or to look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from reference_impl.core.batch import as_batch, lay_out
from reference_impl.core.planner import Planner
from reference_impl.core.slots import Slots
from reference_impl.interfaces import Batch, KVSpec, Request, StepPlan, StepRow


def build_batch(
    plan: StepPlan, requests: Mapping[str, Request], specs: Sequence[KVSpec], device: torch.device
) -> Batch:
    """The batch of one plan, as an engine's worker would build it. requests: by id, all that the plan has rows for."""
    size, asked = specs[0].block_size, [requests[row.request_id] for row in plan.rows]
    longest = max(max(r.num_tokens, *(len(table) * size for table in r.block_tables)) for r in asked)
    slots = Slots(len(plan.rows), longest, specs, device)
    step = Planner(size).step(plan, requests)
    slots.apply(step)
    return batch_of(step.rows, slots)


def batch_of(rows: Sequence[StepRow], slots: Slots) -> Batch:
    """The batch of rows whose slots are open; the slots stay as they are."""
    host = lay_out(rows, slots)
    tensors = host.on(slots.device)
    return as_batch(host, {**tensors, **slots.look_up(tensors, max(host.context_lens))}, slots.specs)
