"""`inferlab bench cpu_llama`: llama.cpp beside ours, what a laptop's user would take instead.

The model is that of cpu_quantized.py: SmolLM-135M's shape with random weights, converted from the same file by the
package gguf. Same prompts, same number of greedy tokens, as many threads as torch has, interleaved rounds: one stream,
and 16 requests in a batch. Ours in bfloat16, int8 and int4 (and float32 in the batch) stand beside llama.cpp's f16,
q8_0 and q4_0; one stream also with attention="compiled". What a token reads differs a little: our int8 leaves lm_head
in 16 bits, q8_0 does not; a q4_0 file that llama.cpp's own tool writes has lm_head in 6 bits, this one in 4, as ours.

What is verified: on a small model whose attention is sharp, llama.cpp's logits are those of `transformers`, so the
rows of q and k are in the order that it wants (random weights of the usual size attend to everything alike, and would
not show it). Our texts and those in f16 are equal, or part at a near-tie. Each token of a quantized model is the first
choice, or a near-tie with it, of a float32 model with the same dequantized weights.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.bench import cpu_quantized, harness
from reference_impl.bench.cpu_quantized import KINDS, NEW_TOKENS, PROMPT
from reference_impl.bench.peer import Transformers, agreement
from reference_impl.bench.peer_process import PeerFailed, PeerProcess
from reference_impl.core.decoder import Decoder
from reference_impl.interfaces import SamplingParams

VARIABLE = "INFERLAB_LLAMA_CPP"
WORKER = Path(__file__).with_name("llama_worker.py")
HOW = (
    "python -m venv FOLDER; FOLDER/bin/pip install llama-cpp-python gguf (compiles llama.cpp: a C++ compiler and some "
    f"ten minutes); then {VARIABLE}=FOLDER before the same command"
)
BESIDE = {"bfloat16": "f16", "int8": "q8_0", "int4": "q4_0"}
COMPILED = ", compiled"  # behind the name of a model whose steps of one token are: attention="compiled"
ONE_STREAM = BESIDE | {f"{name}{COMPILED}": kind for name, kind in BESIDE.items()}
IN_BATCH = {"float32": "f16", **BESIDE}
_LEAST = {"bfloat16": 1.7, "int8": 2.2, "int4": 2.2}
GOALS = {
    "one stream": {name: _LEAST[name.removesuffix(COMPILED)] for name in ONE_STREAM},
    "batch": {"float32": 1 / 0.75},
}
STREAMS = 16
SHARP = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
FAR = 0.02  # of the largest logit; seen with llama-cpp-python 0.3.36: 0.0013, and 1.16 with those rows as they were


class LlamaCpp(PeerProcess):
    """Models of llama.cpp by name, in a process with `llama_worker.Worker`."""

    def generate(self, name: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy tokens for each prompt; all prompts in each step."""
        texts: list[list[int]] = self.ask("generate", name=name, prompts=prompts, new_tokens=new_tokens)
        return texts

    def logits(self, name: str, tokens: list[int]) -> torch.Tensor:
        """Logits after these tokens, [vocab_size] float32."""
        return torch.tensor(self.ask("logits", name=name, tokens=tokens))


def prompts_of(streams: int) -> list[list[int]]:
    """Prompts as long as PROMPT, which is the first; all are different."""
    return [[(token + 37 * i) % 4000 + 5 for token in PROMPT] if i else PROMPT for i in range(streams)]


def run(rounds: int, new_tokens: int = NEW_TOKENS, streams: int = STREAMS, **changes: Any) -> dict[str, Any]:
    """Measures llama.cpp beside ours; about four minutes on two cores. changes: of the shape. {"not_measured": why}
    without llama.cpp."""
    try:
        peer, versions = LlamaCpp.started("llama.cpp", VARIABLE, WORKER)
    except PeerFailed as missing:
        return {"not_measured": f"{missing}; to have it: {HOW}"}
    with peer, tempfile.TemporaryDirectory() as folder:
        try:
            return {"peer": versions, **_measured(peer, Path(folder), rounds, new_tokens, streams, changes)}
        except PeerFailed as failed:
            return {"not_measured": str(failed)}


def _measured(
    peer: LlamaCpp, folder: Path, rounds: int, new_tokens: int, streams: int, changes: dict[str, Any]
) -> dict[str, Any]:
    sharp = check_conversion(peer, folder / "sharp")
    source = folder / "model"
    cpu_quantized.make_model(source, **changes)
    bytes_of = {kind: load(peer, source, kind) for kind in BESIDE.values()}
    ours = {
        name: LLM(source, dtype="float32" if name == "float32" else "bfloat16", device="cpu",
                  quantization=KINDS.get(name.removesuffix(COMPILED), "none"), prefix_cache="off", max_model_len=256,
                  attention="compiled" if name.endswith(COMPILED) else "auto")
        for name in IN_BATCH | ONE_STREAM
    }  # fmt: skip
    result: dict[str, Any] = {
        "shape": {**cpu_quantized.SHAPE, **changes}, "threads": torch.get_num_threads(),
        "parameters": ours["bfloat16"].engine.model.num_parameters(), "prompt_tokens": len(PROMPT),
        "new_tokens": new_tokens, "streams": streams, "megabytes": {k: b / 1e6 for k, b in bytes_of.items()},
    }  # fmt: skip
    texts: dict[str, dict[str, list[list[int]]]] = {}
    for case, pairs, count in (("one stream", ONE_STREAM, 1), ("batch", IN_BATCH, streams)):
        texts[case] = {}
        candidates = _candidates(peer, {name: ours[name] for name in pairs}, prompts_of(count), new_tokens, texts[case])
        seconds = harness.interleave(candidates, rounds)
        result[case] = {
            "tokens_per_second": {n: harness.spread([count * new_tokens / t for t in s]) for n, s in seconds.items()},
            "times_as_long": {name: harness.ratio(seconds[name], seconds[kind]) for name, kind in pairs.items()},
        }
    models = {name: llm.engine.model for name, llm in ours.items() if KINDS.get(name, "none") != "none"}
    del ours
    gc.collect()
    return {**result, "verified": {"sharp_logits_apart": sharp, **_verified(source, models, texts)}}


