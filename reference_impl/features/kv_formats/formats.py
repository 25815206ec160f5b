"""Formats of keys and values in the cache other than the model's own dtype: a table, by the names that
`EngineConfig.kv_dtype` takes.

A new format is a row here, its codes in `kernels/eight_bits.py` for Triton (4 bits: `kernels/kv_scales.py`), and,
where none of the present caches can store it, a file beside this one with a subclass of `PagedKVCache`: it overrides
`write`, and adds what attention must know besides, such as `scales`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_impl.core.kv_cache import PagedKVCache


@dataclass(frozen=True)
class KVFormat:
    """A format of the KV cache. dtype: torch's name of what is stored. bits_per_scale, bits_per_zero_point: beside each
    head of a slot. cache: gives the class of the cache; called where tensors are made, since it imports torch."""

    dtype: str
    bits_per_value: int
    bits_per_scale: int
    cache: Callable[[], type[PagedKVCache]]
    bits_per_zero_point: int = 0


def _eight_bits() -> type[PagedKVCache]:
    from reference_impl.features.kv_formats.eight_bits import EightBitKVCache

    return EightBitKVCache


def _four_bits() -> type[PagedKVCache]:
    from reference_impl.features.kv_formats.four_bits import FourBitKVCache

    return FourBitKVCache


FORMATS = {
    "fp8": KVFormat("float8_e4m3fn", 8, 32, _eight_bits),  # 4 significant bits, however small a number is
    "fp8_e5m2": KVFormat("float8_e5m2", 8, 32, _eight_bits),  # 3 significant bits, over 30 powers of 2 instead of 15
    "int8": KVFormat("int8", 8, 32, _eight_bits),  # 255 values at equal distances: finer near a head's largest number
    "int4": KVFormat("uint8", 4, 16, _four_bits, 16),  # 16 values, equally apart, from a head's least to its largest
}


def kv_format(kv_dtype: str) -> KVFormat | None:
    """The format of this name; None for "auto", the model's dtype. ValueError for a name that is not in the table."""
    if kv_dtype == "kivi":
        raise ValueError(
            "EngineConfig.kv_dtype: expected 'int4', got 'kivi', which is no format of the cache any more: int4 has as "
            "many bits. What rounding keys by channel costs says `inferlab eval-kv --fake kivi`"
        )
    if kv_dtype != "auto" and kv_dtype not in FORMATS:
        raise ValueError(f"EngineConfig.kv_dtype: expected one of {', '.join(('auto', *FORMATS))}, got {kv_dtype!r}")
    return FORMATS.get(kv_dtype)
