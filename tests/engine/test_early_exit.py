"""Speculative decoding by early exit: the text is that of plain decoding, and the drafts are those that the definition
gives, computed here without blocks, batches and steps.

What nobody owns holds NaN in the cache, which the drafting layers share: a key that they read and nobody wrote shows.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.features.speculative.early_exit import EarlyExit
from reference_impl.interfaces import SamplingParams
from tests.engine.conftest import (
    SWAP_BYTES,
    FakeStore,
    ShuffledPool,
    draft_of,
    make_late,
    poison_free_blocks,
    some,
    spread,
)
from tests.engine.test_draft_model import (
    PURE,
    alone,
    check_texts,
    check_texts_when_preempted,
    is_right_always,
    schedule,
    serve_at_times,
)
from tests.engine.test_drafts import kept_of, prompt, serve
from tests.engine.test_medusa import Made, drawn, hidden_of, texts_of
from tests.examples import examples
from tests.executor.dense import TwinSampler

LAYERS = 3
EXIT: dict[str, Any] = {"speculative": "early-exit", "exit_layer": LAYERS, "adaptive_drafts": "off"}


@pytest.fixture(scope="module")
def target(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128, num_hidden_layers=4)


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return texts_of(target)


def engine_of(model: Any, seed: int = 0, late: int | None = None, parts: Parts | None = None, **options: Any) -> Engine:
    """As `tapped_engine`, without the tap, whose layers would not be the model's."""
    overlap = "off" if late is None else "on"
    parts = dataclasses.replace(parts or Parts(), block_pool=ShuffledPool(options["num_blocks"], seed))
    engine = Engine(model, EngineConfig(overlap=overlap, **{"swap_bytes": SWAP_BYTES} | EXIT | options), parts)
    poison_free_blocks(engine)
    if late is not None:
        make_late(engine, late)
    return engine


# --- drafts by their definition -------------------------------------------------------------------------------------


def drafts_of(model: Any, tokens: list[int], k: int, sampling: SamplingParams, num_layers: int = LAYERS) -> list[int]:
    """The k drafts behind these tokens."""
    found: list[int] = []
    for _ in range(k):
        text = tokens + found
        found.append(drawn(model, hidden_of(model, text, num_layers), len(text), sampling))
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """As they are made."""
    found: Made = []
    inner = EarlyExit.propose

    def propose(self: EarlyExit, passes: Any, t: Any, slots: Any, *others: Any) -> Any:
        q = inner(self, passes, t, slots, *others)
        for slot, name in zip(passes[0].slots, passes[0].request_ids, strict=True):
            k, known = sum(slot in batch.slots for batch in passes), int(slots.computed[slot]) + 1
            tokens = slots.tokens[slot, : known + k].tolist()
            found.append((name, tokens[:known], tokens[known:]))
        return q

    monkeypatch.setattr(EarlyExit, "propose", propose)
    return found


def check_drafts(made: Made, model: Any, asked: dict[str, SamplingParams]) -> None:
    for name, known, drafts in {(name, tuple(known), tuple(drafts)) for name, known, drafts in made}:
        assert [*drafts] == drafts_of(model, [*known], len(drafts), asked[name]), (name, len(known))


