"""The engine with a cache by channel (kv_dtype="kivi") and our Triton kernels, in the interpreter or on a GPU: the
logits that the format defines, whatever the schedule; and steps that are replayed."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from reference_impl.annexes.fusion.decoder import FusedDecoder
from reference_impl.annexes.graphs import graphs as graphs_module
from reference_impl.annexes.kv_formats.open_triton import TritonOpenBlockAttention
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.defaults import why_not_graphs
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import SamplingParams
from tests.engine import test_schedule_invariance as schedules
from tests.engine.conftest import tapped_engine  # noqa: F401
from tests.engine.test_kv_kivi import KINDS, PROMPTS, Wrong, alone, defined, greedy, plant, serve
from tests.executor.dense import TwinSampler, dense_model
from tests.executor.tape import recorder
from tests.layers.test_triton_attention import CROWDED, CROWDED_OPTIONS, DEVICE

# The scales' 16 bits: where float32's last bits decide how one is rounded, it moves by 5e-4 of itself.
BOUND = {"float32": 5e-4}
# Where steps are replayed or guessed: what depends on the number of layers and heads is in the schedules.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(("kind", "block_size"), [("full", 3), ("full and windows", 2), ("soft cap, two groups", 3)])
def test_logits_are_those_of_the_definition(
    kind: str, block_size: int, random_model, tapped_engine, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    """Chunks beside rows that decode, prefixes found again, forks, requests thrown out and swapped."""
    monkeypatch.setattr(schedules, "BOUND", BOUND)
    monkeypatch.setattr(schedules, "alone", lambda m, asked, noise: alone(m, asked, block_size, noise))
    two_layers = {"num_hidden_layers": 2}  # of "full and windows" one each
    model = random_model("float32", device=DEVICE, kernels="torch", **KINDS[kind] | two_layers)
    engines: list[Engine] = []

    def with_triton(tapped: Decoder, **options: Any) -> Any:
        if kind != "full":
            options["num_blocks"] += 4 * len(set(tapped.config.layer_windows))
        engine, logits = tapped_engine(tapped, attention="triton", kv_dtype="kivi", **options)
        assert isinstance(engine.attention, TritonOpenBlockAttention)
        engines.append(engine)
        return engine, logits

    @settings(phases=[Phase.explicit], deadline=None)
    @example(work=(CROWDED, CROWDED_OPTIONS | {"block_size": block_size}))
    @given(work=st.just(None))
    def as_defined(work: Any) -> None:
        schedules.check_workload(model, work, with_triton, lambda m, text: defined(m, text, block_size))

    as_defined()
    ran = {step.attention for step in engines[0].trace.steps()}
    assert {("decode_by_channel", "flash_by_channel"), ("decode_by_channel",)} <= ran


@pytest.fixture
def model(random_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> FusedDecoder:
    """One whose steps can be replayed, in short buckets."""
    monkeypatch.setattr(graphs_module, "SHORTEST", 16)
    return dense_model(random_model("float32", device=DEVICE, kernels="triton", **SMALL))


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_replayed_steps_write_the_text_of_the_definition(num_drafts: int, model: FusedDecoder, random_model) -> None:
    """Rows come and go, and their slots with them: what was captured for some requests serves others. With guesses a
    row has several tokens, and wrong ones are taken back."""
    texts = [greedy(random_model("float32", device=DEVICE, kernels="torch", **SMALL), p, 8, 4) for p in PROMPTS]
    written = {f"r{i}": p + text for i, (p, text) in enumerate(zip(PROMPTS, texts, strict=True))}
    config = EngineConfig(
        kv_dtype="kivi", block_size=4, num_blocks=16, max_num_batched_tokens=30, max_num_seqs=4, attention="triton",
        prefix_cache="off", overlap="off", num_drafts=num_drafts, max_model_len=40,
    )  # fmt: skip
    engine = Engine(model, config, Parts(sampler=TwinSampler(), proposer=Wrong(written) if num_drafts else None))
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len, num_drafts)
    assert serve(engine) == texts
    stats = engine.executor.stats
    assert stats.replayed_steps > stats.graphs_captured > 1
    kept = [n for step in engine.trace.steps() for n in step.num_new_tokens]
    assert (max(kept) > 1) == bool(num_drafts)


@pytest.mark.parametrize("replayed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trees_of_guesses_write_the_text_of_the_definition(
    replayed: bool, random_model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose paths fill blocks: launched one by one, beside rows without guesses; and as graphs."""
    monkeypatch.setattr(graphs_module, "SHORTEST", 16)
    model = dense_model(random_model("float32", device=DEVICE, kernels="triton", **SMALL))
    prompts = [PROMPTS[2], PROMPTS[4]]
    texts = [greedy(random_model("float32", device=DEVICE, kernels="torch", **SMALL), p, 6, 3) for p in prompts]
    written = {f"r{i}": p + text for i, (p, text) in enumerate(zip(prompts, texts, strict=True))}
    config = EngineConfig(
        kv_dtype="kivi", block_size=3, num_blocks=20, max_num_batched_tokens=30 if replayed else 10, max_num_seqs=2,
        attention="triton", prefix_cache="off", overlap="off", speculative="lookahead", lookahead=(1, 4, 1),
        max_model_len=40,
    )  # fmt: skip
    engine = Engine(model, config, Parts(sampler=TwinSampler()))
    plant(engine.executor, written, monkeypatch)
    if replayed:
        engine.executor.use_graphs(recorder(), 2, engine.max_model_len, engine.config.num_drafts)
    asked = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    requests = [engine.add(p, asked, f"r{i}") for i, p in enumerate(prompts)]
    while engine.has_work():
        engine.step()
    assert [r.output_tokens for r in requests] == texts
    assert (engine.executor.stats.replayed_steps > 1) == replayed
    assert max(n for step in engine.trace.steps() for n in step.num_new_tokens) > 2


def test_graphs_are_for_kernels_that_write_no_padding(model: FusedDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that read lengths on the device: so not for torch's attention."""
    engines = {
        name: Engine(model, EngineConfig(kv_dtype="kivi", num_blocks=8, attention=name))  # type: ignore[arg-type]
        for name in ("triton", "torch")
    }
    monkeypatch.setattr(model, "device", SimpleNamespace(type="cuda"))
    assert why_not_graphs(engines["triton"]) is None
    assert str(why_not_graphs(engines["torch"])).startswith("rows that pad a batch must not be written to the cache")
