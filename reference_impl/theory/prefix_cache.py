"""What a prefix cache saves: cached tokens, the prefill that remains, and its price on a provider's list; and what it
risks where it compares hashes and not tokens.

An engine that shares whole blocks finds a multiple of its block size, and never the whole prompt: the last token's
logits are needed. block_size 1 is a tree cut at every token. Everything is elementwise over NumPy arrays.
"""

from __future__ import annotations

import math

import numpy as np

from reference_impl.theory.hardware import Device
from reference_impl.theory.kv_cache import read_bytes
from reference_impl.theory.latency import cache_traffic, engine_pass_flops, step_bound
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import Number


def cached_tokens(shared: Number, prompt: Number, block_size: Number = 16) -> Number:
    """Tokens of a prompt that need not be computed when its first `shared` tokens are cached."""
    return np.minimum(shared, prompt - 1) // block_size * block_size


def conversation_tokens(system: Number, message: Number, answer: Number, turns: Number) -> Number:
    """Prompt tokens of a whole conversation: every turn sends the system prompt and everything said so far again."""
    return turns * (system + message) + (message + answer) * (turns * (turns - 1) // 2)


def conversation_floor(system: Number, message: Number, answer: Number, turns: Number) -> Number:
    """The fewest of these that must be computed: all once, except answers, which were computed when generated.

    The last token of each answer must be computed, too: it was sampled, and never fed back (see
    `latency.cached_linear_tokens`).
    """
    return system + turns * message + np.where(answer > 0, turns - 1, 0)


def prefill_seconds(
    shape: ModelShape, prompt: Number, cached: Number, device: Device, precision: str = "bf16", mfu: Number = 1.0
) -> Number:
    """Bound for a prompt of which `cached` tokens are in the cache: FLOP of the rest, or reading weights and cache."""
    rest = prompt - cached
    moved = read_bytes(shape) + cache_traffic(shape, rest, cached)
    return step_bound(engine_pass_flops(shape, rest, cached), moved, device, precision, mfu)


def input_price(uncached: Number, written: Number, read: Number, write_factor: Number, read_factor: Number) -> Number:
    """Price of a prompt in plain input tokens; the factors are the provider's for cache writes and reads."""
    return uncached + write_factor * written + read_factor * read


def reads_to_break_even(write_factor: Number, read_factor: Number) -> Number:
    """How many later reads pay for one write at more than the plain price: (write - 1) / (1 - read)."""
    return (write_factor - 1) / (1 - read_factor)


def wrong_hits(lookups: Number, held: Number, bits: Number) -> Number:
    """Expected hits of another prefix: each lookup of a block that is not there meets `held` digests of `bits` bits.

    These are hits by chance, for digests spread evenly, whatever the tokens. A search for collisions is not bound by
    it.
    """
    return lookups * (held / 2.0**bits)


def items_for_even_odds(bits: int) -> float:
    """The birthday bound: among how many digests of `bits` bits two are equal with probability 1/2.

    n items are all different with probability about exp(-n^2 / 2^(bits + 1)), so n = sqrt(2 ln 2 * 2^bits).
    """
    return math.sqrt(2 * math.log(2)) * 2 ** (bits / 2)
