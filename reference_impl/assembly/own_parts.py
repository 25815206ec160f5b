"""Checks of parts of one's own (`Parts`): before anything is made from them, and while they are used."""

from __future__ import annotations

from functools import partial
from typing import Any

from reference_impl.assembly.checks import makes_drafts
from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.parts import FollowsOptions, Parts, ReportsFacts
from reference_impl.assembly.speculation import with_drafts
from reference_impl.core.engine import Engine
from reference_impl.core.engine_feature import Afterwards, EngineFeature, FinishedStep, Flight
from reference_impl.interfaces import (
    AttentionBackend,
    BlockPool,
    Clock,
    Executor,
    FetchesPages,
    HostProposer,
    KVCache,
    KVManager,
    Policy,
    PrefixIndex,
    Proposer,
    Reply,
    Request,
    Sampler,
    Scheduler,
    SwapsOut,
)
from reference_impl.interfaces.pages import LayeredPageStore, PageStore

# (a part, the part that uses it): the second, if custom, was made without the first.
_BELONGS = (
    ("policy", "scheduler"), ("prefix_index", "kv_manager"), ("sampler", "executor"), ("proposer", "executor"),
    ("page_store", "kv_manager"), ("host_proposer", "scheduler"), ("draft_model", "executor"),
)  # fmt: skip

_PROTOCOLS: dict[str, Any] = {
    "block_pool": BlockPool, "prefix_index": PrefixIndex, "kv_manager": KVManager, "policy": Policy,
    "scheduler": Scheduler, "kv_cache": KVCache, "attention": AttentionBackend, "sampler": Sampler,
    "proposer": Proposer, "host_proposer": HostProposer, "executor": Executor, "clock": Clock,
}  # fmt: skip

OF_THE_WORKER = ("kv_cache", "attention")  # another executor has its own, and may give what stands for them

# (an option, values of it that ask for nothing, a part): only the engine's own part of this kind reads the option.
# Options that others read, too: `check_scheduler`. Parts.prefix_index takes the place of whatever `prefix_cache` names.
READ_BY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("sampling_noise", ("one-number",), "sampler"), ("sampling_noise", ("one-number",), "executor"),
    ("acceptance", ("exact",), "executor"), ("batch_invariant", (False,), "executor"),
    ("graphs", ("auto", "off"), "executor"),
    ("attention", ("auto",), "executor"), ("exit_layer", (0,), "executor"),
    ("memory_percent", (90,), "executor"), ("memory_percent", (90,), "kv_cache"),
    ("prefix_cache", ("auto", "off"), "kv_manager"),
    ("admission", ("fill",), "scheduler"), ("adaptive_drafts", ("auto", "off"), "scheduler"),
)  # fmt: skip


def checked(config: EngineConfig, parts: Parts) -> EngineConfig:
    """See `checks.settled`."""
    check_parts(parts)
    config = with_drafts(config, parts)
    check_members(parts)
    check_options(config, parts)
    check_sources(config, parts)
    if parts.page_store is not None:
        check_page_store(parts.page_store)
    return config


def check_parts(parts: Parts) -> None:
    """Raises ValueError if a part would never be used, because the one that would call it is custom."""
    for name, owner in _BELONGS:
        mine = getattr(parts, owner)
        if getattr(parts, name) is not None and mine is not None:
            raise ValueError(
                f"Parts.{name} is for the engine's own {owner}, and Parts.{owner} is given, too: the {name} "
                f"would never be asked. Hand it to your {type(mine).__name__}, or leave one of the two out"
            )


def check_options(config: EngineConfig, parts: Parts) -> None:
    """Raises ValueError if an option would do nothing, because the only part that reads it is custom."""
    executor = parts.executor
    follows = (isinstance(executor, FollowsOptions) and executor.follows_options) or isinstance(executor, ReportsFacts)
    for option, asks_nothing, owner in READ_BY:
        asked, given = getattr(config, option), getattr(parts, owner)
        if given is None or asked in asks_nothing or (follows and owner in ("executor", *OF_THE_WORKER)):
            continue
        raise ValueError(
            f"{option}={asked!r} is for the engine's own {owner}, and Parts.{owner}, {type(given).__name__}, is given: "
            "leave one of the two out"
        )
    manager = parts.kv_manager
    if config.preemption == "swap" and manager is not None and not isinstance(manager, SwapsOut):
        raise ValueError(
            "preemption='swap' needs a KV manager that swaps out (swap_out, see SwapsOut), and Parts.kv_manager, "
            f"{type(manager).__name__}, does not: use preemption='recompute', or leave the manager out"
        )


