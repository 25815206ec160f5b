"""What a KV cache of fewer bits costs, by how far back the tokens lie whose keys and values are rounded.

Only tokens in a band of distances (position of the query - position of the key) are read rounded, all others as they
are: so the bands can be compared, and the last one, of all distances, is what a cache of this format does. Rounding is
the cache's own (`kernels/reference`), done in each forward pass, so that the model's later layers see what it did.

"kivi" (Liu et al. 2024), which no cache of the engine stores, is rounded here in 4 bits: keys per channel over the
tokens of a block, values per token; a query reads its own block as it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference_impl.bench import tasks
from reference_impl.bench.quality import Estimate, bootstrap, logprobs, windows_of
from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.kv_formats.formats import FORMATS
from reference_impl.interfaces import Batch, KVCache
from reference_impl.kernels.reference import (
    channels_from_four_bits,
    channels_to_four_bits,
    from_four_bits,
    to_eight_bits,
    to_four_bits,
)
from reference_impl.theory.kv_cache import bits_per_weight

KIVI = "kivi"
FAKES = (KIVI,)  # what no cache stores
EDGES = (0, 16, 64, 256)  # of the bands, in tokens; the last one has no end


@dataclass(frozen=True)
class Band:
    """Distances d with first <= d < end; end None: all from there on."""

    first: int
    end: int | None = None

    def __str__(self) -> str:
        if self.end is None:
            return "all" if self.first == 0 else f"{self.first}+"
        return f"{self.first}-{self.end - 1}"


def bands(edges: Sequence[int] = EDGES) -> list[Band]:
    """Bands between neighbouring edges, beyond the last one, and of all. Raises ValueError unless they rise from 0."""
    if not edges or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"--edges: expected rising distances that begin with 0, got {','.join(map(str, edges))}")
    closed = [Band(a, b) for a, b in pairwise(edges)]
    return [*closed, Band(edges[-1]), *([Band(0)] if len(edges) > 1 else [])]


def bits_per_value(name: str, head_dim: int, block_size: int = 16) -> float:
    """Bits per value with scales; for "kivi" the mean of keys and values in a full block."""
    if name == KIVI:
        return (bits_per_weight(4, block_size, 16, 16) + bits_per_weight(4, head_dim, 16, 16)) / 2
    stored = FORMATS[name]
    return bits_per_weight(stored.bits_per_value, head_dim, stored.bits_per_scale, stored.bits_per_zero_point)


def rounded(name: str, key: Tensor, value: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """What a cache gives back, or would: key, value [tokens, num_kv_heads, head_dim] -> the same shapes and dtype. For
    "kivi" the keys of the last block are left as they are unless it is full. Raises ValueError for an unknown name."""
    if name == KIVI:
        full = len(key) // block_size * block_size
        codes, scale = channels_to_four_bits(key[:full].unflatten(0, (-1, block_size)))
        channels = channels_from_four_bits(codes, scale[:, None], key.dtype).flatten(0, 1)
        return torch.cat((channels, key[full:])), _four_bits(value)
    if name not in FORMATS:
        raise ValueError(f"expected one of {', '.join((*FORMATS, *FAKES))}, got {name!r}")
    if FORMATS[name].bits_per_value == 4:
        return _four_bits(key), _four_bits(value)
    dtype = getattr(torch, FORMATS[name].dtype)
    key, value = (
        (codes.to(x.dtype) * scale[..., None]).to(x.dtype)
        for x in (key, value)
        for codes, scale in (to_eight_bits(x, dtype),)
    )
    return key, value


def _four_bits(x: Tensor) -> Tensor:
    """x rounded in 4 bits. The last of an odd number of values is taken twice."""
    even = torch.cat((x, x[..., -1:]), -1) if x.shape[-1] % 2 else x
    return from_four_bits(*to_four_bits(even), x.dtype)[..., : x.shape[-1]]


class RoundingAttention:
    """Attention of one row without a past, by the definition, in the model's dtype: what is in the band is read
    rounded, but for "kivi" not a query's own block."""

    def __init__(self, name: str, band: Band, block_size: int, scale: float, softcap: float | None = None):
        if softcap is not None:
            raise ValueError("inferlab eval-kv: models with a soft cap of scores are not supported")
        self.name, self.band, self.block_size, self.scale = name, band, block_size, scale

    def plan(self, batch: Batch) -> None:
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, kv_cache: KVCache | None, batch: Batch) -> Tensor:
        position, group = torch.arange(len(q), device=q.device), q.shape[1] // k.shape[1]
        distance = position[:, None] - position
        read = (distance >= self.band.first) & (distance < (self.band.end or len(q) + 1))
        if self.name == KIVI:
            block = position // self.block_size
            read &= block[:, None] > block
        window = batch.groups[batch.group_of_layer[layer]].window
        unseen = (distance < 0) | (distance >= (window or len(q) + 1))
        stored = rounded(self.name, k, v, self.block_size)
        q_heads = q.transpose(0, 1)
        (key, value), (other_key, other_value) = (
            tuple(t.transpose(0, 1).repeat_interleave(group, 0) for t in pair) for pair in ((k, v), stored)
        )
        scores = torch.where(read, q_heads @ other_key.mT, q_heads @ key.mT) * self.scale
        weight = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        return ((weight * read) @ other_value + (weight * ~read) @ value).transpose(0, 1)


