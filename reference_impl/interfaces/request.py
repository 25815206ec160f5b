"""A request, and how its tokens are chosen."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from reference_impl.interfaces.blocks import BlockId
from reference_impl.interfaces.sampling_fields import check, normal

Pooling = Literal["last", "mean"]


class RequestState(enum.Enum):
    WAITING = "waiting"  # no KV blocks on the device; new, or preempted and queued again
    LOADING = "loading"  # waits for pages from a store, beside the queue: without a seat, but with blocks for them
    RUNNING = "running"  # holds KV blocks
    FINISHED = "finished"


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Checked once, here.

    The order is fixed: logit_bias, penalties, allowed_token_ids and min_tokens, temperature, top-k, top-p, min-p, then
    one draw. max_tokens None: as many as fit. temperature 0 is greedy. top_k 0 (or -1, which becomes 0), top_p 1 and
    min_p 0 switch a filter off.
    repetition_penalty (0.01 to 100) divides (multiplies, if negative) logits of tokens seen in prompt or output;
    presence and frequency penalties are subtracted for tokens seen in the output.
    logprobs: None, or how many alternatives to report (-1: the whole vocabulary), of the model's own distribution
    (log-softmax of the logits before penalties, temperature and filters).
    prompt_logprobs: the same for the prompt's tokens, whose keys and values are then computed and not taken from the
    prefix cache.
    logit_bias: {token id: what is added to its logit}, from -100 to 100; an id may be a string of digits, as in JSON.
    allowed_token_ids: no other token is drawn. min_tokens: before so many are generated neither an end token nor one of
    stop_token_ids is drawn, and stop strings do not count.
    include_stop_str_in_output: the text keeps the stop string, or stop token, that ended it. skip_special_tokens: the
    text leaves special tokens out, so that, as in vLLM, a stop string that is one ends nothing: with False it does, and
    so does its id in stop_token_ids. detokenize False: token ids only, no text and no stop strings.
    bad_words: the token that would complete one of these strings is not drawn, as the tokenizer of `LLM` or a server
    spells it at a text's start and behind a space.
    """

    max_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()  # one string, or None, also works
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1  # how many independent samples
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    detokenize: bool = True
    bad_words: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, value in normal(self).items():
            object.__setattr__(self, name, value)
        check(self)

    def clone(self) -> SamplingParams:
        """The same object, since nothing in it can be changed; vLLM has this method. For one with other values use
        dataclasses.replace()."""
        return self


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability (natural logarithm) of the chosen token, and of the most likely ones, (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Grammar(Protocol):
    """Decides, on the host, which tokens a request may write next. It depends on the output alone, since all samples
    of a prompt share it.

    Its errors are raised by `Engine.step`: with overlap="off" you can abort the request and go on; otherwise the engine
    is lost. For a held request it restricts what is sampled and reported, not what is appended.
    """

    def allowed(self, output: Sequence[int]) -> bytes:
        """A mask with a bit for each token t of the vocabulary, 1 if t may follow the output: bit t % 8 of byte
        t // 8."""
        ...


@dataclass(eq=False)  # a request is itself, not its fields
class Request:
    """One sequence in the engine.

    tokens holds prompt and output; num_computed_tokens of them have their keys and values in the cache.
    The last sampled token is always in `tokens` and not yet in the cache. Behind `tokens` come up to num_in_flight more
    that submitted steps sample and that are not collected yet. Where steps verify drafts, there may be fewer in the
    end: until then num_computed_tokens, too, counts every draft as right.
    With n > 1 the first sample is the parent; the others are its children, forked when its prompt is computed.
    """

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    arrival: float  # seconds on the engine's clock
    stop_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0  # prompt + output, never exceeded
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0  # of these, how many the prefix cache gave when last admitted
    num_resumed_tokens: int = 0  # of the output, those that another engine wrote before it handed the request over
    block_tables: list[list[BlockId]] = field(default_factory=lambda: [[]])  # one per KV group
    parent_id: str | None = None
    sample_index: int = 0
    children: list[Request] = field(default_factory=list)  # not forked yet
    holds: bool = False  # sampled tokens are reported and not appended; beam search appends by itself
    grammar: Grammar | None = None
    adapter: str | None = None  # together with the salt: the prefixes that this request may share
    cache_salt: str | None = None
    priority: int = 0  # smaller goes first, as in Unix and vLLM
    tenant: str = ""
    deadline: float | None = None  # seconds on the engine's clock, for the last token
    state: RequestState = RequestState.WAITING
    finish_reason: str | None = None
    error: str | None = None  # why, where finish_reason is "error"
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's second token and those behind
    pooling: Pooling | None = None  # nothing is sampled for it: it ends when its prompt is computed, see `embedding`
    pooled: array[float] | None = None  # a hidden state or, for the mean, the sum of those so far

    @property
    def embedding(self) -> list[float] | None:
        """The embedding [hidden_size]: the hidden state, after the model's last norm, of the prompt's last token, or
        the mean over all its tokens. None before the request is finished, if it was aborted, and without pooling."""
        if self.pooled is None or self.finish_reason != "stop":
            return None
        num_pooled = self.num_prompt_tokens if self.pooling == "mean" else 1
        return [value / num_pooled for value in self.pooled]

    def pool(self, start: int, values: array[float]) -> None:
        """Adds the values of a row that begins at position `start`. A request that computes its prompt again begins
        at 0; one that was swapped out goes on."""
        if self.pooled is None or start == 0 or self.pooling == "last":
            self.pooled = values
        else:
            self.pooled = array("d", map(float.__add__, self.pooled, values))

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether every token of the prompt must be computed, also those whose keys and values are cached."""
        return self.scores_prompt or self.pooling == "mean"

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of its prompt are requested and some are still missing."""
        asked = self.sampling.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def num_tokens(self) -> int:
        """The number of tokens, including those in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def drop(self, n: int) -> None:
        """Removes its last n tokens, and their log-probabilities."""
        del self.tokens[len(self.tokens) - n :]
        del self.logprobs[len(self.output_tokens) :]

    @property
    def num_missing_tokens(self) -> int:
        """The number of tokens that are not computed: 1 while it decodes, many while its prompt is read."""
        return len(self.tokens) + self.num_in_flight - self.num_computed_tokens

    @property
    def block_table(self) -> list[BlockId]:
        """The block table of the first KV group, the only one unless the model has layers of several kinds."""
        return self.block_tables[0]


class Asking(Protocol):
    """What a sampler may read of a request: a `Request` is one, and so is what a worker keeps of it."""

    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]:
        """The prompt and the output so far."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def seed(self) -> int: ...
    @property
    def sample_index(self) -> int: ...
