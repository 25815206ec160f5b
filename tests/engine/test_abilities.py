"""What parts can do besides (interfaces/abilities.py): the engine's own can, plain ones are used without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.worker_half import why_not_graphs
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.features.baselines.dynamic_batching import DynamicBatching
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.features.fusion.fusion import FusedMethod
from reference_impl.interfaces import (
    CapturesGraphs,
    DefersReuse,
    NamesKernels,
    PinsPrefixes,
    PlansAhead,
    ReadsScales,
    SamplingParams,
    SwapsOut,
    WaitsOnPurpose,
    has_scales,
    scales_of,
    takes_bounds,
)
from reference_impl.simulation.cost import BoundedCost, SummedCost
from tests.executor.dense import DenseAttention, dense_engine, dense_model

CONFIG = EngineConfig(block_size=4, num_blocks=30, prefix_cache="off")


class PlainKV:
    """What `KVManager` promises, and nothing more."""

    def __init__(self, inner: Any):
        for name in ("admit", "reserve", "commit", "fork", "free", "take_transfers"):
            setattr(self, name, getattr(inner, name))
        self.inner = inner

    @property
    def num_available(self) -> int:
        return self.inner.num_available


class PlainAttention:
    """What `AttentionBackend` promises, and nothing more."""

    def __init__(self, inner: Any):
        self.plan, self.forward = inner.plan, inner.forward


class Passes:
    """A wrapper that passes everything on."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def text(engine: Engine) -> list[int]:
    request = engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    while engine.has_work():
        engine.step()
    return request.output_tokens


def test_the_engines_own_parts_have_the_abilities_that_their_work_needs(random_model: Callable) -> None:
    engine = Engine(random_model("float32"), CONFIG)
    assert isinstance(engine.scheduler, PlansAhead)
    assert not isinstance(engine.scheduler, WaitsOnPurpose)
    assert isinstance(engine.kv, DefersReuse)
    assert isinstance(engine.executor, CapturesGraphs)
    assert has_scales(Engine(random_model("float32"), replace(CONFIG, kv_dtype="fp8")).kv_cache)
    assert not has_scales(engine.kv_cache)
    assert isinstance(engine.kv, PinsPrefixes)
    assert not isinstance(engine.kv, SwapsOut)
    assert isinstance(engine.attention, NamesKernels)
    of_scales = Engine(random_model("float32"), replace(CONFIG, kv_dtype="fp8")).attention
    assert isinstance(of_scales, ReadsScales)
    assert of_scales.reads_scales
    assert not isinstance(StaticBatching(engine.kv, 4), PlansAhead | WaitsOnPurpose)
    assert isinstance(DynamicBatching(engine.kv, 4, 0.1), WaitsOnPurpose)
    assert not isinstance(UnquantizedLinear(torch.float32, torch.device("cpu")), FusedMethod)


def test_parts_without_abilities_give_the_same_text(random_model: Callable) -> None:
    model = random_model("float64")
    own = Engine(model, CONFIG)
    parts = Parts(kv_manager=PlainKV(own.kv), block_pool=own.block_pool, attention=PlainAttention(own.attention))
    plain = Engine(model, CONFIG, parts)
    assert text(plain) == text(Engine(model, CONFIG))
    assert {step.attention for step in plain.trace.steps()} == {()}


def test_overlap_names_each_part_that_cannot(random_model: Callable) -> None:
    model, config = random_model("float64"), EngineConfig(block_size=4, num_blocks=30, overlap="on")
    own = Engine(model, CONFIG)
    kv = PlainKV(own.kv)
    with pytest.raises(ValueError, match=r"these cannot: kv_manager \(step_submitted, step_collected\)$"):
        Engine(model, config, Parts(kv_manager=kv, block_pool=own.block_pool))
    with pytest.raises(ValueError, match=r"these cannot: scheduler \(advance\), kv_manager \(step_submitted, step_c"):
        Engine(model, config, Parts(kv_manager=kv, block_pool=own.block_pool, scheduler=StaticBatching(kv, 4)))


def test_a_cache_that_only_passes_scales_on_has_none_for_the_check_as_for_the_attention(random_model: Callable) -> None:
    """If one took them for there and the other did not, codes of 8 bits would be read as values."""
    model, config = random_model("float32"), EngineConfig(block_size=4, num_blocks=30, kv_dtype="fp8")
    own = Engine(model, config)
    assert scales_of(own.kv_cache, 0)[0] is not None
    wrapped: Any = Passes(own.kv_cache)
    assert scales_of(wrapped, 0) == (None, None)
    with pytest.raises(ConfigError, match=r"needs a cache with scales\(layer\)"):
        Engine(model, config, Parts(kv_cache=wrapped))


def test_a_cost_of_sums_and_one_with_a_longest_sequence_are_told_by_their_members() -> None:
    class PerRow:
        bytes_per_token = 1.0

        def step_seconds(self, new_tokens: Any, past_tokens: Any) -> float:
            return 1.0

    class Summed(PerRow):
        longest = 100

        def decode_seconds(self, num_rows: int, past_tokens: int) -> float:
            return 1.0

    assert not isinstance(PerRow(), SummedCost | BoundedCost)
    assert isinstance(Summed(), SummedCost)
    assert isinstance(Summed(), BoundedCost)


def test_graphs_need_attention_that_takes_bounds_of_lengths(
    random_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a graph replays must not depend on the lengths that the host had when it was captured."""

    class ReadsLengthsOnTheHost(DenseAttention):
        takes_bounds = False

    engine = dense_engine(dense_model(random_model("float64")), num_blocks=30, block_size=4)
    monkeypatch.setattr(engine.model, "device", SimpleNamespace(type="cuda"))
    assert why_not_graphs(engine) is None
    engine.attention = ReadsLengthsOnTheHost(1.0)
    assert "ReadsLengthsOnTheHost reads lengths on the host" in str(why_not_graphs(engine))
    assert not takes_bounds(PlainAttention(engine.attention))


class OlderScheduler:
    """As a lab's notebook of last year might have it."""

    num_waiting = num_running = 0

    def add(self, request: Any) -> None: ...
    def schedule(self) -> None: ...


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"scheduler": OlderScheduler()},
            r"Parts\.scheduler, OlderScheduler, has no abort, has_work, update: the engine calls them, "
            r"see Scheduler in reference_impl/interfaces\. If it is a cell of an older lab notebook, `inferlab learn",
        ),
        ({"attention": print}, r"Parts\.attention, builtin_function_or_method, has no forward, plan"),
        ({"prefix_index": []}, r"Parts\.prefix_index, list, has no evict, match"),
        ({"sampler": 3}, r"Parts\.sampler, int, has no __call__"),
        ({"policy": SimpleNamespace(rank=print, finished=print)}, r"Parts\.policy, SimpleNamespace, has no preemptive"),
        ({"clock": SimpleNamespace}, r"Parts\.clock, SimpleNamespace, is a class: expected an object of it"),
    ],
)
def test_a_part_that_lacks_what_is_called_is_refused_by_name(random_model: Callable, parts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(random_model(), CONFIG, Parts(**parts))


def test_a_manager_without_pins_serves_and_says_so_when_one_is_asked_for(random_model: Callable) -> None:
    engine = Engine(random_model(), CONFIG)
    plain = PlainKV(engine.kv)
    engine = Engine(random_model(), CONFIG, Parts(block_pool=engine.block_pool, kv_manager=plain))
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    while engine.has_work():
        engine.step()
    with pytest.raises(ValueError, match="pin: PlainKV has no pin and unpin, see PinsPrefixes"):
        engine.pin([1, 2, 3, 4])
