"""Speculative decoding with Medusa heads: the text is that of plain decoding, and the drafts are those that the
definition gives, computed here without blocks, batches and steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.parts import Parts
from reference_impl.core.linear import Linear, UnquantizedLinear
from reference_impl.core.sampler import SETTINGS, TorchSampler, settings_of
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.speculative.medusa import MedusaConfig, MedusaDraft, MedusaHeads
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse
from tests.engine.conftest import FakeStore, draft_of, some, spread
from tests.engine.test_draft_model import PURE, alone, check_texts, check_texts_when_preempted, schedule, serve_at_times
from tests.engine.test_drafts import ASKED, kept_of, prompt, serve
from tests.examples import examples
from tests.executor.dense import TwinSampler

SIZE = 32


@pytest.fixture
def heads() -> MedusaHeads:
    return random_heads()


def random_heads(
    num_heads: int = 5, vocab_size: int = 61, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> MedusaHeads:
    linear = Linear(
        UnquantizedLinear(dtype, torch.device(device)), SIZE, {str(j): SIZE for j in range(num_heads)}, True, "heads"
    )
    random = torch.Generator().manual_seed(3)
    for part in linear.parts:
        linear.load(part, "weight", 0.1 * torch.randn(SIZE, SIZE, generator=random, dtype=torch.float64))
        linear.load(part, "bias", 0.1 * torch.randn(SIZE, generator=random, dtype=torch.float64))
    return MedusaHeads(MedusaConfig(SIZE, vocab_size, num_heads), linear, dtype, torch.device(device))


@pytest.fixture(scope="module")
def plain(target: Any) -> dict[str, list[int]]:
    return texts_of(target)


def texts_of(model: Any) -> dict[str, list[int]]:
    return {
        name: serve(Engine(model, EngineConfig(num_blocks=48)), {name: sampling})[name].tokens
        for name, sampling in ASKED.items()
    }


# --- drafts by their definition -------------------------------------------------------------------------------------


def hidden_of(model: Any, tokens: list[int], num_layers: int) -> torch.Tensor:
    """Of the last of these tokens, [hidden_size], behind so many layers and the last norm."""
    c = model.config
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
    x, attention = model.embed(batch.input_ids), RecomputeAttention(c.attention_scale)
    cos, sin = model.rotary.cos_sin.index_select(1, batch.positions).unbind()
    for layer in model.layers[:num_layers]:
        x = layer(x, cos, sin, attention, None, batch)
    last: torch.Tensor = model.normalize(x, model.norm, c.norm_eps)[-1]
    return last


def drawn(model: Any, hidden: torch.Tensor, length: int, sampling: SamplingParams) -> int:
    """The token at position `length`, as plain decoding would draw it from this hidden state [hidden_size]."""
    settings = np.array([settings_of(sampling, sampling.seed or 0, 0)], SETTINGS)
    columns = TorchSampler().columns(settings, np.array([length]))
    t = {name: torch.from_numpy(array) for name, array in columns.items()}
    return int(TorchSampler().choose(model.logits(hidden[None]), t))


def drafts_of(heads: MedusaHeads, target: Any, tokens: list[int], k: int, sampling: SamplingParams) -> list[int]:
    """The k drafts behind these tokens, of which the last is not computed yet."""
    h = hidden_of(target, tokens[:-1], len(target.layers))
    found = []
    for j in range(k):
        rows = slice(j * SIZE, (j + 1) * SIZE)
        x = h @ heads.heads.params["weight"][:, rows] + heads.heads.params["bias"][rows]
        found.append(drawn(target, h + F.silu(x), len(tokens) + j, sampling))
    return found


Made = list[tuple[str, list[int], list[int]]]  # (request, its known tokens, the drafts behind them)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """As they are made."""
    found: Made = []
    inner = MedusaDraft.propose

    def propose(self: MedusaDraft, passes: Any, t: Any, slots: Any, *others: Any) -> Any:
        q = inner(self, passes, t, slots, *others)
        [batch] = passes
        for slot, name, k in zip(batch.slots, batch.request_ids, batch.query_lens, strict=True):
            known = int(slots.computed[slot]) + 1
            tokens = slots.tokens[slot, : known + k].tolist()
            found.append((name, tokens[:known], tokens[known:]))
        return q

    monkeypatch.setattr(MedusaDraft, "propose", propose)
    return found


def check_drafts(made: Made, heads: MedusaHeads, target: Any, asked: dict[str, SamplingParams]) -> None:
    for name, known, drafts in made:
        assert drafts == drafts_of(heads, target, known, len(drafts), asked[name]), (name, len(known))


@pytest.mark.parametrize(
    ("budget", "k", "prefix_cache", "late"), spread([(5, 2), (100, 4), (17, 5)], ["off", "hash"], [None, 1])
)
def test_drafts_are_those_of_the_definition(
    target, heads, plain, made, tapped_engine, budget: int, k: int, prefix_cache: str, late: int | None
) -> None:
    """Also of requests that begin behind a cached prefix: its hidden states are not there, and are not needed."""
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=heads), late=late, num_drafts=k, num_blocks=60, block_size=4, max_num_seqs=3,
        max_num_batched_tokens=budget, prefix_cache=prefix_cache,
    )  # fmt: skip
    for _ in range(2):
        check_texts(serve(engine, PURE), plain)
    hits = [cached for step in engine.trace.steps() for _, cached in step.admitted]
    assert (max(hits) > 0) == (prefix_cache != "off")
    assert len(made) > 30
    assert max(len(drafts) for _, _, drafts in made) == min(k, budget - 1)
    check_drafts(made, heads, target, PURE)
    kept = [num for step in kept_of(engine) for num, _ in step.values()]
    assert 0 < sum(kept) < sum(len(drafts) for _, _, drafts in made)  # some rejected, some kept


def test_rows_of_one_step_have_drafts_of_different_numbers(target, heads, made) -> None:
    config = EngineConfig(num_blocks=60, num_drafts=5, prefix_cache="off")
    asked = {f"r{i}": SamplingParams(max_tokens=2 + i, temperature=0.9, seed=i) for i in range(6)}
    engine = Engine(target, config, Parts(draft_model=heads))
    serve(engine, asked)
    check_drafts(made, heads, target, asked)
    assert any(len({row.num_drafts for row in step.rows}) > 3 for step in engine.trace.steps())


def test_a_sampler_that_looks_positions_up_on_the_device_draws_the_same_drafts(
    target, heads, plain, made, tapped_engine
) -> None:
    """As on a GPU: what is drawn at a position depends on that position's own random number."""
    parts = Parts(draft_model=heads, sampler=TwinSampler())
    engine, _ = tapped_engine(target, parts=parts, num_drafts=3, num_blocks=60, prefix_cache="off")
    check_texts(serve(engine, PURE), plain)
    assert {len(drafts) for _, _, drafts in made} >= {1, 3}
    check_drafts(made, heads, target, PURE)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_drafts_are_the_same_after_a_preemption(target, heads, plain, made, tapped_engine, preemption: str) -> None:
    """But for the first ones of a request that was swapped, which come of nothing."""
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=heads), num_drafts=4, block_size=4, num_blocks=16, max_num_batched_tokens=24,
        prefix_cache="off", preemption=preemption,
    )  # fmt: skip
    check_texts(serve(engine, PURE), plain)
    preempted = [name for step in engine.trace.steps() for name in step.preempted]
    assert preempted
    others = [
        name for name, known, drafts in made
        if drafts != drafts_of(heads, target, known, len(drafts), PURE[name])
    ]  # fmt: skip
    assert Counter(others) <= (Counter(preempted) if preemption == "swap" else Counter())


