"""An lm_head that comes quantized: read from each format, kept as it is stored, and written by `quantize --lm-head`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from reference_impl.assembly.config import ConfigError
from reference_impl.assembly.model import load_model, num_bytes
from reference_impl.assembly.stored_weights import paths_of
from reference_impl.cli import app
from reference_impl.features.speculative.feature_head import with_few_tokens
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization import quantize_folder as quantize_folder_module
from reference_impl.models.quantization.forms import Dense
from reference_impl.models.quantization.head import StoredHead
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS
from reference_impl.models.quantization.scheme import decode, encode, fit
from tests.models.test_gptq_awq import GPTQ, words
from tests.models.test_parity import worst
from tests.quantization.conftest import MakeFolder, make_folder  # noqa: F401
from tests.quantization.test_quantize_folder import TOKENS, logits, tensors

SIZES = {"architecture": "LlamaForCausalLM", "vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("scheme", ["int8", "fp8-weights", "w8a8", "int4", "mxfp4"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_is_written_and_read(scheme: str, tied: bool, make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    """Logits are those of the dense weights; a tied one is written beside the embedding, which stays."""
    source = make_folder(**SIZES, tie_word_embeddings=tied)
    recipe = replace(METHODS["rtn"], lm_head=scheme)
    report = quantize_folder(Job(source, tmp_path / "out", recipe))
    quantize_folder(Job(source, tmp_path / "dense", recipe, form=Dense()))
    before, after = tensors(source), tensors(tmp_path / "out")
    head = {name: t for name, t in after.items() if name.startswith("lm_head.")}
    assert "lm_head.weight_scale" in head
    size = sum(t.nbytes for t in head.values())
    assert report["lm_head"] == {"scheme": scheme, "bytes": size, "untied": tied}
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["quantization_config"]["ignore"] == ["model.embed_tokens"]
    model = load_model(tmp_path / "out", torch.float32)
    assert isinstance(model.head, StoredHead)
    assert model.lm_head is not None
    assert model.lm_head.is_meta
    assert sum(paths_of(model).values()) == len(model.linears()) + 1
    bound = 0.02 if scheme == "w8a8" else 1e-5  # which rounds inputs, too
    assert worst(logits(tmp_path / "out"), logits(tmp_path / "dense")) <= bound
    plain = replace(recipe, lm_head=None)
    other = quantize_folder(Job(source, tmp_path / "plain", plain))
    assert other["bits_per_weight"] == report["bits_per_weight"], "of the linear layers alone"


def test_it_takes_the_memory_of_its_codes(make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    """Where no product takes the codes as they are, and where the model's dtype has no room: as they are stored."""
    source = make_folder(**SIZES, tie_word_embeddings=False, dtype="bfloat16")
    quantize_folder(Job(source, tmp_path / "out", replace(METHODS["int8"], lm_head="int8")))
    quantize_folder(Job(source, tmp_path / "plain", METHODS["int8"]))
    small, large = (load_model(tmp_path / name, torch.bfloat16) for name in ("out", "plain"))
    saved = 64 * 64 * 2 - 64 * 64 - 64 * 2 - small.head.linear.params.get("bias", torch.empty(0)).nbytes
    assert num_bytes(large) - num_bytes(small) == saved


