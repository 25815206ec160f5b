"""Values to bytes and back, for two processes that do not trust each other.

A value becomes a node of a JSON header, and a list of raw byte chunks (one per tensor storage or bytes value), which
`wire.py` sends. Never pickle: what is decoded is data of exact built-in types, torch tensors, the dataclasses that
were registered, or a handle. What may cross is listed in `grader/README.md`. The file needs torch and the standard
library only, because it is shipped alone into the process that runs a learner's code.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Node: TypeAlias = Any  # a JSON value: what a value looks like in the header

MAX_BODY = 256 << 20  # bytes, all chunks of one message together; also what its tensors and bytes values may describe
MAX_DEPTH = 60
MAX_DIMS = 16
MAX_INT_BITS = 13_000  # Python reads and writes decimal integers of about 14,000 bits, and refuses longer ones
MAX_NAMES = 1000  # of methods in the node of a handle
MAX_COLLISIONS = 100  # keys of one dict or set with the same hash: each costs as much time as there are before it
ALIGN = 16  # bytes; the largest itemsize, so that views of several dtypes of one storage stay addressable

# float8 has no arithmetic and complex32 little; as raw bytes with the dtype's name they cross like all others.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
        "complex32 complex64 complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
    ).split()
    if hasattr(torch, name)
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CannotCross(TypeError):
    """A value that may not leave this process: the message names its type and what to return instead."""


class Malformed(Exception):
    """What arrived is not a message of this format, or exceeds its limits."""


@dataclasses.dataclass(frozen=True)
class Live:
    """The bytes behind one chunk, in this process: where a change made by the other side is written back.

    seen: which of them belong to a tensor that was sent; None means all. The others were sent as zeros.
    """

    view: torch.Tensor  # uint8
    is_bool: bool
    seen: torch.Tensor | None = None  # bool

    def restore(self, data: torch.Tensor) -> None:
        """Overwrite with `data` (uint8, same length). Raises Malformed."""
        if data.numel() != self.view.numel() or (self.is_bool and bool((data > 1).any())):
            raise Malformed("changed bytes do not fit the tensor they belong to")
        if self.seen is None:
            self.view.copy_(data)
        else:
            self.view[self.seen] = data[self.seen]


class Packer:
    """Turns the values of one message into header nodes and chunks.

    Tensors that share a storage share a chunk, so aliasing survives; a chunk covers only the bytes its tensors span.
    `export(obj)` returns the node of any object that is not data, and may raise `CannotCross`.
    """

    def __init__(self, export: Callable[[Any], Node], dataclasses_by_name: dict[str, type]):
        self._export = export
        self._dataclass_names = {cls: name for name, cls in dataclasses_by_name.items()}
        self._chunks: list[Any] = []  # bytes, or the index of a storage
        self._storages: dict[int, int] = {}  # data_ptr -> index into the lists below
        self._keep: list[torch.UntypedStorage] = []
        self._spans: list[list[int]] = []  # per storage: first and last byte + 1
        self._nodes: list[list[dict[str, Any]]] = []  # per storage: its tensors
        self._chunk_of: list[int] = []

    def pack(self, value: Any, depth: int = 0) -> Node:
        """The header node of `value`. Raises CannotCross for what is neither data nor exportable."""
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if kind is str:
            return value
        if kind is int:
            if value.bit_length() > MAX_INT_BITS:
                raise CannotCross(f"an int of {value.bit_length()} bits cannot cross; at most {MAX_INT_BITS} can")
            return value
        if kind is float:
            return value if math.isfinite(value) else {"t": "f", "v": repr(value)}
        if depth > MAX_DEPTH:
            raise CannotCross(f"a value nested more than {MAX_DEPTH} deep (or containing itself) cannot cross")
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(value)
        if isinstance(value, list):
            return [self.pack(item, depth + 1) for item in value]
        if isinstance(value, tuple):
            return {"t": "u", "v": [self.pack(item, depth + 1) for item in value]}
        if isinstance(value, dict):
            return {"t": "d", "v": [[self._pack_key(k), self.pack(v, depth + 1)] for k, v in value.items()]}
        if isinstance(value, (set, frozenset)):
            return {"t": "s", "v": [self._pack_item(item, depth + 1) for item in value]}
        if isinstance(value, (bytes, bytearray)):
            self._chunks.append(bytes(value))
            return {"t": "b", "c": len(self._chunks) - 1}
        if isinstance(value, (bool, int, float, str)):  # a subclass: an enum member, numpy's float64
            return self.pack(_base_value(value))
        if isinstance(value, torch.dtype) and value in _DTYPE_NAMES:
            return {"t": "dtype", "v": _DTYPE_NAMES[value]}
        if isinstance(value, torch.device):
            return {"t": "device", "v": str(value)}
        if isinstance(value, slice):
            return {"t": "slice", "v": [self.pack(x) for x in (value.start, value.stop, value.step)]}
        if value is Ellipsis:
            return {"t": "..."}
        if kind in self._dataclass_names:
            fields = {f.name: self.pack(getattr(value, f.name), depth + 1) for f in dataclasses.fields(value)}
            return {"t": "dc", "n": self._dataclass_names[kind], "v": fields}
        if kind.__module__.split(".")[0] == "numpy":
            return self.pack(_from_numpy(value), depth + 1)
        return self._export(value)

    def _pack_key(self, key: Any) -> Node:
        key = _plain_scalar(key)
        if key is not None and not isinstance(key, (bool, int, float, str, bytes)):
            raise CannotCross(f"a dict key must be None, bool, int, float, str or bytes, not {type(key).__name__}")
        return self.pack(key)

    def _pack_item(self, item: Any, depth: int) -> Node:
        if isinstance(item, tuple) and depth <= MAX_DEPTH:
            return {"t": "u", "v": [self._pack_item(part, depth + 1) for part in item]}
        item = _plain_scalar(item)
        if item is not None and not isinstance(item, (bool, int, float, str, bytes)):
            raise CannotCross(
                f"a set may hold None, bool, int, float, str, bytes and tuples, not {type(item).__name__}"
            )
        return self.pack(item)

    def _pack_tensor(self, tensor: torch.Tensor) -> Node:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise CannotCross(f"a subclass of torch.Tensor ({type(tensor).__name__}) cannot cross; use a plain tensor")
        if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.dtype not in _DTYPE_NAMES:
            raise CannotCross(f"a tensor must be dense and on the CPU to cross, not {tensor.device} {tensor.dtype}")
        if tensor.dim() > MAX_DIMS:
            raise CannotCross(f"a tensor of {tensor.dim()} dimensions cannot cross; at most {MAX_DIMS} can")
        if tensor.numel() * tensor.itemsize > MAX_BODY:  # also where it is one element, expanded
            raise CannotCross(f"a tensor of {tensor.numel()} elements has more than {MAX_BODY >> 20} MiB")
        tensor = tensor.detach().resolve_conj().resolve_neg()
        node: dict[str, Any] = {
            "t": "T",
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }
        if tensor.numel() == 0:
            return node
        storage, size = tensor.untyped_storage(), tensor.itemsize
        first = int(tensor.storage_offset()) * size
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        last = first + (int(reach) + 1) * size
        index = self._storages.get(storage.data_ptr())
        if index is None:
            index = self._storages[storage.data_ptr()] = len(self._keep)
            self._keep.append(storage)
            self._spans.append([first, last])
            self._nodes.append([])
            self._chunks.append(index)
            self._chunk_of.append(len(self._chunks) - 1)
        span = self._spans[index]
        span[0], span[1] = min(span[0], first), max(span[1], last)
        node["c"], node["first"] = self._chunk_of[index], first
        self._nodes[index].append(node)
        return node

    def add_bytes(self, data: torch.Tensor) -> int:
        """Append a uint8 tensor as it is; returns its chunk number."""
        self._chunks.append(data.numpy().data)
        return len(self._chunks) - 1

    def finish(self) -> tuple[list[Any], dict[int, Live]]:
        """The chunks to send (bytes-like), and per chunk number of a tensor's bytes what is needed to restore them."""
        live: dict[int, Live] = {}
        chunks: list[Any] = list(self._chunks)
        for index, storage in enumerate(self._keep):
            start = self._spans[index][0] // ALIGN * ALIGN
            view = torch.empty(0, dtype=torch.uint8).set_(storage)[start : self._spans[index][1]]
            for node in self._nodes[index]:
                node["first"] -= start
            seen = _seen(view.numel(), self._nodes[index])
            is_bool = any(node["dtype"] == "bool" for node in self._nodes[index])
            live[self._chunk_of[index]] = Live(view, is_bool, seen)
            # The bytes between the elements of a view are not shown to the other side.
            chunks[self._chunk_of[index]] = (view if seen is None else view * seen).numpy().data
        return chunks, live


