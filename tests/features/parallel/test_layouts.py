"""What a rank of large models has, built without memory: bytes of weights, and of a token's keys and values."""

from __future__ import annotations

from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.model import build_model
from reference_impl.assembly.worker_half import kv_specs_of
from reference_impl.features.parallel.model import RankModel
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.models.shapes import config_of_shape

COMMON = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "torch_dtype": "bfloat16"}
LLAMA = {"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8, **COMMON}
# Sizes as in their config.json files; parameters in all, as their authors count them.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-70b": LLAMA | {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    },
    "llama-3.1-405b": LLAMA | {
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
    },
    "mixtral-8x7b": COMMON | {
        "architectures": ["MixtralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "rope_theta": 1e6,
    },
}  # fmt: skip
PARAMETERS = {"llama-3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "mixtral-8x7b": 46_702_792_704}


def of_rank(config: Any, rank: int, size: int) -> Any:
    model = RankModel(ThreadGroup(size).rank(rank))
    made = build_model(model.config_of(config), device="meta", kernels="torch")
    model.shrink(made)
    return made


@pytest.mark.parametrize(("shape", "size"), [("llama-3-70b", 8), ("llama-3.1-405b", 16), ("mixtral-8x7b", 4)])
def test_the_ranks_have_the_model_between_them(shape: str, size: int) -> None:
    config = config_of_shape(SHAPES[shape])
    whole = build_model(config, device="meta", kernels="torch")
    assert whole.num_parameters() == PARAMETERS[shape]
    first, last = of_rank(config, 0, size), of_rank(config, size - 1, size)
    assert first.num_parameters() == last.num_parameters()
    norms = config.hidden_size * (2 * config.num_layers + 1)
    routers = 0 if config.experts is None else config.experts.num_experts * config.hidden_size * config.num_layers
    copies = max(1, size // config.num_kv_heads)  # of each KV head
    keys = 2 * config.num_layers * config.hidden_size * config.num_kv_heads * config.head_dim
    everywhere = norms + routers
    assert size * (first.num_parameters() - everywhere) == PARAMETERS[shape] - everywhere + (copies - 1) * keys
    [spec] = kv_specs_of(first.config, first.dtype, EngineConfig(), 8192)
    [all_heads] = kv_specs_of(config, first.dtype, EngineConfig(), 8192)
    assert size * spec.bytes_per_block == copies * all_heads.bytes_per_block
