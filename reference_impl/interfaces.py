"""The words of the engine: the data that flows between its parts, and what each part promises.

Imports nothing but the standard library, so that every room can import it. Shapes are in comments;
`Tensor` is torch.Tensor. A part is swapped by passing your own to `Engine(..., parts=Parts(...))`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

BlockId = int


class RequestState(enum.Enum):
    WAITING = "waiting"  # no KV blocks; queued, or preempted and queued again
    RUNNING = "running"  # holds KV blocks
    FINISHED = "finished"


# Fields of SamplingParams that are numbers: (name, whole, may be None).
_NUMBERS = (
    ("max_tokens", True, False),
    ("temperature", False, False),
    ("top_k", True, False),
    ("top_p", False, False),
    ("min_p", False, False),
    ("repetition_penalty", False, False),
    ("presence_penalty", False, False),
    ("frequency_penalty", False, False),
    ("seed", True, True),
    ("logprobs", True, True),
)


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Checked once, here.

    The order is fixed: penalties, temperature, top-k, top-p, min-p, then one draw.
    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch a filter off.
    repetition_penalty divides (multiplies, if negative) logits of tokens seen in prompt or output;
    presence and frequency penalties are subtracted for tokens seen in the output.
    logprobs: None, or how many alternatives to report, of the model's own distribution
    (log-softmax of the logits before penalties, temperature and filters).
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
    stop: Sequence[str] = ()  # one string, or None, will do too
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            one = isinstance(value, str | int) or value is None
            object.__setattr__(self, name, () if value is None else (value,) if one else tuple(value))
        for name, whole, optional in _NUMBERS:
            value = getattr(self, name)
            right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            if not (right or (optional and value is None)):
                kind = "an integer" if whole else "a number"
                raise ValueError(f"SamplingParams.{name}: expected {kind}{' or None' * optional}, got {value!r}")
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            (
                "temperature",
                0 <= self.temperature < float("inf"),
                "0 (greedy) or a finite number above 0",
            ),
            ("top_k", self.top_k >= 0, "0 (off) or a positive integer"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < float("inf"),
                "a finite number above 0 (1 is off)",
            ),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            (
                "frequency_penalty",
                -2 <= self.frequency_penalty <= 2,
                "between -2 and 2",
            ),
            (
                "seed",
                self.seed is None or 0 <= self.seed < 2**64,
                "None or an integer in [0, 2**64)",
            ),
            (
                "stop",
                all(isinstance(s, str) and s for s in self.stop),
                "a string, or non-empty strings",
            ),
            (
                "stop_token_ids",
                all(isinstance(i, int) and not isinstance(i, bool) for i in self.stop_token_ids),
                "token ids",
            ),
            (
                "logprobs",
                self.logprobs is None or self.logprobs >= 0,
                "None or at least 0",
            ),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"SamplingParams.{name}: expected {expected}, got {getattr(self, name)!r}")


@dataclass
class Request:
    """One sequence on its way through the engine.

    tokens holds prompt and output; num_computed_tokens of them have their keys and values in the cache.
    The last sampled token is always in `tokens` and not yet in the cache.
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
    block_table: list[BlockId] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probability of the chosen token and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class KVSpec:
    """What one layer's cache must hold for one token, and in what unit it is handed out."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens in a block
    bytes_per_value: int

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) x layers x KV heads x head_dim x bytes per value."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_value

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True)
class Row:
    """One request's share of a step: tokens [start, start + num_tokens) are computed.

    samples is true when the row reaches the request's last token, so that its logits choose the next one.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True)
class StepPlan:
    """What the scheduler wants done in one forward pass."""

    step_id: int
    rows: tuple[Row, ...]
    preempted: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass
class Batch:
    """One ragged forward pass as tensors. Rows of length 1 come first, the longest context first.

    The tokens of all rows lie one after another: row r owns [query_start_loc[r], query_start_loc[r + 1]).
    A slot is block id x block_size + offset in the block.
    """

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    query_start_loc: Tensor  # [num_rows + 1] int32
    seq_lens: Tensor  # [num_rows] int32, tokens a row may look at: cached ones and its own
    slot_mapping: Tensor  # [num_tokens] int64, where each new key and value goes
    block_table: Tensor  # [num_rows, max_blocks] int32, padded with 0
    logits_indices: Tensor  # [num_sampling_rows] int64, which tokens need logits
    request_ids: tuple[str, ...]  # [num_rows]
    query_lens: tuple[int, ...]  # [num_rows], host copy
    context_lens: tuple[int, ...]  # [num_rows], host copy of seq_lens
    num_decode_rows: int  # how many leading rows have one token
    block_size: int
    attention_plan: Any = None  # whatever the attention backend prepared once for all layers

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)


@dataclass(frozen=True)
class Sampled:
    """What a sampler chose: per row a token, and the log-probabilities where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass
class StepOutput:
    """What came back: one token for each row that sampled."""

    tokens: dict[str, int]
    logprobs: dict[str, TokenLogprobs]
    started_at: float
    finished_at: float


class Clock(Protocol):
    def now(self) -> float: ...


class BlockPool(Protocol):
    """Counts references to numbered blocks. Integers only; it never sees a tensor."""

    @property
    def num_free(self) -> int: ...
    def allocate(self, n: int) -> list[BlockId]: ...
    def incref(self, ids: Sequence[BlockId]) -> None: ...
    def decref(self, ids: Sequence[BlockId]) -> list[BlockId]: ...
    def ref_count(self, block: BlockId) -> int: ...


class KVManager(Protocol):
    """Gives requests the blocks that their tokens need."""

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for the request's next num_tokens; all or nothing."""
        ...

    def free(self, request: Request) -> None: ...
    @property
    def num_available(self) -> int: ...


class Scheduler(Protocol):
    """Decides who computes how many tokens. It never touches a tensor."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def schedule(self, now: float) -> StepPlan: ...
    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Record what was computed and sampled; returns the requests that finished."""
        ...

    def has_work(self) -> bool: ...


class KVCache(Protocol):
    """Owns the tensors in which keys and values live."""

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None: ...
    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [num_blocks, block_size, num_kv_heads, head_dim]."""
        ...


class AttentionBackend(Protocol):
    """Attention of a ragged batch over the paged cache."""

    def plan(self, batch: Batch) -> None:
        """Prepare once a step what all layers share; may fill batch.attention_plan."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        kv_cache: KVCache,
        batch: Batch,
    ) -> Tensor:
        """q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim] -> like q.

        Stores k and v in the cache, then lets each row's queries see that row's positions up to their own.
        """
        ...


class LinearMethod(Protocol):
    """How a weight matrix is stored and multiplied."""

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]: ...
    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        """Copy a checkpoint's tensor into rows [start, start + len(tensor)) of parameter `name`."""
        ...

    def finish(self, params: dict[str, Tensor]) -> None:
        """Called once when everything is loaded; may lay the weight out anew."""
        ...

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]."""
        ...


class Sampler(Protocol):
    """Chooses the next token of each request from logits [len(requests), vocab_size]."""

    def __call__(self, logits: Tensor, requests: Sequence[Request]) -> Sampled: ...


class Executor(Protocol):
    """Builds the batch, runs the model, samples."""

    def submit(self, plan: StepPlan, requests: Mapping[str, Request]) -> Any: ...
    def collect(self, ticket: Any) -> StepOutput: ...
    def close(self) -> None: ...
