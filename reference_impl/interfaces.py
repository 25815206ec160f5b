"""The words of the engine: the data that flows between its parts, and what each part promises.

Imports nothing but the standard library, so that every room can import it. Shapes are in comments;
`Tensor` is torch.Tensor. A part is swapped by passing your own to `Engine(..., parts=Parts(...))`.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

BlockId = int
NO_BLOCK: BlockId = -1  # in a block table: these positions have fallen out of the window and are never read again


class RequestState(enum.Enum):
    WAITING = "waiting"  # no KV blocks on the device; new, or preempted and queued again
    LOADING = "loading"  # waits for pages from a store, beside the queue; takes no seat and holds up no other request
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
    ("n", True, False),
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
    n: int = 1  # how many independent samples

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
        inf, strings, ids = float("inf"), self.stop, self.stop_token_ids
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < inf, "0 (greedy) or a finite number above 0"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive integer"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "a finite number above 0 (1 is off)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "None or an integer in [0, 2**64)"),
            ("stop", all(isinstance(s, str) and s for s in strings), "a string, or non-empty strings"),
            ("stop_token_ids", all(isinstance(i, int) and not isinstance(i, bool) for i in ids), "token ids"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "None or at least 0"),
            ("n", self.n >= 1, "at least 1"),
        )
        for name, ok, expected in checks:
            if not ok:
                raise ValueError(f"SamplingParams.{name}: expected {expected}, got {getattr(self, name)!r}")


@dataclass(eq=False)  # a request is itself, not its fields
class Request:
    """One sequence on its way through the engine.

    tokens holds prompt and output; num_computed_tokens of them have their keys and values in the cache.
    The last sampled token is always in `tokens` and not yet in the cache. Behind `tokens` come up to num_in_flight more
    that submitted steps sample, and that are not collected yet. Where they verify drafts, it may turn out to be fewer:
    until then num_computed_tokens, too, is what it is if every draft is right.
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
    num_cached_tokens: int = 0  # of these, how many a prefix hit gave when the request was let in last
    block_tables: list[list[BlockId]] = field(default_factory=lambda: [[]])  # one per KV group
    parent_id: str | None = None
    sample_index: int = 0
    children: list[Request] = field(default_factory=list)  # not forked yet
    holds: bool = False  # sampled tokens are reported and not appended; whoever set this appends (beam search)
    adapter: str | None = None  # together with the salt: whose prefixes this request may share
    cache_salt: str | None = None
    priority: int = 0  # smaller goes first, as in Unix and vLLM
    tenant: str = ""
    deadline: float | None = None  # seconds on the engine's clock, for the last token
    state: RequestState = RequestState.WAITING
    finish_reason: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """With those in flight."""
        return len(self.tokens) + self.num_in_flight

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def drop(self, n: int) -> None:
        """Takes back its last n tokens, and what was reported of them."""
        del self.tokens[len(self.tokens) - n :]
        del self.logprobs[len(self.output_tokens) :]

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are not computed: 1 while decoding, many while the prompt is read."""
        return len(self.tokens) + self.num_in_flight - self.num_computed_tokens

    @property
    def block_table(self) -> list[BlockId]:
        """Of the first KV group, the only one unless the model has layers of several kinds."""
        return self.block_tables[0]


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probability of the chosen token and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class KVSpec:
    """What one KV group's cache must hold for one token, and in what unit it is handed out.

    A group is a set of layers that keep the same positions. All groups of a model have as many layers, so that
    a block of one pool can serve any of them.
    """

    num_layers: int  # in this group
    num_kv_heads: int
    head_dim: int
    block_size: int  # tokens in a block
    bytes_per_value: int
    layers: tuple[int, ...] = ()  # which layers of the model; () is the first num_layers
    window: int | None = None  # a query at position p sees p - window + 1 ... p; None: everything before it
    bytes_per_scale: int = 0  # beside each head's values, in a cache of 8 bits

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) x layers x KV heads x (head_dim x bytes per value + bytes per scale)."""
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim * self.bytes_per_value + self.bytes_per_scale)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


