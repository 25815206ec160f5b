"""What a GGUF file says of a model, in the words of a Hugging Face folder: config, names of tensors, order of rows.

llama.cpp rotates a llama's pairs (2 i, 2 i + 1) of a head, Hugging Face (i, i + head_dim / 2): so its converter puts
the rows of q and k, and their biases, in another order (convert_hf_to_gguf.py, LlamaModel.permute), which is undone
here. Of other architectures it keeps Hugging Face's order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from reference_impl.core.model_config import ModelConfig, RopeConfig
from reference_impl.models.config_json import parse_model_config
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.gguf_file import FLOATS, GgufFile, GgufTensor
from reference_impl.models.gguf_tokenizer import ends_between_files, ends_by_text, special_id
from reference_impl.models.json_file import shown
from reference_impl.models.loader import CheckpointError
from reference_impl.models.quantization.gguf_blocks import GgufBlocks, check_blocks, decode_blocks
from reference_impl.models.quantization.layouts import LayoutOf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_FACTORS = "rope_freqs.weight"  # what each rotary frequency is divided by: Llama 3's
_SIZES = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta", "attention.key_length": "head_dim",
}  # fmt: skip
_FLOAT_FIELDS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor")


def gguf_config(file: GgufFile) -> ModelConfig:
    """A file's config. Raises ConfigError for an architecture that is not read, and for what would change the
    numbers."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise _error(file, "general.architecture", " or ".join(ARCHITECTURES), architecture)
    fields = {
        name.removeprefix(f"{architecture}."): value
        for name, value in file.metadata.items()
        if name.startswith(f"{architecture}.")
    }
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path}: expected a tensor token_embd.weight [vocabulary, hidden], found {embedding}")
    for name in _FLOAT_FIELDS:  # the bits of a float, read as an integer, are a number, too
        if name in fields and not isinstance(fields[name], float):
            raise _error(file, f"{architecture}.{name}", "a float", fields[name])
    raw: dict[str, Any] = {name: fields[field] for field, name in _SIZES.items() if field in fields}
    raw |= {
        "architectures": [ARCHITECTURES[architecture]], "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors, "eos_token_id": _ends(file),
        "attention_bias": architecture != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "torch_dtype": str(FLOATS.get(embedding.kind, "float16")).removeprefix("torch."),
    }  # fmt: skip
    raw |= _scaling(file, fields)
    config = parse_model_config(raw, where=str(file.path))
    _refuse(file, fields, config)
    return replace(config, rope=_rope(file, config))


def _error(file: GgufFile, name: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{file.path}: {name}: expected {expected}, found {shown(found)}")


def _ends(file: GgufFile) -> list[int]:
    """The end tokens that the file names, and those that llama.cpp finds by their text: a template may end turns with
    any of these."""
    own = [found for name in ("eos", "eot", "eom") if (found := special_id(file, name)) is not None]
    named = [*own, *ends_between_files(file).values()]
    by_text, others = ends_by_text(file)
    found = [*named, *by_text.values()]
    return [one for i, one in enumerate(found) if one not in found[:i] and one not in others]


def _scaling(file: GgufFile, fields: dict[str, Any]) -> dict[str, Any]:
    kind = fields.get("rope.scaling.type", "none")
    if kind == "linear":
        return {"rope_scaling": {"rope_type": "linear", "factor": fields.get("rope.scaling.factor")}}
    if kind != "none":
        raise _error(file, "rope.scaling.type", "none or linear", kind)
    return {}


def _refuse(file: GgufFile, fields: dict[str, Any], config: ModelConfig) -> None:
    """Raises ConfigError for what would change the numbers and is not computed."""
    expected: dict[str, tuple[object, ...]] = {
        "rope.dimension_count": (config.head_dim,), "attention.value_length": (config.head_dim,), "expert_count": (0,),
        "attention.sliding_window": (0,), "attention.causal": (True,),
    }  # fmt: skip
    for name, allowed in expected.items():
        if (found := fields.get(name)) is not None and found not in allowed:
            what = f"{allowed[0]}, or no such field (others are not read from GGUF)"
            raise _error(file, f"{file.metadata['general.architecture']}.{name}", what, found)


def _rope(file: GgufFile, config: ModelConfig) -> RopeConfig:
    """The rotary embedding, with the factors of the file, if it has some: they are those of LongRoPE's form."""
    if _FACTORS not in file.tensors:
        return config.rope
    factors = file.raw(_FACTORS).float()
    good = factors.shape == (config.head_dim // 2,) and bool(factors.isfinite().all() and (factors > 0).all())
    if not good or config.rope.kind != "default":
        raise _error(file, _FACTORS, f"{config.head_dim // 2} positive numbers", list(factors.shape))
    return RopeConfig(
        config.rope.theta, "longrope", original_max_position=config.max_position,
        short_factors=tuple(factors.tolist()),
    )  # fmt: skip


def their_name(name: str) -> str | None:
    """Hugging Face's name of a tensor; None: there is none."""
    rest, _, word = name.rpartition(".")
    if rest in _TOP:
        return f"{_TOP[rest]}.{word}"
    parts = rest.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _IN_LAYER:
        return f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}.{word}"
    return None


def gguf_layouts(file: GgufFile) -> LayoutOf:
    """The layout of each matrix, by Hugging Face's name."""
    kinds = {their_name(tensor.name): tensor.kind for tensor in file.tensors.values()}

    def layout_of(name: str) -> GgufBlocks | None:
        kind = kinds.get(f"{name}.weight")
        return GgufBlocks(kind) if kind is not None and kind not in FLOATS else None

    return layout_of


def gguf_tensors(file: GgufFile, config: ModelConfig) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, Hugging Face's name, tensor): blocks of linear layers and lm_head as they lie there, else floats."""
    for name, tensor in file.tensors.items():
        if name == _FACTORS:
            continue
        if (theirs := their_name(name)) is None:
            raise CheckpointError(f"{file.path}: tensor {shown(name)} is not part of a {config.architecture} in GGUF")
        data = file.raw(name)
        if tensor.kind not in FLOATS and "_proj." not in theirs and theirs != "lm_head.weight":
            data = _decoded(file, tensor, data)
        part = name.split(".")[2:3]
        if file.metadata["general.architecture"] == "llama" and part in (["attn_q"], ["attn_k"]):
            data = unpermuted(data, config.num_heads if part == ["attn_q"] else config.num_kv_heads)
        yield file.path, theirs, data


def _decoded(file: GgufFile, tensor: GgufTensor, data: Tensor) -> Tensor:
    """The numbers of blocks, float32 [shape], for what no layer keeps as it lies there: an embedding, or a norm."""
    try:
        check_blocks(data, tensor.kind)
    except ValueError as wrong:
        raise CheckpointError(f"{file.path}: tensor {tensor.name}: {wrong}") from None
    return decode_blocks(data.view(-1, data.shape[-1]), tensor.kind).view(tensor.shape)


def unpermuted(rows: Tensor, heads: int) -> Tensor:
    """Rows (or the bias) of a llama's q or k in Hugging Face's order: 0, 2, 4, ... of each head, then 1, 3, 5, ..."""
    if len(rows) % (2 * heads):
        return rows  # `store` says that the shape is wrong
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
