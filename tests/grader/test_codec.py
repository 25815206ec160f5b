"""What crosses comes out as it went in, and what does not is refused by name; hostile bytes are never a value."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.learner_side.codec import DTYPES, CannotCross, Malformed, Packer, Unpacker


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    tail: tuple[Any, ...] = ()


def refuse(value: Any) -> Any:
    raise CannotCross(type(value).__name__)


def cross(value: Any) -> Any:
    packer = Packer(refuse, {"Point": Point})
    node = packer.pack(value)
    chunks = [torch.frombuffer(bytearray(c) or bytearray(1), dtype=torch.uint8)[: len(c)] for c in packer.finish()[0]]
    return Unpacker(chunks, refuse, {"Point": Point}).unpack(node)


def unpack(node: Any, chunks: list[torch.Tensor] | None = None) -> Any:
    return Unpacker(chunks or [torch.zeros(64, dtype=torch.uint8)], refuse, {"Point": Point}).unpack(node)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(scalars, inner)
        | st.sets(scalars)
        | st.builds(Point, st.integers(), st.lists(inner).map(tuple))
    ),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types throughout: 1, 1.0 and True are three values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*map(type, a)] == [*map(type, b)] and same([*a], [*b]) and same([*a.values()], [*b.values()])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Point):
        return same(a.x, b.x) and same(a.tail, b.tail)
    return bool(a == b)


@settings(deadline=None)
@given(values)
def test_plain_values_come_out_as_they_went_in(value: Any) -> None:
    assert same(cross(value), value)


def test_floats_that_json_has_not_cross() -> None:
    assert math.isnan(cross(math.nan))
    assert cross([math.inf, -math.inf, -0.0]) == [math.inf, -math.inf, 0.0]
    assert math.copysign(1, cross(-0.0)) == -1


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_of_every_dtype_cross_bit_by_bit(name: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % (2 if name == "bool" else 200)
    tensor = raw.view(DTYPES[name])
    got = cross(tensor)
    assert got.dtype == tensor.dtype
    assert torch.equal(got.view(torch.uint8), raw)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_views_keep_shape_stride_and_content(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    for dim in range(len(shape)):
        step = data.draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(data.draw(st.integers(0, 2)), None, step),)]
    tensor = tensor.permute(data.draw(st.permutations(range(len(shape)))))
    got = cross(tensor)
    assert got.shape == tensor.shape
    assert torch.equal(got, tensor)
    assert got.numel() == 0 or got.stride() == tensor.stride()


def test_an_expanded_view_stays_one_element_in_memory() -> None:
    got = cross(torch.tensor([2.0]).expand(1000))
    assert got.stride() == (0,)
    assert got.sum() == 2000


def test_tensors_that_share_memory_share_it_after_crossing() -> None:
    base = torch.zeros(10)
    a, b, other = cross((base[2:6], base.view(torch.uint8)[12:20], torch.zeros(10)))
    a.fill_(1.0)
    assert b.view(torch.uint8).sum() > 0
    assert other.sum() == 0


def test_only_the_bytes_that_are_seen_cross() -> None:
    packer = Packer(refuse, {})
    packer.pack(torch.zeros(1_000_000)[500_000:500_010])
    assert sum(len(chunk) for chunk in packer.finish()[0]) < 100


def test_numpy_values_become_tensors_and_numbers() -> None:
    assert torch.equal(cross(numpy.arange(4, dtype=numpy.int32)[::-1]), torch.tensor([3, 2, 1, 0], dtype=torch.int32))
    assert type(cross(numpy.float64(1.5))) is float
    assert type(cross(numpy.float32(1.5))) is float
    assert type(cross(numpy.bool_(True))) is bool


def test_subclasses_arrive_as_the_builtin_type() -> None:
    class Liar(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    class Name(str):
        __slots__ = ()

    assert type(cross(Liar(3))) is int
    assert cross(Liar(3)) != 4
    assert type(cross(Name("x"))) is str
    assert type(cross(torch.zeros(2, 3).shape)) is tuple


def test_dtype_device_and_slices_cross() -> None:
    value = (torch.bfloat16, torch.device("cpu"), slice(1, None, 2), ...)
    assert cross(value) == value


class Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (torch.zeros(2).as_subclass(Odd), "subclass"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "dense"),
        ({(1, 2): 3}, "dict key"),
        (numpy.array([object()]), "object"),
        (object(), "object"),
    ],
)
def test_what_cannot_cross_is_refused_by_name(value: Any, word: str) -> None:
    with pytest.raises(TypeError, match=word):
        cross(value)


def test_a_list_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CannotCross, match="nested"):
        cross(loop)


def tensor_node(**changes: Any) -> dict[str, Any]:
    return {"t": "T", "dtype": "float32", "shape": [4], "stride": [1], "c": 0, "first": 0} | changes


@pytest.mark.parametrize(
    "node",
    [
        {"t": "no such kind"},
        {},
        {"t": "u"},
        {"t": "u", "v": 3},
        {"t": "d", "v": [[[], 1]]},
        {"t": "s", "v": [[1]]},
        {"t": "b", "c": 7},
        {"t": "b", "c": -1},
        {"t": "b", "c": True},
        {"t": "dc", "n": "Point", "v": {"x": 1}},
        {"t": "dc", "n": "Exception", "v": {}},
        {"t": "f", "v": "1e5"},
        {"t": "h"},
        tensor_node(shape=[17]),
        tensor_node(shape=[-1]),
        tensor_node(shape=[2.0]),
        tensor_node(shape=[4], stride=[-1]),
        tensor_node(shape=[4, 4]),
        tensor_node(first=-4),
        tensor_node(first=2),
        tensor_node(first=52),
        tensor_node(c=1),
        tensor_node(dtype="object"),
        tensor_node(shape=[1 << 40], stride=[0]),
        tensor_node(shape=[1] * 65, stride=[0] * 65),
    ],
)
def test_malformed_nodes_are_never_a_value(node: Any) -> None:
    with pytest.raises((Malformed, CannotCross)):
        unpack(node)


def test_a_bool_tensor_with_other_bytes_is_refused() -> None:
    with pytest.raises(Malformed, match="bool"):
        unpack(tensor_node(dtype="bool"), [torch.full((64,), 2, dtype=torch.uint8)])


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from("tvcn") | st.text(), x),
    )
)
def test_arbitrary_json_is_a_plain_value_or_malformed(node: Any) -> None:
    with contextlib.suppress(Malformed, CannotCross):
        unpack(node)
