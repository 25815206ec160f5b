"""What a model is, read from a Hugging Face config.json.

Whatever changes the numbers and is not implemented is refused by name, never ignored. Both spellings of rotary
embedding and dtype are read, those of `transformers` 4 and 5; a field that is left out means what it means there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from reference_impl.config_reader import ConfigError, Reader


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency, and how long contexts rescale it."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3 | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # What only Phi-3 does.
    partial: float = 1.0  # share of each head that is rotated
    short_factors: tuple[float, ...] = ()  # longrope: what each frequency is divided by, up to original_max_position
    attention_factor: float = 1.0  # longrope: of cosines and sines


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts: which layers have them instead of one MLP, and how a token's are chosen."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of each expert
    renormalise: bool  # the chosen experts' weights are scaled to sum to 1
    layers: frozenset[int]


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str  # of the checkpoint: float32 | float16 | bfloat16 | float64
    eos_token_ids: tuple[int, ...]
    # Per layer: a query at position p sees p - window + 1 ... p; None: everything before it.
    layer_windows: tuple[int | None, ...]
    attention_scale: float  # of the scores, before their softmax
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: ExpertsConfig | None = None
    # What only Gemma does.
    attention_softcap: float | None = None  # scores s -> cap x tanh(s / cap)
    final_softcap: float | None = None  # the same for the logits
    window_rope: RopeConfig | None = None  # of the layers with a window, where it is another one
    embedding_scale: float = 1.0
    norm_plus_one: bool = False  # norms multiply by 1 + weight
    output_norms: bool = False  # what attention and MLP give is normalised before it is added (OLMo-2, too)
    # What only OLMo-2 does.
    input_norms: bool = True  # what attention and MLP get is normalised
    wide_qk_norm: bool = False  # QK-norm over all heads together; then qk_norm, over each by itself, is False
    # What only Phi-3 does.
    stacked_weights: bool = False  # the checkpoint has q, k and v in one matrix, and gate and up in another

    @property
    def reason_for_limit(self) -> str:
        """Why max_position is less than config.json says, for an error that names it; "" if it is not."""
        if self.rope.kind != "longrope":
            return ""
        return (
            f": beyond original_max_position_embeddings = {self.rope.original_max_position} its LongRoPE has other "
            "frequencies, with which all keys would have to be computed again, and that is not supported. Use "
            f"max_model_len={self.max_position} or less"
        )


@dataclass(frozen=True)
class _Family:
    """What `transformers` assumes of an architecture where its config leaves a field out. None: it must be there."""

    model_type: str
    max_position: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    window: int | None = None
    attention_bias: bool = False  # whether the config's field is heeded
    gemma: int = 0  # generation
    input_norms: bool = True  # as in ModelConfig, and the next
    output_norms: bool = False
    wide_qk_norm: bool = False
    stacked_weights: bool = False


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", 2048, attention_bias=True),
    "MistralForCausalLM": _Family("mistral", 131_072, num_kv_heads=8, window=4096),
    "MixtralForCausalLM": _Family("mixtral", 131_072, num_kv_heads=8, norm_eps=1e-5, rope_theta=1e6),
    "Qwen2ForCausalLM": _Family("qwen2", 32_768, num_kv_heads=32, window=4096),
    "Qwen3ForCausalLM": _Family("qwen3", 32_768, num_kv_heads=32, head_dim=128, window=4096, attention_bias=True),
    "Qwen3MoeForCausalLM": _Family("qwen3_moe", 32_768, num_kv_heads=4, window=4096, attention_bias=True),
    "GemmaForCausalLM": _Family("gemma", 8192, 16, 256, attention_bias=True, gemma=1),
    "Gemma2ForCausalLM": _Family("gemma2", 8192, 4, 256, window=4096, attention_bias=True, gemma=2, output_norms=True),
    "Gemma3ForCausalLM": _Family(
        "gemma3_text", 131_072, 4, 256, window=4096, attention_bias=True, gemma=3, output_norms=True
    ),
    "Olmo2ForCausalLM": _Family(
        "olmo2", 2048, norm_eps=1e-5, attention_bias=True, input_norms=False, output_norms=True, wide_qk_norm=True
    ),
    "Phi3ForCausalLM": _Family("phi3", 4096, norm_eps=1e-5, stacked_weights=True),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "float16", "bfloat16", "float64")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_model_config(folder: str | Path, quantized: bool = False) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json` for the end tokens) of a Hugging Face folder.

    quantized: whether it may say quantization_config, since the weights will be read by a LinearMethod made for them.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Expected a Hugging Face model folder with config.json in it")
    raw = _read_json(path)
    if quantized:
        raw.pop("quantization_config", None)
    generation = folder / "generation_config.json"
    extra = _read_json(generation) if generation.is_file() else {}
    return parse_model_config(raw, extra, where=str(path))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def parse_model_config(
    raw: dict[str, Any], generation: dict[str, Any] | None = None, where: str = "config"
) -> ModelConfig:
    """ModelConfig from the fields of a config.json, in either spelling that `transformers` 4 or 5 writes."""
    get = Reader(raw, where)
    architecture = _architecture(get)
    family = _FAMILIES[architecture]
    hidden, layers = get.integer("hidden_size"), get.integer("num_hidden_layers")
    heads, kv_heads, head_dim = _heads(get, family, hidden)
    _refuse_unsupported(get, family)
    rope, window_rope = _ropes(get, family, head_dim)
    attention_bias = get.boolean("attention_bias") and family.attention_bias
    max_position = get.integer("max_position_embeddings", family.max_position)
    if rope.kind == "longrope":  # what goes beyond is refused when it is asked for (models/loader.py)
        max_position = min(max_position, rope.original_max_position)
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise get.error("dtype", f"one of {', '.join(_DTYPES)}", dtype)
    softcaps = (50.0, 30.0) if family.gemma == 2 else (None, None)
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
        norm_eps=get.number("rms_norm_eps", family.norm_eps),
        rope=rope,
        tied_embeddings=get.boolean("tie_word_embeddings", default=bool(family.gemma)),
        # Qwen2 always has a bias on q, k and v; Mistral never has one, whatever its config says.
        qkv_bias=attention_bias or family.model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=get.boolean("mlp_bias") and family.model_type == "llama",
        qk_norm=family.model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        dtype=dtype,
        eos_token_ids=get.token_ids("eos_token_id", generation or {}),
        layer_windows=_layer_windows(get, family, layers),
        attention_scale=(get.number("query_pre_attn_scalar", 256) if family.gemma >= 2 else head_dim) ** -0.5,
        activation=_activation(get, family),
        experts=_experts(get, family, layers),
        attention_softcap=get.optional_number("attn_logit_softcapping", softcaps[0]) if family.gemma == 2 else None,
        final_softcap=get.optional_number("final_logit_softcapping", softcaps[1]) if family.gemma >= 2 else None,
        window_rope=window_rope,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        norm_plus_one=bool(family.gemma),
        output_norms=family.output_norms,
        input_norms=family.input_norms,
        wide_qk_norm=family.wide_qk_norm,
        stacked_weights=family.stacked_weights,
    )


def _architecture(get: Reader) -> str:
    by_model_type = {family.model_type: name for name, family in _FAMILIES.items()}
    names = get.raw.get("architectures") or [by_model_type.get(str(get.raw.get("model_type")))]
    for name in names if isinstance(names, list) else [names]:
        if isinstance(name, str) and name in _FAMILIES:
            return name
    found = get.raw.get("architectures") or get.raw.get("model_type")
    raise get.error("architectures", f"one of {', '.join(_FAMILIES)}", found)


def _heads(get: Reader, family: _Family, hidden: int) -> tuple[int, int, int]:
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


def _activation(get: Reader, family: _Family) -> Literal["silu", "gelu_tanh"]:
    if family.gemma == 0:
        found = get.choice("hidden_act", _ACTIVATIONS, "silu")
    elif family.gemma == 1:  # its first configs say gelu and mean the tanh approximation
        found = get.choice("hidden_act", {**_ACTIVATIONS, "gelu": "gelu_tanh"}, "gelu_pytorch_tanh")
        get.refuse("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh or null")
    else:
        found = get.choice("hidden_activation", _ACTIVATIONS, "gelu_pytorch_tanh")
    return cast(Literal["silu", "gelu_tanh"], found)


def _layer_windows(get: Reader, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Which layers have the sliding window; each family says it in another way."""
    if family.model_type in ("llama", "gemma", "olmo2"):
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
        allowed = (_FULL, _SLIDING)
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in allowed for kind in kinds):
            raise get.error("layer_types", f"a list of {num_layers} times {_FULL} or {_SLIDING}", kinds)
        given = [kind == _SLIDING for kind in kinds]
        if family.model_type in ("mistral", "mixtral", "qwen3_moe", "phi3") and given != sliding:
            # transformers ignores the field there, other engines do not.
            raise get.error("layer_types", f"{_SLIDING if window else _FULL} in every layer, or no such field", kinds)
        sliding = given
    if any(sliding) and window is None:
        name = "use_sliding_window" if get.raw.get("sliding_window", family.window) else "sliding_window"
        wanted = "true" if name == "use_sliding_window" else "a positive integer"
        raise get.error(name, f"{wanted}, since layers have {_SLIDING}", get.raw.get(name))
    return tuple(window if slides else None for slides in sliding)


