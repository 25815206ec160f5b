"""The engine with our Triton kernels, in the interpreter or on a GPU: the logits it has with torch, and no fallback."""

from __future__ import annotations

import importlib
import os
import random
from collections import Counter
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.sampler import sample
from reference_impl.core.attention import TorchAttention
from reference_impl.core.ranking import FirstCome
from reference_impl.features.fusion import attention as triton_attention
from reference_impl.features.fusion.attention import TritonAttention
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.interfaces import SamplingParams
from reference_impl.kernels import launch, reference
from tests.engine.conftest import one_shot, tapped_engine  # noqa: F401
from tests.engine.test_schedule_invariance import MODELS, Asked, check_workload
from tests.models.conftest import save, their_logits  # noqa: F401
from tests.models.test_parity import FP32, worst

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS: dict[str, dict[str, Any]] = {
    **MODELS,
    **{kind: MODELS[kind] | {"num_hidden_layers": 1} for kind in ("window", "experts")},
    "full and windows": MODELS["full and windows"] | {"num_hidden_layers": 2},
    "soft cap": {
        "architecture": "Gemma2ForCausalLM", "sliding_window": 6, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip


def asked(prompt: int, new: int, arrival: int = 0, abort: int | None = None, first: int = 0, **sampling: Any) -> Asked:
    """A prompt of so many tokens, counted from `first`: prompts with the same one share a prefix."""
    tokens = tuple((first + 7 * i) % 61 for i in range(prompt))
    return Asked(tokens, SamplingParams(max_tokens=new, seed=prompt, **sampling), None, arrival, abort)


GREEDY = {"temperature": 0}
# Too few blocks: requests are thrown out, some to the host, and come back in chunks; prefixes and samples are shared.
CROWDED = [asked(11, 4, first=1, n=2), asked(9, 4, first=2), asked(13, 3, 1, first=1), asked(1, 6, 2, abort=6)]
CROWDED_OPTIONS = {
    "block_size": 2, "num_blocks": 14, "max_num_seqs": 4, "max_num_batched_tokens": 9, "prefix_cache": "hash",
    "admission": "fill", "num_host_blocks": 3, "policy": FirstCome, "seed": 1,
}  # fmt: skip


# The interpreter takes its time: all small kernels are in one of them, attention in all.
@pytest.mark.parametrize(
    ("kind", "kernels"), [("full", "triton"), *((kind, "torch") for kind in KINDS if kind != "full")]
)
def test_logits_are_those_of_torch_whatever_the_schedule(kind, kernels, random_model, tapped_engine, one_shot) -> None:  # noqa: F811
    model = random_model("float32", device=DEVICE, kernels=kernels, **KINDS[kind])
    plain = random_model("float32", device=DEVICE, kernels="torch", **KINDS[kind])

    engines: list[Engine] = []

    def with_triton(*arguments: Any, **options: Any) -> Any:
        engine, logits = tapped_engine(*arguments, attention="triton", **options)
        engines.append(engine)
        assert isinstance(engine.attention, TritonAttention)
        return engine, logits

    @settings(phases=[Phase.explicit], deadline=None)
    @example(work=(CROWDED, CROWDED_OPTIONS))
    @given(work=st.just(None))
    def schedule_does_not_matter(work: Any) -> None:
        check_workload(model, work, with_triton, lambda _, tokens: one_shot(plain, tokens))

    schedule_does_not_matter()
    steps = engines[0].trace.steps()
    assert "window" in kind or kind == "soft cap" or any(step.preempted for step in steps)  # those have blocks to spare
    assert any(row.num_tokens > 1 and not row.samples for step in steps for row in step.rows), "a chunk"
    assert ("flash_attention", "paged_decode") in [step.attention for step in steps]


@pytest.mark.parametrize("name", ["llama_head_dim", "gemma2", "gemma3_capped"])
def test_logits_are_those_of_transformers(name, save, their_logits, tapped_engine) -> None:  # noqa: F811
    """Prompts in chunks beside rows that decode."""
    theirs, folder = save(name, num_hidden_layers=1 if name == "llama_head_dim" else 2)  # the others: one has a window
    model = load_model(folder, device=DEVICE, kernels="triton")
    engine, logits = tapped_engine(
        model, block_size=8, num_blocks=30, max_num_seqs=3, max_num_batched_tokens=12, attention="triton"
    )
    sampling, chance = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True), random.Random(0)
    requests = [engine.add(chance.choices(range(97), k=n), sampling) for n in (4, 11, 7)]
    while engine.has_work():
        engine.step()
    assert ("flash_attention", "paged_decode") in [step.attention for step in engine.trace.steps()]
    for request in requests:
        found = [logits[request.id][position][0].cpu() for position in range(request.num_tokens - 1)]
        assert worst(torch.stack(found), their_logits(theirs, request.tokens[:-1])) <= FP32


def test_the_course_model_says_the_same_and_the_trace_says_what_computed_it() -> None:
    greedy = SamplingParams(max_tokens=2, temperature=0)
    prompts = ["def fibonacci(n):", "import os\n\nclass"]
    texts, ran = {}, {}
    for name in ("torch", "triton"):
        llm = LLM(course_model("draft"), dtype="float32", attention=name)
        texts[name] = [output.token_ids for output in llm.generate(prompts, greedy)]
        ran[name] = [step.attention for step in llm.engine.trace.steps()]
        assert isinstance(llm.engine.model, FusedDecoder) == (name == "triton")
    assert texts["triton"] == texts["torch"]
    assert ran == {"torch": [("sdpa",)] * 2, "triton": [("flash_attention",), ("paged_decode",)]}


MODULES = ("fused_linear", "rms_norm", "gates", "rotate_and_write", "flash_attention", "paged_decode")


@pytest.fixture
def launched(monkeypatch) -> Counter[str]:
    """How often each kernel was launched, by its name in the source."""
    counts: Counter[str] = Counter()

    def counted(kernel: Any, *arguments: Any, **options: Any) -> None:
        counts[kernel.fn.__name__ if hasattr(kernel, "fn") else kernel.__name__] += 1
        launch.launch(kernel, *arguments, **options)

    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(f"reference_impl.kernels.{name}"), "launch", counted)
    return counts


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_layer_is_its_products_and_its_attention(qk_norm, random_model, launched) -> None:
    """Of few tokens the products have norms, gate and residual in them (test_fused_layers.py); 65 are too many."""
    architecture = "Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM"
    model = random_model("float32", device=DEVICE, kernels="triton", architecture=architecture)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=20, attention="triton", max_num_batched_tokens=65))
    engine.add([1, 2, 3, 4, 5] * 13, SamplingParams(max_tokens=2))
    engine.step()
    assert launched == {"_rms_norm": 2 * 2 + 1, "_act_and_mul": 2, "_rotate_and_write": 2, "_flash_attention": 2}
    launched.clear()
    engine.step()
    assert launched == {"_fused_linear": 4 * 2, "_rms_norm": 1, "_rotate_and_write": 2, "_paged_decode": 2}


