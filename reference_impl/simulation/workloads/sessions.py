"""Sessions of a workload, drawn one after another. All lengths and pauses of a session are drawn when it begins.

So session 17 is the same under every arrival process. What sessions share belongs to the workload, not to the seed: two
seeds are other users of the same service, with the same system prompts and documents.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from reference_impl.simulation.workloads.distributions import Drawn, Floats, bits, choices, zipf_weights
from reference_impl.simulation.workloads.pages import key_of, pages_of
from reference_impl.simulation.workloads.request import PAGE_TOKENS, WorkloadRequest
from reference_impl.simulation.workloads.spec import Workload

BLOCK = 1024


class Draws:
    """Values of one field, one after another, from a random stream of its own: other fields do not affect it."""

    def __init__(self, sample: Callable[[np.random.Generator, int], list[int]], name: str, field: str, seed: int):
        self._sample = sample
        self._rng = bits(seed, zlib.crc32(name.encode()), zlib.crc32(field.encode()))
        self._values: list[int] = []
        self._next = 0

    def take(self, num: int) -> list[int]:
        while len(self._values) - self._next < num:
            self._values = self._values[self._next :] + self._sample(self._rng, BLOCK)
            self._next = 0
        self._next += num
        return self._values[self._next - num : self._next]

    def one(self) -> int:
        return self.take(1)[0]


def whole(distribution: Drawn, least: int, unit: float = 1.0) -> Callable[[np.random.Generator, int], list[int]]:
    """Draws samples as integers in units of 1 / unit, rounded half up, at least `least`."""

    def sample(rng: np.random.Generator, num: int) -> list[int]:
        found = np.floor(distribution.sample(rng, num) * unit + 0.5).astype(np.int64)
        drawn: list[int] = np.maximum(found, least).tolist()
        return drawn

    return sample


def popular(weights: Floats) -> Callable[[np.random.Generator, int], list[int]]:
    def sample(rng: np.random.Generator, num: int) -> list[int]:
        drawn: list[int] = choices(rng, weights, num).tolist()
        return drawn

    return sample


@dataclass(slots=True)
class Turn:
    """A turn. documents: numbers in the store, in prompt order. own: tokens of the session's text up to here."""

    documents: tuple[int, ...]
    num_prompt_tokens: int
    own: int
    num_output_tokens: int
    think: int  # microseconds before it


@dataclass(slots=True)
class Session:
    """A session. turns: those still to come, last first. number: of the turn that comes next, from 1."""

    id: str
    key: int
    tenant: int
    images: int
    turns: list[Turn]
    number: int = 1


class Sessions:
    """Draws the sessions of a workload and makes requests of their turns."""

    def __init__(self, spec: Workload, seed: int):
        self.spec, self.seed, self._count = spec, seed, 0

        def draws(field: str, distribution: Drawn | None, least: int, unit: float = 1.0) -> Draws | None:
            return None if distribution is None else Draws(whole(distribution, least, unit), spec.name, field, seed)

        def must(field: str, distribution: Drawn, least: int) -> Draws:
            return Draws(whole(distribution, least), spec.name, field, seed)

        self._tenant = Draws(popular(zipf_weights(spec.tenants.num, spec.tenants.zipf)), spec.name, "tenant", seed)
        self._turns = must("turns", spec.turns, 1)
        self._message = must("message", spec.message, 1)
        self._first = draws("first_message", spec.first_message, 1)
        self._output = must("output", spec.output, 1)
        self._think = draws("think", spec.think, 0, 1e6)
        self._kept = Draws(_coin(spec.keep_output.probability), spec.name, "keep", seed) if spec.keep_output else None
        self._system = self._world("system_prompt", spec.tenants.system_prompt, spec.tenants.num)
        self._system_keys = [key_of(spec.name, "tenant", t) for t in range(spec.tenants.num)]
        if spec.documents:
            d = spec.documents
            self._num_documents = must("documents.count", d.count, 0)
            self._document = Draws(popular(zipf_weights(d.num, d.zipf)), spec.name, "documents", seed)
            self._document_tokens = self._world("documents.tokens", d.tokens, d.num)
            self._document_keys = [key_of(spec.name, "document", i) for i in range(d.num)]
        if spec.images:
            self._num_images = must("images.count", spec.images.count, 0)
            self._image_tokens = must("images.tokens", spec.images.tokens, 1)

    def _world(self, field: str, distribution: Drawn, num: int) -> list[int]:
        """Lengths that belong to the workload and not to the seed: 0 stands for every seed."""
        return Draws(whole(distribution, 1), self.spec.name, f"world.{field}", 0).take(num)

    def draw(self, num_turns: int | None = None) -> Session:
        """The next session, with all its turns: as many as are drawn, or as are given."""
        spec, number = self.spec, self._count
        self._count += 1
        tenant, num = self._tenant.one(), self._turns.one() if num_turns is None else num_turns
        messages, outputs = self._message.take(num), self._output.take(num)
        if self._first is not None:
            messages[0] = self._first.one()
        thinks = self._think.take(num) if self._think else [0] * num
        kept = self._kept.take(num) if self._kept else [0] * num
        images = self._num_images.one() if spec.images else 0
        own = sum(self._image_tokens.take(images)) if images else 0
        documents = self._documents() if spec.documents else ()
        longest = spec.max_prompt_tokens.tokens
        turns: list[Turn] = []
        for k in range(num):
            if k and spec.documents and spec.documents.drawn == "per_turn":
                documents = self._documents()
            own += messages[k]
            prompt = self._system[tenant] + sum(self._document_tokens[d] for d in documents) + own
            if prompt > longest and k:
                break
            turns.append(Turn(documents, min(prompt, longest), own, outputs[k], thinks[k]))
            own += outputs[k] * kept[k]
        turns.reverse()
        name = f"{spec.name}-{self.seed}-{number}"
        return Session(name, key_of(spec.name, "session", self.seed, number), tenant, images, turns)

    def _documents(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(self._document.take(self._num_documents.one())))

    def request(
        self, session: Session, arrival: float, after: str | None = None, think: float = 0.0
    ) -> WorkloadRequest:
        """Takes the session's next turn off and returns it as a request."""
        turn, spec = session.turns.pop(), self.spec
        segments = [(self._system_keys[session.tenant], self._system[session.tenant])]
        segments += [(self._document_keys[d], self._document_tokens[d]) for d in turn.documents]
        segments.append((session.key, turn.own))
        pages = pages_of(segments)[: turn.num_prompt_tokens // PAGE_TOKENS]
        id = f"{session.id}.{session.number}"
        session.number += 1
        return WorkloadRequest(
            id, arrival, turn.num_prompt_tokens, turn.num_output_tokens, pages,
            session=session.id if spec.has_sessions else "", tenant=f"{spec.name}-{session.tenant}",
            after=after, think=think, images=session.images,
        )  # fmt: skip


def _coin(probability: float) -> Callable[[np.random.Generator, int], list[int]]:
    def sample(rng: np.random.Generator, num: int) -> list[int]:
        drawn: list[int] = (rng.random(num) < probability).astype(np.int64).tolist()
        return drawn

    return sample
