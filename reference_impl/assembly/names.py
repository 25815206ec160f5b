"""Translates options under vLLM's names, with near matches for an unknown name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from reference_impl.assembly.config import EngineConfig

ANY = (...,)  # every value: it is about what this engine does not have
# vLLM's name -> ours, where a value means the same.
SAME = {
    "kv_cache_dtype": "kv_dtype", "num_gpu_blocks_override": "num_blocks", "kv_cache_memory_bytes": "kv_cache_bytes",
}  # fmt: skip
# vLLM's names for what this engine does in one way only -> the values that ask for that way. Source: vLLM's EngineArgs.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    # Code from a model's folder is never run: a family that is unknown is refused by name.
    "trust_remote_code": (False, True), "load_format": ("auto", "safetensors"), "config_format": ("auto", "hf"),
    "tokenizer_mode": ("auto",), "skip_tokenizer_init": (False,), "revision": (), "tokenizer": (),
    "tokenizer_revision": (), "code_revision": (), "download_dir": (), "hf_overrides": ({},),
    "runner": ("auto", "generate"), "task": ("auto", "generate"), "convert": ("auto", "none"),
    "served_model_name": ANY, "disable_log_stats": (False, True), "enable_log_requests": (False, True),
    "swap_space": ANY, "cpu_offload_gb": (0,), "calculate_kv_scales": (False,), "disable_sliding_window": (False,),
    "enable_chunked_prefill": (True,), "scheduling_policy": ("fcfs",), "async_scheduling": (False, True),
    "data_parallel_size": (1,), "decode_context_parallel_size": (1,),
    "distributed_executor_backend": ("uni", "mp"),
    "disable_custom_all_reduce": (False, True), "max_seq_len_to_capture": ANY, "max_parallel_loading_workers": ANY,
    "enable_lora": (False,), "enable_prompt_adapter": (False,), "compilation_config": (0, {}),
    "limit_mm_per_prompt": ({},), "quantization_param_path": (), "guided_decoding_backend": ("auto",),
}  # fmt: skip
TRANSLATED = (
    "gpu_memory_utilization", "enable_prefix_caching", "enforce_eager", "speculative_config",
)  # fmt: skip


def options_of(given: Mapping[str, Any], others: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of EngineConfig for options under our names and vLLM's. An option of vLLM's that is None is left out.

    TypeError with near matches for a name that is neither; others: more names that may have been meant. ValueError for
    a value that is not possible, and where two names contradict each other.
    """
    own = [field.name for field in fields(EngineConfig)]
    known = [*own, *SAME, *TRANSLATED, *WITHOUT_EFFECT]
    if unknown := [name for name in given if name not in known]:
        near = [match for name in unknown for match in difflib.get_close_matches(name, [*known, *others])]
        hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "EngineConfig says which there are"
        raise TypeError(f"LLM has no option {' or '.join(unknown)}: {hint}")
    found = {name: value for name, value in given.items() if name in own}
    for name, value in given.items():
        if name in own or value is None:
            continue
        for ours, meaning in _meaning(name, value).items():
            both = found.get(ours, meaning)
            if both != meaning and (name, value, both) != ("enable_prefix_caching", True, "radix"):
                raise ValueError(f"{name}={value!r} and {ours}={both!r} contradict each other: leave one out")
            found[ours] = both
    return found


def _meaning(name: str, value: Any) -> dict[str, Any]:
    """The fields of EngineConfig that one of vLLM's options stands for. ValueError for a value that is not possible."""
    if name in WITHOUT_EFFECT:
        allowed = WITHOUT_EFFECT[name]
        if allowed != ANY and value not in allowed:
            expected = " or ".join(["None", *map(repr, allowed)])
            raise ValueError(f"{name}: expected {expected}, got {value!r}: no other is implemented")
        return {}
    if name in SAME:
        return {SAME[name]: "fp8" if (name, value) == ("kv_cache_dtype", "fp8_e4m3") else value}
    if name == "speculative_config":
        return _speculative(value)
    if name == "gpu_memory_utilization":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.01 <= value <= 1:
            raise ValueError(f"gpu_memory_utilization: expected a share from 0.01 to 1, got {value!r}")
        return {"memory_percent": 100 * value}
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")
    if name == "enforce_eager":
        return {"graphs": "off"} if value else {}
    return {"prefix_cache": "hash" if value else "off"}


def _speculative(value: Any) -> dict[str, Any]:
    """The fields of EngineConfig that vLLM's speculative_config stands for. ValueError for anything else in it."""
    known = {"method": "speculative", "num_speculative_tokens": "num_drafts"}
    if isinstance(value, Mapping) and "model" in value:
        raise ValueError(
            f"speculative_config: 'model' is an option of its own here: draft_model={value['model']!r}, and "
            "speculative_config without it, or num_drafts"
        )
    if not isinstance(value, Mapping) or not {"method"} <= {*value} <= {*known}:
        raise ValueError(
            f"speculative_config: expected a mapping with 'method' and, maybe, 'num_speculative_tokens', got "
            f"{value!r}: nothing else is implemented"
        )
    return {known[key]: chosen for key, chosen in value.items()}
