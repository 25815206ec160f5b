"""Speculative decoding against plain decoding: the same requests, model and kernels, with and without drafts.

With k drafts a step gives E tokens, takes v(k) times as long as one without, and the proposer takes c for each of them,
all in steps without drafts: so the text comes E / (v(k) + k c) times as fast (Leviathan et al. 2023, who take v(k) for
1; it is not). E, v and c are measured in the run that is timed, with a fixed k and with what the engine chooses. c of a
draft model holds all that it computes, which is more than its drafts: it computes the step's tokens, too.

The formula is of a step in which all requests decode. So beside the speed-up of the whole call stands that of such
steps alone, by the clock, with what is done between them. The whole call also has the prompts, and the time in which
some requests are at their end and others are not: with drafts they end at different steps.

Workloads: "repeats" is a file that is written again with one name changed, so that most of it stands in the prompt;
"code" are functions to be continued, in which little repeats.

Beside them `transformers`, with the same target and draft model: its plain and its assisted generation, one request.
All in bfloat16, as the course models are stored. Texts are compared: where a step of other rows rounds otherwise, the
two tokens must be a near-tie.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.outputs import RequestOutput
from reference_impl.bench import harness
from reference_impl.bench.peer import Transformers
from reference_impl.interfaces import SamplingParams
from reference_impl.observe.trace import DraftUse

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"speculative": "ngram"},
    "suffix": {"speculative": "suffix"},
    "draft": {"draft_model": "draft"},
    "eagle": {"draft_model": "eagle"},
    "mtp": {"draft_model": "mtp"},
    "medusa": {"draft_model": "medusa"},
    "early-exit": {"speculative": "early-exit"},
}
# Draft trees of one size.
SHAPED: dict[str, dict[str, Any]] = {
    "eagle tree": {"draft_model": "eagle", "draft_tree": (4, 2, 2)},
    "eagle dynamic": {"draft_model": "eagle", "draft_tree": "dynamic"},
    "lookahead": {"speculative": "lookahead"},
}
FIXED, BATCHES = (2, 4), (1, 8)
NEW_TOKENS, SEED = 96, 5
NEAR_TIE = 0.15  # between two log-probabilities of logits in bfloat16, which round to 1/16, for rounding to swap them


def workload(kind: str, num: int) -> list[str]:
    rng = random.Random(SEED)
    names = ["read_lines", "parse_header", "count_words", "find_prefix", "merge_sorted", "to_table", "is_valid", "walk"]
    rng.shuffle(names)
    if kind == "code":
        return [f'def {name}(path, limit=None):\n    """' for name in names[:num]]
    body = "    result = []\n    for item in items:\n        if item is not None:\n            result.append(item)\n"
    return ["".join(f"def {name}_{i}(items):\n{body}    return result\n\n\n" for i in range(4)) for name in names[:num]]


def run(rounds: int, model: str = "target") -> dict[str, Any]:
    """Measures the variants interleaved; returns a stamped result."""
    return each_case(_case, rounds, model)


def each_case(measure: Callable[[str, str, int, int], dict[str, Any]], rounds: int, model: str) -> dict[str, Any]:
    """A stamped result of measure(model, workload, requests, rounds) for both workloads and numbers of requests."""
    found: dict[str, Any] = {"stamp": harness.stamp(), "rounds": rounds, "new_tokens": NEW_TOKENS}
    both = itertools.product(("repeats", "code"), BATCHES)
    return found | {"cases": [measure(model, kind, batch, rounds) for kind, batch in both]}


def _case(model: str, kind: str, batch: int, rounds: int) -> dict[str, Any]:
    prompts = workload(kind, batch)
    variants: dict[str, dict[str, Any]] = {"plain": {}}
    shaped = {name: with_folder(options) for name, options in SHAPED.items()}
    for method, options in METHODS.items():
        options = with_folder(options)
        variants |= {f"{method} k={k}": {**options, "num_drafts": k, "adaptive_drafts": "off"} for k in FIXED}
        variants[f"{method} adaptive"] = {**options, "num_drafts": max(FIXED)}
    variants |= shaped
    measured = {name: _Measured(LLM(course_model(model), **COMMON, **options)) for name, options in variants.items()}
    work: dict[str, Callable[[], object]] = {name: partial(one.serve, prompts) for name, one in measured.items()}
    peer = Peer(course_model(model), course_model("draft"), prompts) if batch == 1 else None
    seconds = harness.interleave(work if peer is None else work | peer.work(), rounds)
    plain = measured["plain"]
    rows = {
        name: {
            "speedup": harness.ratio(seconds["plain"], seconds[name]),
            "while_all_decode": harness.ratio(plain.paces[-rounds:], one.paces[-rounds:]),
            "texts": _agreement(plain, one),
        }
        | one.against(plain)
        for name, one in measured.items() if one is not plain
    }  # fmt: skip
    found = {"workload": kind, "requests": batch, "plain_step_ms": plain.step * 1e3, "variants": rows}
    if peer is not None:
        ours = min((name for name in seconds if name.startswith("draft")), key=lambda name: sum(seconds[name]))
        found["transformers"] = {
            "assisted_against_its_plain": harness.ratio(seconds[PEERS[0]], seconds[PEERS[1]]),
            "plain_against_its_plain": harness.ratio(seconds[PEERS[0]], seconds["plain"]),
            "ours": ours,
            "ours_against_its_assisted": harness.ratio(seconds[PEERS[1]], seconds[ours]),
        }
    return found