class Row(NamedTuple):
    """One request's share of a step: tokens [start, start + num_tokens) are computed.

    samples is true when the row reaches the request's last token, so that its logits choose the next one; of a held
    request that computes its tokens again, having been told what follows, it is false.
    num_drafts: behind them, so many guesses of the worker's proposer are computed too. Each one that is what its
    position samples is kept, up to the first that is not: a row that samples gives 1 to 1 + num_drafts tokens.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0

    @property
    def length(self) -> int:
        """Tokens that are computed, with drafts."""
        return self.num_tokens + self.num_drafts


class BlockPair(NamedTuple):
    """Contents of block src go to block dst."""

    src: BlockId
    dst: BlockId


class Page(NamedTuple):
    """The keys and values of a full block, and the name a store has for them: see `page_keys` in kv/stored.py."""

    key: bytes
    block: BlockId


class PageTransfer(NamedTuple):
    """Pages on their way between the device and a page store. It begins with a step and ends when it ends: with the
    reply to that step or a later one. Until then nothing else may use its blocks."""

    id: int
    pages: tuple[Page, ...]


class TransferEnd(NamedTuple):
    """error: why the pages did not arrive; None if they did."""

    id: int
    error: str | None = None


@dataclass(frozen=True)
class Transfers:
    """What must be moved before a step writes anything, in this order: out to the host, within the device, in again.

    Loads and saves only begin before the step writes; `Reply.transfers` says when they ended.
    """

    swap_out: tuple[BlockPair, ...] = ()  # device -> host
    copies: tuple[BlockPair, ...] = ()  # device -> device (copy-on-write)
    swap_in: tuple[BlockPair, ...] = ()  # host -> device
    evicted: tuple[BlockId, ...] = ()  # nothing to move: blocks of the prefix cache that were given to other requests
    loads: tuple[PageTransfer, ...] = ()  # store -> device
    saves: tuple[PageTransfer, ...] = ()  # device -> store
    cancelled: tuple[int, ...] = ()  # transfers that are no longer wanted; each of them ends, too

    @property
    def is_work(self) -> bool:
        """Whether a step without rows has something to do for them."""
        return bool(self.swap_out or self.copies or self.swap_in or self.loads or self.saves or self.cancelled)


@dataclass(frozen=True)
class StepPlan:
    """What the scheduler wants done in one forward pass."""

    step_id: int
    rows: tuple[Row, ...]
    preempted: tuple[str, ...] = ()
    transfers: Transfers = field(default_factory=Transfers)
    admitted: tuple[tuple[str, int], ...] = ()  # (request, tokens it found in the prefix cache)

    @property
    def num_tokens(self) -> int:
        """With drafts."""
        return sum(row.length for row in self.rows)


class Opened(NamedTuple):
    """A request gets a slot of the worker, its own until it is closed."""

    slot: int
    request_id: str  # for messages, profiles and an attention backend's own books; nothing is looked up by it
    tokens: array[int]  # "q"; all that are known
    num_prompt_tokens: int
    num_computed_tokens: int  # of these, the keys and values are in the cache
    sampling: SamplingParams
    seed: int
    sample_index: int
    holds: bool  # what is sampled for it is reported, and not part of it


class Appended(NamedTuple):
    """Tokens of a slot, from position `start` on, that the worker did not sample."""

    slot: int
    start: int
    tokens: tuple[int, ...]


class Rewound(NamedTuple):
    """A slot has fewer tokens computed than it had: the next row computes some again."""

    slot: int
    num_computed_tokens: int


class TableUpdate(NamedTuple):
    """From index `start` on, the block table of a slot in a KV group."""

    slot: int
    group: int
    start: int
    blocks: tuple[BlockId, ...]


class StepRow(NamedTuple):
    """A slot's share of a step, as `Row` is a request's. While a step runs that verifies drafts of this slot, `start`
    is what it will be if all of them are right; the worker takes its own count, which is exact."""

    slot: int
    start: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0

    @property
    def length(self) -> int:
        """As of `Row`."""
        return self.num_tokens + self.num_drafts


@dataclass(frozen=True)
class Step:
    """What a worker is told of one step; it takes effect in the order of the fields. Plain values: it can be pickled.

    A request keeps its slot from opened to closed, so nothing of it is sent twice, and a step's size does not depend on
    how long its contexts are.
    """

    step_id: int
    closed: tuple[int, ...] = ()  # slots whose requests ended, or gave up their blocks
    opened: tuple[Opened, ...] = ()
    appended: tuple[Appended, ...] = ()
    rewound: tuple[Rewound, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    transfers: Transfers = field(default_factory=Transfers)
    rows: tuple[StepRow, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What came back of a step: per row the tokens that were sampled for it (the drafts that were right, and one more),
    and their log-probabilities if asked."""

    step_id: int
    tokens: tuple[tuple[int, ...], ...]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]]  # {row: of its tokens}
    started_at: float
    finished_at: float
    attention: tuple[str, ...] = ()  # what computed it, as the backend says
    transfers: tuple[TransferEnd, ...] = ()  # those that ended since the reply before, whichever step they began with


@dataclass
class GroupTables:
    """Where the tokens of a batch lie in one KV group. A slot is block id x block_size + offset in the block."""

    window: int | None
    slot_mapping: Tensor  # [num_tokens] int64, where each new key and value goes
    block_table: Tensor  # [num_rows, max_blocks] int32; 0 where a row has no block (padding, or out of the window)


