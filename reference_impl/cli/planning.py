"""`inferlab plan`: which layout of a model on so many GPUs. Formulas only; no torch, no weights."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reference_impl.cli.options import errors_in_a_line, fail

if TYPE_CHECKING:
    from reference_impl.theory.choices import Choice
    from reference_impl.theory.mixtures import Mixture
    from reference_impl.theory.model_shapes import ModelShape
    from reference_impl.theory.plan import Plan

_MODEL = "llama-3-70b or another name of the table, a folder with a config.json, or a course model: target."
_COURSE = ("target", "draft")
_WEIGHT_BITS = "Bits of a weight; default: what the config says, or 16."
_EMBEDDING_BITS = "Bits of embedding and output projection, where they are others (most checkpoints keep 16)."
_BETWEEN = "Link between nodes: 'InfiniBand NDR 400G', 'RoCE 400G', 'AWS EFA 400G', ..."
_INSIDE = "Link inside a node, by default the GPU's."
_EP = "Ranks that divide whole experts: 1 (each has columns of all), tp, or tp x dp."
_SHOWN = "So many layouts are shown, and so many that do not fit."
_REDUCE = "Microseconds of each all-reduce, instead of the links' times: for calculations by hand."
_WEIGHTS = "GB of all weights, each step reads all of them: for calculations by hand."


def plan_layouts(
    model: Annotated[str, typer.Option(help=_MODEL)],
    gpu: Annotated[str, typer.Option(help="h100, h200, b200, a100, l4, mi300x, ...")],
    gpus: Annotated[int, typer.Option(min=1, help="How many there are.")],
    ttft: Annotated[float | None, typer.Option(min=0.0, help="Seconds to the first token, at most.")] = None,
    tpot: Annotated[float | None, typer.Option(min=0.0, help="Seconds per output token, at most.")] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    output: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 256,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Requests at once; default: as many as fit and keep --tpot.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.0, help="Requests per second, in the place of --batch.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Only layouts with this tensor parallelism.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Only with so many stages.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Only with so many replicas.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help=_EP)] = None,
    weight_bits: Annotated[float | None, typer.Option(min=1, max=32, help=_WEIGHT_BITS)] = None,
    embedding_bits: Annotated[float | None, typer.Option(min=1, max=32, help=_EMBEDDING_BITS)] = None,
    kv_bits: Annotated[float, typer.Option(min=1, max=32, help="Bits of a cached value.")] = 16,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="That share the link inside; 72 in an NVL72 rack.")] = 8,
    inside: Annotated[str | None, typer.Option(help=_INSIDE)] = None,
    between: Annotated[str, typer.Option(help=_BETWEEN)] = "InfiniBand NDR 400G",
    mfu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the peak FLOP/s that is reached.")] = 0.5,
    mbu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the bandwidth that is reached.")] = 0.7,
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="Share of a GPU's memory for weights and cache.")
    ] = 0.9,
    reserve_gb: Annotated[float, typer.Option(min=0, help="GB of each GPU for activations, graphs and buffers.")] = 0,
    all_reduce_us: Annotated[float | None, typer.Option(min=0, help=_REDUCE)] = None,
    weights_gb: Annotated[float | None, typer.Option(min=0.001, help=_WEIGHTS)] = None,
    show: Annotated[int, typer.Option(min=1, help=_SHOWN)] = 6,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object, with all layouts.")] = False,
) -> None:
    """Which layout of a model on so many GPUs: tensor, pipeline, data and expert parallelism, and why.

    Says what each layout that fits gives, at assumed shares of the limits (--mfu, --mbu).
    Nothing waits in a queue. floor: a token of one stream at the limits, its weights and
    the all-reduces of its layers.
    """
    from reference_impl.theory.plan import plan

    with errors_in_a_line():
        shape, mixture, stored = _model(model)
        if stored < 16 and embedding_bits is None:  # as checkpoints that come quantized have them
            embedding_bits = 16
        found = plan(
            shape, gpu, gpus, ttft=ttft, tpot=tpot, prompt_tokens=prompt, output_tokens=output, batch=batch, rate=rate,
            tp=tp, pp=pp, dp=dp, ep=ep, weight_bits=weight_bits or stored,
            embedding_bits=embedding_bits, kv_bits=kv_bits, devices_per_node=gpus_per_node, between=between,
            inside=inside, mixture=mixture, mfu=mfu, mbu=mbu, utilization=gpu_memory_utilization,
            reserve=reserve_gb * 1e9, weight_bytes=None if weights_gb is None else weights_gb * 1e9,
            all_reduce_seconds=None if all_reduce_us is None else all_reduce_us * 1e-6,
        )  # fmt: skip
    is_stored = Path(model).is_dir() or model in _COURSE
    given = model if is_stored else "MODEL"
    is_rounded = not is_stored or (weight_bits or stored) != stored
    if as_json:
        typer.echo(json.dumps(_plain(found, given, is_rounded), indent=2))
    else:
        typer.echo("\n".join(_lines(found, given, is_rounded, show)))


def _model(name: str) -> tuple[ModelShape, Mixture | None, float]:
    """The shape of a name or of a folder's config.json, its mixture, and the bits of its weights."""
    from reference_impl.assembly.config import course_model
    from reference_impl.theory.mixtures import mixture_of, read_config
    from reference_impl.theory.names import find_model

    path = course_model(name) if name in _COURSE else Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not name or (not path.is_dir() and path.suffix != ".json"):
        if "/" in name:
            fail(
                f"--model: there is no folder {name!r}, and a model of the hub is not fetched for a plan; give a "
                f"folder with its config.json, or a name of the table{_like(name)}", 2,
            )  # fmt: skip
        shape = find_model(name)
        return shape, mixture_of(shape), 16
    try:
        config = json.loads(file.read_text("utf-8"))
    except ValueError:
        fail(f"{file}: expected a JSON object, as in a model's folder")
    if not isinstance(config, dict):
        fail(f"{file}: expected a JSON object, got a {type(config).__name__}")
    try:
        shape, mixture = read_config(config, path.resolve().name if path.is_dir() else path.stem)
    except ValueError as error:
        fail(f"{file}: {error}")
    return shape, mixture, _stored_bits(config)


