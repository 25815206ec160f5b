"""What a model is, read from a Hugging Face config.json.

Whatever changes the numbers and is not implemented is refused by name, never ignored. Both spellings of rotary
embedding and dtype are read, those of `transformers` 4 and 5; a field that is left out means what it means there.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from tokenizers import Tokenizer

from reference_impl.core.model_config import ExpertsConfig, ModelConfig
from reference_impl.models.config_reader import ConfigError, Reader
from reference_impl.models.config_rope import ropes
from reference_impl.models.families import FAMILIES, FULL, SLIDING, Family
from reference_impl.models.json_file import read_object
from reference_impl.models.tokenizer_files import (
    ADDED,
    CONFIG,
    LISTED,
    MAP,
    TOKENIZER,
    complete,
    read_config,
    special_tokens,
)

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# Embedding models are published as the decoder below the head, in a class named like its model_type: Gemma3TextModel.
_WITHOUT_HEAD = {f"{family.model_type.replace('_', '')}model": name for name, family in FAMILIES.items()}
_DTYPES = ("float32", "float16", "bfloat16", "float64")
MOST_BYTES = 16 << 20  # of a file; published ones have thousands
QUANTIZATION = ("quantization_config", "compression_config")  # the field; the second is compressed-tensors' older name


def read_model_config(folder: str | Path, quantized: bool = False) -> ModelConfig:
    """Reads `config.json` of a Hugging Face folder, and for the end tokens also `generation_config.json`. Like vLLM it
    adds the tokenizer's own eos_token, which ends an answer beside those, or where these files say null.

    quantized: whether it may say quantization_config, since the weights will be read by a LinearMethod made for them.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file. Expected a Hugging Face model folder with config.json in it. Here are the course's "
            "models, target and draft; a model of the Hugging Face hub is named org/name"
        )
    raw = read_object(path, ConfigError, MOST_BYTES)
    if quantized:
        for name in QUANTIZATION:
            raw.pop(name, None)
    generation = folder / "generation_config.json"
    extra = read_object(generation, ConfigError, MOST_BYTES) if generation.is_file() else {}
    config = parse_model_config(raw, extra, where=str(path))
    # A token that only these files name may be one that the model has no row for.
    others = [token for token in _ends_of_tokenizer(folder) if token < config.vocab_size]
    ends = dict.fromkeys((*config.eos_token_ids, *others))
    return replace(config, eos_token_ids=tuple(ends))


def _ends_of_tokenizer(folder: Path) -> list[int]:
    """The id of the eos_token that the tokenizer's files name; none where a file is missing or broken, which loading
    the tokenizer reports."""
    try:
        end, listed = special_tokens(folder).named.get("eos_token"), read_config(folder / CONFIG).get(LISTED)
    except (OSError, ValueError):
        return []
    if end is None:
        return []
    for number, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == end.content and number.isdecimal():
            return [int(number)]
    files = [file for name in (TOKENIZER, CONFIG, MAP, ADDED) if (file := folder / name).is_file()]
    found = _id_of(end.content, folder, tuple(file.stat().st_mtime_ns for file in files))
    return [] if found is None else [found]


@functools.lru_cache(maxsize=8)  # a large file takes half a second, and a config is read more than once
def _id_of(token: str, folder: Path, _changed: tuple[int, ...]) -> int | None:
    try:
        made, _ = complete(Tokenizer.from_file(str(folder / TOKENIZER)), folder)
    except Exception:  # tokenizers raises nothing narrower
        return None
    return made.token_to_id(token)