@dataclass
class Batch:
    """One ragged forward pass as tensors. Rows of length 1 come first, the longest context first.

    The tokens of all rows lie one after another: row r owns [query_start_loc[r], query_start_loc[r + 1]).
    """

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    query_start_loc: Tensor  # [num_rows + 1] int32
    seq_lens: Tensor  # [num_rows] int32, positions up to the row's last token: cached ones and its own
    logits_indices: Tensor  # [num_sampling_rows] int64, which tokens need logits, in their order
    request_ids: tuple[str, ...]  # [num_rows]
    query_lens: tuple[int, ...]  # [num_rows], host copy
    context_lens: tuple[int, ...]  # [num_rows], host copy of seq_lens
    num_decode_rows: int  # how many leading rows have one token
    block_size: int
    groups: tuple[GroupTables, ...]  # one per KV group
    group_of_layer: tuple[int, ...]  # [num_layers]
    attention_plan: Any = None  # whatever the attention backend prepared once for all layers

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def slot_mapping(self) -> Tensor:
        """Of the first KV group, the only one unless the model has layers of several kinds."""
        return self.groups[0].slot_mapping

    @property
    def block_table(self) -> Tensor:
        """Of the first KV group."""
        return self.groups[0].block_table


@dataclass(frozen=True)
class Sampled:
    """What a sampler chose: per row a token, and the log-probabilities where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


@dataclass
class StepOutput:
    """What came back: for each row that sampled its tokens, in order. More than one only where drafts were verified."""

    tokens: dict[str, tuple[int, ...]]
    logprobs: dict[str, tuple[TokenLogprobs, ...]]
    started_at: float
    finished_at: float
    attention: tuple[str, ...] = ()  # what computed it, as the backend says
    transfers: tuple[TransferEnd, ...] = ()  # as of `Reply`


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


class PrefixIndex(Protocol):
    """Which blocks hold the keys and values of which token prefix. Counts no references: the KV manager does.

    `key` (bytes) is whose prefix it is: prefixes of different keys never meet. Only full blocks are indexed, and a
    block never without the ones before it.
    """

    def match(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """The blocks of the longest indexed prefix of `tokens`; they count as used now."""
        ...

    def insert(self, tokens: Sequence[int], key: bytes, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Index blocks[i] as holding tokens [i * block_size, (i + 1) * block_size); len(tokens) is a multiple of it.

        Returns the blocks that stand for this prefix from now on: where one was indexed already, that one, and the
        one given is not taken. They count as used now.
        """
        ...

    def evict(self, num_blocks: int, evictable: Callable[[BlockId], bool]) -> list[BlockId]:
        """Forget up to num_blocks blocks: the least recently used of those that no other continues (leaves), and of
        blocks used at the same moment the one deeper in its prefix. Never one that is not evictable."""
        ...

    def __len__(self) -> int:
        """How many blocks are indexed."""
        ...


