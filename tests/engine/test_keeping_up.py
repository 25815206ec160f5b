"""A draft model is switched off and on again while requests run: no text changes, and what it has not kept up
with gets no drafts. The target as its own draft is always right about what it has kept up with."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.features.speculative.adapting import Adapting
from reference_impl.features.speculative.feature_head import FeatureDraft
from reference_impl.features.speculative.payoff import Payoff
from reference_impl.features.speculative.step_costs import NUM_SEEN
from reference_impl.interfaces import Request, SamplingParams, StepPlan, StepRow
from tests.engine.conftest import some
from tests.engine.test_draft_model import PURE, check_texts, is_right_always
from tests.engine.test_drafts import ASKED, kept_of, prompt, serve
from tests.engine.test_feature_head import drafts_of, random_head, watch_drafts
from tests.engine.test_medusa import random_heads

NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def head(random_model: Callable) -> Any:
    return random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return {
        name: serve(Engine(target, EngineConfig(num_blocks=32)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }


class Flips(Payoff):
    """Goes on and off by chance, and stays so for some steps."""

    def __init__(self, seed: int):
        super().__init__()
        self.random = random.Random(seed)

    def add(self, *_: Any) -> None:
        self.on = self.random.random() < 0.7

    def wait(self) -> None:
        self.on = self.random.random() < 0.25


def flipping(engine: Engine, seed: int) -> Engine:
    """With NUM_DRAFTS drafts for each request that may have any."""
    scheduler: Any = engine.scheduler
    assert isinstance(scheduler, Adapting)
    scheduler.payoff = Flips(seed)
    for _ in range(NUM_SEEN):  # known, so that each step is judged
        scheduler.costs.plain.add(3, 0.01, 0)
    scheduler._num_that_pay = lambda request: NUM_DRAFTS  # type: ignore[method-assign]
    return engine


def serve_one_after_another(engine: Engine, asked: dict[str, SamplingParams], seed: int) -> dict[str, Request]:
    """Each begins some steps after the one before."""
    chance, requests = random.Random(seed), dict[str, Request]()
    for name, sampling in asked.items():
        requests[name] = engine.add(prompt(name), sampling, name)
        for _ in range(chance.randrange(12)):
            engine.step()
    while engine.has_work():
        engine.step()
    return requests


@pytest.mark.parametrize(
    ("seed", "late"), some([(0, None), (1, 1), (2, None), (3, 1)], list(itertools.product(range(6), (None, 1))))
)
def test_the_target_as_its_own_draft_is_right_about_all_that_it_has_kept_up_with(
    target, plain, tapped_engine, seed: int, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=target), late=late, num_drafts=NUM_DRAFTS, adaptive_drafts="on", num_blocks=60,
        block_size=4, max_num_seqs=3, max_num_batched_tokens=17, prefix_cache="off",
    )  # fmt: skip
    submit, kept_up = engine.executor.submit, list[bool]()
    engine.executor.submit = lambda step: (kept_up.append(step.keeps_up), submit(step))[1]
    check_texts(serve_one_after_another(flipping(engine, seed), PURE, seed), plain)
    assert is_right_always(engine)
    assert set(kept_up) == {True, False}
    assert engine.kv.num_available == engine.num_blocks


@pytest.mark.parametrize("seed", some([0, 1], range(4)))
def test_drafts_of_a_head_are_those_of_the_definition_where_it_has_kept_up(
    target,
    head,
    plain,
    monkeypatch,
    tapped_engine,
    seed: int,
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), num_drafts=NUM_DRAFTS, adaptive_drafts="on", num_blocks=60,
        block_size=4, max_num_seqs=3, max_num_batched_tokens=17, prefix_cache="off",
    )  # fmt: skip
    made = watch_drafts(monkeypatch)
    check_texts(serve_one_after_another(flipping(engine, seed), PURE, seed), plain)
    assert made
    for name, known, drafts in made:
        assert drafts == drafts_of(head, target, known, len(drafts), PURE[name]), (name, len(known))


@pytest.mark.parametrize(
    ("seed", "kind"),
    some([(0, "draft"), (1, "draft"), (2, "head"), (3, "head")], list(itertools.product(range(4), ("draft", "head")))),
)
def test_no_text_changes_with_blocks_that_are_few_and_prefixes_that_are_found(
    target,
    head,
    plain,
    tapped_engine,
    seed: int,
    kind: str,
) -> None:
    """What is found in the prefix cache may have holes in the draft's: then drafts are wrong, and no text is."""
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=target if kind == "draft" else head), num_drafts=NUM_DRAFTS,
        adaptive_drafts="on", num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=17,
        preemption="swap" if seed % 2 else "recompute",
    )  # fmt: skip
    flipping(engine, seed)
    for _ in range(2):
        check_texts(serve_one_after_another(engine, ASKED, seed), plain)
    assert engine.kv.num_available == engine.num_blocks
    assert kept_of(engine)


