"""The exercises of 07g: what each check says to the stub, to several right answers and to wrong ones, and what is run.

The cells are taken as they stand. A wrong answer has one fault that a learner makes; a right one is written in another
way than the answer that the notebook has. Small slips in our own answers are made by rules, as for labs.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from chapters import widgets
from grader.chapter_source import chapter_notebook
from grader.labs.lab import Cell
from grader.proofs.mutator import Mutant, mutants

CHAPTER = Path(__file__).parents[2] / "chapters/07_quantization/g_workbench.py"
TASKS = {  # cells of a task: the function that the learner writes
    "calibration": "mixture", "harm": "harm_alone", "allocate": "choose_bits", "temperature": "as_sure",
    "recall": "recall", "floors": "floors", "neurons": "without_neurons", "distill": "distill_loss",
}  # fmt: skip
Answer = Callable[..., Any]


@functools.cache
def cells() -> dict[str, str]:
    found = chapter_notebook(CHAPTER, "inferlab")["cells"]
    return {cell["id"]: cell["source"] for cell in found if cell["cell_type"] == "code"}


@functools.cache
def prepared() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(cells()["setup"], names)
    return names


def ours(task: str) -> Answer:
    names = dict(prepared())
    exec(cells()[f"{task}-answer"], names)
    answer: Answer = names[f"answer_{TASKS[task]}"]
    return answer


def verdict(task: str, answer: Answer | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What the check prints about an answer in place of the stub, or about the stub."""
    names = dict(prepared())
    exec(cells()[f"{task}-exercise"], names)
    if answer is not None:
        names[TASKS[task]] = answer
    exec(cells()[f"{task}-check"], names)
    said = capsys.readouterr().out
    assert names[f"{task if task != 'calibration' else 'mixture'}_written"] == ("passed" in said)
    return said


def changed(task: str, old: str, new: str) -> Answer:
    """Our answer with one piece of its text replaced."""
    source = cells()[f"{task}-answer"]
    assert source.count(old) == 1, (task, old)
    names = dict(prepared())
    exec(source.replace(old, new), names)
    answer: Answer = names[f"answer_{TASKS[task]}"]
    return answer


def test_each_task_has_its_cells_in_order_and_a_prediction() -> None:
    order = list(cells())
    for task in TASKS:
        places = [order.index(f"{task}-{kind}") for kind in ("exercise", "check", "answer", "run")]
        assert places == sorted(places)
        assert f"{task}-predict" in order[: places[-1]]


