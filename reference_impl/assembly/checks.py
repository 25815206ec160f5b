"""Checks that refuse parts which an engine cannot use, by name, before anything is made from them."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.speculation import BY_HOST, BY_ITSELF, with_drafts
from reference_impl.core.scheduler import Scheduler as CoreScheduler
from reference_impl.features.kv_formats.formats import kv_format
from reference_impl.interfaces import (
    AttentionBackend,
    KVCache,
    ReadsFourBits,
    ReadsScales,
    RunsStages,
    Scheduler,
    has_scales,
)


def settled(config: EngineConfig, parts: Parts) -> EngineConfig:
    """The options, completed by what follows from them and from the parts. Each half of an engine calls this with its
    own parts. ValueError or ConfigError where options and parts contradict each other."""
    if parts == Parts():
        return with_drafts(config, parts)
    from reference_impl.assembly.own_parts import checked

    return checked(config, parts)


def check_scheduler(config: EngineConfig, scheduler: Scheduler | None) -> None:
    """Raises ValueError if a custom scheduler is known to plan otherwise than the config asks: by its max_num_seqs or
    max_num_batched_tokens, where it has them, or because preemption is "swap" and it does not swap."""
    from reference_impl.features.swap.scheduling import Swapping

    if scheduler is None:
        return
    given = f"Parts.scheduler, {type(scheduler).__name__}"
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        asked, own = getattr(config, name), getattr(scheduler, name, None)
        is_asked = asked != EngineConfig.__dataclass_fields__[name].default
        if isinstance(own, int) and (own != asked if is_asked else own > asked):
            raise ValueError(f"{name}={asked}, and {given}, has {own}: give both the same number")
    swaps = not isinstance(scheduler, CoreScheduler) or any(isinstance(f, Swapping) for f in scheduler.hooks.features)
    if config.preemption == "swap" and not swaps:
        raise ValueError(
            f"preemption='swap' needs a scheduler that swaps (features/swap/scheduling.py), and {given}, drops what it "
            "preempts: scheduler.hooks.add(Swapping(scheduler)), use preemption='recompute', or leave the scheduler out"
        )


def makes_drafts(parts: Parts) -> list[str]:
    """The names of the parts that make drafts."""
    return [name for name in ("proposer", "host_proposer", "draft_model") if getattr(parts, name) is not None]


def check_drafts(config: EngineConfig, parts: Parts) -> None:
    """Raises ValueError if drafts would never be made, or never be used. parts: those of the whole engine, or of the
    half that plans, with the executor."""
    by_method = config.speculative in (*BY_ITSELF, *BY_HOST)
    if config.num_drafts and not makes_drafts(parts) and parts.executor is None and not by_method:
        raise ValueError(
            f"num_drafts={config.num_drafts} needs a proposer: pass Parts(proposer=...) or "
            "Parts(host_proposer=...), a draft model, Parts(draft_model=...), or num_drafts=0"
        )
    if config.adaptive_drafts == "on" and not config.num_drafts:
        raise ValueError(
            "adaptive_drafts='on' is for drafts, and there are none: name a method, speculative=..., or leave it out"
        )
    stages = parts.executor.num_stages if isinstance(parts.executor, RunsStages) else 1
    by_host = parts.host_proposer is not None or config.speculative in BY_HOST
    if by_host and config.overlap == "on" and stages == 1:
        raise ValueError(
            "Parts.host_proposer reads a request's text, which with overlap='on' is not known when a step is planned: "
            "use overlap='off' or 'auto', or a proposer of the worker, Parts.proposer"
        )
    if config.num_drafts and parts.scheduler is not None:
        raise ValueError(
            f"num_drafts={config.num_drafts} is for the engine's own scheduler, and Parts.scheduler is given, too: "
            f"none would be planned. Hand them to your {type(parts.scheduler).__name__}, or leave one of the two out"
        )


def check_scales(config: EngineConfig, kv_cache: KVCache | None, attention: AttentionBackend | None) -> None:
    """Raises ConfigError if the cache is to have 8 or 4 bits and a custom part does not apply scales."""
    stored = kv_format(config.kv_dtype)
    if stored is None:
        return
    asked = f"kv_dtype={config.kv_dtype!r} needs"
    if kv_cache is not None and not has_scales(kv_cache):
        raise ConfigError(
            f"{asked} a cache with scales(layer), as EightBitKVCache has; "
            f"Parts.kv_cache, {type(kv_cache).__name__}, has none: add it, or use kv_dtype='auto'"
        )
    if attention is not None and not (isinstance(attention, ReadsScales) and attention.reads_scales):
        raise ConfigError(
            f"{asked} an attention backend that multiplies what it reads by the cache's scales(layer) and "
            f"says so with reads_scales = True; Parts.attention, {type(attention).__name__}, does not: "
            "change it, or use kv_dtype='auto'"
        )
    reads = isinstance(attention, ReadsFourBits) and attention.reads_four_bits
    if attention is not None and stored.bits_per_value == 4 and not reads:
        raise ConfigError(
            f"{asked} an attention backend that takes two codes out of a byte and says so with reads_four_bits = True; "
            f"Parts.attention, {type(attention).__name__}, does not: change it, or use kv_dtype='int8' or 'auto'"
        )


def check_tokenizer(tokenizer: Tokenizer | None, vocab_size: int, folder: Path) -> None:
    """Raises ConfigError if texts may become tokens that the model does not have. Special tokens beyond its vocabulary
    are allowed: Gemma 3's tokenizer has one for images, also for models that take none."""
    if tokenizer is None:
        return
    added = [i for i, token in tokenizer.get_added_tokens_decoder().items() if not token.special]
    size = max([tokenizer.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
    if size > vocab_size:
        raise ConfigError(
            f"{folder / 'tokenizer.json'}: vocabulary: expected at most {vocab_size:,} tokens, which is vocab_size in "
            f"config.json, found {size:,}: one of the two is of another model"
        )