@pytest.mark.parametrize(
    ("seed", "method"),
    some(
        [(0, "medusa"), (1, "early-exit"), (2, "medusa")],
        list(itertools.product(range(3), ("medusa", "early-exit"))),
    ),
)
def test_what_need_not_keep_up_drafts_for_all_requests_a_step_after_it_is_on_again(
    target, plain, seed: int, method: str
) -> None:
    """Also for those that were computed while it was off."""
    config = EngineConfig(
        speculative=method, num_drafts=NUM_DRAFTS, adaptive_drafts="on", num_blocks=60, block_size=4, max_num_seqs=3,
        max_num_batched_tokens=17, prefix_cache="off",
    )  # type: ignore[arg-type]  # fmt: skip
    heads = random_heads() if method == "medusa" else None
    engine = flipping(Engine(target, config, Parts(draft_model=heads)), seed)
    scheduler: Any = engine.scheduler
    schedule, missed, again, behind = scheduler.schedule, set[str](), set[str](), set[str]()

    def watched(now: float) -> StepPlan:
        plan: StepPlan = schedule(now)
        assert plan.keeps_up == scheduler.payoff.on or not plan.rows
        again.update(row.request_id for row in plan.rows if row.num_drafts and row.request_id in missed)
        assert not any(row.num_drafts and row.request_id in behind for row in plan.rows)
        behind.difference_update(row.request_id for row in plan.rows)
        if not scheduler.payoff.on:
            missed.update(row.request_id for row in plan.rows)
            behind.update(row.request_id for row in plan.rows)
            assert not any(row.num_drafts for row in plan.rows)
        return plan

    scheduler.schedule = watched
    check_texts(serve_one_after_another(engine, PURE, seed), plain)
    assert again


@pytest.mark.parametrize("draft", ["draft", "eagle"])
def test_a_worker_says_how_long_what_drafts_took_and_nothing_where_it_did_not_run(draft: str) -> None:
    llm = LLM(course_model("target"), draft_model=course_model(draft), num_drafts=2, kv_cache_bytes=32 << 20)
    scheduler: Any = llm.engine.scheduler
    update, seen = scheduler.update, list[tuple[bool, bool, float]]()

    def watched(plan: Any, output: Any) -> Any:
        seconds = output.finished_at - output.started_at
        seen.append((plan.keeps_up, 0 < output.drafting < seconds, output.drafting))
        return update(plan, output)

    scheduler.update = watched
    flipping(llm.engine, 1)
    llm.generate(["def f(x):"] * 2, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    assert {kept_up for kept_up, _, _ in seen} == {True, False}
    for kept_up, within, drafting in seen:
        assert within if kept_up else drafting == 0


def test_a_row_whose_request_was_aborted_and_its_name_used_again_does_not_count_as_without_drafts(target: Any) -> None:
    """The step was in flight: its event has the other row alone."""
    config = EngineConfig(num_blocks=20, num_drafts=2, adaptive_drafts="on", overlap="on")
    engine = Engine(target, config, Parts(draft_model=target))
    scheduler: Any = engine.scheduler
    scheduler.payoff.on = False
    for name in ("stays", "goes"):
        engine.add([1, 2, 3], SamplingParams(max_tokens=9, temperature=0), name)
    for _ in range(3):
        engine.step()
    engine.abort("goes")
    engine.add([4, 5], SamplingParams(max_tokens=9, temperature=0), "goes")
    while engine.has_work():
        engine.step()
    steps = engine.trace.steps()
    assert [(len(step.rows), step.num_undrafted) for step in steps[:4]] == [(2, 0), (2, 2), (1, 1), (2, 1)]
    assert all(step.num_undrafted <= len(step.rows) for step in steps)


def test_a_step_with_drafts_of_a_model_that_does_not_keep_up_is_refused(target: Any) -> None:
    engine = Engine(target, EngineConfig(num_blocks=20, num_drafts=2), Parts(draft_model=target))
    engine.add([1, 2, 3], SamplingParams(max_tokens=9, temperature=0))
    engine.step()
    submit: Any = engine.executor.submit

    def without(step: Any) -> Any:
        assert any(isinstance(row, StepRow) and row.num_drafts for row in step.rows)
        object.__setattr__(step, "keeps_up", False)
        return submit(step)

    engine.executor.submit = without  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="has rows with drafts, of a model that it does not keep up"):
        engine.step()


def test_a_head_that_is_off_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(course_model("target"), draft_model=course_model("eagle"), num_drafts=2, kv_cache_bytes=32 << 20)
    scheduler: Any = llm.engine.scheduler
    scheduler.payoff.on, scheduler.payoff.patience = False, 10**9

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError

    monkeypatch.setattr(FeatureDraft, "propose", fails)
    monkeypatch.setattr(FeatureDraft, "keep_up", fails)
    llm.generate("def f(x):", SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
