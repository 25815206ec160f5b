"""llmcompressor's side of `against_llmcompressor.py`: run in its own environment by peer_process.py, imports nothing of
this project.

The model is computed in float32, and scales are rounded to bfloat16 before codes are chosen, as ours are: so neither
calibrates with more exact numbers, or has more bits.
"""

from __future__ import annotations

import importlib
import os
import warnings
from importlib import metadata
from typing import Any

METHODS = ("rtn", "gptq", "awq")
PACKAGES = ("llmcompressor", "compressed-tensors", "transformers", "torch")


def versions() -> dict[str, str]:
    """What is asked first, before anything of its own is imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.simplefilter("ignore")
    importlib.import_module("llmcompressor")
    return {name: metadata.version(name) for name in PACKAGES}


def recipe(method: str, group_size: int) -> list[Any]:
    """Its modifiers with their own defaults: int4, symmetric, all linear layers but lm_head."""
    weights = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size,
        "scale_dtype": "torch.bfloat16",
    }  # fmt: skip
    what = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    if method == "gptq":
        return [_theirs("modifiers.gptq").GPTQModifier(**what)]
    rounding = _theirs("modifiers.quantization").QuantizationModifier(**what)
    return [rounding] if method == "rtn" else [_theirs("modifiers.transform.awq").AWQModifier(), rounding]


def _theirs(module: str) -> Any:
    return importlib.import_module(f"llmcompressor.{module}")


def quantize(source: str, out: str, method: str, tokens: list[list[int]], group_size: int) -> dict[str, str]:
    """Writes the folder `out`, in compressed-tensors. tokens: calibration rows of one length. The answer: the settings
    that the modifiers had."""
    import torch
    from transformers import AutoModelForCausalLM

    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    if not torch.accelerator.is_available():  # AWQ pins what it keeps, which torch can only do beside a GPU
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.tensor(tokens)
    batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}]
    modifiers = recipe(method, group_size)
    _theirs("entrypoints").oneshot(
        model=model, recipe=modifiers, dataset=torch.utils.data.DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
        num_calibration_samples=len(tokens), max_seq_length=ids.shape[1],
    )  # fmt: skip
    model.save_pretrained(out, save_compressed=True)
    shown = ("dampening_frac", "actorder", "block_size", "duo_scaling", "n_grid")
    return {name: str(getattr(one, name)) for one in modifiers for name in shown if hasattr(one, name)}


CALLS = {"versions": versions, "quantize": quantize}
