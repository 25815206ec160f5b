"""What a worker reports before the first step. What a planner has to know of it, it learns from these facts; what all
must have in common is compared, and of the rest an engine has as much as each of its workers has."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reference_impl.core.model_config import ModelConfig
from reference_impl.interfaces import KVSpec

PROTOCOL = 8  # version of the messages; raised when one changes its meaning


@dataclass(frozen=True)
class ModelFacts:
    """A model as a planner sees it, wherever its tensors are. dtype: torch's name, "torch.float32". device: "cpu" or
    "cuda". weights: as of `weights_of`; "" where no pages are stored, and two checkpoints of one shape are alike."""

    config: ModelConfig
    dtype: str
    device: str
    weights: str = ""

    @property
    def fingerprint(self) -> str:
        """Of configuration, dtype and weights, 32 hexadecimal digits."""
        return hashlib.sha256(f"{self.config!r} {self.dtype} {self.weights}".encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Facts:
    """num_blocks, num_host_blocks: of its KV cache, and in host memory for requests that are swapped out. max_num_seqs,
    max_model_len: requests that run at a time, positions of one. page_store: whether there is one. reads: as of
    `ReadsFields`."""

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
        """ValueError with each difference in what must be the same."""
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
        names = ("kv_specs", "max_num_seqs", "page_store", "protocol")
        return {"model": self.model.fingerprint, **{name: getattr(self, name) for name in names}}


def combined(workers: Sequence[Facts]) -> Facts:
    """Of an engine with these workers. ValueError as of `check`, where one does not belong to the first."""
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
