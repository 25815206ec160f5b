"""A profile as text for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reference_impl.assembly.engine import Engine
from reference_impl.bench.profiling.explain import Explanation, explain
from reference_impl.bench.profiling.record import Phase, Profile
from reference_impl.bench.profiling.work import step_work
from reference_impl.theory.units import format_bytes, format_flops, format_seconds

TOP = 5


def explained(engine: Engine, profile: Profile, top: int = TOP) -> list[tuple[str, Explanation]]:
    """(name, explanation) of the longest entries."""
    spec = engine.kv_spec
    itemsize = spec.bits_per_head / spec.head_dim / 8
    work = step_work(engine.model, profile.rows, itemsize)
    steps = len(profile.recorded.steps)
    entries = profile.recorded.entries()[:top]
    return [(entry.name, explain(entry, steps, work, profile.machine)) for entry in entries]


def show(engine: Engine, profile: Profile, phase: Phase, batch: int, context: int, console: Console) -> None:
    """Prints where a step's time goes: on a GPU on average, on a CPU, which does other things too, at the fastest."""
    device, machine = engine.model.device, profile.machine
    gpu, steps = device.type == "cuda", len(profile.recorded.steps)
    busy, step = profile.recorded.busy / steps, profile.step_seconds
    dtype = str(engine.model.dtype).removeprefix("torch.")
    of = f"mean of {steps} steps" if gpu else "each part at its fastest"
    console.print(f"[bold]One step[/]: {_did(profile, phase, batch, context)}; {dtype} on {device.type}; {of}\n")
    where = "kernels" if gpu else "operators"
    outside = "the GPU idle: it waits for the host" if gpu else "outside of them: Python, the scheduler"
    console.print(f"  {format_seconds(profile.plain_seconds):>10}  without the profiler")
    if not gpu and profile.plain_seconds > step:
        console.print(
            "              [dim]longer than under it: another program takes the processor, times are rough[/]"
        )
    console.print(f"  {format_seconds(step):>10}  under it, of which")
    console.print(f"  {format_seconds(busy):>10}  in {where} ({busy / step:.0%})")
    console.print(f"  {format_seconds(max(0.0, step - busy)):>10}  {outside}\n")
    console.print(
        f"This machine, measured just now: copies {format_bytes(machine.bandwidth)}/s, multiplies "
        f"{format_flops(machine.rate)}/s in {machine.multiplies}, {format_seconds(machine.smallest)} for the smallest "
        f"{where.removesuffix('s')}.\n"
    )
    found = explained(engine, profile)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "share", "time", "calls", "FLOPs", "bytes", "limit", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("governed by", no_wrap=True)
    for number, (_, e) in enumerate(found, 1):
        table.add_row(
            str(number), f"{e.seconds / step:.0%}", format_seconds(e.seconds), f"{e.calls:g}",
            _or(e.flops, format_flops), _or(e.bytes, format_bytes), _or(e.limit, format_seconds),
            _or(e.share, "{:.0%}".format), e.governs,
        )  # fmt: skip
    console.print(table)
    console.print(
        f"[dim]Per step. share: of the {format_seconds(step)}. limit: the longest of bytes/copies, FLOPs/multiplies, "
        "calls x smallest[/]\n"
    )
    for number, (name, e) in enumerate(found, 1):
        console.print(Text.assemble(f"{number}. ", (name, "bold"), f": {e.what}."))
        console.print(Padding(Text(e.sentence), (0, 0, 0, 3), expand=False))
    total = sum(e.seconds for _, e in found)
    console.print(f"\nThese {len(found)} are {total / step:.0%} of the step and {total / busy:.0%} of its {where}.")


def _did(profile: Profile, phase: Phase, batch: int, context: int) -> str:
    who, s, each = ("1 request", "s", "") if batch == 1 else (f"{batch} requests", "", " each")
    if phase == "prefill":
        return f"{who} prefill{s} {context} tokens{each}"
    seen = [row.start + row.num_tokens for rows in profile.rows for row in rows]
    return f"{who} decode{s}, context {sum(seen) / len(seen):.0f}, {context} of it the prompt"


def _or(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