def test_a_backend_that_writes_the_cache_itself_gets_rotated_keys(random_model, launched) -> None:
    """A learner's, or torch's, in a model whose other kernels are Triton's."""
    model, plain = (random_model("float32", device=DEVICE, kernels=name) for name in ("triton", "torch"))
    texts = []
    for m in (model, plain):
        engine = Engine(m, EngineConfig(block_size=4, num_blocks=20, attention="torch"))
        request = engine.add([1, 2, 3, 4, 5], SamplingParams(max_tokens=3, temperature=0))
        while engine.has_work():
            engine.step()
        texts.append(request.output_tokens)
    assert texts[0] == texts[1]
    assert set(launched) == {"_rms_norm", "_fused_linear"}


class NotRunnable(RuntimeError):
    pass


def fails(*_: Any, **__: Any) -> Any:
    raise NotRunnable


def test_nothing_falls_back_to_torch(random_model, monkeypatch) -> None:
    """E05.13: an engine that was asked for fused kernels and quietly does without is the thing to find out."""
    model = random_model("float32", device=DEVICE, num_hidden_layers=1)
    for name in ("paged_decode", "flash_attention"):
        engine = Engine(model, EngineConfig(block_size=4, num_blocks=20, attention="triton"))
        engine.add([1, 2, 3], SamplingParams(max_tokens=2))
        with monkeypatch.context() as patch, pytest.raises(NotRunnable):  # noqa: PT012
            patch.setattr(triton_attention, name, fails)
            while engine.has_work():
                engine.step()
    monkeypatch.setattr(reference, "attention_one_row", fails)
    monkeypatch.setattr(reference, "attention_rows", fails)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fails)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=20, attention="triton"))
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    while engine.has_work():
        engine.step()
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=20, attention="torch"))
    engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    with pytest.raises(NotRunnable):
        engine.step()


