"""Speculative decoding through an oracle: a proposer that reads the recorded text, and errs as often as it shall.

Whatever it drafts, the text is that of plain decoding; and exactly the drafts are kept that are right, up to the
first that is not.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.planner import Planner
from reference_impl.core.scheduler import Scheduler
from reference_impl.interfaces import Request, Row, Sampled, SamplingParams, StepPlan
from reference_impl.observe.timeline import lives
from reference_impl.observe.trace import RequestFinished
from tests.engine.conftest import HostOracle, some

VOCAB = 61
ASKED: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=40, temperature=0),
    "drawn": SamplingParams(max_tokens=33, seed=7, logprobs=3),
    "filtered": SamplingParams(max_tokens=25, seed=8, temperature=1.4, top_k=9, top_p=0.9, min_p=0.01),
    "penalised": SamplingParams(
        max_tokens=30, temperature=0, repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.4
    ),
    "drawn, penalised": SamplingParams(max_tokens=30, seed=3, presence_penalty=1.2, logprobs=1),
    "short": SamplingParams(max_tokens=2, seed=9),
    "biased": SamplingParams(max_tokens=30, temperature=0, logit_bias={t: t % 5 / 2 for t in range(VOCAB)}),
    "drawn, all 30": SamplingParams(
        max_tokens=30, seed=4, min_tokens=30, stop_token_ids=tuple(range(0, VOCAB, 3)), logit_bias={1: 2.0}
    ),
}


def prompt(name: str) -> list[int]:
    return random.Random(name).choices(range(VOCAB), k=5 + len(name))


def serve(engine: Engine, asked: dict[str, SamplingParams]) -> dict[str, Request]:
    requests = {name: engine.add(prompt(name), sampling, name) for name, sampling in asked.items()}
    while engine.has_work():
        engine.step()
    return requests


@pytest.fixture(scope="module")
def model(random_model: Callable) -> Any:
    return random_model("float64", max_position_embeddings=128)


@pytest.fixture(scope="module")
def plain(model: Any) -> dict[str, Request]:
    found = {}
    for name, sampling in ASKED.items():
        found |= serve(Engine(model, EngineConfig(num_blocks=32)), {name: sampling})
    return found


@pytest.fixture(scope="module")
def texts(plain: dict[str, Request]) -> dict[str, list[int]]:
    return {name: request.tokens for name, request in plain.items()}


def kept_of(engine: Engine) -> list[dict[str, tuple[int, int]]]:
    """Per step with drafts, of each request that has any: (how many are kept, how many there were). Without those that
    had ended by then."""
    found = []
    for step in engine.trace.steps():
        rows = [(row, new) for row, new in zip(step.rows, step.num_new_tokens, strict=True) if row.num_drafts]
        if rows:
            found.append({row.request_id: (new - 1, row.num_drafts) for row, new in rows if new})
    return found


def check_kept(engine: Engine, wise: Any) -> list[int]:
    """Of the drafts of each row exactly those that the oracle knows to be right are kept: how many, row by row."""
    lengths = []
    for kept, right in zip(kept_of(engine), wise.asked, strict=True):
        for name, (num, drafts) in kept.items():
            assert num == min(right[name], drafts)
            if drafts == wise.k:
                lengths.append(num)
    return lengths


@pytest.mark.parametrize(
    ("right", "k", "late"),
    some(
        [(0.0, 3, 1), (0.5, 1, 2), (0.5, 6, None), (1.0, 4, 2)],
        [(right, k, late) for right, k in [(0.0, 3), (0.5, 1), (0.5, 6), (1.0, 4)] for late in (None, 1, 2)],
    ),
)
def test_the_text_is_that_of_plain_decoding_and_exactly_the_right_drafts_are_kept(
    model, plain, texts, oracle, tapped_engine, right: float, k: int, late: int | None
) -> None:
    wise = oracle(texts, right, VOCAB, seed=k)
    engine, _ = tapped_engine(
        model, parts=Parts(proposer=wise), late=late, num_drafts=k, num_blocks=60, block_size=4, max_num_seqs=4
    )
    requests = serve(engine, ASKED)
    for name, request in requests.items():
        assert request.tokens == plain[name].tokens, name
        assert [r.token for r in request.logprobs] == [r.token for r in plain[name].logprobs]
        for mine, its in zip(request.logprobs, plain[name].logprobs, strict=True):
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-5)
        assert len(engine.trace.token_times(name)) == len(request.output_tokens)
    assert engine.kv.num_available == engine.num_blocks
    lengths = check_kept(engine, wise)
    assert len(lengths) > 20
    assert (max(lengths) > 0) == (right > 0)
    assert right < 1 or min(lengths) == k


@pytest.mark.parametrize("late", [None, 5])
def test_the_lengths_that_are_kept_are_distributed_as_they_must_be(
    model, oracle, tapped_engine, late: int | None
) -> None:
    """P(j of k are kept) = p^j (1 - p), and p^k that all are; and each time as many as the oracle knows to be right."""
    k, p = 3, 0.5
    asked = {f"q{i}": SamplingParams(max_tokens=100, seed=i) for i in range(4)}
    texts = {name: request.tokens for name, request in serve(Engine(model, EngineConfig(num_blocks=64)), asked).items()}
    wise = oracle(texts, p, VOCAB)
    engine, _ = tapped_engine(model, parts=Parts(proposer=wise), late=late, num_drafts=k, num_blocks=64)
    requests = serve(engine, asked)
    assert {name: r.tokens for name, r in requests.items()} == texts
    lengths = Counter(check_kept(engine, wise))
    total = sum(lengths.values())
    expected = [total * p**j * (1 - p) for j in range(k)] + [total * p**k]
    chi2 = sum((lengths[j] - e) ** 2 / e for j, e in enumerate(expected))
    assert total > 150
    assert chi2 < 16.3  # 3 degrees of freedom: one draw in a thousand is beyond; the seed is fixed


def test_a_perfect_oracle_takes_a_step_for_every_k_plus_one_tokens(model, texts, oracle) -> None:
    engine = Engine(
        model,
        EngineConfig(num_blocks=32, num_drafts=3),
        Parts(proposer=oracle({"greedy": texts["greedy"]}, 1.0, VOCAB)),
    )
    serve(engine, {"greedy": ASKED["greedy"]})
    given = [sum(step.num_new_tokens) for step in engine.trace.steps()]
    assert given == [1, *[4] * 9, 3]  # the prompt gives one; of the 39 others the last three


def test_a_sampler_that_is_asked_sees_the_drafts_as_if_they_were_written(model, plain, texts, oracle) -> None:
    seen: list[tuple[str, int]] = []

    def mine(logits: torch.Tensor, requests: Sequence[Any]) -> Sampled:
        seen.extend((request.id, len(request.tokens)) for request in requests)
        return sample(logits, requests)

    parts = Parts(sampler=mine, proposer=oracle(texts, 0.5, VOCAB))
    engine = Engine(model, EngineConfig(num_blocks=64, num_drafts=3), parts)
    for name, request in serve(engine, ASKED).items():
        assert request.tokens == plain[name].tokens
    assert {length for name, length in seen if name == "greedy"} == set(
        range(len(prompt("greedy")), len(texts["greedy"]))
    )


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("late", [None, 3])
def test_preempted_and_aborted_with_drafts_in_flight(
    model, plain, texts, oracle, tapped_engine, preemption: str, late: int | None
) -> None:
    engine, _ = tapped_engine(
        model, parts=Parts(proposer=oracle(texts, 0.7, VOCAB)), late=late, num_drafts=4, block_size=4, num_blocks=22,
        preemption=preemption, max_num_batched_tokens=24,
    )  # fmt: skip
    requests = {name: engine.add(prompt(name), sampling, name) for name, sampling in ASKED.items()}
    for number in itertools.count():
        if not engine.has_work():
            break
        if number == 6:
            engine.abort("drawn")
        engine.step()
    assert any(step.preempted for step in engine.trace.steps())
    for name, request in requests.items():
        written = plain[name].tokens
        assert request.tokens == (written[: request.num_tokens] if name == "drawn" else written)
    assert engine.kv.num_available == engine.num_blocks


def test_a_step_that_reaches_both_a_stop_string_and_the_limit_ends_with_the_first(oracle) -> None:
    """What the trace says of the end, too: reason and tokens, and when each came."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32}
    text = "def add(self, left, right):\n    return"
    usual = LLM(course_model("draft"), **options)
    free = usual.generate(text, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))[0]
    stop = usual.tokenizer.decode(free.token_ids[5:7]).strip() or "\n"
    sampling = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, stop=stop)
    expected = usual.generate(text, sampling)[0]
    wise = oracle({"0": [*free.prompt_token_ids, *free.token_ids]}, 1.0, 10**6)
    llm = LLM(course_model("draft"), parts=Parts(proposer=wise), num_drafts=8, **options)
    found = llm.generate(text, sampling)[0]
    assert max(max(step.num_new_tokens) for step in llm.engine.trace.steps()) == 8, "all in one step"
    assert (found.token_ids, found.finish_reason) == (expected.token_ids, "stop")
    assert len(found.token_ids) < 9
    (finished,) = [event for event in llm.engine.trace.events if isinstance(event, RequestFinished)]
    assert (finished.reason, finished.num_output_tokens) == ("stop", len(expected.token_ids))
    assert len(llm.engine.trace.token_times("0")) == len(expected.token_ids) == found.metrics.num_output_tokens
    (life,) = lives(llm.engine.trace.events)
    assert len(life.token_times) == len(expected.token_ids)


