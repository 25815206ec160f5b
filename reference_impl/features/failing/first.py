"""The first place in a model that gives a number that is not finite, for one sequence of tokens."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.features.baselines.contiguous_cache import ContiguousAttention, ContiguousKVCache
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.features.watching.watching import watching


def first_not_finite(model: Decoder, tokens: Tensor) -> str:
    """The place, as a clause for an error's text. tokens [length] int64. Computes all of them at once, without any
    cache's contents, and needs memory for that."""
    found: list[str] = []
    seen = "the embedding"  # the last place that was finite

    def look(what: str, x: Tensor) -> None:
        nonlocal seen
        if not found and not bool(x.isfinite().all()):
            found.append(what if what == seen else f"{what}, behind {seen}")
        elif not found:
            seen = what

    def after(linear: nn.Module, _: Any, out: Tensor) -> None:
        assert isinstance(linear, Linear)
        look(f"what {linear.name} gives", out)

    look("the embedding", model.embed(tokens))
    with ExitStack() as stack:
        for linear in model.linears():
            stack.callback(linear.register_forward_hook(after).remove)
        stack.enter_context(watching(model, lambda name, x: look(f"what goes into {name}", x)))
        c, length = model.config, len(tokens)
        batch = ragged_batch([(tokens.tolist(), 0)], length, model.device, c.layer_windows)
        cache: Any = ContiguousKVCache(model, 1, length)
        attention: Any = ContiguousAttention(c.attention_scale, c.attention_softcap)
        hidden = model.hidden_states(batch, cache, attention)
    look("the last norm", hidden)
    look("the logits", model.logits(hidden))
    if not found:
        return (
            "computed again, alone, all numbers are finite: what its cache held was not, or a batch gave other numbers"
        )
    return f"computed again, alone, the first such numbers are in {found[0]}"