class KVManager(Protocol):
    """Gives requests the blocks that their tokens need. What it does not do, it leaves unchanged."""

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        """Blocks for tokens [0, num_tokens) of a request that has none: cached ones, swapped-out ones, new ones.
        At most `budget` of them are computed in the first step.

        Sets num_computed_tokens and num_cached_tokens to what was found. At least the last token stays to be computed.
        """
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make room for the request's next num_tokens; all or nothing. A shared block that they fall in is copied."""
        ...

    def commit(self, request: Request) -> None:
        """The request's computed tokens may now be found by others."""
        ...

    def fork(self, parent: Request, child: Request) -> None:
        """The child, whose tokens begin like the parent's, shares the blocks of its first num_computed_tokens."""
        ...

    def free(self, request: Request) -> None:
        """Give all blocks back, on device and host."""
        ...

    def pin(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """Hold what is cached of a prefix, so that it is not evicted; returns the blocks."""
        ...

    def unpin(self, blocks: Sequence[BlockId]) -> None: ...

    def swap_out(self, request: Request) -> bool:
        """Move the request's computed blocks to host memory; False (nothing changed) if they do not fit there."""
        ...

    def take_transfers(self) -> Transfers:
        """What the calls since the last time this was asked want moved."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and cached ones that nobody uses."""
        ...


@runtime_checkable
class FetchesPages(Protocol):
    """A KV manager that fills its prefix cache from a page store, and the store from its prefix cache."""

    def fetch(self, request: Request, now: float) -> bool:
        """Begins to load what the store has of a waiting request's tokens and the prefix cache has not.

        False: there is nothing to wait for. True: the request is to be set aside until `is_fetching` is false, and
        then let in like any other; what came is in the prefix cache.
        """
        ...

    def is_fetching(self, request: Request) -> bool: ...

    def expire(self, now: float) -> None:
        """Cancels transfers that take longer than the store's timeout."""
        ...

    def transfers_ended(self, ends: Sequence[TransferEnd]) -> None:
        """Their blocks are free to be used; loaded ones are in the prefix cache."""
        ...

    @property
    def num_unsent(self) -> int:
        """Transfers that the next step will begin or cancel."""
        ...

    @property
    def num_transfers(self) -> int:
        """Transfers that have not ended."""
        ...


@runtime_checkable
class HoldsPages(Protocol):
    """A KV cache whose blocks can be had, and set, as bytes."""

    def read_pages(self, blocks: Sequence[BlockId]) -> list[bytes]:
        """Of each block the keys, values and scales of all layers."""
        ...

    def write_page(self, block: BlockId, content: memoryview) -> None:
        """ValueError if it is not as long as a block."""
        ...


class PageStore(Protocol):
    """Keeps pages beyond the device: in host memory, in files, on other machines. It never sees a tensor.

    The planner asks which pages there are; the worker, maybe in another process, hands contents over and gets them
    back. A load that is late, fails, or brings anything but what was saved costs time and changes no text: the request
    computes its tokens itself. Pages of different weights must not meet in one store.
    """

    timeout: float  # seconds on the engine's clock, after which a transfer is cancelled

    def num_stored(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys it has, without a gap. Called while a step is planned: it should not block."""
        ...

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[bytes]]:
        """The contents of each key's page, in order."""
        ...

    def save(self, pages: Mapping[bytes, bytes]) -> Future[None]:
        """Contents by key. What is stored under a key already may stay."""
        ...


class Policy(Protocol):
    """Whose turn it is."""

    preemptive: bool  # may a waiting request take the place of a running one that ranks after it?

    def rank(self, request: Request) -> Any:
        """Asked once, when the request arrives; the smaller goes first. Ranks of one policy can be compared."""
        ...

    def finished(self, request: Request) -> None:
        """The request has its last token, or was aborted."""
        ...


class Scheduler(Protocol):
    """Decides who computes how many tokens. It never touches a tensor."""

    def add(self, request: Request) -> None: ...
    def fork(self, parent: Request, child: Request) -> None:
        """Add a request that shares what it has computed with another (beam search)."""
        ...

    def abort(self, request_id: str) -> None: ...
    def schedule(self, now: float) -> StepPlan: ...
    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Record what was computed and sampled; returns the requests that finished."""
        ...

    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...


class KVCache(Protocol):
    """Owns the tensors in which keys and values live.

    One of 8 bits has a method more, scales(layer) -> (of keys, of values), each [num_blocks, block_size, num_kv_heads]
    float32: a stored number times the scale of its slot and head is the value.
    """

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None: ...
    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(keys, values), each [num_blocks, block_size, num_kv_heads, head_dim]."""
        ...

    def transfer(self, transfers: Transfers) -> None:
        """Move whole blocks, of all layers, before the step writes."""
        ...


class AttentionBackend(Protocol):
    """Attention of a ragged batch over the paged cache. One with reads_scales = True can read a cache of 8 bits."""

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


class Asking(Protocol):
    """What a sampler may know of a request: a `Request` is one, and so is what a worker keeps of it."""

    @property
    def id(self) -> str: ...
    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output so far."""
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


class Sampler(Protocol):
    """Chooses the next token of each request from logits [len(requests), vocab_size]."""

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled: ...


class Proposer(Protocol):
    """Guesses what a request's next tokens are. It lives in the worker, beside the model that verifies the guesses:
    wrong ones cost time and change no text."""

    def opened(self, slot: Opened) -> None:
        """A request has this slot from now on, until it is closed or the slot is opened again."""
        ...

    def closed(self, slot: int) -> None: ...

    def propose(self, slots: Tensor, lengths: Tensor, tokens: Tensor, k: int) -> Tensor:
        """slots [rows] int64, lengths [rows] int64: row r's request has the tokens tokens[slots[r], :lengths[r]].

        Returns what it takes the k tokens behind them for: [rows, k] int64 on the same device, any tokens of the
        vocabulary.
        """
        ...


class Executor(Protocol):
    """Computes steps: builds the batch, runs the model, samples.

    Steps take effect in the order in which they are submitted: a step's transfers before its writes, both after all of
    the step before. Nothing else is promised of when: a step may still run when the next one is submitted.
    """

    @property
    def max_in_flight(self) -> int:
        """How many steps may be submitted before the first of them is collected. 1: what a step samples has to be
        known before the next is submitted. 2: the worker has it by then, and the step that follows may compute it."""
        ...

    def submit(self, step: Step) -> Any:
        """Starts a step; gives a ticket for `collect`."""
        ...

    def collect(self, ticket: Any) -> Reply:
        """Waits for the step; tickets come in the order of submission."""
        ...

    def close(self) -> None: ...