@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("overlap", ["off", "on"])
def test_what_a_step_gives_behind_a_stop_string_or_an_end_token_is_nobodys(oracle, stops: bool, overlap: str) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32}
    text = "def add(self, left, right):\n    return"
    usual = LLM(course_model("draft"), **options)
    free = usual.generate(text, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))[0]
    end = free.token_ids[6]
    stop = usual.tokenizer.decode(free.token_ids[5:7]).strip() or "\n"
    sampling = SamplingParams(
        max_tokens=40,
        temperature=0,
        ignore_eos=True,
        logprobs=1,
        **({"stop": stop} if stops else {"stop_token_ids": (end,)}),
    )
    expected = usual.generate(text, sampling)[0]
    assert expected.finish_reason == "stop"
    tokens = [*free.prompt_token_ids, *free.token_ids]
    for k in (1, 2, 3, 7, 20):
        names = {str(i): tokens for i in range(3)}
        llm = LLM(
            course_model("draft"),
            parts=Parts(proposer=oracle(names, 1.0, 10**6)),
            num_drafts=k,
            overlap=overlap,
            **options,
        )
        for found in (llm.generate(text, sampling)[0], llm.generate(text, sampling)[0]):  # again, from the cache
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert found.finish_reason == "stop"
            assert [r.token for r in found.logprobs] == expected.token_ids
            assert found.metrics.num_output_tokens == len(expected.token_ids)
        assert "".join(llm.stream(text, sampling)) == expected.text
        assert llm.engine.kv.num_available == llm.engine.num_blocks


