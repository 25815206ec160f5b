"""Numbers that are not finite: weights are refused by file and tensor; a request ends with an error that says where
such numbers began, and its neighbours write what they write alone."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from safetensors.torch import load_file, save_file
from torch import Tensor

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.parts import Parts
from reference_impl.assembly.sampler import sample
from reference_impl.core.alone import core_engine
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import RequestFinished, SamplingParams
from reference_impl.models.loader import CheckpointError
from tests.engine.conftest import some
from tests.executor.tape import recorder

POISON, CLEAN = 7, [3, 4, 5, 6, 8, 9]
PLAIN: dict[str, Any] = {"num_blocks": 64, "block_size": 4}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap": "on"},
    "in chunks": {"max_num_batched_tokens": 5},
    "without prefix cache": {"prefix_cache": "off"},
}


@contextmanager
def planted(tensor: Tensor, value: float = float("nan")) -> Iterator[None]:
    """One number of a model's weights, which other tests share."""
    kept = tensor.flatten()[0].item()
    tensor.view(-1)[0] = value
    try:
        yield
    finally:
        tensor.view(-1)[0] = kept


def prompts(poisoned: bool) -> list[list[int]]:
    return [CLEAN, [1, 2, POISON if poisoned else 10, 11, 12], CLEAN[::-1], [POISON if poisoned else 13]]


