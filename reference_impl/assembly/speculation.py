"""Who makes the drafts: from `EngineConfig.speculative` to a part and a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from reference_impl.annexes.speculative.ngram import NgramProposer
from reference_impl.annexes.speculative.suffix import SuffixProposer
from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import HostProposer

DEFAULT_DRAFTS = 4
BY_MODEL = {
    "draft": "a smaller model with the same vocabulary",
    "eagle": "a feature head that was trained for the model (EAGLE)",
    "medusa": "Medusa heads that were trained for the model",
}
EARLY_EXIT = "early-exit"  # the target's own first layers, which nothing is needed for
PROPOSERS: dict[str, Callable[[], HostProposer]] = {"ngram": NgramProposer, "suffix": SuffixProposer}


def with_proposer(config: EngineConfig, parts: Parts) -> tuple[EngineConfig, Parts]:
    """Both, where a method is named with its proposer and a number of drafts. ValueError where there is a proposer, or
    a scheduler that would ask none, already, or no draft model."""
    if config.speculative == "off":
        return config, parts
    by_model, by_worker = config.speculative in BY_MODEL, config.speculative in (*BY_MODEL, EARLY_EXIT)
    if by_model and parts.draft_model is None and parts.executor is None:
        raise ValueError(
            f"speculative={config.speculative!r} needs a draft model, {BY_MODEL[config.speculative]}: "
            "LLM(draft_model=FOLDER), --draft-model FOLDER, or Parts(draft_model=...)"
        )
    others = ("proposer", "host_proposer", "scheduler", *([] if by_model else ["draft_model"]))
    for name in others:
        if (given := getattr(parts, name)) is not None:
            raise ValueError(
                f"speculative={config.speculative!r} brings a proposer for the engine's own scheduler, and "
                f"Parts.{name}, {type(given).__name__}, is given, too: leave one out"
            )
    adaptive = "on" if config.adaptive_drafts == "auto" else config.adaptive_drafts
    config = replace(config, num_drafts=config.num_drafts or DEFAULT_DRAFTS, adaptive_drafts=adaptive)
    return config, parts if by_worker else replace(parts, host_proposer=PROPOSERS[config.speculative]())
