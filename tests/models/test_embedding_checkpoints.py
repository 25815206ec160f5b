"""Checkpoints as embedding models are published: of the decoder alone, without lm_head, named without `model.`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from reference_impl import LLM, SamplingParams
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.features.process.facts import ModelFacts
from reference_impl.models.checkpoints import read_config
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.families import FAMILIES
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.scheme import Scheme
from tests.models.conftest import VARIANTS
from tests.models.test_gptq_awq import AWQ, GPTQ
from tests.models.test_gptq_awq import written as integers  # noqa: F401
from tests.models.test_parity import FP32, IDS, make_exact, worst
from tests.models.test_stored_weights import written as by_scheme  # noqa: F401
from tests.models.test_torchao import HERE
from tests.quantization.conftest import MakeFolder, make_folder  # noqa: F401

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"])
@pytest.mark.parametrize("kind", ["ForCausalLM", "Model"])
def test_names_without_model_are_those_of_the_decoder(
    architecture: str,
    kind: str,
    make_folder: MakeFolder,  # noqa: F811
    our_logits,
    edit,
) -> None:
    """Qwen3-Embedding says Qwen3ForCausalLM; others the class whose weights these are."""
    folder: Path = make_folder(architecture=architecture, **SIZES)
    expected = our_logits(load_model(folder, torch.float32), IDS)[0]
    tensors = load_file(folder / "model.safetensors")
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(short, folder / "model.safetensors", {"format": "pt"})
    edit(folder, architectures=[architecture.replace("ForCausalLM", kind)])
    assert torch.equal(our_logits(load_model(folder, torch.float32), IDS)[0], expected)
    short = {name: tensor.clone() for name, tensor in short.items()}
    save_file(short | tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor model\.\S+ came a second time"):
        load_model(folder, torch.float32)


OF_EACH_FAMILY = {family: name for name, (family, _) in VARIANTS.items()}


def test_each_family_has_a_decoder_alone() -> None:
    assert {f"{family}ForCausalLM" for family in OF_EACH_FAMILY} == set(FAMILIES)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("family", OF_EACH_FAMILY)
def test_the_decoder_of_each_family_equals_transformers(family: str, prefix: str, build, tmp_path: Path) -> None:
    """As `transformers` saves it, and with the names of a whole model, which AutoModel reads as well."""
    theirs = build(OF_EACH_FAMILY[family], tie_word_embeddings=False).model.double()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    llm = LLM(tmp_path, device="cpu", num_blocks=32, max_model_len=64)
    found = llm.embed([{"prompt_token_ids": list(IDS[:50])}], "last")[0].outputs.embedding
    with torch.no_grad():
        expected = make_exact(theirs)(torch.tensor([IDS[:50]])).last_hidden_state[0, -1]
    assert worst(torch.tensor(found, dtype=torch.float64), expected / expected.norm()) <= FP32
    with pytest.raises(ValueError, match="has no lm_head, so it gives hidden states and no tokens: use embed"):
        llm.generate([{"prompt_token_ids": list(IDS[:9])}])


def test_a_model_that_looks_both_ways_is_refused(make_folder: MakeFolder) -> None:  # noqa: F811
    raw = json.loads((make_folder(architecture="Qwen2ForCausalLM", **SIZES) / "config.json").read_text())
    for field, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        with pytest.raises(ConfigError, match=f"{field}: expected .*found {value}"):
            parse_model_config(raw | {"architectures": ["Qwen2Model"], field: value})


def without_model(folder: Path) -> Path:
    """The folder, with its tensors as those of a decoder that is saved alone; its metadata likewise."""
    file = folder / "model.safetensors"
    with safe_open(file, framework="pt") as handle:
        metadata = {name.removeprefix("model."): text for name, text in (handle.metadata() or {}).items()}
    tensors = {name.removeprefix("model."): t.clone() for name, t in load_file(file).items() if "lm_head" not in name}
    save_file(tensors, file, metadata)
    return folder


def test_an_untied_one_without_a_head_embeds_and_generates_nothing(make_folder: MakeFolder) -> None:  # noqa: F811
    """As Qwen3-Embedding-8B: config.json says that the head is no copy of the embedding, and there is none."""
    folder: Path = make_folder(**(SIZES | {"tie_word_embeddings": False}))
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32, "max_model_len": 64}
    ids = list(IDS[:9])
    prompts: list[Any] = [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[3:]}]
    expected = [found.outputs.embedding for found in LLM(folder, **options).embed(prompts, "last")]
    without_model(folder)
    llm = LLM(folder, **options)
    assert [found.outputs.embedding for found in llm.embed(prompts, "last")] == expected
    with pytest.raises(ValueError, match="has no lm_head, so it gives hidden states and no tokens: use embed"):
        llm.generate(prompts)
    asked, embedded = llm.engine.add(ids, SamplingParams(max_tokens=2)), llm.engine.add(ids, pooling="last")
    with pytest.warns(RuntimeWarning, match="the first such numbers are in the logits"):
        llm.step()
    assert (asked.finish_reason, asked.output_tokens) == ("error", [])
    assert embedded.finish_reason != "error", "which was in the same step"
    assert [found.outputs.embedding for found in llm.embed(prompts, "last")] == expected


WITHOUT_A_HEAD: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32, "max_model_len": 64}


def generates_nothing(folder: Path) -> None:
    llm = LLM(folder, worker="process", **WITHOUT_A_HEAD)
    try:
        with pytest.raises(ValueError, match="has no lm_head, so it gives hidden states and no tokens: use embed"):
            llm.generate([{"prompt_token_ids": list(IDS[:9])}])
    finally:
        llm.engine.close()


def test_it_says_so_also_where_the_planner_has_only_facts_of_the_model(
    make_folder: MakeFolder,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def split(folder: Path, *_: Any) -> Engine:
        engine = Engine(load_model(folder, torch.float32), EngineConfig(num_blocks=32))
        engine.model = ModelFacts(read_config(folder), "torch.float32", "cpu")  # type: ignore[assignment]
        return engine

    monkeypatch.setattr("reference_impl.assembly.llm._elsewhere", split)
    generates_nothing(without_model(make_folder(**(SIZES | {"tie_word_embeddings": False}))))


@pytest.mark.slow
def test_it_says_so_also_where_its_model_is_in_another_process(make_folder: MakeFolder) -> None:  # noqa: F811
    generates_nothing(without_model(make_folder(**(SIZES | {"tie_word_embeddings": False}))))


def test_a_whole_model_that_lacks_its_head_is_refused(make_folder: MakeFolder) -> None:  # noqa: F811
    folder: Path = make_folder(**(SIZES | {"tie_word_embeddings": False}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("raw", [GPTQ, GPTQ | {"desc_act": True}, AWQ], ids=["gptq", "act-order", "awq"])
def test_integers_by_names_without_model(raw: dict[str, Any], integers: Any, our_logits: Any) -> None:  # noqa: F811
    folder, plain = integers(raw, tie_word_embeddings=True)
    found = our_logits(load_model(without_model(folder), torch.float32), IDS)[0]
    assert worst(found, our_logits(load_model(plain, torch.float32), IDS)[0]) <= 1e-5


@pytest.mark.parametrize("scheme", [Scheme("int4", "group", 32), Scheme("e4m3", "channel")], ids=str)
@pytest.mark.parametrize("ignored", ["{}", "re:^{}$"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_compressed_tensors_by_names_without_model(
    prefix: str,
    ignored: str,
    scheme: Scheme,
    by_scheme: Any,  # noqa: F811
    our_logits: Any,
    edit: Callable[..., None],
) -> None:
    """Layers that are not quantized may be named either way."""
    folder, plain = by_scheme(scheme)
    name, tensors = "layers.0.mlp.down_proj", load_file(folder / "model.safetensors")
    tensors = {other: t for other, t in tensors.items() if f".{name}." not in other}
    dense = load_file(plain / "model.safetensors")
    save_file(tensors | {k: dense[k] for k in dense if f".{name}." in k}, folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder, quantization_config=raw | {"ignore": ["lm_head", ignored.format(prefix + name)]})
    found = our_logits(load_model(without_model(folder), torch.float32), IDS)[0]
    assert worst(found, our_logits(load_model(plain, torch.float32), IDS)[0]) <= 1e-5


@pytest.mark.parametrize("block", [None, [128, 128]])
def test_fp8_by_names_without_model(block: list[int] | None, by_scheme: Any, our_logits: Any, edit: Any) -> None:  # noqa: F811
    folder, _ = by_scheme(Scheme("e4m3", "block" if block else "channel", scale_dtype=torch.float32))
    raw = {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3", "activation_scheme": "dynamic"}
    edit(folder, quantization_config=raw)
    expected = our_logits(load_model(folder, torch.float32), IDS)[0]
    assert torch.equal(our_logits(load_model(without_model(folder), torch.float32), IDS)[0], expected)


@pytest.mark.parametrize("name", ["int4", "fp8", "nvfp4_weights", "embedding"])
def test_torchao_by_names_without_model(name: str, tmp_path: Path) -> None:
    """These are not tied, so they have no head then."""
    folder = tmp_path / name
    shutil.copytree(HERE / name, folder)

    def embedded() -> list[float]:
        llm = LLM(folder, device="cpu", dtype="float32", num_blocks=32, max_model_len=32)
        return llm.embed([{"prompt_token_ids": [3, 17, 5]}])[0].outputs.embedding

    expected = embedded()
    without_model(folder)
    assert embedded() == expected
