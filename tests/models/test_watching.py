"""What `watching` shows of a running engine: the inputs that `transformers` gives the same layers, each token once."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import load_model
from reference_impl.core.decoder import Decoder
from reference_impl.features.watching.watching import watching
from reference_impl.interfaces import SamplingParams
from tests.engine.conftest import one_shot  # noqa: F401
from tests.executor.tape import recorder
from tests.models.test_parity import IDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = [IDS[:17], IDS[20:23], IDS[30:41]]
NEW_TOKENS = 4
SHORT = [IDS[:9], IDS[20:22], IDS[30:33]]  # for Triton's interpreter, still in chunks and beside each other
STACKED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}  # what goes into one of the stacked goes into all of them
FIRST = "model.layers.0.self_attn.qkv_proj"
FP32 = 3e-5  # of the layer's largest input


class Largest:
    """An observer: by layer the largest |x| of each channel, and how many tokens it saw."""

    def __init__(self) -> None:
        self.of: dict[str, Tensor] = {}
        self.tokens: Counter[str] = Counter()

    def __call__(self, name: str, x: Tensor) -> None:
        if len(x):
            seen = x.detach().abs().amax(0).cpu()
            self.of[name] = torch.maximum(self.of[name], seen) if name in self.of else seen
            self.tokens[name] += len(x)


def run(engine: Engine, prompts: list[list[int]] = PROMPTS, new_tokens: int = NEW_TOKENS) -> list[list[int]]:
    """For each prompt all tokens that were computed: the last one was only sampled."""
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
    requests = [engine.add(prompt, sampling) for prompt in prompts]
    while engine.has_work():
        engine.step()
    return [request.tokens[:-1] for request in requests]


def in_chunks(model: Decoder, **options: Any) -> Engine:
    budget = EngineConfig(
        block_size=8, num_blocks=40, max_num_batched_tokens=7, max_num_seqs=3, prefix_cache="off", **options
    )
    return Engine(model, budget)


def of_two_layers(variant: str) -> dict[str, Any]:
    """What makes it one; of the mixed, one layer has experts then."""
    return {"num_hidden_layers": 2} | ({"mlp_only_layers": []} if variant == "qwen3_moe_mixed" else {})


def experts_shown(mlp: Any, prefix: str, largest: Largest, x: Tensor) -> None:
    """A mixture of `transformers` once more, expert by expert, in loops over tokens."""
    x, experts = x.flatten(0, -2), mlp.experts
    for token in x:
        chosen = (mlp.gate.weight @ token).topk(mlp.gate.top_k).indices.tolist()
        for e in chosen:
            gate, up = (experts.gate_up_proj[e] @ token).chunk(2)
            largest(f"{prefix}.experts.{e}.gate_up_proj", token[None])
            largest(f"{prefix}.experts.{e}.down_proj", (F.silu(gate) * up)[None])


def theirs_shows(theirs: Any, sequences: list[list[int]]) -> Largest:
    """What the layers of `transformers` get, one sequence at a time."""
    largest, hooks = Largest(), []
    for name, module in theirs.named_modules():
        where, _, last = name.rpartition(".")
        if hasattr(module, "experts") and hasattr(module, "gate"):
            prefix = name.replace("mlp", "block_sparse_moe") if "Mixtral" in type(theirs).__name__ else name
            show = partial(experts_shown, module, prefix, largest)
        elif last in ("q_proj", "o_proj", "gate_proj", "down_proj", "qkv_proj", "gate_up_proj"):

            def show(x: Tensor, name: str = f"{where}.{STACKED.get(last, last)}") -> None:
                largest(name, x.flatten(0, -2))

        else:
            continue
        hooks.append(module.register_forward_pre_hook(lambda _, args, show=show: show(args[0])))
    with torch.no_grad():
        for sequence in sequences:
            theirs(torch.tensor([sequence]))
    for hook in hooks:
        hook.remove()
    return largest


def check(found: Largest, expected: Largest) -> None:
    assert found.tokens == expected.tokens
    assert found.of.keys() == expected.of.keys()
    for name, largest in found.of.items():
        assert (largest - expected.of[name]).abs().max() <= FP32 * expected.of[name].max(), name


VARIANTS = "llama_biases gemma2 qwen3_moe_mixed mixtral olmo2 phi3_partial stablelm".split()
# In the interpreter: stacked experts, norms behind layers alone, products that are stored as one, biases and LayerNorm.
IN_TRITON = ("mixtral", "olmo2", "phi3_partial", "stablelm")


@pytest.mark.parametrize(
    ("variant", "kernels"),
    [
        *((variant, "torch") for variant in VARIANTS),
        *(pytest.param(v, "triton", marks=[] if v in IN_TRITON else pytest.mark.slow) for v in VARIANTS),
    ],
)
def test_what_is_shown_is_what_transformers_gives_each_layer(variant: str, kernels: Any, save) -> None:
    """Prompts in chunks, together, then decoding; with our kernels, products are fused and experts stacked."""
    theirs, folder = save(variant, **(of_two_layers(variant) if kernels == "triton" else {}))
    model = load_model(folder, device=DEVICE if kernels == "triton" else "cpu", kernels=kernels)
    engine, found = in_chunks(model, attention=kernels), Largest()
    with watching(model, found):
        sequences = run(engine, SHORT, 2) if kernels == "triton" else run(engine)
    assert {linear.name for linear in model.linears()} >= {name for name in found.of if "experts" not in name}
    check(found, theirs_shows(theirs, sequences))
    total = sum(map(len, sequences))
    assert found.tokens[FIRST] == total
    if model.config.experts is not None:
        layer, k = max(model.config.experts.layers), model.config.experts.experts_per_token
        gates = [n for n in found.tokens if n.startswith(f"model.layers.{layer}.") and n.endswith("gate_up_proj")]
        assert sum(found.tokens[name] for name in gates) == k * total, "an expert sees the tokens sent to it, only"


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("variant", ["llama_biases", "qwen3_moe_mixed"])
def test_afterwards_all_is_as_before_to_the_bit(variant: str, kernels: Any, save, one_shot) -> None:  # noqa: F811
    folder = save(variant, **of_two_layers(variant))[1]
    model = load_model(folder, device=DEVICE if kernels == "triton" else "cpu", kernels=kernels)

    def state() -> list[dict[str, Any]]:
        hidden = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
        return [{k: v for k, v in vars(m).items() if k not in hidden} for m in model.modules()]

    before, plain, seen = [dict(kept) for kept in state()], one_shot(model, IDS[:9]), Largest()
    with watching(model, seen):
        watched = one_shot(model, IDS[:9])
        with watching(model, Largest()):
            assert kernels == "torch" or model.watched
        assert kernels == "torch" or model.watched
        assert kernels == "torch" or not any(model.fusion.products(n) for n in (1, 64, 65, 10**9))
    assert (watched - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert kernels == "triton" or torch.equal(watched, plain)
    count = seen.tokens.copy()
    assert torch.equal(one_shot(model, IDS[:9]), plain)
    assert seen.tokens == count, "the observer is called no more"
    assert not any(module._forward_pre_hooks for module in model.modules())
    for now, then in zip(state(), before, strict=True):
        assert {k: v for k, v in now.items() if k != "watched"}.keys() == then.keys() - {"watched"}
        assert all(now[name] is then[name] for name in then if not isinstance(then[name], dict | list | bool | int))
    assert kernels == "torch" or not model.watched


def test_an_observer_that_fails_leaves_nothing_behind(save, one_shot) -> None:  # noqa: F811
    model = load_model(save("llama_biases", num_hidden_layers=1)[1], device=DEVICE, kernels="triton")
    plain = one_shot(model, IDS[:9])

    def fail(name: str, x: Tensor) -> None:
        raise RuntimeError(name)

    with pytest.raises(RuntimeError, match=f"^{FIRST}$"), watching(model, fail):
        one_shot(model, IDS[:9])
    assert torch.equal(one_shot(model, IDS[:9]), plain)


def test_quantized_layers_show_what_they_get(save) -> None:
    """FP8 has its input rounded inside of the product: what is shown is what came. Behind the first product the layers'
    own errors come in."""
    _, folder = save("llama_biases")
    shown = []
    for kind in ("none", "fp8"):
        model, largest = load_model(folder, quantization=kind), Largest()
        engine = in_chunks(model)
        engine.add(PROMPTS[0], SamplingParams(max_tokens=1))
        with watching(model, largest):
            while engine.has_work():
                engine.step()
        shown.append(largest)
    plain, fp8 = shown
    assert plain.tokens == fp8.tokens
    assert torch.equal(plain.of[FIRST], fp8.of[FIRST])


def test_steps_that_would_be_replayed_are_launched_and_shown(save) -> None:
    """Replays call no Python: inside there are none, and none is captured."""
    theirs, folder = save("llama_biases", num_hidden_layers=1)
    model = load_model(folder, device=DEVICE, kernels="triton")
    engine, found = in_chunks(model, attention="triton", overlap="off", graphs="off"), Largest()
    engine.executor.use_graphs(recorder(), 3, engine.max_model_len)
    stats = engine.executor.stats
    run(engine, SHORT)
    replayed, captured = stats.replayed_steps, stats.graphs_captured
    assert replayed > 0
    with watching(model, found):
        sequences = run(engine, SHORT)
        with pytest.raises(RuntimeError, match="capture_all: expected a model that is not watched"):
            engine.executor.capture_all()
    assert (stats.replayed_steps, stats.graphs_captured) == (replayed, captured)
    check(found, theirs_shows(theirs, sequences))
    assert run(engine, SHORT) == sequences
    assert stats.replayed_steps > replayed


def test_tokens_of_the_prefix_cache_are_not_shown(save) -> None:
    model = load_model(save("llama_biases")[1])
    engine = Engine(model, EngineConfig(block_size=4, num_blocks=40))
    counts: list[int] = []
    for _ in range(2):
        largest = Largest()
        with watching(model, largest):
            engine.add(IDS[:17], SamplingParams(max_tokens=1))
            while engine.has_work():
                engine.step()
        counts.append(largest.tokens["model.layers.0.mlp.down_proj"])
    assert counts == [17, 1]