def test_transformers_has_the_same_logits(make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM

    source = make_folder(**SIZES)
    quantize_folder(Job(source, tmp_path / "out", replace(METHODS["int8"], lm_head="int8")))
    edit(tmp_path / "out", model_type="llama")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = other(TOKENS[:1]).logits[0]
    assert worst(logits(tmp_path / "out"), expected) <= 1e-5


def test_large_ones_are_rounded_a_few_rows_at_a_time(
    make_folder: MakeFolder,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_folder(**SIZES)
    monkeypatch.setattr("reference_impl.models.quantization.one_layer._HEAD_ROWS", 24)
    for name in ("int8", "int4-zeros", "fp8-weights"):
        quantize_folder(Job(source, tmp_path / name, replace(METHODS["int8"], lm_head=name)))
        weight = tensors(source)["model.embed_tokens.weight"]
        scheme = replace(METHODS["rtn"], scheme=name).scheme_of("lm_head", 64)
        fitted = fit(weight, scheme)
        head = load_model(tmp_path / name, torch.float32).head
        assert isinstance(head, StoredHead)
        found = head.rows(torch.arange(64))
        torch.testing.assert_close(found, decode(encode(weight, scheme, fitted), scheme, fitted), rtol=1e-6, atol=1e-6)


def test_a_draft_vocabulary_takes_its_rows(make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    source = make_folder(**SIZES)
    quantize_folder(Job(source, tmp_path / "out", replace(METHODS["int8"], lm_head="int8")))
    model, tokens = load_model(tmp_path / "out", torch.float32), torch.tensor([5, 63, 0])
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    few = with_few_tokens(model, tokens).logits(hidden)
    torch.testing.assert_close(few, model.logits(hidden)[:, tokens], rtol=1e-5, atol=1e-5)


def test_gptq_s_is_read(make_folder: MakeFolder) -> None:  # noqa: F811
    """All layers but lm_head plain: each output has the codes 0 to 7 again and again, zero point 8, scale 1/4."""
    folder = make_folder(**SIZES, tie_word_embeddings=False)
    plain = load_file(folder / "model.safetensors")
    expected = load_model(folder, torch.float32)
    assert expected.lm_head is not None
    expected.lm_head.copy_(((torch.arange(64) % 8 - 8) / 4).expand(64, 64))
    del plain["lm_head.weight"]
    packed = words(0x76543210).expand(8, 64).contiguous()
    own = {
        "qweight": packed, "qzeros": words(0x77777777).expand(4, 8).contiguous(), "scales": torch.full((4, 64), 0.25),
        "g_idx": (torch.arange(64) // 16).int(), "bias": torch.zeros(64),
    }  # fmt: skip
    save_file(plain | {f"lm_head.{word}": t for word, t in own.items()}, folder / "model.safetensors")
    config = GPTQ | {"lm_head": True, "dynamic": {r"-:model\..*": {}}}
    edit(folder, quantization_config=config)
    model = load_model(folder, torch.float32)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.logits(hidden), expected.logits(hidden))
    edit(folder, tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"tie_word_embeddings: expected false.*quantized \(.*qweight.*found true"):
        load_model(folder, torch.float32)
    edit(folder, tie_word_embeddings=False, quantization_config=config | {"group_size": 32})
    with pytest.raises(CheckpointError, match=r"lm_head: .*expected qzeros of shape \[2, 8\], found \[4, 8\]"):
        load_model(folder, torch.float32)


def test_a_plain_one_is_read_where_the_config_does_not_name_it(make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    source = make_folder(**SIZES, tie_word_embeddings=False)
    quantize_folder(Job(source, tmp_path / "out", METHODS["fp8-weights"]))
    raw = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    edit(tmp_path / "out", quantization_config=raw | {"ignore": ["model.embed_tokens"]})
    model = load_model(tmp_path / "out", torch.float32)
    assert not isinstance(model.head, StoredHead)
    assert torch.equal(model.lm_head, load_model(source, torch.float32).lm_head)


def test_what_cannot_be_is_said(make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    source = make_folder(**SIZES)
    for name, message in (("nvfp4-w4a4", "lm_head: expected a scheme whose inputs need no"), ("int9", "got 'int9'")):
        with pytest.raises(ValueError, match=message):
            quantize_folder(Job(source, tmp_path / "out", replace(METHODS["rtn"], lm_head=name)))


def test_the_command_says_how_large_it_is(make_folder: MakeFolder, tmp_path: Path) -> None:  # noqa: F811
    source = make_folder(**SIZES)
    call = ["quantize", str(source), "--method", "int8", "--lm-head", "int8", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert "lm_head: 0.00 MB, int8, untied from the embedding, which stays" in done.output


def test_methods_that_look_at_activations_round_it_by_them(
    make_folder: MakeFolder,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GPTQ's and AWQ's clipping of what the last norm gives: logits of the calibration rows move less than with codes
    to nearest, of the same layers. A run that was stopped after the last layer gives the same codes."""
    source = make_folder(**SIZES, tie_word_embeddings=False)
    whole = quantize_folder_module.round_head
    for method in ("gptq", "awq"):
        recipe = replace(METHODS[method], lm_head="int3", group_size=16)
        quantize_folder(Job(source, tmp_path / method, recipe, TOKENS))
        monkeypatch.setattr(quantize_folder_module, "round_head", lambda w, s, gram, r: whole(w, s, None, r))
        quantize_folder(Job(source, tmp_path / f"{method}-nearest", recipe, TOKENS))
        monkeypatch.setattr(quantize_folder_module, "round_head", stopped)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(Job(source, tmp_path / f"{method}-again", recipe, TOKENS))
        monkeypatch.setattr(quantize_folder_module, "round_head", whole)
        quantize_folder(Job(source, tmp_path / f"{method}-again", recipe, TOKENS))
        quantize_folder(Job(source, tmp_path / f"{method}-plain", replace(recipe, lm_head=None), TOKENS))
        expected = logits(tmp_path / f"{method}-plain")
        moved, nearest = (float((logits(tmp_path / name) - expected).norm()) for name in (method, f"{method}-nearest"))
        assert moved < 0.95 * nearest, method
        again = tensors(tmp_path / f"{method}-again")
        assert all(torch.equal(tensor, again[name]) for name, tensor in tensors(tmp_path / method).items())


def stopped(*arguments: object) -> None:
    raise KeyboardInterrupt
