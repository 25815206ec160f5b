"""Values that attention moves between device memory and the chip over a whole prompt: unfused, and tiled as in
FlashAttention (Dao et al. 2022, Dao 2023).

All counts are values, not bytes, for one head of one layer of one sequence of `n` tokens, without a causal mask (which
halves FLOP and most of the traffic alike). d: head_dim. Multiply by heads, layers and bytes per value.
"""

from __future__ import annotations

from reference_impl.theory.units import Number


def score_values(n: Number) -> Number:
    """Traffic of the score matrix alone: scores written and read, probabilities written and read, 4 * n^2."""
    return 4 * n**2


def unfused_values(n: Number, d: Number) -> Number:
    """Three separate kernels: the score matrix as above, and Q, K, V read and O written once, 4 * n^2 + 4 * n * d."""
    return score_values(n) + fused_floor_values(n, d)


def fused_floor_values(n: Number, d: Number) -> Number:
    """Q, K and V read once and O written once, 4 * n * d: no kernel moves less."""
    return 4 * n * d


def flash1_values(n: Number, d: Number, sram_values: Number) -> Number:
    """FlashAttention of 2022, keys in the outer loop: 12 * n^2 * d^2 / M.

    A tile of keys has M / (4 d) rows, so there are 4 n d / M of them; each reads Q, reads O and writes O: 3 n d.
    M: values that fit into shared memory. Reading K and V once, 2 n d, is left out.
    """
    return 12 * n**2 * d**2 / sram_values


def flash2_values(n: Number, d: Number, tile_rows: Number) -> Number:
    """FlashAttention-2, queries in the outer loop: each tile of Q reads all of K and V, 2 n^2 d / rows + 2 n d.

    An upper figure: tiles that run at the same time find K and V in the L2 cache, and the floor is 4 n d.
    """
    return 2 * n**2 * d / tile_rows + 2 * n * d


def prompt_attention_flops(n: Number, d: Number) -> Number:
    """FLOP of scores and weighted sum for that head: 4 * n^2 * d. Fusing changes the traffic, not this."""
    return 4 * n**2 * d