def parse_model_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config"
) -> ModelConfig:
    """ModelConfig from the fields of a config.json, in either spelling that `transformers` 4 or 5 writes."""
    get = Reader(raw, where)
    architecture = _architecture(get)
    family = FAMILIES[architecture]
    stablelm = family.model_type == "stablelm"
    hidden, layers = get.integer("hidden_size"), get.integer("num_hidden_layers")
    heads, kv_heads, head_dim = _heads(get, family, hidden)
    _refuse_unsupported(get, family)
    rope, window_rope = ropes(get, family, head_dim)
    attention_bias = get.boolean("attention_bias") and family.attention_bias
    max_position = get.integer("max_position_embeddings", family.max_position)
    if rope.kind == "longrope":  # what goes beyond is refused when it is asked for (models/loader.py)
        max_position = min(max_position, rope.original_max_position)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise get.error("dtype", f"one of {', '.join(_DTYPES)}", dtype)
    return ModelConfig(
        architecture=architecture,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=get.number("layer_norm_eps" if stablelm else "rms_norm_eps", family.norm_eps),
        rope=rope,
        tied_embeddings=get.boolean("tie_word_embeddings", default=bool(family.gemma)),
        # Qwen2 always has a bias on q, k and v; Mistral never has one, whatever its config says.
        qkv_bias=attention_bias or family.model_type == "qwen2" or (stablelm and get.boolean("use_qkv_bias")),
        o_bias=attention_bias,
        mlp_bias=get.boolean("mlp_bias") and family.model_type == "llama",
        qk_norm=family.model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        dtype=dtype,
        eos_token_ids=get.token_ids("eos_token_id", generation or {}),
        layer_windows=_layer_windows(get, family, layers),
        attention_scale=(get.number("query_pre_attn_scalar", 256) if family.gemma >= 2 else head_dim) ** -0.5,
        activation=_activation(get, family),
        experts=_experts(get, family, layers),
        window_rope=window_rope,
        **(_gemma_fields(get, family, hidden) if family.gemma else {}),
    )


def _gemma_fields(get: Reader, family: Family, hidden: int) -> dict[str, Any]:
    fields: dict[str, Any] = {"embedding_scale": hidden**0.5, "norm_plus_one": True}
    attention_cap, final_cap = (50.0, 30.0) if family.gemma == 2 else (None, None)
    if family.gemma == 2:
        fields["attention_softcap"] = get.optional_number("attn_logit_softcapping", attention_cap)
    if family.gemma >= 2:
        fields["final_softcap"] = get.optional_number("final_logit_softcapping", final_cap)
    return fields


def _architecture(get: Reader) -> str:
    by_model_type = {family.model_type: name for name, family in FAMILIES.items()}
    for name in _names(get.raw) or [by_model_type.get(str(get.raw.get("model_type")))]:
        whole = _WITHOUT_HEAD.get(name.lower(), name) if isinstance(name, str) else None
        if whole in FAMILIES:
            return whole
    found = get.raw.get("architectures") or get.raw.get("model_type")
    if found in (["FeatureHead"], ["MultiTokenPrediction"], ["MedusaHeads"]):
        what = "Medusa heads draft" if found == ["MedusaHeads"] else "a feature head drafts"
        raise get.error("architectures", f"a model's ({what} for one: give it as draft_model)", found)
    raise get.error("architectures", f"one of {', '.join(FAMILIES)}", found)


def _names(raw: dict[str, Any]) -> list[Any]:
    names = raw.get("architectures") or []
    return names if isinstance(names, list) else [names]


def is_decoder_class(folder: Path) -> bool:
    """Whether config.json names the class of a decoder without its head, as Qwen3Model. ConfigError if it is broken."""
    names = _names(read_object(folder / "config.json", ConfigError, MOST_BYTES))
    return any(isinstance(name, str) and name.lower() in _WITHOUT_HEAD for name in names)


