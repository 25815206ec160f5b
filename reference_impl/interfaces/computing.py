"""What the computing parts promise. Shapes are in comments; `Tensor` is torch.Tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from reference_impl.interfaces.batch import Batch, Sampled
from reference_impl.interfaces.blocks import Transfers
from reference_impl.interfaces.request import Asking
from reference_impl.interfaces.step import Opened, Reply, Step

if TYPE_CHECKING:
    from torch import Tensor, dtype


class KVCache(Protocol):
    """Owns the tensors that hold keys and values. One of 8 bits also has scales: `abilities.HasScales`."""

    def write(self, layer: int, key: Tensor, value: Tensor, batch: Batch) -> None: ...
    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The (keys, values) of a layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        ...

    def transfer(self, transfers: Transfers) -> None:
        """Moves whole blocks, of all layers, before the step writes."""
        ...


class AttentionBackend(Protocol):
    """Attention of a ragged batch over the paged cache. One with reads_scales = True can read a cache of 8 bits:
    `abilities.ReadsScales`."""

    def plan(self, batch: Batch) -> None:
        """Prepares, once per step, what all layers share; may fill batch.attention_plan."""
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
        """Attention: q [num_tokens, num_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim] -> like q.

        Stores k and v in the cache, then lets each row's queries see that row's positions up to their own.
        """
        ...


class TensorSpec(NamedTuple):
    """What a tensor of a checkpoint must be."""

    shape: tuple[int, ...]
    dtypes: tuple[dtype, ...]  # any of these


@runtime_checkable
class LinearMethod(Protocol):
    """How a weight matrix is stored and multiplied.

    A linear layer may be made of several of the checkpoint's, its parts, stacked by output features: q, k and v; gate
    and up. For each part a checkpoint has weight [out_features, in_features], and bias [out_features] where the layer
    has one, in a float dtype. A method that loads other tensors names them: `abilities.NamesTensors`.
    """

    def create(self, in_features: int, out_features: int, bias: bool) -> dict[str, Tensor]:
        """The parameters of all parts together, still without values."""
        ...

    def load(self, params: dict[str, Tensor], name: str, tensor: Tensor, start: int) -> None:
        """Stores tensor `name` of the part whose first output feature is `start`, which is given also where the tensor
        itself has no output features (g_idx of GPTQ). Parts come in any order."""
        ...

    def finish(self, params: dict[str, Tensor]) -> None:
        """Called once when everything is loaded; may change the weight's layout."""
        ...

    def apply(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        """The layer's output: x [rows, in_features] -> [rows, out_features]."""
        ...


class Sampler(Protocol):
    """Chooses the next token of each request from logits [len(requests), vocab_size].

    It applies biases, penalties and filters of a request's parameters itself; the logits of what a grammar or
    min_tokens rules out are -inf already.
    """

    def __call__(self, logits: Tensor, requests: Sequence[Asking]) -> Sampled: ...


class Proposer(Protocol):
    """Drafts a request's next tokens. It runs in the worker, beside the model that verifies the drafts: wrong ones cost
    time, and change no text that is greedy or has a seed. For a request without a seed, drafts that are verified by
    rejection count as certain (q = 1), so they may depend on its text, but not on its random numbers.
    """

    def opened(self, slot: Opened) -> None:
        """Called when a request gets a slot; it has it until the slot is closed or opened again."""
        ...

    def closed(self, slot: int) -> None: ...

    def propose(self, slots: Tensor, lengths: Tensor, tokens: Tensor, k: int) -> Tensor:
        """Drafts of the next k tokens: [rows, k] int64 on the same device, any tokens of the vocabulary.

        slots [rows] int64, lengths [rows] int64: row r's request has the tokens tokens[slots[r], :lengths[r]].
        """
        ...


class Executor(Protocol):
    """Computes steps: builds the batch, runs the model, samples.

    Steps take effect in the order in which they are submitted: a step's transfers before its writes, both after all of
    the step before. No other timing is promised: a step may still run when the next is submitted.
    """

    @property
    def max_in_flight(self) -> int:
        """How many steps may be submitted before the first of them is collected. 1: a step's samples must be
        collected before the next is submitted. 2: they are in the worker by then, and the next step may compute them.
        An executor that `abilities.RunsStages` says 1 here; it takes more steps, if none needs the tokens in flight."""
        ...

    def submit(self, step: Step) -> Any:
        """Starts a step and returns a ticket for `collect`. It may raise only after the step's transfers have been
        made: with overlap="off" the step is then planned again, without them."""
        ...

    def collect(self, ticket: Any) -> Reply:
        """Waits for a step and returns its reply. Tickets come in the order of submission."""
        ...

    def close(self) -> None: ...
