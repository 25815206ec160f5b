"""The few numbers of a model's config that decide its bytes and its operations, and a table of known models.

Matrices of a decoder layer, d = hidden_size, q = num_heads * head_dim, kv = num_kv_heads * head_dim, f = intermediate:
    Q [d, q]   K [d, kv]   V [d, kv]   O [q, d]   gate [d, f]   up [d, f]   down [f, d]
`head_dim` is a number of its own: Qwen3-0.6B has 16 heads of 128 in a hidden size of 1024, Gemma-7B 16 of 256 in 3072.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder-only model. Counts are per model, dimensions in values, not bytes.

    attention_layers   layers that keep keys and values for every token; None = all (hybrids have fewer)
    fixed_state_bytes  bytes per sequence that do not grow with its length (recurrent layers of hybrids)
    kv_lora_rank, rope_dim   multi-head latent attention caches one latent and one shared rotary key per token
    stated_params, active_params   what the publisher counts; active differs for mixtures of experts
    """

    name: str
    layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool = False
    gated_mlp: bool = True  # gate, up, down; False: up and down only
    v_head_dim: int | None = None  # None: values are as wide as keys
    attention_layers: int | None = None
    fixed_state_bytes: int = 0
    kv_lora_rank: int | None = None
    rope_dim: int | None = None
    max_context: int | None = None
    stated_params: int | None = None
    active_params: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
        for field in sizes:
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{self.name}: expected {field} to be an integer of at least 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.name}: expected num_kv_heads to divide num_heads={self.num_heads}, got {self.num_kv_heads}; "
                "each KV head serves the same number of query heads"
            )
        if self.attention_layers is not None and not 0 <= self.attention_layers <= self.layers:
            raise ValueError(
                f"{self.name}: expected attention_layers between 0 and layers={self.layers}, "
                f"got {self.attention_layers}; count only the layers that keep keys and values"
            )
        if (self.kv_lora_rank is None) != (self.rope_dim is None):
            raise ValueError(
                f"{self.name}: expected kv_lora_rank and rope_dim together (latent attention) or neither, "
                f"got {self.kv_lora_rank} and {self.rope_dim}"
            )

    @property
    def kv_layers(self) -> int:
        """Layers whose cache grows with the sequence."""
        return self.layers if self.attention_layers is None else self.attention_layers

    @property
    def value_dim(self) -> int:
        """Width of one value head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kv_values_per_layer(self) -> int:
        """Values cached per token and attention layer: 2 * num_kv_heads * head_dim; MLA: kv_lora_rank + rope_dim."""
        if self.kv_lora_rank is not None and self.rope_dim is not None:
            return self.kv_lora_rank + self.rope_dim
        return self.num_kv_heads * (self.head_dim + self.value_dim)

    @property
    def attention_kind(self) -> str:
        """MHA, GQA, MQA or MLA: how many query heads share one cached key."""
        if self.kv_lora_rank is not None:
            return "MLA"
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of each matrix of a decoder layer; ValueError where layers are not uniform."""
        if self.active_params is not None or self.kv_lora_rank is not None or self.attention_layers is not None:
            raise ValueError(
                f"{self.name}: expected uniform dense layers, got experts, latent attention or a hybrid; their "
                "layer_params are not modelled: use stated_params or active_params"
            )
        d, f = self.hidden_size, self.intermediate_size
        k, v = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim
        matrices = {"q": (d, self.num_heads * self.head_dim), "k": (d, k), "v": (d, v)}
        matrices["o"] = (self.num_heads * self.value_dim, d)
        return matrices | ({"gate": (d, f)} if self.gated_mlp else {}) | {"up": (d, f), "down": (f, d)}

    @property
    def layer_params(self) -> int:
        """Weights in the matrices of one dense decoder layer (norms and biases, below 0.02 %, left out)."""
        return sum(inputs * outputs for inputs, outputs in self.layer_matrices.values())

    @property
    def embedding_params(self) -> int:
        """Weights of the input embedding and the output projection together (one matrix if tied)."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def matrix_params(self) -> int:
        """All weights that are matrices: layers * layer_params + embeddings."""
        return self.layers * self.layer_params + self.embedding_params

    @property
    def num_params(self) -> int:
        """Parameters the model has in memory: the published count where known, else the matrices."""
        return self.matrix_params if self.stated_params is None else self.stated_params

    @property
    def linear_params(self) -> int:
        """Parameters that one token uses: active_params, or all matrices but the input embedding (a look-up).

        Publishers count the input embedding among the active ones: 1 % of Mixtral's, 2.5 % of DeepSeek-V3's.
        """
        if self.active_params is not None:
            return self.active_params
        return self.layers * self.layer_params + self.vocab_size * self.hidden_size


def from_config(config: Mapping[str, Any], name: str | None = None) -> ModelShape:
    """ModelShape of a Hugging Face `config.json` given as a dict.

    Reads llama, mistral, qwen2, qwen3, gemma, olmo2, phi3, falcon, deepseek_v2, deepseek_v3 and qwen3_next. Anything
    that would change the size of the cache and is not modelled (another family, a sliding window) is refused, never
    ignored.
    """
    family = _require(config, "model_type", str, "the family name, such as 'llama'")
    if family not in _READERS:
        raise ValueError(
            f"config field 'model_type': expected one of {sorted(_READERS)}, got {family!r}; "
            "build a ModelShape by hand after reading how that family caches its keys and values"
        )
    return _READERS[family](config, name or str(config.get("_name_or_path") or family))


def _read_dense(config: Mapping[str, Any], name: str) -> ModelShape:
    """The shape for families that share Llama's field names."""
    _refuse_sliding_window(config)
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"config field 'head_dim': expected it to be given, because hidden_size {hidden} is not a multiple of "
            f"num_attention_heads {heads}; got nothing; copy it from the model's own config"
        )
    return ModelShape(
        name=name,
        layers=_size(config, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_size(config, "num_key_value_heads", heads),
        head_dim=_size(config, "head_dim", hidden // heads),
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", config["model_type"] == "gemma")),
        max_context=config.get("max_position_embeddings"),
        source="config",
    )


def _read_falcon(config: Mapping[str, Any], name: str) -> ModelShape:
    """Falcon-7B's config has num_kv_heads = 71, but one head is cached: multi_query decides (erratum E09.2)."""
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads", config.get("n_head"))
    if bool(config.get("new_decoder_architecture", False)):
        kv_heads = _size(config, "num_kv_heads", config.get("n_head_kv") or heads)
    elif bool(config.get("multi_query", True)):
        kv_heads = 1
    else:
        kv_heads = heads
    return ModelShape(
        name=name,
        layers=_size(config, "num_hidden_layers", config.get("n_layer")),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=_size(config, "ffn_hidden_size", 4 * hidden),
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        gated_mlp=False,
        max_context=config.get("max_position_embeddings"),
        source="config",
    )


def _read_deepseek(config: Mapping[str, Any], name: str) -> ModelShape:
    """Multi-head latent attention: num_key_value_heads is in the config and does not size the cache."""
    rope = _size(config, "qk_rope_head_dim")
    return ModelShape(
        name=name,
        layers=_size(config, "num_hidden_layers"),
        hidden_size=_size(config, "hidden_size"),
        num_heads=_size(config, "num_attention_heads"),
        num_kv_heads=_size(config, "num_attention_heads"),
        head_dim=_size(config, "qk_nope_head_dim") + rope,
        v_head_dim=_size(config, "v_head_dim"),
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        kv_lora_rank=_size(config, "kv_lora_rank"),
        rope_dim=rope,
        max_context=config.get("max_position_embeddings"),
        source="config",
    )


def _read_qwen3_next(config: Mapping[str, Any], name: str) -> ModelShape:
    """A hybrid: most layers are gated DeltaNet with a state of fixed size, every fourth keeps keys and values."""
    layers = _size(config, "num_hidden_layers")
    kinds = config.get("layer_types")
    if kinds is None:
        interval = _size(config, "full_attention_interval", 4)
        kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"linear_attention", "full_attention"})
    if unknown or len(kinds) != layers:
        raise ValueError(
            f"config field 'layer_types': expected {layers} entries of 'linear_attention' or 'full_attention', "
            f"got {len(kinds)} entries with {unknown or 'no unknown kind'}; correct the config"
        )
    full = kinds.count("full_attention")
    state = delta_net_state_bytes(
        _size(config, "linear_num_key_heads"),
        _size(config, "linear_num_value_heads"),
        _size(config, "linear_key_head_dim"),
        _size(config, "linear_value_head_dim"),
        _size(config, "linear_conv_kernel_dim"),
    )
    return ModelShape(
        name=name,
        layers=layers,
        hidden_size=_size(config, "hidden_size"),
        num_heads=_size(config, "num_attention_heads"),
        num_kv_heads=_size(config, "num_key_value_heads"),
        head_dim=_size(config, "head_dim"),
        intermediate_size=_size(config, "intermediate_size"),
        vocab_size=_size(config, "vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_layers=full,
        fixed_state_bytes=(layers - full) * state,
        max_context=config.get("max_position_embeddings"),
        source="config",
    )


def delta_net_state_bytes(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_kernel: int, state_bytes: int = 4
) -> int:
    """Bytes one gated DeltaNet layer keeps per sequence: value_heads matrices [key_dim, value_dim] in fp32, plus the
    last conv_kernel - 1 inputs of a short convolution over q, k and v in 2 bytes (Yang et al. 2024, arXiv 2412.06464).
    Engines differ in the precision of the matrices; fp32 is the conservative choice."""
    recurrent = value_heads * key_dim * value_dim * state_bytes
    convolution = (2 * key_heads * key_dim + value_heads * value_dim) * (conv_kernel - 1) * 2
    return recurrent + convolution


def _require(config: Mapping[str, Any], field: str, kind: type, meaning: str) -> Any:
    value = config.get(field)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(
            f"config field '{field}': expected {meaning}, got {value!r}; use the model's complete config.json"
        )
    return value


def _size(config: Mapping[str, Any], field: str, default: Any = None) -> int:
    """A positive integer field; null counts as absent, as in Hugging Face configs."""
    value = config.get(field)
    if value is None:
        value = default
    number = _require({field: value}, field, int, "an integer of at least 1")
    if number < 1:
        raise ValueError(f"config field '{field}': expected an integer of at least 1, got {number}; correct the config")
    return int(number)


def _refuse_sliding_window(config: Mapping[str, Any]) -> None:
    # Qwen configs name a window and switch it off (the default); Mistral-7B-v0.1 has no switch, and its window holds.
    window = config.get("sliding_window")
    used_by_default = config["model_type"] not in ("qwen2", "qwen3")
    if window is not None and config.get("use_sliding_window", used_by_default):
        raise ValueError(
            f"config field 'sliding_window': expected null, got {window!r}; a window bounds the cache, which this "
            "calculator does not model: set it to null to count a cache of the whole sequence"
        )
    other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
    if other:
        raise ValueError(
            f"config field 'layer_types': expected only 'full_attention' in a {config['model_type']} model, "
            f"got {other}; build a ModelShape by hand with attention_layers"
        )


_READERS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3"), _read_dense),
    "falcon": _read_falcon,
    "deepseek_v2": _read_deepseek,
    "deepseek_v3": _read_deepseek,
    "qwen3_next": _read_qwen3_next,
}

