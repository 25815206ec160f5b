"""Who makes the drafts: from `EngineConfig.speculative` to a part and a number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.parts import Parts
from reference_impl.interfaces import HostProposer, takes_trees

if TYPE_CHECKING:
    from reference_impl.features.speculative.growth import Growth
    from reference_impl.features.speculative.lookahead import Shape
    from reference_impl.features.speculative.tree import Tree

DEFAULT_DRAFTS = 4
BY_MODEL = {
    "draft": "a smaller model with the same vocabulary",
    "eagle": "a feature head that was trained for the model (EAGLE)",
    "mtp": "a module of multi-token prediction that was trained with the model",
    "medusa": "Medusa heads that were trained for the model",
}
EARLY_EXIT = "early-exit"  # the target's own first layers, which nothing is needed for
LOOKAHEAD = "lookahead"  # the target itself, likewise
BY_ITSELF = (EARLY_EXIT, LOOKAHEAD)
BY_HOST = ("ngram", "suffix")  # from the texts of requests, where steps are planned


def host_proposer(method: str) -> HostProposer:
    """The host proposer of a method in BY_HOST."""
    if method == "ngram":
        from reference_impl.features.speculative.ngram import NgramProposer

        return NgramProposer()
    from reference_impl.features.speculative.suffix import SuffixProposer

    return SuffixProposer()


def with_drafts(config: EngineConfig, parts: Parts) -> EngineConfig:
    """The config with a number of drafts, where a method is named. ValueError for a method that needs a draft model and
    has none, beside a proposer or scheduler in Parts, and for options that contradict each other."""
    check_lookahead(config)
    check_acceptance(config, parts)
    if tree_of(config) is not None:
        config = with_tree(config, parts)
    if config.speculative == "off":
        return config
    by_model = config.speculative in BY_MODEL
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
    return replace(config, num_drafts=config.num_drafts or DEFAULT_DRAFTS, adaptive_drafts=adaptive)


def tree_of(config: EngineConfig) -> Tree | Growth | None:
    """The tree of a row's drafts, or how it grows; None: drafts are a chain."""
    if shape := lookahead_of(config):
        return shape.tree
    if not config.draft_tree:
        return None
    from reference_impl.features.speculative.growth import Growth
    from reference_impl.features.speculative.tree import Tree

    if isinstance(config.draft_tree, str):
        return Growth.of(config.draft_tree, config.num_drafts)
    return Tree.of(config.draft_tree)


def lookahead_of(config: EngineConfig) -> Shape | None:
    if config.speculative != LOOKAHEAD:
        return None
    from reference_impl.features.speculative.lookahead import Shape

    return Shape.of(config.lookahead)


def check_lookahead(config: EngineConfig) -> None:
    """Raises ValueError if a lookahead shape is given and would not be used."""
    if config.lookahead and config.speculative != LOOKAHEAD:
        raise ValueError(
            f"lookahead={tuple(config.lookahead)} is for speculative={LOOKAHEAD!r}, and it is {config.speculative!r}: "
            "leave lookahead out"
        )


def check_acceptance(config: EngineConfig, parts: Parts) -> None:
    """Raises ValueError if drafts cannot be verified in the way that the config asks for."""
    if config.acceptance == "exact":
        return
    asked = f"acceptance={config.acceptance!r}"
    if config.speculative == "off" and not config.num_drafts:
        raise ValueError(f"{asked} is for drafts, and there are none: name a method, speculative=..., or leave it out")
    if tree_of(config) is not None:
        raise ValueError(f"{asked} is for drafts in a chain, and here they are a tree: leave one of the two out")
    check_typical_sampler(parts)


def check_typical_sampler(parts: Parts) -> None:
    """Raises ValueError if drafts would be verified by another distribution than the one that is sampled from."""
    from reference_impl.features.speculative.rejection import is_exact

    if parts.sampler is not None and not is_exact(parts.sampler):
        raise ValueError(
            f"acceptance='typical' needs {_KNOWN['sampler']}, without a choose of its own, and Parts.sampler, "
            f"{type(parts.sampler).__name__}, is given: leave one of the two out"
        )


def with_tree(config: EngineConfig, parts: Parts) -> EngineConfig:
    """The config with the number of drafts in its tree. ValueError or ConfigError for options or parts that cannot be
    combined with a tree."""
    tree = tree_of(config)
    assert tree is not None
    asked, num = f"draft_tree={config.draft_tree!r}", tree.num_nodes
    if config.draft_tree and config.speculative not in ("eagle", "mtp"):
        raise ValueError(
            f"{asked} is for a feature head, and speculative={config.speculative!r}: expected 'eagle' (or 'mtp'), or "
            "no draft_tree"
        )
    if config.speculative == LOOKAHEAD:
        asked = f"speculative={LOOKAHEAD!r}"
    if config.num_drafts not in (0, num):
        raise ValueError(f"{asked} has {num} drafts, and num_drafts={config.num_drafts} is given, too: leave it out")
    if config.adaptive_drafts == "on":
        raise ValueError(f"{asked} is of one size, and adaptive_drafts='on' is given, too: leave one of the two out")
    if config.batch_invariant:
        raise ValueError(
            f"{asked} needs its tokens computed together, and batch_invariant computes each by itself: leave one out"
        )
    if parts.attention is not None and not takes_trees(parts.attention):
        raise ConfigError(
            f"{asked} needs an attention backend that reads Batch.ancestors and says so with takes_trees = True; "
            f"Parts.attention, {type(parts.attention).__name__}, does not: change it, or leave the tree out"
        )
    for name in ("kv_cache", "sampler") if parts.executor is None else ():
        if (given := getattr(parts, name)) is not None and not _is_known(name, given):
            raise ConfigError(
                f"{asked} needs {_KNOWN[name]}, and Parts.{name}, {type(given).__name__}, is given: leave one of the "
                "two out"
            )
    return replace(config, num_drafts=num, adaptive_drafts="off")


_KNOWN = {
    "kv_cache": "a PagedKVCache, whose tokens can be moved",
    "sampler": "a sampler that is launched, a TorchSampler",
}


def _is_known(name: str, given: object) -> bool:
    from reference_impl.core.kv_cache import PagedKVCache
    from reference_impl.core.sampler import TorchSampler

    return isinstance(given, PagedKVCache if name == "kv_cache" else TorchSampler)
