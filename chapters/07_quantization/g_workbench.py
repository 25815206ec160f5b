# %% [markdown] name="title"
# # 07g · Workbench: eight experiments of your own
#
# About 60 minutes of reading and running, and your own time for writing. You need `c_methods`, `d_whole_models`,
# `e_kv_cache` and `f_fewer_numbers`. There you watched. Here you write the function, predict the number, and run your
# function on the course model. A ninth experiment, at the end, is a program for a model of 7B.

# %% name="setup"
import argparse
import inspect
import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pydoc_data.topics import topics

import torch
from IPython.display import display

from chapters import widgets
from chapters.widgets.figure import BLUE, GREEN, ORANGE, figure, show, tidy
from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch
from reference_impl.assembly.model import load_model
from reference_impl.bench.quality import logprobs
from reference_impl.core.linear import UnquantizedLinear
from reference_impl.core.prompts import PromptEncoder
from reference_impl.models.compression import pruning
from reference_impl.models.quantization.awq import rounded
from reference_impl.models.quantization.by_layer import linears_of
from reference_impl.models.quantization.calibration import Rows, Statistics, calibration_tokens
from reference_impl.models.quantization.folding import matrix
from reference_impl.models.quantization.gptq import gptq
from reference_impl.models.quantization.recipes import Recipe
from reference_impl.models.quantization.scheme import Scheme, decode
from reference_impl.theory import kv_cache, latency
from reference_impl.theory.hardware import device
from reference_impl.theory.model_shapes import model as shape_of
from reference_impl.theory.units import format_seconds

torch.set_num_threads(1)
FOLDER = course_model("target")
encode_text = PromptEncoder(FOLDER).tokens_of
# Plain matrices, which can be written to: on some CPUs the engine packs them.
plain = UnquantizedLinear(torch.float32, torch.device("cpu"))
model = load_model(FOLDER, torch.float32, linear_method=plain)
c = model.config
linears = {linear.name: linear for layer in model.layers for linear in linears_of(layer)}
originals = {name: matrix(one).clone(memory_format=torch.contiguous_format) for name, one in linears.items()}
table = model.embedding.clone()


def tool_calls(*modules):
    """Calls and results as an agent's context has them: the functions of modules as JSON."""
    found = []
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            defaults = {key: str(one.default) for key, one in inspect.signature(function).parameters.items()}
            result = {"ok": True, "line": function.__code__.co_firstlineno, "module": module.__name__}
            found.append(json.dumps({"tool": name, "arguments": defaults, "result": result}, indent=1))
    return "\n".join(found)


def pages(first, last):
    return "\n\n".join(text for _, text in sorted(topics.items())[first:last])


# What is served: Python code, English prose, tool calls in JSON. One set to calibrate with, another one to judge by.
CALIBRATION = {
    "code": encode_text(inspect.getsource(argparse)),
    "prose": encode_text(pages(0, 20)),
    "tools": encode_text(tool_calls(inspect, os, shutil)),
}
HELD_OUT = {
    "code": encode_text(inspect.getsource(json.decoder)),
    "prose": encode_text(pages(40, 45)),
    "tools": encode_text(tool_calls(tempfile, statistics, os.path)),
}


@torch.inference_mode()
def logprobs_of(tokens, attention=None):
    """[tokens, vocabulary], of the course model as it is now."""
    batch = ragged_batch([(tokens, 0)], len(tokens), model.device, c.layer_windows)
    batch.logits_indices = torch.arange(len(tokens))
    attention = attention or RecomputeAttention(c.attention_scale, c.attention_softcap)
    return model(batch, None, attention).float().log_softmax(-1)


WINDOWS = {kind: ids[:128] for kind, ids in HELD_OUT.items()}
EXACT = {kind: logprobs_of(window) for kind, window in WINDOWS.items()}


def kl_by_kind():
    """{kind of text: KL of the model as it is now to the one in 16 bits, nats a token}."""
    now = {kind: logprobs_of(window) for kind, window in WINDOWS.items()}
    return {kind: float((p.exp() * (p - now[kind])).sum(-1).mean()) for kind, p in EXACT.items()}


def kl_now():
    return statistics.mean(kl_by_kind().values())


def put(name, scheme):
    """A matrix of the layers, or "table" (embedding and output projection), rounded to nearest; None: as it was."""
    place, before = (model.embedding, table) if name == "table" else (matrix(linears[name]), originals[name])
    place.copy_(before if scheme is None else rounded(before, Recipe(scheme).scheme_of(name, before.shape[1])))


def gram_of(tokens, layer, name):
    """x^T x of the inputs x of one matrix, over calibration rows."""
    rows = Rows.of(model, tokens)
    for before in range(layer):
        rows.advance(model.layers[before])
    return rows.watch(model.layers[layer], linears[name], Statistics()).known_gram


def tried(task, check):
    """Runs the check of a task and says what it found. True if your function passes."""
    try:
        check()
    except NotImplementedError:
        print(f"{task}: not written yet")
    except AssertionError as error:
        print(f"{task}: not yet. {error}")
    else:
        print(f"{task}: passed")
        for name in ("table", *originals):  # a cell that was interrupted may have left something rounded
            put(name, None)
        return True
    return False


def unwritten(task):
    print(f"{task}: nothing is run before the check passes")


def ours(task):
    """With the switch on, our answer in the place of a task that does not pass yet; returns the switch."""
    if RUN_OUR_ANSWERS:
        globals()[task] = globals()[f"answer_{task}"]
        print(f"{task}: run with our answer")
    return RUN_OUR_ANSWERS


def say_close(what, seen, expected, limit=1e-5):
    seen = float(seen.detach() if isinstance(seen, torch.Tensor) else seen)
    assert abs(seen - expected) <= limit * max(1.0, abs(expected)), f"{what}: expected {expected:.6g}, saw {seen:.6g}"


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# %% [markdown] name="question"
# ## 1. A question with a number
#
# An agent platform: nearly all of its tokens are tool calls and their results, in JSON. So its model is calibrated on
# tool calls. GPTQ, INT4 in groups of 128, one matrix of the course model: gate and up of layer 3, calibrated on
# twelve rows of 96 tokens of JSON. Then somebody asks it for *code*. **The error of the outputs on code: how many
# times that of plain rounding, which looked at nothing?**

# %% name="predict"
widgets.predict("07g-wrong-text", "GPTQ calibrated on JSON: error on code over that of rounding to nearest?", "times")

# %% name="answer"
NAME, INT4 = "model.layers.3.mlp.gate_up_proj", Scheme("int4", "group", 128)
weight = originals[NAME]
grams = {kind: gram_of(calibration_tokens(ids, 12, 96), 3, NAME) for kind, ids in CALIBRATION.items()}
judged_by = {kind: gram_of(calibration_tokens(ids, 8, 96), 3, NAME) for kind, ids in HELD_OUT.items()}


def by_gptq(gram):
    found = gptq(weight, gram, INT4)
    return decode(found.codes, INT4, found.fitted)


def errors(stored):
    """{kind of text: relative error of the outputs on other text of this kind, percent}."""
    squares = lambda w, gram: float(((w.double() @ gram.double()) * w.double()).sum())  # noqa: E731
    return {kind: 100 * math.sqrt(squares(weight - stored, g) / squares(weight, g)) for kind, g in judged_by.items()}


nearest = errors(rounded(weight, INT4))
calibrated = {kind: errors(by_gptq(gram)) for kind, gram in grams.items()}
widgets.reveal("07g-wrong-text", calibrated["tools"]["code"] / nearest["code"])

# %% [markdown] name="idea"
# ## 2. The idea
#
# A workbench has a vice, a ruler and something to work on. Whoever learns a craft watches first and then ruins some
# wood. Each experiment here has the same five steps:
#
# 1. **What to build**: a function of a few lines. You get plain numbers and tensors, and functions that do the heavy
#   work.
# 2. **Predict** a number, before you can compute it.
# 3. **Write.** The stub raises `NotImplementedError`.
# 4. **Check**, folded: small cases with known answers, no course model and no luck in it. It says what it saw.
# 5. **Run** on the course model. Nothing runs before the check passes, so what you read there is a measurement.
#
# | | you write | what it settles |
# |---|---|---|
# | 1 | how many calibration rows each kind of prompt gets | what calibration on the wrong prompts costs |
# | 2 | harm, one part at a time | what breaks first in 4 bits |
# | 3 | a choice of bits under a budget | whether a rule of thumb is as good |
# | 4 | the temperature that is as sure as before | what a temperature means after rounding |
# | 5 | recall of evidence at a depth | where a quantized cache hurts |
# | 6 | TTFT and TPOT of each kind | a forecast, and its error |
# | 7 | an MLP without some of its neurons | when zeros save time |
# | 8 | three losses of distillation | who should write the text that a student learns from |
#
# An answer of ours is folded behind each check. Open it when yours passes, or when you are stuck. Who only wants to read
# what the experiments find sets `RUN_OUR_ANSWERS = True` in the next cell: then our answer runs wherever yours does not
# pass yet.