@torch.inference_mode()
def logprobs_with(model: Decoder, window: Sequence[int], name: str, band: Band, block_size: int = 16) -> Tensor:
    """The log-probabilities of `quality.logprobs` for a model whose keys and values in the band are rounded."""
    c = model.config
    batch = ragged_batch([(window, 0)], len(window), model.device, c.layer_windows)
    batch.logits_indices = torch.arange(len(window), device=model.device)
    attention = RoundingAttention(name, band, block_size, c.attention_scale, c.attention_softcap)
    return model(batch, None, attention).float().log_softmax(-1)


def by_distance(
    model: Decoder, windows: Sequence[Sequence[int]], names: Sequence[str], edges: Sequence[int], block_size: int = 16
) -> dict[str, dict[str, dict[str, Estimate]]]:
    """{format: {band: {"kl": KL(exact || rounded) in nats, "agreement": the share of the same first token}}}, of the
    tokens from the band's first distance on: those before see nothing of it. ValueError for windows too short.
    """
    shortest = min(map(len, windows)) - 1
    if shortest <= edges[-1]:
        raise ValueError(f"--length: expected more tokens than the last edge, {edges[-1]}, got {shortest}")
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for window in windows:
        exact = logprobs(model, window[:-1])
        for name in names:
            for band in bands(edges):
                ours = logprobs_with(model, window[:-1], name, band, block_size)[band.first :]
                theirs = exact[band.first :]
                row = found.setdefault(name, {}).setdefault(str(band), {"kl": [], "agreement": []})
                row["kl"].append(float((theirs.exp() * (theirs - ours)).sum(-1).mean()))
                row["agreement"].append(float((theirs.argmax(-1) == ours.argmax(-1)).float().mean()))
    return {n: {b: {m: bootstrap(x) for m, x in r.items()} for b, r in rows.items()} for n, rows in found.items()}


def needle(llm: Any, filler: Sequence[int], distance: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """(prompt, answer) of `tasks.retrieval` as token ids."""

    def between(rng: random.Random, size: int) -> str:
        first = rng.randrange(max(len(filler) - size, 1))
        return str(llm.tokenizer.decode(list(filler[first : first + size])))

    asked, answer = tasks.retrieval(rng, between, distance)
    return list(llm.chat_prompt([{"role": "user", "content": asked}])), list(llm.encode(answer))


def by_depth(
    llm: Any, filler: Sequence[int], names: Sequence[str], distances: Sequence[int], each: int, block_size: int = 16
) -> dict[str, dict[int, tuple[float, float]]]:
    """{format, and "exact": {distance: (share of needles whose every token comes first, mean nats of a token)}}; all
    that the queries read is rounded, and the answer is given token by token. The same needles for all formats."""
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in ("exact", *names)}
    for distance in distances:
        rng = random.Random(distance)
        cases = [needle(llm, filler, distance, rng) for _ in range(each)]
        for name, row in found.items():
            right, nats = 0, []
            for prompt, answer in cases:
                tokens = [*prompt, *answer[:-1]]
                model = llm.engine.model
                all_of = logprobs(model, tokens) if name == "exact" else None
                said = logprobs_with(model, tokens, name, Band(0), block_size) if all_of is None else all_of
                last = said[-len(answer) :]
                right += last.argmax(-1).tolist() == answer
                nats.append(float(-last.gather(1, torch.tensor(answer, device=last.device)[:, None]).mean()))
            row[distance] = right / each, math.fsum(nats) / each
    return found


def lines(found: dict[str, Any], head_dim: int, block_size: int) -> list[str]:
    """The figures as lines of text."""
    said = ["format      bits   distance   KL, nats (95 %)                    same first token"]
    for name, rows in found["by_distance"].items():
        for band, row in rows.items():
            bits = f"{bits_per_value(name, head_dim, block_size):5.2f}"
            said.append(f"{name:10} {bits}   {band:8}   {row['kl'].shown(6):32}   {row['agreement'].shown(4)}")
    if found["by_depth"]:
        said += ["", "needle: share found, and nats of a token of the code, by tokens between it and the question"]
        for name, row in found["by_depth"].items():
            said.append(f"{name:10} " + "   ".join(f"{d}: {a:.2f}, {n:.4f}" for d, (a, n) in row.items()))
    return said


def evaluate(
    folder: Path, text: Path, formats: Sequence[str], fakes: Sequence[str], edges: Sequence[int], length: int,
    most: int, needles: int, block_size: int = 16,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """`by_distance` on a text, and `by_depth` with fillers from it, in float32; with lines of text. formats: of the
    engine's cache; fakes: of `FAKES`. Raises ValueError for another name, and where there is none."""
    from reference_impl.assembly.llm import LLM

    for option, asked, known in (("--kv-dtype", formats, tuple(FORMATS)), ("--fake", fakes, FAKES)):
        if wrong := [name for name in asked if name not in known]:
            raise ValueError(f"{option}: expected one of {', '.join(known)}, got {wrong[0]!r}")
    names = list(dict.fromkeys((*formats, *fakes)))
    if not names:
        raise ValueError("expected a format, --kv-dtype or --fake, got none")
    bands(edges)
    llm = LLM(folder, dtype="float32", device="cpu", num_blocks=8)
    ids, model = llm.encode(text.read_text("utf-8")), llm.engine.model
    windows = windows_of(ids, length, most)
    found: dict[str, Any] = {"by_distance": by_distance(model, windows, names, edges, block_size), "by_depth": {}}
    if needles:
        depths = [edge for edge in (*edges[1:], length - 64) if edge > 0]
        found["by_depth"] = by_depth(llm, ids, names, list(dict.fromkeys(depths)), needles, block_size)
    return found, lines(found, model.config.head_dim, block_size)
