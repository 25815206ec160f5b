"""What guesses, from a folder: a draft model, or a feature head (speculative="draft", "eagle")."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.feature_head import is_feature_head, load_feature_head
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import BY_MODEL

if TYPE_CHECKING:
    import torch

    from reference_impl.annexes.speculative.feature_head import FeatureHead
    from reference_impl.core.decoder import Decoder


def with_method(config: EngineConfig, folder: Path) -> EngineConfig:
    """The method goes by what is in the folder. ValueError if another one is asked for."""
    method: Literal["eagle", "draft"] = "eagle" if is_feature_head(folder) else "draft"
    if config.speculative not in ("off", method):
        raise ValueError(
            f"draft_model is given, {BY_MODEL[method]}, and speculative={config.speculative!r}: expected {method!r}, "
            "or one of the two"
        )
    return replace(config, speculative=method)


def load_draft(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Decoder | FeatureHead:
    """With positions and kernels as the config asks of the target."""
    load = load_feature_head if is_feature_head(folder) else load_model
    return load(folder, dtype, device, config.max_model_len, config.attention)


def parts_with_draft(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Parts:
    """Found by name in a worker's process."""
    return Parts(draft_model=load_draft(folder, dtype, device, config))
