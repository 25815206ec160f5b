"""Names for what the parts of a model do, as torch's profiler shows them; put on from outside while a `with` lasts.

A label begins with "inferlab: " and a word: qkv, o, gate_up, down (products), attention, norm, lm_head, sampler,
schedule, update, submit, collect, step. What is replayed from a CUDA graph carries none: Python does not run then.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch.profiler import record_function

from reference_impl.assembly.engine import Engine
from reference_impl.assembly.worker import LocalExecutor
from reference_impl.core.linear import Linear
from reference_impl.features.fusion.decoder import FusedDecoder

PREFIX = "inferlab: "


def products(model: Any) -> dict[str, list[Linear]]:
    """{label: its linear layers}; those of experts, of which a step uses some, are all `experts`."""
    found: dict[str, list[Linear]] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            found.setdefault("experts" if "experts" in path else path.rpartition(".")[2], []).append(module)
    return found


@contextlib.contextmanager
def labelled(engine: Engine) -> Iterator[None]:
    """Puts labels on an engine's parts; they are taken off at the end."""
    model, executor = engine.model, engine.executor
    fusion = model.fusion if isinstance(model, FusedDecoder) else None
    sampler = executor.sampler if isinstance(executor, LocalExecutor) else None
    with contextlib.ExitStack() as stack:
        for label, linears in products(model).items():
            for linear in linears:
                stack.enter_context(_shadowed(linear, "forward", label))
        parts: list[tuple[Any, str, str | None]] = [
            (engine.attention, "plan", "attention plan"),
            (engine.attention, "forward", "attention"),
            (engine.attention, "attend", "attention"),
            *([(part, "normalize", "norm") for part in (*model.layers, model)] if fusion is None else []),
            (fusion, "norm", "norm"),
            (fusion, "norm_then_linear", None),
            (fusion, "add_linear", None),
            (model, "head", "lm_head"),
            (model, "forward", "model"),
            # A function is replaced; an object stays, because the executor checks what it can do.
            *((sampler, name, "sampler") for name in ("columns", "choose")),
            (executor if inspect.isfunction(sampler) else None, "sampler", "sampler"),
            (engine.planner, "step", "plan"),
            (executor, "submit", "submit"),
            (executor, "collect", "collect"),
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "update", "update"),
        ]
        for part, name, named in parts:
            if hasattr(part, name):
                stack.enter_context(_shadowed(part, name, named))
        yield


@contextlib.contextmanager
def _shadowed(part: Any, name: str, label: str | None) -> Iterator[None]:
    """Makes `part.name` run under the label; None: under its first argument, which names the product."""
    own, original = name in vars(part), getattr(part, name)
    vars(part)[name] = _named(original, label)
    try:
        yield
    finally:
        if own:
            vars(part)[name] = original
        else:
            del vars(part)[name]


def _named(original: Callable[..., Any], label: str | None) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(PREFIX + (args[0] if label is None else label)):
            return original(*args, **kwargs)

    return run