def test_samples_share_a_prompt_and_each_has_drafts_of_its_own(model, oracle, tapped_engine) -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, n=3)
    one = Engine(model, EngineConfig(num_blocks=64))
    first = one.add(prompt("shared"), sampling, "a")
    members = [first, *first.children]
    while one.has_work():
        one.step()
    texts = {member.id: member.tokens for member in members}
    for late in (None, 4):
        engine, _ = tapped_engine(
            model, parts=Parts(proposer=oracle(texts, 0.6, VOCAB)), late=late, num_drafts=3, num_blocks=64, block_size=4
        )
        again = engine.add(prompt("shared"), sampling, "a")
        mine = [again, *again.children]
        while engine.has_work():
            engine.step()
        assert {member.id: member.tokens for member in mine} == texts
        assert any(len(kept) == 3 for kept in kept_of(engine))


@pytest.mark.parametrize("late", [None, 1, 2])
def test_the_trace_says_where_each_row_began(model, texts, oracle, tapped_engine, late: int | None) -> None:
    """Also of rows that were planned before it was known how many drafts of the step before are right."""
    engine, _ = tapped_engine(
        model, parts=Parts(proposer=oracle(texts, 0.5, VOCAB)), late=late, num_drafts=4, num_blocks=64
    )
    serve(engine, {name: ASKED[name] for name in ("greedy", "drawn")})
    for name in ("greedy", "drawn"):
        length = 0
        for step in engine.trace.steps():
            for row, new in zip(step.rows, step.num_new_tokens, strict=True):
                if row.request_id == name and new:
                    length = length or len(prompt(name))
                    assert row.start + row.num_tokens == length
                    length += new
        assert length == len(texts[name])


