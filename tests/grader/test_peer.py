"""Two ends of a conversation: calls, handles, call-backs, exceptions, and what the trusted end never shows."""

from __future__ import annotations

import functools
import gc
import math
import socket
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grader.checks import lent, unchanging
from grader.learner_side import peer as peer_module
from grader.learner_side import wire
from grader.learner_side.peer import LAB_MODULE, Peer
from grader.learner_side.stand_ins import Handle
from grader.learner_side.wire import Connection


class Pair:
    """A trusted end in this thread, and a learner's end that serves `names` in another thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.names: dict[str, Any] = {}
        self.trusted = Peer(Connection(ours), strict=True, call_seconds=60)
        self.other = Peer(Connection(theirs), strict=False)
        self.other.operations = {"names": lambda header, payload: {name: self.names[name] for name in payload}}
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        self._sockets = (ours, theirs)

    def _serve(self) -> None:
        with pytest.raises(ConnectionError):
            self.other.serve_forever()

    def get(self, **names: Any) -> Any:
        self.names.update(names)
        found = self.trusted.request({"m": "names"}, list(names))
        return next(iter(found.values())) if len(names) == 1 else found.values()

    def close(self) -> None:
        self._sockets[0].close()
        self.thread.join(timeout=30)
        self._sockets[1].close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def in_lab(cls: type) -> type:
    cls.__module__ = LAB_MODULE
    return cls


def test_a_call_returns_data_of_exact_types(pair: Pair) -> None:
    f = pair.get(f=lambda x, scale=1: {"sum": x.sum() * scale, "shape": x.shape})
    assert f(torch.ones(3), scale=2) == {"sum": torch.tensor(6.0), "shape": (3,)}


def test_changes_in_place_arrive_in_the_callers_tensor_and_its_views(pair: Pair) -> None:
    x = torch.zeros(4, 4)
    pair.get(f=lambda a, b: a.add_(1) is None or b.mul_(3))(x[1:3, 1:3], x[2])
    expected = torch.zeros(4, 4)
    expected[1:3, 1:3] += 1
    expected[2] *= 3
    assert torch.equal(x, expected)


def test_changes_in_place_arrive_even_when_the_call_raises(pair: Pair) -> None:
    def f(x: torch.Tensor) -> None:
        x.fill_(7)
        raise ValueError("after the change")

    x = torch.zeros(2)
    with pytest.raises(ValueError, match="after the change"):
        pair.get(f=f)(x)
    assert x.tolist() == [7, 7]


class Store:
    """A learner's class."""

    kind = "store"

    def __init__(self) -> None:
        self.items: list[Any] = []

    def append(self, x: Any) -> Store:
        self.items.append(x)
        return self

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: Any) -> Any:
        return self.items[i]

    def __setitem__(self, i: Any, x: Any) -> None:
        self.items[i] = x

    def __contains__(self, x: Any) -> bool:
        return x in self.items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self.items.append((None if kind is None else kind.__name__, str(error)))
        return kind is ValueError

    @classmethod
    def of(cls, *items: Any) -> Store:
        made = cls()
        made.items = list(items)
        return made


def test_objects_are_handles_with_methods_attributes_and_the_listed_dunders(pair: Pair) -> None:
    cls = pair.get(Store=Store)
    store = cls()
    assert store.append(3).append(4) is store
    assert (len(store), store[0], 4 in store, 5 in store, list(store)) == (2, 3, True, False, [3, 4])
    store[0] = 9
    assert store[-2:] == [9, 4]
    assert store.items == [9, 4]
    assert (store.kind, cls.kind) == ("store", "store")
    assert list(cls.of(1, 2)) == [1, 2]
    with pytest.raises(IndexError):
        store[10]
    with pytest.raises(AttributeError):
        _ = store.missing
    with pytest.raises(AttributeError, match="not public"):
        _ = store.__dict__["x"]
    with pytest.raises(AttributeError, match="cannot be set"):
        store.items = []


def test_with_blocks_see_the_exception_and_may_swallow_it(pair: Pair) -> None:
    store = pair.get(Store=Store)()
    with store:
        raise ValueError("once")
    with pytest.raises(KeyError), store:
        raise KeyError("twice")
    with store:
        pass
    assert store.items == [("ValueError", "once"), ("KeyError", "'twice'"), (None, "None")]