def _ropes(get: Reader, family: _Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """(all layers', None), or for Gemma 3 (that of full layers, that of layers with a window).

    Both spellings: rope_theta + rope_scaling (type or rope_type), and rope_parameters.
    """
    name = "rope_scaling" if get.raw.get("rope_scaling") else "rope_parameters"
    rope = get.raw.get(name) or {}
    if not isinstance(rope, dict):
        raise get.error(name, "an object or null", rope)
    if family.gemma != 3:
        if any(isinstance(value, dict) for value in rope.values()):
            raise get.error(name, "one set for all layers (per-layer sets are not supported here)", rope)
        theta = get.raw.get("rope_theta", family.rope_theta)
        if family.model_type == "phi3":
            return _phi3_rope(get, rope, theta, head_dim), None
        return _rope(get, rope, theta), None
    if name == "rope_scaling":  # the older spelling scales the full layers only
        rope = {_FULL: rope}
    if not set(rope) <= {_FULL, _SLIDING} or not all(isinstance(value, dict | None) for value in rope.values()):
        raise get.error(name, f"an object for {_FULL} and one for {_SLIDING}", rope)
    full = _rope(get, rope.get(_FULL) or {}, get.raw.get("rope_theta", 1e6))
    return full, _rope(get, rope.get(_SLIDING) or {}, get.raw.get("rope_local_base_freq", 1e4))


def _rope(get: Reader, rope: dict[str, Any], theta: float) -> RopeConfig:
    theta = get.number("rope_theta", theta, rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", get.raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise get.error("partial_rotary_factor", "1.0 (partial rotation is not supported)", partial)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, get.number("factor", None, rope))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor=get.number("factor", None, rope),
            low_freq_factor=get.number("low_freq_factor", None, rope),
            high_freq_factor=get.number("high_freq_factor", None, rope),
            original_max_position=int(get.number("original_max_position_embeddings", None, rope)),
        )
    raise get.error("rope type", "default, linear or llama3 (others are not supported)", kind)


def _phi3_rope(get: Reader, rope: dict[str, Any], theta: float, head_dim: int) -> RopeConfig:
    """Phi-3 may rotate a part of each head only, and has LongRoPE (Ding et al. 2024), which it once called su."""
    given = {name: value for name, value in rope.items() if value is not None}
    partial = given.get("partial_rotary_factor", get.raw.get("partial_rotary_factor"))
    partial = 1.0 if partial is None else get.number("partial_rotary_factor", partial, {})
    rotated = int(head_dim * partial)
    if partial > 1 or rotated % 2 or rotated == 0:
        raise get.error("partial_rotary_factor", f"a share of head_dim = {head_dim} that is an even number", partial)
    theta, kind = get.number("rope_theta", theta, given), given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    if kind not in ("longrope", "su"):
        raise get.error("rope type", "default or longrope (Phi-3 has no others)", kind)
    factors = given.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rotated // 2:
        raise get.error("short_factor", f"a list of {rotated // 2} numbers, one for each frequency", factors)
    original = get.integer("original_max_position_embeddings", 4096)
    # How much longer contexts may become. Attention then gets sharper, in short contexts too (transformers'
    # modeling_rope_utils.py); the default is LongRoPE's.
    factor = get.number("factor", get.integer("max_position_embeddings", 4096) / original, given)
    sharper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeConfig(
        theta,
        "longrope",
        original_max_position=original,
        partial=partial,
        short_factors=tuple(get.number("short_factor", value, {}) for value in factors),
        attention_factor=get.number("attention_factor", sharper, given),
    )


def _experts(get: Reader, family: _Family, num_layers: int) -> ExpertsConfig | None:
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


def _refuse_unsupported(get: Reader, family: _Family) -> None:
    if quantization := get.raw.get("quantization_config"):
        expected = "none (a quantized checkpoint needs a method that reads it: load_model(..., linear_method=...))"
        raise get.error("quantization_config", expected, quantization)
    if family.gemma:
        get.refuse("use_bidirectional_attention", (False,), "false (attention is causal here)")
    if family.model_type == "phi3":
        get.refuse("attention_bias", (False,), "false or no such field (Phi-3's linear layers have no biases)")
    if family.gemma == 3:  # transformers reads the field and does not apply it
        get.refuse("attn_logit_softcapping", (), "null (Gemma 3 caps no attention scores)")
