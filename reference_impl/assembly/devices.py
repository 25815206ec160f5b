"""Chooses where a model computes, and in which dtype: what is asked for, or what the machine does best."""

from __future__ import annotations

import torch

from reference_impl.features.cpu.processor import cpu_has_bf16

DTYPES = ("float32", "bfloat16", "float16", "float64")  # that the engine computes in


def choose_device(asked: str | torch.device | None) -> torch.device:
    """The device asked for; without one a GPU where torch sees one, else the CPU. ValueError for one that is not there.

    Of several GPUs it is the first: kernels, streams and graphs are made on torch's current device, so use
    CUDA_VISIBLE_DEVICES for another.
    """
    gpus = torch.cuda.device_count()
    if asked is None:
        return torch.device("cuda" if gpus else "cpu")
    here = "cpu, cuda" if gpus else "cpu"
    try:
        device = torch.device(asked)
    except RuntimeError:
        raise ValueError(f"device: expected one of {here}, got {asked!r}") from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"device: expected one of {here}, got {asked!r}: torch {torch.__version__} sees {gpus} GPUs")
    if device.index:
        raise ValueError(
            f"device: expected one of {here}, got {asked!r}: of several GPUs torch shall see one; start with the "
            f"environment variable CUDA_VISIBLE_DEVICES={device.index} and ask for cuda"
        )
    return device


def choose_dtype(asked: str | torch.dtype | None, stored: str, device: torch.device) -> torch.dtype:
    """The dtype asked for; without one, or with vLLM's "auto", the checkpoint's own where the device computes in it.
    "half" is float16 and "float" float32, like in vLLM. ValueError for any other name.

    If none is asked for, a CPU without bf16 arithmetic gets float32, and a GPU before compute capability 8.0 (a T4)
    float16 for bfloat16.
    """
    asked = None if asked == "auto" else {"half": "float16", "float": "float32"}.get(str(asked), asked)
    name = stored if asked is None else str(asked).removeprefix("torch.")
    if name not in DTYPES:
        hint = "; for weights in 8 bits: quantization='fp8'" if name.startswith("float8") else ""
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {asked!r}{hint}")
    found: torch.dtype = getattr(torch, name)
    if asked is None and device.type == "cpu" and not cpu_has_bf16():
        return torch.float32
    if asked is None and device.type == "cuda" and found is torch.bfloat16:
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return found
