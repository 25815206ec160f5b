"""A feature head whose drafts are of few tokens: the text is that of plain decoding, and no other token is drafted.
(Texts without a seed: `test_tree_drafts.py`.)"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.draft_folder import load_feature_head
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.features.speculative.draft_part import DraftPart
from reference_impl.features.speculative.feature_head import FeatureDraft, FeatureHead
from reference_impl.observe.trace import DraftUse
from tests.engine.test_draft_model import check_texts
from tests.engine.test_drafts import ASKED, serve
from tests.engine.test_feature_head import random_head

FEW = torch.arange(3, 61, 2)


@pytest.fixture
def head(random_model: Callable) -> FeatureHead:
    found = random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    found.draft_tokens = FEW
    return found


def test_logits_are_the_targets_at_these_tokens_and_nothing_elsewhere(target, head) -> None:
    head.follow(target)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, expected = head.logits(hidden), target.logits(hidden)
    for token in range(61):
        if token in FEW.tolist():
            assert torch.allclose(found[:, token], expected[:, token], rtol=0, atol=1e-12)
        else:
            assert (found[:, token] == -torch.inf).all()


@pytest.mark.parametrize(
    "options",
    [{"num_drafts": 3, "adaptive_drafts": "off"}, {"draft_tree": (3, 2)}, {"draft_tree": "dynamic,3,3"}],
    ids=str,
)
def test_texts_are_those_of_plain_decoding_and_drafts_are_of_these_tokens(
    target, head, monkeypatch, options: dict[str, Any]
) -> None:
    plain = {
        name: serve(Engine(target, EngineConfig(num_blocks=48)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }
    drafted: set[int] = set()
    engine = Engine(target, EngineConfig(num_blocks=60, speculative="eagle", **options), Parts(draft_model=head))
    chosen = DraftPart.chosen

    def watched(part: DraftPart, run: Any, tokens: torch.Tensor) -> torch.Tensor:
        if "draft.tokens" in run.tensors:
            drafted.update(run.tensors["draft.tokens"].tolist())
        return chosen(part, run, tokens)

    monkeypatch.setattr(DraftPart, "chosen", watched)
    check_texts(serve(engine, ASKED), plain)
    assert isinstance(engine.executor.draft, FeatureDraft)
    assert len(drafted) > 5
    assert drafted <= set(FEW.tolist())
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0


def test_a_folder_names_them_in_its_config(tmp_path: Path) -> None:
    folder = tmp_path / "head"
    shutil.copytree(course_model("eagle"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"draft_tokens": [9, 4, 17]}))
    found = load_feature_head(folder).draft_tokens
    assert found is not None
    assert found.tolist() == [4, 9, 17]
    for wrong in ([], [4, 4], [4096], [True], "4", [1.0]):
        (folder / "config.json").write_text(json.dumps(config | {"draft_tokens": wrong}))
        with pytest.raises(ConfigError, match="draft_tokens: expected a list of different tokens of the vocabulary of"):
            load_feature_head(folder)
