"""An option that nothing would read beside a custom part is an error that names both. Which these are is found by
watching who reads the config while an engine is made with each part."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.own_parts import READ_BY
from reference_impl.assembly.parts import Parts
from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.interfaces import SwapsOut
from tests.engine.test_abilities import PlainKV

# What only looks whether options fit together, or copies them.
_CHECKS = (
    "dataclasses",
    *(f"reference_impl.assembly.{name}" for name in ("checks", "own_parts", "config", "speculation")),
)
OPTIONS = [field.name for field in dataclasses.fields(EngineConfig)]
ASKED: dict[str, Any] = {
    "sampling_noise": "gumbel", "acceptance": "typical", "batch_invariant": True, "graphs": "on",
    "attention": "torch", "exit_layer": 1, "memory_percent": 50, "prefix_cache": "hash",
    "admission": "worst_case", "adaptive_drafts": "on",
}  # fmt: skip
NEEDS: dict[str, dict[str, Any]] = {"acceptance": {"num_drafts": 2}}
# Read in other places than where a custom part would have read them; an index that stands for a prefix cache of any
# name, and of none (lab 06 has it so); drafts beside a scheduler are refused by `check_drafts`. Then: not read while
# an engine is made on a CPU.
ELSEWHERE = {("scheduler", "max_num_batched_tokens"), ("scheduler", "num_drafts"), ("prefix_index", "prefix_cache")}
ON_A_GPU_OR_WITH_DRAFTS = {"acceptance", "attention", "exit_layer", "memory_percent"}


class Watched(EngineConfig):
    def __getattribute__(self, name: str) -> Any:
        if name in OPTIONS and (caller := sys._getframe(1).f_globals["__name__"]) not in _CHECKS:
            READ.setdefault(name, set()).add(caller)
        return object.__getattribute__(self, name)


READ: dict[str, set[str]] = {}


def reads(model: Any, parts: Parts) -> set[str]:
    config = Watched(num_blocks=20)
    READ.clear()
    Engine(model, config, parts)
    return set(READ)


def given(own: Engine) -> dict[str, Any]:
    """A part of each kind that stands alone."""
    return {
        "block_pool": own.block_pool, "prefix_index": HashIndex(16), "kv_manager": own.kv, "policy": FirstCome(),
        "scheduler": own.scheduler, "kv_cache": own.kv_cache, "attention": own.attention,
        "sampler": own.executor.sampler, "executor": own.executor, "clock": own.clock, "trace": own.trace,
    }  # fmt: skip


def with_part(own: Engine, name: str) -> Parts:
    pool = {"block_pool": own.block_pool} if name == "kv_manager" else {}
    return Parts(**pool, **{name: given(own)[name]})


def test_what_nothing_reads_beside_a_custom_part_is_listed(random_model: Callable) -> None:
    model = random_model("float64")
    own = Engine(model, EngineConfig(num_blocks=20))
    usual, lost = reads(model, Parts()), set()
    for name in given(own):
        lost |= {(name, option) for option in usual - reads(model, with_part(own, name))}
    listed = {(part, option) for option, _, part in READ_BY}
    assert lost - ELSEWHERE <= listed
    assert {pair for pair in listed - lost if pair[1] not in ON_A_GPU_OR_WITH_DRAFTS} == set()
    assert {"sampling_noise", "batch_invariant", "graphs"} <= {option for _, option in lost}


@pytest.mark.parametrize(("option", "asks_nothing", "part"), READ_BY)
def test_it_is_refused_by_both_names(option: str, asks_nothing: tuple[Any, ...], part: str, random_model) -> None:
    model = random_model("float64")
    own = Engine(model, EngineConfig(num_blocks=20))
    parts = with_part(own, part)
    expected = rf"{option}={ASKED[option]!r} is for the engine's own {part}, and Parts\.{part}, \w+, is given: leave"
    with pytest.raises(ValueError, match=expected):
        Engine(model, EngineConfig(num_blocks=20, **{option: ASKED[option]}, **NEEDS.get(option, {})), parts)
    for value in asks_nothing:
        Engine(model, EngineConfig(num_blocks=20, **{option: value}), parts)


def test_an_executor_that_was_made_with_the_options_loses_none(random_model: Callable) -> None:
    model = random_model("float64")
    own = Engine(model, EngineConfig(num_blocks=20, sampling_noise="gumbel"))
    own.executor.follows_options = True  # type: ignore[attr-defined]
    engine = Engine(model, own.config, Parts(executor=own.executor))
    assert engine.config.sampling_noise == "gumbel"
    own.executor.follows_options = False  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"Parts\.executor, LocalExecutor, is given"):
        Engine(model, own.config, Parts(executor=own.executor))


def test_a_scheduler_that_plans_otherwise_than_is_asked_is_refused(random_model: Callable) -> None:
    model = random_model("float64")
    own = Engine(model, EngineConfig(num_blocks=20))
    mine = Parts(scheduler=Scheduler(own.kv, 4, 100), kv_manager=own.kv, block_pool=own.block_pool)
    for options, expected in (
        ({"max_num_seqs": 8}, r"max_num_seqs=8, and Parts\.scheduler, Scheduler, has 4: give both the same number"),
        ({"max_num_seqs": 2}, r"max_num_seqs=2, and Parts\.scheduler, Scheduler, has 4"),
        ({"max_num_batched_tokens": 50}, r"max_num_batched_tokens=50, and Parts\.scheduler, Scheduler, has 100"),
    ):
        with pytest.raises(ValueError, match=expected):
            Engine(model, EngineConfig(num_blocks=20, **options), mine)
    larger = Scheduler(own.kv, 65, 100)  # than EngineConfig.max_num_seqs, for which the worker has slots
    with pytest.raises(ValueError, match=r"max_num_seqs=64, and Parts\.scheduler, Scheduler, has 65"):
        Engine(model, EngineConfig(num_blocks=20), Parts(scheduler=larger))
    for options in ({}, {"max_num_seqs": 4, "max_num_batched_tokens": 100}):
        assert Engine(model, EngineConfig(num_blocks=20, **options), mine).scheduler is mine.scheduler
    with pytest.raises(
        ValueError, match=r"preemption='swap' needs .* Scheduler, drops what it preempts: scheduler.hooks.add"
    ):
        Engine(model, EngineConfig(preemption="swap"), Parts(scheduler=mine.scheduler))
    swapping = Parts(scheduler=Engine(model, EngineConfig(num_blocks=20, preemption="swap")).scheduler)
    Engine(model, EngineConfig(num_blocks=20, preemption="swap"), swapping)


def test_adaptive_drafts_without_drafts_are_refused(random_model: Callable) -> None:
    with pytest.raises(ValueError, match="adaptive_drafts='on' is for drafts, and there are none"):
        Engine(random_model("float64"), EngineConfig(num_blocks=20, adaptive_drafts="on"))


def test_a_manager_that_cannot_swap_is_refused_where_it_should(random_model: Callable) -> None:
    model = random_model("float64")
    own = Engine(model, EngineConfig(num_blocks=20))
    plain = PlainKV(own.kv)
    assert not isinstance(plain, SwapsOut)
    with pytest.raises(ValueError, match=r"preemption='swap' needs .*, and Parts\.kv_manager, PlainKV, does not"):
        Engine(model, EngineConfig(preemption="swap"), Parts(kv_manager=plain, block_pool=own.block_pool))