def load(peer: LlamaCpp, source: Path, kind: str) -> int:
    """Converts and loads a model under the name of the kind; the file stays beside the folder. Returns its bytes."""
    file = gguf_of(source, kind)
    written: dict[str, int] = peer.ask("convert", folder=str(source), file=str(file), kind=kind)
    peer.ask("load", name=kind, file=str(file), threads=torch.get_num_threads(), length=256)
    return written["bytes"]


def gguf_of(source: Path, kind: str) -> Path:
    return source.with_suffix(f".{kind}.gguf")


def check_conversion(peer: LlamaCpp, folder: Path) -> float:
    """How far llama.cpp's logits of a small model are from those of `transformers` in float32, as a share of the
    largest. Raises RuntimeError if far."""
    cpu_quantized.make_model(folder, **SHARP)
    load(peer, folder, "f16")
    tokens = [7 * i % 500 for i in range(24)]
    expected, found = Transformers("float32", folder).next_logits(tokens), peer.logits("f16", tokens)
    apart = float((expected - found).abs().max() / expected.abs().max())
    if not apart < FAR:
        raise RuntimeError(f"llama.cpp's logits of the converted model are {apart:.3f} of the largest away: expected 0")
    return apart


def _candidates(
    peer: LlamaCpp,
    ours: dict[str, LLM],
    prompts: list[list[int]],
    new_tokens: int,
    texts: dict[str, list[list[int]]],
) -> dict[str, Callable[[], object]]:
    params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)

    def theirs(kind: str) -> None:
        texts[kind] = peer.generate(kind, prompts, new_tokens)

    def generated(name: str) -> None:
        texts[name] = [output.token_ids for output in ours[name].generate(prompts, params)]

    return {**{name: partial(generated, name) for name in ours}, **{k: partial(theirs, k) for k in BESIDE.values()}}


def _verified(source: Path, models: dict[str, Decoder], texts: dict[str, dict[str, list[list[int]]]]) -> dict[str, Any]:
    """What was verified of the texts. models: ours that are quantized. Raises RuntimeError for a wrong text."""
    one, batch = texts["one stream"], texts["batch"]
    prompts = prompts_of(len(batch["f16"]))
    judge = Transformers("float32", source)
    found: dict[str, Any] = {
        f"{name}, one stream": agreement(judge, [PROMPT], one[name], one["f16"])
        for name in ("bfloat16", f"bfloat16{COMPILED}") if name in one
    }  # fmt: skip
    for name in ("float32", "bfloat16"):
        found[f"{name}, batch"] = agreement(judge, prompts, batch[name], batch["f16"])
    del judge
    length = len(PROMPT) + len(one["f16"][0])
    exact: dict[str, Callable[[], Decoder]] = {
        **{name: partial(cpu_quantized.dequantized, source, model, length) for name, model in models.items()},
        **{kind: partial(load_model, gguf_of(source, kind), torch.float32) for kind in ("q8_0", "q4_0")},
    }
    for name, make in exact.items():
        rows = [(PROMPT, one[n][0]) for n in (name, f"{name}{COMPILED}") if n in one]
        rows += zip(prompts, batch[name], strict=True)
        found[name] = {"largest_gap_to_first_choice": cpu_quantized.largest_gap(make(), rows)}
    return found


def rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, tuple[float, float], dict[str, float], float | None]]:
    """(case, our model, llama.cpp's, tokens/s of both, how many times as long ours takes, at most so many times)."""
    for case, pairs in (("one stream", ONE_STREAM), ("batch", IN_BATCH)):
        words = case if case == "one stream" else f"{result['streams']} requests"
        speed, times = result[case]["tokens_per_second"], result[case]["times_as_long"]
        for name, kind in pairs.items():
            both = speed[name]["median"], speed[kind]["median"]
            yield words, name, kind, both, times[name], GOALS[case].get(name)


def markdown(result: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        f"| {result['parameters'] / 1e6:.0f}M random weights, beside llama.cpp | ours, tokens/s | llama.cpp, tokens/s "
        "| times its time | range | goal |",
        "|---|---:|---:|---:|---|---|",
    ]
    for case, name, kind, (ours, theirs), times, goal in rows(result):
        aim = f"{goal:.2f}x" if goal else "-"
        lines.append(f"| {case}, {name} beside {kind} | {ours:.1f} | {theirs:.1f} | {harness.cells(times)} | {aim} |")
    lines += [
        "",
        f"llama.cpp as llama-cpp-python {result['peer']['llama-cpp-python']} has it, {result['threads']} threads in "
        f"both; {result['prompt_tokens']} + {result['new_tokens']} tokens a request, reading the prompt included.",
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status, 1 where llama.cpp is missing."""

    def measured(rounds: int) -> dict[str, Any]:
        return {"stamp": harness.stamp(), "rounds": rounds, **run(rounds)}

    return harness.in_rounds("cpu_llama", 3, measured, lambda result: [markdown(result)], arguments)