@pytest.mark.parametrize(
    ("budget", "k", "prefix_cache", "late"), spread([(5, 2), (100, 4), (17, 5)], ["off", "hash"], [None, 1])
)
def test_drafts_are_those_of_the_definition(
    target, plain, made, budget: int, k: int, prefix_cache: str, late: int | None
) -> None:
    engine = engine_of(
        target, late=late, num_drafts=k, num_blocks=60, block_size=4, max_num_seqs=3, max_num_batched_tokens=budget,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    for _ in range(2):
        check_texts(serve(engine, PURE), plain)
    hits = [cached for step in engine.trace.steps() for _, cached in step.admitted]
    assert (max(hits) > 0) == (prefix_cache != "off")
    assert len(made) > 30
    assert max(len(drafts) for _, _, drafts in made) == min(k, budget - 1)
    check_drafts(made, target, PURE)
    kept = [num for step in kept_of(engine) for num, _ in step.values()]
    assert 0 < sum(kept) < sum(len(drafts) for _, _, drafts in made)  # some rejected, some kept


def test_rows_of_one_step_have_drafts_of_different_numbers(target, made) -> None:
    asked = {f"r{i}": SamplingParams(max_tokens=2 + i, temperature=0.9, seed=i) for i in range(6)}
    engine = engine_of(target, num_blocks=60, num_drafts=5, prefix_cache="off")
    serve(engine, asked)
    check_drafts(made, target, asked)
    assert any(len({row.num_drafts for row in step.rows}) > 3 for step in engine.trace.steps())


def test_a_sampler_that_looks_positions_up_on_the_device_draws_the_same_drafts(target, plain, made) -> None:
    engine = engine_of(target, parts=Parts(sampler=TwinSampler()), num_drafts=3, num_blocks=60, prefix_cache="off")
    check_texts(serve(engine, PURE), plain)
    assert {len(drafts) for _, _, drafts in made} >= {1, 3}
    check_drafts(made, target, PURE)


@pytest.mark.parametrize(("preemption", "late"), spread(["recompute", "swap"], [None, 1]))
def test_drafts_are_the_same_after_a_preemption(target, plain, made, preemption: str, late: int | None) -> None:
    engine = engine_of(
        target, late=late, num_drafts=4, block_size=4, num_blocks=16, max_num_batched_tokens=24, prefix_cache="off",
        preemption=preemption,
    )  # fmt: skip
    check_texts(serve(engine, PURE), plain)
    assert any(step.preempted for step in engine.trace.steps())
    assert any(step.transfers.swap_in for step in engine.trace.steps()) == (preemption == "swap")
    check_drafts(made, target, PURE)


def test_a_model_with_windows_drafts_by_all_its_groups(windowed, made) -> None:
    plain = texts_of(windowed)
    engine = engine_of(windowed, num_drafts=4, num_blocks=90, block_size=4, max_num_batched_tokens=11)
    assert len(engine.kv_specs) == 2
    check_texts(serve(engine, PURE), plain)
    check_drafts(made, windowed, PURE)


def test_where_the_other_layers_add_nothing_all_drafts_are_right(target) -> None:
    """So the distribution that drafts are drawn from is the target's own, at the right positions."""
    idle = copy.deepcopy(target)
    for linear in (idle.layers[LAYERS].o, idle.layers[LAYERS].mlp.down):
        linear.params["weight"].zero_()
    engine = engine_of(idle, num_blocks=64, block_size=4, num_drafts=3, max_num_batched_tokens=19)
    serve(engine, PURE | {"free": SamplingParams(max_tokens=30)})
    assert is_right_always(engine)


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preemption", "late"), spread(["recompute", "swap"], [None, 2]))
def test_the_text_is_that_of_plain_decoding(target, plain, preemption: str, late: int | None) -> None:
    engine = engine_of(
        target, late=late, num_drafts=3, block_size=4, num_blocks=24, preemption=preemption, max_num_batched_tokens=24,
        prefix_cache="hash",
    )  # fmt: skip
    check_texts_when_preempted(engine, plain)


def test_any_schedule_of_requests_and_aborts_gives_the_same_texts(target) -> None:
    @settings(max_examples=examples(25), deadline=None, derandomize=True, database=None)
    @given(work=schedule())
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        asked, options = work
        engine = engine_of(target, **options)
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            for mine, text in zip(members, alone(target, a), strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (text if ended else text[: mine.num_tokens]), (number, mine.id)
        assert engine.kv.num_available == engine.num_blocks

    same()


@pytest.mark.parametrize(
    "options",
    some(
        [{"kv_dtype": "int8"}, {"batch_invariant": True}],
        [{"kv_dtype": "int8"}, {"kv_dtype": "fp8"}, {"batch_invariant": True}],
    ),
)
def test_eight_bits_and_tokens_computed_one_by_one(target, options: dict[str, Any]) -> None:
    config = EngineConfig(num_blocks=64, block_size=4, **options)
    texts = {name: r.tokens for name, r in serve(Engine(target, config), PURE).items()}
    engine = Engine(target, dataclasses.replace(config, num_drafts=3, **EXIT))
    check_texts(serve(engine, PURE), texts)
    assert any(row.num_drafts == 3 for step in engine.trace.steps() for row in step.rows)


def test_prompts_that_are_scored_samples_and_held_requests_stand_beside_it(target) -> None:
    found = []
    for options in ({}, {**EXIT, "num_drafts": 3}):
        one = Engine(target, EngineConfig(num_blocks=64, block_size=4, **options))
        scored = one.add(prompt("scored"), SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=2), "s")
        samples = one.add(prompt("shared"), SamplingParams(max_tokens=20, seed=5, n=3), "a")
        members = [samples, *samples.children]
        held = one.add(prompt("held"), SamplingParams(max_tokens=5, temperature=0), "h", holds=True)
        for token in range(4):
            one.step()
            one.append("h", token)
        one.abort("h")
        while one.has_work():
            one.step()
        texts = [request.tokens for request in (scored, held, *members)]
        found.append((texts, [r and r.token for r in scored.prompt_logprobs]))
    assert found[0] == found[1]


def test_pages_of_a_store_are_all_that_a_prefix_needs(target, plain, made) -> None:
    store = FakeStore(["now"])
    for _ in range(2):
        engine = engine_of(target, num_blocks=64, block_size=4, num_drafts=3, parts=Parts(page_store=store))
        check_texts(serve(engine, PURE), plain)
        engine.save_pages()
    assert store.begun, "the second engine loaded nothing"
    check_drafts(made, target, PURE)


def test_numbers_that_are_not_finite_end_in_an_error(random_model) -> None:
    model = random_model("float64", num_hidden_layers=3, head_dim=16)
    model.layers[0].input_norm.fill_(torch.nan)
    engine = Engine(model, EngineConfig(num_blocks=16, **EXIT | {"exit_layer": 1}))
    with pytest.warns(RuntimeWarning, match="its logits are not all finite numbers"):
        requests = serve(engine, PURE)
    assert {request.finish_reason for request in requests.values()} == {"error"}


# --- options ---------------------------------------------------------------------------------------------------------


def test_half_of_the_layers_draft_unless_a_number_is_given(target) -> None:
    for given_layers, num in ((0, 2), (1, 1), (3, 3)):
        engine = Engine(target, EngineConfig(num_blocks=8, speculative="early-exit", exit_layer=given_layers))
        assert len(draft_of(engine).model.layers) == num
        assert engine.config.num_drafts == 4
    assert len(target.layers) == 4, "the model itself keeps all of them"
    plain_engine = Engine(target, EngineConfig(kv_cache_bytes=2**20))
    assert Engine(target, EngineConfig(kv_cache_bytes=2**20, **EXIT)).num_blocks == plain_engine.num_blocks


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"speculative": "early-exit", "exit_layer": 4}, ConfigError, "fewer layers than the model's 4, got 4"),
        ({"exit_layer": 2}, ConfigError, "exit_layer=2 is for speculative='early-exit', and it is 'off'"),
        ({"speculative": "ngram", "exit_layer": 2}, ConfigError, "and it is 'ngram'"),
        ({"speculative": "early-exit", "exit_layer": -1}, ValueError, "exit_layer: expected an integer of at least 0"),
    ],
)
def test_layers_that_there_are_not_are_refused(target, options: dict[str, Any], error: type, expected: str) -> None:
    with pytest.raises(error, match=expected):
        Engine(target, EngineConfig(num_blocks=8, **options))


def test_a_draft_model_and_a_model_of_one_layer_are_refused(target, random_model) -> None:
    with pytest.raises(ValueError, match="speculative='early-exit' brings a proposer .* Parts.draft_model"):
        Engine(target, EngineConfig(num_blocks=8, **EXIT), Parts(draft_model=target))
    with pytest.raises(ConfigError, match="expected fewer layers than the model's 1"):
        Engine(random_model("float64", num_hidden_layers=1), EngineConfig(num_blocks=8, speculative="early-exit"))


@pytest.mark.parametrize("worker", ["here", "process"])
def test_the_course_target_writes_the_same_text(worker: str) -> None:
    sampling, texts = SamplingParams(max_tokens=16, temperature=0), []
    for options in ({}, {"speculative": "early-exit", "exit_layer": 6, "num_drafts": 2}):
        made = LLM(
            course_model("target"), "float64", num_blocks=32, max_model_len=256, worker=worker, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        with contextlib.closing(made.engine):
            texts.append(made.generate("def open_file(", sampling)[0].outputs[0].token_ids)
            drafts = sum(row.num_drafts for step in made.engine.trace.steps() for row in step.rows)
            assert (drafts > 0) == bool(options)
    assert texts[0] == texts[1]
