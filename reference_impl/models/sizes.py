"""Whether a config.json and the weights beside it can be of one model: asked before memory is taken for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from reference_impl.core.model_config import ModelConfig
from reference_impl.models.config_reader import ConfigError

FAR = 16  # times as many bytes as the files have: no mistake about a few tensors, which are named when they are read
_SMALL = 64 << 20  # bytes that are taken in any case


def least_weights(config: ModelConfig) -> tuple[int, int]:
    """How many numbers embedding and output have, and all matrices of the layers, biases and norms left out."""
    hidden, experts = config.hidden_size, config.experts
    embeddings = config.vocab_size * hidden * (1 if config.tied_embeddings else 2)
    attention = 2 * hidden * config.head_dim * (config.num_heads + config.num_kv_heads)
    sparse = 0 if experts is None else len(experts.layers)
    mlps = (config.num_layers - sparse) * 3 * hidden * config.intermediate_size
    if experts is not None:
        mlps += sparse * experts.num_experts * 3 * hidden * experts.intermediate_size
    return embeddings, config.num_layers * attention + mlps


def check_sizes(config: ModelConfig, folder: Path, files: Sequence[Path], packed: bool) -> None:
    """Raises ConfigError where the config's sizes are far beyond what the files can hold.

    packed: the layers' matrices may be of few bits, so they are counted with one bit for each number, not 16.
    """
    embeddings, matrices = least_weights(config)
    least, found = 2 * embeddings + matrices // 8 * (1 if packed else 16), sum(file.stat().st_size for file in files)
    if least > FAR * found + _SMALL:
        sizes = (
            f"vocab_size {config.vocab_size:,}, hidden_size {config.hidden_size:,}, intermediate_size "
            f"{config.intermediate_size:,}, num_hidden_layers {config.num_layers:,}"
        )
        raise ConfigError(
            f"{folder / 'config.json'}: {sizes}: expected the sizes of the weights beside it, which have {found:,} "
            f"bytes in {len(files)} files; found sizes that take {least:,} bytes or more: one of the two is of another "
            "model"
        )
