"""A page store behind the prefix cache: the same texts whatever it does, and nothing waits for it but what asked."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import ConfigError, EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.kv import stored_kv_manager
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.split import split_engine
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.core.kv_manager import KVManager
from reference_impl.features.prefix.hash_index import HashIndex
from reference_impl.features.transfer.folder import FolderStore
from reference_impl.interfaces import BlockPair, Request, RequestState, SamplingParams, StepPlan, TransferEnd, Transfers
from tests.engine.conftest import CountingClock, FakeLayeredStore, FakeStore, OwnCache
from tests.executor.forked import kill

PROMPT = list(range(1, 24))  # 5 full blocks of 4, and 3 tokens
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
CONFIG = EngineConfig(block_size=4, num_blocks=24, max_num_seqs=4, overlap="off")


@pytest.fixture(scope="module")
def model(random_model) -> Decoder:
    return random_model("float64", num_hidden_layers=3)


def engine_with(model: Decoder, store: Any, config: EngineConfig = CONFIG, **parts: Any) -> Engine:
    return Engine(model, config, Parts(page_store=store, clock=CountingClock(), **parts))


def finish(engine: Engine, store: FakeStore | None = None) -> None:
    while engine.has_work() or engine.kv.num_transfers:
        engine.step()
        if store is not None:
            store.turn()
    assert engine.kv.num_available == engine.num_blocks


def ask(engine: Engine, prompt: list[int] = PROMPT, **options: Any) -> Request:
    return engine.add(prompt, GREEDY, **options)


@pytest.fixture
def expected(model: Decoder) -> list[int]:
    engine = Engine(model, CONFIG)
    request = ask(engine)
    while engine.has_work():
        engine.step()
    return request.output_tokens


def filled(model: Decoder, kinds: tuple[str, ...] = ("now",)) -> FakeStore:
    """A store that has the pages of the prompt and its answer; what it does from now on are `kinds`."""
    store = FakeStore(("now",))
    engine = engine_with(model, store)
    ask(engine)
    finish(engine)
    assert len(store.contents) == (len(PROMPT) + 6 - 1) // 4
    store.kinds = kinds
    return store


def filled_by_layer(model: Decoder, kinds: tuple[str, ...] = ("now",)) -> FakeLayeredStore:
    store = FakeLayeredStore(("now",))
    engine = engine_with(model, store)
    ask(engine)
    finish(engine)
    store.kinds, store.begun, store.calls = kinds, [], [("", model.config.num_layers - 1)]
    return store


def ends(engine: Engine) -> list[TransferEnd]:
    return [end for step in engine.trace.steps() for end in step.transfers_ended]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_another_engine_loads_what_one_has_computed(overlap: str, model, expected) -> None:
    store = filled(model)
    engine = engine_with(model, store, EngineConfig(block_size=4, num_blocks=24, overlap=overlap))
    request = ask(engine)
    finish(engine)
    assert (request.output_tokens, request.num_cached_tokens) == (expected, 20)
    assert sum(row.num_tokens for step in engine.trace.steps() for row in step.rows) == 3 + 5
    [load] = [load for step in engine.trace.steps() for load in step.transfers.loads]
    assert len(load.pages) == 5
    assert not any(step.transfers.saves for step in engine.trace.steps())  # the store has it all
    assert ends(engine) == [TransferEnd(load.id)]


def test_a_step_without_rows_saves_what_the_last_request_left(model) -> None:
    store = FakeStore(("now",))
    engine = engine_with(model, store)
    ask(engine)
    while engine.has_work():
        engine.step()
    last = engine.trace.steps()[-1]
    assert (last.rows, len(last.transfers.saves)) == ((), 1)
    assert len(store.contents) == 7


def test_a_plan_with_transfers_and_no_rows_is_carried_out(model) -> None:
    """Also where no store is: a scheduler may have blocks copied and nothing else."""
    engine = Engine(model, CONFIG)
    request = ask(engine)
    engine.step()
    source, target = request.block_table[0], next(b for b in range(24) if b not in request.block_table)
    plan = StepPlan(99, (), transfers=Transfers(copies=(BlockPair(source, target),)))
    engine.scheduler.schedule = lambda now: plan  # type: ignore[method-assign]
    engine.step()
    keys = engine.kv_cache.data[:, :, source]
    assert keys.any()
    assert (engine.kv_cache.data[:, :, target] == keys).all()


WRONG = ["fails", "refuses", "short", "flipped", "fewer", "swapped", "empty"]


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_come_as_it_was_saved_is_computed(kind: str, model, expected) -> None:
    store = filled(model, (kind,))
    engine = engine_with(model, store)
    request = ask(engine)
    finish(engine, store)
    assert (request.output_tokens, request.num_cached_tokens) == (expected, 0)
    assert store.begun == [kind]  # it was tried once
    assert [bool(end.error) for end in ends(engine) if end.id == 0] == [True]


def test_a_store_that_says_it_has_what_it_has_not(model, expected) -> None:
    store = FakeStore(("now", "lies"), seed=3)
    engine = engine_with(model, store)
    request = ask(engine)
    finish(engine, store)
    assert request.output_tokens == expected
    assert "KeyError" in str(ends(engine)[0].error)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_request_that_waits_for_pages_holds_up_no_other(overlap: str, model, expected) -> None:
    store = filled(model, ("never",))
    store.timeout = 1000.0
    engine = engine_with(model, store, EngineConfig(block_size=4, num_blocks=24, max_num_seqs=1, overlap=overlap))
    waiting, other = ask(engine), ask(engine, [40, 41, 42])
    while other.finish_reason is None:
        engine.step()
    assert (waiting.state, waiting.output_tokens) == (RequestState.LOADING, [])
    assert engine.scheduler.num_waiting == 1
    store.timeout = 5.0
    finish(engine)
    assert waiting.output_tokens == expected
    assert "cancelled" in str(next(end for end in ends(engine) if end.id == 0).error)


def test_a_late_answer_to_a_cancelled_load_changes_nothing(model, expected) -> None:
    store = filled(model, ("late",))
    engine = engine_with(model, store)
    request = ask(engine)
    engine.step()
    assert request.state is RequestState.LOADING
    engine.abort(request.id)
    again = ask(engine, list(reversed(PROMPT)))  # whose blocks may be those of the load, once it has ended
    while store.late:
        engine.step()
        store.turn()
    finish(engine, store)
    clean = Engine(model, CONFIG)
    other = ask(clean, list(reversed(PROMPT)))
    while clean.has_work():
        clean.step()
    assert again.output_tokens == other.output_tokens


def test_blocks_of_a_load_are_held_until_it_has_ended(model) -> None:
    store = filled(model, ("late",))
    engine = engine_with(model, store)
    request = ask(engine)
    engine.step()
    assert engine.kv.num_available == engine.num_blocks - 5
    engine.abort(request.id)
    assert engine.kv.num_available == engine.num_blocks - 5  # the worker does not know yet
    engine.step()
    assert engine.kv.num_available == engine.num_blocks


def test_requests_with_one_prefix_wait_for_one_load(model, expected) -> None:
    store = filled(model, ("late",))
    engine = engine_with(model, store)
    both = [ask(engine), ask(engine)]
    finish(engine, store)
    assert [r.output_tokens for r in both] == [expected] * 2
    assert [r.num_cached_tokens for r in both] == [20, 20]
    assert store.begun == ["late"]


def test_other_tenants_and_other_models_find_nothing(model, random_model) -> None:
    store = filled(model)
    engine = engine_with(model, store)
    request = ask(engine, cache_salt="b")
    finish(engine)
    assert request.num_cached_tokens == 0
    for other, config in (
        (random_model("float32"), CONFIG),
        (model, EngineConfig(block_size=2, num_blocks=24)),
        (random_model("float64", num_key_value_heads=1), CONFIG),
    ):
        engine = engine_with(other, store, config)
        request = ask(engine)
        finish(engine)
        assert request.num_cached_tokens == 0


@pytest.mark.parametrize("second", [16, 32, 48])
@pytest.mark.parametrize("first", [16, 32, 48])
def test_engines_with_other_blocks_and_indexes_share_pages_of_16_tokens(
    first: int, second: int, model, tmp_path: Path
) -> None:
    """Of a prompt of 6 full pages and a token the first engine saves all full pages, and the second loads full
    blocks."""
    prompt = [1 + at % 23 for at in range(97)]
    texts, cached, saved = [], [], []
    for block_size, index, stored in ((128, "hash", False), (first, "hash", True), (second, "radix", True)):
        store = FolderStore(tmp_path, timeout=600.0)
        config = EngineConfig(block_size=block_size, num_blocks=24, prefix_cache=index, max_num_batched_tokens=40)
        engine = engine_with(model, store, config) if stored else Engine(model, config)
        request = ask(engine, prompt)
        while engine.has_work():
            engine.step()
        engine.close()
        assert engine.kv.num_available == engine.num_blocks
        texts.append(request.output_tokens)
        cached.append(request.num_cached_tokens)
        saved.append(len(list(tmp_path.iterdir())))
    assert texts == texts[:1] * 3
    assert cached == [0, 0, 96 // second * second]
    assert saved == [0, 6, 6]


def test_full_pages_of_a_block_that_is_not_full_are_saved_once(model, tmp_path: Path) -> None:
    prompt = [1 + at % 23 for at in range(40)]
    store = filled(model)
    store.contents.clear()
    engine = engine_with(model, store, EngineConfig(block_size=48, num_blocks=8))
    ask(engine, prompt)
    finish(engine)
    saves = [save for step in engine.trace.steps() for save in step.transfers.saves]
    assert [[page.part for page in save.pages] for save in saves] == [[0, 1]]
    for block_size, loaded in ((48, 0), (16, 32)):
        other = engine_with(model, store, EngineConfig(block_size=block_size, num_blocks=8))
        request = ask(other, prompt)
        finish(other)
        assert request.num_cached_tokens == loaded


def test_the_server_can_rest_while_saves_run_and_close_waits_for_them(model) -> None:
    store = FakeStore(("late",))
    engine = engine_with(model, store)
    ask(engine)
    while engine.has_work():
        engine.step()
    assert engine.kv.num_transfers == 2
    assert not store.contents

    class Turning(CountingClock):
        def now(self) -> float:
            store.turn()
            return super().now()

    engine.clock = Turning()
    engine.close()
    assert len(store.contents) == 7


def test_a_folder_serves_engines_one_after_another_and_a_worker_in_another_process(tmp_path: Path) -> None:
    folder, stored = course_model("draft"), partial(FolderStore, tmp_path, timeout=600.0)
    store = stored()
    config = EngineConfig(block_size=8, num_blocks=20, overlap="on")
    prompt, texts, cached = [5, 17, 40, 9] * 9, [], []
    for make in (
        lambda: Engine(load_model(folder, torch.float32), config, Parts(page_store=stored())),
        lambda: Engine(load_model(folder, torch.float32), config, Parts(page_store=stored())),
        lambda: split_engine(
            folder, config, parts=Parts(page_store=store), make_parts=partial(Parts, page_store=stored())
        ),
        lambda: split_engine(folder, config, parts=Parts(page_store=stored())),
        lambda: LLM(folder, dtype="float32", parts=Parts(page_store=stored()), worker="process", **vars(config)).engine,
    ):
        engine = make()
        request = ask(engine, prompt)
        while engine.has_work():
            engine.step()
        engine.close()
        texts.append(request.output_tokens)
        cached.append(request.num_cached_tokens)
    assert texts[1:] == texts[:1] * 4
    assert cached == [0, *[32] * 4]


def test_a_folder_keeps_what_was_used_last(tmp_path: Path) -> None:
    keys = [bytes([i]) * 32 for i in range(4)]
    store = FolderStore(tmp_path / "new" / "folder", max_bytes=30)
    for at, key in enumerate(keys[:3]):
        store.save({key: b"x" * 10}).result()
        os.utime(store.folder / f"{key.hex()}.page", (at, at))  # a file system's clock may stand still for 10 ms
    assert store.load(keys[:1]).result() == [b"x" * 10]
    store.save({keys[3]: b"y" * 10}).result()
    assert [store.num_stored([key]) for key in keys] == [1, 0, 1, 1]
    with pytest.raises(FileNotFoundError):
        store.load([keys[1]]).result()
    store.close()
    again = FolderStore(tmp_path / "new" / "folder")
    assert again.load([keys[3]]).result() == [b"y" * 10]
    with pytest.raises(ValueError, match="max_bytes: expected an integer of at least 1, got 0"):
        FolderStore(tmp_path, max_bytes=0)


def test_what_does_not_belong_together_is_refused_by_name(model, random_model) -> None:
    store = FakeStore(("now",))
    with pytest.raises(ConfigError, match="fills the prefix cache, and it is off"):
        engine_with(model, store, EngineConfig(num_blocks=4, prefix_cache="off"))
    windows = random_model("float64", architecture="MistralForCausalLM", sliding_window=6)
    with pytest.raises(ConfigError, match="sliding windows has none"):
        engine_with(windows, store)
    with pytest.raises(ValueError, match="page_store is for the engine's own kv_manager"):
        engine_with(model, store, kv_manager=KVManager(BlockPool(24), 4))
    with pytest.raises(TypeError, match="gather_pages, scatter_pages, num_layers and layer_bytes.*OwnCache has not"):
        engine_with(model, store, kv_cache=OwnCache())
    without = Engine(model, CONFIG)
    manager = stored_kv_manager(without.block_pool, 4, HashIndex(4), filled(model), b"")
    engine = Engine(model, CONFIG, Parts(block_pool=without.block_pool, kv_manager=manager))
    ask(engine)
    with pytest.raises(ValueError, match=r"saves pages and this worker has no store: see Parts\.page_store"):
        finish(engine)
    executor: Any = Engine(model, CONFIG).executor
    collect = executor.collect
    executor.collect = lambda ticket: replace(collect(ticket), transfers=(TransferEnd(7),))
    broken = Engine(model, CONFIG, Parts(executor=executor))
    ask(broken)
    with pytest.raises(ValueError, match=r"reply to step .* transfers \[7\]; KVManager has begun none"):
        broken.step()


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_layers_come_one_by_one_and_pages_are_used_when_all_have_come(overlap: str, model, expected) -> None:
    store = filled_by_layer(model, ("late",))
    engine = engine_with(model, store, EngineConfig(block_size=4, num_blocks=24, overlap=overlap))
    request = ask(engine)
    engine.step()
    layers = range(model.config.num_layers)
    assert store.calls[1:] == [("load", layer) for layer in layers]
    store.late = [(4 * (1 + at), act) for at, (_, act) in enumerate(reversed(store.late))]  # the last layer comes first
    while request.state is RequestState.LOADING:
        assert request.num_cached_tokens == 0
        engine.step()
        store.turn()
    finish(engine, store)
    assert (request.output_tokens, request.num_cached_tokens) == (expected, 20)
    steps = engine.trace.steps()
    [load] = [load for step in steps for load in step.transfers.loads]
    # Those that moved with the end of the transfer are not counted: the end says that all have.
    assert [step.layers_moved[load.id] for step in steps if step.layers_moved] == [1] * (len(layers) - 1)
    assert TransferEnd(load.id) in ends(engine)


def test_pages_are_saved_layer_by_layer_and_found_by_an_engine_that_asks_for_layers(model, expected) -> None:
    store = filled_by_layer(model)
    assert len(store.layers) == 7 * model.config.num_layers
    assert len({len(content) for content in store.layers.values()}) == 1
    engine = engine_with(model, store)
    request = ask(engine)
    finish(engine)
    assert (request.output_tokens, request.num_cached_tokens) == (expected, 20)


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("kind", [*WRONG, "repeated"])
def test_one_wrong_layer_ends_the_transfer(kind: str, layer: int, model, expected) -> None:
    store = filled_by_layer(model)
    store.next_kinds = ["now"] * layer + [kind]
    engine = engine_with(model, store)
    request = ask(engine)
    finish(engine, store)
    right = (kind, layer) == ("repeated", 0)  # there is none before it
    assert (request.output_tokens, request.num_cached_tokens) == (expected, 20 if right else 0)
    [end] = [end for end in ends(engine) if end.id == 0]
    assert (end.error is None) == right
    # Behind one that is refused, no other is asked for.
    assert len(store.begun) == (layer + 1 if kind == "refuses" else 3)


def test_a_transfer_that_goes_on_is_not_cancelled_and_one_that_stops_is(model, expected) -> None:
    """Seconds pass as the clock is looked at; each layer alone comes in time, all together would not."""
    for stops in (False, True):
        store = filled_by_layer(model, ("late",))
        store.timeout = 12.0
        engine = engine_with(model, store)
        request = ask(engine)
        engine.step()
        acts = [act for _, act in store.late]
        store.late = []
        began = engine.clock.time
        for act in acts[: 1 if stops else len(acts)]:
            for _ in range(2):
                engine.step()
            act()
        taken = engine.clock.time - began
        finish(engine)
        assert request.output_tokens == expected
        error = next(end.error for end in ends(engine) if end.id == 0)
        assert (error is None, request.num_cached_tokens) == ((False, 0) if stops else (True, 20))
        assert stops or taken > 12.0


def test_a_reply_about_layers_of_a_transfer_that_was_never_begun_is_an_error(model) -> None:
    for store, text in (
        (None, r"transfers \[7\]; KVManager has begun none"),
        (FakeStore(("now",)), "transfer 7 moved"),
    ):
        executor: Any = engine_with(model, store).executor
        collect = executor.collect
        executor.collect = lambda ticket, collect=collect: replace(collect(ticket), layers_moved={7: 1})
        engine = engine_with(model, store, executor=executor)
        ask(engine)
        with pytest.raises(ValueError, match=text):
            engine.step()


def test_a_store_that_counts_wrongly_is_a_warning(model) -> None:
    store = FakeStore(("now",))
    store.num_stored = lambda keys: len(keys) + 1  # type: ignore[method-assign]
    engine = engine_with(model, store)
    ask(engine)
    with pytest.warns(RuntimeWarning, match="FakeStore.num_stored: expected how many of the first 5 keys it has, 0 "):
        engine.step()


@pytest.mark.filterwarnings("ignore:.*num_stored")
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_a_store_that_cannot_be_asked_costs_time_and_nothing_else(overlap: str, model) -> None:
    """At each call in turn, and at all: planning and booking go on."""
    config = EngineConfig(block_size=4, num_blocks=24, max_num_batched_tokens=8, overlap=overlap)
    sampling = SamplingParams(max_tokens=6, seed=3, ignore_eos=True, n=2)

    def serve(store: Any) -> list[list[int]]:
        engine = Engine(model, config, Parts(page_store=store, clock=CountingClock()))
        firsts = [engine.add(PROMPT, sampling), engine.add(PROMPT[:9], sampling), ask(engine)]
        members = [member for first in firsts for member in (first, *first.children)]
        finish(engine)
        return [member.output_tokens for member in members]

    expected = serve(FakeStore(("now",)))
    calls = 0
    for bad in itertools.count(-1):  # -1: always

        class Broken(FakeStore):
            asked = 0

            def num_stored(self, keys: Sequence[bytes], bad: int = bad) -> Any:
                self.asked += 1
                if bad in (-1, self.asked):
                    raise PermissionError("the folder is closed") if self.asked % 2 else IndexError
                return super().num_stored(keys)

        store = Broken(("now",))
        assert serve(store) == expected
        calls = max(calls, store.asked)
        if bad > calls:
            break
    assert calls >= 6


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("kind", ["nothing", "exits", "stops", "raises a stop", "no text"])
def test_a_store_may_give_anything_but_a_future(kind: str, overlap: str, model, expected) -> None:
    class Stop(BaseException):
        pass

    class NoText(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Strange(FakeStore):
        def load(self, keys: Sequence[bytes]) -> Any:
            return self.strange()

        def save(self, pages: Any) -> Any:
            return self.strange()

        def strange(self) -> Any:
            future: Future[Any] = Future()
            if kind == "nothing":
                return None
            if kind == "raises a stop":
                raise Stop
            future.set_exception({"exits": SystemExit(3), "stops": Stop(), "no text": NoText()}[kind])
            return future

    store = Strange(("now",))
    store.contents = filled(model).contents
    engine = engine_with(model, store, EngineConfig(block_size=4, num_blocks=24, overlap=overlap))
    request = ask(engine)
    finish(engine)
    assert request.output_tokens == expected
    error = str(ends(engine)[0].error)
    if kind == "nothing":
        assert error == "TypeError: Strange.load: expected a concurrent.futures.Future, got NoneType"
    else:
        assert error.split(":")[0] == {"exits": "SystemExit", "no text": "NoText"}.get(kind, "Stop")


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_loads_give_their_blocks_to_requests_that_run(overlap: str, model) -> None:
    """A silent store, and a request that needs the blocks of a load as it grows: nothing is preempted for it."""
    store = filled(model, ("never",))
    store.timeout = 10_000.0
    config = EngineConfig(block_size=4, num_blocks=10, max_num_seqs=2, overlap=overlap)
    engine = engine_with(model, store, config)
    growing = engine.add([40, 41], SamplingParams(max_tokens=34, temperature=0, ignore_eos=True))
    engine.step()
    waiting = ask(engine)
    engine.step()
    assert waiting.state is RequestState.LOADING
    steps = 0
    while growing.finish_reason is None:
        engine.step()
        steps += 1
    assert steps < 50
    assert not any(growing.id in step.preempted for step in engine.trace.steps())
    finish(engine)
    alone = Engine(model, config)
    other = alone.add([40, 41], growing.sampling)
    while alone.has_work():
        alone.step()
    assert growing.output_tokens == other.output_tokens


def test_a_folder_that_can_only_be_read_a_moved_process_and_what_else_lies_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = FolderStore("pages", max_bytes=25)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    keys = [bytes([i]) * 32 for i in range(4)]
    folder = tmp_path / "pages"
    (folder / "a.page").mkdir()
    os.mkfifo(folder / f"{keys[3].hex()}.page")
    old = folder / "b.1-1.draft"
    old.write_bytes(b"x")
    os.utime(old, (1, 1))
    for key in keys[:3]:
        store.save({key: b"x" * 10}).result()
    assert [store.num_stored([key]) for key in keys] == [0, 1, 1, 0]
    assert not old.exists()
    assert not list((tmp_path / "elsewhere").iterdir())
    monkeypatch.setattr(os, "utime", lambda *_: (_ for _ in ()).throw(PermissionError()))
    assert store.load(keys[1:2]).result() == [b"x" * 10]
    monkeypatch.setattr(
        Path, "write_bytes", lambda self, content: (self.touch(), (_ for _ in ()).throw(OSError(28, "full")))[1]
    )
    with pytest.raises(OSError, match="full"):
        store.save({keys[0]: b"x"}).result()
    assert not list(folder.glob("*.draft"))


def test_a_store_is_looked_at_when_it_is_given(model) -> None:
    class NoTimeout(FakeStore):
        timeout = None  # type: ignore[assignment]

    class Nan(FakeStore):
        timeout = float("nan")

    for store, text in (
        ("folder", "Parts.page_store, str, has no num_stored, load, save"),
        (type("Half", (), {"load_layer": print})(), "Half, has no num_stored, save_layer: a page store"),
        (FakeStore, "Parts.page_store, FakeStore, is a class: expected an object of it"),
        (NoTimeout(("now",)), "expected timeout in seconds, a finite number of at least 0, got None"),
        (Nan(("now",)), "expected timeout in seconds, a finite number of at least 0, got nan"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine_with(model, store)
    folder, config = course_model("draft"), EngineConfig(num_blocks=20)
    with pytest.raises(ValueError, match="FakeStore, does not say how it is pickled .* give make_parts"):
        split_engine(folder, config, parts=Parts(page_store=FakeStore(("now",))))
    with pytest.raises(ValueError, match="page_store: expected True, the worker has False"):
        split_engine(folder, config, parts=Parts(page_store=FakeStore(("now",))), make_parts=Parts)


def test_an_engine_whose_worker_is_gone_can_be_closed(model, tmp_path: Path) -> None:
    store = FolderStore(tmp_path, timeout=600.0)
    engine = split_engine(
        course_model("draft"), EngineConfig(block_size=4, num_blocks=20), parts=Parts(page_store=store),
        make_parts=partial(Parts, page_store=store),
    )  # fmt: skip
    ask(engine)
    while engine.requests:
        engine.step()
    kill(engine.executor)
    with pytest.warns(RuntimeWarning, match="closed before all pages were saved"):
        engine.close()
    assert engine.executor._process.poll() is not None
