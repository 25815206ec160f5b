"""Parts made of a lab's functions give the texts of the engine's own, and say what is wrong with what they get."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.lab_parts import (
    AttentionByRequest,
    AttentionByTable,
    BlocksByTable,
    Draw,
    LabEngine,
    MovingClock,
    PagedQueries,
    RequestQueries,
    Round,
    SamplerBySettings,
    Speculation,
    course_llm,
    drafted_by,
    engine_draw,
    engine_probabilities,
    events_of,
    scheduler_parts,
    show_served,
    speculating,
)
from reference_impl.interfaces import Request

TEXTS = ("def add(a, b):\n", "import", "class Reader:\n    def __init__(self, path):\n        self.path =")
OPTIONS = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 8, "prefix_cache": "off"}


def texts(parts: dict[str, Any] | None = None, samples: int = 1, **changed: Any) -> dict[str, list[int]]:
    llm = course_llm("draft")
    engine = LabEngine(llm, {**OPTIONS, **changed}, unwritten=math.nan, **(parts or {}))
    for i, text in enumerate(TEXTS):
        engine.add(llm.encode(text), 6, **({"n": samples, "temperature": 1.0, "seed": i} if samples > 1 else {}))
    return engine.run()


def own_attention() -> Any:
    return course_llm("draft").engine.attention


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, num_before: int) -> torch.Tensor:
    group = q.shape[1] // keys.shape[1]
    keys, values = (t.repeat_interleave(group, dim=1) for t in (keys, values))
    hidden = torch.arange(len(keys)) > num_before + torch.arange(len(q))[:, None]
    scores = torch.einsum("ihd,jhd->hij", q, keys) * q.shape[2] ** -0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1), values)


# ---- attention ----


def test_attention_by_request_is_asked_for_each_request_with_all_its_keys() -> None:
    seen: dict[tuple[str, int], int] = {}

    def answer(asked: RequestQueries) -> torch.Tensor:
        of = asked.request_id, asked.layer
        assert asked.num_before == seen.get(of, 0)
        assert torch.equal(asked.keys[asked.num_before :], asked.k)
        assert torch.equal(asked.values[asked.num_before :], asked.v)
        assert asked.longest >= asked.num_tokens
        seen[of] = asked.num_tokens
        out = attend(asked.q, asked.keys, asked.values, asked.num_before)
        torch.testing.assert_close(out, asked.expected)
        for tensor in (asked.q, asked.k, asked.v, asked.keys, asked.values, asked.expected):
            tensor.fill_(math.nan)  # they are copies
        return out

    assert texts({"attention": AttentionByRequest(own_attention(), answer)}) == texts()
    lengths = [len(course_llm("draft").encode(text)) + 6 - 1 for text in TEXTS]
    assert seen == {(str(i), layer): n for i, n in enumerate(lengths) for layer in {of[1] for of in seen}}


def test_the_model_goes_on_with_what_attention_by_request_answers() -> None:
    zeros = AttentionByRequest(own_attention(), lambda asked: torch.zeros_like(asked.q))
    assert texts({"attention": zeros}) != texts()


def by_table(asked: PagedQueries) -> torch.Tensor:
    out = torch.empty_like(asked.q)
    for row, n in enumerate(asked.seq_lens.tolist()):
        position = torch.arange(n)
        block = asked.block_tables[row].long()[position // 4]
        keys, values = (cache[block, position % 4] for cache in (asked.key_cache, asked.value_cache))
        out[row] = attend(asked.q[row : row + 1], keys, values, n - 1)[0]
    return out


def test_attention_by_table_sees_a_row_per_token_and_where_its_keys_lie() -> None:
    checked = []

    def check_slots(table: torch.Tensor, positions: torch.Tensor, block_size: int, expected: torch.Tensor) -> None:
        slots = table.long()[positions // block_size] * block_size + positions % block_size
        assert torch.equal(slots, expected)
        checked.append(len(positions))
        for tensor in (table, positions, expected):
            tensor.fill_(0)  # they are copies

    def answer(asked: PagedQueries) -> torch.Tensor:
        out = by_table(asked)
        torch.testing.assert_close(out, asked.expected)
        for cache in (asked.key_cache, asked.value_cache, asked.q):
            cache.fill_(math.nan)
        return out

    assert texts({"attention": AttentionByTable(own_attention(), check_slots, answer)}) == texts()
    assert max(checked) > 1, "no chunk of a prompt"


# ---- blocks ----


class Pool:
    """A pool in a few lines; its blocks are handed out from the last."""

    def __init__(self, num_blocks: int):
        self.counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return self.counts.count(0)

    def ref_count(self, block: int) -> int:
        return self.counts[block]

    def allocate(self, n: int) -> list[int]:
        free = [block for block, count in enumerate(self.counts) if not count]
        assert n <= len(free)
        for block in (blocks := free[len(free) - n :]):
            self.counts[block] = 1
        return blocks

    def incref(self, ids: list[int]) -> None:
        for block in ids:
            self.counts[block] += 1

    def decref(self, ids: list[int]) -> list[int]:
        for block in ids:
            self.counts[block] -= 1
        return [block for block in ids if not self.counts[block]]


def blocks_over(pool: Pool) -> BlocksByTable:
    def append(table: list[int], num_tokens: int, num_new: int, copy: Callable[[int, int], None]) -> list[int]:
        first = num_tokens // 4
        if first < len(table) and pool.counts[table[first]] > 1:
            [own] = pool.allocate(1)
            copy(table[first], own)
            pool.decref([table[first]])
            table[first] = own
        return table + pool.allocate(max(0, -(-(num_tokens + num_new) // 4) - len(table)))

    def share(table: list[int], num_tokens: int) -> list[int]:
        shared = table[: -(-num_tokens // 4)]
        pool.incref(shared)
        return shared

    return BlocksByTable(pool, 4, append, share)


@pytest.mark.parametrize(("num_blocks", "samples"), [(24, 1), (8, 1), (30, 3)])
def test_blocks_by_table_serve_with_chunks_preemptions_and_shared_samples(num_blocks: int, samples: int) -> None:
    blocks = blocks_over(pool := Pool(num_blocks))
    more = {"num_blocks": num_blocks, "max_num_seqs": 4}
    assert texts({"block_pool": pool, "kv_manager": blocks}, samples, **more) == texts(samples=samples, **more)
    assert pool.num_free == blocks.num_available == num_blocks
    assert (blocks.num_forks > 0) == (blocks.num_copies > 0) == (samples > 1)


# ---- sampler ----


def test_a_sampler_by_settings_is_asked_once_for_rows_that_have_the_same() -> None:
    asked = []

    def draw(rows: Draw) -> list[int]:
        asked.append((rows.settings, len(rows.u)))
        tokens = [
            int(engine_draw(engine_probabilities(logits[None], *rows.settings), u[None])[0])
            for logits, u in zip(rows.logits, rows.u, strict=True)
        ]
        assert tokens == rows.expected
        return tokens

    def written(sampler: SamplerBySettings | None) -> dict[str, list[int]]:
        llm = course_llm("draft")
        engine = LabEngine(llm, OPTIONS | {"max_num_seqs": 4}, sampler=sampler)
        for i, (temperature, top_k) in enumerate(((0.8, 5), (0.0, 0), (0.8, 5))):
            engine.add(llm.encode("def add("), 4, temperature=temperature, top_k=top_k, top_p=0.9, seed=i)
        return engine.run()

    assert written(SamplerBySettings(draw)) == written(None)
    assert ((0.8, 5, 0.9), 2) in asked
    with pytest.raises(ValueError, match="zip"):
        written(SamplerBySettings(lambda rows: []))
    always = written(SamplerBySettings(lambda rows: [7] * len(rows.u)))
    assert all(tokens == [7] * 4 for tokens in always.values()), "the engine goes on with what was drawn"


# ---- schedule ----


class FirstCome:
    """A scheduler of ids and counts: chunks, one place after another, the newest goes first when there is no room."""

    def __init__(self, block_size: int = 4, seats: int = 3, budget: int = 8):
        self.block_size, self.seats, self.budget = block_size, seats, budget
        self.known: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.running: list[str] = []
        self.waiting: deque[str] = deque()
        self.plans: list[tuple[dict[str, int], list[str]]] = []

    def add(self, info: dict[str, Any]) -> None:
        assert set(info) == {"id", "num_tokens", "arrival", "priority"}
        self.known[info["id"]], self.computed[info["id"]] = info["num_tokens"], 0
        self.waiting.append(info["id"])

    def abort(self, request_id: str) -> None:
        (self.running if request_id in self.running else self.waiting).remove(request_id)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _more(self, name: str, n: int) -> int:
        return self._blocks(self.computed[name] + n) - self._blocks(self.computed[name])

    def schedule(self, now: float, free: int) -> tuple[dict[str, int], list[str]]:
        plan: dict[str, int] = {}
        preempted: list[str] = []
        budget = self.budget
        for name in list(self.running):
            if name not in self.running:
                continue
            n = min(self.known[name] - self.computed[name], budget)
            while n and self._more(name, n) > free and self.running[-1] != name:
                victim = self.running.pop()
                free += self._blocks(self.computed[victim])
                self.computed[victim] = 0
                self.waiting.appendleft(victim)
                preempted.append(victim)
            if n and self._more(name, n) <= free:
                plan[name], budget, free = n, budget - n, free - self._more(name, n)
        while self.waiting and not preempted and len(self.running) < self.seats and budget:
            name = self.waiting[0]
            if self._blocks(self.known[name]) > free:
                break
            n = min(self.known[name], budget)
            plan[name], budget, free = n, budget - n, free - self._blocks(self.known[name])
            self.running.append(self.waiting.popleft())
        self.plans.append((plan, preempted))
        return plan, preempted

    def update(self, report: dict[str, tuple[int, int, bool]]) -> None:
        for name, (computed, generated, finished) in report.items():
            self.computed[name] += computed
            self.known[name] += generated
            if finished:
                self.running.remove(name)


def with_scheduler(counting: Any, num_blocks: int = 24) -> dict[str, Any]:
    return scheduler_parts(counting, num_blocks, 4)


@pytest.mark.parametrize("num_blocks", [24, 8])
def test_a_scheduler_by_id_gives_the_texts_of_the_engines_own(num_blocks: int) -> None:
    counting = FirstCome()
    assert texts(with_scheduler(counting, num_blocks), num_blocks=num_blocks) == texts(num_blocks=num_blocks)
    assert max(sum(plan.values()) for plan, _ in counting.plans) == 8
    assert any(len(plan) == 2 for plan, _ in counting.plans)
    assert any(preempted for _, preempted in counting.plans) == (num_blocks == 8)


def test_a_scheduler_by_id_aborts_and_stops_at_a_stop_token() -> None:
    llm, counting = course_llm("draft"), FirstCome()
    alone = texts()["0"]
    engine = LabEngine(llm, OPTIONS, **with_scheduler(counting))
    engine.add(llm.encode(TEXTS[0]), 6, stop_token_ids=(alone[2],))
    engine.add(llm.encode(TEXTS[1]), 6)
    engine.add(llm.encode(TEXTS[2]), 6)
    seen = engine.run({2: "1", 5: "unknown"})
    assert seen["0"] == alone[: alone.index(alone[2]) + 1]
    assert len(seen["1"]) < 6
    assert len(seen["2"]) == 6
    kinds = [kind for _, kind, name in events_of(engine.trace) if name == "1"]
    assert kinds[-1] == "aborted"
    assert not counting.running
    assert not counting.waiting


class Says(FirstCome):
    """Plans as given."""

    def __init__(self, *answers: tuple[dict[str, int], list[str]]):
        super().__init__()
        self.answers = deque(answers)

    def schedule(self, now: float, free: int) -> tuple[dict[str, int], list[str]]:
        return self.answers.popleft()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([({"9": 1}, [])], "9 misses 0 tokens"),
        ([({"0": 100}, [])], r"plan \{'0': 100\}, preempted \[\]: 0 misses \d+ tokens"),
        ([({"0": 0}, [])], "0 misses"),
        ([({}, ["0"])], r"preempted \['0'\]: 0 does not run"),
        ([({"0": 2}, []), ({"0": 1}, ["0"])], "0 misses"),
    ],
)
def test_plans_that_name_what_they_must_not_are_refused(answers: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        texts(with_scheduler(Says(*answers)))


def test_a_plan_without_blocks_and_requests_that_cannot_be_counted_are_refused() -> None:
    llm = course_llm("draft")
    engine = LabEngine(llm, OPTIONS | {"num_blocks": 2}, **with_scheduler(Says(({"0": 4, "1": 4}, [])), 2))
    engine.add([5] * 4, 1)
    engine.add([6] * 8, 1)
    with pytest.raises(RuntimeError, match="no blocks for 4 tokens of 1"):
        engine.run()
    with pytest.raises(ValueError, match="samples, scores and embeddings need the engine's own scheduler"):
        engine.add([5, 6], 1, n=2, temperature=1.0)


# ---- speculation ----

SPECULATIVE = ({}, {"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "top_k": 20})


def speculative_texts(part: Speculation | None, num_drafts: int = 3) -> list[list[int]]:
    llm, options = course_llm("draft"), {"num_blocks": 64, "seed": 5}
    engine = speculating(llm, options, num_drafts, part) if part else LabEngine(llm, options)
    for settings in SPECULATIVE:
        engine.add(llm.encode("def add(a, b):\n    return a"), 9, **settings)
    return list(engine.run().values())


def counted(asked: Round) -> tuple[int, int]:
    """The rules again, in plain Python."""
    p, q, u = asked.p.tolist(), asked.q.tolist(), list(asked.u)
    for i, draft in enumerate(asked.drafts):
        if asked.seeded:
            if (token := inverted(p[i], u[i])) != draft:
                return i, token
        elif u[i] >= p[i][draft] / q[i][draft]:
            return i, inverted([max(a - b, 0.0) for a, b in zip(p[i], q[i], strict=True)], u[i + 1])
    return len(asked.drafts), inverted(p[-1], u[-1])


def inverted(weights: list[float], u: float) -> int:
    sums = list(itertools.accumulate(weights))
    return next(i for i, total in enumerate(sums) if total > u * sums[-1])


def last_again(request: Request, k: int) -> tuple[list[int], None]:
    return [request.tokens[-1]] * k, None


@pytest.mark.parametrize("drawn", [False, True])
def test_each_round_hands_over_distributions_numbers_and_the_engines_own_verdict(drawn: bool) -> None:
    rounds: list[Round] = []

    def judge(asked: Round) -> tuple[int, int]:
        k = len(asked.drafts)
        assert (len(asked.p), len(asked.q), len(asked.u)) == (k + 1, k, k + 1)
        torch.testing.assert_close(asked.p.sum(1), torch.ones(k + 1, dtype=torch.float64))
        torch.testing.assert_close(asked.q.sum(1), torch.ones(k, dtype=torch.float64))
        assert all(asked.q[i, draft] > 0 for i, draft in enumerate(asked.drafts))
        assert drawn or bool((asked.q.max(1).values == 1).all())
        assert counted(asked) == asked.expected
        rounds.append(asked)
        return asked.expected

    part = Speculation(drafted_by(course_llm("draft")) if drawn else last_again, judge)
    seen, plain = speculative_texts(part), speculative_texts(None)
    assert seen[:2] == plain[:2], "the text of a greedy request, and that of a seed"
    assert part.rounds == [(len(asked.drafts), asked.expected[0]) for asked in rounds]
    assert {asked.seeded for asked in rounds} == {False, True}
    assert any(kept < n for n, kept in part.rounds) != drawn, "a model that drafts for itself is always right"


def elevens(request: Request, k: int) -> tuple[list[int], None]:
    return [11] * k, None


def test_the_engine_goes_on_with_the_verdict() -> None:
    dropped = speculative_texts(part := Speculation(elevens, lambda asked: (0, 7)))
    assert all(text[1:-1] == [7] * 7 for text in dropped), "the last token is computed without a draft"
    assert part.rounds == [(min(3, left - 1), 0) for left in range(8, 1, -1) for _ in SPECULATIVE]
    kept = speculative_texts(Speculation(elevens, lambda asked: (len(asked.drafts), 7)))
    assert all(text[1:] == [11, 11, 11, 7] * 2 for text in kept), kept


@pytest.mark.parametrize("verdict", [(-1, 7), (4, 7), (0, 11), (2, 11)])
def test_a_verdict_that_no_rule_gives_is_refused(verdict: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"of the draft tokens \[11, 11, 11\] and gives token"):
        speculative_texts(Speculation(elevens, lambda asked: verdict))


def test_without_drafts_speculating_is_plain_decoding() -> None:
    def never(*asked: Any) -> Any:
        raise AssertionError("there is nothing to draft and to judge")

    assert speculative_texts(Speculation(never, never), num_drafts=0) == speculative_texts(None)


def test_what_was_served_counts_drafts_beside_the_tokens_that_were_known(capsys: pytest.CaptureFixture[str]) -> None:
    llm, part = course_llm("draft"), Speculation(elevens, lambda asked: (1, 7))
    prompt = llm.encode(TEXTS[0])
    engine = speculating(llm, OPTIONS, 2, part)
    engine.add(prompt, 8)
    engine.run()
    show_served("Served", engine, llm)
    # Behind the prompt: three rounds that keep one of two drafts, which give six tokens; the eighth has none.
    assert part.rounds == [(2, 1)] * 3
    num_steps = -(-len(prompt) // OPTIONS["max_num_batched_tokens"]) + 3 + 1
    computed = f"{len(prompt) + 3 + 1} tokens and 6 draft tokens computed"
    said = f"8 new tokens in {num_steps} steps; {computed}; at most 1 request"
    assert said in capsys.readouterr().out


# ---- the loop ----


def test_a_lab_engine_ends() -> None:
    engine = LabEngine(course_llm("draft"), OPTIONS)
    engine.add([5, 6, 7], 6)
    with pytest.raises(AssertionError, match="3 steps, and the requests are still not finished"):
        engine.run(max_steps=3)
    assert engine.num_steps == 3


def test_events_and_what_was_computed_come_from_the_trace() -> None:
    llm = course_llm("draft")
    engine = LabEngine(llm, OPTIONS | {"num_blocks": 8}, clock=MovingClock(100.0))
    for text in TEXTS:
        engine.add(llm.encode(text), 6)
    engine.run()
    events = events_of(engine.trace)
    assert [time for time, _, _ in events] == sorted(time for time, _, _ in events)
    assert events[0][0] > 100
    computed = engine.num_computed()
    for i, text in enumerate(TEXTS):
        kinds = [kind for _, kind, name in events if name == str(i)]
        assert kinds[0] == "arrived"
        assert kinds[-1] == "finished"
        assert kinds.count("token") == 6
        once = len(llm.encode(text)) + 6 - 1
        assert computed[str(i)] >= once
        assert (computed[str(i)] > once) == (kinds.count("scheduled") > 1)
    assert engine.num_preemptions == sum(kind == "scheduled" for _, kind, _ in events) - len(TEXTS) > 0
