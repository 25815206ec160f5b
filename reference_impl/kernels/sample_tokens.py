"""One token per row of logits: temperature, top-k, top-p, min-p, one draw by inverse transform, without a sort.

A program owns a row and walks over it several times; it writes nothing but the token.
1. Largest logit. A score is the distance from it, over the temperature. Temperature 0 ends here.
2. Top-k: the smallest distance up to which there are k tokens. The bits of a float that is not negative, read as a
   whole number, have its order; so the distance is found digit by digit, four bits per pass, by counting the tokens
   whose next digit is 0, 1, ..., 15 (radix selection). Of tokens at that distance the lowest ids fill up k.
3. Top-p: likewise, with the tokens' mass, exp(-distance), in place of their number.
4. Mass of what is left (min-p is a mass below which nothing counts). 5. The walk to the token at u x that mass.

Mass is a whole number of 2^-40, computed in float32 by steps that round the same everywhere (the twin says how). So
sums are exact in any order, and the kernel chooses its twin's token, always. u is Philox 4x32-10 (Salmon et al. 2011).

With noise (NOISE) steps 4 and 5 are one walk: every token that is left has a number of its own, and the largest of
-log(-log u) - distance is chosen (Gumbel 1954). A counter gives four numbers, for four tokens side by side. Both
logarithms are of float32, by a series in a fixed order, so that the twin's token is chosen here, too.

Passes: 1 if greedy; at most 3 without top-k and top-p; 8 more for top-k and 9 for top-p. A pass reads vocab_size x b
bytes, 304 KB for 151,936 tokens in bf16; after the first pass they come from the L2, if all rows fit there. The
passes for a mass take about 30 float operations and some 64-bit additions per token, those of step 3 only for tiles
with a token whose digits are right so far. A single row has only one multiprocessor, so its passes take longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_impl.kernels.architectures import Architecture
from reference_impl.kernels.launch import architecture, launch


@triton.jit
def random_word(seed, sample_index, position):
    """Philox of (position, sample, draw 0, 0) under the key `seed`: the first of four words, uint32."""
    zero = (position & 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, position.to(tl.uint32), sample_index.to(tl.uint32), zero, zero)
    return word


@triton.jit
def _logit(logits, column, VOCAB: tl.constexpr):
    x = tl.load(logits + column, mask=column < VOCAB, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))  # NaN counts as -inf


@triton.jit
def _distance(logits, column, largest, temperature, VOCAB: tl.constexpr):
    """(largest - logit) / temperature, rounded as IEEE 754 has it; inf behind the vocabulary."""
    x = _logit(logits, column, VOCAB)
    distance = tl.div_rn(tl.where(x == largest, 0.0, largest - x), temperature)
    return tl.where(column < VOCAB, distance, float("inf"))


@triton.jit
def token_mass(distance):
    """exp(-distance) in units of 2^-40; the twin explains the steps."""
    distance = tl.minimum(distance, 40.0)
    halvings = tl.floor(distance * 1.4426950408889634 + 0.5)
    r = (halvings * 0.693359375 - distance) - halvings * 2.12194440e-4
    power = r * 1.984126984126984e-4 + 1.388888888888889e-3  # 1/7!, 1/6!
    power = power * r + 8.333333333333333e-3
    power = power * r + 4.1666666666666664e-2
    power = power * r + 0.16666666666666666
    power = power * r + 0.5
    power = power * r + 1.0
    power = power * r + 1.0
    return ((power * 16777216.0).to(tl.int64) << 16) >> halvings.to(tl.int64)


@triton.jit
def _series(f, halvings):
    """log((1 + f) 2^halvings), 1 + f from sqrt(1/2) to sqrt(2); the twin explains it."""
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    w = z * z
    rest = z * (w * 0.28498786688 + 0.66666662693) + w * (w * 0.24279078841 + 0.40000972152)
    half = f * f * 0.5
    return ((halvings * 9.0580006145e-06 + s * (half + rest)) - half + f) + halvings * 6.9313812256e-01


@triton.jit
def _reduced(x):
    """(f, halvings) of `_series`, of a positive x."""
    bits = x.to(tl.int32, bitcast=True) + 0x4AFB0D
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    return f, ((bits >> 23) - 127).to(tl.float32)


@triton.jit
def token_noise(seed, sample_index, position, start, BLOCK: tl.constexpr):
    """-log(-log u) of the tokens from `start` on, float32."""
    block = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = block & 0
    c0, c1 = zero + position.to(tl.uint32), zero + sample_index.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, block, zero + 1)
    word = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # w0, w1, w2, w3 of the first, of the second, ..
    below = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    f, halvings = _reduced((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    near = below < 0.25  # to 1: there u has lost digits that 1 - u has
    waiting = -_series(tl.where(near, -below, f), tl.where(near, 0.0, halvings))
    f, halvings = _reduced(waiting)
    return -_series(f, halvings)


@triton.jit
def _portion(total, units):
    """total x units / 2^24, rounded down, without leaving 64 bits."""
    return (total >> 24) * units + (((total & 0xFFFFFF) * units) >> 24)


@triton.jit
def _edge(logits, largest, temperature, need, VOCAB: tl.constexpr, BLOCK: tl.constexpr, MASS: tl.constexpr):
    """(key, less): the smallest key up to which tokens weigh `need`, and what those before it weigh.

    key: a distance's bits. A token weighs its mass, or 1.
    """
    digits = tl.arange(0, 16)
    key, less = 0, need * 0
    for step in range(8):
        known, shift = 31 - 4 * step, tl.maximum(27 - 4 * step, 0)  # bits above `known` are right; digit at `shift`
        weights = tl.zeros([16], tl.int64)
        for start in range(0, VOCAB, BLOCK):
            distance = _distance(logits, start + tl.arange(0, BLOCK), largest, temperature, VOCAB)
            rest = distance.to(tl.int32, bitcast=True) - key
            candidate = (rest >> known) == 0
            if tl.max(candidate.to(tl.int32), 0) == 1:
                weight = token_mass(distance) if MASS else tl.full([BLOCK], 1, tl.int64)
                has = candidate[None, :] & ((rest >> shift)[None, :] == digits[:, None])
                weights += tl.sum(tl.where(has, weight[None, :], 0), 1)
        digit = tl.sum((less + tl.cumsum(weights, 0) < need).to(tl.int32), 0)
        less += tl.sum(tl.where(digits < digit, weights, 0), 0)
        key += digit << shift
    return key, less


@triton.jit
def _total(logits, largest, temperature, edge, ties, lowest, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of what is kept: keys below `edge` and so many that equal it; no mass under `lowest`."""
    masses = tl.zeros([BLOCK], tl.int64)
    for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=2):
        distance = _distance(logits, start + tl.arange(0, BLOCK), largest, temperature, VOCAB)
        mass = token_mass(distance)
        masses += tl.where((distance.to(tl.int32, bitcast=True) < edge) & (mass >= lowest), mass, 0)
    at_edge = token_mass(edge.to(tl.float32, bitcast=True))
    return tl.sum(masses, 0) + tl.where(at_edge >= lowest, ties * at_edge, 0)


