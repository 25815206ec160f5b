"""A tap on the engine: the logits of every token it computes, and a KV cache in which a stale read cannot hide."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.worker_half import make_executor
from reference_impl.core.block_pool import BlockPool
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import (
    Batch,
    Executor,
    Masks,
    Opened,
    Page,
    Request,
    SamplingParams,
    Step,
    StepRow,
    Transfers,
)
from reference_impl.interfaces.pages import page_tokens_of
from tests.executor.forked import forked_workers as forked_workers


@pytest.fixture(autouse=True)
def forked(forked_workers: None) -> None:
    """A worker's process is a fork. Started anew it is in tests/executor/test_process.py."""


def some(chosen: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """Parameters: those that are not chosen are slow."""
    assert all(each in every for each in chosen)
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=() if each in chosen else pytest.mark.slow)
        for each in every
    ]


def spread(*values: Sequence[Any]) -> list[Any]:
    """Parameters: all combinations of values, of which a tuple is several parameters. Not slow are a few that together
    have each value, as many as the longest has."""
    chosen = [tuple(each[number % len(each)] for each in values) for number in range(max(map(len, values)))]

    def flat(found: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(itertools.chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in found))

    return some([*map(flat, chosen)], [*map(flat, itertools.product(*values))])


class TappedModel:
    """The model, with a note of the logits of every token: tapped[request id][position] is a list, one per pass.

    texts: by request, its whole text; where it is given, what follows a token of another text (a wrong draft token, one
    behind a text that was stopped) is not noted.
    """

    def __init__(self, model: Decoder, texts: dict[str, list[int]] | None = None):
        self.model, self.texts = model, texts or {}
        self.tapped: dict[str, dict[int, list[torch.Tensor]]] = defaultdict(lambda: defaultdict(list))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, batch: Batch, kv_cache: Any, attention: Any) -> torch.Tensor:
        return self.model.logits(self.hidden_states(batch, kv_cache, attention))

    def hidden_states(self, batch: Batch, kv_cache: Any, attention: Any) -> torch.Tensor:
        everything = torch.arange(batch.num_tokens)
        hidden = self.model.hidden_states(dataclasses.replace(batch, logits_indices=everything), kv_cache, attention)
        logits, row = self.model.logits(hidden), 0
        for request_id, query_len in zip(batch.request_ids, batch.query_lens, strict=True):
            text = self.texts.get(request_id)
            for token in range(row, row + query_len):
                position = int(batch.positions[token])
                if text is not None and (position >= len(text) or int(batch.input_ids[token]) != text[position]):
                    break
                self.tapped[request_id][position].append(logits[token])
            row += query_len
        return hidden[batch.logits_indices]


class Oracle:
    """A proposer that reads what will be written: texts, by request. Each draft token is right with probability
    `right`, drawn by itself; behind a text's end it drafts anything."""

    def __init__(self, texts: dict[str, list[int]], right: float, vocab_size: int, seed: int = 0):
        self.texts, self.right, self.vocab_size = texts, right, vocab_size
        self.random = random.Random(seed)
        self.names: dict[int, str] = {}  # by slot
        self.k = 0  # the largest it was asked for
        self.asked: list[dict[str, int]] = []  # per call: of each request, how many drafts are right in a row

    def opened(self, slot: Opened) -> None:
        self.names[slot.slot] = slot.request_id

    def closed(self, slot: int) -> None:
        del self.names[slot]

    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
        self.k = max(self.k, k)
        asked: dict[str, int] = {}
        drafts = []
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            text = self.texts[self.names[slot]]
            assert tokens[slot, :length].tolist() == text[:length]
            truth = (text[length : length + k] + [0] * k)[:k]
            good = [self.random.random() < self.right and length + i < len(text) for i in range(k)]
            drafts.append([t if g else (t + 1) % self.vocab_size for t, g in zip(truth, good, strict=True)])
            asked[self.names[slot]] = good.index(False) if False in good else k
        self.asked.append(asked)
        return torch.tensor(drafts)