# %% name="switch"
RUN_OUR_ANSWERS = False

# %% name="idea-figure" jupyter={"source_hidden": true}
fig = figure(7.4, 2.6)
ax = fig.subplots()
groups = {"rounded to nearest": nearest} | {f"calibrated on {kind}": found for kind, found in calibrated.items()}
for place, ((name, found), colour) in enumerate(zip(groups.items(), ("0.6", BLUE, GREEN, ORANGE), strict=True)):
    ax.bar([i + 0.2 * place - 0.3 for i in range(3)], list(found.values()), 0.2, color=colour, label=name)
ax.set_xticks(range(3), [f"on {kind}" for kind in nearest])
tidy(ax, "text that judges", "error of the outputs, %")
ax.legend(fontsize=7.5, frameon=False, ncols=2)
show(
    fig,
    "Error of one matrix in INT4, by the text it was calibrated on. "
    + "; ".join(f"{n}: " + ", ".join(f"{k} {e:.1f} %" for k, e in found.items()) for n, found in groups.items()),
)

# %% [markdown] name="calibration-text"
# ## 3. From scratch
#
# ### Experiment 1: calibrate on what you serve
#
# A log of one day says how long each prompt was: 120 prompts of code with 300 tokens each, 200 of prose with 150, and
# 40 contexts with tool calls, of 1,500. You may calibrate with twelve rows.
#
# **Write `mixture(served, num_rows)`.** `served` is `{kind: [tokens of each prompt]}`; return `{kind: number of
# rows}`, whole numbers that add up to `num_rows`.
#
# - The model computes tokens, not prompts: a kind's share is its tokens over all tokens.
# - No kind is off from share × `num_rows` by a whole row or more.
# - A kind that was served at all gets at least one row; one without prompts gets none.
#
# **Hint:** round down first. Who has lost most by that?
#
# **Trap (add up):** three thirds of eight rows, each rounded, are nine rows.

# %% name="calibration-predict"
widgets.predict("07g-mixture", "Error on tool calls: calibrated on your mixture over on code alone?", "times")


# %% name="calibration-exercise"
def mixture(served, num_rows):
    """{kind: [tokens of each prompt]} -> {kind: rows}, num_rows together."""
    raise NotImplementedError


# %% name="calibration-check" jupyter={"source_hidden": true}
def check_mixture():
    generator = seeded(1)
    cases = [
        ({"a": [100, 100], "b": [200]}, 8), ({"a": [1] * 900, "b": [100]}, 10), ({"a": [7], "b": [7], "c": [7]}, 8),
        ({"a": [5], "b": []}, 3), ({"a": [990], "b": [10]}, 6), ({"a": [1000]}, 1),
        ({"a": [400], "b": [160], "c": [140]}, 7),
    ]  # fmt: skip
    for _ in range(40):
        kinds, num_rows = (
            int(torch.randint(2, 6, (), generator=generator)),
            int(torch.randint(8, 40, (), generator=generator)),
        )
        sizes = [(1000 * torch.rand(int(torch.randint(1, 9, (), generator=generator)), generator=generator)).int() + 1
                 for _ in range(kinds)]  # fmt: skip
        cases.append(({f"kind {i}": one.tolist() for i, one in enumerate(sizes)}, num_rows))
    for served, num_rows in cases:
        total = sum(map(sum, served.values()))
        due = {kind: num_rows * sum(prompts) / total for kind, prompts in served.items()}
        least = sum(max(1, math.floor(one)) for one in due.values() if one)
        if not least <= num_rows <= sum(max(1, math.ceil(one)) for one in due.values() if one):
            continue  # both rules cannot be kept
        asked = {kind: list(prompts) for kind, prompts in served.items()}
        seen = mixture(asked, num_rows)
        what = f"shares of {num_rows} rows { ({kind: round(one, 2) for kind, one in due.items()}) }, saw {seen}"
        assert isinstance(seen, Mapping), f"expected {{kind: rows}}, saw {seen!r:.80}"
        seen = {kind: seen.get(kind, 0) for kind in served}
        assert all(float(rows) == int(rows) >= 0 for rows in seen.values()), f"{what}: expected whole numbers"
        assert sum(seen.values()) == num_rows, f"{what}: together {sum(seen.values())}, expected {num_rows}"
        for kind, rows in seen.items():
            assert rows or not served[kind], f"{what}: {kind} was served and gets no row"
            assert not rows or served[kind], f"{what}: {kind} was not served"
            assert abs(rows - due[kind]) < 1 - 1e-9, f"{what}: {kind} is off by a row or more. Do you count tokens?"
        assert asked == served, "mixture changed its argument, which belongs to the caller"


mixture_written = tried("mixture", check_mixture)


# %% name="calibration-answer" jupyter={"source_hidden": true}
def answer_mixture(served, num_rows):
    total = sum(sum(prompts) for prompts in served.values())
    due = {kind: num_rows * sum(prompts) / total for kind, prompts in served.items()}
    rows = {kind: max(math.floor(one), 1 if one else 0) for kind, one in due.items()}
    for kind in sorted(due, key=lambda kind: due[kind] - rows[kind], reverse=True)[: num_rows - sum(rows.values())]:
        rows[kind] += 1
    return rows


# %% name="calibration-run"
SERVED = {"code": [300] * 120, "prose": [150] * 200, "tools": [1500] * 40}
if mixture_written or ours("mixture"):
    rows_of_kind = mixture(SERVED, 12)
    mixed = sum(gram_of(calibration_tokens(CALIBRATION[k], n, 96), 3, NAME) for k, n in rows_of_kind.items() if n)
    found = {"rounded to nearest": nearest, **calibrated, f"mixture {rows_of_kind}": errors(by_gptq(mixed))}
    tokens = {kind: sum(prompts) for kind, prompts in SERVED.items()}
    lines = []
    for name, error in found.items():
        mean = sum(error[kind] * tokens[kind] for kind in tokens) / sum(tokens.values())
        lines.append([name, *(f"{one:.2f} %" for one in error.values()), f"{mean:.2f} %"])
    widgets.reveal("07g-mixture", errors(by_gptq(mixed))["tools"] / calibrated["code"]["tools"])
    display(
        widgets.table(lines, ["calibrated on", *(f"error on {kind}" for kind in tokens), "a token served, on average"])
    )
else:
    unwritten("mixture")

# %% [markdown] name="calibration-reading"
# JSON of tools is repetitive: its inputs use few directions, and a method that looks at it spends its freedom on
# them. So calibrated on one kind it may be worse on the others than rounding that looked at nothing, and calibrated
# without that kind it leaves most of what could be had there. *What would a mixture by prompts, not by tokens, have
# given the tools?*
#
# ### Experiment 2: what breaks first
#
# Nine parts: the table (embedding and output projection), and each kind of matrix in the first and in the second half
# of the layers. **Write `harm_alone(parts, coarse, exact, harm)`.** `coarse(part)` rounds a part, `exact(part)` puts
# it back, `harm()` measures the model as it is now. Return `{part: harm with this part rounded and no other}`.
#
# - When you are done, nothing is rounded any more.
#
# **Trap (left rounded):** harm adds up where the last part was not put back, and the last part looks worst.
#
# **The harm of the table over that of the worst of the eight other parts, INT4?**

# %% name="harm-predict"
widgets.predict("07g-breaks", "KL of the table in INT4 over that of the worst other part?", "times")


# %% name="harm-exercise"
def harm_alone(parts, coarse, exact, harm):
    """{part: harm() with this part rounded and no other}."""
    raise NotImplementedError