@triton.jit
def _sample_tokens(
    logits, tokens, temperature, top_k, top_p, min_p, seed, sample_index, position, stride_logits,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride_logits

    best, at = tl.full([BLOCK], float("-inf"), tl.float32), tl.arange(0, BLOCK)
    for start in tl.range(0, VOCAB, BLOCK, loop_unroll_factor=4):  # four loads under way, not one
        column = start + tl.arange(0, BLOCK)
        x = _logit(logits, column, VOCAB)
        at = tl.where(x > best, column, at)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, at, VOCAB), 0)  # the first of the largest

    t = tl.load(temperature + row).to(tl.float32)
    if t > 0:
        t = tl.maximum(t, 1.1754943508222875e-38)
        none = row * 0
        edge, ties = (none + 0x7F800000).to(tl.int32), none  # infinity: everything is kept
        k = tl.load(top_k + row).to(tl.int64)
        if (k > 0) & (k < VOCAB):
            edge, less = _edge(logits, largest, t, k, VOCAB, SEARCH, False)
            ties = k - less
        p = tl.load(top_p + row).to(tl.float32)
        if p < 1:
            total = _total(logits, largest, t, edge, ties, none, VOCAB, BLOCK)
            need = tl.maximum(_portion(total, (p * 16777216.0).to(tl.int64)), 1)
            edge, less = _edge(logits, largest, t, need, VOCAB, SEARCH, True)
            ties = tl.cdiv(need - less, token_mass(edge.to(tl.float32, bitcast=True)))

        lowest = (tl.load(min_p + row).to(tl.float32) * 1099511627776.0).to(tl.int64)
        s, n, at_position = tl.load(seed + row), tl.load(sample_index + row), tl.load(position + row)
        before, seen = none, none
        if NOISE:
            best, at = tl.full([BLOCK], float("-inf"), tl.float32), tl.arange(0, BLOCK)
            for start in range(0, VOCAB, BLOCK):
                column = start + tl.arange(0, BLOCK)
                distance = _distance(logits, column, largest, t, VOCAB)
                key, mass = distance.to(tl.int32, bitcast=True), token_mass(distance)
                tie = (key == edge).to(tl.int64)
                kept = (key < edge) | ((tie == 1) & (seen + tl.cumsum(tie, 0) <= ties))
                kept = kept & (mass >= lowest) & (mass > 0)
                score = tl.where(kept, token_noise(s, n, at_position, start, BLOCK) - distance, float("-inf"))
                at = tl.where(score > best, column, at)
                best = tl.maximum(best, score)
                seen += tl.sum(tie, 0)
            token = tl.min(tl.where(best == tl.max(best, 0), at, VOCAB), 0)
        else:
            total = _total(logits, largest, t, edge, ties, lowest, VOCAB, BLOCK)
            word = random_word(s, n, at_position)
            target = _portion(total, 2 * (word >> 9).to(tl.int64) + 1)  # u = (2 n + 1) / 2^24
            start = 0
            while start < VOCAB:
                distance = _distance(logits, start + tl.arange(0, BLOCK), largest, t, VOCAB)
                key, mass = distance.to(tl.int32, bitcast=True), token_mass(distance)
                tie = (key == edge).to(tl.int64)
                kept = (key < edge) | ((tie == 1) & (seen + tl.cumsum(tie, 0) <= ties))
                mass = tl.where(kept & (mass >= lowest), mass, 0)
                above = tl.sum((before + tl.cumsum(mass, 0) > target).to(tl.int32), 0)
                if above > 0:
                    token = start + BLOCK - above
                    start = VOCAB
                else:
                    before += tl.sum(mass, 0)
                    seen += tl.sum(tie, 0)
                    start += BLOCK
    tl.store(tokens + row, token.to(tl.int64))


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    *,
    noise: bool = False,
) -> Tensor:
    """Twin of `reference.sample_tokens`, equal token by token, which documents shapes and meanings."""
    rows, vocab_size = logits.shape
    parameters = (temperature, top_k, top_p, min_p, seed, sample_index, position)
    if any(p.shape != (rows,) or not p.is_contiguous() for p in parameters) or logits.stride(1) != 1:
        raise ValueError(f"expected contiguous logits, and one of every parameter for each of the {rows} rows")
    if seed.dtype is not torch.int64 or not 0 < vocab_size <= 2**22:
        raise ValueError(f"expected seeds of int64 and 1 to 2^22 tokens, got {seed.dtype} and {vocab_size}")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    tile, options = tile_of(vocab_size, architecture())
    launch(
        _sample_tokens, (rows,), logits, tokens, *parameters, logits.stride(0),
        VOCAB=vocab_size, NOISE=noise, options=options, **tile,
    )  # fmt: skip
    return tokens


def tile_of(vocab_size: int, gpu: Architecture) -> tuple[dict[str, int], dict[str, int]]:
    """Tiles of the passes, and of those that search, which hold 16 weights per token, with their options. Products and
    sums must not be fused: that rounds once where the twin rounds twice."""
    block = min(max(triton.next_power_of_2(vocab_size), 64), 4096)
    tile = {"BLOCK": block, "SEARCH": min(block, 2048)}
    return tile, {"num_warps": max(block // 8 // gpu.target.warp_size, 1), "enable_fp_fusion": False}
