"""The arrays of a step against the same written plainly, and their way to the device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_impl.assembly.batch import build_batch
from reference_impl.core.staging import Layout, packed, to_device
from reference_impl.interfaces import NO_BLOCK, KVSpec, Request, Row, SamplingParams, StepPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepPlan, dict[str, Request], list[KVSpec]]:
    size, windows = draw(st.sampled_from([1, 3, 4, 16])), draw(st.sampled_from([(None,), (5,), (None, 5)]))
    chance, requests, rows = random.Random(draw(st.integers(0, 10**6))), {}, []
    decodes = draw(st.booleans())  # all rows: most steps of an engine are so
    for i in range(draw(st.integers(1, 6))):
        start, num = draw(st.integers(0, 40)), 1 if decodes else draw(st.one_of(st.just(1), st.integers(1, 20)))
        known = start + num + (0 if decodes else draw(st.sampled_from([0, 0, 7])))
        tables = []
        for window in windows:
            table = [chance.randrange(2**27) for _ in range(-(-known // size) + draw(st.integers(0, 3)))]
            gone = 0 if window is None else max(0, start - window + 1) // size
            table[:gone] = [NO_BLOCK] * gone
            tables.append(table)
        tokens = [chance.randrange(1000) for _ in range(known)]
        requests[f"r{i}"] = Request(f"r{i}", tokens, known, SamplingParams(), 0, 0.0, block_tables=tables)
        rows.append(Row(f"r{i}", start, num, known == start + num))
    return (
        StepPlan(1, tuple(rows)),
        requests,
        [KVSpec(1, 1, 4, size, bits_per_value=32, layers=(g,), window=w) for g, w in enumerate(windows)],
    )


@given(step=steps())
def test_the_batch_is_the_plain_one(step: tuple[StepPlan, dict[str, Request], list[KVSpec]]) -> None:
    plan, requests, specs = step
    rows = sorted(plan.rows, key=lambda row: (row.num_tokens, -row.start))
    batch = build_batch(plan, requests, specs, DEVICE)
    tokens = [(requests[row.request_id], p) for row in rows for p in range(row.start, row.start + row.num_tokens)]
    ends = np.cumsum([row.num_tokens for row in rows]).tolist()
    longest = max(row.start + row.num_tokens for row in rows)
    expected: dict[str, Any] = {
        "input_ids": (torch.int64, [r.tokens[p] for r, p in tokens]),
        "positions": (torch.int64, [p for _, p in tokens]),
        "query_start_loc": (torch.int32, [0, *ends]),
        "seq_lens": (torch.int32, [row.start + row.num_tokens for row in rows]),
        "logits_indices": (torch.int64, [end - 1 for row, end in zip(rows, ends, strict=True) if row.samples]),
    }
    for name, (dtype, values) in expected.items():
        found = getattr(batch, name)
        assert (found.dtype, found.tolist(), found.device.type) == (dtype, values, DEVICE.type), name
    assert batch.request_ids == tuple(row.request_id for row in rows)
    assert batch.query_lens == tuple(row.num_tokens for row in rows)
    assert batch.context_lens == tuple(row.start + row.num_tokens for row in rows)
    assert batch.num_decode_rows == sum(row.num_tokens == 1 for row in rows)
    for g, (spec, group) in enumerate(zip(specs, batch.groups, strict=True)):
        size, width = spec.block_size, -(-longest // spec.block_size)
        slots = [r.block_tables[g][p // size] * size + p % size for r, p in tokens]
        assert (group.slot_mapping.dtype, group.slot_mapping.tolist()) == (torch.int64, slots)
        assert group.block_table.shape == (len(rows), width)
        assert group.block_table.dtype is torch.int32
        for row, found in zip(rows, group.block_table.tolist(), strict=True):
            table = requests[row.request_id].block_tables[g]
            held = -(-(row.start + row.num_tokens) // size)
            assert found[:held] == [max(block, 0) for block in table[:held]]
            assert all(block >= 0 for block in found)


def test_a_table_that_is_too_short_is_an_error_that_says_whose() -> None:
    """Zero behind its end would be block 0, which is somebody's."""
    requests = {
        name: Request(name, [1] * 9, 9, SamplingParams(), 0, 0.0, block_tables=[table])
        for name, table in (("long", [3, 4, 5]), ("short", [1, 2]))
    }
    plan = StepPlan(1, (Row("long", 8, 1, True), Row("short", 8, 1, True)))
    with pytest.raises(IndexError, match="'short' holds 2 blocks; its step ends at position 9, which takes 3 of 4"):
        build_batch(plan, requests, [KVSpec(1, 1, 4, 4, bits_per_value=32)], DEVICE)


ARRAYS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.tuples(
        st.sampled_from([np.int64, np.int32, np.float32, np.float64, np.bool_]),
        st.lists(st.integers(0, 5), min_size=1, max_size=2),
    ),
    min_size=1,
)


@given(described=ARRAYS)
def test_arrays_arrive_as_they_are_in_one_piece(described: dict[str, Any]) -> None:
    chance = np.random.default_rng(0)
    arrays = {name: chance.integers(0, 2, shape).astype(dtype) for name, (dtype, shape) in described.items()}
    layout = Layout.of(arrays)
    in_one_piece = layout.views(packed(arrays, layout, pinned=False).to(DEVICE))
    for tensors in (in_one_piece, to_device(arrays, DEVICE)):
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            found = tensors[name].cpu().numpy()
            assert found.dtype == array.dtype
            assert np.array_equal(found, array)
    starts = {start for *_, start, _ in layout.sections}
    assert all(start % 16 == 0 for start in starts), "kernels are compiled for aligned pointers"
    assert len({t.untyped_storage().data_ptr() for t in in_one_piece.values() if t.numel()}) <= 1
