"""Measures the course models with the engine and writes their card (README.md) and figures (evaluation.json).

    python datasets/course_model/evaluate.py

Held-out text: files no part of which is in the training data (see corpus.py). Generated tasks: seeds that
training never used (see tasks.py). Greedy everywhere, so the figures repeat exactly on the same machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import corpus  # noqa: E402
import tasks  # noqa: E402

from reference_impl import LLM, SamplingParams  # noqa: E402
from reference_impl.bench.abilities import heads_of, is_json_object, parses  # noqa: E402
from reference_impl.features.baselines.no_cache import RecomputeAttention  # noqa: E402
from reference_impl.features.baselines.ragged import ragged_batch  # noqa: E402

DISTANCES = (16, 64, 128, 256, 512, 900)
TASKS_EACH = 60
AHEAD = {  # drafters for the target: what each is, and the program that trains it
    "eagle": ("a feature head, one layer", "feature_head.py"),
    "mtp": ("a module of multi-token prediction, begun from `eagle`", "multi_token.py"),
    "medusa": ("Medusa heads, a matrix each", "medusa_heads.py"),
}
WINDOW = 512
SHAPE_KEYS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@torch.inference_mode()
def perplexity(llm: LLM, documents: list[corpus.Document]) -> dict[str, float]:
    """exp of the mean loss over held-out tokens, in windows of 512 tokens without overlap; and bits per byte."""
    model = llm.engine.model
    attention = RecomputeAttention(model.config.head_dim**-0.5)
    end = llm.tokenizer.token_to_id("<|endoftext|>")
    stream = [i for _, text in documents for i in (*llm.encode(text), end)]
    total, count = 0.0, 0
    for first in range(0, len(stream) - WINDOW, WINDOW):
        ids = stream[first : first + WINDOW + 1]
        batch = ragged_batch([(ids[:-1], 0)], WINDOW, model.device)
        batch.logits_indices = torch.arange(WINDOW)
        logits = model(batch, None, attention).float()
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += WINDOW
    num_bytes = len(llm.tokenizer.decode(stream[: count + 1], skip_special_tokens=True).encode())
    return {"perplexity": math.exp(total / count), "bits_per_byte": total / math.log(2) / num_bytes, "tokens": count}


def answers(llm: LLM, prompts: list[str], max_tokens: int) -> list[str]:
    chats = [llm.chat_prompt([{"role": "user", "content": p}]) for p in prompts]
    return [o.text for o in llm.generate(chats, SamplingParams(max_tokens=max_tokens, temperature=0))]


def retrieval(llm: LLM, lines: list[str]) -> dict[str, float]:
    """Share of exact answers by the distance between the needle and the question, in tokens."""

    def filler(rng: random.Random, num_tokens: int) -> str:
        first, out, budget = rng.randrange(len(lines) - 200), [], num_tokens
        for line in lines[first : first + 200]:
            budget -= len(llm.encode(line)) + 1
            if budget < 0:
                break
            out.append(line)
        return "\n".join(out)

    result = {}
    for distance in DISTANCES:
        rng = random.Random(tasks.EVALUATION_SEED + distance)
        batch = [tasks.retrieval(rng, filler, distance) for _ in range(TASKS_EACH)]
        found = answers(llm, [p for p, _ in batch], 12)
        result[str(distance)] = sum(a == b for a, (_, b) in zip(found, batch, strict=True)) / TASKS_EACH
    return result


def exact_tasks(llm: LLM) -> dict[str, float]:
    rng = random.Random(tasks.EVALUATION_SEED)
    calls = [tasks.json_call(rng) for _ in range(TASKS_EACH * 2)]
    copies = [tasks.copying(rng) for _ in range(TASKS_EACH)]
    found = answers(llm, [p for p, _ in calls], 60)
    copied = answers(llm, [p for p, _ in copies], 120)
    return {
        "json_valid": sum(map(is_json_object, found)) / len(calls),
        "json_exact": sum(a == b for a, (_, b) in zip(found, calls, strict=True)) / len(calls),
        "copy_exact": sum(a == b for a, (_, b) in zip(copied, copies, strict=True)) / len(copies),
    }


def python_prompts(documents: list[corpus.Document]) -> list[str]:
    """Heads of held-out functions: the def line and the first line of the body."""
    return [head for name, text in documents if name.endswith(".py") for head in heads_of(text)]


def python(llm: LLM, documents: list[corpus.Document]) -> dict[str, float]:
    prompts = python_prompts(documents)
    outs = llm.generate(prompts, SamplingParams(max_tokens=64, temperature=0))
    return {
        "python_parses": sum(parses(p, o.text) for p, o in zip(prompts, outs, strict=True)) / len(prompts),
        "python_prompts": len(prompts),
    }


def evaluate(name: str) -> dict[str, Any]:
    llm = LLM(HERE / name, dtype="float32", kv_cache_bytes=512 * 1024**2, max_num_seqs=64)
    _, held_out = corpus.split()
    record = json.loads((HERE / name / "training.json").read_text())
    if corpus.fingerprint(held_out) != record["held_out_sha256"]:
        raise SystemExit(
            f"this Python's library is not the one the model was trained on ({record['python']}): "
            "held-out files may have been trained on, so perplexity would mean nothing"
        )
    lines = [line for _, text in held_out for line in text.splitlines() if 10 < len(line) < 90]
    return {
        "parameters": llm.engine.model.num_parameters(),
        **perplexity(llm, held_out),
        "retrieval": retrieval(llm, lines),
        **exact_tasks(llm),
        **python(llm, held_out),
        "files": {
            f.name: hashlib.sha256(f.read_bytes()).hexdigest()
            for f in sorted((HERE / name).iterdir())
            if f.suffix in (".safetensors", ".json") and f.name not in ("evaluation.json", "training.json")
        },
    }


def card(results: dict[str, dict[str, Any]]) -> str:
    records = {name: json.loads((HERE / name / "training.json").read_text()) for name in results}
    target = records["target"]
    names = list(results)

    def row(title: str, cells: list[str]) -> str:
        return f"| {title} | " + " | ".join(cells) + " |"

    def percent(key: str) -> list[str]:
        return [f"{100 * results[n][key]:.0f} %" for n in names]

    config = {n: json.loads((HERE / n / "config.json").read_text()) for n in names}
    digests = {f"{n}/{f}": digest for n in names for f, digest in results[n]["files"].items()}
    table = [
        row("", names),
        row("---", ["---"] * len(names)),
        row("parameters", [f"{results[n]['parameters'] / 1e6:.2f} M" for n in names]),
        row("layers / hidden / query heads / KV heads / head_dim", [
            " / ".join(str(config[n][key]) for key in SHAPE_KEYS) for n in names
        ]),
        row("steps, tokens", [f"{records[n]['steps']}, {records[n]['tokens'] / 1e6:.1f} M" for n in names]),
        row("final training loss (mix, nats)", [f"{records[n]['final_loss']:.3f}" for n in names]),
        row("held-out perplexity", [f"{results[n]['perplexity']:.2f}" for n in names]),
        row("held-out bits per byte", [f"{results[n]['bits_per_byte']:.3f}" for n in names]),
        *(
            row(f"retrieval, needle {d} tokens back", [f"{100 * results[n]['retrieval'][str(d)]:.0f} %" for n in names])
            for d in DISTANCES
        ),
        row("tool calls that are valid JSON", percent("json_valid")),
        row("tool calls exactly right", percent("json_exact")),
        row("copying exactly right", percent("copy_exact")),
        row("Python completions that parse", percent("python_parses")),
    ]  # fmt: skip
    for name in AHEAD:
        for file in ("config.json", "model.safetensors"):
            digests[f"{name}/{file}"] = hashlib.sha256((HERE / name / file).read_bytes()).hexdigest()
    longest = max(length for _, _, length in target["recipe"]["phases"])
    files = "\n".join(f"- `{file}` `{digest}`" for file, digest in digests.items())
    return f"""# The course models