# %% name="harm-check" jupyter={"source_hidden": true}
def check_harm_alone():
    generator = seeded(2)
    for count in (5, 1, 9):
        parts = [f"part {i}" for i in torch.randperm(count, generator=generator).tolist()]
        alone = dict(zip(parts, torch.rand(count, generator=generator).tolist(), strict=True))
        now, measured = set(), []

        def coarse(part, now=now, parts=parts):
            assert part in parts, f"coarse was given {part!r}, which is no part"
            now.add(part)

        def exact(part, now=now):
            now.discard(part)

        def harm(now=now, alone=alone, measured=measured):
            measured.append(set(now))
            return sum(alone[part] for part in now) * (1 + 0.3 * max(0, len(now) - 1))

        seen = harm_alone(list(parts), coarse, exact, harm)
        assert isinstance(seen, Mapping), f"expected {{part: harm}}, saw {seen!r:.80}"
        assert set(seen) == set(parts), f"expected the parts {sorted(parts)}, saw {sorted(seen)}"
        many = [sorted(one) for one in measured if len(one) > 1]
        assert not many, f"harm was measured with {many[0]} rounded at once" if many else ""
        assert not now, f"at the end still rounded: {sorted(now)}"
        for part in parts:
            say_close(f"{count} parts, {part}", seen[part], alone[part])


harm_written = tried("harm_alone", check_harm_alone)


# %% name="harm-answer" jupyter={"source_hidden": true}
def answer_harm_alone(parts, coarse, exact, harm):
    found = {}
    for part in parts:
        coarse(part)
        found[part] = harm()
        exact(part)
    return found


# %% name="harm-run"
KINDS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
HALVES = {"of layers 0-3": range(4), "of layers 4-7": range(4, 8)}
PARTS = {"table": ["table"]}
for (half, layers), kind in itertools.product(HALVES.items(), KINDS):
    PARTS[f"{kind} {half}"] = [name for name in originals if kind in name and int(name.split(".")[2]) in layers]


def put_part(part, scheme):
    for name in PARTS[part]:
        put(name, scheme)


if harm_written or ours("harm_alone"):
    to_normal = lambda part: put_part(part, None)  # noqa: E731
    alone = {s: harm_alone(list(PARTS), lambda p, s=s: put_part(p, s), to_normal, kl_now) for s in ("int4", "int8")}
    weights = {part: sum(originals.get(name, table).numel() for name in names) for part, names in PARTS.items()}
    in4 = alone["int4"]
    widgets.reveal("07g-breaks", in4["table"] / max(kl for part, kl in in4.items() if part != "table"))
    lines = [[p, f"{weights[p]:,}", f"{kl:.4f}", f"{1e9 * kl / weights[p]:.1f}", f"{alone['int8'][p]:.5f}"]
             for p, kl in sorted(in4.items(), key=lambda one: -one[1])]  # fmt: skip
    display(widgets.table(lines, ["rounded alone", "weights", "KL in INT4", "per 10^9 weights", "KL in INT8"]))
else:
    unwritten("harm_alone")

# %% [markdown] name="allocate-text"
# ### Experiment 3: spend a budget of bits
#
# "Keep the table in 16 bits and put the rest into INT4" is a rule of thumb. It has a size, in bits. There
# are 3⁹ choices, each of nine parts in INT4, in INT8 or in 16 bits. Which of those that are no larger is best?
#
# **Write `choose_bits(costs, budget)`.** `costs` is `{part: {scheme: (bits, harm)}}`: bits are whole numbers for the
# whole part, and harms are taken to add up. Return `{part: scheme}` of the least harm in sum, with at most `budget`
# bits in sum.
#
# - The least harm, not a small one: the check compares with all choices. There are at most nine parts of three schemes.
# - `ValueError` where nothing fits. More bits may also mean more harm.
#
# **Hint:** all choices can be tried. A table "least harm for so many bits", a part at a time, is faster.
#
# **Trap (greedy):** what gains most for a bit may leave bits over that nothing else fits into.


# %% name="allocate-exercise"
def choose_bits(costs, budget):
    """{part: {scheme: (bits, harm)}}, bits -> {part: scheme} of least harm within the budget."""
    raise NotImplementedError


# %% name="allocate-check" jupyter={"source_hidden": true}
def check_choose_bits():
    generator = seeded(3)
    cases = [
        ({"a": {"int4": (4, 1.0), "int8": (8, 0.1)}, "b": {"int4": (40, 1.5), "int8": (80, 0.0)}}, 84),  # greedy by bit
        ({"a": {"int4": (4, 0.1), "int8": (8, 0.3)}}, 100),  # more bits, more harm
        ({"a": {"int4": (4, 0.5)}}, 4),
        ({"a": {"int4": (4, 0.5), "int8": (8, 0.5)}}, 10),  # equally good
        ({"a": {"int4": (4, 0.5), "int8": (8, 0.0)}, "b": {"int4": (4, 0.5), "int8": (8, 0.0)}}, 12),
    ]
    for _ in range(30):
        parts, costs = int(torch.randint(2, 6, (), generator=generator)), {}
        for i in range(parts):
            size, harms = int(torch.randint(1, 30, (), generator=generator)), torch.rand(3, generator=generator)
            harms = sorted(harms.tolist(), reverse=True) if i % 3 else harms.tolist()
            costs[f"part {i}"] = {s: (b * size, h) for s, b, h in zip(("int4", "int8", "none"), (4, 8, 16), harms,
                                                                       strict=True)}  # fmt: skip
        sizes = sum(one["int4"][0] for one in costs.values())
        cases.append((costs, int(sizes * (1 + 3 * float(torch.rand((), generator=generator))))))
    for costs, budget in cases:
        least = math.inf
        for choice in itertools.product(*(one.values() for one in costs.values())):
            if sum(bits for bits, _ in choice) <= budget:
                least = min(least, sum(harm for _, harm in choice))
        seen = choose_bits({part: dict(one) for part, one in costs.items()}, budget)
        what = f"budget {budget}, costs {costs}: saw {seen}"
        assert isinstance(seen, Mapping), f"expected {{part: scheme}}, saw {seen!r:.80}"
        assert set(seen) == set(costs), f"{what}: expected a scheme for each part"
        assert all(seen[part] in costs[part] for part in costs), f"{what}: a scheme that its part does not have"
        bits, harm = (sum(costs[part][seen[part]][i] for part in costs) for i in (0, 1))
        assert bits <= budget, f"{what}: {bits} bits"
        assert harm <= least + 1e-9, f"{what}: a harm of {harm:.4f}, {least:.4f} can be had"
    try:
        seen = choose_bits({"a": {"int4": (4, 0.5)}, "b": {"int4": (4, 0.1)}}, 7)
    except ValueError:
        return
    raise AssertionError(f"8 bits at least, budget 7: expected ValueError, saw {seen}")


allocate_written = tried("choose_bits", check_choose_bits)


# %% name="allocate-answer" jupyter={"source_hidden": true}
def answer_choose_bits(costs, budget):
    best = {0: (0.0, {})}  # bits -> (least harm, the choice)
    for part, schemes in costs.items():
        grown = {}
        for bits, (harm, choice) in best.items():
            for scheme, (more, worse) in schemes.items():
                total = bits + more
                if total <= budget and (total not in grown or harm + worse < grown[total][0]):
                    grown[total] = harm + worse, choice | {part: scheme}
        best = grown
    if not best:
        raise ValueError(f"expected a budget for the smallest schemes, got {budget}")
    return min(best.values(), key=lambda one: one[0])[1]


# %% name="allocate-costs"
def bits_in(part, scheme):
    """Of a part, scales included."""
    found = 0
    for name in PARTS[part]:
        shape = tuple(originals.get(name, table).shape)
        each = Recipe(scheme).scheme_of(name, shape[1]).bits_per_weight(shape) if scheme else 16
        found += round(each * shape[0] * shape[1])
    return found


def with_choice(choice):
    """{kind of text: KL} of the model with {part: scheme}; the model is then as it was."""
    for part, scheme in choice.items():
        put_part(part, scheme)
    found = kl_by_kind()
    for part in choice:
        put_part(part, None)
    return found


# %% [markdown] name="allocate-question"
# The choice is made from harms measured one at a time, and judged with all nine parts as chosen. **KL of your choice
# over that of the rule of thumb, with as many bits?**

# %% name="allocate-predict"
widgets.predict("07g-rule", "KL of the best choice over that of 'table in 16 bits, the rest in INT4'?", "times")

# %% name="allocate-run"
if (harm_written or ours("harm_alone")) and (allocate_written or ours("choose_bits")):
    costs = {p: {s: (bits_in(p, s), alone[s][p]) for s in alone} | {None: (bits_in(p, None), 0.0)} for p in PARTS}
    rule = dict.fromkeys(PARTS, "int4") | {"table": None}
    size = lambda choice: sum(costs[p][s][0] for p, s in choice.items())  # noqa: E731
    choices = {
        "INT4 everywhere": dict.fromkeys(PARTS, "int4"),
        "the rule": rule,
        "yours": choose_bits(costs, size(rule)),
    }
    found = {name: with_choice(choice) for name, choice in choices.items()}
    mean = {name: statistics.mean(kl.values()) for name, kl in found.items()}
    widgets.reveal("07g-rule", mean["yours"] / mean["the rule"])
    total = sum(weights.values())
    lines = [[n, f"{size(choice) / total:.2f}", ", ".join(p for p, s in choice.items() if s == "int4") if n == "yours" else "-",
              *(f"{found[n][kind]:.4f}" for kind in WINDOWS), f"{mean[n]:.4f}"]
             for n, choice in choices.items()]  # fmt: skip
    display(widgets.table(lines, ["", "bits a weight", "in INT4", *(f"KL, {kind}" for kind in WINDOWS), "mean"]))