def test_held_requests_and_prompts_with_samples_to_fork_have_no_drafts(model, oracle) -> None:
    class Any7:
        def opened(self, slot: Any) -> None: ...
        def closed(self, slot: int) -> None: ...
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            return torch.full((len(slots), k), 7)

    options = EngineConfig(num_blocks=64, block_size=4, num_drafts=3)
    engine = Engine(model, options, Parts(proposer=Any7()))
    held = engine.add(prompt("held"), SamplingParams(max_tokens=5, temperature=0), "held", holds=True)
    for token in (1, 2, 3):
        engine.step()
        engine.append("held", token)
    assert held.output_tokens == [1, 2, 3]
    engine.abort("held")
    # One token of a prompt is left to compute, as of a request that decodes: all others were found in the cache.
    whole = prompt("samples")[:9]
    assert len(whole) == 9
    serve_one = SamplingParams(max_tokens=4, seed=1, n=3)
    for name in ("first", "second"):
        first = engine.add(whole, serve_one, name)
        members = [first, *first.children]
        while engine.has_work():
            engine.step()
        if name == "first":
            texts = [member.output_tokens for member in members]
        assert [member.output_tokens for member in members] == texts
    ends = [
        row
        for step in engine.trace.steps()
        for row in step.rows
        if row.request_id in ("second", "held") and row.start + row.num_tokens <= 9
    ]
    assert any(row.request_id == "second" and (row.start, row.num_tokens) == (8, 1) for row in ends)
    assert not any(row.num_drafts for row in ends)


# --- what is refused -------------------------------------------------------------------------------------------------


def test_drafts_without_a_proposer_and_a_proposer_without_drafts_are_refused(model, oracle) -> None:
    wise = oracle({}, 1.0, VOCAB)
    with pytest.raises(ValueError, match=r"num_drafts=2 needs a proposer: pass Parts\(proposer=...\) or "):
        Engine(model, EngineConfig(num_blocks=8, num_drafts=2))
    with pytest.raises(ValueError, match="Parts.proposer is given, and num_drafts is 0"):
        Engine(model, EngineConfig(num_blocks=8), Parts(proposer=wise))
    own = Engine(model, EngineConfig(num_blocks=8))
    with pytest.raises(ValueError, match="num_drafts=2 is for the engine's own scheduler"):
        Engine(
            model, EngineConfig(num_blocks=8, num_drafts=2),
            Parts(proposer=wise, scheduler=Scheduler(own.kv, 4, 64), kv_manager=own.kv),
        )  # fmt: skip
    with pytest.raises(ValueError, match="Parts.proposer is for the engine's own executor"):
        Engine(model, EngineConfig(num_blocks=8, num_drafts=2), Parts(proposer=wise, executor=own.executor))
    with pytest.raises(ValueError, match="EngineConfig.num_drafts: expected an integer of at least 0, got -1"):
        EngineConfig(num_drafts=-1)


