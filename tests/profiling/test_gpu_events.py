"""Kernels of a GPU, in the structure in which torch's profiler writes them: which are ours, and what they do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reference_impl.bench.profiling.events import Call, Entry, read
from reference_impl.bench.profiling.explain import OURS, Machine, explain, kind_of
from reference_impl.bench.profiling.labels import PREFIX
from reference_impl.bench.profiling.work import Work
from tests.kernels.compile_table import TABLE

MACHINE = Machine(bandwidth=4e12, rate=8e14, smallest=2e-6)
WORK = {
    "qkv": Work(8e9, 8e8, 2, "the product that makes queries, keys and values"),
    "lm_head": Work(1e9, 1e8, 1, "the lm_head"),
    "attention": Work(1e9, 4e8, 2, "attention"),
    "norm": Work(1e6, 2e6, 4, "the norm"),
}


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(number: int, ts: float) -> dict[str, Any]:
    return event("cuLaunchKernelEx", "cuda_driver", ts, 2, correlation=number)


def kernel(name: str, number: int, ts: float, dur: float) -> dict[str, Any]:
    return event(name, "kernel", ts, dur, tid=7, correlation=number, stream=7, **{"External id": number})


def mark(label: str, ts: float, dur: float) -> dict[str, Any]:
    return event(PREFIX + label, "user_annotation", ts, dur)


# One step of two layers, launched one by one; kernels run later than what launched them, and after the step.
EAGER = [
    mark("smallest operator", 0, 50), launch(1, 10), launch(2, 20),
    kernel("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", 1, 12, 2),
    kernel("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)", 2, 22, 2),
    mark("step 0", 100, 900), mark("submit", 110, 800), mark("model", 120, 700),
    mark("qkv", 130, 30), event("aten::mm", "cpu_op", 135, 20), launch(3, 140), kernel("nvjet_tst_64x8", 3, 200, 300),
    mark("attention", 170, 50), launch(4, 180), kernel("_paged_decode", 4, 500, 150),
    launch(5, 190), kernel("_merge", 5, 650, 10),
    mark("qkv", 230, 30), event("aten::mm", "cpu_op", 235, 20), launch(6, 240), kernel("nvjet_tst_64x8", 6, 660, 300),
    mark("attention", 270, 50), launch(7, 280), kernel("_paged_decode", 7, 960, 150),
    mark("norm", 330, 20), launch(8, 335), kernel("_rms_norm", 8, 1110, 20),
    event("ncclThing", "kernel", 1120, 20, tid=9, correlation=999),
]  # fmt: skip


def test_kernels_belong_to_what_launched_them() -> None:
    found = read({"traceEvents": EAGER}, gpu=True)
    entries = {(e.name, e.label): e for e in found.entries()}
    assert set(entries) == {
        ("nvjet_tst_64x8", "qkv"), ("_paged_decode", "attention"), ("_merge", "attention"), ("_rms_norm", "norm"),
    }  # fmt: skip
    assert entries["nvjet_tst_64x8", "qkv"].seconds == pytest.approx(600e-6)
    assert found.smallest == pytest.approx(2e-6)
    assert found.steps == [(pytest.approx(100e-6), pytest.approx(1000e-6))]
    assert found.busy == pytest.approx(930e-6)


def test_what_overlaps_is_busy_once() -> None:
    both = [mark("step 0", 0, 100), launch(1, 1), launch(2, 5), kernel("a", 1, 10, 50), kernel("b", 2, 40, 50)]
    assert read({"traceEvents": both}, gpu=True).busy == pytest.approx(80e-6)


def test_an_operators_own_time_is_without_what_it_calls() -> None:
    ops = [mark("step 0", 0, 100), event("aten::linear", "cpu_op", 10, 50), event("aten::mm", "cpu_op", 20, 30)]
    found = {e.name: e.seconds for e in read({"traceEvents": ops}).entries()}
    assert found == {"aten::linear": pytest.approx(20e-6), "aten::mm": pytest.approx(30e-6)}


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="holds no step"):
        read({"traceEvents": [event("aten::mm", "cpu_op", 0, 1)]})


def test_a_gpus_steps_without_its_kernels_are_refused() -> None:
    """Operators of the host would pass for kernels."""
    host = [mark("step 0", 0, 100), event("aten::mm", "cpu_op", 10, 20), launch(1, 15)]
    before = kernel("a", 2, 200, 50)  # launched by nothing that was recorded
    for events in (host, [*host, before]):
        with pytest.raises(ValueError, match="holds no kernel of these steps"):
            read({"traceEvents": events}, gpu=True)
    assert [e.name for e in read({"traceEvents": [*host, before]}).entries()] == ["aten::mm"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_paged_decode", "attention"), ("_flash_attention", "attention"), ("_merge", "merge"), ("_gemm", "product"),
        ("_gemm_fp8", "product"), ("_gemm_w4a16", "product"), ("_gemm_w8a16", "product"), ("_fused_linear", "product"),
        ("_gemm_w8a8", "product"), ("_gemm_fp8_blocks", "product"), ("_gemm_fp4", "product"),
        ("_quantize_rows_int8", "quantize"), ("_quantize_groups_fp8", "quantize"),
        ("_rms_norm", "norm"), ("_act_and_mul", "gate"), ("_rotate_and_write", "rotary"), ("_sample_tokens", "sampler"),
        ("_grouped_gemm", "experts"), ("nvjet_tst_128x64_h_bz", "product"), ("Memcpy HtoD (Pinned -> Device)", "each"),
        ("at::native::reduce_kernel", "each"), ("at::native::index_elementwise_kernel", "each"),
        ("flash_fwd_splitkv_kernel", "attention"), ("cub::DeviceScan", ""),
    ],
)  # fmt: skip
def test_kernels_are_known_by_name(name: str, kind: str) -> None:
    if kind == "attention":
        assert kind_of(Entry(name, "attention")) == kind
    assert kind_of(Entry(name, "submit")) == kind


def test_every_kernel_of_the_compile_table_is_known_by_name() -> None:
    """A new kernel, or one with another name, has to be given its place."""
    names = {line.split(": ")[-1].split(",")[0] for line in json.loads(TABLE.read_text())}
    assert "paged_decode" in names
    assert [name for name in names if not f"_{name}".startswith(tuple(OURS))] == []


def entry(name: str, label: str | None, calls: int, seconds: float) -> Entry:
    return Entry(name, label, [Call(name, 0, seconds, seconds, label, 0)] * calls)


def test_each_of_the_three_limits_can_govern() -> None:
    memory = explain(entry("_paged_decode", "attention", 2, 1e-4), 1, WORK, MACHINE)
    assert (memory.governs, memory.limit) == ("memory", 1e-4)
    assert memory.share == pytest.approx(0.5)
    heavy = {**WORK, "qkv": Work(8e12, 8e8, 2, "qkv")}
    arithmetic = explain(entry("nvjet", "qkv", 2, 1e-2), 1, heavy, MACHINE)
    assert (arithmetic.governs, arithmetic.limit) == ("arithmetic", 1e-2)
    overhead = explain(entry("_rms_norm", "norm", 4, 4e-6), 1, WORK, MACHINE)
    assert (overhead.governs, overhead.limit) == ("overhead", 8e-6)
    assert "Launch overhead governs: 4 calls" in overhead.sentence


def test_calls_and_times_are_of_one_step() -> None:
    found = explain(entry("_paged_decode", "attention", 6, 1e-4), 3, WORK, MACHINE)
    assert (found.calls, found.seconds) == (2, pytest.approx(2e-4))


def test_a_replayed_graph_tells_products_apart_only_where_one_kernel_does_them_all() -> None:
    every = explain(entry("_gemm", "submit", 3, 1e-4), 1, WORK, MACHINE)
    assert (every.flops, every.bytes) == (9e9, 9e8)
    some = explain(entry("_gemm", "submit", 2, 1e-4), 1, WORK, MACHINE)
    assert (some.flops, some.governs) == (None, "unexplained")
    assert "--graphs off" in some.sentence


def test_what_is_not_known_is_said_to_be() -> None:
    found = explain(entry("cub::DeviceScan", "sampler", 1, 1e-4), 1, WORK, MACHINE)
    assert (found.governs, found.limit, found.share) == ("unexplained", None, None)
    assert found.sentence.startswith("Not explained")


def test_shapes_give_the_work_of_what_moves_numbers() -> None:
    call = Call("aten::index_select", 0, 1e-5, 1e-5, "attention", 0, ((1000, 2, 64), (), (300,)), (2, 0, 8))
    found = explain(Entry("aten::index_select", "attention", [call, call]), 1, WORK, MACHINE)
    assert found.bytes == 2 * 2 * 300 * 128 * 2
    call = Call("aten::add", 0, 1e-5, 1e-5, "norm", 0, ((4, 256), (4, 256), ()), (4, 4, 0))
    found = explain(Entry("aten::add", "norm", [call]), 1, WORK, MACHINE)
    assert (found.flops, found.bytes) == (1024, 3 * 4096)


@pytest.mark.parametrize(
    ("name", "dims", "itemsizes", "flops", "moved"),
    [
        # FP8 into float32: one byte of each number is read and four are written; nothing is computed.
        ("aten::copy_", ((8, 128), (8, 128), ()), (4, 1, 0), 0, 5 * 1024),
        ("aten::fill_", ((8, 128), ()), (4, 0), 0, 4 * 1024),
        ("aten::add_", ((8, 128), (8, 128), ()), (4, 4, 0), 1024, 12 * 1024),
        ("aten::mul", ((8, 128), (8, 1)), (4, 4), 1024, 4 * (1024 + 8 + 1024)),
        # Three rows into a cache of 1,000: the other rows are not touched.
        ("aten::index_copy_", ((1000, 2, 64), (), (3,), (3, 2, 64)), (4, 0, 8, 4), 0, 2 * 3 * 128 * 4),
    ],
)
def test_bytes_are_those_that_are_read_and_written(
    name: str, dims: tuple[tuple[int, ...], ...], itemsizes: tuple[int, ...], flops: float, moved: float
) -> None:
    call = Call(name, 0, 1e-5, 1e-5, "attention", 0, dims, itemsizes)
    found = explain(Entry(name, "attention", [call]), 1, WORK, MACHINE)
    assert (found.flops, found.bytes) == (flops, moved)


def op(name: str, ts: float, dur: float, *shapes: list[int]) -> dict[str, Any]:
    return event(name, "cpu_op", ts, dur, **{"Input Dims": list(shapes), "Input type": ["float"] * len(shapes)})


def test_an_operator_that_hands_its_work_on_is_not_given_the_work_too() -> None:
    outer, inner = op("aten::to", 110, 80, [4, 256]), op("aten::copy_", 120, 50, [4, 256], [4, 256])
    room = op("aten::fill_", 260, 10, [4, 256])
    events = [mark("step 0", 100, 900), mark("norm", 105, 300), outer, inner, op("aten::sum", 250, 40, [4, 256]), room]
    entries = {e.name: explain(e, 1, WORK, MACHINE) for e in read({"traceEvents": events}).entries()}
    assert (entries["aten::to"].bytes, entries["aten::copy_"].bytes) == (0, 8192)
    assert "calls other operators (norm)" in entries["aten::to"].what
    assert entries["aten::sum"].bytes == 8192
    assert sum(e.seconds for e in entries.values()) == pytest.approx(120e-6)


def test_of_a_cpus_steps_one_is_shown_without_what_disturbed_it() -> None:
    def step(number: int, ts: float, mm: float, add: float, outside: float) -> list[dict[str, Any]]:
        first, second = op("aten::mm", ts, mm, [2, 2], [2, 2]), op("aten::add", ts + mm, add, [2, 2], [2, 2])
        return [mark(f"step {number}", ts, mm + add + outside), first, second]

    # Something took the processor during the product of step 0, the sum of step 1, and Python in step 2.
    events = [*step(0, 0, 400, 10, 30), *step(1, 1000, 100, 90, 30), *step(2, 2000, 100, 10, 400)]
    events += [op("aten::exp", 1210, 5, [2, 2])]  # in step 1 alone, which is the shortest
    number, found = read({"traceEvents": events}).undisturbed()
    assert number == 1
    assert {e.name: round(e.seconds * 1e6) for e in found.entries()} == {
        "aten::mm": 100,
        "aten::add": 10,
        "aten::exp": 5,
    }
    [(start, end)] = found.steps
    assert (start, round((end - start) * 1e6), round(found.busy * 1e6)) == (1e-3, 115 + 25, 115)
