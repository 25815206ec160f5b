"""Speculative decoding with a feature head: the text is that of plain decoding, and the drafts are those that the
definition gives, computed here without blocks, batches and steps."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.draft_folder import load_feature_head
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.parts import Parts
from reference_impl.core.linear import Linear, UnquantizedLinear
from reference_impl.core.sampler import SETTINGS, TorchSampler, settings_of
from reference_impl.features.speculative.feature_head import FeatureDraft, FeatureHead
from reference_impl.interfaces import SamplingParams
from reference_impl.kernels import reference
from reference_impl.models.loader import CheckpointError
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import some, spread
from tests.engine.test_draft_model import PURE, alone, check_texts, check_texts_when_preempted, schedule, serve_at_times
from tests.engine.test_drafts import ASKED, kept_of, prompt, serve
from tests.examples import examples
from tests.executor.dense import TwinSampler


@pytest.fixture(scope="module")
def head(random_model: Callable) -> FeatureHead:
    return random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))


def random_head(layer: Any) -> FeatureHead:
    """Of hidden size 32; what it is given of the target's hidden states is most of what it says."""
    fc = Linear(UnquantizedLinear(layer.dtype, layer.device), 64, {"fc": 32}, False, "fc")
    random = torch.Generator().manual_seed(3)
    weight = 0.1 * torch.randn(32, 64, generator=random, dtype=torch.float64)
    weight[:, 32:] += torch.eye(32)
    fc.load("fc", "weight", weight)
    embed_norm = 1 + 0.2 * torch.randn(32, generator=random, dtype=torch.float64)
    return FeatureHead(
        copy.copy(layer), fc, embed_norm.to(layer.device, layer.dtype)
    )  # it changes the layer, which tests share


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return {
        name: serve(Engine(target, EngineConfig(num_blocks=32)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }


# --- drafts by their definition -------------------------------------------------------------------------------------


def dense(model: Any, x: torch.Tensor) -> torch.Tensor:
    """x [length, hidden_size], what the first layer is given -> hidden states, after the last norm."""
    c, length = model.config, len(x)
    cos, sin = model.rotary.cos_sin[:, :length].unbind()
    for layer in model.layers:
        h = layer.normalize(x, layer.input_norm, c.norm_eps)
        qkv = layer.qkv(h).view(length, -1, c.head_dim)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], 1)
        qk = layer.normalize(torch.cat((q, k), 1), None, c.norm_eps) * layer.qk_norm
        qk = reference.rotate(qk, cos, sin)
        q, k = qk.split([c.num_heads, c.num_kv_heads], 1)
        k, v = (t.repeat_interleave(c.num_heads // c.num_kv_heads, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * c.attention_scale
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        x = x + layer.o(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
        x = x + layer.mlp(layer.normalize(x, layer.mlp_norm, c.norm_eps))
    return model.normalize(x, model.norm, c.norm_eps)


def moved(logits: torch.Tensor, tokens: list[int], num_prompt: int, p: SamplingParams) -> torch.Tensor:
    """Of the token behind these, [1, vocab_size] -> the same shape: with biases, penalties and what is ruled out."""
    scores, output = logits[0].tolist(), tokens[num_prompt:]
    for token, bias in (p.logit_bias or {}).items():
        scores[token] += bias
    for token in set(tokens):
        scores[token] *= p.repetition_penalty if scores[token] < 0 else 1 / p.repetition_penalty
    for token in set(output):
        scores[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
    for token in p.stop_token_ids if len(output) < p.min_tokens else ():
        scores[token] = -float("inf")
    return torch.tensor([scores], dtype=logits.dtype)


def drafts_of(
    head: FeatureHead, target: Any, tokens: list[int], k: int, sampling: SamplingParams, num_prompt: int | None = None
) -> list[int]:
    """The k drafts behind these tokens, of which the last is not computed yet. num_prompt: tokens of its prompt; None:
    the request has no penalties or biases."""
    features = dense(target, target.embedding[tokens[:-1]])
    tokens = list(tokens)
    eps = head.config.norm_eps
    for _ in range(k):
        embedded = reference.rms_norm(target.embedding[tokens[1:]], head.embed_norm, eps)
        given = features
        if head.hidden_norm is not None:
            given = reference.rms_norm(features, head.hidden_norm, eps)
        hidden = dense(head.layer, head.fc(torch.cat((embedded, given), 1)))[-1:]
        settings = np.array([settings_of(sampling, sampling.seed or 0, 0)], SETTINGS)
        columns = TorchSampler().columns(settings, np.array([len(tokens)]))
        t = {name: torch.from_numpy(array) for name, array in columns.items()}
        logits = target.logits(hidden)
        scores = logits if num_prompt is None else moved(logits, tokens, num_prompt, sampling)
        tokens.append(int(TorchSampler().choose(scores, t)))
        features = torch.cat((features, hidden))
    return tokens[-k:]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int], list[int]]]:
    return watch_drafts(monkeypatch)


def watch_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int], list[int]]]:
    """(request, its known tokens, the drafts behind them), as they are made."""
    found: list[tuple[str, list[int], list[int]]] = []
    inner = FeatureDraft.propose

    def propose(self: FeatureDraft, passes: Any, t: Any, slots: Any, *others: Any) -> Any:
        q = inner(self, passes, t, slots, *others)
        for slot, name in zip(passes[0].slots, passes[0].request_ids, strict=True):
            k, known = sum(slot in batch.slots for batch in passes), int(slots.computed[slot]) + 1
            tokens = slots.tokens[slot, : known + k].tolist()
            found.append((name, tokens[:known], tokens[known:]))
        return q

    monkeypatch.setattr(FeatureDraft, "propose", propose)
    return found


