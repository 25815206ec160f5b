"""What the planning parts promise, of requests and numbers of blocks; never a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from reference_impl.interfaces.blocks import BlockId, Transfers
from reference_impl.interfaces.plan import StepOutput, StepPlan
from reference_impl.interfaces.request import Request


class Clock(Protocol):
    def now(self) -> float: ...


class BlockPool(Protocol):
    """Counts references to numbered blocks. Integers only, never a tensor."""

    @property
    def num_free(self) -> int: ...
    def allocate(self, n: int) -> list[BlockId]: ...
    def incref(self, ids: Sequence[BlockId]) -> None: ...
    def decref(self, ids: Sequence[BlockId]) -> list[BlockId]: ...
    def ref_count(self, block: BlockId) -> int: ...


class PrefixIndex(Protocol):
    """Which blocks hold the keys and values of which token prefix. Counts no references: the KV manager does.

    `key` (bytes) says which requests may share a prefix: prefixes of different keys never meet. Only full blocks are
    indexed, and a block never without the ones before it.
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
    """Gives requests the blocks that their tokens need. A call that fails changes nothing, but for what a prefix index
    counts as used."""

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        """Blocks for tokens [0, num_tokens) of a request that has none: those that hold some of them already, new ones.
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
        """Give all its blocks back."""
        ...

    def take_transfers(self) -> Transfers:
        """The moves that calls since the last one require."""
        ...

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free ones, and cached ones not in use."""
        ...


class HostProposer(Protocol):
    """Drafts a request's next tokens, from its text, while a step is planned. What wrong drafts cost, and what they may
    depend on, is as of `Proposer`. It is not asked where a request's own newest token is still in flight."""

    def propose(self, request: Request, k: int) -> Sequence[int]:
        """At most k tokens of the vocabulary: what may follow request.tokens, which is only to be read. Fewer, or none,
        where it has no more."""
        ...


class Policy(Protocol):
    """The order in which requests are scheduled."""

    preemptive: bool  # may a waiting request preempt a running one that ranks after it?

    def rank(self, request: Request) -> Any:
        """Called once, when the request arrives; the smaller goes first. Ranks of one policy can be compared."""
        ...

    def finished(self, request: Request) -> None:
        """The request has its last token, or was aborted."""
        ...


class Outcome(Protocol):
    """What becomes of a request's rows, where it is not continued with the tokens that they sample."""

    def samples(self, request: Request) -> bool:
        """Whether a row that computes the request's last known token samples what follows it."""
        ...

    def advanced(self, request: Request, samples: bool) -> bool:
        """A row of it was submitted. Whether `collected` is to be called when that step is over."""
        ...

    def collected(self, request: Request, output: StepOutput) -> str | None:
        """Why the request ends, if it does."""
        ...


class Scheduler(Protocol):
    """Decides how many tokens of which request are computed. It never touches a tensor."""

    def add(self, request: Request) -> None: ...
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
