"""One stream of a model with the shape of SmolLM-135M and random weights: bfloat16, int8 and int4 of ours against
`transformers` in bfloat16, with either of its caches.

Texts are verified: in bfloat16 they are those of `transformers`, or diverge at a near-tie. Quantized ones cannot be
equal. There each token has to be the first choice, or a near-tie with it, of a float32 model with the dequantized
weights; so what is timed computes the right thing, however rounding changes the choices of a random model.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reference_impl.assembly.linear_methods import Quantization
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import build_model
from reference_impl.bench import harness
from reference_impl.bench.peer import CACHES, NEAR_TIE, Transformers, agreement
from reference_impl.bench.quality import logits
from reference_impl.core.decoder import Decoder
from reference_impl.features.cpu.default import default_method
from reference_impl.features.cpu.operators import HeadCopy
from reference_impl.interfaces import SamplingParams
from reference_impl.models.config_json import read_model_config
from reference_impl.models.loader import destinations, fill, weight_files
from reference_impl.models.quantization.cpu import CpuInt4
from reference_impl.models.quantization.methods import Dequantized, Quantized

SHAPE = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, Quantization] = {"bfloat16": "none", "int8": "int8", "int4": "int4"}
PROMPT = [(7 * i) % 4000 + 5 for i in range(16)]
NEW_TOKENS = 32


def make_model(folder: str | Path, **changes: Any) -> None:
    """Saves a model in bfloat16, as `transformers` saves its own; the same weights every time."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, **changes})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def run(rounds: int, new_tokens: int = NEW_TOKENS, **changes: Any) -> dict[str, Any]:
    """Measures one stream; at most two minutes on two cores. changes: of the shape."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, **changes)
        peer = Transformers("bfloat16", folder)
        ours = {
            name: LLM(folder, dtype="bfloat16", device="cpu", quantization=kind, prefix_cache="off", max_model_len=256)
            for name, kind in KINDS.items()
        }
        texts: dict[str, list[int]] = {}
        seconds = harness.interleave(_candidates(peer, ours, new_tokens, texts), rounds)
        verified: dict[str, Any] = {
            name: agreement(peer, [PROMPT], [texts["bfloat16"]], [texts[name]]) for name in CACHES
        }
        models = {name: llm.engine.model for name, llm in ours.items()}
        del peer, ours
        gc.collect()
        for name in ("int8", "int4"):
            verified[name] = {"largest_gap_to_first_choice": check_choices(Path(folder), models[name], texts[name])}
    best = min(CACHES, key=lambda cache: statistics.median(seconds[cache]))
    return {
        "shape": {**SHAPE, **changes},
        "parameters": models["bfloat16"].num_parameters(),
        "prompt_tokens": len(PROMPT),
        "new_tokens": new_tokens,
        "peer_cache": best,
        "milliseconds_per_token": {n: harness.spread([1e3 * t / new_tokens for t in s]) for n, s in seconds.items()},
        "faster_than_transformers_bfloat16": {name: harness.ratio(seconds[best], seconds[name]) for name in KINDS},
        "faster_than_our_bfloat16": {n: harness.ratio(seconds["bfloat16"], seconds[n]) for n in ("int8", "int4")},
        "weight_megabytes_per_step": {name: weight_bytes(model) / 1e6 for name, model in models.items()},
        "verified": verified,
    }


def _candidates(
    peer: Transformers, ours: dict[str, LLM], new_tokens: int, texts: dict[str, list[int]]
) -> dict[str, Callable[[], object]]:
    def theirs(cache: str) -> None:
        texts[cache] = peer.padded([PROMPT], [new_tokens], cache)[0]

    def generated(name: str) -> None:
        params = SamplingParams(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        texts[name] = ours[name].generate([PROMPT], params)[0].token_ids

    return {**{c: partial(theirs, c) for c in CACHES}, **{name: partial(generated, name) for name in ours}}


def weight_bytes(model: Decoder) -> int:
    """Bytes of weights that a decoding step reads: linear layers and lm_head; not a row of the embedding, and norms."""
    head = model.head.weight_bytes() if isinstance(model.head, HeadCopy) else model.embedding.nbytes
    return head + sum(linear.weight_bytes() for linear in model.linears())


def check_choices(folder: Path, model: Decoder, text: list[int]) -> float:
    """The `largest_gap` of this text after PROMPT, in a float32 model with the dequantized weights of `model`."""
    return largest_gap(dequantized(folder, model, len(PROMPT) + len(text)), [(PROMPT, text)])


@torch.inference_mode()
def dequantized(folder: Path, model: Decoder, length: int) -> Decoder:
    """A float32 model, for `length` tokens, whose weights are those of `model`, which was quantized from `folder`."""
    cpu, method = torch.device("cpu"), model.linears()[0].method
    assert isinstance(method, Quantized)
    exact = Dequantized(method, default_method(torch.float32, cpu))
    twin = build_model(read_model_config(folder), torch.float32, cpu, length, linear_method=exact)
    fill(twin, destinations(twin), weight_files(folder))
    for linear in twin.linears():
        linear.method.finish(linear.params)
    if isinstance(method, CpuInt4):  # then a tied lm_head is quantized, too
        twin.head = HeadCopy(exact)
    return twin


def largest_gap(exact: Decoder, texts: Sequence[tuple[list[int], list[int]]]) -> float:
    """How far a token's logit is below the first choice's in `exact` at most, as a share of the largest logit. texts:
    (prompt, the tokens after it). Raises RuntimeError if that is no near-tie."""
    gap = 0.0
    for prompt, text in texts:
        found = logits(exact, [*prompt, *text][:-1], len(prompt) - 1)
        chosen = found.gather(1, torch.tensor(text)[:, None])[:, 0]
        gap = max(gap, float(((found.amax(1) - chosen) / found.abs().amax(1)).max()))
    if gap > NEAR_TIE:
        raise RuntimeError(f"a token is {gap:.3f} of the largest logit behind the first choice: not a near-tie")
    return gap


def markdown(result: dict[str, Any]) -> str:
    """The table in Markdown: one stream, ours in 16, 8 and 4 bits."""
    own, size = result["faster_than_our_bfloat16"], result["weight_megabytes_per_step"]
    lines = [
        f"| one stream, {result['parameters'] / 1e6:.0f}M random weights | times `transformers` bfloat16 | range | "
        "times our bfloat16 | range | MB of weights a token |",
        "|---|---|---|---|---|---|",
    ]
    for name, r in result["faster_than_transformers_bfloat16"].items():
        cells = [harness.cells(r), harness.cells(own[name]) if name in own else "- | -", f"{size[name]:.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)
