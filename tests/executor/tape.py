"""What stands for a CUDA graph on the CPU: a tape of the operators and kernels that a function launches.

As with a graph, a replay repeats what was recorded with the same tensors and the same numbers of the host, and runs no
Python of the function: what depends on a value of the host that has changed since shows. What the function allocated
holds NaN when a replay begins (integers: nonsense), and when it is over, but for what it gave back: graphs share that
memory. As in CUDA, the function runs once before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from reference_impl.features.graphs.graphs import CudaRecorder, Recorder
from tests.no_sync import no_sync

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


class Tape:
    """A Recorder. replays counts them."""

    def __init__(self) -> None:
        self.replays = 0

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        compute()
        writer = _Writer()
        with no_sync(), kernels_through(writer), writer:
            out = compute()
        kept = out.untyped_storage().data_ptr()
        fresh = [t for t in writer.fresh if t.untyped_storage().data_ptr() != kept]
        spoil(writer.fresh)

        def replay() -> None:
            self.replays += 1
            spoil(writer.fresh)
            for again in writer.tape:
                again()
            spoil(fresh)

        return out, replay

    def forget(self) -> None:
        pass


def recorder() -> Recorder:
    """The real one on a GPU."""
    return CudaRecorder(torch.device("cuda")) if torch.cuda.is_available() else Tape()


def spoil(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else True if tensor.dtype is torch.bool else 77)


class _Writer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Callable[[], Any]] = []
        self.fresh: list[Tensor] = []  # what was allocated

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = operator(*args, **kwargs)
        results = [t for t in tree_leaves(found) if isinstance(t, Tensor)]
        new = [t for t in results if _storage(t) not in given]
        self.fresh += new
        if operator.overloadpacket.__name__ in ALLOCATIONS:
            return found

        def again() -> None:
            repeated = [t for t in tree_leaves(operator(*args, **kwargs)) if isinstance(t, Tensor)]
            for old, now in zip(results, repeated, strict=True):
                if any(old is t for t in new):
                    old.copy_(now)

        self.tape.append(again)
        return found


def _storage(tensor: Tensor) -> int:
    packed = tensor.layout is torch._mkldnn  # a weight that only torch can read
    return id(tensor) if packed else tensor.untyped_storage()._cdata


@contextlib.contextmanager
def kernels_through(writer: _Writer) -> Iterator[None]:
    """Launches of kernels in Triton's interpreter come onto the tape as they are, not as what the interpreter does."""
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        def again() -> None:
            run(self, *args, **kwargs)

        with _disable_current_modes():
            again()
        writer.tape.append(again)

    with mock.patch.object(InterpretedFunction, "run", noted):
        yield
