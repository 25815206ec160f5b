"""Rotary embedding in a config.json, in either spelling: which frequencies, of which layers."""

from __future__ import annotations

import math
from typing import Any

from reference_impl.core.model_config import ModelConfig, RopeConfig
from reference_impl.models.config_reader import Reader
from reference_impl.models.families import FULL, SLIDING, Family


def ropes(get: Reader, family: Family, head_dim: int) -> tuple[RopeConfig, RopeConfig | None]:
    """(all layers', None), or for Gemma 3 (that of full layers, that of layers with a window).

    Both spellings: rope_theta + rope_scaling (type or rope_type), and rope_parameters.
    """
    name = "rope_scaling" if get.raw.get("rope_scaling") else "rope_parameters"
    rope = get.raw.get(name) or {}
    if not isinstance(rope, dict):
        raise get.error(name, "an object or null", rope)
    if family.gemma != 3:
        if any(isinstance(value, dict) for value in rope.values()):
            raise get.error(name, "one set for all layers (per-layer sets are not supported here)", rope)
        theta = get.raw.get("rope_theta", family.rope_theta)
        if family.model_type == "phi3":
            return _phi3_rope(get, rope, theta, head_dim), None
        if family.model_type == "stablelm":
            return _stablelm_rope(get, rope, theta, head_dim), None
        return _rope(get, rope, theta), None
    if name == "rope_scaling":  # the older spelling scales the full layers only
        rope = {FULL: rope}
    if not set(rope) <= {FULL, SLIDING} or not all(isinstance(value, dict | None) for value in rope.values()):
        raise get.error(name, f"an object for {FULL} and one for {SLIDING}", rope)
    full = _rope(get, rope.get(FULL) or {}, get.raw.get("rope_theta", 1e6))
    return full, _rope(get, rope.get(SLIDING) or {}, get.raw.get("rope_local_base_freq", 1e4))


def _rope(get: Reader, rope: dict[str, Any], theta: float) -> RopeConfig:
    theta = get.number("rope_theta", theta, rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor", get.raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise get.error("partial_rotary_factor", "1.0 (partial rotation is not supported)", partial)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, get.number("factor", None, rope))
    if kind == "llama3":
        low, high = get.number("low_freq_factor", None, rope), get.number("high_freq_factor", None, rope)
        if low >= high:  # their difference divides what is blended between them
            raise get.error("high_freq_factor", f"a number above low_freq_factor = {low:g}", high)
        return RopeConfig(
            theta,
            kind,
            factor=get.number("factor", None, rope),
            low_freq_factor=low,
            high_freq_factor=high,
            original_max_position=int(get.number("original_max_position_embeddings", None, rope)),
        )
    raise get.error("rope type", "default, linear or llama3 (others are not supported)", kind)


def _phi3_rope(get: Reader, rope: dict[str, Any], theta: float, head_dim: int) -> RopeConfig:
    """The rotary embedding of Phi-3, which may rotate a part of each head only, and has LongRoPE (Ding et al. 2024),
    which it once called su."""
    given = {name: value for name, value in rope.items() if value is not None}
    partial = _partial(get, given, head_dim, 1.0)
    rotated = int(head_dim * partial)
    theta, kind = get.number("rope_theta", theta, given), given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta, partial=partial)
    if kind not in ("longrope", "su"):
        raise get.error("rope type", "default or longrope (Phi-3 has no others)", kind)
    factors = given.get("short_factor")
    if not isinstance(factors, list) or len(factors) != rotated // 2:
        raise get.error("short_factor", f"a list of {rotated // 2} numbers, one for each frequency", factors)
    original = get.integer("original_max_position_embeddings", 4096)
    # How much longer contexts may become. Attention then gets sharper, in short contexts too (transformers'
    # modeling_rope_utils.py); the default is LongRoPE's.
    factor = get.number("factor", get.integer("max_position_embeddings", 4096) / original, given)
    sharper = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 < original else 1.0
    return RopeConfig(
        theta,
        "longrope",
        original_max_position=original,
        partial=partial,
        short_factors=tuple(get.number("short_factor", value, {}) for value in factors),
        attention_factor=get.number("attention_factor", sharper, given),
    )


def _stablelm_rope(get: Reader, rope: dict[str, Any], theta: float, head_dim: int) -> RopeConfig:
    given = {name: value for name, value in rope.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind != "default":
        raise get.error("rope type", "default (others are not supported in a StableLM)", kind)
    return RopeConfig(get.number("rope_theta", theta, given), partial=_partial(get, given, head_dim, 0.25))


def _partial(get: Reader, given: dict[str, Any], head_dim: int, default: float) -> float:
    """The share of each head that is rotated."""
    partial = given.get("partial_rotary_factor", get.raw.get("partial_rotary_factor"))
    partial = default if partial is None else get.number("partial_rotary_factor", partial, {})
    rotated = int(head_dim * partial)
    if partial > 1 or rotated % 2 or rotated == 0:
        raise get.error("partial_rotary_factor", f"a share of head_dim = {head_dim} that is an even number", partial)
    return partial


def reason_for_limit(config: ModelConfig) -> str:
    """Why max_position is less than config.json says, for an error that names it; "" if it is not."""
    if config.rope.kind != "longrope":
        return ""
    return (
        f": beyond original_max_position_embeddings = {config.rope.original_max_position} its LongRoPE has other "
        "frequencies, with which all keys would have to be computed again, and that is not supported. Use "
        f"max_model_len={config.max_position} or less"
    )