def test_a_missing_dunder_is_a_type_error_as_it_is_directly(pair: Pair) -> None:
    f = pair.get(f=lambda: 1)
    for use in (len, iter, next):
        with pytest.raises(TypeError):
            use(f)


def test_generators_are_iterated_one_step_at_a_time(pair: Pair) -> None:
    def count() -> Iterator[int]:
        yield from range(10**9)

    numbers = pair.get(count=count)()
    assert [next(numbers) for _ in range(3)] == [0, 1, 2]


def test_a_handle_is_equal_to_nothing_and_neither_true_nor_false(pair: Pair) -> None:
    class EqualToAll:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    obj = pair.get(f=EqualToAll)()
    for use in (
        lambda: obj == 5,
        lambda: [5].index(obj),
        lambda: obj != 5,
        lambda: obj < 5,
        lambda: bool(obj),
        lambda: {obj},
    ):
        with pytest.raises(TypeError, match="compared, hashed or tested"):
            use()


def test_an_own_object_that_comes_back_is_itself(pair: Pair) -> None:
    model = in_lab(type("Model", (), {"__call__": lambda self, x: x}))()
    assert pair.get(f=lambda m: [m, m])(model) == [model, model]


def test_call_backs_nest_and_count_in_the_examiner(pair: Pair) -> None:
    calls = []

    def model(x: torch.Tensor, again: Any = None) -> torch.Tensor:
        calls.append(x.tolist())
        return again(x + 1) if again is not None else x * 2

    def learner(model: Any, x: torch.Tensor) -> torch.Tensor:
        return model(x, again=lambda y: model(y))

    assert pair.get(f=learner)(model, torch.tensor([1.0])).tolist() == [4.0]
    assert calls == [[1.0], [2.0]]


def test_endless_recursion_between_the_processes_is_an_error_and_the_line_stays_usable(pair: Pair) -> None:
    f = pair.get(f=lambda g, f: g(f))

    def g(back: Any) -> Any:
        return back(g, back)

    with pytest.raises(RecursionError):
        f(g, f)
    assert pair.get(h=lambda: 5)() == 5


def test_exceptions_arrive_as_built_in_types_with_the_learners_lines(pair: Pair) -> None:
    class OwnError(KeyError):
        pass

    def f() -> None:
        raise OwnError("which", 3)

    with pytest.raises(KeyError) as caught:
        pair.get(f=f)()
    assert type(caught.value) is KeyError
    assert caught.value.args == ("which", 3)
    assert "in f" in caught.value.learner_traceback  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
def test_exits_inside_a_call_are_plain_errors(pair: Pair, error: BaseException) -> None:
    def f() -> None:
        raise error

    with pytest.raises(RuntimeError, match=type(error).__name__):
        pair.get(f=f)()


def test_the_examiners_exceptions_reach_the_learner_without_its_lines(pair: Pair) -> None:
    def model(x: Any) -> None:
        secret = 41
        raise ValueError("too long") if secret else None

    def f(model: Any) -> list[Any]:
        try:
            model(1)
        except ValueError as error:
            return [str(error), error.learner_traceback]  # type: ignore[attr-defined]
        return []

    assert pair.get(f=f)(model) == ["too long", ""]


LOOKS = ["__globals__", "__self__", "__func__", "__code__", "__class__", "__dict__", "_secret", "gi_frame", "forward"]


@pytest.mark.parametrize("name", [*LOOKS, "secret_method", "register_buffer"])
def test_the_learner_sees_of_the_examiners_objects_only_what_the_lab_defines(pair: Pair, name: str) -> None:
    Model = in_lab(type("Model", (torch.nn.Module,), {"public": 5, "_secret": 6, "double": lambda self, x: 2 * x}))
    look = pair.get(look=lambda m, name: pair.other.get(m._id, name))
    assert look(Model(), "public") == 5
    assert pair.get(use=lambda m: m.double(4))(Model()) == 8
    for target in (
        Model(),
        test_an_own_object_that_comes_back_is_itself,
        torch.nn.Linear(2, 2),
        functools.partial(len),
    ):
        with pytest.raises(AttributeError):
            look(target, name)