@pytest.mark.parametrize(
    ("budget", "k", "late"),
    some(
        [(5, 2, 1), (100, 4, None), (17, 5, 1)],
        [(budget, k, late) for budget, k in [(5, 2), (100, 4), (17, 5)] for late in (None, 1)],
    ),
)
def test_drafts_are_those_of_the_definition(
    target, head, plain, made, tapped_engine, budget: int, k: int, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), late=late, num_drafts=k, num_blocks=60, block_size=4, max_num_seqs=3,
        max_num_batched_tokens=budget, prefix_cache="off",
    )  # fmt: skip
    check_texts(serve(engine, PURE), plain)
    assert len(made) > 15
    assert max(len(drafts) for _, _, drafts in made) == min(k, budget - 1)
    for name, known, drafts in made:
        assert known == plain[name][: len(known)]
        assert drafts == drafts_of(head, target, known, len(drafts), PURE[name]), (name, len(known))
    kept = [num for step in kept_of(engine) for num, _ in step.values()]
    assert 0 < sum(kept) < sum(len(drafts) for _, _, drafts in made)  # some rejected, some kept: both are rolled over


def test_with_penalties_and_biases_drafts_are_those_of_the_definition(target, head, made) -> None:
    """Each counts the drafts before it as written."""
    names = "penalised", "drawn, penalised", "biased", "drawn, all 30"
    asked = {name: dataclasses.replace(ASKED[name], max_tokens=12, min_tokens=0) for name in names}
    asked["drawn, all 30"] = dataclasses.replace(ASKED["drawn, all 30"], max_tokens=12, min_tokens=12)
    serve(Engine(target, EngineConfig(num_blocks=60, num_drafts=3), Parts(draft_model=head)), asked)
    assert len(made) > 15
    for name, known, drafts in made:
        expected = drafts_of(head, target, known, len(drafts), asked[name], len(prompt(name)))
        assert drafts == expected, (name, len(known))


def test_a_sampler_that_looks_positions_up_on_the_device_draws_the_same_drafts(
    target, head, plain, made, tapped_engine
) -> None:
    """As on a GPU: what is drawn at a position depends on that position's own random number."""
    parts = Parts(draft_model=head, sampler=TwinSampler())
    engine, _ = tapped_engine(target, parts=parts, num_drafts=3, num_blocks=60, prefix_cache="off")
    check_texts(serve(engine, PURE), plain)
    assert {len(drafts) for _, _, drafts in made} >= {1, 3}
    for name, known, drafts in made:
        assert drafts == drafts_of(head, target, known, len(drafts), PURE[name]), (name, len(known))


@pytest.mark.parametrize(("num_blocks", "preemption"), spread([20, 16], ["recompute", "swap"]))
def test_drafts_are_the_same_after_a_preemption(
    target, head, plain, made, tapped_engine, num_blocks: int, preemption: str
) -> None:
    """But for the first ones of a request that was swapped, which come of nothing."""
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), num_drafts=4, block_size=4, num_blocks=num_blocks,
        max_num_batched_tokens=24, prefix_cache="off", preemption=preemption,
    )  # fmt: skip
    check_texts(serve(engine, PURE), plain)
    preempted = [name for step in engine.trace.steps() for name in step.preempted]
    assert preempted
    others = [
        name for name, known, drafts in made
        if drafts != drafts_of(head, target, known, len(drafts), PURE[name])
    ]  # fmt: skip
    assert Counter(others) <= (Counter(preempted) if preemption == "swap" else Counter())


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix_cache", "preemption", "late"), spread(["off", "hash"], ["recompute", "swap"], [None, 2])
)
def test_the_text_is_that_of_plain_decoding(
    target, head, plain, tapped_engine, preemption: str, prefix_cache: str, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=head), late=late, num_drafts=3, block_size=4, num_blocks=24,
        preemption=preemption, max_num_batched_tokens=24, prefix_cache=prefix_cache,
    )  # fmt: skip
    check_texts_when_preempted(engine, plain)


