"""What is found out about the CPU: bf16, and how many threads there is room for."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from reference_impl.assembly.config import course_model
from reference_impl.assembly.linear_methods import choose_head
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.cpu import operators as packed_linear
from reference_impl.features.cpu import processor
from reference_impl.features.cpu.default import default_method
from reference_impl.features.cpu.half import SlowHalfLinear, slow_half_linear
from reference_impl.interfaces import LinearMethod
from reference_impl.models.config_json import read_model_config
from tests.warm import Warm

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="affinity and cgroups are Linux's")


@pytest.mark.parametrize(
    ("flags", "bf16", "expected"),
    [((False, False), 0.6, False), ((True, False), 0.6, True), ((False, True), 2.5, False)],
)
def test_bf16_needs_a_flag_of_the_cpu_and_to_be_seen_as_fast(
    flags: tuple[bool, bool], bf16: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.6 and 2.5 of float32's time were seen with the instructions and, by ONEDNN_MAX_CPU_ISA=AVX2, without them."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: flags[0])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: flags[1])
    monkeypatch.setattr(processor, "_seconds_of_products", lambda dtypes: [bf16, 1.0])
    assert processor.cpu_has_bf16.__wrapped__() is expected


def test_threads_are_as_they_were_after_the_measurement() -> None:
    threads = torch.get_num_threads()
    bf16, fp32 = processor._seconds_of_products((torch.bfloat16, torch.float32), size=64, rounds=1)
    assert bf16 > 0
    assert fp32 > 0
    assert torch.get_num_threads() == threads


def product(method: LinearMethod, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Loaded in two parts, as q, k and v are."""
    params = method.create(weight.shape[1], weight.shape[0], bias is not None)
    for start, end in ((0, 20), (20, len(weight))):
        method.load(params, "weight", weight[start:end], start)
        if bias is not None:
            method.load(params, "bias", bias[start:end], start)
    method.finish(params)
    return method.apply(params, x)


METHODS = {
    "default float32": lambda: default_method(torch.float32, torch.device("cpu")),
    "default float16": lambda: default_method(torch.float16, torch.device("cpu")),
    "default bfloat16": lambda: default_method(torch.bfloat16, torch.device("cpu")),
    "slow float16": lambda: SlowHalfLinear(torch.float16),
    "slow bfloat16": lambda: SlowHalfLinear(torch.bfloat16),
    "plain float32": lambda: UnquantizedLinear(torch.float32, torch.device("cpu")),
    "packed float32": lambda: packed_linear.PackedLinear(torch.float32),
    "large float32": lambda: packed_linear.PackedIfLarge(torch.float32),
}


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 70])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_every_way_to_multiply_on_a_cpu_is_the_same_product(name: str, has_bias: bool, rows: int) -> None:
    dtype = getattr(torch, name.split()[1])
    if name == "packed float32" and not packed_linear.available(dtype):
        assert default_method(dtype, torch.device("cpu")).__class__ is UnquantizedLinear
        return
    draw = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(*size, generator=draw).to(dtype) for size in ((rows, 48), (56, 48), (56,)))
    y = product(METHODS[name](), x, weight, bias if has_bias else None)
    exact = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert y.dtype is dtype
    assert y.shape == (rows, 56)
    # Sums in float32, rounded once: half a unit in the last place of the result, and what float32 adds.
    torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=2e-5)


def test_half_precision_is_packed_or_kept_by_rows() -> None:
    """A weight by columns takes ten times as long where the CPU does not multiply 16 bits."""
    cpu = torch.device("cpu")
    for dtype in (torch.bfloat16, torch.float16):
        expected = packed_linear.PackedLinear if packed_linear.available(dtype) else SlowHalfLinear
        assert type(default_method(dtype, cpu)) is expected
    weight = torch.randn(32, 16).bfloat16()
    for rows in (3, 30):  # a tied lm_head is multiplied without a copy of its own
        x = torch.randn(rows, 16).bfloat16()
        torch.testing.assert_close(slow_half_linear(x, weight), (x.double() @ weight.double().T).bfloat16())