def finish(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def run(engine: Engine, sampling: SamplingParams, given: list[list[int]]) -> list[Any]:
    requests = [engine.add(prompt, sampling) for prompt in given]
    finish(engine)
    assert engine.kv.num_available == engine.num_blocks
    return requests


def alone(model: Decoder, prompt: list[int], sampling: SamplingParams) -> list[int]:
    return run(Engine(model, EngineConfig(**PLAIN)), sampling, [prompt])[0].output_tokens


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 6},
        {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 2},
    ],
    ids=["greedy", "drawn", "penalties and log-probabilities"],
)
def test_only_the_requests_that_have_such_a_token_end(way, options, random_model) -> None:
    model, sampling = random_model("float32"), SamplingParams(max_tokens=6, ignore_eos=True, **options)
    expected = [alone(model, prompt, sampling) for prompt in (CLEAN, CLEAN[::-1])]
    assert not any(POISON in tokens for tokens in expected), "the test needs another token"
    engine = Engine(model, EngineConfig(**PLAIN, **WAYS[way]))
    with planted(model.embedding[POISON]), pytest.warns(RuntimeWarning, match="not all finite"):
        found = run(engine, sampling, prompts(poisoned=True))
    assert [found[0].output_tokens, found[2].output_tokens] == expected
    for request in (found[1], found[3]):
        assert (request.finish_reason, request.output_tokens) == ("error", [])
        assert f"request '{request.id}': its logits are not all finite" in request.error
        assert "the first such numbers are in the embedding" in request.error
    ends = {event.request_id: event.reason for event in engine.trace.events if isinstance(event, RequestFinished)}
    assert [ends[request.id] for request in found] == ["length", "error", "length", "error"]
    assert [request.error for request in run(engine, sampling, prompts(poisoned=False))] == [None] * 4


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("way", ["plain", "overlapped", "in chunks"])
def test_what_it_had_cached_fails_no_other_request(way, index, random_model) -> None:
    """The numbers before the bad one are broken, too, where they were computed in one step with it."""
    model, sampling = random_model("float32"), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    shared = [*CLEAN, *CLEAN[::-1]]
    expected = alone(model, [*shared, 10], sampling)
    assert POISON not in expected, "the test needs another token"
    engine = Engine(model, EngineConfig(**PLAIN, **WAYS[way], prefix_cache=index))
    neighbour = engine.add([20, 21, 22, 23, 24], SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    with planted(model.embedding[POISON]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first = engine.add([*shared, POISON], sampling)
        while first.finish_reason is None:
            engine.step()
        for _ in range(2):  # overlapped, a step with it still ran
            engine.step()
        second = engine.add([*shared, 10], sampling)
        finish(engine)
    assert (first.finish_reason, second.output_tokens) == ("error", expected)
    assert POISON in neighbour.output_tokens or neighbour.finish_reason == "length"
    assert engine.kv.num_available == engine.num_blocks


SHARED = [*CLEAN, *CLEAN[::-1]]
SHARING: dict[str, dict[str, Any]] = {
    "hash": {},
    "radix": {"prefix_cache": "radix"},
    "overlapped": {"overlap": "on"},
    "in chunks": {"max_num_batched_tokens": 16},
    "overlapped in chunks": {"max_num_batched_tokens": 9, "overlap": "on"},
}


@pytest.mark.parametrize("pause", [0, 1, 2])  # steps between the two
@pytest.mark.parametrize("way", SHARING)
def test_a_neighbour_that_shares_its_prefix_computes_it_again(way: str, pause: int, random_model: Any) -> None:
    """Before one token is bad, many are: what comes before it in the same step, which the neighbour took over."""
    model, sampling = random_model("float32"), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    expected = alone(model, [*SHARED, 10], sampling)
    engine = Engine(model, EngineConfig(**PLAIN, **SHARING[way]))
    with planted(model.embedding[POISON]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bad = engine.add([*SHARED, POISON, *range(20, 40)], sampling)
        for _ in range(pause):
            engine.step()
        neighbours = [engine.add([*SHARED, 10], replace(sampling, n=n)) for n in (1, 2)]
        neighbours += neighbours[1].children
        finish(engine)
    assert (bad.finish_reason, bad.output_tokens) == ("error", [])
    assert [(r.finish_reason, r.output_tokens) for r in neighbours] == [("length", expected)] * 3
    assert engine.kv.num_available == engine.num_blocks
    assert run(engine, sampling, [[*SHARED, 10]])[0].output_tokens == expected


def test_those_whose_own_tokens_are_bad_end_although_they_share(random_model: Any) -> None:
    model, sampling = random_model("float32"), SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    engine = Engine(model, EngineConfig(**PLAIN))
    with planted(model.embedding[POISON]), pytest.warns(RuntimeWarning, match="in the embedding"):
        found = run(engine, sampling, [[*SHARED, POISON], [*SHARED, POISON], [*SHARED, 10]])
    assert [request.finish_reason for request in found] == ["error", "error", "length"]
    assert found[2].output_tokens == alone(model, [*SHARED, 10], sampling)


@pytest.mark.parametrize("steps", [2, 4])
@pytest.mark.parametrize("where", ["shared", "its own"])
@pytest.mark.parametrize(
    "options", [{}, {"overlap": "on"}, {"num_drafts": 2}, {"num_drafts": 2, "overlap": "on"}], ids=str
)
def test_a_bad_number_in_the_cache_ends_none_of_those_that_share_it(
    options: dict[str, Any], where: str, steps: int, random_model: Any
) -> None:
    """It is gone when the tokens are computed again."""
    model, sampling = random_model("float64"), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    given = [[*SHARED, 10, 11], [*SHARED, 12], [20, 21, 22, 23, 24]]
    expected = [alone(model, prompt, sampling) for prompt in given]
    parts = Parts(draft_model=random_model("float64", num_hidden_layers=1)) if "num_drafts" in options else None
    engine = Engine(model, EngineConfig(**PLAIN, **options), parts)
    requests = [engine.add(prompt, sampling) for prompt in given]
    for _ in range(steps):
        engine.step()
    assert requests[0].block_table[:3] == requests[1].block_table[:3]
    block = requests[0].block_table[0 if where == "shared" else 3]
    keys, _ = engine.kv_cache.layer(1)
    keys[block, 0] = torch.nan
    finish(engine)
    assert [(r.finish_reason, r.output_tokens) for r in requests] == [("length", tokens) for tokens in expected]
    assert engine.kv.num_available == engine.num_blocks
    preempted = [name for step in engine.trace.steps() for name in step.preempted]
    assert sorted(preempted) == ["0", "1"]


PLACES: dict[str, Callable[[Decoder], Tensor]] = {
    "model.layers.0.self_attn.qkv_proj": lambda m: m.layers[0].qkv.params["weight"],  # of its first head
    "model.layers.1.self_attn.o_proj": lambda m: m.layers[1].o.params["weight"],
    "model.layers.0.mlp.gate_up_proj": lambda m: m.layers[0].mlp.gate_up.params["weight"],
    "model.layers.1.mlp.down_proj": lambda m: m.layers[1].mlp.down.params["weight"],
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", PLACES)
def test_the_error_names_the_first_layer(place, value, random_model) -> None:
    model = random_model("float64")  # its weights are not packed
    with planted(PLACES[place](model), value), pytest.warns(RuntimeWarning):
        [request] = run(Engine(model, EngineConfig(**PLAIN)), SamplingParams(max_tokens=4), [CLEAN])
    assert f"in what {place} gives" in request.error


LENGTHS = list(itertools.product(("query", "key"), (1, 2, 6, 15, 16, 17)))


@pytest.mark.parametrize(
    ("part", "length", "kernels"),
    some(
        [("query", 17, "triton"), ("key", 2, "triton"), *((*case, "torch") for case in LENGTHS)],
        [(*case, kernels) for case in LENGTHS for kernels in ("torch", "triton")],
    ),
)
def test_queries_or_keys_alone_are_enough_at_any_length(part, length, kernels, random_model) -> None:
    """torch's fused attention on a CPU gives 0 for scores that are all NaN, of fewer than 16 keys without a mask."""
    model = random_model("float32" if kernels == "triton" else "float64", kernels=kernels, num_hidden_layers=1)
    weight, config = model.layers[0].qkv.params["weight"], model.config
    output = 0 if part == "query" else config.num_heads * config.head_dim
    weight = weight[output] if weight.shape[1] == config.hidden_size else weight[0, output:]
    engine = Engine(model, EngineConfig(**PLAIN, attention=kernels))
    sampling = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with planted(weight), pytest.warns(RuntimeWarning):
        found = run(engine, sampling, [[20 + i for i in range(length)], [30 + i for i in range(length)]])
    for request in found:
        assert (request.finish_reason, request.output_tokens) == ("error", [])
        assert "in what model.layers.0.self_attn.qkv_proj gives" in request.error


def test_norms_and_the_head_are_named_too(random_model) -> None:
    model = random_model("float64")
    for tensor, said in ((model.norm, "in the last norm"), (model.lm_head, "in the logits, behind the last norm")):
        with planted(tensor), pytest.warns(RuntimeWarning):
            [request] = run(Engine(model, EngineConfig(**PLAIN)), SamplingParams(max_tokens=4), [CLEAN])
        assert said in request.error
    with planted(model.layers[1].mlp_norm), pytest.warns(RuntimeWarning):
        [request] = run(Engine(model, EngineConfig(**PLAIN)), SamplingParams(max_tokens=4), [CLEAN])
    assert "in what goes into model.layers.1.mlp.gate_up_proj, behind what model.layers.1.self_attn.o_proj gives" in (
        request.error
    )


@pytest.mark.parametrize(("kernels", "tokens"), [("torch", 61), ("triton", 16)])
def test_an_expert_fails_those_whose_tokens_are_sent_to_it(kernels, tokens, random_model) -> None:
    shape = {
        "architecture": "Qwen3MoeForCausalLM", "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
        "norm_topk_prob": True, "num_hidden_layers": 1,
    }  # fmt: skip
    model = random_model("float32" if kernels == "triton" else "float64", kernels=kernels, **shape)
    experts = model.layers[0].mlp.experts
    weight = experts.gate_up[2] if kernels == "triton" else experts[2].gate_up.params["weight"]
    sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    engine = Engine(model, EngineConfig(**PLAIN, attention=kernels))
    with planted(weight), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(engine, sampling, [[token] for token in range(tokens)])
    failed = [request for request in found if request.finish_reason == "error"]
    assert 0 < len(failed) < len(found)
    for request in failed:
        assert "model.layers.0.mlp.experts.2." in request.error


def test_replayed_steps_notice_it(random_model) -> None:
    """With graphs on the tape; sampling inside of them needs the sampling kernel."""
    from tests.executor.dense import dense_engine, dense_model

    model = dense_model(random_model("float64"))
    engine = dense_engine(model, num_blocks=64, block_size=4, max_num_seqs=4)
    engine.executor.use_graphs(recorder(), 4, engine.max_model_len)
    first = engine.add(CLEAN, SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    second = engine.add([1, 2, 10], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True))
    for _ in range(4):
        engine.step()
    assert engine.executor.stats.replayed_steps
    with planted(engine.model.norm), pytest.warns(RuntimeWarning):
        finish(engine)
    assert (first.finish_reason, second.finish_reason) == ("error", "error")
    assert engine.kv.num_available == engine.num_blocks


def test_all_requests_may_fail_while_a_step_is_in_flight(random_model) -> None:
    model, sampling = random_model("float64"), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = alone(model, CLEAN, sampling)
    engine = Engine(model, EngineConfig(**PLAIN, overlap="on"))
    broken = engine.add(CLEAN, sampling)
    for _ in range(3):
        engine.step()
    with planted(engine.model.norm), pytest.warns(RuntimeWarning):
        finish(engine)
    assert broken.finish_reason == "error"
    assert run(engine, sampling, [CLEAN])[0].output_tokens == expected


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_request_may_fail_in_a_step_that_verifies_drafts(overlap: str, random_model) -> None:
    model, sampling = random_model("float64"), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    expected = alone(model, CLEAN, sampling)
    config = EngineConfig(**PLAIN, num_drafts=2, overlap=overlap, prefix_cache="off")  # it ends at once
    engine = Engine(model, config, Parts(draft_model=random_model("float64", num_hidden_layers=1)))
    broken = [engine.add(prompt, sampling) for prompt in (CLEAN, [1, 2, 10])]
    for _ in range(3):
        engine.step()
    before = [len(request.output_tokens) for request in broken]
    with planted(engine.model.norm), pytest.warns(RuntimeWarning):
        finish(engine)
    assert any(row.num_drafts for row in engine.trace.steps()[-1].rows)
    assert [request.finish_reason for request in broken] == ["error", "error"]
    # Overlapped, one step was in flight when the number was planted.
    assert all(0 <= len(r.output_tokens) - had <= 3 * (overlap == "on") for r, had in zip(broken, before, strict=True))
    assert run(engine, sampling, [CLEAN])[0].output_tokens == expected


def test_a_sampler_of_ones_own_is_checked_too(random_model) -> None:
    model = random_model("float32")
    engine = Engine(model, EngineConfig(**PLAIN), Parts(sampler=lambda logits, requests: sample(logits, requests)))
    with planted(model.embedding[POISON]), pytest.warns(RuntimeWarning):
        found = run(engine, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), prompts(poisoned=True))
    assert [request.finish_reason for request in found] == ["length", "error", "length", "error"]


def test_samples_of_one_prompt_end_together(random_model) -> None:
    model = random_model("float32")
    engine = Engine(model, EngineConfig(**PLAIN))
    sampling = SamplingParams(n=2, max_tokens=3, seed=0)  # with another the second request might draw POISON
    with planted(model.embedding[POISON]), pytest.warns(RuntimeWarning):
        parent, other = run(engine, sampling, [[1, POISON], CLEAN])
    assert (parent.finish_reason, other.finish_reason) == ("error", "length")


def test_the_front_door_says_it_wherever_text_comes_out() -> None:
    llm = LLM(course_model("draft"), dtype="float64", device="cpu", num_blocks=64)
    where = "first such numbers are in what goes into model.layers.1.mlp.gate_up_proj"
    with planted(llm.engine.model.layers[1].mlp_norm):
        with pytest.warns(RuntimeWarning, match=where):
            output = llm.generate("def f(", SamplingParams(max_tokens=3, n=2))[0]
        assert [one.finish_reason for one in (output, *output.others, *output.outputs)] == ["error"] * 4
        assert where in str(output.error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match=where):
                list(llm.stream("def f("))
            with pytest.raises(RuntimeError, match=where):
                llm.beam_search("def f(", width=2, max_tokens=4)
            with pytest.raises(RuntimeError, match="hidden states are not all finite"):
                llm.embed("def f(")
    assert not llm.engine.requests
    assert llm.engine.kv.num_available == 64


def test_the_core_alone_raises(random_model) -> None:
    model = random_model("float32")
    engine = core_engine(model, num_blocks=16, block_size=4)
    request = engine.add([1, POISON], SamplingParams(max_tokens=3))
    with (
        planted(model.embedding[POISON]),
        pytest.raises(FloatingPointError, match="request '0': its logits are not all"),
    ):
        engine.step()
    engine.abort(request.id)
    engine.add(CLEAN, SamplingParams(max_tokens=3))
    engine.step()


@pytest.mark.parametrize(
    ("value", "dtype", "said"),
    [
        (float("nan"), torch.float32, "expected finite numbers, found nan at [2, 1], and 0 more"),
        (float("-inf"), torch.float32, "expected finite numbers, found -inf at [2, 1], and 0 more"),
        (
            1e5,
            torch.float16,
            "expected numbers within the range of torch.float16, in which it is loaded, found 99840.0",
        ),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_file_and_tensor(value, dtype, said, tmp_path) -> None:
    folder = shutil.copytree(course_model("draft"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][2, 1] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_model(folder, dtype)
    assert f"model.safetensors: tensor {name}: {said}" in str(error.value)