def test_samples_of_a_prompt_each_have_drafts_of_their_own(target, heads, made, tapped_engine) -> None:
    sampling = SamplingParams(max_tokens=20, seed=5, n=3)
    texts = []
    for num in (0, 3):
        engine, _ = tapped_engine(
            target, parts=Parts(draft_model=heads if num else None), num_drafts=num, num_blocks=64, block_size=4
        )
        first = engine.add(prompt("shared"), sampling, "a")
        members = [first, *first.children]
        while engine.has_work():
            engine.step()
        texts.append([member.tokens for member in members])
    assert texts[0] == texts[1]
    assert Counter(name for name, _, _ in made).keys() == {"a", "a/1", "a/2"}
    num_prompt = len(prompt("shared"))
    for name, known, drafts in made:  # each draws with numbers of its own
        if len(known) == num_prompt:
            continue  # forked just now: the first ones come of nothing
        h = hidden_of(target, known[:-1], len(target.layers))
        x = h @ heads.heads.params["weight"][:, :SIZE] + heads.heads.params["bias"][:SIZE]
        settings = np.array([settings_of(sampling, 5, int(name.partition("/")[2] or 0))], SETTINGS)
        t = TorchSampler().columns(settings, np.array([len(known)]))
        logits = target.logits((h + F.silu(x))[None])
        assert drafts[0] == int(TorchSampler().choose(logits, {n: torch.from_numpy(a) for n, a in t.items()}))


def test_a_model_with_windows_is_drafted_for_too(windowed, heads, made, tapped_engine) -> None:
    plain = texts_of(windowed)
    engine, _ = tapped_engine(
        windowed, parts=Parts(draft_model=heads), num_drafts=4, num_blocks=90, block_size=4, max_num_batched_tokens=11
    )
    assert len(engine.kv_specs) == 2
    check_texts(serve(engine, PURE), plain)
    check_drafts(made, heads, windowed, PURE)


# --- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preemption", "late"), spread(["recompute", "swap"], [None, 2]))
def test_the_text_is_that_of_plain_decoding(
    target, heads, plain, tapped_engine, preemption: str, late: int | None
) -> None:
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=heads), late=late, num_drafts=3, block_size=4, num_blocks=24,
        preemption=preemption, max_num_batched_tokens=24, prefix_cache="hash",
    )  # fmt: skip
    check_texts_when_preempted(engine, plain)


