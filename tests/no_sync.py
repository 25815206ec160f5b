"""Finds what would make the host wait for a GPU, on a machine that has none.

    with no_sync():
        logits = model(batch, kv_cache, attention)

raises HostSyncError at the first operation whose result the host must see (item, tolist, nonzero, a boolean mask as an
index, bincount, unique, an `if` on a tensor, ...) or that hands it values of the host (torch.tensor of a list):
none of them can stand in a CUDA graph. On the CPU every tensor counts as one of the device, so only what is to be
captured belongs inside: read and write the host's own tensors before. What happens within a kernel in Triton's
interpreter does not count, and norms are those of a GPU: what `features/cpu` has for a few rows reads a number on the
host. On a GPU torch itself looks as well (`torch.cuda.set_sync_debug_mode`), and only tensors
that lie there count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reference_impl.features.cpu import operators

# Operators, whoever calls them.
OPERATORS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "unique_dim_consecutive", "_pin_memory",
}  # fmt: skip
# On the CPU these read memory, or write it, without an operator.
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
WRITES = {"tensor", "as_tensor"}


class HostSyncError(AssertionError):
    """The host would have waited for the device."""


@contextmanager
def no_sync() -> Iterator[None]:
    before, few = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else None, operators.FEW
    operators.FEW = 0
    if before is not None:
        torch.cuda.set_sync_debug_mode("error")
    try:
        with _Functions(), _Operators():
            yield
    finally:
        operators.FEW = few
        if before is not None:
            torch.cuda.set_sync_debug_mode(before)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", ""), kwargs or {}
        if (name in READS and _of_device(args)) or (name in WRITES and not isinstance(args[0], Tensor)):
            _found(name)
        return function(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = operator.overloadpacket.__name__, kwargs or {}
        if name in OPERATORS and _of_device(args):
            _found(name)
        if name.startswith("index") and any(t.dtype in (torch.bool, torch.uint8) for t in _indices(args)):
            _found(f"{name} with a boolean mask")
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            _found("repeat_interleave without output_size")
        if name in ("_to_copy", "copy_"):
            _check_copy(args, kwargs)
        return operator(*args, **kwargs)


def _of_device(args: Any) -> bool:
    return any(isinstance(t, Tensor) and (t.is_cuda or not torch.cuda.is_available()) for t in tree_leaves(args))


def _indices(args: Any) -> list[Tensor]:
    """Of index and index_put: the tensors of their second argument, a list."""
    return [t for t in args[1] if isinstance(t, Tensor)] if len(args) > 1 and isinstance(args[1], list | tuple) else []


def _check_copy(args: Any, kwargs: Any) -> None:
    """Between host and device only from or to memory that is pinned, and without waiting."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    places = {t.device.type for t in tensors} | (
        {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
    )
    if len(places) == 1:
        return
    waits = not (kwargs.get("non_blocking") or any(a is True for a in args))
    if waits or not any(t.is_pinned() for t in tensors if t.device.type == "cpu"):
        _found(f"a copy between {' and '.join(sorted(places))} that waits or whose host memory is not pinned")


def _found(what: str) -> None:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename.endswith("triton/runtime/interpreter.py"):
            return
        frame = frame.f_back  # type: ignore[assignment]
    raise HostSyncError(f"expected no wait for the device, got {what}: keep it out of the captured step")
