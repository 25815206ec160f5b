"""The latency budget of one request against the objectives of a use, over `reference_impl.theory.deployment`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ipywidgets import Dropdown, IntSlider, SelectionSlider

from chapters.widgets.figure import BLUE, GREY, INK, RED, SKY, Shown, View, figure, show
from reference_impl.theory import kv_cache
from reference_impl.theory.deployment import Deployment, RequestTime, request_time
from reference_impl.theory.hardware import DEVICES, device
from reference_impl.theory.model_shapes import MODELS, model
from reference_impl.theory.units import format_seconds


@dataclass(frozen=True)
class Objective:
    """The objectives of a use, in seconds; None: no objective. why: the reason for the numbers. Examples, not laws."""

    ttft: float | None
    tpot: float | None
    total: float | None
    why: str


USES: Mapping[str, Objective] = MappingProxyType(
    {
        "voice": Objective(0.15, 0.3, 2.0, "a pause is noticed; speech takes a token every 300 ms"),
        "code completion": Objective(0.2, None, 0.5, "useful only before you type on"),
        "chat": Objective(0.5, 0.1, 10.0, "a sign of life, then a stream without stutter"),
        "batch": Objective(None, None, None, "nobody waits for a token: a deadline or a price for the whole job"),
    }
)
# name -> (bits per stored weight, bytes to compute in: 2 for 16-bit floats, 1 for fp8)
WEIGHTS: Mapping[str, tuple[float, int]] = MappingProxyType(
    {
        "16 bit": (16.0, 2),
        "fp8, weights and arithmetic": (8.0, 1),
        "4 bit, groups of 128": (kv_cache.bits_per_weight(4, 128), 2),
    }
)
PROMPTS = [2**n for n in range(4, 18)]  # 16 to 131,072
OUTPUTS = [2**n for n in range(14)]  # 1 to 8,192
COUNTS = [1, 2, 4, 8, 16]
BATCHES = [2**n for n in range(9)]  # 1 to 256


def draw(
    use: str, model_name: str, device_name: str, devices: int, weights: str, prompt: int, output: int, batch: int,
    queue_ms: int, mfu: int, mbu: int,
) -> Shown:  # fmt: skip
    """Queue, prefill and decode against TTFT and total; one step against TPOT. Or why there is no time."""
    shape, machine, objective = model(model_name), device(device_name), USES[use]
    bits, width = WEIGHTS[weights]
    half = "bf16" if "bf16" in machine.dense_flops else "fp16"
    try:
        if shape.max_context is not None and prompt + output > shape.max_context:
            raise ValueError(
                f"expected at most {shape.max_context:,} tokens, the context of {model_name}, got "
                f"{prompt:,} + {output:,}; shorten the prompt or the output, or choose another model"
            )
        where = Deployment(shape, machine, devices, bits, half if width == 2 else "fp8", mfu / 100, mbu / 100)
        time = request_time(where, prompt, output, queue_ms / 1000, batch)
    except (ValueError, KeyError) as error:
        return _refused(f"{model_name} on {devices} x {device_name}, {weights}", str(error.args[0]))
    met, advice = judge(objective, where, time, prompt, batch)
    name = f"{model_name} on {devices} x {device_name}, {weights}; {prompt:,} tokens in, {output:,} out, batch {batch}"
    return _bars(name, use, objective, time, met, advice, batch / time.tpot / devices)


def judge(
    objective: Objective, where: Deployment, time: RequestTime, prompt: int, batch: int
) -> tuple[dict[str, bool], list[str]]:
    """Which objectives hold, and for each missed one what would help."""
    met, advice = {}, []
    if objective.ttft is not None:
        met["TTFT"] = time.ttft <= objective.ttft
        left = objective.ttft - time.queue
        if not met["TTFT"] and left <= 0:
            advice.append("TTFT: the queue alone takes more; add replicas, refuse or reorder requests")
        elif not met["TTFT"]:
            fits = where.longest_prompt(left)
            advice.append(f"TTFT: a prompt of at most {fits:,} tokens fits after this queue; or more FLOP/s")
    if objective.tpot is not None:
        met["TPOT"] = time.tpot <= objective.tpot
        if not met["TPOT"]:
            smaller = "a smaller batch, " if batch > 1 else ""
            advice.append(f"TPOT: {smaller}fewer bytes per step (bits, context), more devices or bandwidth")
    if objective.total is not None:
        met["total"] = time.latency <= objective.total
        if not met["total"]:
            advice.append("total: fewer output tokens, or whatever shortens a step")
    return met, advice


def _bars(
    name: str, use: str, objective: Objective, time: RequestTime, met: dict[str, bool], advice: list[str], rate: float
) -> Shown:
    fig = figure(7.8, 3.7)
    fig.set_layout_engine("none")  # placed by hand, one axes: a layout engine, or axes per row, take most of the time
    ax = fig.add_axes((0.15, 0.1, 0.83, 0.62))
    queue, prefill = ("queue", time.queue, GREY, ".."), ("prefill", time.prefill, BLUE, "")
    rows = (
        ("first token", objective.ttft, (queue, prefill)),
        ("whole answer", objective.total, (queue, prefill, ("decode", time.decode, SKY, "//"))),
        ("one step", objective.tpot, (("decode", time.tpot, SKY, "//"),)),
    )
    handles = {}
    for y, (_, limit, parts) in enumerate(rows):
        needed = sum(seconds for _, seconds, _, _ in parts)
        full, left = 1.05 * max(needed, limit or 0), 0.0  # every row has a scale of its own
        for part, seconds, colour, hatch in parts:
            handles[part] = ax.barh(y, seconds / full, 0.42, left, color=colour, hatch=hatch, edgecolor="white")
            left += seconds / full
        if limit is not None:
            (line,) = ax.plot([limit / full] * 2, [y - 0.3, y + 0.3], color=RED, linestyle="--", linewidth=1.6)
            handles["objective"] = line
        asked = "no objective" if limit is None else f"objective {_time(limit)}"
        ax.text(0.005, y + 0.42, f"{_time(needed)}, {asked}; the row ends at {_time(full)}", fontsize=9, va="center")
    ax.set_xlim(0, 1)
    ax.set_ylim(2.7, -0.4)
    ax.set_xticks([])
    ax.set_yticks(range(3), [label for label, _, _ in rows])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    verdict = ", ".join(f"{key} {'met' if ok else 'MISSED'}" for key, ok in met.items()) or "no objective per request"
    tokens = "" if objective.total is None else f"; {time.tokens_within(objective.total):,} output tokens fit"
    speed = f"{1 / time.tpot:,.0f} tokens/s per stream, {rate:,.0f} per device"
    lines = [f"{use}: {verdict}{tokens}", *(advice or [objective.why]), speed]
    wrapped = [line for text in (name, *lines) for line in textwrap.wrap(text, 112)]
    fig.text(0.01, 0.99, "\n".join(wrapped), fontsize=9, ha="left", va="top")
    fig.legend(list(handles.values()), list(handles), loc="lower center", ncols=4, fontsize=8, frameon=False)
    return show(
        fig,
        f"{name}, by formula. Queue {_time(time.queue)}, prefill {_time(time.prefill)}, decode {_time(time.decode)}; "
        f"TTFT {_time(time.ttft)}, TPOT {_time(time.tpot)}, latency {_time(time.latency)}. {'. '.join(lines)}.",
    )


def _time(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "0 s"


def _refused(name: str, reason: str) -> Shown:
    fig = figure(7.8, 1.3)
    ax = fig.subplots()
    ax.axis("off")
    text = "\n".join(textwrap.wrap(reason, 95))
    ax.text(0, 1, f"{name}\nno latency to give:\n{text}", ha="left", va="top", fontsize=9, color=INK)
    return show(fig, f"{name}: no latency to give. {reason}")


def latency_budget(
    model_name: str = "llama-3-8b",
    use: str = "chat",
    prompt: int = 2048,
    output: int = 256,
    device_name: str = "H100",
    devices: int = 1,
) -> View:
    """Choose a deployment, a request and a use; see whether its objectives hold, and what would help.

    prompt and output are rounded to powers of two. Times are floors at the MFU and MBU you assume.
    """
    wide, layout = {"description_width": "130px"}, {"width": "480px"}
    dense = [name for name, shape in sorted(MODELS.items()) if shape.active_params is None]

    def powers(options: list[int], value: int, label: str) -> SelectionSlider:
        nearest = min(options, key=lambda n: abs(n - value))
        return SelectionSlider(
            options=[(f"{n:,}", n) for n in options], value=nearest, description=label, style=wide, layout=layout,
            continuous_update=False,
        )  # fmt: skip

    def slider(value: int, low: int, high: int, label: str, step: int = 1) -> IntSlider:
        return IntSlider(value, low, high, step, description=label, style=wide, layout=layout, continuous_update=False)

    return View(
        {
            "use": Dropdown(options=list(USES), value=use, description="Use", style=wide),
            "model_name": Dropdown(options=dense, value=model_name, description="Model", style=wide),
            "device_name": Dropdown(options=list(DEVICES), value=device_name, description="Device", style=wide),
            "devices": powers(COUNTS, devices, "Devices"),
            "weights": Dropdown(options=list(WEIGHTS), description="Weights", style=wide, layout=layout),
            "prompt": powers(PROMPTS, prompt, "Prompt tokens"),
            "output": powers(OUTPUTS, output, "Output tokens"),
            "batch": powers(BATCHES, 1, "Decoding together"),
            "queue_ms": slider(0, 0, 2000, "Queue, ms", 10),
            "mfu": slider(50, 5, 100, "MFU, %", 5),
            "mbu": slider(80, 5, 100, "MBU, %", 5),
        },
        draw,
    )
