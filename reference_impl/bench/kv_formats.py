"""What a KV cache of fewer bits costs the course model: a fact found again by its depth, and KL by distance, recorded.

    python -m reference_impl.bench kv_formats               # about 10 minutes; renews the record
    python -m reference_impl.bench kv_formats --each 5      # fewer needles at each depth

Needles are asked of the engine, all at once, in batches of chunked prompts and rows that decode, with the prefix cache
and n-gram drafts on, and swapping where blocks run out. The answer is right if it is the code and nothing else. The
same needles for all formats, so figures of two formats are paired. KL is that of `inferlab eval-kv`, in windows of a
text that the course model was not trained on, as the fillers are.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.bench import harness, kv_quality
from reference_impl.bench.quality import bootstrap, windows_of
from reference_impl.interfaces import SamplingParams

FORMATS = ("auto", "fp8", "int8", "int4")
DEPTHS = (16, 64, 256, 512, 900)  # tokens between needle and question
EACH, EDGES, WINDOWS, LENGTH, BLOCK_SIZE = 24, (0, 64, 256), 8, 512, 16
ON: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_num_batched_tokens": 256,
    "prefix_cache": "hash", "speculative": "ngram", "num_drafts": 3, "preemption": "swap", "swap_bytes": 1 << 28,
    "num_blocks": 260,
}  # fmt: skip


def needles(model: str, each: int, depths: Sequence[int] = DEPTHS) -> dict[str, Any]:
    """{format: {"found": {depth: [whether each needle was]}, "preempted": how often a request was}}."""
    found: dict[str, Any] = {}
    for name in FORMATS:
        llm = LLM(course_model(model), kv_dtype=name, **ON)
        tokenizer: Any = llm.tokenizer
        filler, rows = llm.encode((harness.TEXTS / "judged.txt").read_text("utf-8")), {}
        for depth in depths:
            rng = random.Random(depth)
            cases = [kv_quality.needle(llm, filler, depth, rng) for _ in range(each)]
            said = llm.generate([prompt for prompt, _ in cases], SamplingParams(max_tokens=12, temperature=0))
            rows[str(depth)] = [
                output.text.strip() == tokenizer.decode(answer) for output, (_, answer) in zip(said, cases, strict=True)
            ]
            print(f"{name}, {depth} back: {sum(rows[str(depth)])} of {each} found", flush=True)
        steps = llm.engine.trace.steps()
        found[name] = {
            "found": rows,
            "preempted": sum(len(step.preempted) for step in steps),
            "swapped_in": sum(bool(step.transfers.swap_in) for step in steps),
            "guesses_kept": sum(n > 1 for step in steps for n in step.num_new_tokens),
        }
    return found


def distances(model: str, windows: int = WINDOWS, length: int = LENGTH, edges: Sequence[int] = EDGES) -> dict[str, Any]:
    """{format: {band: {"kl", "agreement"}}}, as `kv_quality.by_distance` has them."""
    llm = LLM(course_model(model), dtype="float32", device="cpu", num_blocks=8)
    ids = llm.encode((harness.TEXTS / "judged.txt").read_text("utf-8"))
    found = kv_quality.by_distance(
        llm.engine.model, windows_of(ids, length, windows), FORMATS[1:], edges, BLOCK_SIZE
    )  # fmt: skip
    return {n: {b: {m: asdict(e) for m, e in row.items()} for b, row in rows.items()} for n, rows in found.items()}


def measured(model: str, each: int) -> dict[str, Any]:
    head_dim = LLM(course_model(model), device="cpu", num_blocks=8).engine.model.config.head_dim
    bits = {n: 32.0 if n == "auto" else kv_quality.bits_per_value(n, head_dim, BLOCK_SIZE) for n in FORMATS}
    about = {"model": model, "each": each, "windows": WINDOWS, "length": LENGTH, "stamp": harness.stamp()}
    return about | {"bits": bits, "needles": needles(model, each), "distances": distances(model)}


def markdown(record: dict[str, Any]) -> str:
    depths, bands = list(record["needles"]["auto"]["found"]), list(record["distances"]["int4"])
    head = ["cache", "bits a value", *(f"needle {d} back" for d in depths), *(f"KL, {b}" for b in bands)]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name in FORMATS:
        hits = record["needles"][name]["found"]
        shares = [f"{100 * sum(hits[d]) / len(hits[d]):.0f} %" for d in depths]
        row = record["distances"].get(name)
        kl = ["-"] * len(bands) if row is None else [f"{row[b]['kl']['value']:.6f}" for b in bands]
        cells = ["float32" if name == "auto" else name, f"{record['bits'][name]:.2f}", *shares, *kl]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def lost(record: dict[str, Any], name: str) -> str:
    """A text: by how much of all needles more are found than in float32, with the middle 95 % of drawing needles
    anew."""
    pairs = ((record["needles"][n]["found"][d] for n in (name, "auto")) for d in record["needles"][name]["found"])
    each = [float(a) - float(b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    e = bootstrap(each)
    return f"{name} {100 * e.value:+.1f} ({100 * e.low:+.1f} to {100 * e.high:+.1f})"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.bench kv_formats", description=__doc__)
    parser.add_argument("--model", default="target", help="a course model: target or draft")
    parser.add_argument("--each", type=int, default=EACH, help="needles at each depth")
    options = parser.parse_args(arguments)
    record = measured(options.model, options.each)
    print(markdown(record))
    print(f"wrote {harness.save('kv_formats', record)}")
    return 0