def write(llm: LLM, prompts: list[str]) -> list[RequestOutput]:
    """Generates NEW_TOKENS for each prompt, greedily."""
    return llm.generate(prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True))


def with_folder(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with the course model's folder in place of its name."""
    return options | {"draft_model": course_model(options["draft_model"])} if "draft_model" in options else options


COMMON: dict[str, Any] = {"prefix_cache": "off", "max_model_len": 1024, "kv_cache_bytes": 64 << 20}


PEERS = ("transformers plain", "transformers assisted")


class Peer:
    """`transformers` with the same two models: each prompt by itself, as many tokens, greedy."""

    def __init__(self, target: Path, draft: Path, prompts: list[str]):
        self.target, self.draft = (Transformers("bfloat16", folder).model for folder in (target, draft))
        tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
        self.prompts = [torch.tensor([tokenizer.encode(prompt).ids]) for prompt in prompts]

    def work(self) -> dict[str, Callable[[], object]]:
        return dict(zip(PEERS, (partial(self.write, None), partial(self.write, self.draft)), strict=True))

    @torch.inference_mode()
    def write(self, assistant: Any) -> list[list[int]]:
        return [
            self.target.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
                assistant_model=assistant,
            )[0, ids.shape[1] :].tolist()
            for ids in self.prompts
        ]  # fmt: skip


def _agreement(plain: _Measured, mine: _Measured) -> dict[str, Any]:
    """How many texts are equal, and how far apart the two tokens' log-probabilities are where one parts from plain
    decoding's. Raises RuntimeError if far: then a draft token was kept that was wrong."""
    gaps = []
    for prompt, a, b in zip(plain.prompts, plain.texts, mine.texts, strict=True):
        if a == b:
            continue
        at = next(at for at, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
        asked = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
        output = plain.llm.generate(prompt + a[:at], asked)[0].outputs[0]
        assert output.logprobs is not None
        likely = {token: found.logprob for token, found in output.logprobs[0].items()}
        best = max(likely.values())
        gap = max(best - likely.get(token, -math.inf) for token in (a[at], b[at]))
        if gap > NEAR_TIE:
            raise RuntimeError(
                f"with drafts the text is another one: token {at} is {b[at]}, not {a[at]}, and the log-probability of "
                f"one of them is {gap:.3f} below the largest: no near-tie"
            )
        gaps.append(gap)
    return {"equal": len(plain.texts) - len(gaps), "of": len(plain.texts), "largest_gap": max(gaps, default=0.0)}


class _Timed:
    """A stand-in for a part, which adds up the seconds that calls of some of its methods take, of steps that decode."""

    def __init__(self, part: Any, methods: tuple[str, ...], add: Callable[[float], None]):
        self.part, self.methods, self.add = part, methods, add

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.part, name)
        if name not in self.methods:
            return found

        def timed(*arguments: Any) -> Any:
            _wait()
            began = time.perf_counter()
            given = found(*arguments)
            _wait()
            if _decodes(arguments[0]):
                self.add(time.perf_counter() - began)
            return given

        return timed


