"""Pinned prefixes: a pinned prefix is not evicted from the cache, whatever else needs blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference_impl.core.engine import Engine
from reference_impl.core.kv_manager import prefix_key
from reference_impl.interfaces import BlockId, PinsPrefixes


@dataclass(frozen=True, eq=False)
class Pin:
    """A cached prefix that is not evicted: its blocks, and the number of tokens in them."""

    blocks: tuple[BlockId, ...]
    num_tokens: int


class Pins:
    """The pins of an engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.pins: list[Pin] = []

    @property
    def num_blocks(self) -> int:
        """The number of blocks that are in a pin."""
        return len({block for pin in self.pins for block in pin.blocks})

    def pin(self, prefix: Sequence[int], cache_salt: str | None = None) -> Pin:
        """Keeps what is cached of a prefix (its full blocks) from being evicted, until `unpin`.

        ValueError if an unfinished request could then never fit, or if the KV manager has no pins.
        """
        engine = self.engine
        if not isinstance(engine.kv, PinsPrefixes):
            raise ValueError(
                f"pin: {type(engine.kv).__name__} has no pin and unpin, see PinsPrefixes in interfaces/abilities.py"
            )
        blocks = engine.kv.pin(prefix, prefix_key(None, cache_salt))
        self.pins.append(pin := Pin(tuple(blocks), len(blocks) * engine.block_size))
        longest = max((request.max_total_tokens for request in engine.requests.values()), default=0)
        if longest > engine.max_request_len:
            left = engine.max_request_len
            self.unpin(pin)
            raise ValueError(
                f"pinned, {len(blocks)} blocks would leave room for {left} tokens; a request needs {longest}"
            )
        return pin

    def unpin(self, pin: Pin) -> None:
        """Lets the blocks of a pin be evicted again. ValueError if it is not pinned (any more)."""
        if pin not in self.pins:
            raise ValueError("this pin was taken off already, or is another engine's")
        self.pins.remove(pin)
        assert isinstance(self.engine.kv, PinsPrefixes)
        self.engine.kv.unpin(pin.blocks)
