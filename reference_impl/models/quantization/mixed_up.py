"""Whether the tensors of a checkpoint are of the form that its config.json says: asked before anything is loaded, so
that the error can name the form that they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from reference_impl.core.linear import Linear
from reference_impl.interfaces import TensorSpec
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.loader import CheckpointError, part_tensors, whole_name
from reference_impl.models.quantization.stored import Stored

Shapes = Mapping[str, tuple[list[int], str]]  # last word of a tensor's name -> (shape, dtype as safetensors calls it)


def check_forms(linears: Iterable[Linear], files: list[Path]) -> None:
    """Raises CheckpointError for the first part of a layer whose tensors are not those that its layout has. Reads
    headers only; what is wrong in other ways is left to `store`."""
    by_part = _headers(files)
    for linear in linears:
        if not isinstance(linear.method, Stored):
            continue
        for part, layout in linear.method.layouts.items():
            name = f"{linear.name.rpartition('.')[0]}.{part}".lstrip(".")
            expected, found = part_tensors(linear, part), by_part.get(name, {})
            wrong = _difference(expected, found)
            if wrong:
                form = form_of(found, linear.in_features, linear.parts[part])
                raise CheckpointError(
                    f"{', '.join(map(str, files))}: {name}: config.json's quantization_config says {layout}; {wrong}: "
                    f"{form}"
                )


def stored_head(files: list[Path]) -> list[str]:
    """Last words of the names of an lm_head's tensors, if it is not a plain matrix; headers only."""
    words = list(_headers(files).get("lm_head", {}))
    return [] if set(words) <= {"weight", "bias"} else words


def check_tied(files: list[Path], where: Path) -> None:
    """Raises ConfigError where a model that ties its lm_head to the embedding has a quantized one."""
    if words := stored_head(files):
        raise ConfigError(
            f"{where}: tie_word_embeddings: expected false, since the files have an lm_head of its own, quantized "
            f"({', '.join(words)}); found true: set it false, if this config.json was written with these weights"
        )


def _difference(expected: Mapping[str, TensorSpec], found: Shapes) -> str:
    """The difference of the names and shapes in words; "" if there is none."""
    if missing := [word for word in expected if word not in found]:
        return f"expected {', '.join(expected)}, found {', '.join(found) or 'no tensors'} (no {', '.join(missing)})"
    for word, spec in expected.items():
        if list(spec.shape) != found[word][0]:
            return f"expected {word} of shape {list(spec.shape)}, found {found[word][0]}"
    return ""


def form_of(found: Shapes, in_features: int, out_features: int) -> str:
    """A text that says which form a matrix's tensors have, and what to do about it."""
    correct = "correct quantization_config, or take the config.json that was written with these weights"
    if "qweight" in found and "scales" in found:
        return f"{_packed(found['qweight'][0], in_features, out_features)}; {_whether_g_idx(found)}{correct}"
    if "B" in found or ("qweight" in found and "scales" not in found):
        return "these are of one kernel (Marlin), which is not read: take the checkpoint that they were made of"
    if "_weight_qdata" in found:
        return "these are torchao's; set quant_method to torchao, or take the config.json written with these weights"
    if "weight_packed" in found:
        return f"these are of compressed-tensors, packed; {correct}"
    if "weight" in found and any("scale" in word for word in found):
        return f"these are codes of {found['weight'][1]} with scales (compressed-tensors or fp8); {correct}"
    if "weight" in found:
        return (
            "this matrix is not quantized: name it in quantization_config's list of what is left out (ignore, "
            "modules_to_not_convert, dynamic), or download the quantized weights"
        )
    return "the checkpoint lacks this matrix, or calls it by another name: is it of another model?"


def _packed(shape: list[int], in_features: int, out_features: int) -> str:
    for bits in (4, 8, 3, 2):
        if shape == [in_features * bits // 32, out_features]:
            return f"these are of gptq with {bits} bits (packed along the inputs)"
        if shape == [in_features, out_features * bits // 32]:
            return f"these are of awq with {bits} bits (packed along the outputs)"
    return "these are packed in neither gptq's nor awq's way"


def _whether_g_idx(found: Shapes) -> str:
    lacks = "g_idx" not in found and "qzeros" in found
    said = "awq has no g_idx; gptq may leave it out where desc_act is false, but with act-order (desc_act true) nothing"
    return f"{said} else says which input is of which group; " if lacks else ""


def tensor_shapes(files: list[Path]) -> dict[str, list[int]]:
    """{name of a tensor in a whole model: its shape}, from headers alone."""
    return {f"{part}.{word}": shape for part, found in _headers(files).items() for word, (shape, _) in found.items()}


def _headers(files: list[Path]) -> dict[str, Shapes]:
    """{name of a layer in a whole model: its tensors}."""
    found: dict[str, dict[str, tuple[list[int], str]]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    part, _, word = name.rpartition(".")
                    header = handle.get_slice(name)
                    found.setdefault(whole_name(part), {})[word] = (header.get_shape(), header.get_dtype())
        except (SafetensorError, OSError):
            continue  # `store` says what is wrong with it
    return dict(found)
