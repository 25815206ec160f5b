"""Measures on this GPU which products of a layer should be one launch with their neighbours (`fusion`).

Between two attentions lie two pairs of products: o, then gate and up; down, then qkv of the next layer. What the first
leaves to be added decides what the second can be, so the ways of a pair are timed together: each of the two fused or
not. A way runs over several layers, like a real step: one layer's weights would stay in the L2 cache.
"""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from reference_impl.core.decoder import DecoderLayer, GatedMLP
from reference_impl.core.linear import Linear
from reference_impl.features.fusion.fusion import Fusion, Product
from reference_impl.features.fusion.layer import FusedLayer

LAYERS = 16  # over which a way is timed
REPEATS = 7
PAIRS: tuple[tuple[Product, Product], ...] = (("o", "gate_up"), ("down", "qkv"))

Way = frozenset[Product]  # which of a pair are fused
Timer = Callable[[Mapping[Way, Callable[[], object]]], Mapping[Way, float]]


def tune(fusion: Fusion, layers: Sequence[FusedLayer], x: Tensor, seconds_of: Timer) -> dict[str, dict[str, float]]:
    """Sets fusion.chosen[num_tokens] to what is fastest. Returns {pair: {fused products: microseconds of a layer}}.

    x [num_tokens, hidden_size]: any numbers.
    """
    found: dict[str, dict[str, float]] = {}
    best = Way()
    for pair in PAIRS:
        timed = [layer for layer in layers if pair[0] == "o" or isinstance(layer.mlp, GatedMLP)][:LAYERS]
        if not timed:  # no down, where every layer has experts
            continue
        h = torch.randn(len(x), _first(pair, timed[0]).in_features, dtype=x.dtype, device=x.device)
        ways = {
            Way(way): functools.partial(_compute, fusion, pair, Way(way), timed, h, x)
            for n in range(len(pair) + 1)
            for way in itertools.combinations(pair, n)
        }
        seconds = seconds_of(ways)
        best |= min(seconds.items(), key=lambda of_way: of_way[1])[0]
        found[_name(pair)] = {_name(way): s / len(timed) * 1e6 for way, s in seconds.items()}
    fusion.chosen[len(x)] = best
    return found


def _name(products: Iterable[Product]) -> str:
    return " + ".join(sorted(products)) or "none"


def _first(pair: tuple[Product, Product], layer: DecoderLayer) -> Linear:
    if pair[0] == "o":
        return layer.o
    assert isinstance(layer.mlp, GatedMLP)
    return layer.mlp.down


def _compute(
    fusion: Fusion, pair: tuple[Product, Product], way: Way, layers: Sequence[FusedLayer], h: Tensor, x: Tensor
) -> None:
    """Computes the pair in each layer like FusedLayer.compute, with the products in `way` fused."""
    fusion.chosen[len(x)] = way
    for layer in layers:
        first, mlp = _first(pair, layer), layer.mlp
        if pair[0] == "down":
            y, added = fusion.add_linear("down", first, h, x, layer.mlp_output_norm)
            fusion.norm_then_linear("qkv", layer.qkv, y, added, layer.input_norm)
            continue
        y, added = fusion.add_linear("o", first, h, x, layer.attention_output_norm)
        if isinstance(mlp, GatedMLP):
            fusion.norm_then_linear("gate_up", mlp.gate_up, y, added, layer.mlp_norm, mlp.activation)
        else:
            fusion.norm(y, added, layer.mlp_norm)


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """The one stream for all measurements: cuBLAS keeps some memory for each stream that it was used on."""
    return torch.cuda.Stream(device)


def seconds_on_gpu(ways: Mapping[Way, Callable[[], object]]) -> dict[Way, float]:
    """The seconds that each way takes as a CUDA graph, the least of some replays in turns. Launched one by one, kernels
    would take the host's time, not their own."""
    current = torch.cuda.current_stream()
    stream = _stream(current.device_index)
    stream.wait_stream(current)
    graphs: dict[Way, torch.cuda.CUDAGraph] = {}
    collects = gc.isenabled()
    gc.disable()  # something of CUDA's that is let go meanwhile would break a capture
    try:
        with torch.cuda.stream(stream):
            for way, compute in ways.items():
                compute()  # kernels are compiled and loaded, libraries get their workspaces of this stream
                graphs[way] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[way], stream=stream, capture_error_mode="thread_local"):
                    compute()
            seconds = dict.fromkeys(ways, float("inf"))
            for _, (way, graph) in itertools.product(range(REPEATS), graphs.items()):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                seconds[way] = min(seconds[way], start.elapsed_time(end) / 1e3)
    finally:
        torch.cuda.set_stream(current)  # torch does not where a capture fails
        if collects:
            gc.enable()
    current.wait_stream(stream)
    return seconds