@pytest.mark.parametrize("task", TASKS)
def test_a_stub_is_said_to_be_unwritten_and_our_answer_passes(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(task, None, capsys) == f"{TASKS[task]}: not written yet\n"
    assert verdict(task, ours(task), capsys) == f"{TASKS[task]}: passed\n"


def test_with_the_switch_on_our_answer_stands_in_for_one_that_is_not_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without answers of their own a reader saw hardly a result."""
    [function] = [
        node for node in ast.parse(cells()["setup"]).body if isinstance(node, ast.FunctionDef) and node.name == "ours"
    ]
    names: dict[str, Any] = {"mixture": "the stub", "answer_mixture": "our answer"}
    exec(ast.unparse(function), names)
    exec(cells()["switch"], names)
    assert not names["ours"]("mixture")
    assert names["mixture"] == "the stub"
    names["RUN_OUR_ANSWERS"] = True
    assert names["ours"]("mixture")
    assert names["mixture"] == "our answer"
    assert capsys.readouterr().out == "mixture: run with our answer\n"
    for task, name in TASKS.items():
        assert f'ours("{name}")' in cells()[f"{task}-run"]


# ---------------------------------------------------------------- right, written in another way


def by_seats(served: dict[str, list[int]], num_rows: int) -> dict[str, int]:
    """A row after the other, to the kind that is furthest behind its share."""
    sizes = {kind: sum(prompts) for kind, prompts in served.items() if prompts}
    rows, total = dict.fromkeys(sizes, 1), sum(sizes.values())
    while sum(rows.values()) < num_rows:
        rows[max(sizes, key=lambda kind: sizes[kind] / total * num_rows - rows[kind])] += 1
    return rows


def backwards(parts: list[str], coarse: Answer, exact: Answer, harm: Answer) -> dict[str, float]:
    for part in parts:
        exact(part)  # whatever was left over

    def one(part: str) -> float:
        coarse(part)
        try:
            return float(harm())
        finally:
            exact(part)

    return {part: one(part) for part in reversed(parts)}


def all_choices(costs: dict[str, dict[str, tuple[int, float]]], budget: int) -> dict[str, str]:
    import itertools

    fits = [
        (sum(costs[part][scheme][1] for part, scheme in zip(costs, choice, strict=True)), choice)
        for choice in itertools.product(*costs.values())
        if sum(costs[part][scheme][0] for part, scheme in zip(costs, choice, strict=True)) <= budget
    ]
    if not fits:
        raise ValueError("too small")
    return dict(zip(costs, min(fits, key=lambda fit: fit[0])[1], strict=True))


def by_parts(costs: dict[str, dict[str, tuple[int, float]]], budget: int) -> dict[str, str]:
    """Recursion over parts."""

    def best(parts: tuple[str, ...], left: int) -> tuple[float, tuple[str, ...]]:
        if left < 0:
            return math.inf, ()
        if not parts:
            return 0.0, ()
        tried = []
        for scheme, (bits, harm) in costs[parts[0]].items():
            behind, choice = best(parts[1:], left - bits)
            tried.append((harm + behind, (scheme, *choice)))
        return min(tried, key=lambda one: one[0])

    harm, choice = best(tuple(costs), budget)
    if harm == math.inf:
        raise ValueError(f"budget {budget}")
    return dict(zip(costs, choice, strict=True))


def by_secant(logprobs: Tensor, entropy: float) -> Tensor:
    """Newton's method on the logarithm of the temperature, halved where it leaves the interval."""
    low, high, x = math.log(0.05), math.log(20), torch.zeros((), dtype=torch.float64)
    for _ in range(60):
        t = x.clone().requires_grad_()
        now = torch.distributions.Categorical(logits=logprobs.double() / t.exp()).entropy().mean()
        (slope,) = torch.autograd.grad(now, t)
        low, high = (float(x), high) if float(now.detach()) < entropy else (low, float(x))
        step = float(x) - (float(now.detach()) - entropy) / float(slope) if slope else math.nan
        x = torch.tensor(step if low < step < high else (low + high) / 2, dtype=torch.float64)
    return x.exp()


def token_by_token(
    logprobs: Answer, filler: list[int], evidence: list[int], question: list[int], answer: list[int], depth: float
) -> float:
    prompt = list(filler)
    prompt[round(depth * len(filler)) : round(depth * len(filler))] = evidence
    found, tokens = [], prompt + list(question)
    for token in answer:
        found.append(logprobs(tokens)[-1][token].item())
        tokens = [*tokens, token]
    return sum(found) / len(found)


def without_last(
    logprobs: Answer, filler: list[int], evidence: list[int], question: list[int], answer: list[int], depth: float
) -> Tensor:
    cut = round(depth * len(filler))
    tokens = [*filler[:cut], *evidence, *filler[cut:], *question, *answer]
    found = logprobs(tokens[:-1])[-len(answer) :]
    picked: Tensor = found[range(len(answer)), answer].mean()
    return picked


def part_by_part(
    m: dict[str, float], kind: dict[str, Any], gpu: dict[str, float], prompt: int, batch: int, context: int
) -> list[float]:
    read = (kind["bits"] / 8 * m["matrices"] + 2 * m["head"]) / gpu["bandwidth"]
    token = kind["kept"] * m["cached"] / gpu["bandwidth"]
    attention = [m["per_pair"] * sum(range(1, prompt + 1)), batch * context * m["per_pair"]]
    products = [2 * prompt * m["matrices"] + 2 * m["head"], 2 * batch * (m["matrices"] + m["head"])]
    work = [(a + b) / gpu[kind["peak"]] for a, b in zip(attention, products, strict=True)]
    return [max(w, read + token * n) for w, n in zip(work, (prompt, batch * context), strict=True)]


def by_mask(gate_up: Tensor, down: Tensor, scores: Tensor, share: float) -> list[Tensor]:
    n = len(scores)
    gone = set(sorted(range(n), key=lambda i: float(scores[i]))[: int(n * share)])
    stay = [i for i in range(n) if i not in gone][::-1]  # the other way round
    return [torch.stack([*gate_up[:n][stay], *gate_up[n:][stay]]).reshape(-1, gate_up.shape[1]), down.T[stay].T]


def by_library(way: str, student: Answer, teacher: Answer, starts: Tensor, write: Answer) -> Tensor:
    tokens = write(teacher if way != "on-policy" else student, starts)
    mine, theirs = student(tokens)[:, :-1].flatten(0, 1), teacher(tokens).detach()[:, :-1].flatten(0, 1)
    if way == "response":
        return F.cross_entropy(mine, tokens[:, 1:].flatten())
    pair = [F.log_softmax(one, -1) for one in ((mine, theirs) if way == "logits" else (theirs, mine))]
    return F.kl_div(*pair, reduction="batchmean", log_target=True)


RIGHT: list[tuple[str, Answer]] = [
    ("calibration", by_seats), ("harm", backwards), ("allocate", all_choices), ("allocate", by_parts),
    ("temperature", by_secant), ("recall", token_by_token), ("recall", without_last), ("floors", part_by_part),
    ("neurons", by_mask), ("distill", by_library),
]  # fmt: skip


@pytest.mark.parametrize(("task", "answer"), RIGHT, ids=lambda one: getattr(one, "__name__", one))
def test_another_right_answer_passes(task: str, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict(task, answer, capsys) == f"{TASKS[task]}: passed\n"


# ---------------------------------------------------------------- wrong, by one fault

WRONG = [  # task, what of our answer becomes what, a word of what the check says
    ("calibration", "sum(prompts) / total", "len(prompts) / sum(map(len, served.values()))", "Do you count tokens?"),
    ("calibration", "rows[kind] += 1", "rows[kind] += 0", "together"),
    ("calibration", "max(math.floor(one), 1 if one else 0)", "math.floor(one)", "was served and gets no row"),
    ("calibration", "max(math.floor(one), 1 if one else 0)", "max(math.floor(one), 1)", "together"),
    ("calibration", "reverse=True", "reverse=False", "is off by a row or more"),
    ("calibration", "    return rows", "    served.popitem()\n    return rows", "changed its argument"),
    ("harm", "        exact(part)\n", "", "rounded at once"),
    ("harm", "        exact(part)\n    return found",
     "        parts and exact(parts[0])\n    return found", "rounded at once"),
    ("harm", "        coarse(part)\n        found[part] = harm()",
     "        found[part] = harm()\n        coarse(part)", "saw 0"),
    ("harm", "    return found", "    coarse(parts[0])\n    return found", "at the end still rounded"),
    ("harm", "found[part] = harm()", "found[part] = harm() / 2", "expected"),
    ("allocate", "total <= budget and", "", "bits"),
    ("allocate", "total <= budget", "total < budget", ""),
    ("allocate", "harm + worse < grown[total][0]", "harm + worse > grown[total][0]", "can be had"),
    ("allocate", "lambda one: one[0]", "lambda one: -one[0]", "can be had"),
    ("allocate", "    return min(best.values(), key=lambda one: one[0])[1]",
     "    return best[max(best)][1]", "can be had"),
    ("temperature", "-(q.exp() * q).sum(-1).mean()", "-(q.exp().mean(0) * q.exp().mean(0).log()).sum()", "nats"),
    ("temperature", "logprobs / middle", "logprobs * middle", "nats"),
    ("temperature", "-(q.exp() * q).sum(-1).mean()", "-(q.exp() * q).sum(-1).mean() / math.log(2)", "nats"),
    ("temperature", "range(50)", "range(4)", "nats"),
    ("temperature", "(logprobs / middle)", "logprobs.div_(middle)", "changed its argument"),
    ("recall", "len(tokens) - 1 + i", "len(tokens) + i - 2", "expected"),
    ("recall", "len(tokens) - 1 + i", "min(len(tokens) + i, len(found) - 1)", "expected"),
    ("recall", "round(depth * len(filler))", "round((1 - depth) * len(filler))", "expected"),
    ("recall", "round(depth * len(filler))", "math.floor(0.99 * depth * len(filler))", "expected"),
    ("recall", "statistics.mean(", "sum(", "expected"),
    ("recall", "found[len(tokens) - 1 + i, token]", "found[len(tokens) - 1, token]", "expected"),
    ("recall", "+ filler[cut:] + question", "+ question + filler[cut:]", "expected"),
    ("floors", "m[\"head\"] * 16) / 8\n", "m[\"head\"] * 16)\n", "TTFT"),
    ("floors", "m[\"head\"] * 16)", "m[\"head\"] * kind[\"bits\"])", "expected"),
    ("floors", "prompt * (prompt + 1) / 2", "prompt * prompt", "TTFT"),
    ("floors", "(m[\"matrices\"] * prompt + m[\"head\"])", "((m[\"matrices\"] + m[\"head\"]) * prompt)", "TTFT"),
    ("floors", "weights + batch * context * per_token", "weights + context * per_token", "TPOT"),
    ("floors", "max(decode / peak, (weights + batch * context * per_token) / gpu[\"bandwidth\"])",
     "decode / peak + (weights + batch * context * per_token) / gpu[\"bandwidth\"]", "TPOT"),
    ("floors", "gpu[kind[\"peak\"]]", "gpu[\"bf16\"]", "FP8"),
    ("floors", "m[\"cached\"] * kind[\"kept\"]", "m[\"cached\"] * 2", "cache in 8 bits"),
    ("neurons", "torch.cat((kept, kept + n))", "torch.cat((kept, kept))", "off by"),
    ("neurons", "torch.cat((kept, kept + n))", "torch.cat((2 * kept, 2 * kept + 1))", "off by"),
    ("neurons", "scores.argsort()", "scores.argsort(descending=True)", "off by"),
    ("neurons", "[int(share * n) :]", "[round(share * n + 0.5) :]", "expected"),
    ("neurons", "down[:, kept]", "down * 1.0", "expected"),
    ("distill", "student if way == \"on-policy\" else teacher", "teacher", "the student writes"),
    ("distill", "student if way == \"on-policy\" else teacher", "student", "the teacher writes"),
    ("distill", "student(tokens)[:, :-1]", "student(tokens)[:, 1:]", "expected"),
    ("distill", "(log_q.exp() * (log_q - log_p)).sum(-1).mean()",
     "(log_p.exp() * (log_p - log_q)).sum(-1).mean()", "on-policy"),
    ("distill", "(log_p.exp() * (log_p - log_q)).sum(-1).mean()", "(log_p.exp() * (log_p - log_q)).mean()", "logits"),
    ("distill", "    with torch.no_grad():\n", "    if True:\n", "reaches the teacher"),
    ("distill", "return -log_q.gather(2, tokens[:, 1:, None]).mean()",
     "return -log_q.gather(2, tokens[:, :-1, None]).mean()", "response"),
    ("distill", "(log_q.exp() * (log_q - log_p)).sum(-1).mean()",
     "(log_q.detach().exp() * (log_q - log_p)).sum(-1).mean()", "gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "old", "new", "word"), WRONG, ids=[f"{row[0]}-{i}" for i, row in enumerate(WRONG)])
def test_a_wrong_answer_does_not_pass_and_the_check_says_what_it_saw(
    task: str, old: str, new: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = verdict(task, changed(task, old, new), capsys)
    assert said.startswith(f"{TASKS[task]}: not yet. ")
    assert word in said


# ---------------------------------------------------------------- small slips, made by rules

HARMLESS = {  # task: of mutants that pass, a piece of what they became, and why they do no harm
    "calibration": {
        "+ 1)": "a token more or less of some thousand moves no row",
        "- 1)": "a token more or less of some thousand moves no row",
        "[::-1]": "who gets a row first does not matter",
        "max(1 if one else 0, math.floor(one))": "the same",
        "else (-1))": "rounded down, no prompts are 0 rows already",
    },
    "harm": {"[::-1]": "parts are independent"},
    "allocate": {
        "[::-1]": "the order of parts, of schemes and of sums does not matter",
        "if False:": "min of nothing is a ValueError as well",
        "pass": "min of nothing is a ValueError as well",
        "best = {0: (1.0, {})}": "the same harm more for all",
        "best = {0: ((-1.0), {})}": "the same harm less for all",
        "<= grown[total][0]": "one of two equally good choices",
    },
    "temperature": {
        "[::-1]": "the number of halvings counts, not their names",
        "[1:]": "49 halvings are enough",
        "range(51)": "51 halvings are enough",
        "range(49)": "49 halvings are enough",
        "0.05, 10.0": "a wider interval",
        "0.1, 20.0": "a wider interval",
        "<= entropy": "equality is the answer itself",
        "log_softmax((1))": "there are two dimensions",
        "sum((1))": "there are two dimensions",
        "if (-(q.exp()": "a tensor of one number compares like it",
    },
    "floors": {
        "+ 1)": "one of many billion",
        "- 1)": "one of many billion",
        "max((weights": "the larger of two, in the other order",
    },
    "neurons": {"(kept - n)": "counted from the end: the same rows"},
}  # fmt: skip


def mechanical(task: str) -> list[Mutant]:
    name = TASKS[task]
    head, body = cells()[f"{task}-answer"].replace(f"def answer_{name}", f"def {name}").split("\n", 1)
    return mutants(Cell(name, "solution", f"{head}\n    ### BEGIN SOLUTION\n{body}\n    ### END SOLUTION\n"))


@pytest.mark.parametrize("task", TASKS)
def test_small_slips_made_by_rules_pass_only_where_they_do_no_harm(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left = []
    for mutant in mechanical(task):
        names = dict(prepared())
        exec(mutant.source, names)
        with contextlib.suppress(Exception):  # a crash is seen
            if "passed" in verdict(task, names[TASKS[task]], capsys):
                left.append(mutant)
    reasons = HARMLESS.get(task, {})
    assert [one.key for one in left if not any(piece in one.after for piece in reasons)] == []
    assert [piece for piece in reasons if not any(piece in one.after for one in left)] == []


# ---------------------------------------------------------------- run, with our answers


@functools.cache
def run_with_our_answers() -> tuple[dict[str, Any], dict[str, float], list[list[list[Any]]]]:
    """(the names after all cells, {prediction: answer}, the rows of all tables)."""
    answers: dict[str, float] = {}
    tables: list[list[list[Any]]] = []
    names: dict[str, Any] = dict(prepared())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widgets, "reveal", answers.__setitem__)
        patch.setattr(widgets, "table", lambda rows, heads: tables.append([list(row) for row in rows]))
        for cell, source in cells().items():
            kind = cell.rpartition("-")[2]
            if cell in ("bootstrap", "setup", "quiz", "predict") or kind in ("predict", "figure"):
                continue
            if kind == "check":
                exec(cells()[f"{cell.removesuffix('-check')}-answer"], names)
                task = cell.removesuffix("-check")
                names[TASKS[task]] = names[f"answer_{TASKS[task]}"]
            exec(compile(source, cell, "exec"), names)
    return names, answers, tables


def test_every_prediction_is_answered_and_nothing_stays_unrun(capsys: pytest.CaptureFixture[str]) -> None:
    _, answers, tables = run_with_our_answers()
    asked = {name for source in cells().values() for name in re.findall(r'predict\(\s*"([^"]+)"', source)}
    assert set(answers) == asked
    assert all(math.isfinite(value) for value in answers.values())
    assert len(tables) == 12
    assert "nothing is run" not in capsys.readouterr().out


def test_what_the_readings_say_of_the_course_model_holds() -> None:
    """Counts and distances, of which no clock is part."""
    names, answers, _ = run_with_our_answers()
    nearest, calibrated = names["nearest"], names["calibrated"]
    assert answers["07g-wrong-text"] > 1  # calibrated on JSON alone: worse on code than rounding that looked at nothing
    assert calibrated["tools"]["tools"] < 0.6 * calibrated["code"]["tools"]
    assert all(names["errors"](names["by_gptq"](names["mixed"]))[kind] < nearest[kind] for kind in nearest)
    assert answers["07g-breaks"] > 1.5
    assert answers["07g-rule"] < 0.8  # a budget beats the rule of thumb with as many bits
    assert answers["07g-temperature"] < 0.9
    said = names["said"]
    lost = {
        name: statistics.mean(a - b for a, b in zip(said["16 bits"], row, strict=True)) for name, row in said.items()
    }
    assert lost["INT4, token and head"] > 1 > 10 * lost["INT4, split as in KIVI"]
    evidence, text = (said["16 bits"][i] - said["INT4, token and head"][i] for i in (1, 3))
    assert evidence > 4 * text  # a mean over text hides it
    driven = {way: names["driven"](names["taught"](way))[0] for way in ("logits", "on-policy")}
    assert driven["on-policy"] < driven["logits"] / 5
    assert answers["07g-mismatch"] > 1.2
