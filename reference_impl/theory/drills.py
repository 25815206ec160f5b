"""Random exercises about one model on one machine, with the right answers and a checker that names the likely mistake.

A drill is a pure function of its seed, so a quiz, a lab and a test can all talk about 'drill 7'.
The conventions are printed in each prompt: decimal units, 2 FLOP per weight and token, dense peaks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import Device, device
from reference_impl.theory.model_shapes import ModelShape
from reference_impl.theory.units import GB, GiB, KiB


@dataclass(frozen=True)
class Question:
    """One quantity to compute. `mistakes` maps a known wrong way of computing it to the number it gives."""

    key: str
    prompt: str
    unit: str
    answer: float
    formula: str
    mistakes: Mapping[str, float]


@dataclass(frozen=True)
class Drill:
    """A model, a machine, a workload, and the questions about them."""

    seed: int
    shape: ModelShape
    device: Device
    num_devices: int
    prompt_tokens: int
    context_tokens: int
    questions: tuple[Question, ...]

    def question(self, key: str) -> Question:
        for question in self.questions:
            if question.key == key:
                return question
        raise KeyError(f"unknown question {key!r}; expected one of {[q.key for q in self.questions]}")

    def describe(self) -> str:
        """The set-up as text for a reader."""
        s = self.shape
        return (
            f"Model: {s.layers} layers, hidden size {s.hidden_size}, {s.num_heads} query heads, "
            f"{s.num_kv_heads} KV heads, head dim {s.head_dim}, {s.num_params / 1e9:.2f} billion parameters, of which "
            f"each token uses {s.linear_params / 1e9:.2f} billion, 2 bytes per value.\n"
            f"Machine: {self.num_devices} x {self.device.sku}, each {self.device.peak() / 1e12:.0f} TFLOP/s dense, "
            f"{self.device.bandwidth / 1e12:.2f} TB/s, {self.device.capacity / GB:.0f} GB.\n"
            f"Workload: prompts of {self.prompt_tokens} tokens, contexts of {self.context_tokens} tokens."
        )


@dataclass(frozen=True)
class Verdict:
    """Result of a check: `message` says what was expected and, where it can, which mistake fits the answer given."""

    correct: bool
    expected: float
    message: str


def make_drill(seed: int) -> Drill:
    """The drill number `seed`: a plausible dense model and the smallest of 1, 2, 4, 8 devices that serves it."""
    rng = random.Random(seed)
    layers, num_heads = rng.choice(((24, 16), (28, 24), (32, 32), (40, 40), (48, 48), (64, 64), (80, 64), (96, 96)))
    head_dim = rng.choice((64, 128, 128, 128))
    num_kv_heads = rng.choice([n for n in (1, 2, 4, 8) if num_heads % n == 0])
    # Mostly heads * head_dim = hidden size, sometimes not: the formula needs head_dim itself.
    hidden_size = num_heads * head_dim * rng.choice((4, 4, 4, 3, 2)) // 4
    shape = ModelShape(
        name=f"drill-{seed}",
        layers=layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=hidden_size * rng.choice((3, 4)),
        vocab_size=rng.choice((32000, 128256, 151936)),
        source="drawn at random",
    )
    machine = device(rng.choice(("A100-80GB", "H100", "H200", "MI300X")))
    prompt_tokens = rng.choice((512, 1024, 2048, 4096, 8192))
    context_tokens = prompt_tokens + rng.choice((256, 512, 1024, 2048))
    weights = float(kv_cache.weight_bytes(shape))
    one_request = float(kv_cache.cache_bytes(shape, context_tokens))
    num_devices = next(n for n in (1, 2, 4, 8, 16) if 0.9 * n * machine.capacity > weights + 4 * one_request)
    # A mistake that lands near the right answer cannot be told from it, so it is not offered as an explanation.
    questions = tuple(
        replace(q, mistakes={name: value for name, value in q.mistakes.items() if not _close(value, q.answer, 0.1)})
        for q in _questions(shape, machine, num_devices, prompt_tokens, context_tokens)
    )
    return Drill(seed, shape, machine, num_devices, prompt_tokens, context_tokens, questions)


def check(drill: Drill, key: str, given: float, tolerance: float = 0.02) -> Verdict:
    """Compare `given` with the right answer of question `key`, in the question's unit, to a relative tolerance."""
    question = drill.question(key)
    if _close(given, question.answer, tolerance):
        return Verdict(True, question.answer, f"right: {question.answer:.4g} {question.unit}")
    hint = ""
    for decimal, ratio in (("KB", 1000 / KiB), ("GB", GB / GiB)):
        if question.unit == decimal and _close(given, question.answer * ratio, 0.002):
            hint = f" Your number is binary ({decimal[0]}iB); the question asks for decimal {decimal}."
    # The nearest known mistake, if one fits.
    fitting = [
        (abs(math.log(value / given)), name)
        for name, value in question.mistakes.items()
        if given > 0 and value > 0 and _close(given, value, tolerance)
    ]
    if fitting:
        hint = f" Your number is what you get by {min(fitting)[1]}."
    return Verdict(
        False,
        question.answer,
        f"expected {question.answer:.4g} {question.unit} within {tolerance:.0%}, got {given:.4g}: "
        f"{question.formula}.{hint}",
    )


