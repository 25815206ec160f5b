"""Steps in which all rows decode, as CUDA graphs: a forward pass of hundreds of launches is replayed with one.

A graph repeats the launches that it captured: the same kernels, grids and addresses, whatever lies at the addresses by
then. So a step is padded to one of a few shapes (buckets of rows, of tokens per row, which are more than one where
drafts are verified, and of the longest context), and its arrays are copied to where the shape's graph reads them. Rows
that only pad are inert: they have the padding slot, so they see nothing (length 0), write nothing (slot below 0), and
their output is not used.

What is captured is a function of the key, of what an engine never changes (model, cache, attention, KV groups, where
the worker's slots lie), and of what lies in the inputs: `Graphs` gives the captured function nothing else. A capture
runs it more than once, so what it changes must be the same when it is done twice.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.batch import HostBatch
from reference_impl.core.sampler import SETTINGS
from reference_impl.core.staging import Arrays, Layout, packed

SHORTEST = 512  # positions; the buckets of the longest context are its doubles
LIMIT = 256  # graphs that are kept
WIDEST_TREES = 512  # tokens of a step with trees, which computes longer than it takes to launch where there are more

Compute = Callable[[HostBatch, Mapping[str, Tensor], bool], Tensor]


@dataclass(frozen=True)
class GraphKey:
    """What decides the shapes and the launches of a step.

    rows, longest: the buckets'. samples: whether tokens come out; otherwise the logits do, to be sampled from outside
    (penalties differ from step to step, and so do the rows that want log-probabilities; and what is sampled for a tree
    would be written where its nodes lie, which a capture reads again). tokens_per_row: 1, or more where drafts are
    verified: a row may have fewer or more, as long as there is room for all tokens. trees: whether drafts are trees;
    the inputs say which.
    """

    rows: int
    longest: int
    samples: bool
    tokens_per_row: int = 1
    trees: bool = False

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def num_rows(self) -> int:
        """The rows of the graph; with drafts one more, which pads: it takes the tokens left over."""
        return self.rows + (self.tokens_per_row > 1)


class Recorder(Protocol):
    """Records what a function launches."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Records compute. Returns (the tensor that it computes into, a function that launches it once more)."""
        ...

    def forget(self) -> None:
        """Called before a recording is freed."""
        ...


