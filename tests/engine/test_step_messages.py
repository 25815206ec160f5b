"""What an engine tells its worker, read by somebody who has only the messages.

`Mirror` keeps each slot's text and block tables as a worker would, in lists, and the engine's requests are what they
must agree with, at every step of random loads. It is a worker's twin written from the messages' docstrings alone.
"""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.core.planner import Planner
from reference_impl.features.baselines.static_batching import StaticBatching
from reference_impl.features.beams.search import beam_search
from reference_impl.interfaces import Opened, Reply, Request, Row, SamplingParams, Step, StepPlan, TableUpdate

VOCAB = 61
NAMES = ("closed", "opened", "forked", "appended", "rewound", "grown", "rewritten", "in flight")


@dataclass
class Text:
    opened: Opened
    request: Request
    tokens: list[int]  # None: sampled, and the reply is not here yet
    num_computed: int
    tables: list[list[int]]


class Mirror:
    """An executor around the engine's own that believes nothing."""

    def __init__(self, engine: Engine):
        self.engine, self.inner = engine, engine.executor
        self.max_in_flight = self.inner.max_in_flight
        self.slots: dict[int, Text] = {}
        self.seen = dict.fromkeys(NAMES, 0)
        self.largest_decode = 0  # bytes of a step in which nobody is opened
        self.largest_fork = 0  # bytes of a step that opens a slot which begins like another

    def submit(self, step: Step) -> Any:
        before = {slot: list(text.tokens) for slot, text in self.slots.items()}
        for slot in step.closed:
            del self.slots[slot]
        for new in step.opened:
            assert new.slot not in self.slots, "somebody has it"
            assert new.slot < self.engine.config.max_num_seqs
            request = self.engine.requests[new.request_id]
            assert (new.sampling, new.seed, new.sample_index, new.holds, new.num_prompt_tokens) == (
                request.sampling, request.seed, request.sample_index, request.holds, request.num_prompt_tokens,
            )  # fmt: skip
            tables: list[list[int]] = [[] for _ in request.block_tables]
            tokens = [*(before[new.fork_of[0]][: new.fork_of[1]] if new.fork_of else ()), *new.tokens]
            self.slots[new.slot] = Text(new, request, tokens, new.num_computed_tokens, tables)
            self.seen["forked"] += new.fork_of is not None
        for slot, at, tokens in step.appended:
            assert at == len(self.slots[slot].tokens)
            self.slots[slot].tokens += tokens
        for slot, num_computed in step.rewound:
            assert num_computed < self.slots[slot].num_computed
            self.slots[slot].num_computed = num_computed
        for slot, group, start, blocks in step.tables:
            table = self.slots[slot].tables[group]
            self.seen["rewritten" if start < len(table) else "grown"] += 1
            assert start <= len(table)
            table[start:] = blocks
        rows = []
        for row in step.rows:
            text = self.slots[row.slot]
            request = text.request
            assert row.start == text.num_computed
            text.num_computed += row.num_tokens
            assert text.num_computed <= len(text.tokens)
            known = [token for token in text.tokens if token >= 0]
            assert known == request.tokens[: len(known)]
            assert len(text.tokens) == request.num_tokens
            assert text.tables == request.block_tables
            self.seen["in flight"] += len(known) < len(text.tokens)
            if row.samples and not text.opened.holds:
                text.tokens.append(-1)
            rows.append(text)
        assert len({row.slot for row in step.rows}) == len(step.rows)
        for name in ("closed", "opened", "appended", "rewound"):
            self.seen[name] += len(getattr(step, name))
        if any(new.fork_of for new in step.opened):
            self.largest_fork = max(self.largest_fork, len(pickle.dumps(step)))
        if not step.opened:
            self.largest_decode = max(self.largest_decode, len(pickle.dumps(step)))
        return step, rows, self.inner.submit(pickle.loads(pickle.dumps(step)))

    def collect(self, ticket: Any) -> Reply:
        step, rows, running = ticket
        reply = self.inner.collect(running)
        assert (reply.step_id, len(reply.tokens)) == (step.step_id, len(step.rows))
        for row, text, tokens in zip(step.rows, rows, reply.tokens, strict=True):
            assert len(tokens) == row.samples
            if row.samples and not text.opened.holds:
                text.tokens[text.tokens.index(-1)] = tokens[0]
        return reply

    def close(self) -> None:
        self.inner.close()


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def mirrored(engine: Engine) -> Mirror:
    mirror = Mirror(engine)
    engine.executor = mirror
    return mirror


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "recompute": ({}, {"num_blocks": 14, "max_num_batched_tokens": 7}),
    "radix": ({}, {"prefix_cache": "radix", "num_blocks": 16}),
    "swap": ({}, {"preemption": "swap", "swap_bytes": 40_000, "num_blocks": 13, "prefix_cache": "off"}),
    "window": (
        {"architecture": "MistralForCausalLM", "sliding_window": 6},
        {"num_blocks": 14, "prefix_cache": "off", "max_num_batched_tokens": 9},
    ),
}


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_messages_alone_say_all_that_the_requests_are(kind: str, overlap: str, random_model: Callable) -> None:
    changes, options = KINDS[kind]
    model, seen = random_model("float64", **changes), dict[str, int]()
    for seed in range(6):
        rng = random.Random(seed)
        engine = Engine(model, EngineConfig(block_size=4, max_num_seqs=4, overlap=overlap, **options))
        mirror = mirrored(engine)
        for i in range(8):
            params = SamplingParams(
                max_tokens=rng.randint(1, 14), temperature=rng.choice([0.0, 1.2]), seed=i, n=rng.choice([1, 1, 2]),
                stop_token_ids=tuple(rng.sample(range(VOCAB), 6)), presence_penalty=rng.choice([0.0, 0.7]),
            )  # fmt: skip
            name = rng.choice([f"r{i}", "again"]) if "again" not in engine.requests else f"r{i}"
            engine.add(rng.choices(range(4), k=rng.randint(1, 22)), params, name)
            for _ in range(rng.randint(0, 4)):
                engine.step()
            if engine.requests and rng.random() < 0.3:
                engine.abort(rng.choice([*engine.requests]))
        while engine.has_work():
            engine.step()
        for name, count in mirror.seen.items():
            seen[name] = seen.get(name, 0) + count
        assert engine.kv.num_available == engine.num_blocks
    assert all(seen[name] for name in ("closed", "opened", "grown"))
    assert bool(seen["in flight"]) == (overlap == "on")
    assert seen["rewritten"] > 0 or kind in ("swap", "recompute")


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_of_beams_too(overlap: str, random_model: Callable) -> None:
    model = random_model("float64")
    plain = Engine(model, EngineConfig(block_size=4, num_blocks=60, max_num_seqs=4))
    expected = beam_search(plain, [1, 2, 3, 4, 5], width=3, max_tokens=9)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=60, max_num_seqs=4, overlap=overlap))
    mirror = mirrored(engine)
    found = beam_search(engine, [1, 2, 3, 4, 5], width=3, max_tokens=9)
    assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
    assert mirror.seen["appended"] > 5
    assert mirror.seen["forked"] > 5
    assert mirror.largest_decode < 1500