class HostOracle:
    """As `Oracle`, on the host; sometimes it has fewer drafts, or none."""

    def __init__(self, texts: dict[str, list[int]], right: float, vocab_size: int, seed: int = 0):
        self.texts, self.right, self.vocab_size = texts, right, vocab_size
        self.random = random.Random(seed)
        self.num_drafts = 0

    def propose(self, request: Request, k: int) -> list[int]:
        text, length = self.texts[request.id], len(request.tokens)
        assert request.tokens == text[:length]
        truth = (text[length : length + k] + [0] * k)[: self.random.choice([k, k, k // 2, 0])]
        self.num_drafts += len(truth)
        return [t if self.random.random() < self.right else (t + 1) % self.vocab_size for t in truth]


class FakeStore:
    """A page store that does to each transfer one of `kinds`, drawn by a seed. Time passes with `turn`.

    now, late (after some turns), never; fails, refuses (an error instead of a future); of loads also: short, flipped
    (one bit), fewer (pages), swapped (two pages), empty. lies: it says that it has everything.
    """

    timeout = 40.0

    def __init__(self, kinds: Sequence[str], seed: int = 0):
        self.kinds, self.random = kinds, random.Random(seed)
        self.contents: dict[bytes, bytes] = {}
        self.late: list[tuple[int, Callable[[], None]]] = []  # (turns left, what then happens)
        self.begun: list[str] = []  # kind of each load

    def num_stored(self, keys: Sequence[bytes]) -> int:
        if "lies" in self.kinds and self.random.random() < 0.5:
            return len(keys)
        return next((i for i, key in enumerate(keys) if key not in self.contents), len(keys))

    def turn(self) -> None:
        self.late = [(left - 1, act) for left, act in self.late]
        due = [act for left, act in self.late if left <= 0]
        self.late = [(left, act) for left, act in self.late if left > 0]
        for act in due:
            act()

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[bytes]]:
        kind = self.random.choice(self.kinds)
        self.begun.append(kind)
        return self.answer(kind, lambda: self.spoil(kind, [self.contents[key] for key in keys]))

    def save(self, pages: Mapping[bytes, bytes]) -> Future[None]:
        return self.answer(self.random.choice(self.kinds), lambda: self.contents.update(pages))

    def spoil(self, kind: str, pages: list[bytes]) -> list[bytes]:
        at = self.random.randrange(len(pages))
        page = pages[at]
        if kind == "short":
            pages[at] = page[: self.random.randrange(len(page))]
        elif kind == "flipped":
            bit = self.random.randrange(8 * len(page))
            pages[at] = page[: bit // 8] + bytes([page[bit // 8] ^ 1 << bit % 8]) + page[bit // 8 + 1 :]
        elif kind == "fewer":
            del pages[at]
        elif kind == "swapped":
            pages.reverse()  # one page alone stays right
        elif kind == "empty":
            pages[at] = b""
        return pages

    def answer(self, kind: str, what: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()

        def act() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(what())
            except Exception as error:
                future.set_exception(error)

        if kind == "refuses":
            raise ConnectionError("the store is closed")
        if kind == "fails":
            future.set_exception(TimeoutError("no answer"))
        elif kind == "late":
            self.late.append((self.random.randint(1, 6), act))
        elif kind != "never":
            act()
        return future


class FakeLayeredStore(FakeStore):
    """The same, one layer at a time: of each layer another of `kinds`, and also repeated (the layer before)."""

    def __init__(self, kinds: Sequence[str], seed: int = 0):
        super().__init__(kinds, seed)
        self.layers: dict[tuple[bytes, int], bytes] = {}
        self.calls: list[tuple[str, int]] = []
        self.next_kinds: list[str] = []  # of the loads that come next; then they are drawn

    load = save = None  # type: ignore[assignment]

    @property
    def num_layers(self) -> int:
        return 1 + max((layer for _, layer in self.calls), default=0)

    def num_stored(self, keys: Sequence[bytes]) -> int:
        self.contents = {k: b"" for k, _ in self.layers if all((k, i) in self.layers for i in range(self.num_layers))}
        return super().num_stored(keys)

    def load_layer(self, keys: Sequence[bytes], layer: int) -> Future[Sequence[bytes]]:
        kind = self.next_kinds.pop(0) if self.next_kinds else self.random.choice(self.kinds)
        self.begun.append(kind)
        self.calls.append(("load", layer))
        asked = max(0, layer - 1) if kind == "repeated" else layer
        return self.answer(kind, lambda: self.spoil(kind, [self.layers[key, asked] for key in keys]))

    def save_layer(self, pages: Mapping[bytes, bytes], layer: int) -> Future[None]:
        self.calls.append(("save", layer))
        new = {(key, layer): content for key, content in pages.items()}
        return self.answer(self.random.choice(self.kinds), lambda: self.layers.update(new))


class CountingClock:
    """A second passes whenever it is looked at, so that nothing depends on how fast a machine is."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time


SWAP_BYTES = 2**18  # more than the blocks of a test's requests; poisoned before each step, as all that nobody owns


class ShuffledPool(BlockPool):
    """Hands out blocks in a random order."""

    def __init__(self, num_blocks: int, seed: int):
        super().__init__(num_blocks)
        self.random = random.Random(seed)
        self.random.shuffle(self._free)

    def decref(self, ids: Sequence[int]) -> list[int]:
        freed = super().decref(ids)
        self.random.shuffle(self._free)
        return freed


def draft_of(engine: Engine) -> Any:
    """The draft model of the engine's worker, if it has one."""
    return getattr(getattr(engine.executor, "inner", engine.executor), "draft", None)


def poison_free_blocks(engine: Engine) -> None:
    """From now on a block that nobody owns when a step begins to write holds NaN, and host memory likewise; in the
    cache of a draft model, too."""
    draft = draft_of(engine)
    _poison(engine, engine.kv_cache, engine.attention)
    if draft is not None and draft.own_cache is not None:
        _poison(engine, draft.own_cache, draft.attention)


def _poison(engine: Engine, cache: Any, attention: Any) -> None:
    def spoil(tensors: Sequence[torch.Tensor], blocks: list[int]) -> None:
        for of_blocks in tensors:
            of_blocks[blocks] = torch.nan if of_blocks.is_floating_point() else 0x5A

    def poison() -> None:
        spoil(cache.blocks, [b for b in range(engine.num_blocks) if engine.block_pool.ref_count(b) == 0])
        if engine.num_host_blocks:
            pool = engine.kv.host.pool
            spoil(cache.host.host, [b for b in range(engine.num_host_blocks) if pool.ref_count(b) == 0])

    spoil(cache.blocks, list(range(engine.num_blocks)))
    if engine.num_host_blocks:
        spoil(cache.host.host, list(range(engine.num_host_blocks)))
    before_writing(cache, attention, poison)


def before_writing(cache: Any, attention: Any, act: Callable[[], None]) -> None:
    """From now on acts after each step's transfers, and before it writes: not every step has transfers."""
    transfer, plan = cache.transfer, attention.plan

    def transfer_and_act(transfers: Any) -> None:
        transfer(transfers)
        act()

    def act_and_plan(batch: Any) -> None:
        act()
        plan(batch)

    cache.transfer, attention.plan = transfer_and_act, act_and_plan


class LateExecutor:
    """The engine's own executor on a slow device: a step runs at some moment between its submission and its collection,
    which is all that the interface promises. Whatever is taken out of its hands too early is seen: a block that a step
    of it uses must keep an owner, and nobody but that owner may write to it."""

    max_in_flight = 2

    def __init__(self, engine: Engine, seed: int):
        self.engine, self.inner, self.random = engine, engine.executor, random.Random(seed)
        self.requests: dict[int, Request] = {}  # by slot
        self.waiting: list[dict[str, Any]] = []  # submitted, not run
        self.in_flight: list[dict[str, Any]] = []  # submitted, not collected
        # Tokens that the host did not know when a step was submitted; of those that it computes, and throws out.
        self.num_unknown = self.num_preempted_unknown = 0
        self.pages: dict[int, set[Page]] = {}  # of loads and saves that have not ended

    def submit(self, step: Step) -> dict[str, Any]:
        self.num_preempted_unknown += sum(self.requests[slot].num_in_flight for slot in step.closed)
        self.requests.update((new.slot, self.engine.requests[new.request_id]) for new in step.opened)
        rows = [(row, self.requests[row.slot]) for row in step.rows]
        self.pages.update((t.id, set(t.pages)) for t in (*step.transfers.loads, *step.transfers.saves))
        self.check_blocks(rows, step.transfers)
        self.num_unknown += sum(request.num_in_flight for _, request in rows)
        # As it would come through a pipe: what the engine does with its requests meanwhile cannot be seen in it.
        running = {"step": pickle.loads(pickle.dumps(step)), "requests": {r.id: r for _, r in rows}, "masks": None}
        running["blocks"] = {r.id: [b for t in r.block_tables for b in t if b >= 0] for _, r in rows}
        for each in (self.waiting, self.in_flight):
            each.append(running)
        self.run(self.random.randint(0, len(self.waiting)))
        return running

    def run(self, count: int) -> None:
        """Up to a step whose masks have not come."""
        for running in self.waiting[:count]:
            if "ticket" not in running:
                running["ticket"] = self.inner.submit(running["step"])
            if running["step"].takes_masks:
                if running["masks"] is None:
                    return
                self.inner.finish(running["ticket"], running["masks"])
            self.waiting.remove(running)

    def show_drafts(self, running: dict[str, Any], ask: Any) -> Any:
        self.run(self.waiting.index(running) + 1)
        return pickle.loads(pickle.dumps(self.inner.show_drafts(running["ticket"], ask)))

    def finish(self, running: dict[str, Any], masks: Masks) -> None:
        assert running is self.in_flight[-1], "a step was submitted before this one had its masks"
        running["masks"] = pickle.loads(pickle.dumps(masks))
        self.run(self.random.randint(0, len(self.waiting)))

    def collect(self, running: dict[str, Any]) -> Any:
        assert running is self.in_flight[0], "collected out of order"
        if running in self.waiting:
            self.run(self.waiting.index(running) + 1)
        self.run(self.random.randint(0, len(self.waiting)))
        reply = self.inner.collect(running["ticket"])
        self.check_owners()  # still: it is collected only when this returns
        self.in_flight.pop(0)
        for end in reply.transfers:
            self.pages.pop(end.id, None)  # one that ends while it is being cancelled ends twice
        return reply

    def close(self) -> None:
        self.inner.close()

    def check_owners(self) -> None:
        for step in self.in_flight:
            for name, blocks in step["blocks"].items():
                free = [b for b in blocks if self.engine.block_pool.ref_count(b) == 0]
                assert not free, f"blocks {free} of {name!r} were freed while its step runs"

        under_way = {page.block for pages in self.pages.values() for page in pages}
        assert all(self.engine.block_pool.ref_count(b) for b in under_way), "a transfer's blocks were freed"

    def check_blocks(self, rows: list[tuple[StepRow, Request]], transfers: Transfers) -> None:
        """No row of the step, and no transfer, writes where a running step of another request reads or writes."""
        self.check_owners()
        size = self.engine.config.block_size
        for row, request in rows:
            written = {t[p // size] for t in request.block_tables for p in range(row.start, row.start + row.length)}
            # Of a block that is not full its full pages may be under way; the rows that fill it write behind them.
            each = page_tokens_of(size)
            places = range(row.start, row.start + row.length)
            parts = {(t[p // size], p % size // each) for t in request.block_tables for p in places}
            under_way = {(page.block, page.part) for pages in self.pages.values() for page in pages}
            assert not parts & under_way, "a row writes to pages under way"
            for step in self.in_flight:
                for name, blocks in step["blocks"].items():
                    other = step["requests"][name] is not request
                    assert not (other and written & set(blocks)), f"{request.id!r} writes to a block of {name!r}"
        targets = {pair.dst for pair in (*transfers.copies, *transfers.swap_in)}
        for step in self.in_flight:
            for name, blocks in step["blocks"].items():
                assert not targets & set(blocks), f"a transfer writes to a block of {name!r}"


class StagedExecutor(LateExecutor):
    """An executor that runs stages, as late as it may: a step is computed when it is collected, and then those behind
    it still wait. What it samples is in its slot before that is allowed; so rows are looked at as they come."""

    max_in_flight = 1
    follows_options = True  # the inner one is made with them
    show_drafts = None  # drafts are made when a step is collected, so that the host cannot see them before

    def __init__(self, num_stages: int):
        self.num_stages = num_stages
        self.most_in_flight = 0

    def serve(self, engine: Engine, inner: Executor) -> None:
        super().__init__(engine, 0)
        self.inner = inner

    def submit(self, step: Step) -> dict[str, Any]:
        assert len(self.in_flight) < self.num_stages, "more steps than stages"
        running = super().submit(step)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        self.check_tokens(running)
        return running

    def check_tokens(self, running: dict[str, Any]) -> None:
        """All tokens of its rows are known to the host, and none of their requests waits for another."""
        for row in running["step"].rows:
            request = self.requests[row.slot]
            assert row.start + row.num_tokens <= len(request.tokens), f"{request.id!r} has no such token yet"
            for step in self.in_flight[:-1]:
                sampling = [name for name, r in zip(step["requests"], step["step"].rows, strict=True) if r.samples]
                same = step["requests"].get(request.id) is request and request.id in sampling
                assert request.holds or not same, f"{request.id!r} waits for a token of a step in flight"

    def run(self, count: int) -> None:
        """Only what is waited for."""

    def collect(self, running: dict[str, Any]) -> Any:
        super().run(1)
        return super().collect(running)


def make_late(engine: Engine, seed: int) -> LateExecutor:
    """From now on the engine, made with overlap="on", waits for a slow device."""
    assert engine.overlaps
    late = LateExecutor(engine, seed)
    engine.executor = late
    return late


def check_references(engine: Engine) -> None:
    """Every reference to a block, on the device and on the host, has its holder."""
    kv, pool = engine.kv, engine.block_pool
    held, on_host = Counter(kv.references.indexed), Counter[int]()
    for request in engine.requests.values():
        held.update(block for table in request.block_tables for block in table)
    for transfer in getattr(kv, "_transfers", {}).values():
        held.update(transfer.blocks)
    for _, blocks in kv.references.releasing:
        held.update(blocks)
    assert [pool.ref_count(block) for block in range(engine.num_blocks)] == [held[b] for b in range(engine.num_blocks)]
    if engine.num_host_blocks:
        on_host.update(b for ts in kv.on_host.values() for t in ts for b in t)
        for _, blocks in kv.host.releasing:
            on_host.update(blocks)
        every = range(engine.num_host_blocks)
        assert [kv.host.pool.ref_count(block) for block in every] == [on_host[block] for block in every]


def staged(model: Decoder, num_stages: int, parts: Parts | None = None, **options: Any) -> Engine:
    """An engine whose executor runs stages, around the one that it would have made."""
    parts, executor = parts or Parts(), StagedExecutor(num_stages)
    outer = dataclasses.replace(parts, executor=executor, proposer=None, draft_model=None, sampler=None)
    engine = Engine(model, EngineConfig(**options), outer)
    executor.serve(engine, make_executor(engine, parts))
    return engine


@pytest.fixture(scope="module")
def target(random_model: Callable) -> Any:
    """The model that verifies drafts."""
    return random_model("float64", max_position_embeddings=128)


@pytest.fixture(scope="module")
def windowed(random_model: Callable) -> Any:
    """Two KV groups: layers that keep everything, 0 and 1, and layers with a window, 2 and 3."""
    return random_model(
        "float64", max_position_embeddings=128, num_hidden_layers=4, use_sliding_window=True, sliding_window=9,
        max_window_layers=2,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tapped_engine() -> Callable[..., tuple[Engine, dict[str, dict[int, list[torch.Tensor]]]]]:
    """tapped_engine(model, seed, parts, **engine options) -> (engine, its logits).

    Blocks come in an order that depends on the seed, and a block that nobody owns holds NaN. late: overlapped, on a
    device that is late by this seed. stages: by an executor that runs so many (`StagedExecutor`).
    """

    def make(
        model: Decoder,
        seed: int = 0,
        parts: Parts | None = None,
        late: int | None = None,
        texts: dict[str, list[int]] | None = None,
        stages: int | None = None,
        **options: Any,
    ) -> tuple[Engine, Any]:
        tap = TappedModel(model, texts)
        options = {"swap_bytes": SWAP_BYTES, **options}
        options["overlap"] = "off" if late is None and stages is None else "on"
        parts = dataclasses.replace(parts or Parts(), block_pool=ShuffledPool(options["num_blocks"], seed))
        if stages is not None:
            engine = staged(tap, stages, parts, **options)  # type: ignore[arg-type]
        else:
            engine = Engine(tap, EngineConfig(**options), parts)  # type: ignore[arg-type]
        poison_free_blocks(engine)
        if late is not None:
            make_late(engine, late)
        return engine, tap.tapped

    return make


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(scope="session")
def late_engine() -> Callable[..., Engine]:
    """late_engine(model, seed, parts, **engine options): overlapped on a late device; seed None: it waits for each
    step."""

    def make(model: Decoder, seed: int | None, parts: Parts | None = None, **options: Any) -> Engine:
        engine = Engine(model, EngineConfig(overlap="off" if seed is None else "on", **options), parts)
        if seed is not None:
            make_late(engine, seed)
        return engine

    return make


@pytest.fixture(scope="session")
def one_shot() -> Callable[[Decoder, Sequence[int]], torch.Tensor]:
    """Logits [len(tokens), vocab_size] of a sequence alone, in one pass, without a cache."""
    from reference_impl.features.baselines.no_cache import RecomputeAttention
    from reference_impl.features.baselines.ragged import ragged_batch

    def logits(model: Decoder, tokens: Sequence[int]) -> torch.Tensor:
        c = model.config
        batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
        batch.logits_indices = torch.arange(len(tokens))
        with torch.inference_mode():
            return model(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))

    return logits


@pytest.fixture(scope="session")
def pooled_alone() -> Callable[[Decoder, Sequence[int], str], torch.Tensor]:
    """[hidden_size] of a prompt alone, in one pass, without a cache: the mean, or the last token's."""
    from reference_impl.features.baselines.no_cache import RecomputeAttention
    from reference_impl.features.baselines.ragged import ragged_batch

    def pooled(model: Decoder, tokens: Sequence[int], pooling: str) -> torch.Tensor:
        c = model.config
        batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
        batch.logits_indices = torch.arange(len(tokens))
        with torch.inference_mode():
            hidden = model.hidden_states(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))
        return hidden.mean(0) if pooling == "mean" else hidden[-1]

    return pooled


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., list[int]]:
    """Output tokens of one request that has an engine to itself and reads its prompt at once."""

    def run(model: Decoder, prompt: list[int], sampling: SamplingParams) -> list[int]:
        engine = Engine(model, EngineConfig(block_size=128, num_blocks=1))
        request = engine.add(prompt, sampling)
        while engine.has_work():
            engine.step()
        return request.output_tokens

    return run


class OwnCache:
    """A cache that holds nothing, for engines that are made and not run."""

    def unused(self, *_: Any) -> Any:
        raise AssertionError("this engine was not to run a step")

    write = layer = transfer = unused