def _questions(
    shape: ModelShape, machine: Device, num_devices: int, prompt_tokens: int, context_tokens: int
) -> tuple[Question, ...]:
    group = shape.num_heads // shape.num_kv_heads
    per_token = float(kv_cache.bytes_per_token(shape))
    weights, read = float(kv_cache.weight_bytes(shape)), float(kv_cache.read_bytes(shape))
    memory = num_devices * machine.capacity
    prefill = float(latency.prefill_flops(shape, prompt_tokens))
    decode = float(latency.decode_flops(shape, context_tokens))
    linear = float(latency.linear_flops(shape.linear_params, 1))
    bandwidth = num_devices * machine.bandwidth
    floor = (read + context_tokens * per_token) / bandwidth
    users = float(kv_cache.concurrent_requests(memory, weights, context_tokens, per_token))
    return (
        Question(
            "kv_bytes_per_token", "How many KB (1000 bytes) does one token add to the KV cache?", "KB",
            per_token / 1000, "2 * layers * KV heads * head dim * 2 bytes",
            {
                "counting query heads instead of KV heads": group * per_token / 1000,
                "forgetting that keys AND values are kept": per_token / 2 / 1000,
                "leaving out the layers": per_token / shape.layers / 1000,
                "using hidden size instead of KV heads times head dim":
                    4 * shape.layers * shape.hidden_size / 1000,
            },
        ),
        Question(
            "kv_bytes", f"How many GB does the cache of one request of {context_tokens} tokens take?", "GB",
            context_tokens * per_token / GB, "tokens * bytes per token",
            {
                "counting query heads instead of KV heads": group * context_tokens * per_token / GB,
                "leaving out the layers": context_tokens * per_token / shape.layers / GB,
            },
        ),
        Question(
            "prefill_flops", f"How many TFLOP does a prefill of {prompt_tokens} tokens take, attention included?",
            "TFLOP", prefill / 1e12, "2 * weights * tokens + 4 * heads * head dim * layers * tokens * (tokens + 1) / 2",
            {
                "leaving out attention": linear * prompt_tokens / 1e12,
                "counting one operation per weight": (prefill - linear * prompt_tokens / 2) / 1e12,
                "counting the masked half of attention": (2 * prefill - linear * prompt_tokens) / 1e12,
            },
        ),
        Question(
            "decode_flops", f"How many GFLOP does one decode step at a context of {context_tokens} take?", "GFLOP",
            decode / 1e9, "2 * weights + 4 * heads * head dim * layers * context",
            {"leaving out attention": linear / 1e9, "counting one operation per weight": (decode - linear / 2) / 1e9},
        ),
        Question(
            "decode_floor", f"What is the floor in ms of one decode step, one request of {context_tokens} tokens, "
            "weights and cache spread over all devices, communication left out?", "ms", floor * 1e3,
            "(bytes of the weights a token uses + cache bytes) / (devices * bandwidth)",
            {
                "leaving out the cache": read / bandwidth * 1e3,
                "forgetting that every device reads its own share": floor * num_devices * 1e3,
                "counting the whole input embedding, of which a step reads one row":
                    (weights + context_tokens * per_token) / bandwidth * 1e3,
                "counting one byte per weight": (read / 2 + context_tokens * per_token) / bandwidth * 1e3,
            },
        ),
        Question(
            "concurrent_requests",
            f"How many requests of {context_tokens} tokens fit at once, using 90 % of the memory?",
            "requests", users, "floor((0.9 * memory - weights) / cache bytes of one request)",
            {
                "using all of the memory": math.floor((memory - weights) / (context_tokens * per_token)),
                "leaving out the weights": math.floor(0.9 * memory / (context_tokens * per_token)),
                "counting query heads instead of KV heads": float(math.floor(users / group)),
            },
        ),
    )  # fmt: skip


def _close(given: float, expected: float, tolerance: float) -> bool:
    return abs(given - expected) <= tolerance * abs(expected)