else:
    unwritten("choose_bits, on the harms of experiment 2")

# %% [markdown] name="allocate-reading"
# The rule of thumb gives the table all 16 bits, and what 8 of them leave to be gained there is next to nothing: what
# it saves pays for INT8 elsewhere. Read the columns, too. A choice is made for a mean; a platform has kinds of
# prompts, and each is watched by itself, since an average hides the one that broke.

# %% [markdown] name="temperature-text"
# ## 4. The same thing inside the engine
#
# ### Experiment 4: as sure as before
#
# Rounding is noise on the logits, and noise makes a model less sure. A temperature below 1 makes it surer. **Write
# `as_sure(logprobs, entropy)`.** `logprobs` is `[tokens, vocabulary]`, of the quantized model; `entropy` is the mean
# entropy of the next token, in nats, of the model before. Return the temperature at which the quantized model has it
# too.
#
# - Dividing logits by a temperature and dividing log-probabilities by it give the same distribution, after a softmax.
# - Within 0.001 nats. The answer lies between 0.1 and 10.
#
# **Hint:** entropy rises with temperature, so halve an interval.
#
# **Trap (mean of what):** the mean over tokens of their entropies, not the entropy of their mean distribution.
#
# **All matrices of the layers rounded to ternary, at which temperature is the model as sure as it was?**

# %% name="temperature-predict"
widgets.predict("07g-temperature", "Ternary: temperature at which the mean entropy is that of before?", "")


# %% name="temperature-exercise"
def as_sure(logprobs, entropy):
    """The temperature at which the mean entropy of logprobs [tokens, vocabulary] is `entropy`, in nats."""
    raise NotImplementedError


# %% name="temperature-check" jupyter={"source_hidden": true}
def entropy_at(logprobs, temperature):
    q = (logprobs.double() / temperature).log_softmax(-1)
    return float(-(q.exp() * q).sum(-1).mean())


def check_as_sure():
    generator = seeded(4)
    for spread, temperature, tokens in (
        (1, 1.0, 5),
        (3, 0.8, 40),
        (3, 1.7, 40),
        (5, 0.3, 9),
        (2, 4.0, 7),
        (6, 0.97, 1),
        (8, 0.12, 9),
        (3, 9.0, 9),
    ):
        logits = spread * torch.randn(tokens, 60, generator=generator)
        logits[::2] *= 0.2  # some tokens are sure, some are not
        logprobs = logits.log_softmax(-1)
        wanted, before = entropy_at(logprobs, temperature), logprobs.clone()
        seen = float(as_sure(logprobs, wanted))
        what = f"{tokens} tokens, an entropy of {wanted:.3f} nats"
        assert torch.equal(logprobs, before), "as_sure changed its argument, which belongs to the caller"
        assert 0 < seen < math.inf, f"{what}: saw the temperature {seen}"
        got = entropy_at(logprobs, seen)
        assert abs(got - wanted) < 1e-3, f"{what}: at your {seen:.4f} it is {got:.3f} nats (expected {temperature})"


temperature_written = tried("as_sure", check_as_sure)


# %% name="temperature-answer" jupyter={"source_hidden": true}
def answer_as_sure(logprobs, entropy):
    low, high = 0.1, 10.0
    for _ in range(50):
        middle = (low * high) ** 0.5
        q = (logprobs / middle).log_softmax(-1)
        if float(-(q.exp() * q).sum(-1).mean()) < entropy:
            low = middle
        else:
            high = middle
    return middle


# %% name="temperature-run"
def in_nucleus(logprobs, top_p=0.9):
    """How many tokens top-p leaves, on average."""
    most = logprobs.exp().sort(-1, descending=True).values.cumsum(-1)
    return float(((most < top_p).sum(-1) + 1).float().mean())


if temperature_written or ours("as_sure"):
    right, lines, fitted = torch.cat(list(EXACT.values())), [], {}
    for scheme in ("int4", "ternary"):
        for name in originals:
            put(name, scheme)
        noisy = torch.cat([logprobs_of(window) for window in WINDOWS.values()])
        for name in originals:
            put(name, None)
        fitted[scheme] = as_sure(noisy, entropy_at(right, 1))
        for t in (1.0, fitted[scheme]):
            now = (noisy / t).log_softmax(-1)
            kl = float((right.exp() * (right - now)).sum(-1).mean())
            lines.append([scheme, f"{t:.3f}", f"{entropy_at(noisy, t):.3f}", f"{in_nucleus(now):.0f}", f"{kl:.4f}"])
    widgets.reveal("07g-temperature", fitted["ternary"])
    print(f"before: {entropy_at(right, 1):.3f} nats, {in_nucleus(right):.0f} tokens in the nucleus")
    heads = ["rounded to", "temperature", "entropy, nats", "tokens in top-p 0.9", "KL to the original"]
    display(widgets.table(lines, heads))
else:
    unwritten("as_sure")

# %% [markdown] name="temperature-reading"
# With the entropy of before, it is as sure as before, of other things: here the KL to the original does not fall
# by it, it rises. A temperature undoes the *flattening*, not the error. So look at temperature and top-p again after
# a change of precision, and tune them on the task; with a 4-bit model that is any good there is little to tune.
#
# ### Experiment 5: evidence in a quantized cache
#
# An agent looked something up, then came other text, and now the answer must be repeated from the middle of the
# context. **Write `recall(logprobs, filler, evidence, question, answer, depth)`.** All but two are lists of tokens.
# The prompt is the filler with the evidence inside, and the question at its end. `depth` is 0 to 1: `round(depth *
# len(filler))` tokens of the filler stand before the evidence. `logprobs(tokens)` is the model: `[len(tokens),
# vocabulary]`, row i for the token *after* token i. Return the mean log-probability of the answer's tokens, each
# given the prompt and the answer before it.
#
# **Hint:** one call with prompt and answer is enough.
#
# **Trap (one place):** the first token of the answer is foretold at the last token of the question.
#
# Then it is asked of the course model, with the key channels of a large model planted in it (four that are ten times
# as large, `e_kv_cache`). **Evidence in the middle of 256 tokens, an INT4 cache with a scale for each token and head:
# how many nats does a token of the answer lose?**

# %% name="recall-predict"
widgets.predict(
    "07g-recall", "INT4 per token, planted channels, depth 0.5: nats lost by a token of the answer?", "nats"
)


# %% name="recall-exercise"
def recall(logprobs, filler, evidence, question, answer, depth):
    """Mean log-probability of the answer's tokens behind filler, evidence at `depth` in it, and question."""
    raise NotImplementedError


# %% name="recall-check" jupyter={"source_hidden": true}
def told(tokens, vocabulary=50):
    """A made-up model in which every token before counts: row i depends on tokens[: i + 1], and on their order."""
    rows, state = [], 1
    for token in tokens:
        state = (state * 31 + token + 7) % 9973
        rows.append(((torch.arange(vocabulary) * (state % 97 + 1) + state) % 23).float())
    return torch.stack(rows).log_softmax(-1)


def check_recall():
    generator = seeded(5)
    for depth, sizes in (
        (0.0, (9, 3, 2, 1)),
        (1.0, (9, 3, 2, 2)),
        (0.5, (10, 4, 3, 3)),
        (0.3, (7, 1, 1, 4)),
        (0.8, (0, 2, 1, 2)),
    ):
        filler, evidence, question, answer = (torch.randint(50, (n,), generator=generator).tolist() for n in sizes)
        asked, cut = [list(one) for one in (filler, evidence, question, answer)], round(depth * len(filler))
        tokens = filler[:cut] + evidence + filler[cut:] + question
        expected = statistics.mean(float(told(tokens + answer[:i])[-1, answer[i]]) for i in range(len(answer)))
        seen = recall(told, *asked, depth)
        assert asked == [filler, evidence, question, answer], "recall changed a list, which belongs to the caller"
        say_close(f"{sizes[0]} tokens of filler, depth {depth}, an answer of {sizes[3]}", seen, expected, 1e-4)


recall_written = tried("recall", check_recall)


