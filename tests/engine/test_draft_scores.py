"""What a model's drafts are drawn from: logits that are moved as the target's are. The distribution of texts with
penalties, biases and stops is tested in `test_rejection.py`, their drafts by definition in `test_feature_head.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.features.speculative import model_source
from reference_impl.features.speculative.draft_scores import not_numbers
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.test_draft_model import check_texts, is_right_always
from tests.engine.test_drafts import ASKED, serve
from tests.engine.test_feature_head import random_head
from tests.engine.test_medusa import random_heads

MOVED = {name: ASKED[name] for name in ("penalised", "drawn, penalised", "biased", "drawn, all 30")}


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return {name: r.tokens for name, r in serve(Engine(target, EngineConfig(num_blocks=64)), MOVED).items()}


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_target_as_its_own_draft_is_right_always(target, plain, overlap: str) -> None:
    """So each of a row's drafts counts those before it."""
    config = EngineConfig(num_blocks=64, num_drafts=5, overlap=overlap)
    engine = Engine(target, config, Parts(draft_model=target))
    check_texts(serve(engine, MOVED), plain)
    assert is_right_always(engine)


@pytest.mark.parametrize("kind", ["model", "head", "heads", "tree", "grown"])
def test_more_drafts_are_kept_than_of_the_models_own_logits(
    target, plain, random_model: Callable, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    half = copy.deepcopy(target)
    half.embedding += 0.05 * torch.randn(half.embedding.shape, generator=torch.Generator().manual_seed(1)).double()
    head = random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    trees = {"tree": (2, 1, 1), "grown": "dynamic,2,3"}
    asked = {name: MOVED[name] for name in (["biased", "drawn, all 30"] if kind in trees else MOVED)}
    options = {"speculative": "eagle", "draft_tree": trees[kind]} if kind in trees else {"num_drafts": 4}
    kept = []
    for moves in (True, False):
        if not moves:
            monkeypatch.setattr(model_source, "moved_as_the_targets", lambda run, logits, at: logits)
        draft = {"model": half, "heads": random_heads()}.get(kind, head)
        engine = Engine(target, EngineConfig(num_blocks=64, **options), Parts(draft_model=draft))
        check_texts(serve(engine, asked), plain)
        kept.append(DraftUse.of(engine.trace.steps()).acceptance)
    assert kept[0] > kept[1]


@pytest.mark.parametrize("kind", ["model", "head", "heads", "tree", "grown"])
def test_drafts_of_logits_that_are_no_numbers_are_counted_and_named_once(
    target, random_model: Callable, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    broken = copy.deepcopy(target)
    broken.norm.fill_(torch.nan)
    layer = copy.deepcopy(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    layer.norm.fill_(torch.nan)
    heads = random_heads()
    heads.heads.params["bias"].fill_(torch.nan)
    draft = {"model": broken, "heads": heads}.get(kind) or random_head(layer)
    trees: dict[str, Any] = {"tree": (1, 1), "grown": "dynamic,1,2"}
    options = {"speculative": "eagle", "draft_tree": trees[kind]} if kind in trees else {"num_drafts": 2}
    engine = Engine(target, EngineConfig(num_blocks=64, **options), Parts(draft_model=draft))
    serve(engine, {"greedy": ASKED["greedy"]})
    num_drafts = DraftUse.of(engine.trace.steps()).num_draft_tokens
    assert engine.num_broken_drafts - num_drafts in ((0, 1) if kind == "grown" else (0,))  # grown, and then cut
    assert num_drafts > 9
    [said] = [record.message for record in caplog.records if "not numbers" in record.message]
    assert "2 drafts of the draft model came of logits that are not numbers" in said


def test_a_sound_draft_is_not_named(target, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), Parts(draft_model=target))
    serve(engine, MOVED)
    assert engine.num_broken_drafts == 0
    assert not caplog.records


@pytest.mark.parametrize(("kind", "name"), [("model", "Decoder"), ("heads", "MedusaHeads"), ("grown", "FeatureHead")])
@pytest.mark.parametrize("fault", ["a column", "a row"])
def test_logits_of_another_shape_are_refused_by_name(target, random_model, kind: str, name: str, fault: str) -> None:
    layer = random_model("float64", num_hidden_layers=1)
    draft = {"model": copy.copy(target), "heads": random_heads()}.get(kind) or random_head(layer)
    right = draft.logits
    draft.logits = lambda h: right(h)[:, :-1] if fault == "a column" else right(h).repeat(2, 1)  # type: ignore[method-assign]
    options = {"speculative": "eagle", "draft_tree": "dynamic"} if kind == "grown" else {"num_drafts": 2}
    engine = Engine(target, EngineConfig(num_blocks=30, **options), Parts(draft_model=draft))
    engine.add([1, 2, 3], SamplingParams(max_tokens=20, temperature=0))
    engine.step()
    with pytest.raises(
        ValueError, match=rf"{name}.logits: expected \[\d, 61\], a row for each of .* got \[\d, 6[01]\]"
    ):
        engine.step()


def test_tokens_that_are_ruled_out_are_no_broken_numbers() -> None:
    inf, nan = torch.inf, torch.nan
    rows = [[0.0, -inf, 2.0], [-inf, -inf, -inf], [0.0, inf, 1.0], [0.0, 1.0, nan], [-1.0, 3.4e38, 0.0]]
    assert [int(not_numbers(torch.tensor([row]))) for row in rows] == [0, 1, 1, 1, 0]
    assert int(not_numbers(torch.tensor(rows))) == 3