def test_attributes_of_the_examiners_objects_cannot_be_set(pair: Pair) -> None:
    def forge(model: Any) -> None:
        model.calls = 0

    model = in_lab(type("Model", (), {"calls": 9}))()
    with pytest.raises(AttributeError, match="cannot be set"):
        pair.get(f=forge)(model)
    assert model.calls == 9


def test_the_examiner_exports_no_frames_modules_or_foreign_objects(pair: Pair) -> None:
    f = pair.get(f=lambda x: None)
    frame = (lambda: __import__("inspect").currentframe())()
    for value in (math, frame, (i for i in ()), torch.Generator(), types.SimpleNamespace(a=1)):
        with pytest.raises(TypeError, match=r"not shown|cannot cross"):
            f(value)


def test_handles_that_are_given_up_are_released_on_the_other_side(pair: Pair) -> None:
    cls = pair.get(Store=Store)
    for _ in range(50):
        cls()
    gc.collect()
    cls()
    assert len(pair.other._own) < 5
    assert list(pair.get(s=Store.of(1))) == [1]


def test_a_call_that_does_not_return_is_given_up(pair: Pair) -> None:
    release = threading.Event()
    f = pair.get(f=lambda: release.wait(600))
    pair.trusted.call_seconds = 0.2
    with pytest.raises(TimeoutError):
        f()
    release.set()


class Clock:
    """Stands in for the module `time`; it goes on only where a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(peer_module, "time", made)
    monkeypatch.setattr(wire, "time", made)
    return made


def test_the_time_of_call_backs_is_not_the_learners(pair: Pair, clock: Clock) -> None:
    f = pair.get(f=lambda slow: [slow() for _ in range(3)])
    pair.trusted.call_seconds = 60.0
    assert f(lambda: clock.pass_by(59.0)) == [None, None, None]
    pair.trusted._serve = lambda *message: Peer._serve(pair.trusted, *message) or clock.pass_by(59.0)  # type: ignore
    with pytest.raises(TimeoutError):
        f(lambda: None)  # and the time between them is


def answer_with(raw: Callable[[socket.socket], None]) -> Any:
    """Calls a peer that answers with hand-made bytes."""
    ours, theirs = socket.socketpair()

    def serve() -> None:
        connection = Connection(theirs)
        connection.receive()
        raw(theirs)
        theirs.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    peer = Peer(Connection(ours), strict=True, call_seconds=60)
    try:
        return peer.call(1, None, (torch.zeros(4),), {})
    finally:
        thread.join(timeout=30)
        ours.close()


def message(text: str, *chunks: bytes) -> bytes:
    body = b"".join(len(c).to_bytes(8, "big") + c for c in chunks)
    return len(text).to_bytes(4, "big") + len(chunks).to_bytes(4, "big") + bytes(4) + text.encode() + body


HOSTILE = {
    "closed": b"",
    "half a message": message('{"m": "ok"}')[:-3],
    "a header of 4 GiB": b"\xff" * 12,
    "not JSON": message("{"),
    "not an object": message("[]"),
    "nested too deep": message("[" * 100_000),
    "a huge number": message('{"m": "ok", "v": ' + "9" * 10_000 + "}"),
    "a chunk of many GiB": message('{"m": "ok"}')[:4]
    + (1).to_bytes(4, "big")
    + bytes(4)
    + b'{"m": "ok"}'
    + b"\xff" * 8,
    "changes what was not sent": message('{"m": "ok", "v": 1, "w": [[5, 0]]}', b"x" * 16),
    "changes with too few bytes": message('{"m": "ok", "v": 1, "w": [[0, 0]]}', b"x" * 4),
    "changes with no bytes": message('{"m": "ok", "v": 1, "w": [[0, 3]]}'),
    "changes that are no list": message('{"m": "ok", "v": 1, "w": 3}'),
    "an unknown kind": message('{"m": "ok", "v": {"t": "pickle"}}'),
    "an own object it never got": message('{"m": "ok", "v": {"t": "h", "back": 99}}'),
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_end_the_conversation_and_give_no_value(raw: bytes) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        answer_with(lambda sock: sock.sendall(raw))
    assert type(caught.value).__name__ in ("Malformed", "ConnectionResetError", "CannotCross")


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "BaseException", "print", "nonsense", 5])
def test_a_forged_exception_is_never_more_than_an_exception(name: Any) -> None:
    error = f'{{"t": "d", "v": [["type", {name if isinstance(name, int) else chr(34) + name + chr(34)}], ["args", []], '
    raw = message('{"m": "err", "v": ' + error + '["name", "x"], ["trace", ""]]}}')
    with pytest.raises(RuntimeError):
        answer_with(lambda sock: sock.sendall(raw))


def test_a_handle_shows_no_secret_of_its_peer() -> None:
    assert not [name for name in vars(Handle) if not name.startswith("_")]


def test_a_process_that_gets_no_processor_time_gets_more_wall_clock_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE", 3000.0)  # however late this process looks at the clock
    ours, theirs = socket.socketpair()
    spent = iter([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    connection = Connection(ours, lambda: next(spent))
    connection.allow(0.2)
    with pytest.raises(TimeoutError):
        connection.receive()
    assert next(spent) == 0.3  # asked at the start, at the first deadline, and at the second one, when 0.2 s were used
    theirs.close()
    ours.close()


def test_time_in_which_a_process_waits_for_a_processor_is_not_its_own() -> None:
    ours, theirs = socket.socketpair()
    begun = time.monotonic()

    def waited() -> float:
        return min(time.monotonic() - begun, 0.4)  # so long a neighbour keeps all processors busy

    connection = Connection(ours, lambda: 0.0, waited)
    connection.allow(0.02)
    with pytest.raises(TimeoutError):
        connection.receive()
    assert time.monotonic() - begun >= 0.4
    theirs.close()
    ours.close()


@pytest.mark.parametrize("use", [lambda f: list(map(f, [1, 2])), lambda f: list(zip([1], map(f, [1]), strict=True))])
def test_a_stop_iteration_out_of_a_call_does_not_end_the_callers_loop(pair: Pair, use: Callable) -> None:
    def stop(x: int) -> None:
        raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        use(pair.get(f=stop))
    assert list(pair.get(s=Store.of(1, 2))) == [1, 2]


class Borrower:
    """Keeps the tensors it was lent."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def keep(self, x: torch.Tensor, *, more: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        self.kept = [x, *more]
        return x[1:]  # a view

    def shown(self) -> list[torch.Tensor]:
        return self.kept