def _heads(get: Reader, family: Family, hidden: int) -> tuple[int, int, int]:
    """(query heads, KV heads, head_dim)."""
    heads = get.integer("num_attention_heads")
    # Left out: the family's default. null: as many as query heads.
    left_out = "num_key_value_heads" not in get.raw and family.num_kv_heads is not None
    kv_heads = get.integer("num_key_value_heads", family.num_kv_heads if left_out else heads)
    if heads % kv_heads:
        raise get.error("num_key_value_heads", f"a divisor of num_attention_heads = {heads}", kv_heads)
    head_dim = get.optional_integer("head_dim", family.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise get.error("hidden_size", f"a multiple of num_attention_heads = {heads}, or a head_dim", hidden)
        head_dim = hidden // heads
    if head_dim % 2:
        raise get.error("head_dim", "an even number (rotary embedding pairs its values)", head_dim)
    return heads, kv_heads, head_dim


def _activation(get: Reader, family: Family) -> Literal["silu", "gelu_tanh"]:
    if family.gemma == 0:
        found = get.choice("hidden_act", _ACTIVATIONS, "silu")
    elif family.gemma == 1:  # its first configs say gelu and mean the tanh approximation
        found = get.choice("hidden_act", {**_ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
        get.refuse("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh or null")
    else:
        found = get.choice("hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh")
    return cast(Literal["silu", "gelu_tanh"], found)


def _layer_windows(get: Reader, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where it has none; each family says it in another way."""
    if family.model_type in ("llama", "gemma", "olmo2", "stablelm"):
        return (None,) * num_layers
    window = get.optional_integer("sliding_window", family.window)
    if family.model_type.startswith("qwen") and not get.boolean("use_sliding_window"):
        window = None
    if family.gemma == 2:
        sliding = [layer % 2 == 0 for layer in range(num_layers)]
    elif family.gemma == 3:
        pattern = get.integer("sliding_window_pattern", 6)
        sliding = [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    else:
        qwen = family.model_type in ("qwen2", "qwen3")
        first = get.count("max_window_layers", 28) if qwen else 0
        sliding = [window is not None and layer >= first for layer in range(num_layers)]
    kinds = get.raw.get("layer_types")
    if kinds is not None:
        allowed = (FULL, SLIDING)
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
            raise get.error("layer_types", f"a list of {num_layers} times {FULL} or {SLIDING}", kinds)
        given = [kind == SLIDING for kind in kinds]
        if family.model_type in ("mistral", "mixtral", "qwen3_moe", "phi3") and given != sliding:
            # transformers ignores the field there, other engines do not.
            raise get.error("layer_types", f"{SLIDING if window else FULL} in every layer, or no such field", kinds)
        sliding = given
    if any(sliding) and window is None:
        name = "use_sliding_window" if get.raw.get("sliding_window", family.window) else "sliding_window"
        wanted = "true" if name == "use_sliding_window" else "a positive integer"
        raise get.error(name, f"{wanted}, since layers have {SLIDING}", get.raw.get(name))
    return tuple(window if slides else None for slides in sliding)


def _experts(get: Reader, family: Family, num_layers: int) -> ExpertsConfig | None:
    if family.model_type == "mixtral":
        default, per_token, size = 8, get.integer("num_experts_per_tok", 2), get.integer("intermediate_size")
        renormalise, layers = True, frozenset(range(num_layers))
    elif family.model_type == "qwen3_moe":
        default, per_token = 128, get.integer("num_experts_per_tok", 8)
        size, renormalise = get.integer("moe_intermediate_size", 768), get.boolean("norm_topk_prob")
        step, dense = get.integer("decoder_sparse_step", 1), get.indices("mlp_only_layers", num_layers)
        layers = frozenset(layer for layer in range(num_layers) if (layer + 1) % step == 0) - dense
    else:
        return None
    name = "num_experts" if "num_experts" in get.raw else "num_local_experts"
    num_experts = get.integer(name, default)
    if per_token > num_experts:
        raise get.error("num_experts_per_tok", f"at most {name} = {num_experts}", per_token)
    return ExpertsConfig(num_experts, per_token, size, renormalise, layers)


def _refuse_unsupported(get: Reader, family: Family) -> None:
    for name in (name for name in QUANTIZATION if get.raw.get(name)):
        expected = (
            "none (weights that are quantized already are not quantized again: start from the model that they were "
            "made of, or load them as they are, without quantization=...)"
        )
        raise get.error(name, expected, get.raw[name])
    get.refuse("use_bidirectional_attention", (False,), "false (attention is causal here)")
    get.refuse("is_causal", (True,), "true (attention is causal here)")
    if family.model_type == "phi3":
        get.refuse("attention_bias", (False,), "false or no such field (Phi-3's linear layers have no biases)")
    if family.model_type == "stablelm":
        for name in ("use_parallel_residual", "qk_layernorm"):
            get.refuse(name, (False,), "false (not supported)")
        get.refuse("head_dim", (), "no such field (StableLM's heads share hidden_size)")
    if family.gemma == 3:  # transformers reads the field and does not apply it
        get.refuse("attn_logit_softcapping", (), "null (Gemma 3 caps no attention scores)")