def test_any_schedule_of_requests_and_aborts_gives_the_same_texts(target, head, tapped_engine) -> None:
    @settings(max_examples=examples(25), deadline=None, derandomize=True, database=None)
    @given(work=schedule())
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        asked, options = work
        engine, _ = tapped_engine(target, parts=Parts(draft_model=head), **options)
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            for mine, text in zip(members, alone(target, a), strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (text if ended else text[: mine.num_tokens]), (number, mine.id)
        assert engine.kv.num_available == engine.num_blocks

    same()


@pytest.mark.parametrize("dtype", some(["bfloat16"], ["float32", "bfloat16"]))
def test_a_head_of_another_dtype_than_the_targets_drafts_too(target, plain, random_model, dtype: str) -> None:
    head = random_head(random_model(dtype, max_position_embeddings=128, num_hidden_layers=1))
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), Parts(draft_model=head))
    check_texts(serve(engine, PURE), plain)
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0


def test_other_uses_of_the_engine_stand_beside_it(target, head) -> None:
    """Prompts that are scored, held requests, 8 bits, tokens computed one by one."""
    expected = Engine(target, EngineConfig(num_blocks=64))
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), Parts(draft_model=head))
    found = []
    for one in (expected, engine):
        scored = one.add(prompt("scored"), SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=2), "s")
        held = one.add(prompt("held"), SamplingParams(max_tokens=5, temperature=0), "h", holds=True)
        for token in range(4):
            one.step()
            one.append("h", token)
        one.abort("h")
        while one.has_work():
            one.step()
        found.append((scored.tokens, [r and r.token for r in scored.prompt_logprobs], held.tokens))
    assert found[0] == found[1]
    for options in ({"kv_dtype": "int8"}, {"batch_invariant": True}):
        config = EngineConfig(num_blocks=64, block_size=4, **options)
        texts = {name: r.tokens for name, r in serve(Engine(target, config), PURE).items()}
        engine = Engine(target, dataclasses.replace(config, num_drafts=3), Parts(draft_model=head))
        check_texts(serve(engine, PURE), texts)


def test_a_head_drafts_for_one_model(target, head, random_model) -> None:
    Engine(target, EngineConfig(num_blocks=8, num_drafts=2), Parts(draft_model=head))
    other = random_model("float64", max_position_embeddings=64)
    with pytest.raises(ValueError, match="drafts for another model already"):
        Engine(other, EngineConfig(num_blocks=8, num_drafts=2), Parts(draft_model=head))


# --- a head in a folder ----------------------------------------------------------------------------------------------


def write_head(folder: Path, size: int = 256, **changes: Any) -> None:
    """With random weights, for the course target."""
    folder.mkdir()
    config = json.loads((Path(__file__).parents[2] / "datasets/course_model/target/config.json").read_text())
    config |= {"architectures": ["FeatureHead"], "layer_of": "Qwen3ForCausalLM", "num_hidden_layers": 1, **changes}
    config["hidden_size"] = size
    (folder / "config.json").write_text(json.dumps(config))
    layer, random = "model.layers.0.", torch.Generator().manual_seed(0)
    shapes = {
        "fc.weight": (size, 2 * size), "embed_norm.weight": (size,), "model.norm.weight": (size,),
        f"{layer}input_layernorm.weight": (size,), f"{layer}post_attention_layernorm.weight": (size,),
        f"{layer}self_attn.q_norm.weight": (64,), f"{layer}self_attn.k_norm.weight": (64,),
        f"{layer}self_attn.q_proj.weight": (256, size), f"{layer}self_attn.k_proj.weight": (128, size),
        f"{layer}self_attn.v_proj.weight": (128, size), f"{layer}self_attn.o_proj.weight": (size, 256),
        f"{layer}mlp.gate_proj.weight": (768, size), f"{layer}mlp.up_proj.weight": (768, size),
        f"{layer}mlp.down_proj.weight": (size, 768),
    }  # fmt: skip
    tensors = {name: torch.randn(shape, generator=random) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("budget", some([5], [5, 100]))
def test_a_module_of_multi_token_prediction_has_one_norm_more(
    random_model, target, plain, made, tapped_engine, budget: int
) -> None:
    """And is run as a feature head is."""
    module = random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    module.hidden_norm = 1 + 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(4)).double()
    assert module.method == "mtp"
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=module), speculative="mtp", adaptive_drafts="off", num_drafts=3, num_blocks=60,
        block_size=4, max_num_batched_tokens=budget, prefix_cache="off",
    )  # fmt: skip
    check_texts(serve(engine, PURE), plain)
    assert len(made) > 20
    for name, known, drafts in made:
        assert drafts == drafts_of(module, target, known, len(drafts), PURE[name]), (name, len(known))


