"""A linear layer's product: y = x W^T + b, with x [tokens, in] and W [out, in] as checkpoints store it.

A program owns a tile of y, BLOCK_M tokens by BLOCK_N outputs, and walks along `in` in steps of BLOCK_K (Goto and van de
Geijn 2008; tiles in groups for the L2 as in Triton's matrix multiplication tutorial). Two ideas for few tokens:
(1) matrix instructions have a large side (64 on Hopper) and a small one (8 and up). For up to 64 tokens the tile is
computed as W x^T, so that the weight is the large side and the tokens the small one (SWAPPED).
(2) Split-K: where tiles would leave multiprocessors idle, `in` is cut into splits, each a program of its own. A split
writes its partial sums and takes a ticket; the last one to finish adds them up, in the order of the splits. So the sum
is the same in every run, and no second kernel is launched.
A caller may name the tile (`tile=`), as the compile table and the tests do for each of them; otherwise `choose` does.

FLOPs: 2 tokens in out. Bytes: 2 (in out + tokens in + tokens out) in 16 bits. FLOPs per byte are about the number of
tokens, as long as that is small compared with in and out: on an H200 (790 TFLOP/s, 4.3 TB/s) memory-bound up to 184
tokens, then compute-bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.launch import architecture, launch, tickets_of

FEW_TOKENS = 64  # up to here the tile is computed as W x^T


@dataclass(frozen=True)
class Tile:
    """A tile of y: block_m tokens by block_n outputs, block_k inputs per step.

    num_stages: steps whose operands are in flight. x_bytes, weight_bytes: bytes of an element in memory.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    x_bytes: float = 2
    weight_bytes: float = 2

    @property
    def may_split(self) -> bool:
        """Whether `in` may be cut into splits: large tiles have no registers left for the code that adds up splits."""
        return self.block_m * self.block_n <= 128 * 128

    @property
    def constants(self) -> dict[str, int]:
        blocks = {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k}
        return {**blocks, "GROUP_M": 8, "SPLITS": self.may_split}

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    def shared_bytes(self, gpu: Architecture) -> int:
        """Bytes per block. Before Hopper, operands are multiplied from registers, so one buffer fewer is needed."""
        step = self.block_k * (self.block_m * self.x_bytes + self.block_n * self.weight_bytes)
        return int(step) * (self.num_stages if gpu.is_large else self.num_stages - 1)

    def fits(self, gpu: Architecture) -> bool:
        """Whether shared memory and registers suffice: before Hopper, sums share the registers with the operands."""
        sums = self.block_m * self.block_n // (self.num_warps * gpu.target.warp_size)  # per thread
        return self.shared_bytes(gpu) <= gpu.shared_bytes and sums <= (128 if gpu.is_large else 64)

    def count(self, num_tokens: int, out_features: int) -> int:
        return -(-num_tokens // self.block_m) * -(-out_features // self.block_n)


# From large to small. The large ones read operands less often, the small ones leave no multiprocessor idle.
TILES = (
    Tile(128, 256, 64, 8, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
    Tile(128, 64, 64, 4, 3),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 64, 128, 4, 3),
    Tile(32, 64, 128, 4, 4),
    Tile(32, 64, 128, 4, 3),
    Tile(16, 64, 128, 4, 5),
    Tile(16, 64, 128, 4, 4),
)
FLOAT32_TILE = Tile(32, 32, 32, 4, 1, 4, 4)  # without matrix units: more would spill


# Every launch needs tile and grid, so both are cached. triton.cdiv, made for kernels, takes a microsecond on the host.
@lru_cache(1 << 14)
def choose(tiles: tuple[Tile, ...], num_tokens: int, out_features: int, gpu: Architecture) -> Tile:
    """The tile for these shapes; it depends on nothing else. Of the tiles (from large to small) that fit the GPU, it
    considers those with the smallest block_m that holds all tokens, or else with the largest block_m. It returns the
    first of these that gives every multiprocessor a tile (for few tokens every second one, as splits do the rest), else
    the last.
    """
    tiles = tuple(tile for tile in tiles if tile.fits(gpu))
    needed = min(num_tokens, max(tile.block_m for tile in tiles))
    places = min(tile.block_m for tile in tiles if tile.block_m >= needed)
    tiles = tuple(tile for tile in tiles if tile.block_m == places)
    enough = gpu.multiprocessors / (2 if places <= FEW_TOKENS else 1)
    return next((tile for tile in tiles if tile.count(num_tokens, out_features) >= enough), tiles[-1])


@lru_cache(1 << 14)
def grid_of(tile: Tile, num_tokens: int, out_features: int, in_features: int, gpu: Architecture) -> tuple[int, int]:
    """(tiles, splits): the fewest splits that give all multiprocessors about the same number of steps.

    With few tokens there are at least three blocks for two multiprocessors, as far as `in` can be cut: while one block
    waits for memory, another computes.
    """
    num_tiles, steps = tile.count(num_tokens, out_features), -(-in_features // tile.block_k)
    few = tile.block_m <= FEW_TOKENS
    if not tile.may_split or (num_tiles >= gpu.multiprocessors and not few):
        return num_tiles, 1

    def busy(splits: int) -> float:
        """Share of the time for which a multiprocessor is busy, if all blocks take as long as the longest."""
        most_blocks, most_steps = -(-num_tiles * splits // gpu.multiprocessors), -(-steps // splits)
        return num_tiles * steps / (gpu.multiprocessors * most_blocks * most_steps)

    possible = range(1, max(1, min(16, steps // 4)) + 1)  # four steps at least: a pipeline has to fill
    best = max(map(busy, possible))
    even = [splits for splits in possible if busy(splits) >= 0.85 * best]
    blocks = 1.5 * gpu.multiprocessors if few else 0
    return num_tiles, next((splits for splits in even if num_tiles * splits >= blocks), even[-1])


@triton.jit
def write_tile(
    acc, bias, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS: tl.constexpr
):
    """acc [BLOCK_M, BLOCK_N]: this split's sums. The last split of a tile to come here writes the tile to `out`."""
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    split, splits = tl.program_id(1), tl.num_programs(1)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = (m < num_tokens)[:, None] & (n < out_features)[None, :]
    ticket = splits - 1
    if SPLITS and splits > 1:
        size = num_tokens.to(tl.int64) * out_features  # of one split's part of `partial`
        at = partial + m.to(tl.int64)[:, None] * out_features + n[None, :]
        tl.store(at + split * size, acc, mask=exists)
        tl.debug_barrier()  # all threads have stored before one of them takes the ticket
        tile = tl.program_id(0)
        ticket = tl.atomic_add(tickets + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == splits - 1:
            tl.store(tickets + tile, 0)  # for the next launch
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            # From the L2 (.cg, found on sm_90): what this multiprocessor's L1 holds of them may be older.
            for other in range(splits):
                acc += tl.load(at + other * size, mask=exists, other=0.0, cache_modifier=".cg")
    if ticket == splits - 1:
        if bias is not None:
            acc += tl.load(bias + n, mask=n < out_features, other=0.0).to(tl.float32)[None, :]
        at_out = out + m.to(tl.int64)[:, None] * stride_out + n[None, :]
        tl.store(at_out, acc.to(out.dtype.element_ty), mask=exists)


@triton.jit
def tile_of_program(num_tokens, out_features, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(m_tile, n_tile). Programs run roughly in order: GROUP_M tiles of tokens share each tile of the weight."""
    m_tiles, n_tiles = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    program = tl.program_id(0)
    first = program // (GROUP_M * n_tiles) * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    inside = program % (GROUP_M * n_tiles)
    return first + inside % height, inside // height


@triton.jit
def steps_of_split(steps):
    """(first, end) of this program's share of the steps along `in`; may be empty."""
    share = tl.cdiv(steps, tl.num_programs(1))
    first = tl.program_id(1) * share
    return first, tl.minimum(first + share, steps)


@triton.jit(do_not_specialize=["num_tokens"])
def _gemm(
    x, weight, bias, out, partial, tickets,
    num_tokens, in_features, out_features, stride_x, stride_weight, stride_out,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLITS: tl.constexpr, SWAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m_tile, n_tile = tile_of_program(num_tokens, out_features, BLOCK_M, BLOCK_N, GROUP_M)
    m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_range = tl.arange(0, BLOCK_K)
    at_x = x + m.to(tl.int64)[:, None] * stride_x + k_range[None, :]
    at_weight = weight + n.to(tl.int64)[:, None] * stride_weight + k_range[None, :]
    first, end = steps_of_split(tl.cdiv(in_features, BLOCK_K))
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    for step in range(first, end):
        k = step * BLOCK_K
        inside = (k + k_range < in_features)[None, :]
        x_tile = tl.load(at_x + k, mask=(m < num_tokens)[:, None] & inside, other=0.0)  # [M, K]
        weight_tile = tl.load(at_weight + k, mask=(n < out_features)[:, None] & inside, other=0.0)  # [N, K]
        if SWAPPED:
            acc = tl.dot(weight_tile, tl.trans(x_tile), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x_tile, tl.trans(weight_tile), acc, input_precision=PRECISION)
    if SWAPPED:
        acc = tl.trans(acc)
    write_tile(acc, bias, out, partial, tickets, m_tile, n_tile, num_tokens, out_features, stride_out, SPLITS)


def gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """Twin of `reference.gemm`, which documents shapes and meanings. tile: by default the one `choose` returns."""
    check_operands(x, weight, x.shape[1], bias)
    (num_tokens, in_features), out_features = x.shape, len(weight)
    if tile is None:
        tile = FLOAT32_TILE if x.element_size() == 4 else choose(TILES, num_tokens, out_features, architecture())
    out = x.new_empty((num_tokens, out_features))
    if num_tokens:
        grid = grid_of(tile, num_tokens, out_features, in_features, architecture())
        launch(
            _gemm, grid,
            x, weight, bias, out, *room_for(grid, out),
            num_tokens, in_features, out_features, x.stride(0), weight.stride(0), out.stride(0),
            SWAPPED=tile.block_m <= FEW_TOKENS, PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
            options=tile.options, **tile.constants,
        )  # fmt: skip
    return out


def check_operands(x: Tensor, weight: Tensor, row: int, bias: Tensor | None = None) -> None:
    """Raises ValueError unless a row of the weight has `row` elements, rows of both are contiguous, and so is a bias,
    which has an element for each row."""
    lies_in_rows = not len(x) or x.stride(1) == 1  # no row has any stride, as what torch makes of an empty array
    if weight.shape[1] != row or not lies_in_rows or weight.stride(1) != 1:
        raise ValueError(
            f"expected x [tokens, in] and a weight [out, {row}], both contiguous along their rows, got x "
            f"{list(x.shape)} with strides {x.stride()}, a weight {list(weight.shape)} with {weight.stride()}"
        )
    if bias is not None and (bias.shape != (len(weight),) or not bias.is_contiguous()):
        raise ValueError(
            f"expected a bias [{len(weight)}], contiguous, got {list(bias.shape)} with strides {bias.stride()}"
        )


def check_scales(scale: Tensor, weight_scale: Tensor, num_tokens: int, out_features: int) -> None:
    """Raises ValueError unless a product in 8 bits on both sides has a scale for each token and one for each output."""
    if scale.shape != (num_tokens,) or weight_scale.shape != (out_features,):
        raise ValueError(
            f"expected a scale for each of {num_tokens} tokens and {out_features} outputs, got {list(scale.shape)} and "
            f"{list(weight_scale.shape)}"
        )


def room_for(grid: tuple[int, int], out: Tensor) -> tuple[Tensor, Tensor]:
    """(partial, tickets): the splits' sums [splits, tokens, out] float32, and how many splits of each tile are done.

    The tickets are those of `launch.tickets_of`: its conditions for streams and graphs hold.
    """
    splits = grid[1] if grid[1] > 1 else 0
    return out.new_empty((splits, *out.shape), dtype=torch.float32), tickets_of(out.device)