class Copier(Borrower):
    def keep(self, x: torch.Tensor, *, more: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        self.kept = [tensor.clone() for tensor in (x, *more)]
        return x[1:]


class Changer(Borrower):
    """Changes what it was lent in place, keeps it under another name, and raises."""

    def keep(self, x: torch.Tensor, *, more: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        self.kept = [x.detach()]
        x.mul_(10)
        x.set_(torch.empty(0))
        raise ValueError("no")


@pytest.fixture(params=["direct", "other process"])
def learners(request: pytest.FixtureRequest, pair: Pair) -> Callable[[type], Any]:
    """A class of a learner, as a check cell has it in a notebook, and when graded."""
    return (lambda cls: cls) if request.param == "direct" else lambda cls: pair.get(learners=cls)


def test_memory_that_is_lent_is_overwritten_after_the_call(learners: Callable[[type], Any]) -> None:
    x, both = torch.arange(6.0).view(2, 3), torch.arange(12).view(2, 6)
    integers, flags = both[0], torch.ones(1, 4, dtype=torch.bool).expand(3, 4)
    borrower, before = learners(Borrower)(), x.clone()
    result = lent(borrower.keep)(x, more=(integers, flags))
    assert torch.equal(result, before[1:])  # read before the memory is overwritten
    kept = borrower.shown()
    assert bool(kept[0].isnan().all())
    assert kept[0].shape == x.shape
    assert kept[1].tolist() == [torch.iinfo(torch.int64).min] * 6
    assert not bool(kept[2].any())
    assert torch.equal(x, before)
    assert both.view(-1).tolist() == list(range(12))
    assert bool(flags.all())


def test_a_copy_of_lent_memory_stays_as_it_is(learners: Callable[[type], Any]) -> None:
    x, copier = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))[:, ::2], learners(Copier)()
    before = x.clone()
    assert torch.equal(lent(copier.keep)(x, more=(x[0],)), before[1:])
    assert torch.equal(copier.shown()[0], before)
    assert torch.equal(copier.shown()[1], before[0])


