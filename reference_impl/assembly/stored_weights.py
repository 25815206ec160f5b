"""The linear method of each layer of a checkpoint that is quantized already: by config.json's quantization_config."""

from __future__ import annotations

from pathlib import Path

import torch

from reference_impl.annexes.cpu.default import default_method
from reference_impl.core.linear import Methods
from reference_impl.interfaces import LinearMethod
from reference_impl.models.config_json import MOST_BYTES
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object
from reference_impl.models.quantization.compressed_tensors import schemes
from reference_impl.models.quantization.stored import Stored

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def stored_methods(folder: Path, dtype: torch.dtype, device: torch.device) -> Methods | None:
    """None where config.json says nothing of quantization. ConfigError for a form that is not read."""
    path = folder / "config.json"
    raw = read_object(path, ConfigError, MOST_BYTES).get("quantization_config") if path.is_file() else None
    if not raw:
        return None
    scheme_of, inverse = schemes(raw, str(path))

    def method(name: str) -> LinearMethod:
        prefix, _, last = name.rpartition(".")
        names = [f"{prefix}.{part}" if prefix else part for part in _PARTS.get(last, (last,))]
        found = {part: scheme_of(part) for part in names}
        scheme = next(iter(found.values()))
        if any(other != scheme for other in found.values()):
            raise ConfigError(
                f"{path}: quantization_config: {name}: expected one scheme for {', '.join(found)}, which are one layer "
                f"here, found {', '.join(f'{part}: {one}' for part, one in found.items())}"
            )
        return default_method(dtype, device) if scheme is None else Stored(scheme, dtype, device, inverse)

    return method