@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_forks_send_none_of_the_tokens_that_the_worker_has(kind: str, random_model: Callable) -> None:
    model, sizes = random_model("float64", max_position_embeddings=4096), []
    for length in (64, 3000):
        engine = Engine(model, EngineConfig(block_size=64, num_blocks=400, max_num_seqs=4, max_num_batched_tokens=4096))
        mirror = mirrored(engine)
        prompt = random.Random(1).choices(range(VOCAB), k=length)
        if kind == "beams":
            beam_search(engine, prompt, width=3, max_tokens=6)
        else:
            engine.add(prompt, SamplingParams(max_tokens=6, n=4, presence_penalty=0.5))
            run(engine)
        assert mirror.seen["forked"] >= 3
        sizes.append(mirror.largest_fork)
    assert sizes[1] < sizes[0] + 3000, "tables of 47 blocks instead of 1; the tokens would be 24,000 bytes"


def test_whoever_is_done_in_a_static_batch_is_told_only_that_it_goes_back_one_token(random_model: Callable) -> None:
    model, config = random_model("float64"), EngineConfig(block_size=4, num_blocks=60, max_num_seqs=4)
    alone = Engine(model, config)
    engine = Engine(model, config)
    engine.scheduler = StaticBatching(engine.kv, 4)
    mirror = mirrored(engine)
    for each in (alone, engine):
        for i in range(4):
            each.add([i + 1] * (3 + i), SamplingParams(max_tokens=3 + 4 * i, temperature=0, ignore_eos=True), f"r{i}")
    texts = []
    for each in (alone, engine):
        requests = list(each.requests.values())
        while each.has_work():
            each.step()
        texts.append([r.output_tokens for r in requests])
    assert texts[0] == texts[1]
    assert mirror.seen["rewound"] > 10
    assert mirror.seen["opened"] == 4


def test_a_scheduler_that_takes_blocks_away_and_does_not_say_whose_changes_no_text(random_model: Callable) -> None:
    """A learner's may forget it: whoever comes back is told to begin again, in the slot it still has."""
    config, texts = EngineConfig(block_size=4, num_blocks=8, max_num_seqs=3, prefix_cache="off"), []
    for says in (True, False):
        engine = Engine(random_model("float64"), config)
        mirror, schedule = mirrored(engine), engine.scheduler.schedule
        if not says:
            engine.scheduler.schedule = lambda now, plan=schedule: dataclasses.replace(plan(now), preempted=())
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
        requests = [engine.add([i + 1] * 7, params) for i in range(6)]
        run(engine)
        texts.append([r.output_tokens for r in requests])
    assert texts[0] == texts[1]
    assert mirror.seen["rewound"] > 0


def test_a_table_that_only_shrinks_is_told_too() -> None:
    request = Request("r", [1] * 20, 20, SamplingParams(), 0, 0.0, block_tables=[[4, 5, 6, 7, 8]])
    planner = Planner(4)
    planner.step(StepPlan(1, (Row("r", 0, 4, False),)), {"r": request})
    request.block_tables = [[4, 5]]
    step = planner.step(StepPlan(2, (Row("r", 4, 4, False),)), {"r": request})
    assert step.tables == (TableUpdate(0, 0, 2, ()),)
    with pytest.raises(IndexError, match="holds 2 blocks; its step ends at position 12"):
        planner.step(StepPlan(3, (Row("r", 8, 4, False),)), {"r": request})