def test_any_schedule_of_requests_and_aborts_gives_the_same_texts(target, heads, tapped_engine) -> None:
    @settings(max_examples=examples(25), deadline=None, derandomize=True, database=None)
    @given(work=schedule())
    def same(work: tuple[list[dict[str, Any]], dict[str, Any]]) -> None:
        asked, options = work
        engine, _ = tapped_engine(target, parts=Parts(draft_model=random_heads()), **options)
        served = serve_at_times(engine, asked)
        for number, (members, a) in enumerate(zip(served, asked, strict=True)):
            for mine, text in zip(members, alone(target, a), strict=True):
                ended = mine.finish_reason != "abort"
                assert mine.tokens == (text if ended else text[: mine.num_tokens]), (number, mine.id)
        assert engine.kv.num_available == engine.num_blocks

    same()


@pytest.mark.parametrize("dtype", some([torch.bfloat16], [torch.float32, torch.bfloat16]))
def test_heads_of_another_dtype_than_the_targets_draft_too(target, plain, dtype: torch.dtype) -> None:
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), Parts(draft_model=random_heads(dtype=dtype)))
    check_texts(serve(engine, PURE), plain)
    assert DraftUse.of(engine.trace.steps()).num_accepted_tokens > 0


def test_heads_that_say_nan_change_no_text(target, plain, heads) -> None:
    heads.heads.params["bias"].fill_(torch.nan)
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), Parts(draft_model=heads))
    check_texts(serve(engine, ASKED), plain)


def test_after_a_request_that_failed_its_slot_is_as_good_as_before(target, heads, plain, made, tapped_engine) -> None:
    """Its last hidden state was NaN."""
    engine, _ = tapped_engine(
        target, parts=Parts(draft_model=heads), num_drafts=3, num_blocks=60, max_num_seqs=1, prefix_cache="off"
    )
    draft = draft_of(engine)
    draft.ahead.fill_(torch.nan)
    check_texts(serve(engine, PURE), plain)
    check_drafts(made, heads, target, PURE)


@pytest.mark.parametrize("max_model_len", [17, 20, 22])
def test_no_draft_lies_behind_the_last_position(target, heads, tapped_engine, max_model_len: int) -> None:
    texts = []
    for drafts in (0, 5):
        engine, _ = tapped_engine(
            target, parts=Parts(draft_model=heads if drafts else None), num_drafts=drafts, block_size=4,
            num_blocks=-(-(max_model_len - 1) // 4), max_model_len=max_model_len,
        )  # fmt: skip
        request = engine.add(list(range(9)), SamplingParams(max_tokens=99, seed=1))
        while engine.has_work():
            engine.step()
        texts.append(request.tokens)
    assert len(texts[0]) == max_model_len
    assert texts[0] == texts[1]


def test_other_uses_of_the_engine_stand_beside_them(target, heads) -> None:
    """Prompts that are scored or pooled, held requests, 8 bits, tokens computed one by one."""
    expected = Engine(target, EngineConfig(num_blocks=64))
    engine = Engine(target, EngineConfig(num_blocks=64, num_drafts=3), Parts(draft_model=heads))
    found = []
    for one in (expected, engine):
        scored = one.add(prompt("scored"), SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=2), "s")
        pooled = one.add(prompt("pooled"), pooling="last")
        held = one.add(prompt("held"), SamplingParams(max_tokens=5, temperature=0), "h", holds=True)
        for token in range(4):
            one.step()
            one.append("h", token)
        one.abort("h")
        while one.has_work():
            one.step()
        found.append((scored.tokens, [r and r.token for r in scored.prompt_logprobs], held.tokens))
        assert pooled.embedding is not None
    assert found[0] == found[1]
    for options in ({"kv_dtype": "int8"}, {"batch_invariant": True}):
        config = EngineConfig(num_blocks=64, block_size=4, **options)
        texts = {name: r.tokens for name, r in serve(Engine(target, config), PURE).items()}
        engine = Engine(target, dataclasses.replace(config, num_drafts=3), Parts(draft_model=random_heads()))
        check_texts(serve(engine, PURE), texts)


def test_pages_of_a_store_are_all_that_a_prefix_needs(target, heads, plain, made) -> None:
    """There is nothing of the heads' in them."""
    store = FakeStore(["now"])
    for _ in range(2):
        config = EngineConfig(num_blocks=64, block_size=4, num_drafts=3)
        engine = Engine(target, config, Parts(draft_model=heads, page_store=store))
        check_texts(serve(engine, PURE), plain)
        engine.save_pages()
    assert store.begun, "the second engine loaded nothing"
    check_drafts(made, heads, target, PURE)


def test_heads_draft_for_one_model(target, heads, random_model) -> None:
    Engine(target, EngineConfig(num_blocks=8, num_drafts=2), Parts(draft_model=heads))
    other = random_model("float64", max_position_embeddings=64)
    with pytest.raises(ValueError, match="draft for another model already"):
        Engine(other, EngineConfig(num_blocks=8, num_drafts=2), Parts(draft_model=heads))


def test_they_need_no_memory_of_the_cache(target, heads) -> None:
    config = EngineConfig(kv_cache_bytes=2**20)
    engine = Engine(target, dataclasses.replace(config, num_drafts=2), Parts(draft_model=heads))
    assert engine.num_blocks == Engine(target, config).num_blocks
