"""A module of multi-token prediction (DeepSeek-V3, 2024) drafts: the text is that of plain decoding, in chains and in
trees, also where the module gives no numbers; what does not fit is refused by name. That its drafts are those of the
definition: test_feature_head.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.draft_folder import load_feature_head
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.features.speculative.feature_head import FeatureHead
from reference_impl.interfaces import SamplingParams
from reference_impl.models.loader import CheckpointError
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import some
from tests.engine.test_draft_model import check_texts, check_texts_when_preempted
from tests.engine.test_drafts import ASKED, serve
from tests.engine.test_feature_head import random_head

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_drafts": 3, "adaptive_drafts": "off"},
    "tree": {"draft_tree": (2, 2)},
    "dynamic": {"draft_tree": "dynamic"},
}
SOME = {name: ASKED[name] for name in ("greedy", "drawn", "filtered", "drawn, penalised")}
TENSORS = 15  # 11 of a layer of Qwen3, the last norm; eh_proj, enorm, hnorm: none of the target's embedding or head


@pytest.fixture
def module(random_model: Callable) -> FeatureHead:
    """Of hidden size 32."""
    make = random_model.__wrapped__  # type: ignore[attr-defined]  # one of its own: heads keep their target in it
    found = random_head(make("float64", max_position_embeddings=128, num_hidden_layers=1))
    found.hidden_norm = 1 + 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(4)).double()
    return found


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return {
        name: serve(Engine(target, EngineConfig(num_blocks=32)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }


def kept(engine: Engine) -> tuple[int, int]:
    """Drafts that were kept; all that were made."""
    use = DraftUse.of(engine.trace.steps())
    return use.num_accepted_tokens, use.num_draft_tokens


@pytest.mark.parametrize("shape", SHAPES)
def test_greedy_and_seeded_texts_are_those_of_plain_decoding(target, module, plain, shape: str) -> None:
    config = EngineConfig(num_blocks=64, block_size=4, speculative="mtp", **SHAPES[shape])
    engine = Engine(target, config, Parts(draft_model=module))
    check_texts(serve(engine, SOME), plain)
    right, made = kept(engine)
    assert 0 < right < made


@pytest.mark.parametrize(("shape", "preemption"), [("chain", "swap"), ("tree", "recompute")])
def test_also_where_blocks_are_few(target, module, plain, shape: str, preemption: str) -> None:
    config = EngineConfig(num_blocks=24, block_size=4, speculative="mtp", preemption=preemption, **SHAPES[shape])
    check_texts_when_preempted(Engine(target, config, Parts(draft_model=module)), plain)


@pytest.mark.parametrize("shape", some(["tree"], [*SHAPES]))
def test_a_module_that_gives_no_numbers_changes_no_text(target, module, plain, shape: str) -> None:
    module.hidden_norm.fill_(torch.nan)
    config = EngineConfig(num_blocks=64, speculative="mtp", **SHAPES[shape])
    engine = Engine(target, config, Parts(draft_model=module))
    check_texts(serve(engine, SOME), plain)
    assert kept(engine)[1] > 0


def test_a_request_without_a_seed_gets_only_tokens_of_its_distribution(target, module, one_shot) -> None:
    """With top_k = 2 each token is one of the two likeliest there, though the module's drafts are none at all."""
    module.hidden_norm.fill_(torch.nan)
    engine = Engine(target, EngineConfig(num_blocks=64, speculative="mtp", num_drafts=3), Parts(draft_model=module))
    tokens = serve(engine, {"free": SamplingParams(max_tokens=30, top_k=2)})["free"].tokens
    logits = one_shot(target, tokens)
    for at in range(len(tokens) - 30, len(tokens)):
        assert tokens[at] in logits[at - 1].topk(2).indices.tolist(), at


# --- in a folder: the course target's own ----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    found = tmp_path / "mtp"
    found.mkdir()
    for name in ("config.json", "model.safetensors"):
        (found / name).write_bytes((course_model("mtp") / name).read_bytes())
    return found


def test_the_folder_has_the_modules_tensors_and_none_of_the_targets(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert {"eh_proj.weight", "enorm.weight", "hnorm.weight"} < set(tensors)
    assert len(tensors) == TENSORS
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert (folder / "model.safetensors").stat().st_size < 2e6
    found = load_feature_head(folder, torch.float32)
    assert found.method == "mtp"
    assert torch.equal(found.hidden_norm, tensors["hnorm.weight"].float())


def test_the_trained_module_keeps_greedy_and_seeded_texts() -> None:
    asked = [SamplingParams(max_tokens=16, temperature=heat, seed=5) for heat in (0.0, 1.0)]
    texts = {}
    for method in ("off", "mtp"):
        options = {"speculative": "mtp", "draft_model": course_model("mtp"), **SHAPES["chain"]}
        llm = LLM(course_model("target"), "float64", num_blocks=32, **(options if method == "mtp" else {}))
        texts[method] = [o.outputs[0].token_ids for o in llm.generate(["def read_lines(path):\n"] * 2, asked)]
    assert texts["off"] == texts["mtp"]
    assert kept(llm.engine)[0] > 0


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="speculative='mtp' needs a draft model, a module of multi-token prediction"):
        LLM(course_model("target"), num_blocks=32, speculative="mtp")
    with pytest.raises(ValueError, match="'mtp': expected 'eagle'"):
        LLM(course_model("target"), num_blocks=32, speculative="mtp", draft_model=course_model("eagle"))
    with pytest.raises(ConfigError, match="expected a head for hidden states of 128 numbers, found 256"):
        LLM(course_model("draft"), num_blocks=32, draft_model=folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 4100}))
    with pytest.raises(ConfigError, match="expected the target's vocabulary of 4,096 tokens, found 4,100"):
        LLM(course_model("target"), num_blocks=32, draft_model=folder)
    (folder / "config.json").write_text(json.dumps(config | {"draft_tokens": [4096]}))
    with pytest.raises(ConfigError, match="draft_tokens: expected a list of different tokens of the vocabulary"):
        LLM(course_model("target"), num_blocks=32, draft_model=folder)


def test_a_tensor_that_is_missing_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name != "hnorm.weight"}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing tensors.*hnorm\.weight"):
        LLM(course_model("target"), num_blocks=32, draft_model=folder)
