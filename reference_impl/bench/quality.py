"""How good a quantized model still is: perplexity, KL to the model it was made from, and how often both say the same.

Every figure is of the same tokens for both models, in windows of a text; its interval comes from drawing windows anew,
with replacement (bootstrap), since the tokens of one window go together. A difference is paired: of the same windows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch

DRAWS = 1000
KV_BYTES = 256 * 1024**2


@dataclass(frozen=True)
class Estimate:
    """A mean over windows with the middle 95 % of its bootstrap."""

    value: float
    low: float
    high: float

    def shown(self, digits: int = 4) -> str:
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def bootstrap(per_window: Sequence[float], seed: int = 0, draws: int = DRAWS) -> Estimate:
    """The mean with its interval. ValueError for fewer than two windows: one says nothing of how much they differ."""
    values = np.asarray(per_window, dtype=float)
    if len(values) < 2:
        raise ValueError(f"bootstrap: expected at least 2 windows, got {len(values)}: give a longer text")
    picked = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    low, high = np.quantile(values[picked].mean(1), (0.025, 0.975))
    return Estimate(float(values.mean()), float(low), float(high))


@torch.inference_mode()
def logits(model: Decoder, text: Sequence[int], first: int = 0) -> Tensor:
    """Logits for the token after each from `first` on, [len(text) - first, vocab_size], in one pass without a cache."""
    c = model.config
    batch = ragged_batch([(text, 0)], len(text), model.device, c.layer_windows)
    batch.logits_indices = torch.arange(first, len(text), device=model.device)
    return model(batch, None, RecomputeAttention(c.attention_scale, c.attention_softcap))


def logprobs(model: Decoder, window: Sequence[int]) -> Tensor:
    """Log-probabilities for the token after each, [len(window), vocab_size] float32."""
    return logits(model, window).float().log_softmax(-1)


def windows_of(ids: Sequence[int], length: int, most: int) -> list[list[int]]:
    """At most `most` windows of `length` + 1 tokens one after the other; the last token of each is only predicted."""
    found = [list(ids[i : i + length + 1]) for i in range(0, len(ids) - length, length)]
    if len(found) < 2:
        raise ValueError(f"text: expected at least {2 * length + 1:,} tokens (2 windows of {length}), got {len(ids):,}")
    return found[:most]


def compare(model: Decoder, against: Decoder | None, windows: Sequence[Sequence[int]]) -> dict[str, Estimate]:
    """The measures of a model. nats: mean negative log-likelihood of a token, whose exponential is the perplexity. With
    another model, of the same tokenizer: kl, KL(against || model) in nats; agreement, the share of tokens where both
    put the same one first; nats_more, the paired difference in nats. Raises ValueError for vocabularies that differ."""
    if against is not None and against.config.vocab_size != model.config.vocab_size:
        sizes = f"{against.config.vocab_size:,} and {model.config.vocab_size:,}"
        raise ValueError(f"--against: expected a model with the same vocabulary, got vocabularies of {sizes}")
    rows: dict[str, list[float]] = {}
    for window in windows:
        behind = torch.tensor(window[1:], device=model.device)[:, None]
        ours = logprobs(model, window[:-1])
        found = {"nats": float(-ours.gather(1, behind).mean())}
        if against is not None:
            theirs = logprobs(against, window[:-1]).to(ours.device)
            found["kl"] = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
            found["agreement"] = float((theirs.argmax(-1) == ours.argmax(-1)).float().mean())
            found["nats_more"] = found["nats"] + float(theirs.gather(1, behind).mean())
        for name, value in found.items():
            rows.setdefault(name, []).append(value)
    return {name: bootstrap(values) for name, values in rows.items()}


def lines(found: dict[str, Estimate]) -> list[str]:
    """The figures as lines of text."""
    nats = found["nats"]
    perplexity = Estimate(*(math.exp(value) for value in (nats.value, nats.low, nats.high)))
    said = [f"perplexity        {perplexity.shown(3)}"]
    if "kl" in found:
        more = found["nats_more"]
        change = Estimate(*(100 * (math.exp(value) - 1) for value in (more.value, more.low, more.high)))
        certain = "" if more.low <= 0 <= more.high else ", beyond chance"
        said += [
            f"perplexity, more  {change.shown(2)} %, paired{certain}",
            f"KL, nats          {found['kl'].shown(5)}",
            f"same first token  {found['agreement'].shown(4)}",
        ]
    return said


def check_tokenizers(folder: Path, against: Path) -> None:
    """Raises ValueError unless both have one tokenizer: what is said of the same ids must be of the same text."""
    found = []
    for place in (folder, against):
        file = place / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{place}: expected a tokenizer.json, found none: no text can be given to this model")
        found.append(json.loads(file.read_text("utf-8")))
    names = sorted((found[0].keys() | found[1].keys()) - {"padding", "truncation", "version"})
    if differs := [name for name in names if found[0].get(name) != found[1].get(name)]:
        raise ValueError(
            f"--against: expected a model with the same tokenizer, got one with another {' and '.join(differs)}: KL "
            "and agreement compare predictions of the same tokens. Evaluate each by itself, without --against"
        )


def evaluate(folder: Path, against: Path | None, text: Path, length: int, most: int, tasks: int = 0) -> dict[str, Any]:
    """`compare` of two folders on a text, both in float32: {measure: Estimate}, and how many windows. tasks: questions
    of each kind, see `abilities.py`; 0: none are asked."""
    from reference_impl.assembly.llm import LLM
    from reference_impl.bench import abilities
    from reference_impl.features.chat.prompts import ChatEncoder

    if against is not None:
        check_tokenizers(folder, against)
    written = text.read_text("utf-8")
    windows = windows_of(ChatEncoder(folder).tokens_of(written), length, most)
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": KV_BYTES, "max_num_seqs": 32}
    llm, other = (None if path is None else LLM(path, **options) for path in (folder, against))
    assert llm is not None
    found = compare(llm.engine.model, None if other is None else other.engine.model, windows)
    asked = abilities.compare(llm, other, written, tasks) if tasks else {}
    return {"windows": len(windows), "found": found, "abilities": asked}
