"""Cached prefixes that stay: a pinned prefix is not evicted, whatever else needs blocks.

It adds `pin` and `unpin`, and takes pinned blocks off what a request may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reference_impl.core.engine import Engine
from reference_impl.core.kv_manager import prefix_key
from reference_impl.interfaces import BlockId, PinsPrefixes


@dataclass(frozen=True, eq=False)
class Pin:
    """A cached prefix that stays."""

    blocks: tuple[BlockId, ...]
    num_tokens: int


class PinningEngine(Engine):
    def __init__(self, *parts: Any, **options: Any):
        super().__init__(*parts, **options)
        self.pins: list[Pin] = []

    @property
    def num_unpinned(self) -> int:
        """Blocks that are in no pin."""
        return self.num_blocks - len({block for pin in self.pins for block in pin.blocks})

    def pin(self, prefix: Sequence[int], cache_salt: str | None = None) -> Pin:
        """Keeps what is cached of a prefix (its full blocks) from being evicted, until `unpin`.

        ValueError if an unfinished request could then never fit, or if the KV manager has no pins.
        """
        if not isinstance(self.kv, PinsPrefixes):
            raise ValueError(
                f"pin: {type(self.kv).__name__} has no pin and unpin, see PinsPrefixes in interfaces/abilities.py"
            )
        blocks = self.kv.pin(prefix, prefix_key(None, cache_salt))
        self.pins.append(pin := Pin(tuple(blocks), len(blocks) * self.block_size))
        longest = max((request.max_total_tokens for request in self.requests.values()), default=0)
        if longest > self.max_request_len:
            left = self.max_request_len
            self.unpin(pin)
            raise ValueError(
                f"pinned, {len(blocks)} blocks would leave room for {left} tokens; a request needs {longest}"
            )
        return pin

    def unpin(self, pin: Pin) -> None:
        """ValueError if it is not pinned (any more)."""
        if pin not in self.pins:
            raise ValueError("this pin was taken off already, or is another engine's")
        self.pins.remove(pin)
        assert isinstance(self.kv, PinsPrefixes)
        self.kv.unpin(pin.blocks)
