"""Shows the input of each linear layer while the engine runs, which calibration (GPTQ, AWQ, SmoothQuant) looks at.

    with watching(engine.model, lambda name, x: largest.update(name, x.abs().amax(0))):
        llm.generate(prompts)

It costs nothing when it is off: torch's hooks show the input of a `Linear`, and for stacked experts the product is
wrapped.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from reference_impl.core.decoder import Decoder
from reference_impl.core.linear import Linear
from reference_impl.features.fusion.decoder import FusedDecoder
from reference_impl.features.fusion.experts import StackedExperts
from reference_impl.features.fusion.fusion import Product

NOTHING_FUSED: dict[int, frozenset[Product]] = {sys.maxsize: frozenset()}  # for steps of any size; see `Fusion`
Observer = Callable[[str, Tensor], None]  # the linear layer's name (see `Linear`), and x [tokens, in_features]


@contextmanager
def watching(model: Decoder, observer: Observer) -> Iterator[None]:
    """Calls the observer, inside the block, before each product of a linear layer, in the thread that computes. An
    expert shows the tokens that were sent to it, and nothing if it has none.

    Each product runs by itself, none in one launch with its neighbours, and steps are launched, not replayed as CUDA
    graphs: so nothing is hidden, steps are slower, and with Triton's kernels logits may differ in their last bits.
    After the block all is as it was.

    x is the engine's own: read it inside the call, and never write to it. The lm_head, which is no `Linear`, is not
    shown, nor are tokens from the prefix cache, which are not computed (prefix_cache="off" computes all). When nested,
    each observer is called; the inner one has to end first. Use it in the process that has the model, around an engine
    that was made before: making one may run the model on made-up tokens, to measure memory.
    """
    with ExitStack() as stack:
        if isinstance(model, FusedDecoder):
            for part, name, meanwhile in ((model, "watched", True), (model.fusion, "chosen", NOTHING_FUSED)):
                stack.callback(setattr, part, name, getattr(part, name))
                setattr(part, name, meanwhile)
        for module in model.modules():
            if isinstance(module, Linear):
                stack.callback(module.register_forward_pre_hook(_hook(observer)).remove)
            elif isinstance(module, StackedExperts):
                stack.callback(setattr, module, "grouped_gemm", module.grouped_gemm)
                module.grouped_gemm = _shown(module, observer)
        yield


def _hook(observer: Observer) -> Callable[[nn.Module, tuple[Tensor]], None]:
    def show(linear: nn.Module, arguments: tuple[Tensor]) -> None:
        assert isinstance(linear, Linear)
        observer(linear.name, arguments[0])

    return show


def _shown(experts: StackedExperts, observer: Observer) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A product of stacked experts that shows each expert's rows first. The host waits for where they end."""
    grouped_gemm = experts.grouped_gemm

    def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        name = "gate_up_proj" if weight is experts.gate_up else "down_proj"
        for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
            if start < end:
                observer(f"{experts.prefix}experts.{e}.{name}", rows[start:end])
        return grouped_gemm(rows, weight, offsets)

    return product
