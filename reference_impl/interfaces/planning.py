"""What the planning parts promise. They work with requests and numbers of blocks, never with a tensor."""

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
    """Knows which blocks hold the keys and values of which token prefix. The KV manager counts the references.

    `key` (bytes) says which requests may share a prefix: prefixes with different keys are never shared. Only full
    blocks are indexed, and a block never without the ones before it.
    """

    def match(self, tokens: Sequence[int], key: bytes) -> list[BlockId]:
        """The blocks of the longest indexed prefix of `tokens`; they count as used now."""
        ...

    def insert(self, tokens: Sequence[int], key: bytes, blocks: Sequence[BlockId]) -> list[BlockId]:
        """Indexes blocks[i] for tokens [i * block_size, (i + 1) * block_size); len(tokens) is a multiple of block_size.

        Returns the blocks that stand for this prefix from now on: where one was indexed already, that one, and the
        one given is not taken. They count as used now.
        """
        ...

    def evict(self, num_blocks: int, evictable: Callable[[BlockId], bool]) -> list[BlockId]:
        """Forgets up to num_blocks blocks and returns them: the least recently used that no other continues (leaves),
        of blocks used at the same moment the one deeper in its prefix. Never one that is not evictable."""
        ...

    def __len__(self) -> int:
        """How many blocks are indexed."""
        ...


class KVManager(Protocol):
    """Gives requests the blocks that their tokens need. A call that fails changes nothing except what a prefix index
    counts as used."""

    def admit(self, request: Request, num_tokens: int, budget: int) -> bool:
        """Gives a request without blocks those for its tokens [0, num_tokens): cached ones that hold some of them, and
        new ones; False if too few are available. At most `budget` tokens are computed in the first step.

        Sets num_computed_tokens and num_cached_tokens to what was found. At least the last token stays to be computed.
        """
        ...

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the request's next num_tokens, all or nothing; False if there is none. A shared block that
        they fall in is copied."""
        ...

    def commit(self, request: Request) -> None:
        """Lets other requests find this one's computed tokens."""
        ...

    def fork(self, parent: Request, child: Request) -> None:
        """Shares the parent's blocks with the child, whose first num_computed_tokens are the same."""
        ...

    def free(self, request: Request) -> None:
        """Gives all blocks of the request back."""
        ...

    def take_transfers(self) -> Transfers:
        """The moves that became necessary since the last call."""
        ...

    @property
    def num_available(self) -> int:
        """The number of blocks that can be allocated: free ones, and cached ones that are not in use."""
        ...


class HostProposer(Protocol):
    """Drafts a request's next tokens from its text, while a step is planned. For what wrong drafts cost, and what they
    may depend on, see `Proposer`. It is not asked while the request's newest token is still in flight."""

    def propose(self, request: Request, k: int) -> Sequence[int]:
        """Drafts of what follows request.tokens: at most k tokens of the vocabulary, or fewer, or none. The request
        must not be changed."""
        ...


class Policy(Protocol):
    """The order in which requests are scheduled."""

    preemptive: bool  # may a waiting request preempt a running one that ranks after it?

    def rank(self, request: Request) -> Any:
        """The rank of a request; the smaller goes first. Called once, when it arrives. Ranks of a policy can be
        compared with each other."""
        ...

    def finished(self, request: Request) -> None:
        """Called when a request has its last token, or was aborted."""
        ...


class Outcome(Protocol):
    """What becomes of the rows of a request that is not continued with the tokens that they sample."""

    def samples(self, request: Request) -> bool:
        """Whether a row that computes the request's last known token samples what follows it."""
        ...

    def advanced(self, request: Request, samples: bool) -> bool:
        """Called when a row of the request was submitted; returns whether to call `collected` when the step is over."""
        ...

    def collected(self, request: Request, output: StepOutput) -> str | None:
        """Called when such a step is over. Returns why the request ends, or None."""
        ...


class Scheduler(Protocol):
    """Decides how many tokens of which request are computed. It never touches a tensor."""

    def add(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def schedule(self, now: float) -> StepPlan: ...
    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Records what was computed and sampled; returns the requests that finished."""
        ...

    def has_work(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_running(self) -> int: ...
