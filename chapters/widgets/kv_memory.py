"""The KV-memory calculator: how much of a machine weights and cache take, over `reference_impl.theory.kv_cache`."""

from __future__ import annotations

from ipywidgets import Dropdown, IntSlider, SelectionSlider

from chapters.widgets.figure import BLUE, GREY, INK, ORANGE, RED, Shown, View, figure, show
from reference_impl.theory import kv_cache
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.units import GB, format_bytes

CACHE_TYPES = {"16 bit": 2.0, "8 bit": 1.0, "4 bit": 0.5}
WEIGHT_BITS = {
    "16 bit": kv_cache.bits_per_weight(16),
    "8 bit": kv_cache.bits_per_weight(8),
    "4 bit, groups of 128": kv_cache.bits_per_weight(4, 128),
}
CONTEXTS = [2**n for n in range(7, 21)]  # 128 tokens to 1,048,576
COUNTS = [1, 2, 4, 8, 16]


def draw(
    model_name: str, context: int, requests: int, cache: str, weights: str, device_name: str, devices: int, percent: int
) -> Shown:
    """One bar: weights, cache, what is left, against the memory an engine may use."""
    shape, machine = model(model_name), device(device_name)
    memory = devices * machine.capacity
    weight = float(kv_cache.weight_bytes(shape, WEIGHT_BITS[weights]))
    each = float(kv_cache.bytes_per_token(shape, CACHE_TYPES[cache]))
    held = float(kv_cache.cache_bytes(shape, context, requests, CACHE_TYPES[cache]))
    usable = memory * percent / 100
    fit = kv_cache.concurrent_requests(
        memory, weight, context, each, percent / 100, fixed_state_each=shape.fixed_state_bytes
    )
    left = usable - weight - held

    fig = figure(7.5, 2.9)
    ax = fig.subplots()
    ax.barh(0, weight / GB, color=BLUE, edgecolor="white", label=f"weights {format_bytes(weight)}")
    ax.barh(
        0, held / GB, left=weight / GB, color=ORANGE, edgecolor="white", hatch="//", label=f"cache {format_bytes(held)}"
    )
    if left > 0:
        ax.barh(0, left / GB, left=(weight + held) / GB, color=GREY, label=f"left {format_bytes(left)}")
    ax.axvline(usable / GB, color=INK, linestyle="--", linewidth=1.2, label=f"usable {format_bytes(usable)}")
    ax.axvline(memory / GB, color=RED, linewidth=1.5, label=f"memory {format_bytes(memory)}")
    ax.set_xlim(0, 1.05 * max(memory, weight + held) / GB)
    ax.set_yticks([])
    ax.set_xlabel("GB (10⁹ bytes)")
    ax.spines[["top", "right", "left"]].set_visible(False)
    kind = shape.attention_kind
    ax.set_title(
        f"{model_name} ({kind}), {requests} x {context:,} tokens on {devices} x {device_name}\n"
        f"{each:,.0f} bytes per token; {format_bytes(context * each + shape.fixed_state_bytes)} per request; "
        f"{'fits' if left >= 0 else 'DOES NOT FIT'}; {fit} such requests would fit",
        fontsize=10, loc="left",
    )  # fmt: skip
    fig.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    verdict = f"{format_bytes(left)} left" if left >= 0 else f"{format_bytes(-left)} too much"
    return show(
        fig,
        f"{model_name} on {devices} {device_name}: weights {format_bytes(weight)}, cache of {requests} requests of "
        f"{context} tokens {format_bytes(held)}, usable {format_bytes(usable)}, {verdict}; {fit} requests would fit.",
    )


def kv_memory(
    model_name: str = "llama-3-70b", context: int = 8192, requests: int = 8, device_name: str = "H100", devices: int = 4
) -> View:
    """Choose a model, a machine and a load; see what the keys and values take. context is rounded to a power of two."""
    nearest = min(CONTEXTS, key=lambda n: abs(n - context))
    wide = {"description_width": "120px"}
    layout = {"width": "480px"}
    return View(
        {
            "model_name": Dropdown(options=sorted(MODELS), value=model_name, description="Model", style=wide),
            "context": SelectionSlider(
                options=[(f"{n:,}", n) for n in CONTEXTS], value=nearest, description="Tokens each", style=wide,
                layout=layout, continuous_update=False,
            ),
            "requests": IntSlider(
                requests, 1, 512, description="Requests", style=wide, layout=layout, continuous_update=False
            ),
            "cache": Dropdown(options=list(CACHE_TYPES), description="Cache", style=wide),
            "weights": Dropdown(options=list(WEIGHT_BITS), description="Weights", style=wide),
            "device_name": Dropdown(options=list(DEVICES), value=device_name, description="Device", style=wide),
            "devices": SelectionSlider(
                options=COUNTS, value=devices, description="Devices", style=wide, continuous_update=False
            ),
            "percent": IntSlider(
                90, 10, 100, description="Usable, %", style=wide, layout=layout, continuous_update=False
            ),
        },
        draw,
    )  # fmt: skip