@pytest.mark.parametrize("decoding", [False, True])
def test_what_torch_computes_is_fused_too(decoding, random_model) -> None:
    """scaled_dot_product_attention has a path that writes the scores out; which one ran, the profiler says."""
    model = random_model("float32", device=DEVICE)
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=40, attention="torch"))
    for prompt in ([1] * 9, [2] * 5, [3] * 7):
        engine.add(prompt, SamplingParams(max_tokens=3))
    if decoding:
        engine.step()
    with torch.profiler.profile() as profile:
        engine.step()
    names = {event.key for event in profile.key_averages()}
    assert "aten::scaled_dot_product_attention" in names
    assert "aten::_scaled_dot_product_attention_math" not in names
    assert engine.trace.steps()[-1].attention == ("sdpa",)


def test_a_soft_cap_in_torch_is_said_to_be_unfused(random_model) -> None:
    engine = Engine(random_model("float32", device=DEVICE, **KINDS["soft cap"]), EngineConfig(attention="torch"))
    engine.add([1, 2, 3], SamplingParams(max_tokens=1))
    engine.step()
    assert engine.trace.steps()[-1].attention == ("unfused",)


def test_by_itself_the_engine_takes_torch_on_a_cpu_and_triton_on_a_gpu(random_model) -> None:
    engine = Engine(random_model("float32"))
    assert isinstance(engine.attention, TorchAttention), "the interpreter is no GPU"
    if DEVICE == "cuda":
        assert isinstance(Engine(random_model("float32", device=DEVICE)).attention, TritonAttention)
        assert isinstance(Engine(random_model("float64", device=DEVICE)).attention, TorchAttention)


def test_what_cannot_be_is_refused_by_name(random_model) -> None:
    with pytest.raises(ValueError, match="expected one of auto, triton, torch, compiled, got 'flash'"):
        EngineConfig(attention="flash")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attention='triton' cannot be: the kernels compute .* this model is float64"):
        Engine(random_model("float64", device=DEVICE), EngineConfig(attention="triton"))


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        ("", "the model is on cpu, not on a GPU, and TRITON_INTERPRET=1 was not set"),
        ("import sys; sys.modules['triton'] = None", "there is no Triton here"),
    ],
)
def test_without_a_gpu_or_without_triton_it_says_so(before: str, reason: str, warm) -> None:
    """In a process of its own: this one has the interpreter."""
    code = f"""
{before}
import torch
from reference_impl.features.fusion.kernels import choose_backend
assert choose_backend("auto", torch.device("cpu"), torch.float32) == "torch"
choose_backend("triton", torch.device("cpu"), torch.float32)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run(("-c", code), environment)
    assert done.returncode == 1
    assert f"ValueError: attention='triton' cannot be: {reason}" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_half_precision_no_token_is_further_from_float64_than_with_torch(dtype, random_model, one_shot) -> None:  # noqa: F811
    prompt, worst_error = [(7 * i) % 61 for i in range(100)], {}
    exact = one_shot(random_model("float64", device=DEVICE), prompt)[-1]
    for name in ("torch", "triton"):
        engine = Engine(random_model(dtype, device=DEVICE), EngineConfig(attention=name))
        assert isinstance(engine.attention, TritonAttention) == (name == "triton")
        logits: list[torch.Tensor] = []
        engine.executor.ask(lambda found, requests, seen=logits: (seen.append(found), sample(found, requests))[1])
        engine.add(prompt, SamplingParams(max_tokens=1, temperature=0))
        engine.step()
        worst_error[name] = (logits[0][0].double() - exact).abs().max()
    assert (
        worst_error["triton"]
        <= 2 * worst_error["torch"] + 2 * torch.finfo(getattr(torch, dtype)).eps * exact.abs().max()
    )
