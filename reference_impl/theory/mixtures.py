"""Mixtures of experts, beside their `ModelShape`: how many experts, of what size. Also config.json files of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from reference_impl.theory.model_shapes import MODELS, ModelShape, from_config


@dataclass(frozen=True)
class Mixture:
    """The routed experts of a model. expert_size: columns of one expert's gated MLP; layers: how many have experts."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    layers: int
    source: str

    def expert_params(self, hidden_size: int, columns: int | None = None) -> int:
        """Parameters of one expert in one layer, or of some of its columns: gate, up, down."""
        return 3 * hidden_size * (self.expert_size if columns is None else columns)

    def hit(self, tokens: float) -> float:
        """Experts of a layer that some of `tokens` tokens go to, if all are as likely: E (1 - (1 - k/E)^tokens)."""
        return self.num_experts * (1 - (1 - self.experts_per_token / self.num_experts) ** tokens)


_CONFIG = "config.json on the Hugging Face hub"
_DEEPSEEK = "technical report (2024); besides them shared experts, and first layers without"
_V3 = Mixture(256, 8, 2048, 58, f"DeepSeek-V3 {_DEEPSEEK}")

MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "mixtral-8x7b": Mixture(8, 2, 14336, 32, f"Jiang et al. 2024 and {_CONFIG}"),
        "deepseek-v2": Mixture(160, 6, 1536, 59, f"DeepSeek-V2 {_DEEPSEEK}"),
        "deepseek-v3": _V3,
        "deepseek-r1": _V3,
        "qwen3-next-80b-a3b": Mixture(512, 10, 512, 48, f"{_CONFIG} (2025); besides them one shared expert"),
    }
)


def mixture_of(shape: ModelShape) -> Mixture | None:
    """The mixture of a model of the table; None for a dense one. ValueError for a mixture that is not in the table."""
    if shape.active_params is None:
        return None
    if shape.name not in MIXTURES:
        raise ValueError(f"{shape.name}: its experts are not in the table; expected one of {', '.join(MIXTURES)}")
    return MIXTURES[shape.name]


def read_config(config: Mapping[str, Any], name: str) -> tuple[ModelShape, Mixture | None]:
    """Shape and mixture of a config.json, with norms, biases and routers counted, which `from_config` leaves out.

    Mixtures: mixtral and qwen3_moe, with experts in every layer. ValueError for others, and for those of `from_config`.
    """
    kind = config.get("model_type")
    if kind not in ("mixtral", "qwen3_moe"):
        shape = from_config(config, name)
        if shape.active_params is None and shape.kv_lora_rank is None and shape.attention_layers is None:
            return replace(shape, stated_params=shape.matrix_params + _vectors(config, shape)), None
        raise ValueError(f"config field 'model_type': {kind} has experts or layers that a config does not count here")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("config: expected experts in every layer, got mlp_only_layers or decoder_sparse_step")
    dense = dict(config) | {"model_type": "mistral" if kind == "mixtral" else "qwen3"}
    shape = from_config(dense, name)
    size = config.get("intermediate_size" if kind == "mixtral" else "moe_intermediate_size", 768)
    default = 8 if kind == "mixtral" else 128
    experts = config.get("num_local_experts") or config.get("num_experts") or default
    k = config.get("num_experts_per_tok", 2 if kind == "mixtral" else 8)
    if not all(isinstance(count, int) and count > 0 for count in (size, experts, k)) or k > experts:
        raise ValueError(f"config: expected numbers of experts and their size, got {experts}, {k} and {size}")
    mixture = Mixture(experts, k, size, shape.layers, "config")
    each = mixture.expert_params(shape.hidden_size)
    mlp = 3 * shape.hidden_size * shape.intermediate_size
    routers = shape.layers * experts * shape.hidden_size
    others = shape.matrix_params - shape.layers * mlp + routers + _vectors(config, shape)
    stated, active = (others + shape.layers * count * each for count in (experts, k))
    return replace(shape, stated_params=stated, active_params=active, intermediate_size=size), mixture


def _vectors(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Norms and biases: two norms a layer and a last one, of heads in Qwen3, biases of q, k and v in Qwen2."""
    kind = config["model_type"]
    heads = 2 * shape.head_dim if kind in ("qwen3", "qwen3_moe") else 0
    has_bias = kind == "qwen2" or (kind == "llama" and config.get("attention_bias"))
    biases = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim if has_bias else 0
    return shape.layers * (2 * shape.hidden_size + heads + biases) + shape.hidden_size


def known_models() -> list[str]:
    """Names of the models that a plan can be made for."""
    return [name for name, shape in MODELS.items() if shape.active_params is None or name in MIXTURES]