def _wait() -> None:
    """Waits for a GPU's passes to end: a call only launches them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _decodes(first: Any) -> bool:
    """Whether a call is of a step that decodes. first: a request, a batch, or the batches of several passes."""
    batch = first[0] if isinstance(first, list) else first
    return max(getattr(batch, "query_lens", (0,))) <= max(FIXED) + 2


def _with_all(steps: Sequence[Any]) -> list[Any]:
    """The steps in which all requests decode."""
    most = max(len(step.rows) for step in steps)
    return [step for step in steps if len(step.rows) == most and all(row.num_tokens == 1 for row in step.rows)]


class _Measured:
    """One engine, and what was seen of its decoding steps."""

    def __init__(self, llm: LLM):
        self.llm, self.texts, self.prompts = llm, list[list[int]](), list[list[int]]()
        self._calls: list[tuple[float, float]] = []  # when one of the proposer ended, and its seconds
        self.paces: list[float] = []  # of each call, seconds for a token while all requests decode
        scheduler: Any = llm.engine.scheduler
        executor: Any = llm.engine.executor
        source: Any = executor.drafting.source
        self.in_steps = executor.draft is not None  # a draft model, in the worker
        if self.in_steps:
            source.draft = _Timed(source.draft, ("propose", "keep_up"), self._add)
        elif getattr(scheduler, "host_proposer", None) is not None:
            scheduler.host_proposer = _Timed(scheduler.host_proposer, ("propose",), self._add)

    def _add(self, seconds: float) -> None:
        self._calls.append((self.llm.engine.clock.now(), seconds))

    @property
    def proposing(self) -> float:
        """Seconds of the proposer in the steps of `decoding`."""
        steps, mine = self.llm.engine.trace.steps(), {step.step_id for step in self.decoding}
        ends = [step.finished_at for step in steps]
        return sum(seconds for end, seconds in self._calls if steps[bisect.bisect_left(ends, end)].step_id in mine)

    def forget(self) -> None:
        """Forgets all that was measured."""
        self.llm.engine.trace.events.clear()
        self._calls.clear()
        self.paces.clear()

    def serve(self, prompts: list[str]) -> None:
        before = len(self.llm.engine.trace.steps())
        outputs = write(self.llm, prompts)
        self.texts = [list(output.outputs[0].token_ids) for output in outputs]
        self.prompts = [list(output.prompt_token_ids) for output in outputs]
        first, *steps = _with_all(self.llm.engine.trace.steps()[before:])
        num_tokens = sum(sum(step.num_new_tokens) for step in steps)
        self.paces.append((steps[-1].finished_at - first.finished_at) / num_tokens)

    @property
    def decoding(self) -> list[Any]:
        return _with_all(self.llm.engine.trace.steps())

    @property
    def step(self) -> float:
        """Mean seconds of a decoding step of the model: its work depends on how many drafts there were. What took ten
        times as long as most was the machine's other work and counts as ten times."""
        seconds = [step.finished_at - step.started_at for step in self.decoding]
        most = 10 * statistics.median(seconds)
        return statistics.fmean(min(each, most) for each in seconds)

    def against(self, plain: _Measured) -> dict[str, Any]:
        """E, v and c, and the speed-up that they give for decoding alone."""
        steps, use, proposing = self.decoding, DraftUse.of(self.decoding), self.proposing
        rows = sum(len(step.rows) for step in steps)
        tokens = sum(map(sum, (step.num_new_tokens for step in steps))) / rows
        drafts = use.num_draft_tokens / len(steps)
        step = self.step - proposing / len(steps) * self.in_steps
        v, c = step / plain.step, proposing / max(1, use.num_draft_tokens) / plain.step
        return {
            "guesses": use.num_draft_tokens, "acceptance": round(use.acceptance, 3), "steps": len(steps),
            "tokens_per_row": tokens, "v": v, "c": c, "bound": tokens / (v + drafts * c),
        }  # fmt: skip


def lines(found: dict[str, Any]) -> list[str]:
    """The figures as lines for a terminal."""
    said = []
    for case in found["cases"]:
        said.append(f"{case['workload']}, {case['requests']} requests, plain step {case['plain_step_ms']:.1f} ms")
        for name, row in case["variants"].items():
            speedup, steps = row["speedup"], row["while_all_decode"]["median"]
            said.append(
                f"  {name:16} {speedup['median']:.2f}x ({speedup['min']:.2f} to {speedup['max']:.2f}), "
                f"while all decode {steps:.2f}x, formula {row['bound']:.2f}x: {row['tokens_per_row']:.2f} tokens a "
                f"step, v {row['v']:.2f}, c {row['c']:.4f}, {row['acceptance']:.0%} of {row['guesses']} drafts kept"
            )
        if peer := case.get("transformers"):
            assisted, ours = peer["assisted_against_its_plain"], peer["ours_against_its_assisted"]
            said.append(
                f"  transformers, assisted by the draft: {assisted['median']:.2f}x its plain generation; our "
                f"{peer['ours']} is {ours['median']:.2f}x as fast as that"
            )
    return said


def main(arguments: Sequence[str] | None = None) -> int:
    return harness.in_rounds("speculative", 3, run, lines, arguments)
