"""The folder of a model: one that is here, or for an id of Hugging Face's hub (org/name) what is fetched from there."""

from __future__ import annotations

import re
from pathlib import Path

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NEEDED, _UNUSED = ("*.json", "*.safetensors", "*.jinja"), ("original/*", "consolidated*", "onnx/*")


def is_hub_id(model: str | Path) -> bool:
    """Whether it has the form org/name, and no folder here is called so."""
    return isinstance(model, str) and _ID.fullmatch(model) is not None and not Path(model).exists()


def model_folder(model: str | Path) -> Path:
    """The path itself, or the folder of a hub's model: from the hub's cache on this machine, or fetched into it.

    Raises FileNotFoundError where it is not in the cache and cannot be fetched. Any other path is not checked here.
    """
    if not is_hub_id(model):
        return Path(model)
    name = str(model)
    from huggingface_hub import snapshot_download  # 0.3 s, which a folder does without

    try:
        return Path(snapshot_download(name, allow_patterns=[*_NEEDED], ignore_patterns=[*_UNUSED]))
    except Exception as error:  # of the hub, of its HTTP client, of the disk: they have no class in common
        why = str(error).strip().partition("\n")[0]
        raise FileNotFoundError(
            f"no model {name!r}: there is no such folder here, it is not in Hugging Face's cache, and it could not be "
            f"fetched ({type(error).__name__}: {why}). Without a network there are the course's models, target and "
            "draft (in Python course_model('target')), and any folder with config.json and safetensors"
        ) from error
