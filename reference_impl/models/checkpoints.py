"""Which kind of checkpoint a path is, and what either kind says of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reference_impl.core.model_config import ModelConfig
from reference_impl.models.config_json import MOST_BYTES, QUANTIZATION, read_model_config
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object


def is_gguf(model: str | Path) -> bool:
    """Whether a path is a GGUF file, by its name: x.gguf."""
    return str(model).endswith(".gguf") and not Path(model).is_dir()


def read_config(model: str | Path, quantized: bool = False) -> ModelConfig:
    """The config of a folder, as `read_model_config` reads it, or of a GGUF file."""
    if not is_gguf(model):
        return read_model_config(model, quantized)
    from reference_impl.models.gguf_file import GgufFile
    from reference_impl.models.gguf_model import gguf_config

    return gguf_config(GgufFile(Path(model)))


def is_quantized(folder: Path) -> bool:
    """Whether config.json says that the model is quantized. Raises ConfigError if it cannot be read."""
    return bool(quantization_of(folder))


def quantization_of(folder: Path) -> Any:
    """What config.json says of quantized weights, not checked yet; None without such a field. ConfigError if the file
    cannot be read."""
    path = folder / "config.json"
    raw = read_object(path, ConfigError, MOST_BYTES) if path.is_file() else {}
    return next((raw[name] for name in QUANTIZATION if raw.get(name)), None)