def test_a_proposer_of_another_shape_and_a_worker_without_one_say_so(model, texts) -> None:
    class Short:
        def opened(self, slot: Any) -> None: ...
        def closed(self, slot: int) -> None: ...
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            return torch.zeros(len(slots), k - 1, dtype=torch.int64)

    engine = Engine(model, EngineConfig(num_blocks=8, num_drafts=3), Parts(proposer=Short()))
    engine.add(prompt("greedy"), SamplingParams(max_tokens=9, seed=1))
    engine.step()  # reads the prompt
    with pytest.raises(ValueError, match=r"propose: expected 3 tokens for each of 1 rows, \[1, 3\], got \[1, 2\]"):
        engine.step()
    worker = Engine(model, EngineConfig(num_blocks=8)).executor
    request = Request("a", [1, 2], 1, SamplingParams(), 0, 0.0, num_computed_tokens=1, block_tables=[[0]])
    opened = Planner(16).step(StepPlan(1, (Row("a", 1, 1, True, 2),)), {"a": request})
    with pytest.raises(ValueError, match="step 1 has rows with drafts; this worker has no proposer"):
        worker.submit(opened)
    assert [row.length for row in opened.rows] == [3]


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (lambda rows, k: torch.full((rows, k), 0.5), r"expected tokens, which are int64, on cpu; got torch.float32"),
        (lambda rows, k: torch.ones(rows, k, dtype=torch.bool), "got torch.bool on cpu"),
        (lambda rows, k: torch.zeros(rows, k, dtype=torch.int64, device="meta"), "got torch.int64 on meta"),
    ],
)
def test_drafts_that_are_no_tokens_or_lie_elsewhere_are_refused(model, draft, message: str) -> None:
    class Drafts(Silent):
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            found: torch.Tensor = draft(len(slots), k)
            return found

    engine = Engine(model, EngineConfig(num_blocks=8, num_drafts=3), Parts(proposer=Drafts()))
    engine.add(prompt("greedy"), SamplingParams(max_tokens=9, seed=1))
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.step()


class Silent:
    def opened(self, slot: Any) -> None: ...
    def closed(self, slot: int) -> None: ...


def test_what_a_proposer_writes_into_what_it_is_given_is_no_text(model, texts) -> None:
    class Scribbles(Silent):
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            found = tokens[slots, lengths - 1].long()[:, None].expand(-1, k).clone()
            tokens.fill_(3)
            lengths.fill_(1)
            slots.fill_(0)
            return found

    engine = Engine(model, EngineConfig(num_blocks=64, num_drafts=3), Parts(proposer=Scribbles()))
    assert {name: request.tokens for name, request in serve(engine, ASKED).items()} == texts


def test_blocks_for_drafts_must_be_there(model) -> None:
    request = Request("a", list(range(16)), 15, SamplingParams(), 0, 0.0, num_computed_tokens=15, block_tables=[[0]])
    with pytest.raises(IndexError, match="holds 1 blocks; its step ends at position 18, which takes 2 of 16 tokens"):
        Planner(16).step(StepPlan(1, (Row("a", 15, 1, True, 2),)), {"a": request})


def test_a_scheduler_that_was_written_for_one_token_per_step_is_told_what_to_write(model) -> None:
    class Older(Scheduler):
        def _append(self, request: Request, num_in_flight: int, output: Any) -> None:
            request.num_in_flight -= 1
            request.tokens.append(output.tokens[request.id])

    parts = Engine(model, EngineConfig(num_blocks=8))
    engine = Engine(
        model, EngineConfig(num_blocks=8), Parts(scheduler=Older(parts.kv, 4, 64), kv_manager=parts.kv)
    )  # fmt: skip
    engine.add(prompt("greedy"), SamplingParams(max_tokens=3, temperature=0))
    with pytest.raises(
        TypeError, match=r"Older.update appended \(\d+,\) .* Write request.tokens.extend\(output.tokens"
    ):
        engine.step()


