"""What the streams of a fleet have got so far, so that another engine can go on with one whose engine is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from reference_impl.features.handover.progress import Progress
from reference_impl.interfaces import SamplingParams, TokenLogprobs
from reference_impl.serving.runner import Message, Piece


@dataclass(eq=False)  # a sample is itself, not its fields
class Sample:
    """One sample of a prompt. tokens, logprobs: so far. num_characters: of its text, which were sent. cut: how many
    characters of what its engine says now are known already, since it reads the text from its beginning."""

    index: int  # in the answer
    prompt: int  # its number in the request
    seed: int
    sample_index: int  # of the prompt's samples
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_characters: int = 0
    cut: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    is_over: bool = False

    def take(self, piece: Piece) -> None:
        """Notes a piece, and leaves in it what is new."""
        known, piece.text = piece.text[: self.cut], piece.text[self.cut :]
        self.cut -= len(known)
        self.num_characters += len(piece.text)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if self.prompt_logprobs is None:
            self.prompt_logprobs = piece.prompt_logprobs
        else:
            piece.prompt_logprobs = None
        self.is_over = piece.finish_reason is not None

    def resumed(self) -> Progress:
        """How far it has come, for the engine that goes on. From now on that one's pieces are expected."""
        self.cut = self.num_characters
        scores = self.prompt_logprobs if self.tokens and self.prompt_logprobs is not None else ()
        return Progress(
            self.seed, tuple(self.tokens), self.sample_index, num_unstreamed=len(self.tokens),
            logprobs=tuple(self.logprobs), prompt_logprobs=tuple(scores),
        )  # fmt: skip


@dataclass
class Stream:
    """A request that was given to an engine. samples: by index; none before the engine has accepted it."""

    request_id: str
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams
    options: Mapping[str, Any]
    engine: int = -1
    samples: list[Sample] = field(default_factory=list)
    num_cached: int = 0
    num_moves: int = 0  # to other engines
    parts: set[int] = field(default_factory=set)  # numbers of the streams there, of a sample each
    is_answered: bool = False

    def begin(self, seeds: Sequence[int]) -> None:
        """The engine has accepted it. seeds: of each prompt."""
        self.is_answered = True
        if not self.samples:
            n = self.sampling.n
            self.samples = [Sample(p * n + s, p, seed, s) for p, seed in enumerate(seeds) for s in range(n)]

    @property
    def request(self) -> tuple[Any, ...]:
        """The rest of its command."""
        return self.request_id, self.prompts, self.sampling, self.options

    @property
    def can_move(self) -> bool:
        """Whether another engine can go on with it. What is pooled has no answer to go on with."""
        return self.options.get("pooling") is None

    def command(self, number: int, sample: Sample) -> Message:
        """What starts the rest of a sample in another engine."""
        sampling = self.sampling if self.sampling.n == 1 else replace(self.sampling, n=1)
        options = {**self.options, "resume": sample.resumed()}
        name = f"{self.request_id}~{self.num_moves}.{sample.index}"
        return ("start", number, name, [self.prompts[sample.prompt]], sampling, options)

    def usage(self) -> tuple[int, int, int]:
        """The fields of a `Usage`."""
        prompts, outputs = sum(map(len, self.prompts)), sum(len(sample.tokens) for sample in self.samples)
        return prompts, outputs, self.num_cached
