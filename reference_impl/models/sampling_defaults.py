"""How a model's makers want it sampled: what generation_config.json says, as vLLM takes it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from reference_impl.interfaces import SamplingParams
from reference_impl.models.config_json import MOST_BYTES
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object

logger = logging.getLogger("inferlab.engine")
CHOICES = ("auto", "vllm")
# transformers' names, the only ones that vLLM takes, by ours. do_sample is not among them.
_NAMES = {name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")}
_NAMES["max_tokens"] = "max_new_tokens"


def sampling_defaults(model: Path | None, choice: str) -> dict[str, Any]:
    """Fields of SamplingParams for requests that do not say them; what they are is logged. {} for a model without the
    file, and for choice "vllm".

    model: a folder; a GGUF file has none. Raises ValueError for another choice, ConfigError for a value that cannot be.
    """
    if choice not in CHOICES:
        raise ValueError(f"generation_config: expected {' or '.join(map(repr, CHOICES))}, got {choice!r}")
    path = None if model is None else model / "generation_config.json"
    if choice == "vllm" or path is None or not path.is_file():
        return {}
    raw = read_object(path, ConfigError, MOST_BYTES)
    given = {ours: raw[theirs] for ours, theirs in _NAMES.items() if raw.get(theirs) is not None}
    for name, value in given.items():
        try:
            SamplingParams(**{name: value})
        except ValueError as error:
            why = str(error).removeprefix(f"SamplingParams.{name}: ")
            hint = "correct it, or leave the file's sampling out with generation_config='vllm'"
            raise ConfigError(f"{path}: {_NAMES[name]}: {why}: {hint}") from None
    if given:
        told = ", ".join(f"{name}={value!r}" for name, value in given.items())
        logger.warning(
            "%s: defaults of sampling for requests that do not say them: %s; generation_config='vllm' leaves them out",
            path, told,
        )  # fmt: skip
    return given