# --- drafts of the host ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_drafts_of_the_host_change_no_text_and_save_steps(right: float, model, plain, texts) -> None:
    wise = HostOracle(texts, right, VOCAB)
    engine = Engine(model, EngineConfig(num_blocks=64, block_size=4, num_drafts=4), Parts(host_proposer=wise))
    served = serve(engine, ASKED)
    assert {name: r.output_tokens for name, r in served.items()} == {n: r.output_tokens for n, r in plain.items()}
    steps = engine.trace.steps()
    assert sum(row.num_drafts for step in steps for row in step.rows) > 0
    assert all(len(row.drafts) == row.num_drafts for step in steps for row in step.rows)
    kept = [n - 1 for step in steps for row, n in zip(step.rows, step.num_new_tokens, strict=True) if row.drafts]
    assert (max(kept) == 0) == (right == 0.0)
    whole = [row.num_drafts for step in steps for row in step.rows if row.drafts]
    assert (kept == whole) == (right == 1.0)
    assert engine.kv.num_available == engine.num_blocks


def test_a_worker_in_another_process_verifies_what_the_host_drafts() -> None:
    from reference_impl.assembly.split import split_engine

    folder, asked = course_model("draft"), SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    plain = Engine(load_model(folder, torch.float32), EngineConfig(num_blocks=20))
    first = plain.add([5, 17, 40, 9], asked, "a")
    while plain.has_work():
        plain.step()
    wise = HostOracle({"a": first.tokens}, 1.0, plain.model.config.vocab_size)
    engine = split_engine(folder, EngineConfig(num_blocks=20, num_drafts=4), parts=Parts(host_proposer=wise))
    again = engine.add([5, 17, 40, 9], asked, "a")
    while engine.has_work():
        engine.step()
    engine.close()
    assert again.tokens == first.tokens
    assert any(n == 5 for step in engine.trace.steps() for n in step.num_new_tokens)


def test_what_a_host_proposer_must_not_do_is_refused_by_name(model, oracle) -> None:
    class Drafts:
        def __init__(self, *tokens: int):
            self.tokens = tokens

        def propose(self, request: Request, k: int) -> tuple[int, ...]:
            return self.tokens

    config = EngineConfig(num_blocks=8, num_drafts=2)
    for tokens, text in (
        ((1, 2, 3), "Drafts.propose: expected at most 2 tokens for request 'a', got more"),
        ((1, VOCAB), rf"a draft for request 'a' is token {VOCAB}, outside the vocabulary \[0, {VOCAB}\)"),
        ((-1,), "a draft for request 'a' is token -1"),
    ):
        engine = Engine(model, config, Parts(host_proposer=Drafts(*tokens)))
        engine.add([1, 2], SamplingParams(max_tokens=9), "a")
        engine.step()
        with pytest.raises(ValueError, match=text):
            engine.step()
    with pytest.raises(ValueError, match=r"Parts\.proposer and Parts\.host_proposer are given"):
        Engine(model, config, Parts(host_proposer=Drafts(), proposer=oracle({}, 1.0, VOCAB)))
    with pytest.raises(ValueError, match=r"Parts\.host_proposer is given, and num_drafts is 0"):
        Engine(model, EngineConfig(num_blocks=8), Parts(host_proposer=Drafts()))
    with pytest.raises(ValueError, match="reads a request's text, which with overlap='on' is not known"):
        Engine(model, EngineConfig(num_blocks=8, num_drafts=2, overlap="on"), Parts(host_proposer=Drafts()))
    own = Engine(model, EngineConfig(num_blocks=8))
    parts = Parts(host_proposer=Drafts(), scheduler=Scheduler(own.kv, 4, 64), kv_manager=own.kv)
    with pytest.raises(ValueError, match=r"Parts\.host_proposer is for the engine's own scheduler"):
        Engine(model, EngineConfig(num_blocks=8), parts)


