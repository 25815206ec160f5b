"""What a model is (read from a Hugging Face config.json) and how the engine is set up.

Whatever changes the numbers and is not implemented is refused by name, never ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ConfigError(ValueError):
    """A config.json that cannot be served: says which field, what was expected, what came."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency, and how long contexts rescale it."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


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
    sliding_window: int | None
    dtype: str  # of the checkpoint: float32 | float16 | bfloat16 | float64
    eos_token_ids: tuple[int, ...]


# What `transformers` assumes where a config leaves a field out. None: the field must be there.
_FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "num_key_value_heads": 32,
    },
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
}
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


def read_model_config(folder: str | Path) -> ModelConfig:
    """Reads `config.json` (and `generation_config.json` for the end tokens) of a Hugging Face folder."""
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file. Expected a Hugging Face model folder with config.json in it")
    raw = _read_json(path)
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
    get = _Reader(raw, where)
    architecture = get.architecture()
    family = _FAMILIES[architecture]
    hidden, heads = get.integer("hidden_size"), get.integer("num_attention_heads")
    # Left out: the family's default. null: as many as query heads.
    kv_heads = get.integer(
        "num_key_value_heads", heads if "num_key_value_heads" in raw else family.get("num_key_value_heads", heads)
    )
    if heads % kv_heads:
        raise get.error(
            "num_key_value_heads",
            f"a divisor of num_attention_heads = {heads}",
            kv_heads,
        )
    head_dim = get.optional_integer("head_dim", family.get("head_dim"))
    if head_dim is None:
        if hidden % heads:
            raise get.error(
                "hidden_size",
                f"a multiple of num_attention_heads = {heads}, or a head_dim",
                hidden,
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise get.error("head_dim", "an even number (rotary embedding pairs its values)", head_dim)
    get.refuse_unsupported()
    # Qwen2 always has a bias on q, k and v; Mistral never has one, whatever its config says.
    attention_bias = get.boolean("attention_bias") and architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise get.error("dtype", f"one of {', '.join(_DTYPES)}", dtype)
    return ModelConfig(
        architecture=architecture,
        vocab_size=get.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=get.integer("intermediate_size"),
        num_layers=get.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=get.integer("max_position_embeddings", family["max_position_embeddings"]),
        norm_eps=get.number("rms_norm_eps", 1e-6),
        rope=get.rope(),
        tied_embeddings=get.boolean("tie_word_embeddings"),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias,
        mlp_bias=get.boolean("mlp_bias") and architecture == "LlamaForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=get.sliding_window(architecture, family.get("sliding_window")),
        dtype=dtype,
        eos_token_ids=get.token_ids("eos_token_id", generation or {}),
    )


class _Reader:
    """Typed access to a raw config, with errors that name file and field."""

    def __init__(self, raw: dict[str, Any], where: str):
        self.raw, self.where = raw, where

    def error(self, name: str, expected: str, found: object) -> ConfigError:
        return ConfigError(f"{self.where}: {name}: expected {expected}, found {found!r}")

    def architecture(self) -> str:
        names = self.raw.get("architectures") or [_BY_MODEL_TYPE.get(str(self.raw.get("model_type")))]
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str) and name in _FAMILIES:
                return name
        found = self.raw.get("architectures") or self.raw.get("model_type")
        raise self.error("architectures", f"one of {', '.join(_FAMILIES)}", found)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.raw.get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, "a positive integer", value)
        return value

    def optional_integer(self, name: str, default: int | None) -> int | None:
        if self.raw.get(name, default) is None:
            return None
        return self.integer(name, default)

    def boolean(self, name: str) -> bool:
        value = self.raw.get(name)
        if not isinstance(value, bool | None):
            raise self.error(name, "true or false", value)
        return bool(value)

    def token_ids(self, name: str, generation: dict[str, Any]) -> tuple[int, ...]:
        """One id, several, or none; generation_config.json has the last word."""
        value = generation.get(name, self.raw.get(name))
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self.error(name, "a token id, a list of token ids, or null", value)
        return tuple(ids)

    def number(self, name: str, default: float | None = None, raw: dict[str, Any] | None = None) -> float:
        value = (self.raw if raw is None else raw).get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
            raise self.error(name, "a positive number", value)
        return float(value)

    def rope(self) -> RopeConfig:
        """Both spellings: rope_theta + rope_scaling (type or rope_type), and rope_parameters."""
        rope = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise self.error("rope_scaling or rope_parameters", "an object or null", rope)
        if any(isinstance(value, dict) for value in rope.values()):
            raise self.error(
                "rope_parameters",
                "one set for all layers (per-layer sets are not supported)",
                rope,
            )
        theta = self.number("rope_theta", self.raw.get("rope_theta", 10_000.0), rope)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        partial = rope.get("partial_rotary_factor", self.raw.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise self.error("partial_rotary_factor", "1.0 (partial rotation is not supported)", partial)
        if kind == "default":
            return RopeConfig(theta)
        if kind == "linear":
            return RopeConfig(theta, kind, self.number("factor", None, rope))
        if kind == "llama3":
            return RopeConfig(
                theta,
                kind,
                factor=self.number("factor", None, rope),
                low_freq_factor=self.number("low_freq_factor", None, rope),
                high_freq_factor=self.number("high_freq_factor", None, rope),
                original_max_position=int(self.number("original_max_position_embeddings", None, rope)),
            )
        raise self.error("rope type", "default, linear or llama3 (others are not supported)", kind)

    def sliding_window(self, architecture: str, default: int | None) -> int | None:
        """The window, if any layer uses one. Served only while contexts stay inside it (see EngineConfig)."""
        window = self.raw.get("sliding_window", default)
        if architecture.startswith("Qwen"):
            layers = self.raw.get("layer_types")
            used = self.boolean("use_sliding_window")
            if layers is not None:
                if not isinstance(layers, list) or not all(
                    k in ("full_attention", "sliding_attention") for k in layers
                ):
                    raise self.error("layer_types", "a list of full_attention and sliding_attention", layers)
                used = "sliding_attention" in layers
            window = window if used else None
        if window is None or architecture == "LlamaForCausalLM":
            return None
        return self.integer("sliding_window", default)

    def refuse_unsupported(self) -> None:
        act = self.raw.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise self.error("hidden_act", "silu (others are not supported)", act)
        if quantization := self.raw.get("quantization_config"):
            raise self.error("quantization_config", "none (quantized checkpoints are not supported)", quantization)


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine may use, and how it cuts its work.

    block_size: tokens in a KV block. num_blocks: None takes what kv_cache_bytes pays for.
    max_num_batched_tokens: the budget of new tokens in one step (long prompts are cut into chunks).
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 256 * 1024**2
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "kv_cache_bytes",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
        ):
            value = getattr(self, name)
            optional = name in ("num_blocks", "max_model_len")
            if not (optional and value is None) and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise ValueError(f"EngineConfig.{name}: expected a positive integer, got {value!r}")


def course_model(name: str = "target") -> Path:
    """Folder of a course model, "target" or "draft": in the checkout, or installed with the package."""
    package = Path(__file__).resolve().parent
    places = (
        package.parent / "datasets" / "course_model" / name,
        package.parent / "inferlab_data" / "course_model" / name,
    )
    for place in places:
        if (place / "config.json").is_file():
            return place
    raise FileNotFoundError(f"course model {name!r} not found; looked in {' and '.join(map(str, places))}")
