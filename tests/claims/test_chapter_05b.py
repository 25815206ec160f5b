"""Errata of kernels and compilers (E05.9 to E05.12, E05.15), and figures of chapter 05 part b.

What is compiled for a GPU that is not here is compiled in a child process: one with Triton's interpreter cannot.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from grader.quiz import load_quiz
from reference_impl.core.decoder import DecoderLayer
from reference_impl.features.fusion.decoder import FusedLayer
from reference_impl.features.fusion.fusion import Fusion
from reference_impl.models.gemma import Gemma2Layer
from reference_impl.theory import collectives, fusion
from reference_impl.theory.hardware import device
from reference_impl.theory.occupancy import SMS, occupancy
from reference_impl.theory.units import MiB
from tests.warm import Warm

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "reference_impl/kernels/compiled.json"

# ---------------------------------------------------------------- E05.9


@torch.library.custom_op("inferlab_claims::opaque", mutates_args=())
def opaque(q: torch.Tensor) -> torch.Tensor:
    return q * torch.sigmoid(q)


opaque.register_fake(torch.empty_like)


def plain(q: torch.Tensor) -> torch.Tensor:
    return q * torch.sigmoid(q)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def around(something: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Add and norm, something, add, norm and gate."""

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        s = x + residual
        s = s + 0.5 * something(norm(s))
        return F.silu(norm(s)) * s

    return block


