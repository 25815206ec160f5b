"""Checkpoints whose weights are packed in 4 bits, as GPTQ and AWQ write them, read by methods that name their tensors.

The codes come first: the packed file and the plain one with the weights that the codes stand for are both made of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.interfaces import LinearMethod, NamesTensors, SamplingParams, TensorSpec
from reference_impl.models.loader import FLOATS, CheckpointError
from tests.models.test_parity import IDS, worst

GROUP = 16  # inputs that share a scale and a zero point
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output, of eight, that lies in each 4 bits of a number
CPU = torch.device("cpu")


def shifts(order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """How far the number for output (or input) i of eight lies from the lowest bit."""
    return torch.tensor([4 * order.index(i) for i in range(8)])


# The methods, as a learner would write them.


def made(specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> dict[str, Tensor]:
    """Room for what the names say; a bias has the model's dtype."""
    return {n: torch.zeros(s.shape, dtype=dtype if n == "bias" else s.dtypes[0]) for n, s in specs.items()}


class GPTQ(UnquantizedLinear):
    """qweight [in / 8, out] and qzeros [groups, out / 8], of which a zero point is one more; an input's group is
    g_idx[input], each part's its own."""

    def tensors(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        groups = in_features // GROUP
        found = {
            "qweight": TensorSpec((in_features // 8, out_features), (torch.int32,)),
            "qzeros": TensorSpec((groups, out_features // 8), (torch.int32,)),
            "scales": TensorSpec((groups, out_features), (torch.float16, torch.bfloat16)),
            "g_idx": TensorSpec((in_features,), (torch.int32,)),
        }
        return found | ({"bias": TensorSpec((out_features,), FLOATS)} if bias else {})

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        params = made(self.tensors(in_features, out_features, bias), self.dtype)
        del params["g_idx"]
        return params

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        if name == "g_idx":
            params[f"g_idx of {start}"] = tensor.long()
            return
        start //= 8 if name == "qzeros" else 1
        params[name][..., start : start + tensor.shape[-1]].copy_(tensor)

    def finish(self, params: dict[str, Tensor]) -> None:
        codes = (params.pop("qweight")[:, None] >> shifts()[:, None]).flatten(0, 1) & 15
        zeros = ((params.pop("qzeros")[..., None] >> shifts()).flatten(1) & 15) + 1
        scales, bounds = params.pop("scales"), sorted(int(n.split()[-1]) for n in params if n.startswith("g_idx"))
        pieces = []
        for start, end in zip(bounds, [*bounds[1:], codes.shape[1]], strict=True):
            groups, columns = params.pop(f"g_idx of {start}"), slice(start, end)
            pieces.append(scales[groups, columns].to(self.dtype) * (codes[:, columns] - zeros[groups, columns]))
        params["weight"] = torch.cat(pieces, 1)


class AWQ(UnquantizedLinear):
    """qweight [in, out / 8] and qzeros [groups, out / 8], in AWQ_ORDER; a group is of inputs side by side."""

    def tensors(self, in_features: int, out_features: int, bias: bool) -> Mapping[str, TensorSpec]:
        groups = in_features // GROUP
        found = {
            "qweight": TensorSpec((in_features, out_features // 8), (torch.int32,)),
            "qzeros": TensorSpec((groups, out_features // 8), (torch.int32,)),
            "scales": TensorSpec((groups, out_features), (torch.float16,)),
        }
        return found | ({"bias": TensorSpec((out_features,), FLOATS)} if bias else {})

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        return made(self.tensors(in_features, out_features, bias), self.dtype)

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        start //= 8 if name.startswith("q") else 1
        params[name][..., start : start + tensor.shape[-1]].copy_(tensor)

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        codes, zeros = ((params[n][..., None] >> shifts(AWQ_ORDER)).flatten(1) & 15 for n in ("qweight", "qzeros"))
        weight = params["scales"].to(x.dtype).repeat_interleave(GROUP, 0) * (codes - zeros.repeat_interleave(GROUP, 0))
        y = x @ weight
        return y + params["bias"] if "bias" in params else y


# The files. What is packed is packed here number by number.


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[rows, columns] of 0 to 15 -> [rows, columns / 8] int32: bits 4i to 4i + 3 hold column order[i] of eight."""
    rows = []
    for row in numbers.tolist():
        eights = (row[i : i + 8] for i in range(0, len(row), 8))
        words = [int("".join(f"{eight[column]:04b}" for column in reversed(order)), 2) for eight in eights]
        rows.append([word - 2**32 * (word >= 2**31) for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def quantized(form: str, rows: int, in_features: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """(tensors of a part by name, the weight [rows, in_features] in float64 that they stand for)."""
    random = torch.Generator().manual_seed(seed)
    groups = in_features // GROUP
    codes = torch.randint(16, (in_features, rows), generator=random)
    zeros = torch.randint(1, 16, (groups, rows), generator=random)
    scales = (torch.rand(groups, rows, generator=random) * 0.04 + 0.01).half()
    group = torch.arange(in_features) // GROUP
    if form == "gptq":
        group = group[torch.randperm(in_features, generator=random)]
    weight = (scales.double()[group] * (codes - zeros[group])).T.contiguous()
    tensors = {"scales": scales}
    if form == "gptq":
        tensors |= {"qweight": packed(codes.T).T.contiguous(), "qzeros": packed(zeros - 1), "g_idx": group.int()}
    else:
        tensors |= {"qweight": packed(codes, AWQ_ORDER), "qzeros": packed(zeros, AWQ_ORDER)}
    return tensors, weight


METHODS: dict[str, Callable[[torch.dtype, torch.device], LinearMethod]] = {"gptq": GPTQ, "awq": AWQ}


@pytest.fixture
def written(save, edit, tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """written(form, variant) -> (folder in that form, folder with the plain weights)."""

    def write(form: str, variant: str, **changes: Any) -> tuple[Path, Path]:
        _, folder = save(variant, **changes)
        tensors = load_file(folder / "model.safetensors")
        plain = dict(tensors)
        for seed, name in enumerate(sorted(name for name in tensors if name.endswith("_proj.weight"))):
            found, plain[name] = quantized(form, *tensors.pop(name).shape, seed)
            tensors |= {f"{name.removesuffix('.weight')}.{word}": tensor for word, tensor in found.items()}
        other = tmp_path / "plain"
        other.mkdir()
        shutil.copy(folder / "config.json", other)
        save_file(plain, other / "model.safetensors", {"format": "pt"})
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        edit(folder, quantization_config={"quant_method": form, "bits": 4, "group_size": GROUP})
        return folder, other

    return write


@pytest.mark.parametrize("variant", ["llama_biases", "qwen2_tied", "llama_mqa", "qwen3_moe"])
@pytest.mark.parametrize("form", METHODS)
def test_logits_are_those_of_the_dequantized_weights(form: str, variant: str, written, our_logits) -> None:
    """q, k and v have different numbers of rows, biases or none; experts have linear layers of their own."""
    sizes = {"moe_intermediate_size": 32} if "moe" in variant else {}
    folder, plain = written(form, variant, **sizes)
    method = METHODS[form](torch.float64, CPU)
    assert isinstance(method, NamesTensors)
    model, expected = load_model(folder, torch.float64, linear_method=method), load_model(plain, torch.float64)
    assert {linear.method for linear in model.linears()} == {method}
    assert model.num_parameters() == expected.num_parameters()
    assert worst(our_logits(model, IDS)[0], our_logits(expected, IDS)[0]) <= 1e-12


def test_the_engine_writes_the_same_text(written) -> None:
    texts = []
    for folder, method in zip(written("gptq", "llama_biases"), (GPTQ(torch.float64, CPU), None), strict=True):
        engine = Engine(load_model(folder, torch.float64, linear_method=method), EngineConfig(num_blocks=30))
        request = engine.add(IDS[:20], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
        while engine.has_work():
            engine.step()
        texts.append(request.output_tokens)
    assert texts[0] == texts[1]


KEY = "model.layers.1.self_attn.k_proj."


@pytest.mark.parametrize(
    ("word", "change", "message"),
    [
        ("qweight", lambda t: t.T.contiguous(), r"expected shape \[6, 16\], found \[16, 6\]"),
        ("qzeros", lambda t: t[:, :1].contiguous(), r"expected shape \[3, 2\], found \[3, 1\]"),
        ("qweight", lambda t: t.long(), "expected torch.int32, found torch.int64"),
        ("g_idx", lambda t: t.float(), "expected torch.int32, found torch.float32"),
        ("scales", lambda t: t.float(), "expected torch.float16 or torch.bfloat16, found torch.float32"),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_is_named(word: str, change: Callable, message: str, written) -> None:
    folder, _ = written("gptq", "llama_biases")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, KEY + word: change(tensors[KEY + word])}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {KEY}{word}: {message}$"):
        load_model(folder, linear_method=GPTQ(torch.float32, CPU))


def test_a_missing_tensor_and_one_too_many_are_named(written) -> None:
    folder, plain = written("gptq", "llama_biases")
    tensors = load_file(folder / "model.safetensors")
    groups = tensors.pop(f"{KEY}g_idx")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: missing tensors: {KEY}g_idx$"):
        load_model(folder, linear_method=GPTQ(torch.float32, CPU))
    save_file({**tensors, f"{KEY}g_idx": groups}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.\S+\.g_idx is not part of"):
        load_model(folder, linear_method=AWQ(torch.float32, CPU))
    with pytest.raises(CheckpointError, match=r"plain/model\.safetensors: tensor model\.layers\.\S+ is not part of"):
        load_model(plain, linear_method=GPTQ(torch.float32, CPU))


def test_without_a_method_that_reads_it_a_quantized_checkpoint_is_refused(written, edit) -> None:
    folder, _ = written("awq", "llama_biases")
    edit(folder, quantization_config={"quant_method": "hqq"})
    with pytest.raises(
        ConfigError, match=r"quantization_config.quant_method: .*need a method.*linear_method=.*found 'hqq'"
    ):
        load_model(folder)
