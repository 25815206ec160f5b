"""Values that attention moves between device memory and the chip over a whole prompt: unfused, and tiled as in
FlashAttention (Dao et al. 2022, Dao 2023).

All counts are values, not bytes, for one head of one layer of one sequence of `n` tokens, without a causal mask (which
halves FLOP and most of the traffic alike). d: head_dim. Multiply by heads, layers and bytes per value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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

    An upper bound: tiles that run at the same time find K and V in the L2 cache, and the floor is 4 n d.
    """
    return 2 * n**2 * d / tile_rows + 2 * n * d


def prompt_attention_flops(n: Number, d: Number) -> Number:
    """FLOP of scores and weighted sum for one head: 4 * n^2 * d. Fusing changes the traffic, not this."""
    return 4 * n**2 * d


# ---------------------------------------------------------------- counted tile by tile


@dataclass(frozen=True)
class Moves:
    """Values of each tensor that pass between device memory and the chip. statistics: running maxima and sums."""

    q_read: Number = 0
    kv_read: Number = 0
    o_read: Number = 0
    o_written: Number = 0
    scores: Number = 0  # written and read, the probabilities too
    statistics: Number = 0

    @property
    def total(self) -> Number:
        return self.q_read + self.kv_read + self.o_read + self.o_written + self.scores + self.statistics


def unfused_moves(n: Number, d: Number) -> Moves:
    """The terms of `unfused_values`."""
    return Moves(q_read=n * d, kv_read=2 * n * d, o_written=n * d, scores=score_values(n))


def flash1_moves(n: Number, d: Number, key_rows: int) -> Moves:
    """Moves with keys in the outer loop, `key_rows` a tile: every tile reads Q, and reads and writes O, maxima and
    sums.

    K and V are read once. O and the statistics are written once more at the start, as zeros (Dao et al. 2022, line 2).
    """
    tiles = tiles_of(n, key_rows)
    return Moves(
        q_read=tiles * n * d, kv_read=2 * n * d, o_read=tiles * n * d, o_written=(tiles + 1) * n * d,
        statistics=(2 * tiles + 1) * 2 * n,
    )  # fmt: skip


def flash2_moves(n: Number, d: Number, query_rows: int) -> Moves:
    """Moves with queries in the outer loop, tiles of `query_rows`: each reads all of K and V; O is only written,
    once."""
    return Moves(q_read=n * d, kv_read=tiles_of(n, query_rows) * 2 * n * d, o_written=n * d)


def tiles_of(n: Number, rows: Number) -> Number:
    """ceil(n / rows)."""
    return -(-n // rows)


def flash1_key_rows(d: int, sram_values: int) -> int:
    """Keys of a tile in FlashAttention of 2022: M / (4 d), so that Q, K, V and O of a tile fit together."""
    rows = sram_values // (4 * d)
    if rows < 1:
        raise ValueError(f"expected room for one row each of Q, K, V and O, 4 x {d} values, got {sram_values}")
    return rows


# ---------------------------------------------------------------- filling the chip


def wave_share(programs: Number, slots: Number) -> Number:
    """Mean share of the chip that works while `programs` equal programs run on `slots` places: the last wave of
    ceil(programs / slots) may be partly empty."""
    return programs / (tiles_of(programs, slots) * slots)


def exp_share(d: Number, flops_per_clock: Number, exps_per_clock: Number = 16) -> Number:
    """Clocks of an SM for the exponentials of attention, per clock of its matrix products: each score is one exp and 4
    d FLOP. exps_per_clock: 16 for the special-function units of an SM, from A100 to B200 (Zadouri et al. 2026)."""
    return flops_per_clock / (4 * d * exps_per_clock)


def pipelined_seconds(tiles: Number, load: Number, compute: Number, stages: int = 2) -> Number:
    """Seconds of a program: with one stage a tile is loaded, then used; with more, loads run beside the arithmetic.

    tiles * (load + compute), or load + (tiles - 1) * max(load, compute) + compute. More than two stages help only where
    loads vary, which is not modelled here.
    """
    if stages < 2:
        return tiles * (load + compute)
    return load + (tiles - 1) * np.maximum(load, compute) + compute


# ---------------------------------------------------------------- decode and its variants


def cascade_keys(rows: Number, shared: Number, own: Number, cascade: bool) -> Number:
    """Keys that one step of `rows` decoding requests reads. All share a prefix of `shared` keys; each has `own` more.

    Each request reads all its keys; with cascade, the prefix is read once for all and merged with each one's own part.
    """
    return (shared if cascade else rows * shared) + rows * own


def split_overhead(split: Number, group: Number, d: Number, kv_bytes: Number = 2) -> Number:
    """Bytes that a split of `split` keys moves in addition to its keys and values, as a share of these.

    Mean and log-sum-exp of `group` heads, fp32, written and read: 8 * group * (d + 1) / (2 * split * d * kv_bytes).
    """
    return 8 * group * (d + 1) / (2 * split * d * kv_bytes)


def skip_speedup(skipped: Number) -> Number:
    """How much faster attention gets at best if this share of the tiles skips P V: 1 / (1 - skipped / 2).

    Scores are always computed, which is half of the FLOP (and half of the bytes in decode: keys are read, values not).
    """
    return 1 / (1 - skipped / 2)


def skip_share(speedup: Number) -> Number:
    """The share of tiles that must be skipped for this speed-up of attention (at most 2), 2 (1 - 1 / speedup)."""
    return 2 * (1 - 1 / speedup)