# %% name="recall-answer" jupyter={"source_hidden": true}
def answer_recall(logprobs, filler, evidence, question, answer, depth):
    cut = round(depth * len(filler))
    tokens = filler[:cut] + evidence + filler[cut:] + question
    found = logprobs(tokens + answer)
    return statistics.mean(float(found[len(tokens) - 1 + i, token]) for i, token in enumerate(answer))


# %% name="recall-caches" jupyter={"source_hidden": true}
class Through(RecomputeAttention):
    """Attention that sees keys and values as a cache gives them back. keys, values: [tokens, heads, head_dim] -> same."""

    def __init__(self, keys, values):
        super().__init__(c.attention_scale, c.attention_softcap)
        self.keys, self.values = keys, values

    def forward(self, q, k, v, layer, kv_cache, batch):
        return super().forward(q, self.keys(k), self.values(v), layer, kv_cache, batch)


def in_steps(x, bits, dim):
    most = 2 ** (bits - 1) - 1
    scale = x.abs().amax(dim, keepdim=True).clamp(min=1e-9) / most
    return (x / scale).round() * scale


def per_channel(x, bits, block=64):
    """A scale for each channel of each head over `block` tokens; the last, partial block stays as it is."""
    whole = len(x) // block * block
    blocks = x[:whole].unflatten(0, (-1, block))
    return torch.cat((in_steps(blocks, bits, 1).flatten(0, 1), x[whole:]))


planted = torch.ones(c.head_dim)
planted[[3, 19, 35, 51]] = 10  # and the queries by a tenth, so that every score is what it was
same, per_token = lambda x: x, lambda x, bits: in_steps(x, bits, -1)
CACHES = {
    "16 bits": (same, same),
    "INT8, token and head": (lambda k: per_token(k * planted, 8) / planted, lambda v: per_token(v, 8)),
    "INT4, token and head": (lambda k: per_token(k * planted, 4) / planted, lambda v: per_token(v, 4)),
    "INT4, split as in KIVI": (lambda k: per_channel(k * planted, 4) / planted, lambda v: per_token(v, 4)),
}


def looked_up(cache, depth):
    """Mean over four calls of a tool whose result is asked for once more."""
    found = []
    for i, key in enumerate(("brovek", "tulami", "senqor", "habdil")):
        line = f'\n{{"tool": "lookup", "key": "{key}", "result": "'
        answer = encode_text(f"{key[::-1]}-{3117 + 577 * i}")
        evidence = encode_text(line) + answer + encode_text('"}\n')
        filler = HELD_OUT["code"][40 * i : 40 * i + 256]
        told_by = lambda tokens: logprobs_of(tokens, Through(*cache))  # noqa: E731
        found.append(recall(told_by, filler, evidence, encode_text(line), answer, depth))
    return statistics.mean(found)


# %% name="recall-run"
if recall_written or ours("recall"):
    depths = (0.0, 0.5, 1.0)
    said = {name: [looked_up(cache, depth) for depth in depths] for name, cache in CACHES.items()}
    text = HELD_OUT["code"][:301]
    ahead = {
        n: logprobs_of(text[:-1], Through(*cache)).gather(1, torch.tensor(text[1:])[:, None]).mean()
        for n, cache in CACHES.items()
    }
    for name, row in said.items():
        row.append(float(ahead[name]))
    widgets.reveal("07g-recall", said["16 bits"][1] - said["INT4, token and head"][1])
    lines = [[n, *(f"{one:.2f} ({one - base:+.2f})" for one, base in zip(row, said["16 bits"], strict=True))]
             for n, row in said.items()]  # fmt: skip
    display(widgets.table(lines, ["cache", *(f"evidence at depth {depth}" for depth in depths), "a token of code"]))
else:
    unwritten("recall")

# %% [markdown] name="recall-reading"
# Log-probabilities in nats, and in brackets what the cache costs. The last column is what a mean over text says of
# the same caches, and it is the smallest: most tokens follow from the few before them. What has to be fetched by its
# key, from among many, is what wrong keys spoil. With scales along the channel (KIVI's split) the same four bits keep
# nearly all of it. How far back the evidence is matters little for what the cache costs: right before the question it
# has to be fetched by its key as well. What depth changes is the first row, and what the model does not recall in 16
# bits, no cache can lose. *In which column would you have looked first, and what would you have concluded?*

# %% [markdown] name="floors-text"
# ## 5. Measure and explain
#
# ### Experiment 6: forecast TTFT and TPOT
#
# **Write `floors(m, kind, gpu, prompt, batch, context)`**, the pair (seconds to the first token of a prompt alone,
# seconds of a decode step of a batch in which every request has `context` tokens, the new one included). All
# arguments are plain numbers:
#
# - `m`: `matrices` and `head` (weights of the layers and of the output projection, each used once for a token; the
#   head only for a prompt's *last* token), `cached` (values in a token's keys and values), `per_pair` (operations of
#   attention for a query with a key).
# - `kind`: `bits` of a weight of the layers, scales included (the head has 16), `kept`, bytes of a cached value, and
#   `peak`, the name of the arithmetic.
# - `gpu`: `bandwidth` in bytes per second, and operations per second by name: `gpu["bf16"]`, `gpu["fp8"]`.
#
# A step takes as long as the longer of two things, reading and arithmetic. Reading: all weights once, and for each
# request its cache, in prefill written instead, as many bytes. Arithmetic: two operations a weight and token, and
# attention: a query meets itself and all before it, n (n + 1) / 2 pairs in a prompt of n.
#
# **Trap (bits):** 8 bits are a byte.


# %% name="floors-exercise"
def floors(m, kind, gpu, prompt, batch, context):
    """(TTFT of a prompt alone, TPOT of a batch), seconds, at the limits of the hardware."""
    raise NotImplementedError


# %% name="floors-check" jupyter={"source_hidden": true}
EVERY_KIND = {
    "16 bits": {"bits": 16, "kept": 2, "peak": "bf16"},
    "weights in 4 bits": {"bits": kv_cache.bits_per_weight(4, 128), "kept": 2, "peak": "bf16"},
    "weights in 8 bits": {"bits": kv_cache.bits_per_weight(8, 128), "kept": 2, "peak": "bf16"},
    "weights and arithmetic in FP8": {"bits": 8, "kept": 2, "peak": "fp8"},
    "cache in 8 bits": {"bits": 16, "kept": 1, "peak": "bf16"},
}


def numbers_of(shape):
    head = shape.vocab_size * shape.hidden_size
    return {"matrices": shape.linear_params - head, "head": head, "cached": kv_cache.bytes_per_token(shape, 1),
            "per_pair": latency.flops_per_pair(shape)[0]}  # fmt: skip


def check_floors():
    for name, gpu in (("llama-3-8b", device("H100")), ("llama-3-70b", device("H100")), ("llama-2-7b", device("H200"))):
        shape = shape_of(name)
        m, plain_gpu = numbers_of(shape), {"bandwidth": gpu.bandwidth} | {p: gpu.peak(p) for p in ("bf16", "fp8")}
        for (words, kind), (prompt, batch, context) in itertools.product(
            EVERY_KIND.items(), ((1, 1, 1), (200, 1, 4000), (4000, 32, 4000), (20, 256, 100), (300, 3, 30_000))
        ):
            weights = (m["matrices"] * kind["bits"] + m["head"] * 16) / 8
            expected = (
                latency.step_bound(latency.engine_pass_flops(shape, prompt),
                                   weights + latency.cache_traffic(shape, prompt, 0, kind["kept"]), gpu, kind["peak"]),
                latency.step_bound(batch * latency.decode_flops(shape, context),
                                   weights + batch * latency.cache_traffic(shape, 1, context - 1, kind["kept"]), gpu,
                                   kind["peak"]),
            )  # fmt: skip
            seen = floors(dict(m), dict(kind), dict(plain_gpu), prompt, batch, context)
            assert len(seen) == 2, f"expected (TTFT, TPOT), saw {seen!r:.80}"
            for which, one, right, load in zip(("TTFT", "TPOT"), seen, expected,
                                               (f"a prompt of {prompt:,}", f"{batch} x {context:,} tokens"), strict=True):  # fmt: skip
                say_close(
                    f"{name}, {words}, {load}: {which} in microseconds", 1e6 * float(one), 1e6 * float(right), 1e-6
                )


floors_written = tried("floors", check_floors)


