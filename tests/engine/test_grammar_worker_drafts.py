"""Drafts of the worker for requests under a grammar: the host sees them before it sends masks, they are cut where the
grammar forbids one, and the text, or its distribution, is that without drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.core.sampler import draw
from reference_impl.features.speculative import chain, head_source
from reference_impl.interfaces import Request, SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import Oracle, check_references, some
from tests.engine.test_drafts import kept_of
from tests.engine.test_feature_head import random_head
from tests.engine.test_grammar_drafts import ASKED, VOCAB, Some
from tests.engine.test_grammars import bits, finish
from tests.engine.test_medusa import random_heads
from tests.engine.test_rejection import ALPHA, PROMPT, by_definition, options_of, p_value


def serve(engine: Engine) -> dict[str, Request]:
    """And beside them one without a grammar."""
    requests = {
        name: engine.add([*PROMPT, len(name)], sampling, name, grammar=Some()) for name, sampling in ASKED.items()
    }
    requests["free"] = engine.add(PROMPT, SamplingParams(max_tokens=25, seed=3), "free")
    while engine.has_work():
        engine.step()
        if engine.depth == 1:
            check_references(engine)
    return requests


@pytest.fixture(scope="module")
def target(random_model: Callable) -> Any:
    return random_model("float64")


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, Request]:
    return serve(Engine(target, EngineConfig(num_blocks=64)))


def parts_of(kind: str, target: Any, layer: Any, texts: dict[str, list[int]]) -> Parts:
    if kind == "proposer":
        return Parts(proposer=Oracle(texts, 0.8, VOCAB, seed=1))
    draft = {"model": lambda: target, "heads": random_heads}
    draft |= dict.fromkeys(("head", "tree", "grown"), lambda: random_head(layer))
    return Parts(draft_model=draft[kind]()) if kind in draft else Parts()


OPTIONS: dict[str, dict[str, Any]] = {
    "early-exit": {"speculative": "early-exit", "num_drafts": 3, "adaptive_drafts": "off"},
    "tree": {"speculative": "eagle", "draft_tree": (4, 2, 2)},
    "grown": {"speculative": "eagle", "draft_tree": "dynamic,3,3"},
    "lookahead": {"speculative": "lookahead"},
}


@pytest.mark.parametrize(
    ("kind", "num_blocks", "late"),
    some(
        [("proposer", 18, None), ("head", 18, 3), ("heads", 64, 2), ("early-exit", 64, None), ("tree", 64, 2),
         ("grown", 26, None), ("lookahead", 26, None)],
        [("proposer", 64, None), ("proposer", 18, None), ("proposer", 64, 2), ("model", 18, None), ("model", 64, 1),
         ("head", 64, None), ("head", 18, 3), ("heads", 64, 2), ("early-exit", 64, None), ("tree", 64, None),
         ("tree", 26, None), ("tree", 64, 2), ("grown", 26, None), ("grown", 64, 1), ("lookahead", 64, 2),
         ("lookahead", 26, None)],
    ),
)  # fmt: skip
def test_the_text_is_that_without_drafts(
    target, plain, random_model, late_engine, kind: str, num_blocks: int, late: int | None
) -> None:
    texts = {name: request.tokens for name, request in plain.items()}
    parts = parts_of(kind, target, random_model("float64", num_hidden_layers=1), texts)
    engine = late_engine(
        target, late, parts, num_blocks=num_blocks, block_size=4, max_num_batched_tokens=40,
        **OPTIONS.get(kind, {"num_drafts": 3}),
    )  # fmt: skip
    requests = serve(engine)
    for name, request in requests.items():
        assert request.tokens == texts[name], name
        assert [r.token for r in request.logprobs] == [r.token for r in plain[name].logprobs]
    steps = engine.trace.steps()
    assert any(step.preempted for step in steps) == (num_blocks < 64)
    assert engine.kv.num_available == engine.num_blocks
    bound = [pair for step in kept_of(engine) for name, pair in step.items() if name in ASKED]
    assert len(bound) > 10, "requests under a grammar have drafts"
    assert kind != "proposer" or sum(num for num, _ in bound) > 20
    assert kind not in ("tree", "grown") or sum(num for num, _ in bound) > 0


class Word:
    """Of four tokens, behind which nothing can be sampled: a request is to end there by itself."""

    def allowed(self, output: Sequence[int]) -> bytes:
        if list(output) != [1, 2, 3, 4][: len(output)]:
            raise LookupError("not this word")
        return bits([1 + len(output)] if len(output) < 4 else [], VOCAB)


@dataclass(frozen=True)
class Third(Some):
    def tokens(self, output: Sequence[int]) -> list[int]:
        return random.Random(f"{list(output)}").sample(range(VOCAB), VOCAB // 3)


@pytest.mark.parametrize("kind", some(["model", "grown"], ["model", "head", "heads", "early-exit", "tree", "grown"]))
def test_a_model_makes_no_draft_that_the_grammar_forbids_and_more_are_kept(target, random_model, kind: str) -> None:
    """Where masks can be asked for: overlapped, they are not there yet."""
    shares, asked = {}, {name: ASKED[name] for name in ("greedy", "drawn", "penalised")}
    for overlap in ("off", "on"):
        parts = parts_of(kind, target, random_model("float64", num_hidden_layers=1), {})
        config = EngineConfig(num_blocks=64, overlap=overlap, **OPTIONS.get(kind, {"num_drafts": 3}))
        engine = Engine(target, config, parts)
        forbidden = watch(engine)
        for name, sampling in asked.items():
            engine.add([*PROMPT, len(name)], sampling, name, grammar=Third())
        finish(engine)
        use = DraftUse.of(engine.trace.steps())
        shares[overlap] = use.num_accepted_tokens / use.num_draft_tokens
        assert bool(forbidden) == (overlap == "on")
    assert shares["off"] > 1.4 * shares["on"]


def watch(engine: Engine) -> list[int]:
    """Gets each draft token of a step that the grammar forbids."""
    inner, forbidden = engine.executor.show_drafts, []  # type: ignore[attr-defined]

    def show_drafts(ticket: Any, ask: Any) -> Any:
        found = inner(ticket, ask)
        for row, drafted in zip(ticket.step.rows, found, strict=True):
            output = engine.requests[engine.executor.slots.host[row.slot].request_id].output_tokens  # type: ignore[attr-defined]
            paths: list[list[int]] = [output]
            for token, parent in zip(drafted.tokens, drafted.parents, strict=True):
                forbidden.extend([token] if token not in Third().tokens(paths[1 + parent]) else [])
                paths.append([*paths[1 + parent], token])
        return found

    engine.executor.show_drafts = show_drafts  # type: ignore[attr-defined]
    return forbidden


def test_right_drafts_are_kept_up_to_where_the_grammar_has_no_mask(target) -> None:
    class Drafts:
        def opened(self, slot: Any) -> None: ...
        def closed(self, slot: int) -> None: ...
        def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
            written = lengths[:, None] - len(PROMPT) + torch.arange(k)
            return (written + 1 + (written > 3) * 30).clamp(max=VOCAB - 1)

    config = EngineConfig(num_blocks=20, num_drafts=5)
    for seed in (3, None):
        engine = Engine(target, config, Parts(proposer=Drafts()))
        sampling = SamplingParams(max_tokens=9, seed=seed, stop_token_ids=(4,), ignore_eos=True)
        request = engine.add(PROMPT, sampling, grammar=Word())
        finish(engine)
        assert request.output_tokens == [1, 2, 3, 4]
        assert [sum(step.num_new_tokens) for step in engine.trace.steps()] == [1, 3]


@dataclass(frozen=True)
class Four:
    def tokens(self, output: Sequence[int]) -> list[int]:
        return [t for t in range(7) if (t + sum(output) + len(output)) % 7 < 4]

    def allowed(self, output: Sequence[int]) -> bytes:
        return bits(self.tokens(output), 7)


CASES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8}, "penalties": {"frequency_penalty": 1.0, "top_p": 0.9},
}  # fmt: skip


def free_texts(
    random_model: Any, kind: str, case: dict[str, Any], noise: str = "one-number", overlap: str = "off"
) -> list[tuple[int, ...]]:
    """Overlapped, drafts are made before their masks are known."""
    target = random_model("float64", vocab_size=7)
    draft = random_model("float64", vocab_size=7, num_hidden_layers=1)
    drafts = {"model": draft, "heads": random_heads(vocab_size=7)} | dict.fromkeys(
        ("head", "tree", "grown"), random_head(draft)
    )
    trees: dict[str, dict[str, Any]] = {"tree": {"draft_tree": (3, 2)}, "grown": {"draft_tree": "dynamic,2,3"}}
    tree = {"num_drafts": 0, "speculative": "eagle"} | trees[kind] if kind in trees else {}
    tree |= {"num_drafts": 0, "speculative": "lookahead"} if kind == "lookahead" else {}
    config = EngineConfig(**options_of(**tree), sampling_noise=noise, overlap=overlap)  # type: ignore[arg-type]
    engine = Engine(target, config, Parts(draft_model=drafts.get(kind)))
    first = engine.add(PROMPT, SamplingParams(n=900, max_tokens=3, **case), grammar=Four())
    members = [first, *first.children]
    finish(engine)
    use = DraftUse.of(engine.trace.steps())
    assert 0 < use.num_accepted_tokens < use.num_draft_tokens
    return [tuple(member.output_tokens) for member in members]


@pytest.fixture(scope="module")
def expected(random_model, one_shot) -> Callable[[str], dict[tuple[int, ...], float]]:
    def of(name: str) -> dict[tuple[int, ...], float]:
        target, texts = random_model("float64", vocab_size=7), {(): 1.0}
        for _ in range(3):
            longer: dict[tuple[int, ...], float] = {}
            for text, chance in texts.items():
                logits = one_shot(target, PROMPT + list(text))[-1].tolist()
                asked = SamplingParams(**CASES[name], allowed_token_ids=tuple(Four().tokens(text)))
                for token, share in enumerate(by_definition(logits, text, asked)):
                    if share > 0:
                        longer[*text, token] = chance * share
            texts = longer
        return texts

    return of


@pytest.mark.parametrize(
    ("name", "kind", "noise", "overlap"),
    some(
        [("penalties", "head", "one-number", "off"), ("temperature", "heads", "gumbel", "off"),
         ("penalties", "tree", "gumbel", "on"), ("temperature", "lookahead", "one-number", "on")],
        [("temperature", "model", "one-number", "on"), ("penalties", "head", "one-number", "off"),
         ("temperature", "heads", "gumbel", "off"), ("penalties", "tree", "one-number", "off"),
         ("penalties", "tree", "gumbel", "on"), ("temperature", "grown", "gumbel", "off"),
         ("temperature", "lookahead", "one-number", "on")],
    ),
)  # fmt: skip
def test_texts_without_a_seed_are_distributed_as_the_targets(
    random_model, expected, name: str, kind: str, noise: str, overlap: str
) -> None:
    assert p_value(free_texts(random_model, kind, CASES[name], noise, overlap), expected(name)) > ALPHA


def test_to_draw_anew_where_a_draft_is_forbidden_would_be_seen(random_model, expected, monkeypatch) -> None:
    """And nearly right it is: the token is one of p, as if there had been no draft."""
    inner = chain.verified

    def anew(p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        forbidden = p.gather(1, drafts[:, None])[:, 0] == 0
        return torch.where(forbidden, draw(p, u[1]), inner(p, q, drafts, u))

    monkeypatch.setattr(chain, "verified", anew)
    assert p_value(free_texts(random_model, "head", CASES["penalties"], overlap="on"), expected("penalties")) < ALPHA


def test_each_node_of_a_tree_has_the_mask_of_its_own_path(target, random_model, monkeypatch) -> None:
    """Two candidates for each token, of which the second is right: behind the first all is cut."""
    head = random_head(random_model("float64", num_hidden_layers=1))
    config = EngineConfig(num_blocks=64, speculative="eagle", draft_tree=(2, 2, 2))
    engine = Engine(target, config, Parts(draft_model=head))

    def drafts(*_: Any) -> tuple[torch.Tensor, None]:  # the root's token is 1, by its mask
        return torch.tensor([[level, level + 2][i % 2] for level in range(3) for i in range(2 << level)]), None

    monkeypatch.setattr(head_source, "propose_tree", drafts)
    asked = []

    class Asked(Word):
        def allowed(self, output: Sequence[int]) -> bytes:
            asked.append(tuple(output))
            return super().allowed(output)

    sampling = SamplingParams(max_tokens=9, stop_token_ids=(4,), ignore_eos=True)
    request = engine.add(PROMPT, sampling, grammar=Asked())
    finish(engine)
    assert request.output_tokens == [1, 2, 3, 4]
    assert [sum(step.num_new_tokens) for step in engine.trace.steps()] == [1, 3]
    assert asked == [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)], "each text once, and none that is forbidden"

    endless = engine.add(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True), grammar=Word())
    with pytest.raises(ValueError, match="allows no token"):
        finish(engine)
    assert endless.output_tokens == [1, 2, 3, 4], "a right draft token with no mask behind it is the row's last token"


def test_in_another_process_too() -> None:
    class Pair:
        def allowed(self, output: Sequence[int]) -> bytes:
            return bits([len(output) % 5, 5 + len(output) % 3], 4096)

    here = Engine(load_model(course_model("target"), torch.float32), EngineConfig(num_blocks=20))
    llm = LLM(
        course_model("target"), dtype="float32", num_blocks=20, worker="process", draft_model=course_model("draft"),
        num_drafts=2, adaptive_drafts="off",
    )  # fmt: skip
    found = []
    try:
        for engine in (here, llm.engine):
            asked = [SamplingParams(max_tokens=12, seed=i) for i in range(3)]
            requests = [engine.add([5, 6, 7 + i], p, grammar=Pair() if i else None) for i, p in enumerate(asked)]
            finish(engine)
            found.append([request.output_tokens for request in requests])
        rows = [row for step in llm.engine.trace.steps() for row in step.rows]
        assert {row.request_id for row in rows if row.num_drafts} >= {request.id for request in requests}

        class Interrupted(Pair):
            """While the worker waits for masks of drafts."""

            def allowed(self, output: Sequence[int]) -> bytes:
                if len(output) == 4:
                    raise KeyboardInterrupt
                return super().allowed(output)

        given_up = llm.engine.add([5, 6, 7], SamplingParams(max_tokens=12, seed=1), grammar=Interrupted())
        beside = llm.engine.add([5, 6, 8], SamplingParams(max_tokens=12, seed=1), grammar=Pair())
        with pytest.raises(KeyboardInterrupt):
            finish(llm.engine)
        assert 0 < len(given_up.output_tokens) <= 4
        llm.engine.abort(given_up.id)
        finish(llm.engine)
        assert beside.output_tokens == found[0][1]
    finally:
        llm.engine.close()
    assert found[0] == found[1]
