"""Arrays on their way between host and device, without waiting.

A copy from pageable memory makes the host wait for all earlier work on the GPU. So arrays that are sent together lie
one after another in one piece of pinned memory and go over in one copy. The piece is torch's own, and is reused only
when its copy was made (its caching allocator of pinned memory keeps an event for it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = dict[str, NDArray[Any]]

_ALIGNED = 16  # bytes; kernels load whole vectors
_TORCH = {np.dtype(n): getattr(torch, n) for n in ("int64", "int32", "float32", "float64", "bool", "uint8")}


@dataclass(frozen=True)
class Layout:
    """Where arrays lie in one piece of memory. Equal layouts: the same names, shapes, dtypes and places."""

    sections: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int, int], ...]  # name, dtype, shape, first byte, values
    num_bytes: int

    @staticmethod
    def of(arrays: Mapping[str, NDArray[Any]]) -> Layout:
        sections, end = [], 0
        for name, array in arrays.items():
            sections.append((name, array.dtype, array.shape, end, array.size))
            end += -(-array.nbytes // _ALIGNED) * _ALIGNED
        return Layout(tuple(sections), end)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The arrays as tensors: views of `memory` [num_bytes] uint8."""
        typed = {dtype: memory.view(_TORCH[dtype]) for dtype in {section[1] for section in self.sections}}
        found = {}
        for name, dtype, shape, start, size in self.sections:
            flat = typed[dtype][start // dtype.itemsize : start // dtype.itemsize + size]
            found[name] = flat if len(shape) == 1 else flat.view(shape)
        return found


def packed(arrays: Mapping[str, NDArray[Any]], layout: Layout, pinned: bool) -> Tensor:
    """The arrays in one tensor [layout.num_bytes] uint8 on the host."""
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=pinned)
    buffer = memory.numpy()
    for name, dtype, shape, start, _ in layout.sections:
        np.ndarray(shape, dtype, buffer, start)[...] = arrays[name]
    return memory


def to_device(arrays: Mapping[str, NDArray[Any]], device: torch.device) -> dict[str, Tensor]:
    """The arrays as tensors on the device: views of one piece of memory, sent in one copy. On a CPU nothing is copied:
    they share the arrays' memory, so neither may be changed afterwards."""
    if device.type == "cpu":
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    layout = Layout.of(arrays)
    memory = packed(arrays, layout, pinned=device.type == "cuda")
    return layout.views(memory.to(device, non_blocking=True))


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, pinned on a GPU. It is filled when a `mark` that is made after this call has been waited
    for."""
    return tensor.to("cpu", non_blocking=True, copy=True)


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits for all that was launched on the current stream before this call, and nothing later."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record()
    return event.synchronize