def test_changes_in_place_of_lent_memory_arrive_even_if_the_call_raises(learners: Callable[[type], Any]) -> None:
    buffer = torch.ones(2, 6)
    changer = learners(Changer)()
    with pytest.raises(ValueError, match="no"):
        lent(changer.keep)(buffer[:, ::2])
    assert torch.equal(buffer, torch.tensor([10.0, 1.0]).repeat(2, 3))
    assert bool(changer.shown()[0].isnan().all())


def test_functions_and_classes_can_be_called_with_lent_memory(pair: Pair) -> None:
    kept: list[torch.Tensor] = []
    for function in (kept.append, pair.get(f=lambda x: kept.append(x))):
        lent(function)(torch.ones(2))
    # The other end overwrites what was lent when its answer is on the way: it has, once it answers again.
    pair.get(f=lambda x: kept.append(x))(torch.ones(2))
    assert [bool(x.isnan().all()) for x in kept[:2]] == [True, True]
    assert torch.equal(kept[2], torch.ones(2))


def test_only_the_learners_end_overwrites_what_it_received(pair: Pair) -> None:
    kept: list[torch.Tensor] = []

    def f(keep: Any) -> None:
        pair.other.call(keep._id, None, (torch.ones(2),), {}, "lent")

    pair.get(f=f)(lambda x: kept.append(x))
    assert torch.equal(kept[0], torch.ones(2))


def give_back(lengths: list[int], rows: Any = None, *, table: Any = None) -> int:
    """Changes its arguments as the test says: the last of lengths is where."""
    if lengths[-1] == 1:
        lengths.sort(reverse=True)
    if lengths[-1] == 2:
        rows["a"][1]["id"] = "other"
    if lengths[-1] == 3:
        table[0, 1] = 7
    if lengths[-1] == 4:
        rows.clear()
    return 11


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (1, r"give_back changed its argument lengths, .*: expected \[0, 5, 1\], saw \[5, 1, 0\]"),
        (2, r"its argument rows, .*'id': 'it'.*'id': 'other'"),
        (3, r"its argument table, .*, at table\[0, 1\]: expected nan, saw 7.0"),
        (4, r"its argument rows, .*saw \{\}"),
    ],
)
def test_a_changed_argument_is_named(pair: Pair, where: int, says: str) -> None:
    """As a check cell calls it in a notebook, and when graded, where lists and dicts are copies."""
    for function in (give_back, pair.get(f=give_back)):
        table, rows = torch.full((3, 4), torch.nan), {"a": [{"id": "it"}, {"id": "it"}], "b": torch.zeros(1)}
        with pytest.raises(AssertionError, match=says):
            unchanging(function)([0, 5, where], rows, table=table)


def test_a_function_that_changes_nothing_answers_as_ever(pair: Pair) -> None:
    for function in (give_back, pair.get(f=give_back)):
        rows = {"a": [(1.5, torch.tensor([torch.nan])), {2, 3}], "b": None}
        assert unchanging(function)([9, 9], rows, table=torch.empty(0)) == 11
        with pytest.raises(TypeError, match="lengths"):
            unchanging(function)()


def test_arguments_that_a_function_writes_into_are_left_out_by_position(pair: Pair) -> None:
    for function in (give_back, pair.get(f=give_back)):
        assert unchanging(function, but=(1,))([0, 4], {"a": 1}) == 11
        with pytest.raises(AssertionError, match="its argument lengths"):
            unchanging(function, but=(1,))([0, 5, 1], {"a": 1})


def test_a_method_and_what_it_cannot_copy_may_be_given(learners: Callable[[type], Any], pair: Pair) -> None:
    borrower, callback = learners(Borrower)(), lambda: None
    assert unchanging(borrower.keep)(torch.arange(3.0), more=(torch.ones(1),)).tolist() == [1, 2]
    for function in (lambda call: 3, pair.get(f=lambda call: 3)):
        assert unchanging(function)(callback) == 3
