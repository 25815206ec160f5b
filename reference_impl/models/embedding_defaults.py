"""How a model's makers want its embeddings made: what sentence-transformers' files say, or a GGUF file's pooling_type.

modules.json             the modules that a text goes through: Transformer, Pooling, Normalize, Dense, ...
1_Pooling/config.json    which hidden states of the transformer are pooled, and how
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_impl.interfaces import Pooling
from reference_impl.models.checkpoints import is_gguf
from reference_impl.models.config_json import MOST_BYTES
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_json, read_object, shown

logger = logging.getLogger("inferlab.engine")
_COMPUTED: dict[str, Pooling] = {"mean": "mean", "mean_tokens": "mean", "lasttoken": "last"}
_OF_GGUF: dict[object, Pooling] = {0: "mean", 1: "mean", 3: "last"}  # llama.cpp's llama_pooling_type; 0: none is named


@dataclass(frozen=True)
class EmbeddingDefaults:
    """What an embedding is unless the caller says otherwise.

    refusal: why the pooling that the files ask for cannot be computed; None where it can.
    """

    pooling: Pooling = "mean"
    normalize: bool = True
    refusal: str | None = None

    def resolve(self, pooling: Pooling | None, normalize: bool | None) -> tuple[Pooling, bool]:
        """The pooling, and whether to scale to length 1, for a caller who asks for these, or leaves them out (None).
        ValueError where pooling is left out and the model's own cannot be computed."""
        if pooling is None and self.refusal is not None:
            raise ValueError(f"{self.refusal}: pooling='mean' or 'last' gives hidden states without it")
        return pooling or self.pooling, self.normalize if normalize is None else normalize


def embedding_defaults(model: Path | None) -> EmbeddingDefaults:
    """Returns the defaults of a folder or a GGUF file: without such files, and for None, the mean, of length 1."""
    if model is None:
        return EmbeddingDefaults()
    try:
        found = _of_gguf(model) if is_gguf(model) else _of_folder(model)
    except ConfigError as wrong:
        found = EmbeddingDefaults(refusal=str(wrong))
    if found.refusal is not None:
        logger.warning("%s: so embeddings need pooling='mean' or 'last', without it", found.refusal)
    elif found != EmbeddingDefaults():
        logger.info("%s: embeddings are pooled by %r, normalize=%s by default", model, found.pooling, found.normalize)
    return found


def _of_gguf(path: Path) -> EmbeddingDefaults:
    from reference_impl.models.gguf_file import GgufFile

    metadata = GgufFile(path).metadata
    name = f"{metadata.get('general.architecture')}.pooling_type"
    found = metadata.get(name, 0)
    if found not in _OF_GGUF:
        raise ConfigError(f"{path}: {name}: expected 1 (mean) or 3 (last), found {shown(found)}")
    return EmbeddingDefaults(_OF_GGUF[found])


def _of_folder(folder: Path) -> EmbeddingDefaults:
    place, normalize, listed = "1_Pooling", True, folder / "modules.json"
    if listed.is_file():
        modules = _modules(listed)
        place, normalize = modules.get("Pooling", ""), "Normalize" in modules
        if others := [kind for kind in modules if kind not in ("Transformer", "Pooling", "Normalize")]:
            raise ConfigError(f"{listed}: expected Transformer, Pooling and Normalize, found {', '.join(others)}")
        if not place:  # hidden states of each token
            return EmbeddingDefaults()
    path = folder / place / "config.json"
    if path.is_file():
        return EmbeddingDefaults(_pooling(path), normalize)
    if listed.is_file():
        raise ConfigError(f"{path}: no such file, and {listed} names it")
    return EmbeddingDefaults()


def _modules(path: Path) -> dict[str, str]:
    """Returns {kind of module, the last word of its class: the folder of its config}."""
    raw = read_json(path, ConfigError, MOST_BYTES)
    found: dict[str, str] = {}
    for one in raw if isinstance(raw, list) else [raw]:
        kind, place = (one.get("type"), one.get("path")) if isinstance(one, dict) else (None, None)
        folder = isinstance(place, str) and not {"/", "\\", "\0"} & set(place) and place != ".."
        if not isinstance(kind, str) or not isinstance(place, str) or not folder:
            expected = "a list of modules, each with the type of a class, and a path that is a folder beside this file"
            raise ConfigError(f"{path}: expected {expected}, found {shown(one)}")
        found[kind.rpartition(".")[2]] = place
    return found


def _pooling(path: Path) -> Pooling:
    """The pooling that a module's config says: by pooling_mode, or by the fields pooling_mode_... that are true."""
    raw = read_object(path, ConfigError, MOST_BYTES)
    asked: Any = raw.get("pooling_mode")
    if asked is None:
        prefix = "pooling_mode_"
        asked = [name.removeprefix(prefix) for name, value in raw.items() if name.startswith(prefix) and value]
    asked = [asked] if isinstance(asked, str) else asked
    if not isinstance(asked, list) or len(asked) != 1 or asked[0] not in _COMPUTED:
        raise ConfigError(f"{path}: pooling_mode: expected mean or lasttoken alone, found {shown(asked)}")
    return _COMPUTED[asked[0]]