# %% name="floors-answer" jupyter={"source_hidden": true}
def answer_floors(m, kind, gpu, prompt, batch, context):
    weights = (m["matrices"] * kind["bits"] + m["head"] * 16) / 8
    per_token, peak = m["cached"] * kind["kept"], gpu[kind["peak"]]
    pairs = prompt * (prompt + 1) / 2
    prefill = 2 * (m["matrices"] * prompt + m["head"]) + m["per_pair"] * pairs
    decode = batch * (2 * (m["matrices"] + m["head"]) + m["per_pair"] * context)
    ttft = max(prefill / peak, (weights + prompt * per_token) / gpu["bandwidth"])
    tpot = max(decode / peak, (weights + batch * context * per_token) / gpu["bandwidth"])
    return ttft, tpot


# %% name="floors-forecast"
if floors_written or ours("floors"):
    h100, m8 = device("H100"), numbers_of(shape_of("llama-3-8b"))
    rates = {"bandwidth": h100.bandwidth, "bf16": h100.peak("bf16"), "fp8": h100.peak("fp8")}
    lines = []
    for name, kind in EVERY_KIND.items():
        cells = [
            floors(m8, kind, rates, prompt, batch, 4000)[i]
            for i, prompt, batch in ((0, 4000, 1), (1, 1, 1), (1, 1, 32))
        ]
        lines.append([name, *map(format_seconds, cells)])
    display(
        widgets.table(lines, ["8B on an H100, floors", "TTFT, prompt of 4,000", "TPOT at 4,000, batch 1", "batch 32"])
    )
else:
    unwritten("floors")

# %% [markdown] name="floors-here-text"
# Now a forecast that you can test. This machine's two limits are measured first, by reading 64 MiB and by a product
# of square matrices. Then TTFT of 256 tokens and TPOT of one request are measured, in float32. **The course model in
# INT8: time of its decode step over that without quantization?**


# %% name="floors-limits" jupyter={"source_hidden": true}
def least_seconds(work, repeats=7):
    """Of several runs: what others do on this machine only ever adds."""
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def served_seconds(quantization, prompt=256, new=12):
    """(TTFT, TPOT) of one request of the course model, from the engine's trace; the second of two runs."""
    options = {"dtype": "float32", "device": "cpu", "kv_cache_bytes": 2**23, "prefix_cache": "off"}
    llm = LLM(FOLDER, quantization=quantization, **options)
    sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    for _ in range(2):
        llm.engine.trace.events.clear()
        llm.generate([HELD_OUT["prose"][:prompt]], sampling)
    steps = [
        (step.finished_at - step.started_at, sum(row.num_tokens for row in step.rows))
        for step in llm.engine.trace.steps()
    ]
    return sum(s for s, n in steps if n > 1), statistics.median(s for s, n in steps if n == 1)


# %% name="floors-predict"
widgets.predict("07g-int8-here", "Course model on this machine, INT8 over none, TPOT at batch 1?", "times")

# %% name="floors-run"
if floors_written or ours("floors"):
    many, square = torch.ones(2**24), torch.ones(1024, 1024)
    here = {
        "bandwidth": many.nbytes / least_seconds(many.sum),
        "fp32": 2 * 1024**3 / least_seconds(lambda: square @ square),
    }
    print(f"this machine, one thread: {here['bandwidth'] / 1e9:.0f} GB/s, {here['fp32'] / 1e9:.0f} 10^9 operations/s")
    mine = {"matrices": sum(w.numel() for w in originals.values()), "head": table.numel(),
            "cached": 2 * c.num_layers * c.num_kv_heads * c.head_dim, "per_pair": 4 * c.num_layers * c.num_heads * c.head_dim}  # fmt: skip
    took, lines = {}, []
    for name, bits in (("none", 32), ("int8", 8), ("int4", kv_cache.bits_per_weight(4, 128))):
        foretold = floors(mine, {"bits": bits, "kept": 4, "peak": "fp32"}, here, 256, 1, 262)
        took[name] = served_seconds(name)
        lines += [[name, w, format_seconds(f), format_seconds(t), f"{t / f:.1f}"] for w, f, t in
                  zip(("TTFT, 256 tokens", "TPOT at 262"), foretold, took[name], strict=True)]  # fmt: skip
    widgets.reveal("07g-int8-here", took["int8"][1] / took["none"][1])
    display(widgets.table(lines, ["weights", "", "forecast", "measured", "over the forecast"]))
else:
    unwritten("floors")

# %% [markdown] name="floors-reading"
# What was measured here are the rates of two products, not limits, so a forecast can be beaten: there are faster
# products in 8 bits on some CPUs. Its two statements hold all the same. Prefill is arithmetic, and reading fewer
# bytes is no help there; what becomes of TTFT is a matter of which product this CPU has for the format. A decode step
# reads weights, and its forecast falls with them. Where the last column rises from one format to the next, the time
# fell by less, or not at all: much of a step of a model this small is the fixed cost of Python and of many small products, which no
# format makes smaller. The larger a model, the nearer TPOT comes to its forecast: check that on yours (experiment 9, below).
#
# ### Experiment 7: zeros that save time
#
# Single weights set to zero keep the matrix its size. **Write `without_neurons(gate_up, down, scores, share)`**, an
# MLP down(silu(gate x) · up x) with fewer neurons. `gate_up` is `[2 n, in]`: n rows of gate, then n rows of up.
# `down` is `[out, n]`, `scores` `[n]`. The `int(share * n)` neurons of least score go. Return (`gate_up` `[2 m, in]`,
# `down` `[out, m]`): smaller matrices whose MLP computes what the old one did with these neurons silenced. The order
# of the neurons is yours.
#
# **Trap (two rows):** a neuron has a row of gate, a row of up, and a column of down.
#
# **Half of the neurons gone: time of the MLP for one token over that before? And with as many single weights zero?**
# (The prediction asks for the first.)

# %% name="neurons-predict"
widgets.predict("07g-neurons", "Half of the neurons gone: time of the MLP over that of the whole one?", "times")


# %% name="neurons-exercise"
def without_neurons(gate_up, down, scores, share):
    """(gate_up [2 m, in], down [out, m]) of the m = n - int(share n) neurons with the largest scores [n]."""
    raise NotImplementedError


# %% name="neurons-check" jupyter={"source_hidden": true}
def mlp(x, gate_up, down):
    gate, up = (x @ gate_up.T).chunk(2, -1)
    return (torch.nn.functional.silu(gate) * up) @ down.T


def check_without_neurons():
    generator = seeded(7)
    for n, inputs, out, share in (
        (8, 5, 4, 0.5),
        (7, 6, 6, 0.5),
        (12, 12, 12, 0.25),
        (6, 3, 5, 0.0),
        (10, 4, 3, 0.9),
        (9, 9, 2, 0.34),
    ):
        gate_up, down = torch.randn(2 * n, inputs, generator=generator), torch.randn(out, n, generator=generator)
        scores, x = torch.randperm(n, generator=generator).float(), torch.randn(6, inputs, generator=generator)
        kept = scores >= int(share * n)  # scores are 0 to n - 1
        expected, before = mlp(x, gate_up, down * kept), [t.clone() for t in (gate_up, down, scores)]
        seen = without_neurons(gate_up, down, scores, share)
        what = f"{n} neurons, share {share}"
        assert len(seen) == 2, f"{what}: expected (gate_up, down), saw {seen!r:.60}"
        assert all(torch.equal(a, b) for a, b in zip((gate_up, down, scores), before, strict=True)), (
            "an argument changed"
        )
        m, shapes = int(kept.sum()), [list(t.shape) for t in seen]
        assert shapes == [[2 * m, inputs], [out, m]], f"{what}: expected {[2 * m, inputs]} and {[out, m]}, saw {shapes}"
        off = float((mlp(x, *seen) - expected).abs().max())
        assert off < 1e-4, f"{what}: the outputs are off by {off:.2g} from those of the MLP with these neurons silenced"


neurons_written = tried("without_neurons", check_without_neurons)


# %% name="neurons-answer" jupyter={"source_hidden": true}
def answer_without_neurons(gate_up, down, scores, share):
    n = down.shape[1]
    kept = scores.argsort()[int(share * n) :].sort().values
    return gate_up[torch.cat((kept, kept + n))], down[:, kept]


# %% name="neurons-tools" jupyter={"source_hidden": true}
MLPS = [f"model.layers.{i}.mlp" for i in range(c.num_layers)]


@torch.inference_mode()
def mlp_grams():
    """{name of a down_proj: norms of its inputs [n]}, over calibration rows of all kinds."""
    tokens = torch.cat([calibration_tokens(ids, 2, 96) for ids in CALIBRATION.values()])
    rows, found = Rows.of(model, tokens), {}
    for layer in model.layers:
        for linear in linears_of(layer):
            if linear.name.rpartition(".")[2] in ("gate_up_proj", "down_proj"):
                found[linear.name] = rows.watch(layer, linear, Statistics()).known_gram.diagonal().sqrt()
        rows.advance(layer)
    return found