Two small language models, trained by `train.py` in this folder, so that perplexity, acceptance rates and
quantization damage mean something without downloading anything. `target` is the model of the chapters;
`draft` is for speculative decoding and shares its tokenizer. Architecture: Qwen3 (`Qwen3ForCausalLM`).
`eagle`, `mtp` and `medusa` are no models of their own: they draft ahead from the target's hidden states, see below.

They continue Python source, answer four kinds of generated questions in a chat format, and know nothing else.
Training rows were at most {longest:,} tokens long: the config allows 2,048 positions, the later ones untrained.

{chr(10).join(table)}

Generated by `evaluate.py`; greedy, float32; retrieval over {TASKS_EACH} tasks a distance, tool calls over
{TASKS_EACH * 2}, copying over {TASKS_EACH}, Python over {results["target"]["python_prompts"]} heads of held-out
functions (a completion is cut after its last whole line, or where the function ends).

![loss of the target](target/loss.png)

## Drafters

How often a draft token is what the target says, where all before it were, over 32 rows of the target's own greedy
text, which no alignment sees and which repeats itself: before and after alignment, which is training on text of the
target's own, behind that on the training rows.

{chr(10).join(_drafts())}

`mtp` began from `eagle` as it is shipped, which was aligned already: its few steps made it right no more often.

## Data

The standard library of Python {target["python"]} (its test packages left out), the docstrings of modules written
in C, the language reference in `pydoc_data.topics`: {target["training_documents"]} documents for training,
SHA-256 over names and texts `{target["training_sha256"]}`.
Held out by the hash of the file's name: {len(target["held_out_documents"])} documents,
`{target["held_out_sha256"]}`; a held-out file that shares eight lines in a row with a training file is dropped.
Mixed with generated tasks: retrieval of a value at a distance, JSON tool calls, copying, and what a function's
docstring says. Tasks for evaluation come from seeds that training never uses.

The library is under the PSF licence; see the licence of your Python.

## Files

{files}
"""


def _drafts() -> list[str]:
    """Rows of a table: of each drafter, how it was trained, and how often it is right."""
    records = {name: json.loads((HERE / name / "training.json").read_text()) for name in AHEAD}
    ahead = max(record["recipe"]["ahead"] for record in records.values())
    table = [
        f"| | parameters | steps on rows, own text | draft token | {' | '.join(str(n + 1) for n in range(ahead))} |",
        f"| --- | --- | --- | --- |{' --- |' * ahead}",
    ]
    for name, record in records.items():
        right = record["guess_right_where_those_before_were"]
        size, steps = f"{record['parameters'] / 1e6:.2f} M", record["steps"]
        first = f"`{name}`: {AHEAD[name][0]} (`{AHEAD[name][1]}`) | {size} | {steps['train']}, {steps['align']}"
        for start, when in ((first, "before_alignment"), (" | | ", "after")):
            cells = " | ".join(f"{100 * rate:.0f} %" for rate in right[when])
            table.append(f"| {start} | {when.replace('_', ' ')} | {cells} |")
    return table


def main() -> None:
    results = {name: evaluate(name) for name in ("target", "draft")}
    for name, result in results.items():
        (HERE / name / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    (HERE / "README.md").write_text(card(results))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
