"""A folder quantized into another: what is written, what a kill -9 leaves, what is refused, how much memory."""

from __future__ import annotations

import copy
import fcntl
import json
import os
import signal
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference_impl.assembly.model import load_model
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.models.config_json import read_model_config
from reference_impl.models.quantization.forms import Dense, Packed
from reference_impl.models.quantization.layouts import OfScheme
from reference_impl.models.quantization.one_layer import Part, input_scales
from reference_impl.models.quantization.peak_memory import peak_bytes
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS, SCHEMES, Recipe
from reference_impl.models.quantization.scheme import Fitted, Scheme, decode, encode, fit
from reference_impl.models.quantization.stored import Stored
from reference_impl.models.quantization.tensors import fitted_of
from tests.quantization.conftest import MakeFolder, as_stored
from tests.warm import Warm

TOKENS = torch.arange(120).view(4, 30) * 7 % 61
CALIBRATED = ("gptq", "awq", "smoothquant", "rotate-gptq")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def logits(folder: Path) -> Tensor:
    return logits_of(load_model(folder, torch.float32))


def logits_of(model: Decoder) -> Tensor:
    attention = RecomputeAttention(model.config.attention_scale)
    batch = ragged_batch([(TOKENS[0].tolist(), 0)], 30, model.device)
    batch.logits_indices = torch.arange(30)
    with torch.inference_mode():
        return model(batch, None, attention)


def small(method: str) -> Any:
    """Groups of 16: the model's matrices have 64 and 96 inputs."""
    recipe = METHODS[method]
    free = SCHEMES[recipe.scheme].per == "group" and SCHEMES[recipe.scheme].scales == "float"
    return replace(recipe, group_size=16) if free else recipe


