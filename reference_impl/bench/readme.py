"""`python -m reference_impl.bench readme [--check]`: bench/README.md gets the newest results, of `results/`.

The part between the markers is written here and nowhere else: every figure of speed in it was measured, and has its
machine, its versions and its date; where there is no result, the text says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reference_impl.bench import harness

README = Path(__file__).resolve().parent / "README.md"
BEGIN = "<!-- results: by `python -m reference_impl.bench readme` from reference_impl/bench/results; edits are lost -->"
END = "<!-- end of results -->"
AIM_SPEEDUP, AIM_SCHEDULER = 2, 2  # times a padded batch, for ragged requests; µs of scheduling per request and step


def written(results: Path) -> str:
    """The part between the markers."""
    found = {name: harness.recorded(name, results) for name in PARTS}
    return "\n\n".join(part(found[name]) for name, part in PARTS.items() if found[name] or name in ("cpu", "gpu"))


def cpu_part(result: dict[str, Any]) -> str:
    if not result:
        return "No speed has been measured on a CPU (`inferlab bench cpu --save`)."
    from reference_impl.bench import cpu

    ragged = [c["speedup_over_padded"]["median"] for name, c in result["cases"].items() if "ragged" in name]
    us = result["host_work"]["scheduler_us_per_request"]["256"]["median"]
    reached = (
        f"The aims are {AIM_SPEEDUP}x over padded batches for ragged requests, and {AIM_SCHEDULER} µs of scheduling "
        f"per request and step. This run shows\n{min(ragged):.2f}x to {max(ragged):.2f}x, and {us:.1f} µs. "
        "Much depends on the CPU; why, and what another one showed:\n[NOTES.md](NOTES.md)."
    )
    return "\n\n".join(["`inferlab bench cpu` measures, on the course model:", cpu.markdown(result), reached])


def llama_part(result: dict[str, Any]) -> str:
    from reference_impl.bench import cpu_llama

    stamp = result["stamp"]
    return "\n".join([
        "What a laptop's user would take instead: llama.cpp (`python -m reference_impl.bench cpu_llama`):",
        "", cpu_llama.markdown(result),
        f"{result['rounds']} interleaved rounds, {stamp['cores']} cores of an {stamp['cpu']} "
        f"({stamp['instructions']}), torch {stamp['versions']['torch']}, {stamp['date']}, load "
        f"{stamp['load_average_before']} when it began.",
    ])  # fmt: skip


def gpu_part(result: dict[str, Any]) -> str:
    if not result:
        return (
            "**No speed has been measured on a GPU.** `python -m reference_impl.bench gpu` (or `inferlab bench gpu`) "
            "takes at most\neight minutes on one: decoding, the 256 requests of nano-vllm's benchmark, prefill, "
            "batches of 1 to 256, idle time and\nkernels, beside `transformers` and the limits of the machine. Its "
            "table will stand here. What is expected, and why:\n[NOTES.md](NOTES.md)."
        )  # fmt: skip
    from reference_impl.bench import gpu, gpu_rows

    rows = [gpu_rows.from_json(row) for row in result["rows"]]
    shown = [row for row in rows if row.goal is not None or row.peer is not None]
    head = "`python -m reference_impl.bench gpu` (or `inferlab bench gpu`), at most eight minutes on one GPU, measures:"
    tail = "All lines: [gpu.md](reference_impl/bench/results/gpu.md)."
    under = [*gpu.remarks(result), "", *gpu_rows.notes(shown)]
    return "\n".join([head, "", *gpu_rows.table(shown), "", *under, "", tail])


def kernels_part(result: dict[str, Any]) -> str:
    from reference_impl.bench import gpu

    return f"`python -m reference_impl.bench kernels` measures:\n\n{gpu.markdown(result)}"


def gates_part(record: dict[str, Any]) -> str:
    from reference_impl.bench import gates

    runs = [run for methods in record["models"].values() for found in methods.values() for run in found]
    instructions = ", ".join(sorted({run["instructions"].split(",")[0] for run in runs}))
    speed = record.get("speed", {}).get("stamp", {})
    return "\n".join([
        "What quantization of the course model costs, as `python -m reference_impl.bench gates` recorded it:", "",
        gates.markdown(record), "",
        f"KL to the unquantized model over {gates.WINDOWS * gates.WINDOW:,} tokens of text that it was not trained on "
        f"(`texts/`), and the share of tokens where both put the same one first; the median and the range over",
        f"draws of {gates.ROWS} calibration rows of {gates.LENGTH} tokens; {instructions}; torch "
        f"{record['stamp']['versions']['torch']}, {record['stamp']['date']}, commit {record['stamp']['commit']}. "
        "A test fails when a method leaves its band.",
        "A step: of one stream with products in float32, of the same step without quantization, the median of 9 rounds "
        f"({speed.get('cpu', 'not measured')}, {speed.get('instructions', '-')}, {speed.get('date', '-')}, load "
        f"{speed.get('load_average_before', '-')}): so small a model is decoded once, while it loads, and then takes "
        "as long and as much memory as without; where inputs are rounded, that comes on top.",
        "\\* No packed form: written dense.",
    ])  # fmt: skip


def llmcompressor_part(record: dict[str, Any]) -> str:
    from reference_impl.bench import against_llmcompressor

    lines = [
        "Beside llmcompressor, at equal bits, groups and calibration rows (`python -m reference_impl.bench "
        "against_llmcompressor`):", "", against_llmcompressor.markdown(record), "",
    ]  # fmt: skip
    for model, result in record.items():
        peer, draws = result["peer"], sorted({run["seed"] for m in result["methods"].values() for run in m["runs"]})
        lines.append(
            f"{model}: {result['bits_per_weight']:.3f} bits a weight (int4, symmetric, groups of "
            f"{result['group_size']}), {len(draws)} draws (seeds {draws[0]} to {draws[-1]}) of {result['rows']} rows "
            f"of {result['length']} tokens, KL in nats over {result['judged_tokens']:,} tokens by one evaluator; "
            f"llmcompressor {peer['llmcompressor']}; "
            f"{result['stamp']['date']}, commit {result['stamp']['commit']}."
        )
    return "\n".join([*lines, "The interval is that of the mean over draws, by Student's t."])


def kv_formats_part(record: dict[str, Any]) -> str:
    from reference_impl.bench import kv_formats

    stamp, needles = record["stamp"], record["needles"]
    swapped, kept = (sum(row[what] for row in needles.values()) for what in ("swapped_in", "guesses_kept"))
    lost = ", ".join(kv_formats.lost(record, name) for name in kv_formats.FORMATS[1:])
    return "\n".join([
        "What a KV cache of fewer bits costs the course model (`python -m reference_impl.bench kv_formats`):", "",
        kv_formats.markdown(record), "",
        f"Needle: of {record['each']} codes, each so many tokens before the question, the share that the engine "
        "answers, with nothing else; the same ones for all formats. The course model's own ability bounds it: its "
        "training rows had at most 1,024 tokens, and in float32, too, it finds fewer of those far back. Found of all "
        f"needles, minus float32's share, in points (95 %): {lost}.",
        "The engine had chunked prompts, batches, prefix cache, n-gram drafts (more than one token kept "
        f"{kept} times) and swapping on (blocks came back in {swapped} steps). KL in nats to float32 where keys and "
        f"values at these distances alone are rounded, {record['windows']} windows of {record['length']} tokens of "
        f"`texts/`. {stamp['cpu']}, torch {stamp['versions']['torch']}, {stamp['date']}, "
        f"commit {stamp['commit']}.",
    ])  # fmt: skip


def compression_part(record: dict[str, Any]) -> str:
    from reference_impl.bench import compression

    stamp = record["stamp"]
    trained = {name: row["stamp"] for name, row in record.items() if name == "distill" or name.startswith("qat")}
    dates = "; ".join(f"{name} {own['date']}, commit {own['commit']}" for name, own in trained.items())
    return "\n".join([
        "Other ways to make the course model smaller, as `python -m reference_impl.bench compression` and "
        "`datasets/course_model/compress.py` recorded them:", "",
        compression.markdown(record), "",
        "Judged as above, values of 16 bits where nothing is rounded. "
        f"{stamp['cpu']}, torch {stamp['versions']['torch']}, {stamp['date']}; the machine had other work. "
        f"What was trained: {dates or 'nothing yet'}.",
    ])  # fmt: skip


# The name of a result -> its part of README; "cpu" and "gpu" also say that nothing was measured.
PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "cpu": cpu_part, "cpu_llama": llama_part, "gpu": gpu_part, "kernels": kernels_part, "gates": gates_part,
    "against_llmcompressor": llmcompressor_part, "kv_formats": kv_formats_part, "compression": compression_part,
}  # fmt: skip


def renewed(text: str, results: Path) -> str:
    """README's text with its generated part renewed. Raises ValueError unless it has both markers once, in this
    order."""
    before, *rest = text.split(BEGIN)
    if len(rest) != 1 or rest[0].count(END) != 1:
        raise ValueError(
            f"bench/README.md: expected these two lines, once each, the second after the first:\n{BEGIN}\n{END}"
        )
    after = rest[0].split(END)[1]
    return f"{before}{BEGIN}\n{written(results)}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0: README has what the results say. 1, with --check: it does not."""
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if README has something else")
    options = parser.parse_args(arguments)
    text = README.read_text("utf-8")
    found = renewed(text, harness.RESULTS)
    if options.check:
        if found != text:
            print(
                "reference_impl/bench/README.md has other results than files: python -m reference_impl.bench readme",
                file=sys.stderr,
            )
        return int(found != text)
    README.write_text(found, "utf-8")
    return 0