def check_members(parts: Parts) -> None:
    """Raises ConfigError if a part lacks a member that the engine calls, or is a class instead of an object."""
    for name, protocol in _PROTOCOLS.items():
        given = getattr(parts, name)
        if given is None or (parts.executor is not None and name in OF_THE_WORKER):
            continue
        if isinstance(given, type):
            raise ConfigError(f"Parts.{name}, {given.__name__}, is a class: expected an object of it")
        members = {*vars(protocol), *protocol.__annotations__}
        public = [m for m in members if not m.startswith("_") or m in ("__len__", "__call__")]
        missing = sorted(m for m in public if not hasattr(given, m))
        if missing:
            raise ConfigError(
                f"Parts.{name}, {type(given).__name__}, has no {', '.join(missing)}: the engine calls them, see "
                f"{protocol.__name__} in reference_impl/interfaces. If it is a cell of an older lab notebook, "
                "`inferlab learn --update` lays the lab's present version beside yours; take the cell from there"
            )


def check_sources(config: EngineConfig, parts: Parts) -> None:
    """Raises ValueError if one of a half's parts that make drafts would never be asked."""
    given = makes_drafts(parts)
    if len(given) > 1:
        names = " and ".join(f"Parts.{name}" for name in given)
        raise ValueError(f"{names} are given: only one can make the drafts, leave the others out")
    if given and not config.num_drafts and parts.scheduler is None:
        raise ValueError(
            f"Parts.{given[0]} is given, and num_drafts is 0: it would never be asked. Say how many, or leave it out"
        )


def check_page_store(store: PageStore | LayeredPageStore) -> None:
    """Raises ConfigError unless the store has the members of a `PageStore` or a `LayeredPageStore`, and a timeout in
    seconds."""
    given = f"Parts.page_store, {store.__name__ if isinstance(store, type) else type(store).__name__}"
    if isinstance(store, type):
        raise ConfigError(f"{given}, is a class: expected an object of it")
    by_layer = hasattr(store, "load_layer") or hasattr(store, "save_layer")
    names = ("num_stored", "load_layer", "save_layer") if by_layer else ("num_stored", "load", "save")
    missing = [name for name in names if not callable(getattr(store, name, None))]
    if missing:
        raise ConfigError(f"{given}, has no {', '.join(missing)}: a page store needs them, see interfaces/pages.py")
    timeout = getattr(store, "timeout", None)
    if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout < float("inf"):
        raise ConfigError(f"{given}: expected timeout in seconds, a finite number of at least 0, got {timeout!r}")


def check_blocks(pool: BlockPool, kv_manager: KVManager, num_blocks: int) -> None:
    """Raises ValueError unless the pool has as many blocks as the cache, and the manager gives no more."""
    if pool.num_free != num_blocks:
        raise ValueError(
            f"Parts.block_pool has {pool.num_free} free blocks; the KV cache has {num_blocks}: "
            f"pass num_blocks={pool.num_free}, or a pool of that size"
        )
    if kv_manager.num_available > num_blocks:
        raise ValueError(
            f"Parts.kv_manager has {kv_manager.num_available} blocks to give; the KV cache has {num_blocks}: "
            f"pass num_blocks={kv_manager.num_available}, or a manager of that many"
        )


class CheckedParts(EngineFeature):
    """Checks what a scheduler or an executor from Parts does, where an engine would otherwise go wrong silently."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._has_appended = False

    def collected(self, flight: Flight, reply: Reply) -> tuple[Reply, Afterwards]:
        """Raises ValueError if the reply speaks of transfers and the KV manager has begun none."""
        kv = self.engine.kv
        if (reply.transfers or reply.layers_moved) and not isinstance(kv, FetchesPages):
            moved = [*reply.layers_moved, *(end.id for end in reply.transfers)]
            raise ValueError(
                f"the reply to step {reply.step_id} speaks of transfers {moved}; {type(kv).__name__} has begun none"
            )
        return reply, None if self._has_appended else partial(self._check_appended, flight)

    def _check_appended(self, flight: Flight, done: FinishedStep) -> FinishedStep:
        """Checks the first token that any request got, once."""
        grown = [flight.requests[name] for name, new in done.output.tokens.items() if new]
        for request in [request for request in grown if not request.holds][:1]:
            check_appended(self.engine.scheduler, request)
            self._has_appended = True
        return done


def check_appended(scheduler: Scheduler, request: Request) -> None:
    """Raises TypeError for a scheduler that was written when a step gave one token per request."""
    if isinstance(request.tokens[-1], tuple):
        raise TypeError(
            f"{type(scheduler).__name__}.update appended {request.tokens[-1]!r} to the tokens of request "
            f"{request.id!r}: StepOutput.tokens has a tuple for each request, since a step may give several. Write "
            "request.tokens.extend(output.tokens[request.id]), or reset this lab's notebook to today's version"
        )
