"""Steps of one token in compiled functions: the same logits, the same texts, and errors for what cannot be compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reference_impl.assembly.compiled import PRODUCTS, compile_one_row, methods_to_compile
from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.core.attention import TorchAttention
from reference_impl.core.decoder import Decoder
from reference_impl.features.compiled.decoder import CompiledDecoder, Functions, Rows
from reference_impl.features.speculative.early_exit import first_layers
from reference_impl.interfaces import SamplingParams

pytestmark = pytest.mark.compiler

FORMS: dict[str, dict[str, Any]] = {
    "qwen3, tied": {
        "dtype": "float64", "tie_word_embeddings": True, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh",
    },
    "llama": {
        "dtype": "float32", "architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
CLOSE = {torch.float64: 1e-10, torch.float32: 2e-4}
ASKED = {
    "a": ([5, 7, 11], SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)),
    "b": (list(range(3, 30)), SamplingParams(max_tokens=9, temperature=1.1, seed=3, ignore_eos=True)),
    "c": ([9] * 6, SamplingParams(max_tokens=12, temperature=0.7, top_p=0.8, seed=4, ignore_eos=True)),
}


@pytest.fixture(scope="module", params=["qwen3, tied", pytest.param("llama", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest, random_model: Callable[..., Decoder]) -> tuple[Decoder, CompiledDecoder]:
    """A model, and the same weights in a compiled one."""
    plain = random_model(**FORMS[request.param], kernels="torch")
    found = random_model(**FORMS[request.param], kernels="compiled")
    assert type(found) is Decoder, "its weights come first"
    compiled = compile_one_row(found)
    assert isinstance(compiled, CompiledDecoder)
    return plain, compiled


def texts(model: Decoder, asked: dict[str, Any] = ASKED, **options: Any) -> dict[str, list[int]]:
    engine = Engine(model, EngineConfig(num_blocks=40, block_size=4, prefix_cache="off", **options))
    requests = [engine.add(prompt, sampling, request_id=name) for name, (prompt, sampling) in asked.items()]
    while engine.has_work():
        engine.step()
    return {request.id: request.tokens for request in requests}


def test_a_step_of_one_token_is_computed_by_the_functions_and_gives_the_models_logits(
    pair: tuple[Decoder, CompiledDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, call = list[str](), Functions.__call__
    monkeypatch.setattr(Functions, "__call__", lambda self, name, *rest: (ran.append(name), call(self, name, *rest))[1])
    logits: list[list[torch.Tensor]] = []
    for model in pair:
        given, of_model = list[torch.Tensor](), model.logits
        monkeypatch.setattr(model, "logits", lambda hidden, f=of_model, g=given: (g.append(f(hidden)), g[-1])[1])
        texts(model, {"a": ASKED["a"]})
        logits.append(given)
    expected, found = (torch.cat(each) for each in logits)
    assert torch.allclose(found, expected, atol=CLOSE[expected.dtype] * float(expected.abs().max()), rtol=0)
    # The prompt's logits are one row, too.
    assert ran == ["head"] + ["before", "between", "end", "head"] * 13


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 8}, {"max_num_seqs": 1}, {"batch_invariant": True}])
def test_texts_are_those_of_the_plain_model(pair: tuple[Decoder, CompiledDecoder], options: dict[str, Any]) -> None:
    """Alone, beside others, and behind chunks of prompts."""
    plain, compiled = pair
    assert texts(compiled, **options) == texts(plain, **options)


def test_drafts_by_the_first_layers_are_of_those_alone(pair: tuple[Decoder, CompiledDecoder]) -> None:
    plain, compiled = pair
    early = first_layers(compiled, 1)
    assert len(early.layers) == 1 < len(compiled.layers)
    options: dict[str, Any] = {"speculative": "early-exit", "num_drafts": 2, "exit_layer": 1, "adaptive_drafts": "off"}
    assert texts(compiled, **options) == texts(plain)


def test_texts_do_not_depend_on_the_number_of_threads(pair: tuple[Decoder, CompiledDecoder]) -> None:
    _, compiled = pair
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(texts(compiled))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_more_rows_are_multiplied_by_torch_and_one_alike() -> None:
    random = torch.Generator().manual_seed(2)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        method = Rows(dtype)
        params = method.create(24, 40, True)
        method.load(params, "weight", torch.randn(40, 24, generator=random), 0)
        method.load(params, "bias", torch.randn(40, generator=random), 0)
        x = torch.randn(12, 24, generator=random).to(dtype)
        many, rows = method.apply(params, x), [Rows.one_row(params, row[None]) for row in x]
        assert all(row.dtype is dtype and row.shape == (1, 40) for row in rows)
        assert torch.allclose(torch.cat(rows).float(), many.float(), atol=torch.finfo(dtype).eps * 40)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_quantized_weights_are_their_methods(kind: Any, dtype: torch.dtype) -> None:
    method = methods_to_compile(kind, dtype)("model.layers.0.mlp.down_proj")
    params = method.create(64, 40, False)
    method.load(params, "weight", torch.randn(40, 64, generator=torch.Generator().manual_seed(1)), 0)
    method.finish(params)
    x = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    found, expected = PRODUCTS[type(method)](params, x), method.apply(params, x)
    assert found.dtype is dtype
    # The method rounds x and y to bfloat16.
    assert torch.allclose(found.float(), expected.float(), atol=0.01 * float(expected.abs().max()))


def test_a_model_in_8_bits_writes_what_the_plain_one_does() -> None:
    texts = []
    for attention in ("torch", "compiled"):
        llm = LLM(course_model("draft"), "float32", "cpu", quantization="int8", attention=attention, max_model_len=128)
        [output] = llm.generate(["def read(path):\n"], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        texts.append(output.outputs[0].text)
        assert isinstance(llm.engine.model, CompiledDecoder) == (attention == "compiled")
    assert texts[0] == texts[1]


def test_what_is_not_compiled_is_refused_with_the_reason(random_model: Callable[..., Decoder]) -> None:
    wrong = "attention='compiled' does not serve this model: "
    gemma = random_model("float64", architecture="Gemma2ForCausalLM", hidden_activation="gelu_pytorch_tanh")
    with pytest.raises(ValueError, match=wrong + "its architecture, Gemma2ForCausalLM, has layers of its own"):
        compile_one_row(gemma)
    packed = random_model("float32", kernels="torch", hidden_size=64)
    if type(packed.linears()[0].method) not in PRODUCTS:
        with pytest.raises(ValueError, match=wrong + "how the weights of model.layers.0.self_attn.qkv_proj are stored"):
            compile_one_row(packed)
    with pytest.raises(ValueError, match=wrong + r"how the weights of .*qkv_proj are stored \(Fp8\)"):
        load_model(course_model("draft"), torch.float32, "cpu", kernels="compiled", quantization="fp8")
    with pytest.raises(ValueError, match="expected a model that was loaded with kernels='compiled'"):
        Engine(random_model("float64"), EngineConfig(num_blocks=8, attention="compiled"))
    with pytest.raises(ValueError, match="is for a CPU, and the model is on cuda: use attention='auto'"):
        load_model(course_model("draft"), torch.float32, "cuda", kernels="compiled")
    from torch._inductor import config

    model = copy.copy(random_model("float64", kernels="compiled", hidden_size=48))
    expected = r"expects a C\+\+ compiler \(g\+\+ or clang\+\+"
    with config.patch("cpp.cxx", ("no-such-compiler",)), pytest.raises(ValueError, match=expected):
        compile_one_row(model)


def test_an_attention_may_give_its_heads_in_any_strides(
    pair: tuple[Decoder, CompiledDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled functions read memory as it lay when they were compiled."""
    _, compiled = pair
    expected, attend = texts(compiled), TorchAttention.forward

    def spread(*args: Any) -> torch.Tensor:
        out = attend(*args)
        wide = out.new_full((*out.shape, 2), torch.nan)
        wide[..., 0] = out
        return wide[..., 0]

    monkeypatch.setattr(TorchAttention, "forward", spread)
    assert texts(compiled) == expected


@pytest.mark.parametrize("how", ["in its place", "with a method", "in other strides"])
def test_weights_may_be_replaced_by_others(pair: tuple[Decoder, CompiledDecoder], how: str) -> None:
    plain, compiled = pair
    before, linears = texts(compiled), [model.layers[0].o for model in pair]
    kept = [(linear.method, dict(linear.params)) for linear in linears]
    try:
        for linear in linears:
            linear.params["weight"] = linear.params["weight"] * -3
        weight = linears[1].params["weight"]
        if how == "with a method":
            linears[1].method = Rows(weight.dtype)
        elif how == "in other strides":
            linears[1].params["weight"] = weight.t().contiguous().t()
        assert texts(compiled) == texts(plain) != before
    finally:
        for linear, (method, params) in zip(linears, kept, strict=True):
            linear.method = method
            linear.params.update(params)
    assert texts(compiled) == before