def _like(name: str) -> str:
    """The nearest names of the table to a hub's id."""
    from reference_impl.theory.names import nearest_models

    found = nearest_models(name.rpartition("/")[2])
    return f", such as {' or '.join(found)}" if found else ""


def _stored_bits(config: dict[str, Any]) -> float:
    """Bits of a weight of a checkpoint, as its quantization_config says."""
    stored = config.get("quantization_config")
    if not isinstance(stored, dict):
        return 16
    groups = stored.get("config_groups")
    first: Any = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    bits = stored.get("bits") or (weights.get("num_bits") if isinstance(weights, dict) else None)
    if bits is None and "fp8" in str(stored.get("quant_method", "")).lower():
        bits = 8
    if not isinstance(bits, int | float) or not 1 <= bits <= 16:
        raise ValueError(f"weight_bits: expected them, since quantization_config of the model has none: {stored}")
    return float(bits)


# ---------------------------------------------------------------- flags


def server_flags(found: Plan, choice: Choice, model: str, is_rounded: bool = False) -> str:
    """The command of this project's server, or why there is none. is_rounded: the weights are not stored in the plan's
    bits yet."""
    s = found.setting
    if s.shape.kv_lora_rank or s.shape.attention_layers is not None or s.shape.name in ("falcon-7b", "palm-540b"):
        return f"inferlab serve: no command, the engine does not load models like {s.shape.name}"
    if choice.ep > choice.tp:
        return "inferlab serve: no command, it divides experts inside a replica only"
    if too_long := _too_long(found):
        return f"inferlab serve: no command, {too_long}"
    formats: dict[float, list[str]] = {4: ["int4"], 8: ["fp8"], 16: []}
    kv_bits = 8 * s.kv_bytes
    if (is_rounded and s.weight_bits not in formats) or kv_bits not in formats:
        kind = f"a cache of {kv_bits:g}" if kv_bits not in formats else f"weights of {s.weight_bits:g}"
        return f"inferlab serve: no command, for {kind} bits it has no option; 4, 8 and 16 have one"
    words = [f"--{name} {size}" for name, size in (("tp", choice.tp), ("pp", choice.pp), ("dp", choice.dp)) if size > 1]
    words += ["--enable-expert-parallel"] if choice.ep > 1 else []
    words += [f"--quantization {name}" for name in formats.get(s.weight_bits, []) if is_rounded]
    words += [f"--kv-dtype {name}" for name in formats[kv_bits]]
    command = " ".join(["inferlab serve", shlex.quote(model), *words, f"--max-num-seqs {_each(choice)}"])
    return f"{command}  # divided, it computes on CPUs" if choice.tp * choice.pp > 1 else command


