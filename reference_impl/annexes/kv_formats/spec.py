"""What a block holds whose keys are rounded by channel, and what requests keep beside the pool until it is full."""

from __future__ import annotations

from dataclasses import dataclass

from reference_impl.interfaces import KVSpec


@dataclass(frozen=True, kw_only=True)
class ByChannelSpec(KVSpec):
    """A key's scales and zero points are one for each channel of a head, over the tokens of a block (KIVI, Liu et al.
    2024); of values they stay beside each head of a token.

    open_bits_per_value: of keys and values while their block is not full. open_blocks: how many blocks each request
    that runs has room for so. ValueError unless both are positive, kind is "kv", and there are scales.
    """

    open_bits_per_value: int
    open_blocks: int

    def __post_init__(self) -> None:
        for name in ("open_bits_per_value", "open_blocks", "bits_per_scale"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected at least 1 for keys by channel, got {value}")
        if self.kind != "kv":
            raise ValueError(f"kind: expected 'kv' for keys by channel, got {self.kind!r}")
        super().__post_init__()

    @property
    def bits_per_token(self) -> int:
        """A full block's share. ValueError where that is no whole number."""
        if self._bits_per_block % self.block_size:
            raise ValueError(
                f"bits_per_token: {self._bits_per_block} bits of a block of {self.block_size} tokens are no whole "
                "number for each, ask for bytes_per_block"
            )
        return self._bits_per_block // self.block_size

    @property
    def _bits_per_block(self) -> int:
        beside = self.bits_per_scale + self.bits_per_zero_point
        key = self.head_dim * (self.block_size * self.bits_per_value + beside)
        return self.num_layers * self.num_kv_heads * (key + self.block_size * self.bits_per_head)

    @property
    def open_bytes_per_request(self) -> int:
        """Beside the blocks of the pool."""
        values = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.open_blocks * self.block_size
        return values * self.open_bits_per_value // 8

    @property
    def kept_window(self) -> int | None:
        """Positions before a request's next one, itself included, whose blocks it keeps; None: all. More than the
        window: where its open block is lost, it begins again at this block's first token."""
        return None if self.window is None else self.window + self.block_size - 1

    def bytes_per_request(self, num_tokens: int) -> int:
        first = 0 if self.kept_window is None else max(0, num_tokens - self.kept_window)
        return (-(-num_tokens // self.block_size) - first // self.block_size) * self.bytes_per_block


def kept_window(spec: KVSpec) -> int | None:
    """Of any spec."""
    return spec.kept_window if isinstance(spec, ByChannelSpec) else spec.window


def open_bytes_per_request(spec: KVSpec) -> int:
    """Of any spec; 0 where every token is written at once."""
    return spec.open_bytes_per_request if isinstance(spec, ByChannelSpec) else 0
