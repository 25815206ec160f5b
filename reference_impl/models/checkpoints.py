"""Which kind of checkpoint a path is, what either kind says of its model, and which weights it has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
    """What config.json says of quantized weights, not checked yet; None without such a field. quant_method is in lower
    case and with compressed-tensors' hyphen, however the file writes it (so does vLLM). ConfigError if the file cannot
    be read."""
    path = folder / "config.json"
    raw = read_object(path, ConfigError, MOST_BYTES) if path.is_file() else {}
    said = next((raw[name] for name in QUANTIZATION if raw.get(name)), None)
    if isinstance(said, dict) and isinstance(method := said.get("quant_method"), str):
        return said | {"quant_method": method.lower().replace("compressed_tensors", "compressed-tensors")}
    return said


@dataclass(frozen=True)
class Checkpoint:
    """Where a model's weights were loaded from. made: what was asked for that changes their values, such as "int8"."""

    path: Path
    made: str = ""

    @cached_property
    def weights(self) -> str:
        """The hash of the weights, 64 hexadecimal digits; all weights are read for it, when it is first asked for.
        Raises CheckpointError for files that cannot be read."""
        from reference_impl.models.identity import stored_weights

        return stored_weights(self.path, self.made)
