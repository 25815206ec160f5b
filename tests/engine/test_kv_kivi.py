"""The engine with keys rounded by channel over a block (kv_dtype="kivi"), against attention by its definition.

The definition knows no cache: over a whole text, a query at position p reads key and value of position j rounded if j's
block ends before p's begins, and as they are in its own. So what a token sees depends on positions alone, and all that
the engine does (chunks, neighbours, preemption, swapping, prefixes, forks, guesses) must give the same logits.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from reference_impl.annexes.baselines.ragged import ragged_batch
from reference_impl.annexes.beams.search import beam_search
from reference_impl.annexes.kv_formats import by_channel
from reference_impl.annexes.speculative import tree_head_worker
from reference_impl.annexes.speculative.lookahead_pool import Lookahead
from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import SamplingParams
from tests.engine import test_schedule_invariance as schedules
from tests.engine.conftest import make_late, paired, poison_free_blocks, some
from tests.engine.test_feature_head import random_head

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def sixteenths(x: torch.Tensor, dim: int) -> torch.Tensor:
    """In 16 equal steps along a dimension from its least number to its largest, both as float16 has them."""
    least = x.amin(dim, keepdim=True).half().double()
    step = ((x.amax(dim, keepdim=True) - least) / 15).half().double().clamp(min=2**-24)
    return ((x - least) / step).round().clamp(0, 15) * step + least


class ByDefinition:
    """Attention of one row without a past, in float64."""

    def __init__(self, block_size: int, scale: float, softcap: float | None):
        self.block_size, self.scale, self.softcap = block_size, scale, softcap

    def plan(self, batch: Any) -> None:
        pass

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, cache: Any, batch: Any) -> Any:
        n, size, group, dtype = len(q), self.block_size, q.shape[1] // k.shape[1], q.dtype
        q, k, v = q.double(), k.double(), v.double()
        window = batch.groups[batch.group_of_layer[layer]].window or n
        key, value = k.clone(), sixteenths(v, -1)
        for first in range(0, n - size + 1, size):
            key[first : first + size] = sixteenths(k[first : first + size], 0)
        far_k, near_k, far_v, near_v = (t.repeat_interleave(group, 1) for t in (key, k, value, v))
        p, j = torch.arange(n)[:, None], torch.arange(n)
        far, seen = j // size < p // size, (j <= p) & (j > p - window)
        scores = torch.where(far, *(torch.einsum("phd,jhd->hpj", q, keys) for keys in (far_k, near_k))) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        weight = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        found = torch.einsum("hpj,jhd->phd", weight * far, far_v) + torch.einsum("hpj,jhd->phd", weight * ~far, near_v)
        return found.to(dtype)


def defined(model: Decoder, tokens: Any, block_size: int) -> torch.Tensor:
    """Logits [len(tokens), vocab_size]."""
    c = model.config
    batch = ragged_batch([(list(tokens), 0)], len(tokens), model.device, c.layer_windows)
    batch.logits_indices = torch.arange(len(tokens))
    attention: Any = ByDefinition(block_size, c.attention_scale, c.attention_softcap)
    with torch.inference_mode():
        return model(batch, None, attention)  # type: ignore[arg-type]


def greedy(model: Decoder, prompt: list[int], num: int, block_size: int) -> list[int]:
    """The text by the definition, a token at a time."""
    text = list(prompt)
    for _ in range(num):
        text.append(int(defined(model, text, block_size)[-1].argmax()))
    return text[len(prompt) :]


def alone(model: Decoder, asked: schedules.Asked, block_size: int, noise: Any) -> list[list[int]]:
    """The samples of a request that has an engine to itself and reads its prompt at once."""
    if asked.pooling is not None:
        return [[]]
    options: dict[str, Any] = {"prefix_cache": "off", "sampling_noise": noise}
    config = EngineConfig(kv_dtype="kivi", block_size=block_size, num_blocks=400, **options)
    engine = Engine(model, config)
    first = engine.add(list(asked.prompt), asked.sampling, grammar=asked.grammar)
    samples = [first, *first.children]
    while engine.has_work():
        engine.step()
    return [sample.output_tokens for sample in samples]


KINDS = {
    "full": {},
    "full and windows": schedules.MODELS["full and windows"],
    "soft cap, two groups": {
        "architecture": "Gemma2ForCausalLM", "sliding_window": 6, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "examples"),
    [
        ("full", 5), ("full and windows", 2), ("soft cap, two groups", 2),
        pytest.param("full", 150, marks=pytest.mark.slow),
        pytest.param("full and windows", 60, marks=pytest.mark.slow),
        pytest.param("soft cap, two groups", 60, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_definition_whatever_the_schedule(
    kind: str, examples: int, random_model: Callable[..., Any], tapped_engine: Any, oracle: Any
) -> None:
    """The workloads of test_schedule_invariance.py: chunks, forks, prefix hits, swapping, page stores, guesses of an
    oracle, of the host and of a draft model, overlapped on a late device, and in stages."""
    model = random_model("float64", **KINDS[kind])
    calm = settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip

    def with_kivi(tapped: Decoder, **options: Any) -> Any:
        if set(tapped.config.layer_windows) != {None}:  # what a window shows, and up to a block more
            options["num_blocks"] += 4 * len(set(tapped.config.layer_windows))
        return tapped_engine(tapped, kv_dtype="kivi", **options)

    @calm
    @given(work=schedules.workload())
    def as_defined(work: Any) -> None:
        size = work[1]["block_size"]
        with patch.object(schedules, "alone", lambda m, asked, noise: alone(m, asked, size, noise)):
            schedules.check_workload(model, work, with_kivi, lambda m, text: defined(m, text, size), oracle)

    as_defined()


PROMPTS = [[(7 * i + first) % 61 for i in range(n)] for first, n in ((1, 21), (1, 26), (2, 9), (3, 14), (4, 1))]


class Wrong:
    """A proposer whose guesses are right as often as not: of each row another number of the first ones."""

    def __init__(self, texts: dict[str, list[int]]):
        self.texts, self.names, self.calls = texts, dict[int, str](), 0

    def opened(self, slot: Any) -> None:
        self.names[slot.slot] = slot.request_id

    def closed(self, slot: int) -> None:
        del self.names[slot]

    def propose(self, slots: torch.Tensor, lengths: torch.Tensor, tokens: torch.Tensor, k: int) -> torch.Tensor:
        self.calls += 1
        guesses = []
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            truth = (self.texts[self.names[slot]][length : length + k] + [0] * k)[:k]
            right = (self.calls + slot) % (k + 1)
            guesses.append([t if i < right else (t + 1) % 61 for i, t in enumerate(truth)])
        return torch.tensor(guesses)


@pytest.fixture(scope="module")
def texts(random_model: Callable[..., Any]) -> list[list[int]]:
    """Of each prompt the text by the definition, in blocks of 4."""
    return [greedy(random_model("float64"), prompt, 8, 4) for prompt in PROMPTS]


def serve(engine: Engine, **sampling: Any) -> list[list[int]]:
    """All prompts at once."""
    params = SamplingParams(max_tokens=8, **(GREEDY | sampling))
    requests = [engine.add(p, params, f"r{i}") for i, p in enumerate(PROMPTS)]
    every = [member for r in requests for member in (r, *r.children)]
    while engine.has_work():
        engine.step()
    assert engine.kv.num_available == engine.num_blocks
    return [r.output_tokens for r in every]


@pytest.mark.parametrize(("preemption", "late", "num_drafts"), paired(["swap", "recompute"], [None, 3], [0, 3, 6]))
def test_too_few_blocks_and_wrong_guesses_change_no_text(
    preemption: Any, late: int | None, num_drafts: int, random_model: Callable[..., Any], texts: list[list[int]]
) -> None:
    """A block that wrong guesses have filled is open again; and what is swapped out begins again at a whole block."""
    written = {f"r{i}": p + text for i, (p, text) in enumerate(zip(PROMPTS, texts, strict=True))}
    config = EngineConfig(
        kv_dtype="kivi", block_size=4, num_blocks=13, max_num_batched_tokens=11, max_num_seqs=4, preemption=preemption,
        prefix_cache="off", overlap="off" if late is None else "on", num_drafts=num_drafts,
        swap_bytes=40_000,
    )  # fmt: skip
    engine = Engine(random_model("float64"), config, Parts(proposer=Wrong(written) if num_drafts else None))
    if late is not None:
        make_late(engine, late)
    poison_free_blocks(engine)
    assert serve(engine) == texts
    steps = engine.trace.steps()
    assert any(step.preempted for step in steps)
    assert (preemption == "swap") == any(step.transfers.swap_in for step in steps)


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_prefix_is_found_again_by_whole_blocks(
    index: Any, random_model: Callable[..., Any], texts: list[list[int]]
) -> None:
    config = EngineConfig(kv_dtype="kivi", block_size=4, num_blocks=40, prefix_cache=index)
    engine = Engine(random_model("float64"), config)
    poison_free_blocks(engine)
    assert serve(engine) == serve(engine) == texts
    hits = [cached for step in engine.trace.steps() for _, cached in step.admitted]
    assert sum(hits) >= 16
    assert all(cached % 4 == 0 for cached in hits)


def test_samples_share_full_blocks_and_copy_none(random_model: Callable[..., Any]) -> None:
    model = random_model("float64")
    engine = Engine(model, EngineConfig(kv_dtype="kivi", block_size=4, num_blocks=60, max_num_batched_tokens=30))
    found = serve(engine, n=3, temperature=0.9, seed=5)
    params = SamplingParams(max_tokens=8, n=3, seed=5, temperature=0.9, ignore_eos=True)
    wanted = [
        t for p in PROMPTS for t in alone(model, schedules.Asked(tuple(p), params, None, 0, None), 4, "one-number")
    ]
    assert found == wanted
    assert len({tuple(text) for text in found}) > len(PROMPTS)
    assert not any(step.transfers.copies for step in engine.trace.steps())


def test_beams_are_those_of_the_definition(random_model: Callable[..., Any]) -> None:
    """Forked in the middle of a block, step by step."""
    model, width = random_model("float64"), 3
    engine = Engine(model, EngineConfig(kv_dtype="kivi", block_size=4, num_blocks=60))
    found = beam_search(engine, PROMPTS[3], width, 7)
    beams: list[tuple[float, list[int]]] = [(0.0, list(PROMPTS[3]))]
    ends = set(model.config.eos_token_ids)
    assert not ends
    for _ in range(7):
        longer = []
        for score, text in beams:
            values, tokens = defined(model, text, 4)[-1].log_softmax(-1).topk(2 * width)
            longer += [(score + v, [*text, t]) for v, t in zip(values.tolist(), tokens.tolist(), strict=True)]
        beams = sorted(longer, key=lambda b: -b[0])[:width]
    assert [list(beam.tokens) for beam in found] == [text[len(PROMPTS[3]) :] for _, text in beams]


def test_a_step_that_failed_begins_again_at_a_whole_block(
    random_model: Callable[..., Any], texts: list[list[int]]
) -> None:
    """Its chunk had run on beyond the open block that it began in."""
    config = EngineConfig(kv_dtype="kivi", block_size=4, num_blocks=40, max_num_batched_tokens=9, overlap="off")
    engine = Engine(random_model("float64"), config)
    collect, number = engine.executor.collect, 0

    def fails_at_times(ticket: Any) -> Any:
        nonlocal number
        number += 1
        if number % 3 == 0:
            raise OSError("out of luck")
        return collect(ticket)

    engine.executor.collect = fails_at_times  # type: ignore[method-assign]
    requests = [engine.add(p, SamplingParams(max_tokens=8, **GREEDY)) for p in PROMPTS]
    failed = 0
    while engine.has_work():
        try:
            engine.step()
        except OSError:
            failed += 1
    assert failed > 5
    assert [r.output_tokens for r in requests] == texts


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_hidden_states_of_a_swapped_prompt_count_each_token_once(
    pooling: Any, random_model: Callable[..., Any]
) -> None:
    """The head is linear: what it makes of the mean is the mean of what it makes of each."""
    model = random_model("float64")
    config = EngineConfig(
        kv_dtype="kivi", block_size=4, num_blocks=13, max_num_batched_tokens=6, preemption="swap", prefix_cache="off",
        swap_bytes=40_000,
    )  # fmt: skip
    engine = Engine(model, config)
    writes = engine.add(PROMPTS[0], SamplingParams(max_tokens=20, **GREEDY), priority=0)
    asks = engine.add(PROMPTS[1], pooling=pooling)
    while engine.has_work():
        engine.step()
    assert any(asks.id in step.preempted for step in engine.trace.steps())
    assert len(writes.output_tokens) == 20
    assert asks.embedding is not None
    logits = defined(model, PROMPTS[1], 4)
    expected = logits.mean(0) if pooling == "mean" else logits[-1]
    found = model.logits(torch.tensor([asks.embedding], dtype=model.dtype))[0]
    assert (found - expected).abs().max() < 1e-10


@pytest.mark.parametrize("how", ["ngram", "draft", "early-exit", "invariant"])
def test_guesses_of_every_kind_change_no_text(
    how: Any, random_model: Callable[..., Any], texts: list[list[int]]
) -> None:
    """A draft model has a cache of int4; the model's own first layers write into the model's, again and again."""
    model, parts = random_model("float64"), Parts()
    options: dict[str, Any] = {"kv_dtype": "kivi", "block_size": 4, "num_blocks": 40, "max_num_batched_tokens": 19}
    if how == "invariant":
        options["batch_invariant"] = True
    else:
        options |= {"speculative": how, "num_drafts": 5, "adaptive_drafts": "off"}
    if how == "draft":
        parts = Parts(draft_model=model)
    engine = Engine(model, EngineConfig(**options), parts)
    if how == "draft":
        own: Any = engine.executor.draft.own_cache  # type: ignore[attr-defined]
        assert type(own).__name__ == "FourBitKVCache"
    assert serve(engine) == texts
    kept = sum(n > 1 for step in engine.trace.steps() for n in step.num_new_tokens)
    assert kept or how in ("invariant", "early-exit")


def plant(executor: Any, written: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lookahead's guesses one path goes on with the text, another one each time, up to any depth. The others are
    wrong, but may have its tokens in places of their own. written: by request, its whole text."""
    draw = random.Random(0)

    def guess(self: Lookahead, slots: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        tree, found = self.shape.tree, []
        for slot in slots.tolist():
            text, length = written[executor.slots.host[slot].request_id], int(executor.slots.computed[slot]) + 1
            truth = [*text[length:], *[0] * tree.num_levels]
            leaf = draw.randrange(tree.num_nodes)
            right = {int(node) for node in tree.lineage[leaf] if node >= 0}
            found.append([truth[d] if i in right else (truth[d] + 1) % 61 for i, d in enumerate(tree.levels)])
        return torch.tensor(found, device=slots.device)

    monkeypatch.setattr(Lookahead, "guess", guess)


@pytest.mark.parametrize(
    ("shape", "late", "preemption"),
    [((3, 3, 3), None, "swap"), ((2, 5, 2), None, "recompute"), ((3, 3, 3), 3, "recompute"), ((2, 5, 2), 1, "swap")],
)
def test_a_tree_whose_paths_fill_blocks_leaves_those_of_the_kept_one(
    shape: Any, late: int | None, preemption: Any, random_model: Callable[..., Any], texts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Up to 5 guesses deep, in blocks of 4; too few of them for all requests."""
    written = {f"r{i}": p + text for i, (p, text) in enumerate(zip(PROMPTS, texts, strict=True))}
    config = EngineConfig(
        kv_dtype="kivi", block_size=4, num_blocks=15, max_num_batched_tokens=90, max_num_seqs=4, preemption=preemption,
        prefix_cache="off", overlap="off" if late is None else "on", swap_bytes=40_000, speculative="lookahead",
        lookahead=shape,
    )  # fmt: skip
    if preemption == "swap":  # otherwise all at once
        monkeypatch.setattr(by_channel, "MOST_NUMBERS", 1)
    engine = Engine(random_model("float64"), config)
    plant(engine.executor, written, monkeypatch)
    if late is not None:
        make_late(engine, late)
    poison_free_blocks(engine)
    assert serve(engine) == texts
    steps = engine.trace.steps()
    assert max(n for step in steps for n in step.num_new_tokens) > 2
    assert any(step.preempted for step in steps)


@pytest.mark.parametrize(
    ("kind", "block_size"),
    some(
        [("full", 3), ("full and windows", 1), ("soft cap, two groups", 7)], list(itertools.product(KINDS, (1, 3, 7)))
    ),
)
def test_trees_leave_texts_and_scores_as_they_are(
    kind: str, block_size: int, random_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples with a seed, and prefixes found again; windows and soft caps. Scores: to float64's last digits."""
    model = random_model("float64", **KINDS[kind])
    options: dict[str, Any] = {"kv_dtype": "kivi", "block_size": block_size, "num_blocks": 300}
    params = SamplingParams(max_tokens=10, n=2, seed=5, temperature=0.9, ignore_eos=True, logprobs=1)
    found = []
    for guesses in ({}, {"speculative": "lookahead", "lookahead": (2, 5, 3)}):
        engine = Engine(model, EngineConfig(max_num_batched_tokens=150, **options, **guesses))
        if found:
            plant(engine.executor, {r.id: r.tokens for r in found[0]}, monkeypatch)
        for _ in range(1 + len(found)):
            requests = [engine.add(p, params, f"r{i}") for i, p in enumerate(PROMPTS[:3])]
            members = [member for r in requests for member in (r, *r.children)]
            while engine.has_work():
                engine.step()
            found.append(members)
    for members in found[1:]:
        assert [r.tokens for r in members] == [r.tokens for r in found[0]]
        for ours, plain in zip(members, found[0], strict=True):
            pairs = zip(ours.logprobs, plain.logprobs, strict=True)
            assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-9
    steps = engine.trace.steps()
    assert max(n for step in steps for n in step.num_new_tokens) > 4
    assert kind != "full" or any(cached for step in steps for _, cached in step.admitted)


@pytest.mark.parametrize(("late", "preemption"), [(None, "swap"), (3, "recompute")])
def test_trees_that_are_grown_in_each_step_leave_texts_and_scores_as_they_are(
    late: int | None, preemption: Any, random_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head grows trees, and what it guesses on them is exchanged as in `plant`: of each row another path is right,
    up to 4 guesses deep, in blocks of 3; too few of them for all requests."""
    params, written = SamplingParams(max_tokens=12, seed=5, ignore_eos=True, logprobs=1), dict[str, list[int]]()
    head = random_head(random_model("float64", max_position_embeddings=128, num_hidden_layers=1))
    draw, shapes, inner = random.Random(0), set[Any](), tree_head_worker.grow_trees

    def planted(draft: Any, rows: Any, slots: Any, *others: Any) -> Any:
        trees, guesses = inner(draft, rows, slots, *others)
        found = []
        for row, tree in zip(rows, trees, strict=True):
            text, length = written[slots.host[row.slot].request_id], int(slots.computed[row.slot]) + 1
            truth = [*text[length:], *[0] * tree.num_levels]
            right = {int(node) for node in tree.lineage[draw.choice(range(tree.num_nodes)[-6:])] if node >= 0}
            found += [truth[d] if i in right else (truth[d] + 1) % 61 for i, d in enumerate(tree.levels)]
            shapes.add(tree.parents)
        return trees, torch.tensor(found).to(guesses)

    monkeypatch.setattr(tree_head_worker, "grow_trees", planted)
    plain: dict[str, Any] = {"kv_dtype": "kivi", "block_size": 3, "prefix_cache": "off"}
    grown = {
        "num_blocks": 19, "max_num_batched_tokens": 90, "max_num_seqs": 4, "preemption": preemption,
        "overlap": "off" if late is None else "on", "swap_bytes": 40_000, "speculative": "eagle",
        "draft_tree": "dynamic",
    }  # fmt: skip
    served = []
    for options in ({"num_blocks": 80}, grown):
        parts = Parts(draft_model=head if served else None)
        engine = Engine(random_model("float64"), EngineConfig(**plain, **options), parts)
        if served and late is not None:
            make_late(engine, late)
        poison_free_blocks(engine)
        requests = [engine.add(p, params, f"r{i}") for i, p in enumerate(PROMPTS)]
        while engine.has_work():
            engine.step()
        assert engine.kv.num_available == engine.num_blocks
        written |= {r.id: r.tokens for r in requests}
        served.append(requests)
    assert [r.tokens for r in served[1]] == [r.tokens for r in served[0]]
    for ours, theirs in zip(*served, strict=True):
        pairs = zip(ours.logprobs, theirs.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-9
    steps = engine.trace.steps()
    assert max(n for step in steps for n in step.num_new_tokens) > 3
    assert any(step.preempted for step in steps)
    assert len(shapes) > 3


def test_open_blocks_are_paid_for_first(random_model: Callable[..., Any]) -> None:
    model = random_model("float32")
    options: dict[str, Any] = {"kv_dtype": "kivi", "block_size": 4, "max_num_seqs": 8}
    engine = Engine(model, EngineConfig(kv_cache_bytes=1 << 20, **options))
    cache, spec = engine.kv_cache, engine.kv_spec
    held = cache.open.nbytes + sum(blocks.nbytes for blocks in cache.blocks)
    assert cache.open.nbytes == 8 * spec.open_bytes_per_request
    assert held == cache.open.nbytes + engine.num_blocks * spec.bytes_per_block <= 1 << 20
    assert held + spec.bytes_per_block > 1 << 20
    with pytest.raises(ConfigError, match="for one block: .*the open blocks of 8 requests.* or max_num_seqs"):
        Engine(model, EngineConfig(kv_cache_bytes=8300, **options))


class Own:
    """A learner's part, which knows nothing of open blocks."""

    def __init__(self, inner: Any):
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("keeps_open_blocks", "reads_open_blocks"):
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize(("part", "member"), [("kv_cache", "keeps_open_blocks"), ("attention", "reads_open_blocks")])
def test_parts_of_ones_own_that_know_no_open_blocks_are_refused(
    part: str, member: str, random_model: Callable[..., Any]
) -> None:
    model = random_model("float32")
    given = Own(getattr(Engine(model, EngineConfig(num_blocks=8)), part))
    with pytest.raises(ConfigError, match=f"'kivi' needs .* with {member} = True.*Own is none.*kv_dtype='int4'"):
        Engine(model, EngineConfig(kv_dtype="kivi", num_blocks=8), Parts(**{part: given}))
