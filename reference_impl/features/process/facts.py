"""What a worker reports before the first step. A planner learns from these facts what it has to know of the worker.
What all workers must have in common is compared; of the rest an engine has as much as the worker with the least."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from reference_impl.core.model_config import ModelConfig
from reference_impl.interfaces import KVSpec

PROTOCOL = 9  # version of the messages; raised when one changes its meaning


class NewWeights(NamedTuple):
    """Asks a worker for weights, see `UpdatesWeights`: to load those of a folder, or, None, to use what was loaded."""

    folder: Path | None


@dataclass(frozen=True)
class ModelFacts:
    """A model as a planner sees it, wherever its tensors are. dtype: torch's name, "torch.float32". device: "cpu" or
    "cuda". weights: see `weights_of`; "" where no pages are stored: two checkpoints of one shape then count as equal.
    """

    config: ModelConfig
    dtype: str
    device: str
    weights: str = ""

    @property
    def fingerprint(self) -> str:
        """A hash of configuration, dtype and weights, 32 hexadecimal digits."""
        return hashlib.sha256(f"{self.config!r} {self.dtype} {self.weights}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Facts:
    """The facts of a worker. num_blocks, num_host_blocks: blocks of its KV cache, and in host memory for requests that
    are swapped out. max_num_seqs, max_model_len: requests that run at a time, positions of one. page_store: whether
    there is one. reads: see `ReadsFields`."""

    model: ModelFacts
    kv_specs: tuple[KVSpec, ...]
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_model_len: int
    page_store: bool
    reads: frozenset[str]
    protocol: int = PROTOCOL

    def check(self, worker: Facts) -> None:
        """Raises ValueError, with each difference, if a worker differs in what must be the same."""
        mine, its = self._in_common(), worker._in_common()
        wrong = [
            f"{name}: expected {mine[name]!r}, the worker has {its[name]!r}" for name in mine if mine[name] != its[name]
        ]
        if wrong:
            raise ValueError(
                "this worker belongs to another engine; start it from the same model folder, options and version. "
                + "; ".join(wrong)
            )

    def _in_common(self) -> dict[str, Any]:
        names = ("max_num_seqs", "page_store", "protocol")
        # How many KV heads and layers a worker has is its own affair: ranks and stages divide those of the model, which
        # the fingerprint has.
        specs = tuple(replace(spec, num_kv_heads=1, num_layers=1, layers=()) for spec in self.kv_specs)
        found = {"model": self.model.fingerprint, "kv_specs": specs}
        return found | {name: getattr(self, name) for name in names}


def combined(workers: Sequence[Facts]) -> Facts:
    """The facts of an engine with these workers: the least of each number. ValueError if a worker does not belong to
    the first: see `Facts.check`."""
    first = workers[0]
    for other in workers[1:]:
        first.check(other)
    return replace(
        first,
        num_blocks=min(each.num_blocks for each in workers),
        num_host_blocks=min(each.num_host_blocks for each in workers),
        max_model_len=min(each.max_model_len for each in workers),
        reads=frozenset.intersection(*(each.reads for each in workers)),
    )
