"""The paged backend: every row reads its own context, through its block table, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from reference_impl.config import EngineConfig
from reference_impl.engine import Engine
from reference_impl.executor.batch import build_batch
from reference_impl.interfaces import Request, Row, SamplingParams, StepPlan
from reference_impl.kernels import reference


def attend_in_pages(model, rows: list[tuple[int, int]], block_size: int, seed: int = 0) -> float:
    """Rows of (query_len, context_len) over shuffled pages full of NaN; returns the worst error against plain rows."""
    c, chance = model.config, random.Random(seed)
    needed = [-(-context // block_size) for _, context in rows]
    engine = Engine(model, EngineConfig(block_size=block_size, num_blocks=sum(needed) + 5))
    cache = engine.kv_cache
    cache.data.fill_(torch.nan)
    ids = chance.sample(range(engine.num_blocks), sum(needed))
    generator = torch.Generator().manual_seed(seed)
    requests, plan, contexts = {}, [], []
    for number, ((query_len, context), blocks) in enumerate(zip(rows, needed, strict=True)):
        name, start = str(number), context - query_len
        requests[name] = Request(name, [0] * context, context, SamplingParams(), 0, 0.0)
        requests[name].block_table, ids = ids[:blocks], ids[blocks:]
        plan.append(Row(name, start, query_len, True))
        kv = torch.randn(2, context, c.num_kv_heads, c.head_dim, generator=generator, dtype=model.dtype)
        contexts.append(kv)
        for position in range(start):  # what earlier steps have written
            slot = requests[name].block_table[position // block_size], position % block_size
            keys, values = cache.layer(1)
            keys[slot], values[slot] = kv[0, position], kv[1, position]
    batch = build_batch(StepPlan(1, tuple(plan)), requests, block_size, torch.device("cpu"))
    q = torch.randn(batch.num_tokens, c.num_heads, c.head_dim, generator=generator, dtype=model.dtype)
    new = [contexts[int(r)][:, -n:] for r, n in zip(batch.request_ids, batch.query_lens, strict=True)]
    k, v = torch.cat(new, dim=1)
    engine.attention.plan(batch)
    found = engine.attention.forward(q, k, v, 1, cache, batch).split(batch.query_lens)
    worst = 0.0
    for name, query, out in zip(batch.request_ids, q.split(batch.query_lens), found, strict=True):
        kv = contexts[int(name)]
        expected = reference.attention_one_row(query, kv[0], kv[1], c.head_dim**-0.5)
        assert out.isfinite().all()
        worst = max(worst, float((out - expected).abs().max()))
    return worst


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(
    "rows",
    [
        [(1, 1)],
        [(1, 40)],
        [(1, 1), (1, 40), (1, 17)],
        [(5, 18), (1, 33), (9, 9), (1, 2), (1, 16)],
        [(12, 46), (3, 3)],
        [(1, 16), (16, 32), (1, 32)],
    ],
    ids=str,
)
def test_each_row_reads_its_own_pages(rows, block_size, random_model) -> None:
    for seed in range(3):
        assert attend_in_pages(random_model("float64"), rows, block_size, seed) < 1e-13


def test_a_single_row_and_a_row_among_others_agree(random_model) -> None:
    """Decode rows are computed together, padded to the longest; one alone takes another path."""
    assert attend_in_pages(random_model("float64"), [(1, 23)], 4) < 1e-13
    assert attend_in_pages(random_model("float64"), [(1, 23), (1, 100)], 4) < 1e-13


def test_new_keys_and_values_land_at_their_slots_and_nowhere_else(random_model) -> None:
    """A cache whose update never writes passes a test of shapes; this looks at the values."""
    model = random_model("float64")
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=6))
    request = Request("0", [0] * 7, 7, SamplingParams(), 0, 0.0)
    request.block_table = [5, 2]
    batch = build_batch(StepPlan(1, (Row("0", 3, 4, True),)), {"0": request}, 4, torch.device("cpu"))
    assert batch.slot_mapping.tolist() == [23, 8, 9, 10]
    k, v = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    engine.kv_cache.write(1, k, v, batch)
    keys, values = engine.kv_cache.layer(1)
    assert torch.equal(keys[5, 3], k[0])
    assert torch.equal(keys[2, :3], k[1:])
    assert torch.equal(values[5, 3], v[0])
    assert torch.equal(values[2, :3], v[1:])
    assert int((engine.kv_cache.data != 0).sum()) == 2 * 4 * 2 * 8
