"""The cache is sized by what the worst steps leave: on a device that counts the bytes of tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from reference_impl.assembly import worker_half
from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.draft_model import draft_spec
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.features.sizing.budget import KV_CACHE_BYTES
from reference_impl.features.sizing.profile import (
    HUNGRY,
    Measured,
    bytes_for_cache,
    bytes_of_graphs,
    profiled_blocks,
    worst_steps,
)
from reference_impl.interfaces import KVSpec, Request, SamplingParams
from tests.engine.conftest import OwnCache, some, spread
from tests.engine.test_feature_head import random_head

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=16, bits_per_value=32)
BLOCK = SPEC.bytes_per_block
CPU = torch.device("cpu")


class CountedMemory(TorchDispatchMode):
    """A device of `total` bytes on the CPU: while it is entered, it counts the storages that operations make."""

    def __init__(self, total: int, weights: int = 0):
        super().__init__()
        self.total, self.weights = total, weights
        self.now = self.highest = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def storages(found: Any) -> list[torch.UntypedStorage]:  # a packed weight (mkldnn) does not show its own
            tensors = (x for x in tree_iter(found) if isinstance(x, torch.Tensor))
            return [x.untyped_storage() for x in tensors if x.layout is torch.strided]

        known = {storage._cdata for storage in storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for storage in storages(out):
            if storage._cdata not in known | self.seen:
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.highest = max(self.highest, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, name: int, size: int) -> None:
        self.seen.discard(name)
        self.now -= size

    def measure(self, runs: Sequence[Callable[[], object]]) -> Measured:
        highest = []
        for run in runs:
            gc.collect()
            self.highest = self.now
            with self:
                run()
            highest.append(self.highest)
        gc.collect()
        self.measured = Measured(self.total, self.weights + self.now, tuple(peak - self.now for peak in highest))
        return self.measured


def test_counting_counts() -> None:
    memory = CountedMemory(0)
    with memory:
        x = torch.zeros(1000)
        y = x.view(10, 100)[3]
        z = x + 1
        del x, z
        z = y * 2
    assert memory.highest == 8000
    assert memory.now == 4000 + 400
    del y
    assert memory.now == 400
    del z
    assert memory.now == 0


def test_the_arithmetic() -> None:
    measured = Measured(total=1000, in_use=300, peaks=(20, 80, 100))
    assert bytes_for_cache(measured, 90, of_graphs=0) == 900 - 300 - 100
    assert bytes_for_cache(measured, 90, of_graphs=40) == 900 - 300 - 100 - 40
    assert bytes_for_cache(measured, 30, of_graphs=0) == -100


def test_graphs_have_twice_the_memory_of_the_largest_step_that_is_captured() -> None:
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=64, block_size=16)
    plain = worst_steps(config, [SPEC], longest=40, vocab=61, room=100)
    assert bytes_of_graphs(Measured(1000, 0, (20, 90, 80)), plain) == 2 * 20
    drafting = worst_steps(replace(config, num_drafts=9), [SPEC], longest=40, vocab=61, room=100)
    measured = Measured(1000, 0, (20, 90, 80, 100))
    assert bytes_of_graphs(measured, drafting) == 2 * 100
    assert bytes_of_graphs(measured, drafting, widest=25) == 2 * 50, "of 50 tokens"
    assert bytes_of_graphs(measured, drafting, widest=512) == 2 * 100


def test_what_is_left_buys_whole_blocks_but_no_more_than_all_seats_need() -> None:
    config = EngineConfig(max_num_seqs=3, block_size=16)
    for spare in (0, BLOCK - 1):
        measured = Measured(100 * BLOCK, 80 * BLOCK - spare, (BLOCK, 3 * BLOCK, BLOCK))
        assert profiled_blocks(measured, config, BLOCK, 1, 1000, of_graphs=0) == 7
        assert profiled_blocks(measured, config, BLOCK, 1, 1000, of_graphs=2 * BLOCK) == 5
    assert profiled_blocks(measured, config, BLOCK, 1, 17) == 3 * 2
    assert profiled_blocks(measured, config, BLOCK, 1, 15) == 3


def test_nothing_left_is_said_with_the_numbers() -> None:
    measured = Measured(200 << 20, 150 << 20, (10 << 20, 40 << 20))
    expected = (
        r"no memory is left for keys and values: 90 % \(memory_percent\) of 200\.0 MiB .* have 150\.0 MiB, .*"
        r"max_num_batched_tokens 2048, max_num_seqs 64\) takes 40\.0 MiB, CUDA graphs 20\.0 MiB, and a block of 16 .*"
        r"Lower max_num_batched_tokens or max_num_seqs, raise memory_percent"
    )
    with pytest.raises(ConfigError, match=expected):
        profiled_blocks(measured, EngineConfig(), BLOCK, 1, 1000, of_graphs=20 << 20)


def test_the_worst_steps_use_the_whole_budget_and_all_seats_and_everybody_samples() -> None:
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=64, block_size=16)
    steps = worst_steps(config, [SPEC, SPEC], longest=40, vocab=61, room=100)
    assert [[(row.start, row.num_tokens) for row in plan.rows] for plan, _ in steps] == [
        [(39, 1), *[(19, 1)] * 4],  # one is as long as can be; together they hold what the device could
        [(8, 32), (8, 32)],  # of 64 tokens at most 40 go into a row
        [(28, 12), *[(8, 12)] * 4],
    ]
    for plan, requests in steps:
        for row in plan.rows:
            request, end = requests[row.request_id], row.start + row.num_tokens
            assert row.samples
            assert (end, request.sampling) == (request.num_tokens, HUNGRY)
            assert request.block_tables == [[0] * -(-end // 16)] * 2
    one = worst_steps(EngineConfig(max_num_seqs=64, max_num_batched_tokens=8), [SPEC], 1000, 61, 10**9)
    assert [len(plan.rows) for plan, _ in one] == [8, 1, 8]


def test_with_drafts_a_step_has_as_many_as_budget_and_positions_allow() -> None:
    config = EngineConfig(max_num_seqs=5, max_num_batched_tokens=16, block_size=16, num_drafts=3)
    *others, (plan, requests) = worst_steps(config, [SPEC], longest=40, vocab=61, room=100)
    assert [len(plan.rows) for plan, _ in others] == [5, 1, 5]
    assert [(row.start, row.num_tokens, row.num_drafts) for row in plan.rows] == [
        (36, 1, 3), *[(16, 1, 3)] * 2, (17, 1, 2), (19, 1, 0),
    ]  # fmt: skip
    assert all(row.samples and row.drafts == (0, 1, 2)[: row.num_drafts] for row in plan.rows)
    for request in requests.values():
        assert request.sampling.seed is None
        assert 16 * len(request.block_tables[0]) >= request.num_tokens + 3
    (plan, _) = worst_steps(config, [SPEC], longest=3, vocab=61, room=100, by_model=True)[-1]
    assert [(row.start, row.num_tokens, row.num_drafts, row.drafts) for row in plan.rows] == [(0, 1, 2, ())] * 5


def sized(
    monkeypatch: pytest.MonkeyPatch, model: Any, memory: CountedMemory, parts: Parts | None = None, **options: Any
) -> Engine:
    monkeypatch.setattr(worker_half, "device_memory", lambda device: memory)
    with memory:
        return Engine(model, EngineConfig(**options), parts)


KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "soft cap": {
        "architecture": "Gemma2ForCausalLM", "sliding_window": 6, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip


@pytest.mark.parametrize(("kind", "kv_dtype"), spread([*KINDS], ["auto", "fp8"]))
def test_whatever_is_served_then_fits(kind, kv_dtype, random_model, monkeypatch) -> None:
    """As many long and short requests as it takes, with all that sampling can do: not a byte over memory_percent."""
    model = random_model("float32", max_position_embeddings=400, vocab_size=3000, **KINDS[kind])
    options = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "block_size": 4, "kv_dtype": kv_dtype}
    all_seats = sized(monkeypatch, model, plenty := CountedMemory(1 << 30), **options)
    block, m = all_seats.kv_spec.bytes_per_block, plenty.measured
    total = (m.in_use + max(m.peaks) + all_seats.num_blocks // 2 * block) * 100 // 90 + block
    memory = CountedMemory(total)
    engine = sized(monkeypatch, model, memory, **options)
    assert abs(engine.num_blocks - all_seats.num_blocks // 2) <= 1
    assert memory.now >= engine.num_blocks * block
    memory.highest = memory.now
    sampling = {name: value for name, value in vars(HUNGRY).items() if name not in ("max_tokens", "seed")}
    with memory:
        for number in range(14):
            prompt = [(number * 31 + i) % 3000 for i in range(1 + number * 53 % 390)]
            engine.add(prompt, SamplingParams(max_tokens=6, **sampling, seed=number))
        while engine.has_work():
            engine.step()
    most = total * 90 // 100
    assert most - 2 * max(m.peaks) // 3 < memory.highest <= most, f"of {m.peaks} more than two thirds lay idle"


class Drafts:
    """A `HostProposer`."""

    def propose(self, request: Request, k: int) -> list[int]:
        return [7] * k


@pytest.mark.parametrize("kind", some(["named", "draft", "tree"], ["named", "draft", "head", "tree"]))
def test_whatever_is_served_with_drafts_then_fits(kind, random_model, monkeypatch) -> None:
    """Logits of five positions a request, and the distributions that rejection compares, are many times a step's."""
    options: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 40, "block_size": 4, "num_drafts": 4}
    shape = {"max_position_embeddings": 200, "vocab_size": 2000}
    model = random_model("float32", **shape)
    draft = None if kind == "named" else random_model("float32", num_hidden_layers=1, **shape)
    if draft is None:
        parts = Parts(host_proposer=Drafts())
    else:
        parts = Parts(draft_model=draft if kind == "draft" else random_head(draft))
    sized(monkeypatch, model, plain := CountedMemory(1 << 30), **options | {"num_drafts": 0})
    sampling = {name: value for name, value in vars(HUNGRY).items() if name not in ("max_tokens", "seed")}
    if kind == "tree":
        options |= {"num_drafts": 0, "speculative": "eagle", "draft_tree": (3, 2, 1)}
    all_seats = sized(monkeypatch, model, plenty := CountedMemory(1 << 30), parts, **options)
    m, block = plenty.measured, all_seats.kv_spec.bytes_per_block
    assert max(m.peaks) > 1.5 * max(plain.measured.peaks)
    block += 0 if draft is None else draft_spec(draft, all_seats.config).bytes_per_block
    total = (m.in_use + max(m.peaks) + all_seats.num_blocks // 2 * block) * 100 // 90 + block
    engine = sized(monkeypatch, model, memory := CountedMemory(total), parts, **options)
    assert abs(engine.num_blocks - all_seats.num_blocks // 2) <= 1
    memory.highest = memory.now
    with memory:
        for number in range(9):
            prompt = [(number * 31 + i % 7) % 2000 for i in range(1 + number * 53 % 180)]
            engine.add(prompt, SamplingParams(max_tokens=6, **sampling))
        while engine.has_work():
            engine.step()
    assert any(row.num_drafts for step in engine.trace.steps() for row in step.rows)
    assert memory.highest <= total * 90 // 100


def test_more_of_the_device_is_more_blocks(random_model, monkeypatch) -> None:
    model = random_model("float32", max_position_embeddings=4096)
    blocks = [
        sized(monkeypatch, model, CountedMemory(32 << 20), max_num_batched_tokens=64, memory_percent=p).num_blocks
        for p in (50, 55.5, 60)
    ]
    per_block = Engine(model, EngineConfig(num_blocks=1)).kv_spec.bytes_per_block
    for more, share in ((blocks[2], 10), (blocks[1], 5.5)):
        assert abs((more - blocks[0]) * per_block - (32 << 20) * share // 100) <= 2 * per_block


def test_what_is_asked_for_is_not_measured(random_model, monkeypatch) -> None:
    model = random_model("float32")

    def never(runs: Any) -> Any:
        raise AssertionError("measured")

    memory = CountedMemory(1)
    memory.measure = never  # type: ignore[method-assign]
    assert sized(monkeypatch, model, memory, num_blocks=7).num_blocks == 7
    engine = sized(monkeypatch, model, memory, kv_cache_bytes=1 << 20)
    assert engine.num_blocks == (1 << 20) // engine.kv_spec.bytes_per_block
    with pytest.raises(AssertionError, match="measured"):
        sized(monkeypatch, model, memory)


def test_who_brings_the_tensors_gets_the_blocks_of_256_mib(random_model, monkeypatch) -> None:
    monkeypatch.setattr(worker_half, "device_memory", lambda device: CountedMemory(1))
    engine = Engine(random_model("float32"), EngineConfig(), Parts(kv_cache=OwnCache()))
    assert engine.num_blocks == KV_CACHE_BYTES // engine.kv_spec.bytes_per_block


def test_on_a_cpu_nothing_is_measured() -> None:
    assert worker_half.device_memory(CPU) is None


@pytest.mark.parametrize("percent", [0, 101, 0.9, True, None])
def test_a_share_is_a_percentage(percent) -> None:
    with pytest.raises(ValueError, match=r"EngineConfig\.memory_percent: expected"):
        EngineConfig(memory_percent=percent)


@pytest.mark.gpu
def test_on_a_gpu_the_cache_leaves_room_for_the_worst_step(random_model) -> None:
    """All but a gigabyte beyond the tenth that stays free is somebody else's, so that memory decides, and not seats."""
    device, longest = torch.device("cuda"), 16384
    model = random_model(
        "float16", device="cuda", max_position_embeddings=longest, vocab_size=3000, head_dim=64, num_key_value_heads=4
    )
    gc.collect()
    torch.cuda.empty_cache()  # what tests before left to torch's allocator, the engine would give back, and find free
    free, total = torch.cuda.mem_get_info(device)
    hog = torch.empty(max(0, free - total // 10 - (1 << 30)), dtype=torch.uint8, device=device)
    engine = Engine(model, EngineConfig(block_size=16, max_num_seqs=64))
    assert engine.num_blocks < 64 * longest // 16
    for number in range(64):
        prompt = [(number * 31 + i) % 3000 for i in range(1 + number * 53 % 3000)]
        engine.add(prompt, SamplingParams(max_tokens=4, logprobs=20, top_p=0.9, frequency_penalty=0.1, seed=number))
    while engine.has_work():
        engine.step()
    assert torch.cuda.mem_get_info(device)[0] >= 0.08 * total
    del hog
