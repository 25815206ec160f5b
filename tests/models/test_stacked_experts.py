"""Experts whose weights are stacked, for our Triton kernel: the same numbers, and a host that waits for nothing."""

from __future__ import annotations

import os
import random

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined

from reference_impl.assembly.config import EngineConfig
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.model import build_model, dummy_model, load_model
from reference_impl.core.decoder import Decoder
from reference_impl.features.fusion.experts import StackedExperts
from reference_impl.interfaces import SamplingParams
from reference_impl.models.moe import MixtureOfExperts, SeparateExperts
from reference_impl.models.shapes import config_of_shape
from tests.engine.conftest import tapped_engine  # noqa: F401
from tests.executor.tape import recorder
from tests.models.test_parity import FP32, worst
from tests.models.test_shapes import FAMILIES, PARAMETERS
from tests.no_sync import HostSyncError, no_sync

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {"mixtral": 0, "qwen3_moe": 2, "qwen3_moe_mixed": 1}


def moe_of(model: Decoder, layer: int) -> MixtureOfExperts:
    mlp = model.layers[layer].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 48, generator=torch.Generator().manual_seed(2)).to(DEVICE)


@pytest.mark.parametrize("name", LAYERS)
def test_stacked_and_separate_experts_are_the_same_layer(name: str, save) -> None:
    folder, x = save(name)[1], rows(9)
    models = {kernels: load_model(folder, device=DEVICE, kernels=kernels) for kernels in ("torch", "triton")}
    separate, stacked = (moe_of(model, LAYERS[name]) for model in models.values())
    assert isinstance(separate.experts, SeparateExperts)
    assert isinstance(stacked.experts, StackedExperts)
    expected, found = separate(x), stacked(x)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert models["torch"].num_parameters() == models["triton"].num_parameters()
    assert stacked(x[:0]).shape == (0, 48)


def test_logits_are_those_of_transformers(save, their_logits, tapped_engine) -> None:  # noqa: F811
    """A prompt in chunks, decoding, and a neighbour."""
    theirs, folder = save("qwen3_moe_mixed", num_hidden_layers=2, mlp_only_layers=[])  # one dense, one of experts
    model = load_model(folder, device=DEVICE, kernels="triton")
    engine, logits = tapped_engine(
        model, block_size=8, num_blocks=30, max_num_seqs=2, max_num_batched_tokens=8, attention="triton"
    )
    sampling, chance = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), random.Random(0)
    requests = [engine.add(chance.choices(range(97), k=n), sampling) for n in (11, 3)]
    while engine.has_work():
        engine.step()
    for request in requests:
        found = [logits[request.id][position][0].cpu() for position in range(request.num_tokens - 1)]
        assert worst(torch.stack(found), their_logits(theirs, request.tokens[:-1])) <= FP32


def test_a_tokens_experts_do_not_depend_on_its_neighbours(save) -> None:
    """Not in the last bit, either."""
    moe, x = moe_of(load_model(save("mixtral")[1], device=DEVICE, kernels="triton"), 0), rows(6)
    order, offsets = torch.arange(6, device=DEVICE), torch.tensor([0, 6, 6, 6, 6, 6], device=DEVICE, dtype=torch.int32)
    together = moe.experts(x[order], offsets)
    assert torch.equal(moe.experts(x[4:5], offsets.clamp(max=1))[0], together[4])
    assert torch.equal(moe.experts(torch.cat((x[4:5].expand(40, -1), x)), offsets // 6 * 46)[3], together[4])


def test_an_expert_that_no_token_chose_is_not_read(save) -> None:
    moe = moe_of(load_model(save("mixtral")[1], device=DEVICE, kernels="triton"), 0)
    assert isinstance(moe.experts, StackedExperts)
    x = rows(1).expand(3, -1)
    expected = moe(x)
    chosen = (x[0] @ moe.router.T).topk(2).indices
    unused = [e for e in range(5) if e not in chosen.tolist()]
    moe.experts.gate_up[unused] = torch.nan
    moe.experts.down[unused] = torch.nan
    assert torch.equal(moe(x), expected)


def test_the_host_waits_for_nothing(save) -> None:
    folder, x = save("qwen3_moe")[1], rows(3)
    stacked = moe_of(load_model(folder, device=DEVICE, kernels="triton"), 0)
    stacked(x)  # compiles
    with no_sync():
        stacked(x)
    separate = moe_of(load_model(folder, device=DEVICE, kernels="torch"), 0)
    with pytest.raises((HostSyncError, RuntimeError), match="expected no wait|synchronizing"), no_sync():
        separate(x)


def test_a_step_that_decodes_can_be_captured_and_replayed() -> None:
    """Another token chooses other experts: nothing of the routing may be fixed by the capture."""
    shape = FAMILIES["qwen3_moe"] | {"num_hidden_layers": 1}
    model = dummy_model(config_of_shape(shape), torch.float32, DEVICE, kernels="triton")
    told = []
    for replays in (False, True):
        options = EngineConfig(8, 16, max_num_seqs=2, attention="triton", overlap="off", graphs="off")
        engine = Engine(model, options)
        if replays:
            engine.executor.use_graphs(recorder(), 2, engine.max_model_len)
        sampling = SamplingParams(max_tokens=5, temperature=0)
        requests = [engine.add(prompt, sampling) for prompt in ([5, 6, 7], [8])]
        while engine.has_work():
            engine.step()
        told.append([request.output_tokens for request in requests])
        assert engine.executor.stats.eager_steps == (1 if replays else 0)  # counted where graphs are used
    assert told[0] == told[1]


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_dummy_weights_are_the_same_numbers_stacked_and_separate(name: str) -> None:
    config, x = config_of_shape(FAMILIES[name]), rows(5)[:, :32]
    separate, stacked = (
        moe_of(dummy_model(config, torch.float32, DEVICE, kernels=kernels), 1) for kernels in ("torch", "triton")
    )
    assert (stacked(x) - separate(x)).abs().max() <= 1e-5 * separate(x).abs().max()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's kernels are chosen for a GPU, not for meta tensors")
def test_a_large_model_has_its_parameters() -> None:
    model = build_model(config_of_shape("qwen3-30b-a3b"), torch.float32, "meta", 1, "triton")
    assert isinstance(moe_of(model, 0).experts, StackedExperts)
    assert model.num_parameters() == PARAMETERS["qwen3-30b-a3b"]


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_quantized_experts_are_refused_where_they_would_be_stacked(quantization: str, save) -> None:
    message = f"quantization='{quantization}' .* mixture of experts .* use quantization='none'"
    with pytest.raises(ValueError, match=message):
        load_model(save("mixtral")[1], device=DEVICE, kernels="triton", quantization=quantization)