def kl_with_mlps(change):
    """change(gate_up, down, norms of x, norms of the neurons) -> (gate_up, down) of the same sizes, for all layers."""
    for name in MLPS:
        both = f"{name}.gate_up_proj", f"{name}.down_proj"
        for one, new in zip(both, change(*(originals[b] for b in both), *(norms[b] for b in both)), strict=True):
            matrix(linears[one]).copy_(new)
    found = kl_now()
    for name in MLPS:
        put(f"{name}.gate_up_proj", None)
        put(f"{name}.down_proj", None)
    return found


def filled_up(small, like):
    """The smaller MLP as one of the old size, whose other neurons are silent."""
    (gate, up), down, n = small[0].chunk(2), small[1], like.shape[1]
    new_gate_up, new_down = torch.zeros(2 * n, gate.shape[1]), torch.zeros_like(like)
    new_gate_up[: len(gate)], new_gate_up[n : n + len(up)], new_down[:, : down.shape[1]] = gate, up, down
    return new_gate_up, new_down


def single_weights(share):
    def change(gate_up, down, of_x, of_neurons):
        return tuple(w * pruning.keep(pruning.wanda(w, s), share) for w, s in ((gate_up, of_x), (down, of_neurons)))

    return change


def whole_neurons(share):
    def change(gate_up, down, of_x, of_neurons):
        return filled_up(without_neurons(gate_up, down, down.norm(dim=0) * of_neurons, share), down)

    return change


# %% name="neurons-run"
if neurons_written or ours("without_neurons"):
    norms, lines = mlp_grams(), []
    int4 = with_choice(dict.fromkeys([p for p in PARTS if "gate" in p or "down" in p], "int4"))
    gate_up, down = (originals[f"{MLPS[3]}.{name}"] for name in ("gate_up_proj", "down_proj"))
    x = torch.randn(1, c.hidden_size, generator=seeded(0))
    whole, taken = least_seconds(lambda: mlp(x, gate_up, down), 200), {}
    for share in (0.125, 0.25, 0.5):
        small = without_neurons(gate_up, down, down.norm(dim=0), share)
        zeros = [w * pruning.keep(w.abs(), share) for w in (gate_up, down)]
        taken[share] = [least_seconds(lambda w=w: mlp(x, *w), 200) / whole for w in (zeros, small)]
        kls = kl_with_mlps(single_weights(share)), kl_with_mlps(whole_neurons(share))
        lines.append([f"{share:.1%}", *(f"{one:.4f}" for one in kls), *(f"{one:.2f}" for one in taken[share])])
    widgets.reveal("07g-neurons", taken[0.5][1])
    print(f"the MLPs in INT4, nothing removed: KL {statistics.mean(int4.values()):.4f}")
    display(
        widgets.table(lines, ["removed", "KL, single weights", "KL, neurons", "time, single weights", "time, neurons"])
    )
else:
    unwritten("without_neurons")

# %% [markdown] name="neurons-reading"
# Which is the better pruning? Per weight removed, single weights: their KL is a fraction. Per millisecond saved,
# there is only one column to look at, since a zero takes as long as any other number. (Where the times of single weights
# are not near 1, other programs disturbed them.) And both fall off a cliff between an eighth and a half, while INT4, the
# line above the table, takes three quarters of the bits away.
#
# ### Experiment 8: who writes what a student learns from
#
# **Write `distill_loss(way, student, teacher, starts, write)`**, a scalar to call `backward()` on. `student(tokens)`
# and `teacher(tokens)` give logits `[rows, length, vocabulary]` for tokens `[rows, length]`, row i for the token
# *after* token i. `write(model, starts)` has a model write: tokens `[rows, 1 + new]`, whose first are `starts`
# `[rows]`. All means are over rows and the written tokens, in nats.
#
# | `way` | who writes | the loss of a written token |
# |---|---|---|
# | `"response"` | the teacher | minus the log-probability that the student gives to it |
# | `"logits"` | the teacher | KL(teacher ‖ student), over the whole vocabulary |
# | `"on-policy"` | the student | KL(student ‖ teacher), over the whole vocabulary |
#
# Call `write` once. No gradient reaches the teacher.
#
# **Trap (one place):** the logits at the last token foretell a token that nobody wrote.


# %% name="distill-exercise"
def distill_loss(way, student, teacher, starts, write):
    """Mean loss in nats over the written tokens; way: "response", "logits" or "on-policy"."""
    raise NotImplementedError


# %% name="distill-check" jupyter={"source_hidden": true}
def check_distill_loss():
    generator = seeded(8)
    for way, vocabulary, rows, new in itertools.product(("response", "logits", "on-policy"), (5, 11), (1, 4), (1, 6)):
        mine, theirs = (torch.randn(vocabulary, vocabulary, generator=generator).requires_grad_() for _ in range(2))
        models = {"student": lambda tokens, t=mine: t[tokens], "teacher": lambda tokens, t=theirs: t[tokens]}
        starts, wrote = torch.randint(vocabulary, (rows,), generator=generator), []

        def write(model, starts, models=models, wrote=wrote, new=new, vocabulary=vocabulary):
            wrote.append(next(name for name, one in models.items() if one is model))
            text = torch.randint(vocabulary, (len(starts), new), generator=seeded(len(wrote[0])))
            return torch.cat((starts[:, None], text), 1)

        seen = distill_loss(way, models["student"], models["teacher"], starts.clone(), write)
        right = "student" if way == "on-policy" else "teacher"
        what = f"{way}, {rows} rows of {new} written tokens"
        assert wrote == [right], f"{what}: expected that the {right} writes, once; saw {wrote}"
        text = write(models[right], starts)
        expected = torch.zeros(())
        for row, i in itertools.product(range(rows), range(new)):
            q, p = (one[text[row, i]].log_softmax(-1) for one in (mine, theirs.detach()))
            each = {
                "response": -q[text[row, i + 1]],
                "logits": (p.exp() * (p - q)).sum(),
                "on-policy": (q.exp() * (q - p)).sum(),
            }
            expected = expected + each[way] / (rows * new)
        assert isinstance(seen, torch.Tensor), f"{what}: expected a tensor, saw {seen!r:.60}"
        assert seen.numel() == 1, f"{what}: expected a scalar, saw {list(seen.shape)}"
        say_close(what, seen, float(expected.detach()), 1e-4)
        assert seen.requires_grad, (
            f"{what}: backward() has nowhere to go: the loss depends on no parameter of the student"
        )
        seen.sum().backward()
        assert theirs.grad is None or not theirs.grad.any(), f"{what}: a gradient reaches the teacher"
        off = float((mine.grad - torch.autograd.grad(expected, mine)[0]).abs().max())
        assert off < 1e-4, f"{what}: the student's gradient is off by {off:.2g}"


distill_written = tried("distill_loss", check_distill_loss)


# %% name="distill-answer" jupyter={"source_hidden": true}
def answer_distill_loss(way, student, teacher, starts, write):
    tokens = write(student if way == "on-policy" else teacher, starts)
    log_q = student(tokens)[:, :-1].log_softmax(-1)
    with torch.no_grad():
        log_p = teacher(tokens)[:, :-1].log_softmax(-1)
    if way == "response":
        return -log_q.gather(2, tokens[:, 1:, None]).mean()
    if way == "logits":
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    return (log_q.exp() * (log_q - log_p)).sum(-1).mean()


# %% [markdown] name="distill-lane-text"
# The student learns to keep to a lane. A token is a place from −10 to 10, the teacher steers half-way back to the
# middle in every step, and from the middle it never gets far. A student of 21 × 21 logits that begins with nothing
# learns for 60 steps, sixteen rows of 24 tokens each. Then it drives by itself, and its share of time outside the
# lane (further than 4 off) is computed exactly. **Taught by `"logits"`: what percentage of its time is the student
# outside?**

# %% name="distill-lane"
place = torch.arange(21.0) - 10
steering = -((place[None] - 0.5 * place[:, None]) ** 2) / (2 * 0.7**2)  # logits of the next place, from each
teacher_lane = lambda tokens: steering[tokens]  # noqa: E731


def driven(logits, steps=24):
    """(share of time outside the lane, KL(student || teacher) where the student is), of all texts together: exact."""
    q, p = logits.log_softmax(-1), steering.log_softmax(-1)
    where, outside, apart = (place == 0).float(), 0.0, 0.0
    for _ in range(steps):
        apart += float(where @ (q.exp() * (q - p)).sum(-1)) / steps
        where = where @ q.exp()
        outside += float(where[place.abs() > 4].sum()) / steps
    return outside, apart