def vllm_flags(found: Plan, choice: Choice, model: str, is_rounded: bool = False) -> str:
    """The command of vLLM's server, or why there is none. is_rounded: see `server_flags`."""
    s, tp, kv_bits = found.setting, choice.tp, 8 * found.setting.kv_bytes
    if s.shape.name == "palm-540b":
        return "vllm serve: no command, the weights are not published"
    wrong = [
        f"{size} {what}"
        for what, size, fits in (
            ("query heads", s.shape.num_heads, s.shape.num_heads % tp == 0),
            ("KV heads", s.shape.num_kv_heads, s.shape.num_kv_heads % tp == 0 or tp % s.shape.num_kv_heads == 0),
            ("MLP columns", s.shape.intermediate_size, s.shape.intermediate_size % tp == 0),
        )
        if not fits
    ]
    if wrong:
        return f"vllm serve: no command, {tp} ranks do not divide {', '.join(wrong)} evenly"
    if too_long := _too_long(found):
        return f"vllm serve: no command, {too_long}"
    if kv_bits not in (8, 16):
        return f"vllm serve: no command is known here for a cache of {kv_bits:g} bits, but for 8 and 16"
    # With replicas vLLM divides experts among the ranks of all of them.
    shared = s.mixture is None or choice.ep == tp * choice.dp
    sizes = {"tensor": tp, "pipeline": choice.pp, "data": choice.dp if shared else 1}
    words = [f"--{name}-parallel-size {size}" for name, size in sizes.items() if size > 1]
    words += ["--enable-expert-parallel"] if choice.ep > 1 else []
    words += ["--quantization fp8"] if is_rounded and s.weight_bits == 8 else []
    words += ["--kv-cache-dtype fp8"] if kv_bits == 8 else []
    words += [f"--max-model-len {found.prompt_tokens + found.output_tokens}", f"--max-num-seqs {_each(choice)}"]
    words += [f"--gpu-memory-utilization {s.utilization:g}"]
    name, notes = "MODEL" if model in _COURSE else model, []
    if is_rounded and s.weight_bits not in (8, 16):
        notes.append(f"{name}: a checkpoint of {s.weight_bits:g} bits")
    if not shared and choice.dp > 1:
        notes.append(f"one server for each of {choice.dp} replicas")
    if (ranks := math.prod(sizes.values())) > s.where.per_node:
        notes.append(f"{ranks} GPUs on {-(-ranks // s.where.per_node)} nodes: these have to be joined first")
    return " ".join(["vllm serve", shlex.quote(name), *words]) + (f"  # {'; '.join(notes)}" if notes else "")