class Unpacker:
    """Turns header nodes back into values of exact types. Everything is checked: the other side may be hostile.

    `import_handle(node)` makes the stand-in for a foreign object, or returns an own object that comes back.
    """

    def __init__(
        self,
        chunks: list[torch.Tensor],
        import_handle: Callable[[dict[str, Any]], Any],
        dataclasses_by_name: dict[str, type],
    ):
        self.chunks = chunks
        self._import_handle = import_handle
        self._dataclasses = dataclasses_by_name
        self.tensors: list[torch.Tensor] = []  # that were unpacked
        self._described = 0  # bytes of the tensors and bytes values so far: a small message can describe many

    def unpack(self, node: Node, depth: int = 0) -> Any:
        """The value of `node`. Raises Malformed."""
        if node is None or isinstance(node, (bool, float, str)):
            return node
        if isinstance(node, int):
            if node.bit_length() > MAX_INT_BITS:
                raise Malformed(f"an int of {node.bit_length()} bits")
            return node
        if depth > MAX_DEPTH + 1:
            raise Malformed("nested too deep")
        if isinstance(node, list):
            return [self.unpack(item, depth + 1) for item in node]
        tag = node.get("t")
        try:
            return self._unpack_tagged(tag, node, depth + 1)
        except (Malformed, MemoryError):
            raise
        except Exception as error:
            raise Malformed(f"a value of kind {tag!r} is not well formed: {error}") from None

    def _unpack_tagged(self, tag: Any, node: dict[str, Any], depth: int) -> Any:
        if tag == "T":
            return self._unpack_tensor(node)
        if tag == "u":
            return tuple(self.unpack(item, depth) for item in node["v"])
        if tag == "d":
            keys = _hashable([self.unpack(key, depth) for key, _ in node["v"]], tuples=False)
            return dict(zip(keys, [self.unpack(value, depth) for _, value in node["v"]], strict=True))
        if tag == "s":
            return set(_hashable([self.unpack(item, depth) for item in node["v"]], tuples=True))
        if tag == "b":
            chunk = self._chunk(node["c"])
            self._describe(chunk.numel())
            return chunk.numpy().tobytes()
        if tag == "f":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[node["v"]]
        if tag == "dtype":
            return DTYPES[node["v"]]
        if tag == "device":
            return torch.device(str(node["v"]))
        if tag == "slice":
            start, stop, step = (self.unpack(part, depth) for part in node["v"])
            return slice(start, stop, step)
        if tag == "...":
            return Ellipsis
        if tag == "dc":
            cls = self._dataclasses[node["n"]]
            if set(node["v"]) != {f.name for f in dataclasses.fields(cls)}:
                raise Malformed(f"wrong fields for {node['n']}")
            return _make_dataclass(cls, {name: self._field(v, depth) for name, v in node["v"].items()})
        if tag == "h":
            return self._import_handle(node)
        raise Malformed(f"unknown kind {tag!r}")

    def _field(self, node: Any, depth: int) -> Any:
        """A dataclass's field, which is data: the dataclass may go through it when it is made, and that must end."""
        if isinstance(node, dict) and node.get("t") == "h" and "back" not in node:
            raise Malformed("a field of a dataclass is an object of the other process, not data")
        return self.unpack(node, depth)

    def _describe(self, num_bytes: int) -> None:
        self._described += num_bytes
        if self._described > MAX_BODY:
            raise Malformed(f"values of more than {MAX_BODY >> 20} MiB in one message")

    def _chunk(self, number: Any) -> torch.Tensor:
        if type(number) is not int or not 0 <= number < len(self.chunks):
            raise Malformed("no such chunk")
        return self.chunks[number]

    def _unpack_tensor(self, node: dict[str, Any]) -> torch.Tensor:
        dtype, shape, stride = DTYPES[node["dtype"]], node["shape"], node["stride"]
        sizes = (*shape, *stride)
        if (
            len(shape) != len(stride)
            or len(shape) > MAX_DIMS
            or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes)
        ):
            raise Malformed("a tensor's shape or stride is wrong")
        numel = math.prod(shape)
        self._describe(numel * dtype.itemsize)  # an expanded view can describe far more than its bytes
        if numel == 0:
            return torch.empty(shape, dtype=dtype)
        chunk, first = self._chunk(node["c"]), node["first"]
        last = first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) * dtype.itemsize + dtype.itemsize
        if type(first) is not int or first < 0 or first % dtype.itemsize or last > chunk.numel():
            raise Malformed("a tensor lies outside its bytes")
        if dtype is torch.bool and bool((chunk[first:last] > 1).any()):
            raise Malformed("a bool tensor holds bytes other than 0 and 1")
        empty = torch.empty(0, dtype=dtype)
        self.tensors.append(empty.set_(chunk.untyped_storage(), first // dtype.itemsize, shape, stride))
        return empty


def _seen(num_bytes: int, nodes: list[dict[str, Any]]) -> torch.Tensor | None:
    """Which of a chunk's bytes belong to one of its tensors; None where all do."""
    for node in nodes:
        if node["first"] == 0 and math.prod(node["shape"]) * DTYPES[node["dtype"]].itemsize == num_bytes:
            steps = sorted((s, n) for n, s in zip(node["shape"], node["stride"], strict=True) if n > 1)
            sizes = [1, *(n for _, n in steps)]
            if all(step == math.prod(sizes[: i + 1]) for i, (step, _) in enumerate(steps)):
                return None  # the usual case: one tensor without gaps covers all
    seen = torch.zeros(num_bytes, dtype=torch.bool)
    for node in nodes:
        size = DTYPES[node["dtype"]].itemsize
        steps = [(n, s * size) for n, s in zip(node["shape"], node["stride"], strict=True) if s]  # 0: the same again
        shape, stride = zip(*steps, (size, 1), strict=True)
        seen.as_strided(shape, stride, node["first"]).fill_(True)
    return None if bool(seen.all()) else seen


def _hashable(values: list[Any], tuples: bool) -> list[Any]:
    """`values` if they may be keys of a dict, or items of a set (`tuples`). Raises Malformed."""
    for value in values:
        if tuples and type(value) is tuple:
            _hashable(list(value), tuples)
        elif value is not None and type(value) not in (bool, int, float, str, bytes):
            raise Malformed(f"a {type(value).__name__} as a key")
    if len(values) > MAX_COLLISIONS:
        counts = Counter(map(hash, values))
        if max(counts.values()) > MAX_COLLISIONS:
            raise Malformed("keys made to have the same hash")
    return values


def _base_value(value: Any) -> Any:
    """The plain value of a subclass of bool, int, float or str, without asking the subclass."""
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else str.__str__(value)


def _plain_scalar(value: Any) -> Any:
    """A NumPy scalar as a number; anything else as it is."""
    return _from_numpy(value) if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def _from_numpy(value: Any) -> Any:
    import numpy

    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(numpy.array(value, copy=True, order="C"))
    raise CannotCross(f"a value of type numpy.{type(value).__name__} cannot cross; return a tensor or a number")


def _make_dataclass(cls: type, values: dict[str, Any]) -> Any:
    init = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.init}
    made = cls(**init)
    for field in dataclasses.fields(cls):
        if not field.init:
            object.__setattr__(made, field.name, values[field.name])
    return made
