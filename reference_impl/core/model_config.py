"""The description of a model: its sizes, and what its layers do. `models/config_json.py` reads it from config.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency, and how long contexts rescale it."""

    theta: float = 10_000.0
    kind: str = "default"  # default | linear | llama3 | longrope
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    # What only Phi-3 does, and of it StableLM: partial.
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
    own: range | None = field(default=None, repr=False)  # where this is a rank's part: the experts that it has, whole


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
    # Where this is a rank's part, with its own numbers of heads and columns: what it is a part of.
    shard_of: ModelConfig | None = field(default=None, repr=False)
    # Where this is a stage's part: the layers that it has, of num_layers.
    stage: range | None = field(default=None, repr=False)

    @property
    def layers(self) -> range:
        """The numbers of the layers that are here."""
        return range(self.num_layers) if self.stage is None else self.stage

    @property
    def whole(self) -> ModelConfig:
        """The model's own config, as its folder says it, also where this is a rank's part of it."""
        return self.shard_of or self