def generated(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[str]:
    """Kernels and operators that Inductor's code calls, in order; the code is neither compiled nor run."""
    import torch._inductor.config as inductor
    from torch._inductor.utils import get_code

    torch._dynamo.reset()
    with inductor.patch({"fx_graph_cache": False, "cpp.vec_isa_ok": False}), torch.no_grad():
        code = get_code(torch.compile(function), *inputs)[0]
    code = code[code.index("def call(") :].split("def benchmark_compiled_module")[0]
    pattern = r"^\s+(?:\w+ = )?((?:cpp|triton)_\w*fused\w*?|torch\.ops\.inferlab_claims\.\w+)(?:\.run|\.default)?\("
    return re.findall(pattern, code, re.MULTILINE)


def test_e05_09_an_opaque_op_is_one_node_of_the_graph() -> None:
    """Claim: torch.compile fuses a custom attention kernel with its neighbours. It does not see what is inside."""
    inputs = torch.randn(2, 16, 64)
    seen: list[str] = []

    def backend(module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        seen.extend(str(node.target) for node in module.graph.nodes if node.op.startswith("call"))
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(around(opaque), backend=backend)
    torch.testing.assert_close(compiled(*inputs), around(plain)(*inputs))
    assert seen.count("inferlab_claims.opaque.default") == 1
    assert not any("sigmoid" in target for target in seen)


@pytest.mark.compiler
def test_e05_09_a_compiler_fuses_on_both_sides_of_an_opaque_op_and_never_through_it() -> None:
    """The op is one call of the generated code, with one fused kernel on each side. The same operation in plain sight
    disappears into one kernel for everything.
    """
    inputs = torch.randn(2, 16, 64)
    before, op, after = generated(around(opaque), *inputs)
    assert op == "torch.ops.inferlab_claims.opaque"
    assert "fused" in before
    assert "fused" in after
    [everything] = generated(around(plain), *inputs)
    assert "sigmoid" in everything


# ---------------------------------------------------------------- E05.10, E05.11 and what the compiler says


def test_e05_10_the_chapter_and_its_quiz_know_cutlass_in_both_languages() -> None:
    """Claim: CUTLASS is a C++ template library and no language. Since version 4 it has Python languages, too."""
    chapter = ROOT / "chapters/05_flash_attention"
    cells = json.loads((chapter / "b_kernels.ipynb").read_text("utf-8"))["cells"]
    told = next("".join(cell["source"]) for cell in cells if cell["id"] == "errata-compile-reading")
    asked = load_quiz("05_flash_attention", chapter / "quiz.yaml").item("what-cutlass-asks")
    for text in (told, asked.why):
        assert "CuTe DSL" in text
        assert "version 4" in text


COMPILING = """
import json, re, sys
from collections import Counter
from dataclasses import asdict
sys.path.insert(0, sys.argv[1])
import claims_kernels
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.kernels.compilation import compile_for, key, resources
from reference_impl.kernels.launch import Launch

found = []
for kernel, types, constants, aligned, options in json.loads(sys.argv[2]):
    launch = Launch(getattr(claims_kernels, kernel), types, constants, tuple(aligned), options)
    gpu = ARCHITECTURES["sm_90"]
    loads = Counter(re.findall(r"\\bld\\.global[\\w.]*", compile_for(launch, gpu).asm["ptx"]))
    found.append(asdict(resources(launch, gpu)) | {"key": key(launch, gpu), "loads": loads})
print(json.dumps(found))
"""

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def product(x, w, y, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a = tl.load(x + m[:, None] * K + (start + k)[None, :], mask=(m < M)[:, None], other=0.0)
        b = tl.load(w + n[None, :] * K + (start + k)[:, None], mask=(n < N)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
    tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def double(x, y, N, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0) * N + column
    tl.store(y + at, tl.load(x + at, mask=column < N) * 2, mask=column < N)
"""


def tile(m: int, n: int, num_warps: int) -> list[Any]:
    types = dict.fromkeys("xwy", "*bf16") | dict.fromkeys("MNK", "i32")
    constants = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64}
    return ["product", types, constants, list("xwyNK"), {"num_warps": num_warps, "num_stages": 3}]


POINTERS = {"x": "*bf16", "y": "*bf16"}
REQUESTS: dict[str, list[Any]] = {
    "four": tile(128, 256, 4),
    "eight": tile(128, 256, 8),
    "thin": tile(16, 64, 4),
    "wide": ["double", POINTERS, {"N": 4096, "BLOCK": 4096}, ["x", "y"], {"num_warps": 8}],
    "narrow": ["double", POINTERS, {"N": 4001, "BLOCK": 4096}, ["x", "y"], {"num_warps": 8}],
    "unknown": ["double", {**POINTERS, "N": "i32"}, {"BLOCK": 4096}, ["x", "y"], {"num_warps": 8}],
    "promised": ["double", {**POINTERS, "N": "i32"}, {"BLOCK": 4096}, ["x", "y", "N"], {"num_warps": 8}],
}


@pytest.fixture(scope="module")
def compiled(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the compiler says to each of REQUESTS."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "claims_kernels.py").write_text(KERNELS)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    words = ("-c", COMPILING, str(folder), json.dumps([*REQUESTS.values()]))
    done = warm.run(words, environment)
    assert done.returncode == 0, done.stderr
    return dict(zip(REQUESTS, json.loads(done.stdout), strict=True))


@pytest.mark.timeout(1800)
def test_e05_11_tiles_and_warps_stay_the_programmers_and_decide_spills_and_instructions(
    compiled: dict[str, dict[str, Any]],
) -> None:
    """Claim: Triton hides warps and registers and emits near-optimal code.

    One source. 128 x 256 sums spill with four warps and not with eight; a tile of 16 rows misses Hopper's own matrix
    instruction; none of this is reported to who runs it. (How far from a library it is, a GPU has to say.)
    """
    four, eight, thin = (compiled[name] for name in ("four", "eight", "thin"))
    assert 128 * 256 // (4 * 32) == 256 > SMS["sm_90"].max_registers
    assert four["spilled"] > 0 == eight["spilled"]
    assert set(eight["matrix_instructions"]) == {"HGMMA"}
    assert set(thin["matrix_instructions"]) == {"HMMA"}


@pytest.mark.timeout(1800)
def test_a_constant_changes_the_machine_code_and_its_key(compiled: dict[str, dict[str, Any]]) -> None:
    """Rows of 4,096 values of two bytes are read 16 bytes at a time, rows of 4,001 one value at a time; a number of the
    run can be either, and is read as the worse one unless the launcher promises that 16 divides it."""
    wide, narrow, unknown, promised = (compiled[name] for name in ("wide", "narrow", "unknown", "promised"))
    per_thread = 4096 // (8 * 32)  # values
    assert Counter(wide["loads"]).total() == per_thread * 2 // 16
    assert Counter(narrow["loads"]).total() == per_thread
    assert Counter(unknown["loads"]).total() == per_thread
    assert promised["loads"] == wide["loads"]
    assert wide["instructions"] < narrow["instructions"]
    assert len({it["key"] for it in (wide, narrow, unknown, promised)}) == 4


def test_where_each_tensor_of_attention_lies_adds_up_to_what_the_compiler_says() -> None:
    """05-25: on an H100, heads of 128: tiles of Q, K and V in shared memory, scores and output in registers."""
    line = json.loads(TABLE.read_text("utf-8"))["flash_attention, head_dim 128: flash_attention, sm_90"]
    m, n, d, threads = 128, 64, 128, 32 * line["options"]["num_warps"]
    tiles = m * d * 2 + line["options"]["num_stages"] * 2 * n * d * 2
    assert tiles == line["shared_bytes"] == 96 * 1024
    sums = (m * n + m * d) // threads
    assert sums == 96
    assert sums < line["registers"] <= 255
    held = occupancy("sm_90", line["options"]["num_warps"], line["registers"], line["shared_bytes"])
    assert (held.blocks, held.binding) == (1, ("registers",))


def test_register_sizes_of_an_h100_are_those_that_occupancy_counts_with() -> None:
    """N.. of the register: 33 MiB of registers and 29.4 MiB of shared memory over 132 SMs."""
    chip, sm = device("H100").chip, SMS["sm_90"]
    assert chip.num_sms * sm.registers * 4 == 33 * MiB
    assert chip.num_sms * sm.shared_bytes / MiB == pytest.approx(29.4, abs=0.05)


# ---------------------------------------------------------------- E05.12, E05.15


def test_e05_12_add_norm_and_conversion_move_7_bytes_per_value_instead_of_13() -> None:
    """Claim: LayerNorm, conversion and Linear are fused; all-reduce, norm, add in this order.

    What is fused stands in front of the product. Per 16-bit value: add 6, norm 4, conversion 3 bytes; in one kernel 7,
    since the sum is needed again. In a pre-norm model the add comes before the norm.
    """
    tokens, hidden = 1000, 8192
    chain = fusion.add_norm_quantize(tokens, hidden)
    per_value = [
        sum(chain.sizes[name] for name in (*kernel.reads, *kernel.writes)) / (tokens * hidden)
        for kernel in chain.kernels
    ]
    assert per_value == pytest.approx([6, 4, 3], abs=0.01)
    assert chain.bytes / (tokens * hidden) == pytest.approx(13, abs=0.01)
    assert chain.fused_bytes / (tokens * hidden) == pytest.approx(7, abs=0.01)
    for layer, orders in (
        (DecoderLayer, ("x = x + self.o(", "self.mlp_norm")),
        (Gemma2Layer, ("x = x + norm(self.o(h), self.attention_output_norm", "self.mlp_norm")),
    ):
        source = inspect.getsource(layer.forward)
        assert [*orders] == sorted(orders, key=source.index)
    source = inspect.getsource(FusedLayer.compute)
    fused = ('add_linear("o"', "attention_output_norm", 'norm_then_linear("gate_up"')
    assert [*fused] == sorted(fused, key=source.index)
    added = inspect.getsource(Fusion.norm)
    assert "add_rms_norm(added, x, weight" in added, "the sum is normed, and needed again"


def test_e05_12_a_norm_commutes_with_a_product_until_its_result_is_converted_by_a_scale_per_row() -> None:
    x, weight, w = torch.randn(4, 64), torch.rand(64) + 0.5, torch.randn(32, 64)
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    normed = x * factor * weight
    torch.testing.assert_close(normed @ w.T, (x @ (w * weight).T) * factor, rtol=1e-3, atol=1e-4)
    scale = normed.abs().amax(-1)  # needs the whole row, and moves when its last value does
    longer = torch.cat([x[:, :-1], 100 * x[:, -1:]], -1) * weight
    assert not torch.allclose((longer * torch.rsqrt(longer.pow(2).mean(-1, keepdim=True))).abs().amax(-1), scale)


def test_e05_15_a_chain_of_n_kernels_has_n_minus_1_round_trips_and_fusing_saves_twice_their_bytes() -> None:
    """Claim: three kernels, three round trips; and 3x for another fusion under the figure.

    Two intermediates, each written once and read once. An all-reduce kernel of 23 % of a step, three times faster,
    makes the step 1.18 times faster.
    """
    for kernels in range(1, 8):
        chain = fusion.in_a_row(kernels, 10**6)
        assert len(chain.intermediates) == kernels - 1
        assert chain.saved == 2 * (kernels - 1) * 10**6
    reduced = fusion.all_reduce_add_norm(64, 8192)
    assert reduced.bytes / reduced.fused_bytes == pytest.approx(7 / 4, abs=0.01)
    assert 1 / collectives.amdahl(0.23, 3) == pytest.approx(1.18, abs=0.005)