@pytest.mark.parametrize("change", ["a token", "the list", "its length"])
def test_a_host_proposer_that_changes_the_text_is_refused_and_the_text_stays(model, change: str) -> None:
    class Changes:
        def propose(self, request: Request, k: int) -> list[int]:
            other = [*request.tokens[:-1], (request.tokens[-1] + 1) % VOCAB]
            if change == "a token":
                request.tokens[:] = other
            elif change == "the list":
                request.tokens = other
            else:
                request.tokens.append(1)
            return [1]

    engine = Engine(model, EngineConfig(num_blocks=8, num_drafts=2), Parts(host_proposer=Changes()))
    request = engine.add([1, 2], SamplingParams(max_tokens=9, temperature=0), "a")
    engine.step()
    before, text = request.tokens, list(request.tokens)
    with pytest.raises(
        ValueError, match="Changes.propose changed the tokens of request 'a', which are only to be read"
    ):
        engine.step()
    assert request.tokens is before
    assert before == text


def test_a_host_proposer_may_give_anything_that_ends_or_not(model, plain, texts) -> None:
    class Strange:
        def __init__(self, what: Callable[[Request], Any]):
            self.what = what

        def propose(self, request: Request, k: int) -> Any:
            return self.what(request)

    config = EngineConfig(num_blocks=8, num_drafts=2)
    for what, error, text in (
        (
            lambda r: itertools.repeat(1),
            ValueError,
            "at most 2 tokens for request 'a', got more",
        ),
        (lambda r: [1.5], TypeError, "Strange.propose: .* which are integers: 'float' object"),
        (lambda r: None, TypeError, "Strange.propose: .* 'NoneType' object is not iterable"),
        (lambda r: r.tokens.append(1) or [1], ValueError, "Strange.propose changed the tokens of request 'a'"),
    ):
        engine = Engine(model, config, Parts(host_proposer=Strange(what)))
        engine.add([1, 2], SamplingParams(max_tokens=9), "a")
        engine.step()
        with pytest.raises(error, match=text):
            engine.step()
    engine = Engine(
        model, EngineConfig(num_blocks=64, num_drafts=2), Parts(host_proposer=Strange(lambda r: iter((1,))))
    )
    assert {n: r.tokens for n, r in serve(engine, ASKED).items()} == {n: r.tokens for n, r in plain.items()}


def test_a_proposer_is_told_of_slots_that_close_in_a_step_without_rows(model) -> None:
    class Books:
        def __init__(self) -> None:
            self.open: set[int] = set()

        def opened(self, slot: Any) -> None:
            self.open.add(slot.slot)

        def closed(self, slot: int) -> None:
            self.open.remove(slot)

        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            return torch.zeros(len(slots), k, dtype=torch.int64)

    books = Books()
    engine = Engine(model, EngineConfig(num_blocks=8, num_drafts=2), Parts(proposer=books))
    engine.add([1, 2], SamplingParams(max_tokens=3), "a")
    engine.step()
    assert books.open == {0}
    engine.abort("a")
    engine.executor.collect(engine.executor.submit(engine.planner.step(StepPlan(9, ()), engine.requests)))
    assert books.open == set()
    listed = Parts(proposer=type("Lists", (Books,), {"propose": lambda self, slots, lengths, tokens, k: [[1, 2]]})())
    engine = Engine(model, EngineConfig(num_blocks=8, num_drafts=2), listed)
    engine.add([1, 2], SamplingParams(max_tokens=9), "a")
    engine.step()
    with pytest.raises(ValueError, match=r"Lists.propose: expected 2 tokens for each of 1 rows, \[1, 2\], got list"):
        engine.step()
