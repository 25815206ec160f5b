"""Which dtype a model gets where nobody asks for one: by its checkpoint and by what the device computes in."""

from __future__ import annotations

import pytest
import torch

from reference_impl.assembly import devices
from reference_impl.assembly.llm import LLM, choose_device, choose_dtype
from reference_impl.features.fusion.kernels import choose_backend

GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def capability(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> tuple[int, int]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: request.param)
    return request.param


@pytest.mark.parametrize("capability", [(7, 5), (7, 0)], indirect=True, ids=["T4", "V100"])
def test_a_gpu_without_bf16_computes_in_fp16(capability) -> None:
    assert choose_dtype(None, "bfloat16", GPU) is torch.float16
    assert choose_dtype(None, "float32", GPU) is torch.float32
    assert choose_dtype(None, "float16", GPU) is torch.float16
    assert choose_dtype("bfloat16", "float16", GPU) is torch.bfloat16, "who asks for it gets it"
    assert choose_dtype(torch.bfloat16, "float16", GPU) is torch.bfloat16


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)], indirect=True)
def test_any_later_gpu_computes_in_the_checkpoints_own(capability) -> None:
    for name in ("bfloat16", "float16", "float32", "float64"):
        assert choose_dtype(None, name, GPU) is getattr(torch, name)


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.float16, "torch"),
        ((8, 0), torch.bfloat16, "triton"),
        ((9, 0), torch.bfloat16, "triton"),
        ((9, 0), torch.float64, "torch"),
    ],
    indirect=["capability"],
)
def test_our_kernels_serve_the_gpus_that_they_are_made_for(capability, dtype, expected, monkeypatch) -> None:
    from reference_impl.kernels import launch

    monkeypatch.setattr(launch, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    assert choose_backend("auto", GPU, dtype) == expected


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_cpu_without_bf16_computes_in_float32(has_bf16: bool, expected, monkeypatch) -> None:
    monkeypatch.setattr(devices, "cpu_has_bf16", lambda: has_bf16)
    assert choose_dtype(None, "bfloat16", CPU) is expected
    assert choose_dtype("bfloat16", "bfloat16", CPU) is torch.bfloat16
    tiny = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 17, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16, "dtype": "bfloat16",
    }  # fmt: skip
    assert LLM(shape=tiny, dummy_weights=True, device="cpu", num_blocks=2).engine.model.dtype is expected


@pytest.mark.parametrize("asked", ["float8_e4m3fn", "int8", "bf16", "", torch.float8_e4m3fn, torch.int32])
def test_a_dtype_that_no_model_computes_in_is_refused(asked) -> None:
    with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, float16, float64, got") as refused:
        choose_dtype(asked, "bfloat16", CPU)
    assert ("quantization='fp8'" in str(refused.value)) == ("float8" in str(asked))


def test_a_device_that_is_not_there_is_refused_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert choose_device(None) == choose_device("cpu") == CPU
    for asked in ("tpu", "", "cuda", "cuda:0"):
        with pytest.raises(ValueError, match=rf"device: expected one of cpu, got '{asked}'"):
            choose_device(asked)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert choose_device(None) == GPU
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ValueError, match=r"expected one of cpu, cuda, got 'cuda:1': .*CUDA_VISIBLE_DEVICES=1 and ask"):
        choose_device("cuda:1")
    with pytest.raises(ValueError, match=r"expected one of cpu, cuda, got 'cuda:7': .* sees 2 GPUs"):
        LLM(device="cuda:7", shape="qwen3-0.6b", dummy_weights=True)