class Recorded(Packed):
    """Keeps what the method chose: {matrix: (codes, its scheme, scales)}."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def tensors(self, part: Part) -> dict[str, Tensor]:
        self.parts[part.name] = copy.deepcopy(part)
        return super().tensors(part)


def read_back(after: dict[str, Tensor], part: Part) -> tuple[Tensor, Fitted]:
    found = {name.rpartition(".")[2]: t for name, t in after.items() if name.rpartition(".")[0] == part.name}
    return fitted_of(found, part.scheme, part.codes.shape[1])


def num_bytes(scheme: Scheme, rows: int, columns: int) -> int:
    """Of a matrix: codes, scales (and the shape of one packed in words); zero points as wide as a code, in whole words
    for each column; four bytes for the scale of inputs, where the file has one."""
    bits = {"int2": 2, "int3": 3, "int4": 4, "e2m1": 4, "int8": 8, "e4m3": 8}[scheme.numbers]
    words = scheme.numbers in ("int2", "int3", "int4") or (scheme.numbers == "int8" and not scheme.activations)
    size = {"channel": columns, "group": scheme.group_size or 0}
    if scheme.per in size:
        scales = rows * columns // size[scheme.per]
    else:
        scales = -(-rows // 128) * -(-columns // 128) if scheme.per == "block" else 1
    total = rows * columns * bits // 8 + scales * (2 if scheme.scales == "float" else 1)
    total += (4 if scheme.scales == "e4m3" else 0) + (16 if words else 0)
    total += 4 if scheme.activations is not None and scheme.activations.in_checkpoint else 0
    return total + (0 if scheme.symmetric else -(-rows * bits // 32) * 4 * columns // (scheme.group_size or 1))


PACKED = ("rtn", "int4-zeros", "int3", "int3-zeros", "int2", "int8", "w8a8", "w4a8", "fp8", "fp8-tensor", "fp8-static",
          "fp8-block", "nvfp4", "nvfp4-w4a4", "mxfp4", "mxfp4-w4a4", "mxfp8", "gptq", "gptq-int3", "gptq-int2", "awq",
          "smoothquant", "rotate", "rotate-gptq")  # fmt: skip


@pytest.mark.parametrize("method", PACKED)
def test_what_is_packed_is_what_the_method_chose(method: str, make_folder: MakeFolder, tmp_path: Path) -> None:
    """Its own codes and scales to the bit; files, report and the engine's memory are as large as the formula says; and
    logits are those of the dense weights."""
    source, recorded = make_folder(), Recorded()
    report = quantize_folder(Job(source, tmp_path / "out", small(method), TOKENS, recorded))
    quantize_folder(Job(source, tmp_path / "dense", small(method), TOKENS, Dense()))
    after, dense = tensors(tmp_path / "out"), tensors(tmp_path / "dense")
    matrices = [name.removesuffix(".weight") for name in tensors(source) if "proj" in name]
    assert sorted(recorded.parts) == sorted(matrices)
    expected = weights = 0
    for name, part in recorded.parts.items():
        codes, fitted = read_back(after, part)
        assert torch.equal(codes.view(torch.uint8), part.codes.view(torch.uint8)), name
        assert torch.equal(fitted.steps(), part.fitted.steps()), name
        assert torch.equal(decode(codes, part.scheme, fitted), dense[f"{name}.weight"]), name
        expected, weights = expected + num_bytes(part.scheme, *codes.shape), weights + codes.numel()
    rest = {name: t for name, t in after.items() if name.rpartition(".")[0] not in recorded.parts}
    assert rest.keys() == {name for name in dense if name.rpartition(".")[0] not in recorded.parts}
    assert all(torch.equal(t, dense[name]) for name, t in rest.items())
    shards = list((tmp_path / "out").glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in shards)
    assert report["file_bytes"] == sum(file.stat().st_size for file in shards)
    assert report["file_bytes"] == headers + expected + sum(t.nbytes for t in rest.values())
    assert (report["form"], report["no_form"]) == ("compressed-tensors", [])
    assert report["quantized_bytes"] == expected
    assert report["bits_per_weight"] == pytest.approx(8 * expected / weights)
    stored = load_model(tmp_path / "out", torch.float32, linear_method=as_stored(tmp_path / "out"))
    assert sum(linear.weight_bytes() for linear in stored.linears()) == expected
    model = load_model(tmp_path / "out", torch.float32)
    for linear in model.linears():  # without the rounding of activations, which the dense weights do not have
        assert isinstance(linear.method, Stored)
        for part, layout in linear.method.layouts.items():
            assert isinstance(layout, OfScheme)
            assert layout.scheme == (recorded.parts[f"{linear.name.rpartition('.')[0]}.{part}"].scheme)
            linear.method.layouts[part] = OfScheme(replace(layout.scheme, activations=None))
    found, plain = logits_of(model), logits(tmp_path / "dense")
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5 * float(plain.abs().max()))


@pytest.mark.parametrize("method", ["rtn", "int4-zeros", "fp8-block", "fp8-tensor", "mxfp8", "ternary", "nf4"])
def test_rounding_to_nearest_is_encode_of_each_matrix(method: str, make_folder: MakeFolder, tmp_path: Path) -> None:
    source = make_folder()
    recipe = small(method)
    report = quantize_folder(Job(source, tmp_path / "out", recipe, form=Dense()))
    before, after = tensors(source), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    bits = weights = 0.0
    for name, weight in before.items():
        if "proj" not in name:
            assert torch.equal(after[name], weight), name
            continue
        scheme = recipe.scheme_of(name, weight.shape[1])
        bits, weights = bits + scheme.bits_per_weight(tuple(weight.shape)) * weight.numel(), weights + weight.numel()
        fitted = fit(weight, scheme)
        assert torch.equal(after[name], decode(encode(weight, scheme, fitted), scheme, fitted)), name
    assert report["bits_per_weight"] == pytest.approx(bits / weights)
    assert report["quantized_weights"] == weights
    assert json.loads((tmp_path / "out" / "quantization_report.json").read_text()) == report
    assert not (tmp_path / "out.quantizing").exists()


@pytest.mark.parametrize(
    ("recipe", "what"),
    [
        (replace(METHODS["nf4"], group_size=16), "nf4"),
        (METHODS["ternary"], "ternary"),
        (replace(METHODS["mxfp4"], group_size=16), "e2m1 with e8m0 scales per 16"),
    ],
    ids=["nf4", "ternary", "mxfp4-16"],
)
def test_what_has_no_packed_form_is_written_dense(
    recipe: Recipe, what: str, make_folder: MakeFolder, tmp_path: Path
) -> None:
    report = quantize_folder(Job(make_folder(), tmp_path / "out", recipe))
    assert (report["form"], report["no_form"]) == ("dense", [what])
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert report["file_bytes"] > report["quantized_bytes"] * 4
    assert bool(logits(tmp_path / "out").isfinite().all())


def test_layers_with_other_schemes_are_named(make_folder: MakeFolder, tmp_path: Path) -> None:
    """Groups as long as each matrix allows, and one layer in 8 bits: three schemes, and each layer gets its own."""
    other = "model.layers.1.mlp.down_proj"
    recipe = replace(METHODS["rtn"], by_layer={other: "int8"})
    quantize_folder(Job(make_folder(), tmp_path / "out", recipe))
    model, found = load_model(tmp_path / "out", torch.float32), set()
    for linear in model.linears():
        assert isinstance(linear.method, Stored)
        found |= (own := set(linear.method.layouts.values()))
        assert {layout.scheme for layout in own} == {recipe.scheme_of(linear.name, linear.in_features)}
    assert len(found) == 3


def test_scales_of_inputs_are_of_the_largest_number_that_calibration_saw(
    make_folder: MakeFolder, tmp_path: Path
) -> None:
    """By hand for the first product, whose input is the norm of the embedding: NVFP4's divides so that the largest
    group has e4m3's largest scale, 448 x 6 / |x|; a static one is |x| / 448."""
    source = make_folder()
    before = tensors(source)
    x = before["model.embed_tokens.weight"][TOKENS.flatten()]
    x = x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * before["model.layers.0.input_layernorm.weight"]
    largest = float(x.abs().max())
    for method, word, expected in (
        ("nvfp4-w4a4", "input_global_scale", 448 * 6 / largest),
        ("fp8-static", "input_scale", largest / 448),
    ):
        quantize_folder(Job(source, tmp_path / method, METHODS[method], TOKENS))
        after = tensors(tmp_path / method)
        for part in ("q_proj", "k_proj", "v_proj"):
            assert after[f"model.layers.0.self_attn.{part}.{word}"].item() == pytest.approx(expected, rel=1e-5)
        with pytest.raises(ValueError, match="expected tokens, since this method looks at activations"):
            quantize_folder(Job(source, tmp_path / "none", METHODS[method]))
        with pytest.raises(ValueError, match="expected tokens that reach model.layers.0.mlp.down_proj"):
            input_scales(SCHEMES[method], None, "model.layers.0.mlp.down_proj")


