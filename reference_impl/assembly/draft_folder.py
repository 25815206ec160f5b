"""A draft model from a folder: speculative="draft" (a smaller model), "eagle" (a feature head), "mtp"
(a module of multi-token prediction, sequential), "medusa" (heads)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reference_impl.assembly import feature_head, medusa_heads
from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import BY_MODEL
from reference_impl.models.json_file import read_object

if TYPE_CHECKING:
    import torch

    from reference_impl.assembly.parts import Drafts

Method = Literal["draft", "eagle", "mtp", "medusa"]
METHODS: dict[str, Method] = {
    feature_head.ARCHITECTURE: "eagle",
    feature_head.MTP: "mtp",
    medusa_heads.ARCHITECTURE: "medusa",
}
LOADERS: dict[Method, Callable[..., Any]] = {
    "draft": load_model,
    "eagle": feature_head.load_feature_head,
    "mtp": feature_head.load_feature_head,
    "medusa": medusa_heads.load_medusa_heads,
}
_MOST_BYTES = 1 << 20


def method_in(folder: Path) -> Method:
    """By its config.json; "draft" also where there is none that can be read, which loading it will say."""
    try:
        names = read_object(folder / "config.json", ConfigError, _MOST_BYTES).get("architectures")
    except (ConfigError, OSError):
        return "draft"
    return METHODS.get(names[0], "draft") if isinstance(names, list) and len(names) == 1 else "draft"


def with_method(config: EngineConfig, folder: Path) -> EngineConfig:
    """The method goes by what is in the folder. ValueError if another one is asked for."""
    method = method_in(folder)
    if config.speculative not in ("off", method):
        raise ValueError(
            f"draft_model is given, {BY_MODEL[method]}, and speculative={config.speculative!r}: expected {method!r}, "
            "or one of the two"
        )
    return replace(config, speculative=method)


def load_draft(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Drafts:
    """With positions and kernels as the config asks of the target."""
    found: Drafts = LOADERS[method_in(folder)](folder, dtype, device, config.max_model_len, config.attention)
    return found


def parts_with_draft(folder: Path, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Parts:
    """Found by name in a worker's process."""
    return Parts(draft_model=load_draft(folder, dtype, device, config))