class CudaRecorder:
    """Records torch.cuda.CUDAGraph. A recorder's graphs share their intermediate memory, so only one runs at a time."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        # Once without recording: kernels are compiled and loaded, libraries get their workspaces of this stream.
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            compute()
        current.wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # a CUDA object freed meanwhile would break the capture
        try:
            # Only this thread must abstain from what cannot be captured.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                out = compute()
        finally:
            torch.cuda.set_stream(current)  # torch does not where the capture fails
            if collects:
                gc.enable()
        return out, graph.replay

    def forget(self) -> None:
        torch.cuda.synchronize()  # it may be running


@dataclass(frozen=True)
class _Graph:
    layout: Layout
    memory: Tensor  # the inputs
    tensors: Mapping[str, Tensor]  # the same, by name
    out: Tensor  # [rows] tokens or [rows, vocab_size] logits
    replay: Callable[[], None]
    ran: tuple[str, ...]


class Graphs:
    """One graph per key, captured when it is first needed.

    compute(host, tensors, samples): what is captured; gives the tokens or the logits of all rows. tensors has the
    arrays of `inert`, host a row of the bucket's longest context for each. ran(): which attention it was. hidden():
    the hidden states [num_tokens, size] computed last, which are read after the replay; None: they are not read.
    padding: the slot of rows that pad. max_rows: requests that run at a time. max_len: positions of a sequence.
    num_drafts: how many a row usually has; trees: whether these are trees, and a row has no more. limit: how many
    graphs are kept; then the least recently used is dropped; None: LIMIT, or as many as there are `keys`.
    """

    def __init__(
        self,
        compute: Compute,
        ran: Callable[[], tuple[str, ...]],
        padding: int,
        max_rows: int,
        max_len: int,
        device: torch.device,
        recorder: Recorder,
        limit: int | None = None,
        num_drafts: int = 0,
        hidden: Callable[[], Tensor | None] = lambda: None,
        trees: bool = False,
    ):
        self.compute, self.ran, self.padding, self.recorder, self.hidden = compute, ran, padding, recorder, hidden
        self.max_rows, self.max_len, self.device = max_rows, max_len, device
        self.num_drafts, self.trees = num_drafts, trees
        self.limit = max(LIMIT, len(self.keys())) if limit is None else limit
        self._graphs: OrderedDict[GraphKey, _Graph] = OrderedDict()
        # {(what, most tokens): [most tokens, size]}, of all graphs: a step's are read before the next.
        self._given: dict[tuple[str, int], Tensor] = {}

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._graphs

    def key(self, batch: HostBatch, samples: bool) -> GraphKey | None:
        """The key of a step's graph; None: a step of another kind, which has no graph."""
        rows, longest = len(batch.query_lens), max(batch.context_lens)
        num_tokens = sum(batch.query_lens)
        decodes = num_tokens == len(batch.sampling)  # each token has logits: one per row, and its drafts
        if not decodes or rows > self.max_rows or longest > self.max_len:
            return None
        bucket = rows_bucket(rows, self.max_rows)
        tokens_per_row = max(2, -(-num_tokens // bucket)) if num_tokens > rows else 1
        trees = "ancestors" in batch.arrays
        if trees:  # the last ones of a text are smaller
            tokens_per_row = min(1 << (tokens_per_row - 1).bit_length(), 1 + self.num_drafts)
        key = GraphKey(bucket, longest_bucket(longest, self.max_len), samples and not trees, tokens_per_row, trees)
        return None if trees and key.num_tokens > WIDEST_TREES else key

    def keys(self, samples: bool = True) -> list[GraphKey]:
        """The keys of steps in which all rows have as many drafts as usual, or none. The largest come first, so that
        smaller ones can reuse their memory."""
        rows = {rows_bucket(n, self.max_rows) for n in range(1, self.max_rows + 1)}
        doubles = (SHORTEST << i for i in range(self.max_len.bit_length()))
        longest = {longest_bucket(n, self.max_len) for n in doubles}
        return [
            GraphKey(r, n, samples and not trees, tokens, trees)
            for trees, tokens in sorted({(False, 1), (self.trees, 1 + self.num_drafts)}, reverse=True)
            for r in sorted(rows, reverse=True)
            for n in sorted(longest, reverse=True)
            if not (trees and r * tokens > WIDEST_TREES)
        ]

    def run(self, key: GraphKey, arrays: Arrays) -> tuple[Tensor, Mapping[str, Tensor], tuple[str, ...]]:
        """Replays a graph, after capturing it if need be. Returns what is sampled behind all tokens of the key, or
        their logits; the graph's inputs; and which attention ran. Valid until the next run. arrays: those of `padded`.
        """
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._capture(key, arrays)
        else:
            self._graphs.move_to_end(key)
            graph.memory.copy_(packed(arrays, graph.layout, pinned=self.device.type == "cuda"), non_blocking=True)
        graph.replay()
        return graph.out, graph.tensors, graph.ran

    def hidden_of(self, key: GraphKey) -> Tensor:
        """The hidden states [key.num_tokens, size] of a run of this key. Valid until the next run."""
        return self._given["hidden", self._most_tokens(key)][: key.num_tokens]

    def _capture(self, key: GraphKey, arrays: Arrays) -> _Graph:
        layout = Layout.of(arrays)
        memory = packed(arrays, layout, pinned=self.device.type == "cuda").to(self.device, non_blocking=True)
        tensors = layout.views(memory)
        # Its lengths are bounds: no launch may depend on more.
        n, every = key.num_rows, tuple(range(key.num_rows))
        lens = (key.tokens_per_row,) * key.rows + (0,) * (n - key.rows)
        host = HostBatch(
            {}, (self.padding,) * n, ("",) * n, lens, (key.longest,) * n, every, every,
            np.zeros(n, np.int64), np.zeros(n, SETTINGS),
        )  # fmt: skip
        try:
            out, replay = self.recorder.record(lambda: self._output(host, tensors, key))
        except Exception as error:
            error.add_note(f"while a CUDA graph was captured for {key}; EngineConfig(graphs='off') does without")
            raise
        graph = self._graphs[key] = _Graph(layout, memory, tensors, out, replay, self.ran())
        if len(self._graphs) > self.limit:
            self.recorder.forget()
            self._graphs.popitem(last=False)
        return graph

    def _output(self, host: HostBatch, tensors: Mapping[str, Tensor], key: GraphKey) -> Tensor:
        found = self.compute(host, tensors, key.samples)
        if (hidden := self.hidden()) is not None:
            self._give("hidden", hidden, key)
        return found if key.samples else self._give("logits", found, key)

    def _give(self, what: str, found: Tensor, key: GraphKey) -> Tensor:
        """A copy, made in the graph, in memory that no graph uses for intermediate results."""
        at = what, self._most_tokens(key)
        if at not in self._given:
            self._given[at] = found.new_empty(self._most_tokens(key), found.shape[1])
        return self._given[at][: key.num_tokens].copy_(found)

    def _most_tokens(self, key: GraphKey) -> int:
        """The most tokens of the keys that share one output tensor with this one."""
        if key.trees:
            return min(WIDEST_TREES, self.max_rows * (1 + self.num_drafts))
        return self.max_rows * key.tokens_per_row


def rows_bucket(rows: int, max_rows: int) -> int:
    """The bucket of so many rows: 1, 2, 4, 8, then by 8 up to 64, by 16 up to 256, by 32; max_rows at most."""
    if rows <= 8:
        bucket = 1 << (rows - 1).bit_length()
    else:
        step = 8 if rows <= 64 else 16 if rows <= 256 else 32
        bucket = -(-rows // step) * step
    return min(bucket, max_rows)


def longest_bucket(longest: int, max_len: int) -> int:
    return min(max(SHORTEST, 1 << (longest - 1).bit_length()), max_len)


def inert(key: GraphKey, padding: int, columns: Arrays | None = None) -> Arrays:
    """The inputs of a step all of whose rows pad. columns: the sampler's, for a key that samples."""
    rows, tokens = key.num_rows, key.num_tokens
    arrays: Arrays = {
        "slots": np.full(rows, padding),
        "query_lens": np.zeros(rows, np.int64),
        "token_slots": np.full(tokens, padding),
        "offset": np.zeros(tokens, np.int64),
        "query_start_loc": np.arange(rows + 1, dtype=np.int32),
        "logits_indices": np.arange(tokens),
    }
    if key.tokens_per_row > 1:
        arrays["query_start_loc"][:-1], arrays["query_start_loc"][-1] = 0, tokens
        arrays |= {"sampling_slots": np.full(tokens, padding), "sampling_lens": np.zeros(tokens, np.int64)}
    if key.trees:
        arrays |= {"lag": np.zeros(tokens, np.int64), "ancestors": np.zeros(tokens, np.int64)}
    return arrays | (columns or {})


def padded(arrays: Arrays, key: GraphKey, padding: int, columns: Arrays | None = None) -> Arrays:
    """A step's arrays in the shapes of the key, filled up with inert rows."""
    found = inert(key, padding, columns)
    for name, room in found.items():
        room[: len(arrays[name])] = arrays[name]
    if key.tokens_per_row > 1:
        starts = arrays["query_start_loc"]
        found["query_start_loc"][len(starts) : -1] = starts[-1]
    return found
