"""How the engine is set up, and where the course models lie. What a model is stands in model_config.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from reference_impl.config_reader import ConfigError
from reference_impl.model_config import ModelConfig, RopeConfig, parse_model_config, read_model_config

__all__ = [
    "ConfigError",
    "EngineConfig",
    "ModelConfig",
    "RopeConfig",
    "course_model",
    "parse_model_config",
    "read_model_config",
]


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine may use, and how it cuts its work.

    block_size: tokens in a KV block. num_blocks: None takes what kv_cache_bytes pays for.
    max_num_batched_tokens: the budget of new tokens in one step (long prompts are cut into chunks).
    prefix_cache: "hash" (chain of block hashes), "radix" (tree of tokens), "off", or "auto": hash, except for models
    with sliding windows, which cannot share prefixes.
    admission: "fill" or "worst_case"; preemption: "recompute" or "swap" (see Scheduler). swap_bytes: host memory for
    requests that are swapped out.
    attention: whose kernels compute it: "triton" (ours), "torch", or "auto": Triton on a GPU that it serves.
    """

    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_bytes: int = 256 * 1024**2
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    prefix_cache: Literal["auto", "hash", "radix", "off"] = "auto"
    admission: Literal["fill", "worst_case"] = "fill"
    preemption: Literal["recompute", "swap"] = "recompute"
    swap_bytes: int = 64 * 1024**2
    attention: Literal["auto", "triton", "torch"] = "auto"

    def __post_init__(self) -> None:
        optional = ("num_blocks", "max_model_len")
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            if choices := get_args(kind) if get_origin(kind) is Literal else ():
                if value not in choices:
                    raise ValueError(f"EngineConfig.{name}: expected one of {', '.join(choices)}, got {value!r}")
            elif value is None and name in optional:
                continue
            elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
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
