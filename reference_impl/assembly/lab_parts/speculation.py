"""An engine whose drafts and whose verifier are a lab's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference_impl.assembly.lab_parts.serving import LabEngine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.sampler import probabilities, sample
from reference_impl.core.philox import uniform
from reference_impl.core.sampler import TorchSampler, distribution, draw
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.speculative.rejection import DRAFT, VERDICT, verified
from reference_impl.interfaces import Asking, Request, Sampled

Verdict = tuple[int, int]  # how many draft tokens are kept; the token behind them
Drafted = tuple[Sequence[int], Tensor | None]  # k draft tokens; q [k, vocab_size], None: they were not drawn


@dataclass(frozen=True)
class Round:
    """The draft tokens of one request in one step."""

    p: Tensor  # [k + 1, vocab_size] float64: the target's distributions, filtered as the request says
    q: Tensor  # [k, vocab_size] float64: what each draft token was drawn from; 1 at one that was not drawn
    drafts: list[int]  # the k draft tokens
    seeded: bool  # whether the request has a seed, and so is promised its text
    u: list[float]  # k + 1 numbers in (0, 1). seeded: each position's own. Otherwise to be used in this order
    expected: Verdict  # what the engine's own rule says


class Speculation(TorchSampler):
    """A sampler and a host proposer in one. draft(request, k): drafts a request's next tokens; judge: answers a
    `Round`, and the engine goes on with its answer; ValueError for one that no rule gives. rounds: those judged."""

    def __init__(self, draft: Callable[[Request, int], Drafted], judge: Callable[[Round], Verdict]):
        self.draft, self.judge = draft, judge
        self.engine: LabEngine | None = None
        self.q: dict[str, Tensor | None] = {}  # by request
        self.num_rounds: dict[str, int] = {}
        self.rounds: list[tuple[int, int]] = []  # (drafts, kept)

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled:
        """The engine's own choice, for an engine that asks its sampler; one that launches it calls `choose`."""
        return sample(logits, requests)

    def propose(self, request: Request, k: int) -> Sequence[int]:
        drafts, self.q[request.id] = self.draft(request, k)
        return drafts

    def choose(self, scores: Tensor, t: Mapping[str, Tensor]) -> Tensor:
        tokens = super().choose(scores, t)
        if "draft.slots" not in t:
            return tokens
        assert self.engine is not None, "LabEngine was not made by `speculating`"
        hosts = self.engine.engine.executor.slots.host  # type: ignore[attr-defined]
        first = 0
        for slot, num in zip(t["draft.slots"].tolist(), t["draft.num"].tolist(), strict=True):
            at = int(t["draft.at"][first])
            drafts = t["draft.tokens"][first : first + num].tolist()
            kept, token = self._judged(scores, t, at, drafts, hosts[slot])
            tokens[at : at + kept] = torch.tensor(drafts[:kept], dtype=tokens.dtype)
            tokens[at + kept] = token
            first += num
        return tokens

    def _judged(self, scores: Tensor, t: Mapping[str, Tensor], at: int, drafts: list[int], host: Any) -> Verdict:
        rows, name = slice(at, at + len(drafts) + 1), host.request_id
        settings = {key: t[key][rows] for key in ("temperature", "top_k", "top_p", "min_p") if key in t}
        settings.setdefault("temperature", torch.zeros(len(drafts) + 1))
        p = distribution(scores[rows].double(), settings)
        one_hot = torch.nn.functional.one_hot(torch.tensor(drafts), p.shape[1]).double()
        q = self.q[name]
        q = one_hot if q is None else q[: len(drafts)]
        number = self.num_rounds[name] = self.num_rounds.get(name, 0) + 1
        seeded = host.sampling.seed is not None and "u" in t
        if seeded:
            u = t["u"][rows].double()
        else:
            u = torch.from_numpy(uniform(host.seed, VERDICT, number, range(len(drafts) + 1))).double()
        expected = _coupled(p, drafts, u) if seeded else _rejected(p, q, drafts, u)
        kept, token = self.judge(Round(p, q, drafts, seeded, u.tolist(), expected))
        if not 0 <= kept <= len(drafts) or token in drafts[kept : kept + 1]:
            raise ValueError(
                f"judge keeps {kept} of the draft tokens {drafts} and gives token {token}: expected 0 to {len(drafts)} "
                "kept, and a token that is not the first dropped draft token, which would be a kept one"
            )
        self.rounds.append((len(drafts), kept))
        return kept, token


def _coupled(p: Tensor, drafts: list[int], u: Tensor) -> Verdict:
    chosen = draw(p, u).tolist()
    kept = next((i for i, draft in enumerate(drafts) if draft != chosen[i]), len(drafts))
    return kept, chosen[kept]


def _rejected(p: Tensor, q: Tensor, drafts: list[int], u: Tensor) -> Verdict:
    for i, draft in enumerate(drafts):
        numbers = u[i : i + 2, None]
        token = int(verified(p[i : i + 1], q[i : i + 1], torch.tensor([draft]), numbers)[0])
        if token != draft:
            return i, token
    return len(drafts), int(draw(p[-1:], u[-1:])[0])


def speculating(llm: LLM, options: Mapping[str, Any], num_drafts: int, part: Speculation) -> LabEngine:
    """A `LabEngine` in which each decoding request has up to num_drafts draft tokens of `part` in a step. num_drafts 0:
    `part` is never asked, and the engine's own sampler draws."""
    if not num_drafts:
        return LabEngine(llm, options)
    options = {**options, "num_drafts": num_drafts, "adaptive_drafts": "off"}
    part.engine = LabEngine(llm, options, sampler=part, host_proposer=part)
    return part.engine


def drafted_by(llm: LLM) -> Callable[[Request, int], Drafted]:
    """A `draft` function for `Speculation`: a small model draws with the request's settings, without a cache."""
    model, asked = llm.engine.model, {"n": 0}

    @torch.inference_mode()
    def draft(request: Request, k: int) -> Drafted:
        tokens, rows = list(request.tokens), []
        attention = RecomputeAttention(model.config.attention_scale, model.config.attention_softcap)
        asked["n"] += 1
        for i in range(k):
            batch = ragged_batch([(tokens, 0)], len(tokens), model.device, model.config.layer_windows)
            q = probabilities(model(batch, None, attention).double(), [replace(request.sampling, n=1)])
            seeded = request.sampling.seed is not None  # then with the position's own number
            place = (0, len(tokens), 0) if seeded else (DRAFT, asked["n"], i)
            u = torch.from_numpy(uniform([request.seed or 0], *place)).double()
            tokens.append(int(draw(q, u)[0]))
            rows.append(q[0])
        return tokens[len(tokens) - k :], torch.stack(rows)

    return draft