def test_such_a_module_is_loaded_by_deepseeks_names(tmp_path: Path, course_model: Path) -> None:
    write_head(tmp_path / "mtp", architectures=["MultiTokenPrediction"])
    names = {"fc.weight": "eh_proj.weight", "embed_norm.weight": "enorm.weight"}
    tensors = {names.get(name, name): found for name, found in load_file(tmp_path / "mtp/model.safetensors").items()}
    tensors["hnorm.weight"] = torch.arange(256.0)
    save_file(tensors, tmp_path / "mtp" / "model.safetensors", {"format": "pt"})
    found = load_feature_head(tmp_path / "mtp", torch.float64)
    assert torch.equal(found.hidden_norm, torch.arange(256.0).double())
    assert torch.equal(found.embed_norm, tensors["enorm.weight"].double())
    llm = LLM(course_model, "float64", num_blocks=32, draft_model=tmp_path / "mtp", draft_tree=(2, 2))
    assert llm.engine.config.speculative == "mtp"
    with pytest.raises(ValueError, match="'eagle': expected 'mtp'"):
        LLM(course_model, num_blocks=32, draft_model=tmp_path / "mtp", speculative="eagle")


@pytest.mark.parametrize("worker", ["here", "process"])
def test_a_folder_with_a_head_is_known_by_what_is_in_it(tmp_path: Path, course_model: Path, worker: str) -> None:
    write_head(tmp_path / "head")
    sampling = SamplingParams(max_tokens=12, temperature=0)
    texts = []
    for options in ({}, {"draft_model": tmp_path / "head", "num_drafts": 2}, {"speculative": "off"}):
        made = LLM(course_model, "float64", num_blocks=32, max_model_len=256, worker=worker, **options)  # type: ignore[arg-type]
        with contextlib.closing(made.engine):
            texts.append(made.generate("def open_file(", sampling)[0].outputs[0].token_ids)
            drafts = sum(row.num_drafts for step in made.engine.trace.steps() for row in step.rows)
            assert (drafts > 0) == bool(options.get("draft_model"))
            assert made.engine.config.speculative == ("eagle" if drafts else "off")
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layer_of": 3}, "layer_of"),
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected 1, found 2"),
        ({"vocab_size": 99}, "expected the target's vocabulary of 4,096 tokens, found 99"),
        ({"size": 64}, "expected a head for hidden states of 256 numbers, found 64"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tmp_path: Path, course_model: Path, changes: dict[str, Any], expected: str
) -> None:
    write_head(tmp_path / "head", **changes)
    with pytest.raises(ConfigError, match=expected):
        LLM(course_model, num_blocks=32, draft_model=tmp_path / "head")


def test_what_is_asked_for_is_what_is_in_the_folder(tmp_path: Path, course_model: Path) -> None:
    write_head(tmp_path / "head")
    with pytest.raises(ConfigError, match="a feature head drafts for one: give it as draft_model"):
        LLM(tmp_path / "head", num_blocks=32)
    with pytest.raises(ValueError, match="'draft': expected 'eagle'"):
        LLM(course_model, num_blocks=32, draft_model=tmp_path / "head", speculative="draft")
    with pytest.raises(ValueError, match="'eagle': expected 'draft'"):
        LLM(course_model, num_blocks=32, draft_model=course_model.parent / "draft", speculative="eagle")
    with pytest.raises(ValueError, match="speculative='eagle' needs a draft model, a feature head"):
        LLM(course_model, num_blocks=32, speculative="eagle")
    parts = Parts(draft_model=load_feature_head(tmp_path / "head"))
    with pytest.raises(ConfigError, match="since speculative='draft': set it to 'eagle'"):
        LLM(course_model, num_blocks=32, speculative="draft", parts=parts)
    (tmp_path / "head" / "model.safetensors").unlink()
    save_file({"fc.weight": torch.zeros(256, 512)}, tmp_path / "head" / "model.safetensors")
    with pytest.raises(CheckpointError, match="missing tensors"):
        LLM(course_model, num_blocks=32, draft_model=tmp_path / "head")


@pytest.fixture
def course_model() -> Path:
    from reference_impl.assembly.config import course_model

    return course_model("target")
