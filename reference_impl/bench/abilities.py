"""What a quantized model still can: find a value some way back, write valid JSON, go on with code so that it parses.

Each answer is right or wrong, greedy, and both models get the same questions, so a difference is paired. These measures
are at their ceiling, or small, for many models: they are shown with intervals and gate nothing. A test of pairs looks
at the questions that only one of both answers rightly: if the models are equally good, each of these is a fair coin.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import comb
from typing import Any

from reference_impl.assembly.llm import LLM
from reference_impl.bench import tasks
from reference_impl.bench.quality import Estimate, bootstrap
from reference_impl.interfaces import SamplingParams

DISTANCES = (16, 64, 256, 512)
_ROOM = 128  # tokens of a retrieval's prompt and answer beside its distance


@dataclass(frozen=True)
class Question:
    """A question to a model. kind: what it counts for. right(answer): whether an answer is right."""

    kind: str
    prompt: list[int]
    max_tokens: int
    right: Callable[[str], bool]


def questions(llm: LLM, text: str, each: int) -> list[Question]:
    """At most `each` questions of a kind, the same every time. text: what retrieval hides a value in; where it is
    Python, heads of its functions are continued. Raises ValueError for a model without a chat template."""
    lines = [line for line in text.splitlines() if 10 < len(line) < 90]
    if not lines:
        raise ValueError("text: expected some lines of 10 to 90 characters, to hide values in; got none")
    found, longest = [], llm.engine.model.config.max_position
    for distance in (distance for distance in DISTANCES if distance + _ROOM <= longest):
        rng = random.Random(tasks.EVALUATION_SEED + distance)
        for _ in range(each):
            prompt, answer = tasks.retrieval(rng, lambda rng, size: _filler(llm, lines, rng, size), distance)
            found.append(_asked(llm, f"retrieval, {distance} tokens back", prompt, 12, answer.__eq__))
    rng = random.Random(tasks.EVALUATION_SEED)
    for _ in range(each):
        prompt, call = tasks.json_call(rng)
        found.append(_asked(llm, "valid JSON", prompt, 60, is_json_object))
        found.append(_asked(llm, "the call that was asked for", prompt, 60, call.__eq__))
    for head in heads_of(text)[:each]:
        found.append(Question("code that parses", llm.encode(head), 64, partial(parses, head)))
    return found


def answers(llm: LLM, asked: Sequence[Question]) -> list[bool]:
    """Whether the greedy answer to each question is right. Equal prompts are computed once."""
    unique = {(tuple(q.prompt), q.max_tokens): q for q in asked}
    sampling = [SamplingParams(max_tokens=q.max_tokens, temperature=0) for q in unique.values()]
    outputs = llm.generate([q.prompt for q in unique.values()], sampling)
    texts = {key: output.outputs[0].text for key, output in zip(unique, outputs, strict=True)}
    return [q.right(texts[tuple(q.prompt), q.max_tokens]) for q in asked]


def share(right: Sequence[bool]) -> Estimate:
    """The share of right answers with the bootstrap's interval. Where all are alike that has no width, so the interval
    is that of Clopper and Pearson, which a share of 1 in n would also fit."""
    if len(set(right)) > 1:
        return bootstrap([float(one) for one in right])
    least = 0.025 ** (1 / len(right))
    return Estimate(1.0, least, 1.0) if right[0] else Estimate(0.0, 0.0, 1 - least)


def paired(ours: Sequence[bool], theirs: Sequence[bool]) -> dict[str, Any]:
    """The comparison of two models. difference: an Estimate of ours less theirs. only_ours, only_theirs: questions that
    one alone answered rightly. p: how likely a split as uneven or more is for a fair coin (McNemar's exact test)."""
    mine = sum(a and not b for a, b in zip(ours, theirs, strict=True))
    others = sum(b and not a for a, b in zip(ours, theirs, strict=True))
    tail = sum(comb(mine + others, k) for k in range(min(mine, others) + 1)) / 2 ** (mine + others)
    difference = bootstrap([float(a) - float(b) for a, b in zip(ours, theirs, strict=True)])
    return {"difference": difference, "only_ours": mine, "only_theirs": others, "p": min(1.0, 2 * tail)}


def compare(llm: LLM, against: LLM | None, text: str, each: int) -> dict[str, dict[str, Any]]:
    """{kind: {"questions", "ours": Estimate}, and with another model "theirs" and what `paired` says}."""
    asked = questions(llm, text, each)
    ours, theirs = answers(llm, asked), None if against is None else answers(against, asked)
    found: dict[str, dict[str, Any]] = {}
    for kind in dict.fromkeys(question.kind for question in asked):
        places = [place for place, question in enumerate(asked) if question.kind == kind]
        mine = [ours[place] for place in places]
        found[kind] = {"questions": len(places), "ours": share(mine)}
        if theirs is not None:
            others = [theirs[place] for place in places]
            found[kind] |= {"theirs": share(others)} | paired(mine, others)
    return found


def lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """The figures as lines of text."""
    said = []
    for kind, row in found.items():
        line = f"{kind + ', ' + str(row['questions']):32} {row['ours'].shown(2)}"
        if "theirs" in row:
            line += f"; the other {row['theirs'].shown(2)}, {row['only_theirs']} lost and {row['only_ours']} won"
            line += f", p = {row['p']:.3f}" + (", beyond chance" if row["p"] < 0.05 else "")
        said.append(line)
    return said


def plain(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures as plain values for JSON."""
    return {
        kind: {name: asdict(value) if isinstance(value, Estimate) else value for name, value in row.items()}
        for kind, row in found.items()
    }


def is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except json.JSONDecodeError:
        return False


def heads_of(text: str) -> list[str]:
    """The def line and the first statement of each function at the left margin; none if the text is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    source, found = text.splitlines(), []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            found.append("\n".join(source[node.lineno - 1 : node.body[0].end_lineno]) + "\n")
    return [head for head in found if len(head) < 600]


def parses(head: str, answer: str) -> bool:
    """Whether head and answer parse, the answer cut after its last whole line or where the function ends."""
    kept = []
    for line in answer.splitlines(keepends=True):
        if not line.endswith("\n") or (line[0] not in " \n" and line.strip()):
            break
        kept.append(line)
    if not any(line.strip() for line in kept):
        return False  # a function's head alone proves nothing
    try:
        ast.parse(head + "".join(kept))
    except (SyntaxError, ValueError):
        return False
    return True


def _asked(llm: LLM, kind: str, prompt: str, max_tokens: int, right: Callable[[str], Any]) -> Question:
    return Question(
        kind, llm.chat_prompt([{"role": "user", "content": prompt}]), max_tokens, lambda a: right(a) is True
    )


def _filler(llm: LLM, lines: Sequence[str], rng: random.Random, num_tokens: int) -> str:
    """Lines of the text that follow each other, about so many tokens; after the last line the first one follows."""
    at, left = rng.randrange(len(lines)), num_tokens
    out: list[str] = []
    while True:
        left -= len(llm.encode(lines[at % len(lines)])) + 1
        if left < 0:
            return "\n".join(out)
        out.append(lines[at % len(lines)])
        at += 1