def test_parts_of_one_product_share_nvfp4_s_tensor_scale(make_folder: MakeFolder, tmp_path: Path) -> None:
    source, scheme = make_folder(), SCHEMES["nvfp4"]
    quantize_folder(Job(source, tmp_path / "out", METHODS["nvfp4"], form=Dense()))
    before, after = tensors(source), tensors(tmp_path / "out")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    stacked = torch.cat([before[name] for name in names])
    fitted = fit(stacked, scheme)
    expected = decode(encode(stacked, scheme, fitted), scheme, fitted)
    assert torch.equal(torch.cat([after[name] for name in names]), expected)


@pytest.mark.parametrize("method", ["awq", "smoothquant", "rotate", "gptq"])
def test_in_wide_numbers_the_model_stays_itself(
    method: str, make_folder: MakeFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rounding that rounds nothing, what was folded and rotated is the same function."""
    from reference_impl.models.quantization import awq, columns, forms, one_layer

    for module in (awq, columns, forms, one_layer):
        monkeypatch.setattr(module, "decode", lambda codes, scheme, fitted: codes)
        if hasattr(module, "encode"):
            monkeypatch.setattr(module, "encode", lambda weight, scheme, fitted: weight.clone())
    monkeypatch.setattr(columns, "FORMATS", {"int4": replace(columns.FORMATS["int4"], code_dtype=torch.float32)})
    source = make_folder()
    quantize_folder(Job(source, tmp_path / "out", small(method), TOKENS, Dense()))
    torch.testing.assert_close(logits(tmp_path / "out"), logits(source), rtol=0, atol=2e-4)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibration_brings_the_model_nearer_than_rounding_to_nearest(
    method: str, make_folder: MakeFolder, tmp_path: Path
) -> None:
    source = make_folder(outliers=(3, 17))
    expected = logits(source).log_softmax(-1)

    def divergence(name: str) -> float:
        quantize_folder(Job(source, tmp_path / name, small(name), TOKENS))
        return float((expected.exp() * (expected - logits(tmp_path / name).log_softmax(-1))).sum(-1).mean())

    assert divergence(method) < divergence("rtn")


@pytest.mark.parametrize(
    ("method", "saves"),
    [
        ("rtn", 1), ("gptq", 3), ("rotate-gptq", 6),
        *(pytest.param(*some, marks=pytest.mark.slow) for some in (("rtn", 2), ("gptq", 2), ("awq", 4))),
    ],
)  # fmt: skip
def test_a_killed_run_goes_on_and_writes_the_same_bytes(
    method: str, saves: int, make_folder: MakeFolder, tmp_path: Path, warm: Warm
) -> None:
    source, out = make_folder(hidden_size=128, intermediate_size=256), tmp_path / "out"
    done = warm.run(("-m", "tests.quantization.killed", str(source), str(out), method, str(saves)), os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert list((tmp_path / "out.quantizing").glob("*.tmp"))
    seen: list[int] = []
    quantize_folder(Job(source, out, METHODS[method], TOKENS, progress=lambda n, of: seen.append(n)))
    assert seen == [1, 2]
    quantize_folder(Job(source, tmp_path / "whole", METHODS[method], TOKENS))
    assert files(out) == files(tmp_path / "whole")


def test_what_is_done_is_not_done_again(make_folder: MakeFolder, tmp_path: Path) -> None:
    source, out = make_folder(num_hidden_layers=3), tmp_path / "out"

    class Stop(Exception):
        pass

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise Stop

    job = Job(source, out, small("gptq"), TOKENS, progress=stop)
    with pytest.raises(Stop):
        quantize_folder(job)
    made = {file.name: file.stat().st_ino for file in job.work.glob("model-*")}
    assert len(made) == 2
    quantize_folder(replace(job, progress=lambda done, of: None))
    assert {name: (out / name).stat().st_ino for name in made} == made


def test_what_is_there_is_never_written_over(make_folder: MakeFolder, tmp_path: Path) -> None:
    source, out = make_folder(), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="found one with something in it"):
        quantize_folder(Job(source, out, small("rtn")))
    (out / "notes.txt").unlink()
    work = tmp_path / "out.quantizing"
    work.mkdir()
    (work / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match="found something else: move it away"):
        quantize_folder(Job(source, out, small("rtn")))
    (work / "thesis.txt").unlink()
    quantize_folder(Job(source, out, small("rtn")))  # an empty folder is taken
    with pytest.raises(ValueError, match="there is no"):
        quantize_folder(Job(source, tmp_path / "nowhere" / "out", small("rtn")))


def test_another_job_s_work_is_not_gone_on_with(make_folder: MakeFolder, tmp_path: Path) -> None:
    source, out = make_folder(), tmp_path / "out"
    stop = Job(source, out, small("gptq"), TOKENS, progress=lambda done, of: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        quantize_folder(stop)
    for job, what in (
        (replace(stop, recipe=small("rtn")), "recipe"),
        (replace(stop, tokens=TOKENS + 1), "calibration"),
        (replace(stop, source=make_folder("other", num_hidden_layers=3)), "config and weights"),
    ):
        with pytest.raises(ValueError, match=f"found another {what}: name another folder"):
            quantize_folder(job)
    with (stop.work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process works at it"):
            quantize_folder(stop)


def test_a_ragged_last_group_is_refused_before_anything_is_written(make_folder: MakeFolder, tmp_path: Path) -> None:
    source = make_folder(intermediate_size=80)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj: expected .* multiple of 128 or 64 or 32.*, got 80"):
        quantize_folder(Job(source, tmp_path / "out", METHODS["rtn"]))
    with pytest.raises(ValueError, match="calibration: expected tokens"):
        quantize_folder(Job(source, tmp_path / "out", METHODS["gptq"]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize("family", ["GemmaForCausalLM", "Gemma2ForCausalLM", "Olmo2ForCausalLM", "Qwen3MoeForCausalLM"])
def test_gptq_takes_other_families(family: str, make_folder: MakeFolder, tmp_path: Path) -> None:
    more = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in family else {}
    more |= {"head_dim": None} if "Olmo2" in family else {}
    source = make_folder(architecture=family, **more)
    report = quantize_folder(Job(source, tmp_path / "out", small("gptq"), TOKENS))
    assert bool(logits(tmp_path / "out").isfinite().all())
    assert all(error < 0.5 for layer in report["layers"] for error in layer["output_errors"].values())


class Counted(TorchDispatchMode):
    """The most bytes of tensors that live at once, of those that operators make or take while it is on: a tensor that
    was read from a file is one that they take."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, out)):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize(
    ("method", "size"),
    [
        pytest.param(method, size, marks=[] if size == 64 or (method, size) == ("rtn", 128) else pytest.mark.slow)
        for method in ("rtn", "awq", "gptq")
        for size in (64, 128, 256)
    ],
)
def test_memory_stays_within_what_is_stated(method: str, size: int, make_folder: MakeFolder, tmp_path: Path) -> None:
    """In the shape of a 1B model, hidden : intermediate : vocabulary = 1 : 4 : 64, at two sizes, so that it is the
    formula that holds and not a margin. The bytes are counted again here, from the checkpoint."""
    source = make_folder(
        hidden_size=size, intermediate_size=4 * size, num_hidden_layers=3, vocab_size=64 * size,
        num_attention_heads=size // 16,
    )  # fmt: skip
    before = tensors(source)
    largest = max(tensor.nbytes for tensor in before.values())
    layer = sum(tensor.nbytes for name, tensor in before.items() if name.startswith("model.layers.0."))
    layer += (size // 16 + 2 - 2) * 16 * 4  # norms of q and k have a row for each head, and one in the checkpoint
    rows, length = TOKENS.shape
    stream, row = rows * length * size * 4, 4 * 4 * size * length * 4  # gate and up, the product of both, a copy
    del before
    with Counted() as counted:
        quantize_folder(Job(source, tmp_path / "out", METHODS[method], TOKENS))
    weights = max(layer + 3 * (4 * size) ** 2 * 4, largest) if method == "gptq" else 2 * layer + largest
    stated = weights + {"rtn": 0, "awq": 2 * stream + row, "gptq": stream + row}[method]
    assert peak_bytes(read_model_config(source), METHODS[method], largest, rows, length) == stated
    assert layer < counted.most <= stated  # it is counted at all


@pytest.mark.parametrize(
    ("method", "megabytes"), [("rtn", 1012), ("awq", 1012 + 2 * 67 + 34), ("gptq", 1049 + 67 + 34)]
)
def test_what_a_model_of_1b_takes(method: str, megabytes: int, tmp_path: Path) -> None:
    """Llama 3.2 1B, 32 rows of 256 tokens: a layer is 2,048^2 x 2 + 2,048 x 512 x 2 + 3 x 2,048 x 8,192 numbers, the
    embedding 128,256 x 2,048 of 2 bytes, a Hessian 8,192^2 of 4."""
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
    }))  # fmt: skip
    found = peak_bytes(read_model_config(tmp_path), METHODS[method], 128256 * 2048 * 2, 32, 256)
    assert found / 1e6 == pytest.approx(megabytes, abs=1.5)


def test_of_a_rotation_nothing_is_stated(make_folder: MakeFolder) -> None:
    with pytest.raises(ValueError, match="expected a recipe that does not rotate"):
        peak_bytes(read_model_config(make_folder()), METHODS["rotate"], 0)