# %% name="distill-taught"
def taught(way, steps=60):
    """[21, 21]: the logits of a student that began with nothing."""
    dice, logits = seeded(0), torch.zeros(21, 21, requires_grad=True)

    @torch.no_grad()
    def write(model, starts):
        tokens = starts[:, None]
        for _ in range(24):
            chances = model(tokens)[:, -1].softmax(-1)
            tokens = torch.cat((tokens, torch.multinomial(chances, 1, generator=dice)), 1)
        return tokens

    optimizer, learner = torch.optim.Adam([logits], lr=0.1), lambda tokens: logits[tokens]
    for _ in range(steps):
        optimizer.zero_grad()
        distill_loss(way, learner, teacher_lane, torch.full((16,), 10), write).backward()
        optimizer.step()
    return logits.detach()


# %% name="distill-predict"
widgets.predict("07g-lane", "Student taught on the teacher's text by KL: time outside the lane?", "%")

# %% name="distill-run"
if distill_written or ours("distill_loss"):
    found = {way: driven(taught(way)) for way in ("response", "logits", "on-policy")} | {
        "the teacher itself": driven(steering)
    }
    widgets.reveal("07g-lane", 100 * found["logits"][0])
    lines = [[way, f"{outside:.2%}", f"{apart:.2f}"] for way, (outside, apart) in found.items()]
    display(widgets.table(lines, ["taught by", "outside the lane", "KL(student || teacher) where it drives"]))
else:
    unwritten("distill_loss")

# %% [markdown] name="distill-reading"
# The teacher's text shows how to drive in the middle, since that is where the teacher is. The student slips now and
# then, comes to places that no text showed, and there it has learned nothing, so it stays out. Whole distributions
# instead of single tokens (`"logits"`) change little about that: they are those of the same places. On-policy, the
# first slips are the first lessons.
#
# When is which worth it? **Response** needs the teacher's text only, and it can be bought. **Logits** need its
# distributions, and learn more from a token. **On-policy** needs the teacher beside the student all the time, and
# text written anew while it learns; it wins where mistakes add up over a long text. How far are the texts apart, for
# the course's draft as student of the target? Each writes 64 tokens, greedy. **At how many places of its own text
# would the target have put another token first: how many times as many as on the target's text?**

# %% name="mismatch-predict"
widgets.predict("07g-mismatch", "Places where both differ: on the draft's text over on the target's text?", "times")

# %% name="mismatch"
STARTS = "def read|class Pars|import os\n|    for name in|# The |if __name__|return self.|try:\n    ".split("|")
draft = load_model(course_model("draft"), torch.float32, linear_method=plain)
lines, other_first = [], {}
for who in ("target", "draft"):
    llm = LLM(course_model(who), dtype="float32", kv_cache_bytes=2**21)
    greedy = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)
    outputs = llm.generate([encode_text(start) for start in STARTS], greedy)
    written = [encode_text(start) + one.outputs[0].token_ids for start, one in zip(STARTS, outputs, strict=True)]
    q, p = (torch.cat([logprobs(m, text) for text in written]) for m in (draft, model))
    other_first[who] = float((q.argmax(-1) != p.argmax(-1)).float().mean())
    apart = float((q.exp() * (q - p)).sum(-1).mean())
    lines.append([who, f"{other_first[who]:.0%}", f"{apart:.2f}"])
widgets.reveal("07g-mismatch", other_first["draft"] / other_first["target"])
widgets.table(
    lines,
    ["text written by, greedy", "target puts another token first", "KL(draft || target), nats"],
)

# %% [markdown] name="mismatch-reading"
# On the target's text the draft looks better than it is: wherever both differ, the text goes on as the target would.
# On its own text nothing brings it back. Eight short texts of one pair are few; what they show is that the two numbers
# are two things, and that a student is judged on its own.

# %% [markdown] name="awq-text"
# ### Experiment 9: a 7B with AWQ
#
# Once on real hardware, with a checkpoint that you have:
#
# ```
# inferlab bench awq_throughput --model FOLDER
# ```
#
# It begins with what theory foretells for a decode step in BF16 and in INT4 at batch 1, 8, 32 and 128, and waits:
# **write your own forecast of the gains beside it.** Then it quantizes the folder by AWQ, a layer at a time (on the
# CPU: with `--out` a run that was stopped goes on where it was), serves both folders at each batch, and compares
# their predictions on text that calibration did not see. `--json` keeps it all.
# <!-- tested: tests/bench/test_awq_throughput.py::test_the_forecast_is_the_larger_of_reading_and_arithmetic -->
#
# Its **declared form for a CPU** is the same program without `--model`: the course model takes the place of the 7B,
# in about a minute. These are figures of a CPU, and say nothing about those of a GPU; the steps, the columns and the
# questions are the same. At which batch is the gain half of that at batch 1, and which of the two reasons of
# `b_what_it_buys` is it? What is left of the distance to the forecast at batch 1: kernels that reach less than the
# bandwidth, or time between them?

# %% [markdown] name="explore"
# ## 6. Explore
#
# Change the rows of each kind, twelve or any other number in all. *Is there a mixture that is better than plain
# rounding for all three kinds? How few rows of JSON are enough for most of the gain on tools?*

# %% name="explore-mixture"
rows_of = {"code": 5, "prose": 4, "tools": 3}
found = errors(
    by_gptq(sum(gram_of(calibration_tokens(CALIBRATION[k], n, 96), 3, NAME) for k, n in rows_of.items() if n))
)
lines = [["rounded to nearest", *(f"{one:.2f} %" for one in nearest.values())]]
lines.append([f"GPTQ with {rows_of}", *(f"{one:.2f} %" for one in found.values())])
widgets.table(lines, ["", *(f"error on {kind}" for kind in found)])

# %% [markdown] name="errata"
# ## 7. What the cheat sheets get wrong
#
# **"Calibrate with about 512 samples."** (E07.10) How many is the smaller question. Four rows of the right text
# against more and more of another one, judged on tool calls:

# %% name="errata-samples"
lines = []
for kind, amounts in (("tools", (4, 16)), ("code", (4, 16, 64))):
    for amount in amounts:
        error = errors(by_gptq(gram_of(calibration_tokens(CALIBRATION[kind], amount, 96), 3, NAME)))["tools"]
        lines.append([f"{amount} rows of {kind}", f"{96 * amount:,}", f"{error:.2f} %"])
widgets.table(
    [*lines, ["none: rounded to nearest", 0, f"{nearest['tools']:.2f} %"]],
    ["calibrated on", "tokens", "error on tool calls"],
)

# %% [markdown] name="errata-reading"
# More rows of other text do not make up for the wrong text. **"Keep the LM head, or the last layers."** (E07.11) That
# was experiments 2 and 3: measure, and then spend the bits.

# %% [markdown] name="production"
# ## 8. In production
#
# As of November 2026; look names up in the version you run.
#
# **Calibration sets** are mostly chats of a public collection, cut to one length; llm-compressor's examples and
# NVIDIA's Model Optimizer take any dataset, so a sample of your own prompts, with the chat template and the tools'
# schemas in it, is a change of one line. **Mixed precision**: Model Optimizer searches a format for each layer under
# a number of effective bits; GGUF's K types mix (Q4_K_M has some tensors in more bits than others); most checkpoints
# for vLLM have one format and an ignore list. **On-policy distillation** is how several families make their small
# models, after a first round on the large one's text.
# <!-- source: documentation of llm-compressor and of NVIDIA's Model Optimizer (AutoQuantize); llama.cpp's quantize; Qwen3's technical report, section on strong-to-weak distillation -->

# %% [markdown] name="quiz-text"
# ## 9. Quiz

# %% name="quiz"
from grader.quiz import load_quiz

widgets.quiz(load_quiz("07_quantization").draw(seed=7, tag="methods"))

# %% [markdown] name="card"
# ## 10. Card
#
# - Calibrate on a sample of what you serve, by tokens. The wrong text can be worse than none.
# - Sensitivity: round one part, measure, put it back. Then spend bits where a budget buys most, and watch each kind
#   of prompt.
# - A temperature restores the entropy, not the distribution.
# - A cache is judged by evidence that must be fetched from the middle, not by a mean over text.
# - A forecast is the larger of bytes over bandwidth and operations over peak. Small models do not come near it.
# - Zeros save time only as smaller dense matrices; by then most of the quality may be gone.
# - A student learns about the places that its training text visits: on-policy, its own.