_HF = "config.json and weight index on the Hugging Face hub"

_DEEPSEEK_V3 = ModelShape("deepseek-v3", 61, 7168, 128, 128, 192, 18432, 129280, v_head_dim=128,
    kv_lora_rank=512, rope_dim=64, max_context=163840,
    stated_params=671_000_000_000, active_params=37_000_000_000,
    source="DeepSeek-V3 technical report (2024) and " + _HF)  # fmt: skip

MODELS: Mapping[str, ModelShape] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            ModelShape("llama-2-7b", 32, 4096, 32, 32, 128, 11008, 32000,
                       max_context=4096, stated_params=6_738_415_616, source=_HF),
            ModelShape("llama-2-13b", 40, 5120, 40, 40, 128, 13824, 32000,
                       max_context=4096, stated_params=13_015_864_320, source=_HF),
            ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000,
                       max_context=4096, stated_params=68_976_648_192, source=_HF),
            ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256,
                       max_context=8192, stated_params=8_030_261_248, source=_HF),
            ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256,
                       max_context=8192, stated_params=70_553_706_496, source=_HF),
            ModelShape("llama-3.1-405b", 126, 16384, 128, 8, 128, 53248, 128256,
                       max_context=131072, stated_params=405_853_388_800, source=_HF),
            ModelShape("llama-3.2-1b", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True,
                       max_context=131072, stated_params=1_235_814_400, source=_HF),
            ModelShape("qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064,
                       max_context=131072, stated_params=72_706_203_648, source=_HF),
            ModelShape("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, tied_embeddings=True,
                       max_context=40960, stated_params=596_049_920, source=_HF),
            ModelShape("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000,
                       max_context=32768, stated_params=7_241_732_096, source=_HF + " (v0.2: no sliding window)"),
            ModelShape("gemma-7b", 28, 3072, 16, 16, 256, 24576, 256000, tied_embeddings=True,
                       max_context=8192, stated_params=8_537_680_896, source=_HF),
            ModelShape("falcon-7b", 32, 4544, 71, 1, 64, 18176, 65024, tied_embeddings=True, gated_mlp=False,
                       max_context=2048, stated_params=6_921_720_704, source=_HF),
            ModelShape("palm-540b", 118, 18432, 48, 1, 256, 73728, 256000, tied_embeddings=True,
                       max_context=2048, stated_params=540_350_000_000, source="Chowdhery et al. 2022, table 1"),
            ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 14336, 32000, max_context=32768,
                       stated_params=46_702_792_704, active_params=12_879_925_248,
                       source=_HF + "; active: two of eight experts per layer, and everything else"),
            ModelShape("deepseek-v2", 60, 5120, 128, 128, 192, 12288, 102400, v_head_dim=128,
                       kv_lora_rank=512, rope_dim=64, max_context=163840,
                       stated_params=236_000_000_000, active_params=21_000_000_000,
                       source="DeepSeek-V2 technical report (2024) and " + _HF),
            _DEEPSEEK_V3,
            replace(_DEEPSEEK_V3, name="deepseek-r1", source="DeepSeek-R1 (2025): DeepSeek-V3, trained further"),
            ModelShape("qwen3-next-80b-a3b", 48, 2048, 16, 2, 256, 5120, 151936, attention_layers=12,
                       fixed_state_bytes=36 * delta_net_state_bytes(16, 32, 128, 128, 4), max_context=262144,
                       stated_params=80_000_000_000, active_params=3_000_000_000,
                       source=_HF + "; parameter counts as rounded in the model's name"),
        )
    }
)  # fmt: skip


def model(name: str) -> ModelShape:
    """The table row called `name`; the error lists the names that exist."""
    if name not in MODELS:
        raise KeyError(f"unknown model {name!r}; expected one of {sorted(MODELS)}, or use from_config(config)")
    return MODELS[name]