def _each(choice: Choice) -> int:
    """Requests at once of the replica that has most."""
    return max(1, -(-choice.batch // choice.dp))


def _too_long(found: Plan) -> str:
    """Says so where a request is longer than the model's context: servers refuse it."""
    longest, context = found.prompt_tokens + found.output_tokens, found.setting.shape.max_context
    if context is None or longest <= context:
        return ""
    return f"a request has {longest:,} tokens and the model a context of {context:,}"


# ---------------------------------------------------------------- what is printed


def _plain(found: Plan, model: str, is_rounded: bool) -> dict[str, Any]:
    """All of a plan, for programs. Times in seconds, sizes in bytes."""
    s = found.setting
    return {
        "model": s.shape.name, "parameters": s.shape.num_params, "gpu": s.device.name, "gpus": s.num_devices,
        "gpus_per_node": s.where.per_node, "inside": asdict(s.where.inside), "between": asdict(s.where.between),
        "prompt_tokens": found.prompt_tokens, "output_tokens": found.output_tokens, "weight_bits": s.weight_bits,
        "kv_bits": 8 * s.kv_bytes, "mfu": s.mfu, "mbu": s.mbu, "utilization": s.utilization, "why": found.why,
        "notes": found.notes,
        "one_shot_meets_ring_at": None if found.break_even == float("inf") else found.break_even,
        "layouts": [
            {"name": each.name} | asdict(each)
            | {
                "server": server_flags(found, each, model, is_rounded),
                "vllm": vllm_flags(found, each, model, is_rounded),
            }
            for each in found.layouts
        ],
        "rejected": [asdict(each) for each in found.rejected],
    }  # fmt: skip


def _lines(found: Plan, model: str, is_rounded: bool, show: int) -> list[str]:
    from reference_impl.theory.kv_cache import weight_bytes
    from reference_impl.theory.units import format_bytes

    s, best = found.setting, found.best
    size = format_bytes(s.weight_bytes or float(weight_bytes(s.shape, s.weight_bits, s.embedding_bits)))
    nodes = -(-s.num_devices // s.where.per_node)
    place = f"{nodes} nodes, {s.where.inside.name} inside, {s.where.between.name} between"
    links = place if nodes > 1 else s.where.inside.name
    lines = [
        f"{s.shape.name}, {size} in {s.weight_bits:g} bits, multiplied in {s.precision}, on {s.num_devices} x "
        f"{s.device.name}, {links}",
        f"prompts of {found.prompt_tokens:,} tokens, answers of {found.output_tokens:,}; assumed: {s.mfu:.0%} of the "
        f"peak FLOP/s, {s.mbu:.0%} of the bandwidth, no queue",
        "",
        *_table(found.layouts[:show]),
    ]
    if len(found.layouts) > show:
        lines.append(f"... and {len(found.layouts) - show} more: --show {len(found.layouts)}")
    lines += ["", f"Why: {found.why}.", *(f"Note: {note}." for note in found.notes), ""]
    if best.messages:
        lines += [f"Messages of a decode step of {best.name}:", *_messages(best)]
        sent = ", ".join(f"{format_bytes(size)} over {link}" for link, size in best.per_token.items())
        lines.append(f"Bytes that the busiest rank sends for each output token: {sent}.")
        if found.break_even != float("inf"):
            group = min(s.num_devices, s.where.per_node)
            lines.append(
                f"On {group} GPUs one-shot and ring take the same time at {format_bytes(found.break_even, digits=2)}."
            )
        lines.append("")
    for each in found.rejected[:show]:
        floor = "" if each.floor is None else f" (its floor would be {each.floor * 1e3:.1f} ms)"
        lines.append(f"does not fit: {each.name}: {each.why}{floor}")
    lines += [""] if found.rejected else []
    return [*lines, server_flags(found, best, model, is_rounded), vllm_flags(found, best, model, is_rounded)]


def _table(layouts: tuple[Choice, ...]) -> list[str]:
    rows = [("layout", "at once", "floor", "TTFT", "TPOT", "tokens/s", "weights/GPU", "KV tokens", "messages", "")]
    for each in layouts:
        rows.append(
            (
                each.name, f"{each.batch:,}", f"{each.floor * 1e3:.1f} ms", f"{each.ttft * 1e3:.0f} ms",
                f"{each.tpot * 1e3:.1f} ms", f"{each.tokens_per_second:,.0f}", f"{each.weights / 1e9:.1f} GB",
                f"{each.kv_tokens:,}", f"{each.communication:.0%}", "; ".join(each.misses),
            )
        )  # fmt: skip
    return _columns(rows)


def _messages(choice: Choice) -> list[str]:
    from reference_impl.theory.units import format_bytes, format_seconds

    rows = [("", "collective", "stage", "calls", "bytes of one", "time of one")]
    rows += [
        (m.what, m.collective, str(m.stage), str(m.calls), format_bytes(m.payload), format_seconds(m.seconds))
        for m in choice.messages
    ]
    return _columns(rows, left=2)


def _columns(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """Rows as columns, the first `left` and the last of ten to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < left or place == 9 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
