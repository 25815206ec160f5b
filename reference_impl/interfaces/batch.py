"""One forward pass as tensors, and what is sampled from its logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reference_impl.interfaces.request import TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class GroupTables:
    """Where the tokens of a batch lie in one KV group. A slot is block id x block_size + offset in the block."""

    window: int | None
    slot_mapping: Tensor  # [num_tokens] int64, where each new key and value goes
    block_table: Tensor  # [num_rows, max_blocks] int32; 0 where a row has no block (padding, or out of the window)


@dataclass
class Batch:
    """One ragged forward pass as tensors. Rows with fewer tokens come first, among equals the longest context first.

    The tokens of all rows lie one after another: row r owns [query_start_loc[r], query_start_loc[r + 1]).
    """

    input_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    query_start_loc: Tensor  # [num_rows + 1] int32
    seq_lens: Tensor  # [num_rows] int32, positions up to the row's last token: cached ones and its own
    logits_indices: Tensor  # [num_sampling_rows] int64, which tokens need logits, in their order
    request_ids: tuple[str, ...]  # [num_rows]
    query_lens: tuple[int, ...]  # [num_rows], host copy
    context_lens: tuple[int, ...]  # [num_rows], host copy of seq_lens; bounds of them for a backend that takes_bounds
    num_decode_rows: int  # how many leading rows have one token
    block_size: int
    groups: tuple[GroupTables, ...]  # one per KV group
    group_of_layer: tuple[int, ...]  # [num_layers]
    # [num_tokens] int64, in a step with draft trees: for a token in a tree, bit i is set if it sees the i-th of its
    # row's own tokens, at most 64; 0 in other rows. Only for an attention backend that `takes_trees`.
    ancestors: Tensor | None = None
    attention_plan: Any = None  # what the attention backend prepared once for all layers

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def slot_mapping(self) -> Tensor:
        """The slot mapping of the first KV group, the only one unless the model has layers of several kinds."""
        return self.groups[0].slot_mapping

    @property
    def block_table(self) -> Tensor:
        """The block table of the first KV group."""
        return self.groups[0].block_table


@dataclass(frozen=True)
class Sampled:
    """What a sampler chose: a token per row, and log-probabilities where requested."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