@pytest.mark.parametrize(("outputs", "inputs"), [(9000, 500), (9001, 500), (2, 1 << 22)])
def test_a_large_weight_in_16_bits_is_widened_in_parts(outputs: int, inputs: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(9, inputs, generator=draw).bfloat16()
    weight = torch.randn(outputs, inputs, generator=draw).bfloat16()
    bias = torch.randn(outputs, generator=draw).bfloat16()
    sizes: list[int] = []

    class Products(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is F.linear:
                sizes.append(args[1].numel())
            return func(*args, **(kwargs or {}))

    with Products():
        found = slow_half_linear(x, weight, bias)
    assert len(sizes) > 1
    assert sum(sizes) == weight.numel()
    exact = x.float() @ weight.float().T + bias.float()
    torch.testing.assert_close(found.float(), exact, rtol=2**-8, atol=1e-3 * inputs**0.5)


@pytest.mark.parametrize(("capability", "packs"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False)])
def test_float32_is_packed_where_that_pays(capability: str, packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    there = packed_linear.available(torch.float32)
    assert packed_linear.pays(torch.float32) == (packs and there)
    assert packed_linear.pays(torch.float32, large=True) == (capability != "DEFAULT" and there)
    assert packed_linear.pays(torch.bfloat16) == packed_linear.available(torch.bfloat16)


@pytest.mark.parametrize(("outputs", "inputs", "large"), [(512, 512, True), (511, 512, False), (2048, 256, False)])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("has_bias", [False, True])
def test_with_avx2_a_large_weight_is_packed_and_a_smaller_one_is_as_it_was(
    outputs: int, inputs: int, large: bool, rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packed_linear.available(torch.float32):
        return
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    draw = torch.Generator().manual_seed(outputs)
    x, weight, bias = (torch.randn(*size, generator=draw) for size in ((rows, inputs), (outputs, inputs), (outputs,)))
    method, plain = default_method(torch.float32, torch.device("cpu")), UnquantizedLinear(torch.float32, x.device)
    given = bias if has_bias else None
    params = method.create(inputs, outputs, False)
    method.load(params, "weight", weight, 0)
    method.finish(params)
    assert params["weight"].is_mkldnn == large
    found, expected = product(method, x, weight, given), product(plain, x, weight, given)
    if large:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-4)  # sums of 512, in another order
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize(("hidden_size", "copied"), [(512, True), (256, False)])
def test_with_avx2_a_large_head_is_packed_in_float32(
    hidden_size: int, copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    cpu = torch.device("cpu")
    config = replace(read_model_config(course_model("target")), vocab_size=1024, hidden_size=hidden_size)
    head = choose_head(UnquantizedLinear(torch.float32, cpu), config, torch.float32, cpu)
    copied = copied and packed_linear.available(torch.float32)
    assert isinstance(head, packed_linear.HeadCopy) == copied
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*size, generator=draw) for size in ((3, hidden_size), (1024, hidden_size)))
    torch.testing.assert_close(head(x, weight), x @ weight.T, rtol=1e-4, atol=2e-4)
    if isinstance(head, packed_linear.HeadCopy):
        assert head.weight_bytes() == weight.nbytes


@linux
def test_affinity_counts(warm: Warm) -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); import torch; torch.set_num_threads(3);"
        "from reference_impl.features.cpu.processor import use_no_more_threads_than_cores as f; f(); "
        "print(torch.get_num_threads())"
    )
    unset = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}

    def printed(code: str, environment: dict[str, str]) -> str:
        done = warm.run(("-c", code), environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert printed(code, unset) == "1"
    assert printed(code, {**unset, "OMP_NUM_THREADS": "3"}) == "3", "who says how many gets them"
    everywhere = code.replace("os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); ", "")
    assert everywhere != code
    assert printed(everywhere.replace("num_threads(3)", "num_threads(1)"), unset) == "1", "never more than were set"


def machine(tmp_path: Path, siblings: dict[int, str], group: str, quotas: dict[str, str]) -> tuple[Path, Path]:
    for cpu, threads in siblings.items():
        topology = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(threads + "\n")
    for name, quota in quotas.items():
        folder = tmp_path / "sys/fs/cgroup" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(quota + "\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cgroup").write_text(f"4:memory:/elsewhere\n0::/{group}\n")
    return tmp_path / "sys", tmp_path / "proc"


@linux
@pytest.mark.parametrize(
    ("allowed", "group", "quotas", "expected"),
    [
        (range(8), "", {}, 4),  # two threads a core
        ({0, 4}, "", {}, 1),  # the two of one core
        ({0, 1, 5}, "", {}, 2),
        (range(8), "", {"": "max 100000"}, 4),
        (range(8), "", {"": "150000 100000"}, 2),
        (range(8), "a/b", {"a/b": "max 100000", "a": "300000 100000"}, 3),  # a group obeys those above it
        (range(8), "a/b", {"a/b": "20000 100000", "a": "300000 100000"}, 1),
        (range(8), "a/b", {"a/b": "900000 100000"}, 4),
    ],
)
def test_cores_and_quotas(tmp_path, monkeypatch, allowed, group, quotas, expected) -> None:
    system, process = machine(tmp_path, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}, group, quotas)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed))
    assert processor.usable_cores(system, process) == expected


@linux
def test_a_system_that_tells_nothing_limits_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert processor.usable_cores(tmp_path, tmp_path) == 3
