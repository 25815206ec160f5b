"""The benches by name: each is `inferlab bench NAME` and, from the source tree with nothing installed, `python -m
reference_impl.bench NAME`. `main(arguments)` of the module of that name runs it and gives an exit status."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name -> (what it measures, arguments of an example).
BENCHES = {
    "serve": ("A load on an OpenAI-compatible server: percentiles, goodput, failures.", "--workload chat --rate 4"),
    "cpu": ("The engine against transformers on the course model; its scheduler, cache and host work.", "--rounds 7"),
    "cpu_llama": ("A model of 135M beside llama.cpp, which has an environment of its own.", "--rounds 5"),
    "host": ("What the host does in a step, around a model that computes nothing.", "--rounds 7"),
    "overhead": ("What the HTTP server costs over the engine, at 32 streams.", "--rounds 7"),
    "speculative": ("Tokens proposed ahead against plain decoding, beside what the formula gives.", "--rounds 5"),
    "adaptive": ("What adaptive speculation costs where none pays, against plain decoding.", "--rounds 50"),
    "parallel": ("A model on two ranks beside one process; all-reduces beside gloo.", "--rounds 5"),
    "disaggregation": ("Prompts in one engine, answers in another: pages, first tokens, gaps.", "--rounds 5"),
    "coupling": ("How many of a draft's tokens a seeded request keeps, by what both draw with.", "--num 32"),
    "draft_pair": ("A target and a draft model of your own: acceptance, costs, speed-up.", "--batch 4"),
    "gpu": ("The engine on this GPU against its limits, transformers and the goals.", "--only 'one stream'"),
    "kernels": ("Every Triton kernel on this GPU against its limit and torch's own.", "--only decode"),
    "gates": ("How far each quantization method moves a course model, recorded.", "--only int8,gptq"),
    "compression": ("What pruning and low-rank factors cost the course model.", ""),
    "kv_formats": ("What a KV cache of fewer bits costs the course model.", ""),
    "against_llmcompressor": ("GPTQ and AWQ beside llmcompressor's, which has an environment of its own.", ""),
    "awq_throughput": ("A model of your own in BF16 and in INT4 by AWQ: foretold, then measured.", "--model FOLDER"),
    "simulator": ("The simulated GPU: calibrated, beside the real engine, and a fleet.", "fleet --num 10000"),
    "under_load": ("How waiting grows with the load on a simulated GPU, recorded.", ""),
    "readme": ("No bench: bench/README.md gets the newest results.", "--check"),
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a bench and returns its exit status; --help also gives an example."""
    bench = importlib.import_module(f"reference_impl.bench.{name}")
    try:
        return int(bench.main(list(arguments)))
    finally:
        if {"-h", "--help"} & set(arguments):
            print(f"\nExample: inferlab bench {name} {BENCHES[name][1]}".rstrip())


def main() -> int:
    """Runs `python -m reference_impl.bench`; returns the exit status."""
    name, *arguments = sys.argv[1:] or [""]
    if name in BENCHES:
        return run(name, arguments)
    lines = "\n".join(f"    {known:22} {what}" for known, (what, _) in BENCHES.items())
    asked = name in ("-h", "--help")
    said = f"python -m reference_impl.bench NAME [--help], where NAME is one of\n{lines}"
    print(said if asked else f"expected: {said}", file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
