"""Sampling in whole numbers, so that every machine that sees the same logits chooses the same tokens.

Sums of floats depend on their order, and exp on the implementation. Here a token's mass, exp of its score, is a whole
number of units of 2^-40, computed in float32 by sums and products in a fixed order. Sums of masses are exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

# A draw uses the upper 24 bits of a word: portions, top-p included, are counted in units of 2^-24.
_LOW, _PORTION = 2**32 - 1, 24


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
    """Samples one token per row, [rows] int64, with the meaning of `sampling.sampler` (probabilities, then draw).

    logits [rows, vocab_size] of at most 2^22 tokens; the others [rows]: temperature (0: the first of the largest
    logits), top_p (1: off) and min_p (0: off) float32, top_k integers (0: off). seed int64: the 64 bits, those of 2^63
    and above as negative numbers; sample_index and position integers, of which 32 bits count, for `philox`.

    Among equal scores at the edge of top-k or top-p the lower token id stays. NaN counts as -inf; if no logit is above
    -inf, all tokens are equally likely.

    noise: every token has a number of its own, as `features/gumbel/sampler.py` explains. Of the tokens that are left,
    the one with the largest -log(-log u) - distance is drawn, of equal ones the first.
    """
    vocab_size = logits.shape[1]
    logits = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    unsorted = distances(logits, temperature)
    distance, order = unsorted.sort(dim=1, stable=True)
    mass, rank = token_mass(distance), torch.arange(vocab_size, device=logits.device)
    in_top_k = rank < torch.where(top_k > 0, top_k, vocab_size)[:, None]
    mass = torch.where(in_top_k, mass, 0)
    before = mass.cumsum(1) - mass
    # A token stays while the mass before it is below top_p of the whole.
    edge = portion(mass.sum(1), (top_p * 2.0**_PORTION).long()).clamp(min=1)
    lowest = (min_p * 2.0**40).long()  # the largest score has mass 2^40
    mass = torch.where((before < edge[:, None]) & (mass >= lowest[:, None]), mass, 0)
    mass = torch.zeros_like(mass).scatter_(1, order, mass)  # in the order of the token ids
    if noise:
        scores = token_noise(seed, sample_index, position, vocab_size) - unsorted
        drawn = torch.where(mass > 0, scores, -torch.inf).argmax(1)
        return torch.where(temperature > 0, drawn, logits.argmax(1))
    cumulative = mass.cumsum(1)
    # Inverse transform: the first token whose cumulative mass exceeds u x total, u = (2 n + 1) / 2^24.
    units = 2 * (random_word(seed, sample_index, position) >> 9) + 1
    target = portion(cumulative[:, -1], units)
    drawn = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return torch.where(temperature > 0, drawn, logits.argmax(1))


def distances(logits: Tensor, temperature: Tensor) -> Tensor:
    """(largest logit - logit) / temperature, float32, 0 or more: the scores below the largest."""
    largest = logits.amax(1, keepdim=True)
    below = torch.where(logits == largest, 0.0, largest - logits)  # inf - inf is NaN
    return below / temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]


def token_mass(distance: Tensor) -> Tensor:
    """exp(-distance) in units of 2^-40, rounded down, int64: 2^40 for distance 0, 0 from 28 on.

    exp(-d) = 2^-n exp(r) with r = n ln 2 - d and |r| <= ln 2 / 2, exp(r) by its Taylor series. ln 2 is taken in two
    parts, the first of which gives exact products (Cody and Waite 1980).
    """
    distance = distance.clamp(max=40.0)
    halvings = (distance * 1.4426950408889634 + 0.5).floor()
    r = (halvings * 0.693359375 - distance) - halvings * 2.12194440e-4
    power = r * (1 / 5040) + 1 / 720
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        power = power * r + coefficient
    return ((power * 2.0**24).long() << 16) >> halvings.long()  # power has 24 bits: nothing is lost


def portion(total: Tensor, units: Tensor) -> Tensor:
    """total x units / 2^24, rounded down, without leaving 64 bits."""
    high, low = total >> _PORTION, total & (2**_PORTION - 1)
    return high * units + ((low * units) >> _PORTION)


def random_word(seed: Tensor, sample_index: Tensor, position: Tensor) -> Tensor:
    """The first word of `sampling.philox` (which explains it) for draw 0; int64 in [0, 2^32)."""
    zero = torch.zeros_like(position.long())
    return philox(position.long(), sample_index.long(), zero, zero, seed)[0]


def token_words(seed: Tensor, sample_index: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """A random word for every token, [rows, vocab_size] int64 in [0, 2^32). seed, sample_index, position [rows]. Token
    t has the word t % 4 of the counter (position, sample, t // 4, 1); other numbers of a position have 0 there."""
    block = torch.arange(-(-vocab_size // 4), device=seed.device)[None]
    c0, c1 = position.long()[:, None], sample_index.long()[:, None]
    words = philox(c0, c1, block, torch.ones_like(block[:, :1]), seed[:, None])
    return torch.stack(torch.broadcast_tensors(*words), -1).flatten(1)[:, :vocab_size]


def token_noise(seed: Tensor, sample_index: Tensor, position: Tensor, vocab_size: int) -> Tensor:
    """-log(-log u) of every token, [rows, vocab_size] float32; u = (word + 1/2) / 2^32, of `token_words`.

    Near 1, where u in float32 has lost digits, -log u is computed from 1 - u.
    """
    word = token_words(seed, sample_index, position, vocab_size)
    below = ((word ^ _LOW).float() + 0.5) * 2.0**-32  # 1 - u
    f, halvings = _reduced((word.float() + 0.5) * 2.0**-32)
    near = below < 0.25
    waiting = -_series(torch.where(near, -below, f), torch.where(near, 0.0, halvings))
    return -_series(*_reduced(waiting))


def _series(f: Tensor, halvings: Tensor) -> Tensor:
    """log((1 + f) 2^n), n = halvings, 1 + f from sqrt(1/2) to sqrt(2), float32, to an ulp.

    With s = f / (2 + f), log(1 + f) = 2 atanh(s) = f - f^2 / 2 + s (f^2 / 2 + R(s^2)); R by the minimax polynomial of
    FreeBSD's e_logf.c. ln 2 in two parts, as in `token_mass`.
    """
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    rest = z * (w * 0.28498786688 + 0.66666662693) + w * (w * 0.24279078841 + 0.40000972152)
    half = f * f * 0.5
    return ((halvings * 9.0580006145e-06 + s * (half + rest)) - half + f) + halvings * 6.9313812256e-01


def _reduced(x: Tensor) -> tuple[Tensor, Tensor]:
    """(f, halvings) for `_series`, of a positive x, from the bits of a float32: the exponent is above the fraction."""
    bits = x.view(torch.int32) + 0x4AFB0D  # the bits of 1 less those of sqrt(1/2)
    f = ((bits & 0x7FFFFF) + 0x3F3504F3).view(torch.float32) - 1.0
    return f, ((bits >> 23) - 127).float()


def philox(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, seed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`core.philox.philox` on a device: four words in [0, 2^32), int64, for a counter of four int64, of which 32 bits
    count, and seed, all 64 bits. Counter and seed broadcast."""
    c0, c1 = c0 & _LOW, c1 & _LOW
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64 bits; above 2^63 they look negative
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
