# %% [markdown] nbgrader={"grade_id": "intro"}
# # Lab 03: a scheduler
#
# Four requests will write 1000, 200, 400 and 100 tokens. They run as one batch that ends when the last of them has
# finished. What share of the batch's work is useful? And with only two places (the chapter's seats): how many steps do
# two batches take one after another, and how many if a place is refilled as soon as it is free? Write your guesses
# down; two checks below compute them.
#
# You build, in this order: static and continuous batching on paper, the split of a step's budget, the count of blocks,
# admission, the choice of victims, the order of the queue, and the scheduler that combines them. At the end it runs
# inside the engine and serves text.
#
# - Each part has a text, a cell for your code, and checks. Run a check as often as you like.
# - Grading draws other workloads of the same kinds. A check that passes here for the right reason passes there.
# - A scheduler touches no tensors: everything here is integers, strings, lists and dicts. What your functions are given
#   belongs to the caller: do not modify it. (Only the dict that `Scheduler.add` is given is the scheduler's to keep.)
# - When your cells are graded, only the standard library, `torch` and `numpy` are available, neither engine nor grader.
#
# 20 points.

# %% nbgrader={"grade_id": "imports"} inferlab={"where": "both"}
import math

# %% nbgrader={"grade_id": "tools"}
# Given: helpers of the checks. You may read them, but do not change them. The examiner controls the simulation:
# lengths, blocks and time. Your scheduler is told what happened and decides what to do next; the ledger keeps account
# and records every broken promise under the promise's name.
import functools
import numbers

import torch

from grader.checks import drawn, rng, unchanging


def random_int(low, high, generator):
    """An integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def short(value):
    """How a value looks in a message."""
    text = repr(value)
    return text if len(text) < 300 else f"{text[:290]}..."


def is_count(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def random_names(generator, how_many):
    """Ids of several forms; their order, as text or as numbers, says nothing."""
    forms = ("r{}", "{}", "chat {}/é", "{:032x}")
    numbers_drawn = torch.randperm(how_many + 8, generator=generator).tolist()[:how_many]
    return [forms[random_int(0, len(forms) - 1, generator)].format(number) for number in numbers_drawn]


PLAN_FORM = "a dict {id: n}"


def from_yours(plan):
    """A plan as {id: n}, after a check of its form."""
    right = isinstance(plan, dict)
    rows = list(plan.items()) if right else []
    right = right and all(isinstance(name, str) and is_count(n) for name, n in rows)
    right = right and len({name for name, _ in rows}) == len(rows)
    assert right, f"a plan is {PLAN_FORM}, every id a str and every n an int, saw {plan!r}"
    return {name: int(n) for name, n in rows}


def to_yours(plan):
    """The other way round."""
    return plan


def room_for(num_tokens, block_size):
    """Blocks that must be free when a request with num_tokens missing tokens is admitted."""
    return math.ceil(num_tokens / block_size)


class Sequence:
    """One request in the books. known: prompt and generated tokens; computed: those of them that are in the cache."""

    def __init__(self, info, number):
        self.id, self.arrival, self.priority = info["id"], info["arrival"], info["priority"]
        self.number, self.prompt = number, info["num_tokens"]
        self.known, self.computed, self.blocks = info["num_tokens"], 0, 0
        self.running, self.times_preempted = False, 0

    @property
    def missing(self):
        return self.known - self.computed

    def __repr__(self):
        again = ", preempted before" if self.times_preempted else ""
        return f"{self.id} ({self.known} tokens known, {self.computed} computed{again})"


def first_come(sequence, now):
    """Smaller goes first."""
    return sequence.arrival, sequence.number


def urgent_first(sequence, now):
    """The same, with priorities and without aging."""
    return sequence.priority, sequence.arrival, sequence.number


def aged(sequence, now, aging):
    return sequence.priority - aging * (now - sequence.arrival), sequence.arrival, sequence.number


class Ledger:
    """The examiner's ledger: checks every plan, then executes as much of it as possible.

    faults: (promise, what was seen), in the order of the steps; a later one may follow from an earlier one.
    """

    def __init__(self, num_blocks, block_size, max_num_seqs, budget, rank=first_come):
        self.num_blocks, self.block_size, self.max_num_seqs, self.budget = num_blocks, block_size, max_num_seqs, budget
        self.rank, self.live, self.num_added, self.step = rank, {}, 0, 0
        self.faults = []

    @property
    def free(self):
        return self.num_blocks - sum(sequence.blocks for sequence in self.live.values())

    def add(self, info):
        self.live[info["id"]] = Sequence(info, self.num_added)
        self.num_added += 1

    def fault(self, promise, text):
        self.faults.append((promise, f"step {self.step}: {text}"))

    def judge(self, now, plan, preempted):
        """Check a plan; free its victims' blocks, allocate those of its rows. Returns the rows that can be run."""
        plan, preempted = self._known_only(plan, preempted)
        line = sorted(self.live.values(), key=lambda sequence: self.rank(sequence, now))  # whose turn it is
        running, waiting = ([s for s in line if s.running == state] for state in (True, False))
        self._judge_victims(running, plan, preempted)
        for name in preempted:
            sequence = self.live[name]
            sequence.blocks, sequence.computed, sequence.running = 0, 0, False
            sequence.times_preempted += 1
        running = [s for s in running if s.running]
        self._judge_shares(running, [s for s in waiting if s.id in plan], plan)
        for sequence in running:
            if plan.get(sequence.id):
                num_tokens = sequence.computed + min(plan[sequence.id], sequence.missing)
                sequence.blocks = max(sequence.blocks, math.ceil(num_tokens / self.block_size))
        if self.free < 0:
            self.fault("memory", f"the tokens of those who run need {-self.free} blocks more than there are: {plan}")
        self._judge_admission(waiting, len(running), plan, preempted)
        self.step += 1
        return {name: min(n, self.live[name].missing) for name, n in plan.items() if self.live[name].running and n > 0}

    def _known_only(self, plan, preempted):
        for name in [*plan, *preempted]:
            if name not in self.live:
                self.fault("gone", f"{name} is finished, aborted or was never added, and is in the plan")
        return {name: n for name, n in plan.items() if name in self.live}, [n for n in preempted if n in self.live]

    def _judge_victims(self, running, plan, preempted):
        names = [s.id for s in running]
        for name in preempted:
            if name not in names or preempted.count(name) > 1:
                self.fault("preemption", f"{name} is preempted, but it does not run, or is named twice")
            if name in plan:
                self.fault("preemption", f"{name} is preempted and gets {plan[name]} tokens in the same step")
        victims = [s for s in running if s.id in preempted]
        stay = [s for s in running if s.id not in preempted]
        if victims and any(names.index(s.id) > names.index(victims[0].id) for s in stay):
            self.fault("preemption", f"of {names} {preempted} are preempted; the last of them must go first")

        if victims:  # the other victims' blocks alone must not have been enough
            needed = sum(max(0, math.ceil(s.known / self.block_size) - s.blocks) for s in [*stay, victims[0]])
            enough = needed <= self.free + sum(s.blocks for s in victims[1:])
            if enough:
                others = f" and those of {[s.id for s in victims[1:]]}" if victims[1:] else ""
                self.fault("preemption", f"{victims[0]} is preempted; without that {self.free} free blocks{others} "
                                         "were enough")  # fmt: skip

    def _judge_shares(self, running, admitted, plan):
        total, cut = sum(plan.values()), None
        if total > self.budget:
            self.fault("limits", f"{total} tokens are planned, the budget is {self.budget}: {plan}")
        for name, n in plan.items():
            if n < 1:
                self.fault("limits", f"{name} gets {n} tokens; a row has at least 1: {plan}")
        for sequence in [s for s in running if s.missing == 1]:
            if not plan.get(sequence.id):
                lacks = total < self.budget and math.ceil(sequence.known / self.block_size) > sequence.blocks
                also = ", and lacks a block: make room, or preempt it" if lacks else ""
                self.fault("preemption" if lacks else "decodes",
                           f"{sequence.id} misses one token and gets none{also}: {plan}")  # fmt: skip
        for sequence in [*(s for s in running if s.missing > 1), *admitted]:
            n = plan.get(sequence.id, 0)
            promise = "recompute" if sequence.times_preempted else "chunks"
            if n > sequence.missing:
                self.fault(promise, f"{sequence} misses {sequence.missing} tokens and gets {n}")
            if n < sequence.missing and total < self.budget:
                self.fault(promise, f"{sequence} misses {sequence.missing} tokens and gets {n}, "
                                    f"although {total} of {self.budget} are planned")  # fmt: skip
            if n and cut and total <= self.budget:
                self.fault("turn", f"{cut.id} comes before {sequence.id} and gets only a part: {plan}")
            cut = cut or (sequence if n < sequence.missing else None)
        for sequence in [s for s in running if s.missing == 1]:
            if plan.get(sequence.id, 1) > 1:
                promise = "recompute" if sequence.times_preempted else "chunks"
                self.fault(promise, f"{sequence} misses 1 token and gets {plan[sequence.id]}")

    def _judge_admission(self, waiting, num_running, plan, preempted):
        passed_over = None
        for sequence in waiting:
            if sequence.id not in plan:
                passed_over = passed_over or sequence
                continue
            if passed_over:
                self.fault("turn", f"{sequence.id} is admitted, although {passed_over.id} comes before it")
            if preempted:
                self.fault("preemption", f"{sequence.id} is admitted in a step that preempts {preempted}")
            if (room := room_for(sequence.known, self.block_size)) > self.free:
                self.fault("room", f"{sequence} is admitted with {self.free} free blocks, {room} must be free")
            sequence.running, sequence.blocks = True, math.ceil(sequence.known / self.block_size)
            num_running += 1
        if num_running > self.max_num_seqs:
            self.fault("limits", f"{num_running} requests run, at most {self.max_num_seqs} may")
        first = next((s for s in waiting if not s.running), None)
        fits = first and num_running < self.max_num_seqs and room_for(first.known, self.block_size) <= self.free
        if fits and not preempted and sum(plan.values()) < self.budget:
            self.fault("idle", f"{first} is first in line and fits, and is not admitted: {plan}")

    def ran(self, name, num_tokens, sampled, finished):
        """A row was run."""
        sequence = self.live[name]
        sequence.computed += num_tokens
        sequence.known += sampled
        if finished:
            del self.live[name]


PROVED_BY = {
    "limits": "check_limits", "chunks": "check_missing", "decodes": "check_decodes", "memory": "check_memory",
    "room": "check_memory", "turn": "check_turn", "idle": "check_turn", "preemption": "check_preemption",
    "recompute": "check_return", "gone": "check_abort",
}  # fmt: skip


class World:
    """A simulated executor around your scheduler: a step takes one second and samples where a row reaches the end.

    arrivals: {step: [(id, num_tokens of the prompt, num_output, priority), ...]}, steps from 0. early: they arrive
    while the step before is running.
    """

    def __init__(
        self, arrivals, num_blocks, block_size=4, max_num_seqs=4, budget=16, aging=0.0, rank=first_come, early=False
    ):
        self.ledger = Ledger(num_blocks, block_size, max_num_seqs, budget, rank)
        self.scheduler = Scheduler(max_num_seqs, budget, block_size, aging)
        self.arrivals, self.early, self.now = arrivals, early, 100.0
        self.plans, self.victims, self.outputs, self.marks = [], [], {}, {}

    def add(self, name, num_tokens, num_output, priority=0):
        info = {"id": name, "num_tokens": num_tokens, "arrival": self.now, "priority": priority}
        self.ledger.add(info)
        self.outputs[name] = num_output
        self.scheduler.add(dict(info))

    def arrive(self, step):
        for arrival in self.arrivals.get(step, ()):
            self.add(*arrival)

    def abort(self, name):
        """Like a client that disconnects: at any moment, perhaps too late."""
        self.ledger.live.pop(name, None)
        return self.scheduler.abort(name)

    def step(self, hang_up=()):
        """One step; the requests in hang_up are aborted while it runs."""
        if not self.early or not self.plans:
            self.arrive(len(self.plans))
        plan, preempted = asked(self.scheduler, self.now, max(0, self.ledger.free))
        sequences = dict(self.ledger.live)
        prompts = {name for name, s in sequences.items() if s.missing > 1 or not s.running}
        rows = self.ledger.judge(self.now, plan, preempted)
        report = {}
        for name, n in rows.items():
            sampled = int(sequences[name].missing == n)
            finished = sampled == 1 and sequences[name].known + 1 - sequences[name].prompt == self.outputs[name]
            report[name] = (n, sampled, finished)
        for name in hang_up:
            self.abort(name)
        if self.early:
            self.arrive(len(self.plans) + 1)
        for name, result in report.items():
            if name in self.ledger.live:
                self.ledger.ran(name, *result)
        names = list(report) if len(self.plans) % 2 else list(report)[::-1]  # in any order: another in each step
        first = len(self.plans) // 2 % max(1, len(names))
        self.scheduler.update({name: report[name] for name in names[first:] + names[:first]})
        for name in sequences:
            mark = "x" if name in preempted else "." if name not in rows else "P" if name in prompts else "d"
            self.marks[name] = self.marks.get(name, "").ljust(len(self.plans)) + mark
        self.plans.append(plan)
        self.victims.append(preempted)
        self.now += 1.0

    @property
    def has_work(self):
        return bool(self.ledger.live) or any(step >= len(self.plans) for step in self.arrivals)

    def run(self, hang_up=None):
        """Until all are done, or until any scheduler that keeps its promises would be done."""
        seconds = max(self.arrivals) + 2
        for prompt, output in ((p, o) for arrived in self.arrivals.values() for _, p, o, *_ in arrived):
            seconds += math.ceil((prompt + output) / self.ledger.budget) + output + 2
        while self.has_work and len(self.plans) < 2 * seconds:
            self.step((hang_up or {}).get(len(self.plans), ()))
            if not self.plans[-1] and self.ledger.live and max(self.arrivals) < len(self.plans):
                break  # nothing ran, so nothing will change
        return self

    def show(self):
        """One line per request, one sign per step: P prompt (or recomputed tokens), d decode."""
        print("P prompt tokens, d decode, . waits, x preempted")
        for name, marks in self.marks.items():
            print(f"{name:>4} {marks}")

    def expect(self, *promises, finish=True):
        faults = self.ledger.faults
        broken = [text for promise, text in faults if promise in promises]
        before = faults and faults[0][0] not in promises
        first = f"; broken before that ({PROVED_BY[faults[0][0]]} proves it): {faults[0][1]}" if before else ""
        assert not broken, broken[0] + first
        left = sorted(self.ledger.live) if finish else []
        first = f"; the first promise broken: {faults[0][1]}" if faults else ""
        assert not left, f"after {len(self.plans)} steps {left} are still not finished{first}"


def asked(scheduler, now, free_blocks):
    """What schedule() returns, after a check of its form."""
    answer = scheduler.schedule(now, free_blocks)
    right = isinstance(answer, tuple | list) and len(answer) == 2
    right = right and isinstance(answer[1], tuple | list) and all(isinstance(name, str) for name in answer[1])
    assert right, f"schedule returns (plan, [ids of the preempted]), saw {answer!r}"
    return from_yours(answer[0]), list(answer[1])


def random_arrivals(generator, num_requests, longest_prompt, longest_output, priorities):
    """Requests that arrive one after another, some at the same moment; their names do not follow the order."""
    arrivals, step = {}, 0
    for name in random_names(generator, num_requests):
        step += random_int(0, 3, generator)
        priority = priorities[random_int(0, len(priorities) - 1, generator)]
        prompt, output = random_int(1, longest_prompt, generator), random_int(1, longest_output, generator)
        arrivals.setdefault(step, []).append((name, prompt, output, priority))
    return arrivals


def random_world(generator, memory, longest_prompt=30, longest_output=12, priorities=(0,), **more):
    """A workload and a machine. memory: "ample" for all at once, "short" for about half of them, "tight" for little
    more than the largest."""
    arrivals = random_arrivals(generator, random_int(5, 9, generator), longest_prompt, longest_output, priorities)
    block_size, max_num_seqs = random_int(1, 5, generator), random_int(1, 6, generator)
    rows = [(prompt, output) for step in arrivals.values() for _, prompt, output, _ in step]
    sizes = [room_for(prompt + output - 1, block_size) for prompt, output in rows]
    num_blocks = {
        "ample": sum(sizes) + 3 * len(sizes),
        "short": max(max(sizes), sum(sizes) // 2),
        "tight": max(sizes) + random_int(0, 3, generator),
    }[memory]
    budget = max_num_seqs + random_int(0, 15, generator)
    return World(arrivals, num_blocks, block_size, max_num_seqs, budget, **more)


def fixed_world(arrivals, num_blocks, *sizes, **more):
    """A World; num_blocks blocks, or as many as the largest request needs. sizes: as of World, from block_size on."""
    rows = [row for arrived in arrivals.values() for row in arrived]
    largest = max(room_for(prompt + output - 1, sizes[0]) for _, prompt, output, *_ in rows)
    return World(arrivals, max(num_blocks, largest), *sizes, **more)


def large_world(generator, places, budget, longest_prompt, longest_output):
    """Many requests, with memory for all."""
    rows = [(name, random_int(1, longest_prompt, generator), random_int(1, longest_output, generator), 0)
            for name in random_names(generator, places + 8)]  # fmt: skip
    return World({0: rows[:-6], 2: rows[-6:]}, 100_000, 16, places, budget)


def random_hang_up(world, generator):
    """Of a third of the requests, the step in which they are aborted: {step: [ids]}."""
    hang_up = {}
    for step, arrivals in world.arrivals.items():
        for name, *_ in arrivals:
            if random_int(0, 2, generator) == 0:
                hang_up.setdefault(step + random_int(0, 12, generator), []).append(name)
    return hang_up


# %% [markdown] nbgrader={"grade_id": "text_static"}
# ## 1. Static batching
#
# A static batch is formed once and runs until its longest sequence has finished. A row whose sequence finished earlier
# stays in the batch and computes nothing useful.
#
# **Build** `static_batching(lengths, max_num_seqs)`: requests that will generate `lengths[i]` tokens (whole numbers,
# at least 1) are put into batches of `max_num_seqs`, in the order given. The batches run one after another. Each step
# gives every row of the batch one token. Return `(steps, useful)`:
#
# - `steps`: how many steps all batches take together,
# - `useful`: the share of row-steps in which a row produced a token, a float from 0 to 1. A batch of R rows that runs T
#   steps has R·T row-steps.
#
# The same formula gives the cost of padding prompts of unequal length to one rectangle: `1 - useful` of it is padding.
#
# **Hint:** a batch takes as many steps as its longest sequence has tokens.
#
# **Trap (last batch):** the last batch may have fewer than `max_num_seqs` rows. Empty places are not rows.


# %% nbgrader={"grade_id": "static_batching", "solution": true}
def static_batching(lengths, max_num_seqs):
    """Batches in the order given, each as long as its longest. -> (steps, useful share of the row-steps)."""
    ### BEGIN SOLUTION
    batches = [lengths[i : i + max_num_seqs] for i in range(0, len(lengths), max_num_seqs)]
    num_steps = sum(max(batch) for batch in batches)
    num_row_steps = sum(len(batch) * max(batch) for batch in batches)
    return num_steps, sum(lengths) / num_row_steps
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_static", "grade": true, "points": 1}
# property: a batch takes the steps of its longest row; useful = all tokens / (rows x steps of each batch, added up).
# question: A row of 1 step and a row of 9 are in a batch: for how many steps is the batch busy?
# hint: cut the list into batches first; the share is one quotient of sums, not a mean of shares.
# explanation: Lengths [1, 9, 3] in batches of 2: the batch [1, 9] takes 9 steps with 2 rows, and [3] takes 3 steps with
#   1 row. Slots: 18 + 3 = 21, useful tokens: 13, share 13 / 21 = 0.62. The mean of the batches' shares, (10 / 18 + 3 /
#   3) / 2 = 0.78, weighs both alike, and they are not.
def check_static_batches(lengths, places, steps, useful):
    seen = unchanging(static_batching)(list(lengths), places)
    print(f"{short(lengths)}, {places} places: {seen}")
    assert isinstance(seen, tuple | list), f"expected (steps, useful), saw {seen!r}"
    assert len(seen) == 2, f"expected (steps, useful), saw {seen!r}"
    assert seen[0] == steps, f"{short(lengths)}, {places} places: expected {steps} steps, saw {seen[0]}"
    assert abs(seen[1] - useful) < 1e-9, (
        f"{short(lengths)}, {places} places: expected a useful share of {useful:.10g}, saw {seen[1]:.10g}"
    )


check_static_batches([1000, 200, 400, 100], 4, 1000, 0.425)
check_static_batches([1000, 200, 400, 100], 2, 1400, 1700 / 2800)
check_static_batches([3, 5, 4], 2, 9, 12 / 14)
check_static_batches([1024, 64, 128, 192, 128, 256, 64, 192], 8, 1024, 0.25)  # prompts: mean 256, longest 1024
with drawn("check_static") as draw:
    for places, num_batches in ((1, 3), (2, 4), (3, 1), (4, 3), (5, 2), (23, 4)):
        lengths, steps, row_steps = [], 0, 0
        for number in range(num_batches):
            rows = places if number < num_batches - 1 else random_int(1, places, draw)
            longest = random_int(2, 60, draw)
            batch = [random_int(1, longest, draw) for _ in range(rows)]
            batch[random_int(0, rows - 1, draw)] = longest
            lengths, steps, row_steps = lengths + batch, steps + longest, row_steps + longest * rows
        check_static_batches(lengths, places, steps, sum(lengths) / row_steps)
    many = [random_int(5, 9, draw) for _ in range(299)] + [2000]
    check_static_batches([*many, *many], 300, 4000, 2 * sum(many) / (600 * 2000))  # two batches alike


# %% [markdown] nbgrader={"grade_id": "text_continuous"}
# ## 2. Continuous batching
#
# Orca's idea (2022): decide before *every step* which requests take part. A sequence that has finished leaves at once,
# and the next request takes its place in the very next step.
#
# **Build** `continuous_batching(lengths, max_num_seqs)` for the same requests, all waiting from the beginning: at most
# `max_num_seqs` run in a step, free places are filled in the order given, each running request gets one token per step.
# Return a list: `finished[i]` is the number of the step, counted from 1, in which request i gets its last token.
#
# **Hint:** either simulate it step by step, or keep for each place the step in which it was last used.
#
# **Trap (idle step):** many drawings show an empty place for one step between two requests. That is wrong: the
# scheduler knows after step 3 that a request has finished, before it plans step 4.


# %% nbgrader={"grade_id": "continuous_batching", "solution": true}
def continuous_batching(lengths, max_num_seqs):
    """A free place is filled before the next step. -> for each request the step (from 1) of its last token."""
    ### BEGIN SOLUTION
    finished, left, waiting, step = [0] * len(lengths), {}, list(range(len(lengths))), 0
    while waiting or left:
        step += 1
        while waiting and len(left) < max_num_seqs:
            number = waiting.pop(0)
            left[number] = lengths[number]
        for number in list(left):
            left[number] -= 1
            if left[number] == 0:
                finished[number] = step
                del left[number]
    return finished
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_continuous", "grade": true, "points": 1}
# property: a place that becomes free is filled in the very next step, in the order given.
# question: In which step does a request begin if the one before it ends in step 1?
# hint: [3, 1, 2] with 2 places: the third request runs in steps 2 and 3.
# explanation: Lengths [2, 4, 1, 2], 2 places, the first step called 1 here. Steps 1-2: the first two. In step 3 the
#   third takes the free place, ends, and in step 4 the fourth follows beside the second, until step 5. So 5 steps,
#   where batches of two would take 4 + 2 = 6.
def check_finished(lengths, places, expected):
    seen = unchanging(continuous_batching)(list(lengths), places)
    print(f"{short(lengths)}, {places} places: {seen}")
    right = isinstance(seen, list | tuple) and len(seen) == len(lengths)
    assert right, f"{short(lengths)}, {places} places: expected {len(lengths)} numbers, saw {short(seen)}"
    off = [i for i in range(len(lengths)) if seen[i] != expected[i]]
    more = f" ({len(off) - 1} more are off)" if len(off) > 1 else ""
    assert not off, (
        f"{short(lengths)}, {places} places, request {off[0]}: expected {expected[off[0]]}, saw {seen[off[0]]}{more}"
    )


check_finished([3, 1, 2], 2, [3, 1, 3])
check_finished([1000, 200, 400, 100], 2, [1000, 200, 600, 700])
check_finished([2, 2], 4, [2, 2])
check_finished([2, 2, 2, 1], 2, [2, 2, 4, 3])
with drawn("check_continuous") as draw:
    for places, most in ((1, 12), (2, 12), (3, 9), (random_int(2, 6, draw), 9), (40, 40)):
        runs = []  # (the steps before the first, number of steps): no place is empty while a request has not begun
        for _ in range(places):
            begin = 0
            while begin < most:
                runs.append((begin, random_int(1, 12, draw)))
                begin += runs[-1][1]
        runs.sort(key=lambda run: run[0])
        check_finished([length for _, length in runs], places, [sum(run) for run in runs])

# %% [markdown] nbgrader={"grade_id": "text_gain"}
# How much this can gain depends on how unequal the lengths are, because a static batch waits for its longest. The cell
# below compares the steps of static batches with the minimum, all places full in every step, for 256 outputs of about
# 200 tokens on average. A ratio without its workload says nothing.

# %% nbgrader={"grade_id": "gain"} inferlab={"where": "notebook"}
draw = rng("gain")
equal = [200] * 256
near = [random_int(150, 250, draw) for _ in range(256)]
spread = (torch.empty(256).exponential_(1 / 200, generator=draw).long() + 1).tolist()
print("outputs              static  useful  ratio of steps, 32 places, against the least possible")
for name, lengths in (("all 200", equal), ("150 to 250", near), ("exponential", spread)):
    steps, useful = static_batching(lengths, 32)
    print(f"{name:<18}{steps:>8}{useful:>8.0%}{steps / math.ceil(sum(lengths) / 32):>8.2f}")

# %% [markdown] nbgrader={"grade_id": "text_plan"}
# ## 3. One step: decodes first, then chunks
#
# So far a step gave each row one token. A prompt adds many at once: they are known, so they can all be computed in one
# pass. A step with an 8,192-token prompt takes long, and every decoding request waits for it. So a step has a *budget*
# of new tokens, and a prompt that exceeds the rest of it is split: the remainder follows in later steps. That is
# chunked prefill.
#
# There is no separate prefill or decode. A running request has tokens that are known and *missing* in the cache: one if
# it decodes, many if its prompt is being prefilled.
#
# **Build** `plan_step(running, budget)`. `running` is a list of `(id, missing)`, in order of rank; `missing` is at
# least 1. Return a *plan*: a dict `{id: n}`, n new tokens for each request that gets any.
#
# - requests with one missing token come first, in their order;
# - then the others, in their order: each gets all its missing tokens, or the rest of the budget.
#
# **Hint:** two passes over the list, one `min`.
#
# **Trap (zero tokens):** a request that gets nothing is not in the plan. A row of zero tokens is not harmless:
# nano-vllm once planned one (its issue 144), and attention was called with an empty query.


# %% nbgrader={"grade_id": "plan_step", "solution": true}
def plan_step(running, budget):
    """Distributes `budget` new tokens. running: [(id, missing)] in order -> plan, every n at least 1."""
    ### BEGIN SOLUTION
    plan = {}
    decodes = [row for row in running if row[1] == 1]
    prompts = [row for row in running if row[1] > 1]
    for request_id, missing in decodes + prompts:
        num_tokens = min(missing, budget)
        if num_tokens > 0:
            plan[request_id] = num_tokens
            budget -= num_tokens
    return plan
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_decodes_first", "grade": true, "points": 1}
# property: a request with one missing token gets it, however long the prompts before it in the list are.
# question: If a prompt of 1,000 tokens is first in the list, what is left for a decode that is second?
# hint: go over those with one missing token first, then over the others.
# explanation: Missing tokens [100, 1, 1], budget 8: first the two with one missing token get it, and 6 are left for the
#   prompt. In the list's order the prompt would take all 8, and two users would wait for a token in every step as long
#   as the prompt lasts.
def check_decodes_served(running, budget):
    seen = unchanging(plan_step)(list(running), budget)
    print(f"{running}, budget {budget}: {seen}")
    plan = from_yours(seen)
    decodes = [name for name, missing in running if missing == 1]
    for name in decodes[:budget]:
        assert plan.get(name) == 1, f"{running}, budget {budget}: {name} misses one token and must get it, saw {seen}"


check_decodes_served([("long", 100), ("a", 1), ("b", 1)], 16)
check_decodes_served([("a", 1), ("long", 100), ("b", 1), ("c", 1)], 3)
check_decodes_served([("b", 1), ("a", 1), ("long", 100), ("c", 1)], 2)
with drawn("check_decodes_first") as draw:
    for case in range(8):
        names = random_names(draw, 24 if case == 0 else random_int(2, 9, draw))
        running = [("first", 90)] + [(name, 1 if random_int(0, 1, draw) else random_int(2, 80, draw)) for name in names]
        num_decodes = sum(missing == 1 for _, missing in running)
        for budget in (num_decodes // 2, num_decodes, num_decodes + random_int(1, 60, draw)):
            check_decodes_served(running, max(1, budget))
    names = random_names(draw, 150)
    check_decodes_served([("first", 9000)] + [(name, 1) for name in names], 149)


# %% nbgrader={"grade_id": "check_chunks", "grade": true, "points": 1}
# property: the budget is never exceeded and never left over while tokens are missing; prompts are served in their
#   order; a chunk is all that is missing or all that is left; no request gets zero tokens.
# question: When is the sum of a step's tokens smaller than the budget?
# hint: n = min(missing, what is left); leave out those for whom nothing is left.
# explanation: Missing [5, 9, 4], budget 10: 5, then 5 of 9, then nothing is left, so the third has no entry. With a
#   budget of 30 all get what they miss, 18. The sum is the smaller of the budget and all that is missing; a row of 0
#   tokens is work for nothing.
def check_shares(running, budget):
    seen = unchanging(plan_step)(list(running), budget)
    print(f"{running}, budget {budget}: {seen}")
    case, plan = f"{running}, budget {budget}", from_yours(seen)
    assert all(n >= 1 for n in plan.values()), f"{case}: every n is at least 1, saw {seen}"
    missing = dict(running)
    over = [name for name, n in plan.items() if n > missing.get(name, 0)]
    assert not over, f"{case}: {over} get more than they miss: {seen}"
    total, most = sum(plan.values()), min(budget, sum(missing.values()))
    assert total <= budget, f"{case}: {total} tokens are planned: {seen}"
    assert total == most, f"{case}: {most} tokens can be computed, {total} are planned: {plan}"
    prompts = [name for name, n in running if n > 1]
    whole = [plan.get(name) == missing[name] for name in prompts]
    first_cut = whole.index(False) if False in whole else len(prompts)
    late = [name for name in prompts[first_cut + 1 :] if name in plan]
    assert not late, f"{case}: {late} get tokens although {prompts[first_cut]} comes before them: {seen}"


check_shares([("a", 1), ("long", 100), ("b", 1)], 16)
check_shares([("p", 6), ("q", 6), ("r", 6)], 12)  # the budget ends with the end of q
check_shares([("p", 5), ("q", 7), ("r", 2)], 8)
check_shares([("p", 5), ("a", 1)], 100)
check_shares([("p", 5), ("q", 7), ("a", 1)], 1)
check_shares([("p", 5), ("q", 7), ("a", 1)], 0)
check_shares([], 8)
with drawn("check_chunks") as draw:
    for _ in range(10):
        names = random_names(draw, random_int(1, 8, draw))
        running = [(name, 1 if random_int(0, 2, draw) == 0 else random_int(2, 40, draw)) for name in names]
        missing = [n for _, n in running]
        for budget in {
            random_int(0, 120, draw),
            sum(missing) - 1,
            sum(missing),
            sum(sorted(missing)[: len(missing) // 2]),
        }:
            check_shares(running, budget)
    check_shares([("p", 6), ("q", 40), ("a", 1), ("r", 9)], random_int(3, 30, draw))
    check_shares([("p", 9000), ("a", 1), ("q", 9000), ("r", 9)], random_int(9100, 17_000, draw))
    check_shares([(name, 2) for name in random_names(draw, 40)], random_int(70, 80, draw))
    check_shares(
        [(name, 2) for name in random_names(draw, 40)], 2 * random_int(35, 39, draw) + 1
    )  # a chunk of one token

# %% [markdown] nbgrader={"grade_id": "text_chunked"}
# A prompt of 10,000 tokens beside 48 decodes, with a budget of 2,048: the cell below shows the chunks. With a larger
# budget this prompt's first token comes sooner; with a smaller one the steps of the 48 are shorter. That is the
# trade-off, and no value is best for both.

# %% nbgrader={"grade_id": "chunked"} inferlab={"where": "notebook"}
for budget in (512, 2048, 8192):
    missing, chunks = 10_000, []
    while missing > 1:
        plan = from_yours(plan_step([("prompt", missing)] + [(f"d{i}", 1) for i in range(48)], budget))
        chunks.append(plan["prompt"])
        missing -= plan["prompt"]
    print(f"budget {budget}: {len(chunks)} steps with a chunk; the first {chunks[0]}, the last {chunks[-1]} tokens")


# %% [markdown] nbgrader={"grade_id": "text_blocks"}
# ## 4. How many blocks
#
# Each computed token's keys and values are stored in the cache. The cache is allocated in blocks of `block_size`
# tokens. A request's tokens fill its blocks one after another; only the last block may be partly empty.
#
# **Build** `more_blocks(num_tokens, num_held, block_size)`: a request holds `num_held` blocks. How many *more* does it
# need to store `num_tokens` tokens, including those already computed? A whole number, never below 0.
#
# **Count** for a decode: 32 tokens are in the cache, in 2 blocks of 16. The 33rd token was sampled in the last step and
# is computed now, so 33 tokens have to be stored: one more block. The token that *this* step samples does not need a
# slot yet.
#
# **Hint:** round up: `-(-a // b)` is a / b, rounded up.
#
# **Trap (full block):** full blocks have no slot for the next token; and 32 tokens need 2 blocks of 16, not 3.


# %% nbgrader={"grade_id": "more_blocks", "solution": true}
def more_blocks(num_tokens, num_held, block_size):
    """How many more blocks a request that holds num_held needs for num_tokens tokens in all."""
    ### BEGIN SOLUTION
    return max(0, -(-num_tokens // block_size) - num_held)
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_blocks", "grade": true, "points": 1}
# property: tokens need tokens / block_size blocks, rounded up; what is held already counts; never below 0.
# question: 17 tokens in blocks of 16: how many blocks?
# hint: 33 tokens in blocks of 16 need 3 blocks; with 2 of them held 1 is missing, with 5 held 0.
# explanation: Blocks of 16: 16 tokens need 1, 17 need 2, 0 need 0. A request that holds 2 blocks and will have 33
#   tokens needs 3, so 1 more; with 5 held it needs none, and not -2.
def check_lacking(num_tokens, held, block_size, expected):
    seen = more_blocks(num_tokens, held, block_size)
    print(f"{num_tokens} tokens, blocks of {block_size}, {held} held: {seen} more")
    assert seen == expected, (
        f"{num_tokens} tokens, blocks of {block_size}, {held} held: expected {expected} more, saw {seen}"
    )


for num_tokens, held, expected in (
    (33, 2, 1),
    (32, 2, 0),
    (31, 2, 0),
    (32, 0, 2),
    (1, 0, 1),
    (33, 5, 0),
    (100, 1, 6),
    (0, 0, 0),
):
    check_lacking(num_tokens, held, 16, expected)
check_lacking(7, 3, 1, 4)
check_lacking(1_000_001, 2, 16, 62_499)
with drawn("check_blocks") as draw:
    for _ in range(30):
        block_size, blocks, held = random_int(1, 40, draw), random_int(1, 50, draw), random_int(0, 50, draw)
        for num_tokens in (block_size * blocks, block_size * (blocks - 1) + random_int(1, block_size, draw)):
            check_lacking(num_tokens, held, block_size, max(0, blocks - held))
    for block_size in (2048, 4096):  # one token in the last block, of many
        blocks = random_int(10_000, 20_000, draw)
        check_lacking(block_size * blocks + 1, blocks, block_size, 1)
        check_lacking(block_size * blocks + 1, blocks - 40, block_size, 41)

# %% [markdown] nbgrader={"grade_id": "text_admit"}
# ## 5. Admission
#
# A waiting request holds no blocks. It is admitted when it fits, and from then on it is running.
#
# **Build** `admit(waiting, budget, num_places, free_blocks, block_size)`. `waiting` is a list of `(id, missing)`, the
# one whose turn it is first. Return a plan: the admitted requests, with their tokens in this step.
#
# - Each needs one of the `num_places` places and at least one token of the `budget`; it gets all its missing tokens, or
#   the rest of the budget.
# - Each takes blocks for *all* its missing tokens at once, even when only a chunk is computed in this step. So all of
#   these blocks must be free.
# - First come, first served: when the first in line cannot be let in, none behind it is, even if it would fit.
#
# **Hint:** a loop that ends at the first that does not fit. `more_blocks(missing, 0, block_size)` is the number it
# needs.
#
# **Trap (half a prompt):** blocks for the first chunk alone are not enough. A request admitted with them runs out of
# memory in the middle of its prompt, is preempted, and its work is wasted.
#
# **Trap (overtaking):** letting small requests pass a large one looks harmless. While small ones keep arriving, the
# large one is never admitted.


# %% nbgrader={"grade_id": "admit", "solution": true}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Admits from the head of the line while all of a request fits. waiting: [(id, missing)] -> plan."""
    ### BEGIN SOLUTION
    admitted = {}
    for request_id, missing in waiting:
        needed = more_blocks(missing, 0, block_size)
        if budget < 1 or len(admitted) == num_places or needed > free_blocks:
            break
        admitted[request_id] = min(missing, budget)
        budget -= admitted[request_id]
        free_blocks -= needed
    return admitted
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_admit_order", "grade": true, "points": 1}
# property: requests are admitted from the head of the line, while places and budget last; none overtakes.
# question: The first in line does not fit and the second does: who is admitted?
# hint: stop (break, not continue) at the first that cannot be admitted; count places and budget down.
# explanation: Line [large, small, small] and room for the small ones only: nobody is admitted. If the small ones went
#   ahead, the large one could wait for ever behind new small ones. Each admitted request takes a place and some budget,
#   so the next sees less of both.
def check_admitted(waiting, budget, places, free_blocks, expected):
    seen = unchanging(admit)(list(waiting), budget, places, free_blocks, 4)
    case = f"{waiting}, budget {budget}, {places} places, {free_blocks} free blocks of 4"
    print(f"{case}: {seen}")
    assert from_yours(seen) == expected, f"{case}: expected {to_yours(expected)}, saw {seen}"


line = [("a", 6), ("b", 3), ("c", 5)]
check_admitted(line, 100, 3, 50, {"a": 6, "b": 3, "c": 5})
check_admitted(line, 100, 2, 50, {"a": 6, "b": 3})
check_admitted(line, 100, 0, 50, {})
check_admitted(line, 8, 3, 50, {"a": 6, "b": 2})
check_admitted(line, 9, 3, 50, {"a": 6, "b": 3})  # nothing is left for c
check_admitted([("large", 400), ("b", 3)], 100, 3, 50, {})  # b would fit
check_admitted(line, 1, 3, 50, {"a": 1})
check_admitted(line, 0, 3, 50, {})
check_admitted([], 100, 3, 50, {})
with drawn("check_admit_order") as draw:
    for num_admitted in (0, 1, 2, 3, 5, random_int(2, 8, draw), 31):
        names, more = random_names(draw, num_admitted + 4), random_int(1, 9, draw)
        line = [(name, random_int(2, 30, draw)) for name in names]
        whole = dict(line[:num_admitted])
        budget, after = sum(whole.values()), line[num_admitted][0]
        large = [*line[:num_admitted], ("large", 4000), *line[num_admitted:]]
        check_admitted(line, budget + more, num_admitted, 400, whole)  # the places end
        check_admitted(line, budget, num_admitted + more, 400, whole)  # the budget ends
        check_admitted(line, budget + 1, num_admitted + more, 400, whole | {after: 1})  # within a request
        check_admitted(large, budget + more, num_admitted + more, 400, whole)  # the blocks end
        check_admitted(line, 1000, 50, 400, dict(line))
    line = [(name, random_int(1, 30, draw)) for name in random_names(draw, 40)]
    check_admitted([("first", 9000), *line], 20_000, 31, 4000, {"first": 9000} | dict(line[:30]))
    check_admitted([("first", 9000), *line], 7000, 31, 4000, {"first": 7000})


# %% nbgrader={"grade_id": "check_admit_whole", "grade": true, "points": 1}
# property: who is admitted takes blocks for all it misses, even if only a chunk is computed now; they must all be free.
# question: If only the first chunk's blocks are counted, what happens when the later chunks come?
# hint: compare the blocks of the whole request with what is free, then count what is free down.
# explanation: A prompt needs 6 blocks, and 4 are free; its first chunk needs 2. Counted by the chunk it is admitted,
#   and later there is no block for the rest: it holds 4 and waits, or is preempted and computed again. Counted as a
#   whole it waits outside. After one is admitted, its blocks are no longer free for the next.
def check_let_in(waiting, free_blocks, block_size):
    """With a budget too small for the first request."""
    seen = unchanging(admit)(list(waiting), 6, 9, free_blocks, block_size)
    expected, budget, free = {}, 6, free_blocks
    for name, missing in waiting:
        if not budget or room_for(missing, block_size) > free:
            break
        expected[name] = min(missing, budget)
        budget, free = budget - expected[name], free - math.ceil(missing / block_size)
    case = f"{waiting}, budget 6, {free_blocks} free blocks of {block_size}"
    print(f"{case}: {seen}")
    assert from_yours(seen) == expected, f"{case}: expected {to_yours(expected)}, saw {seen}"


for free_blocks in (0, 1, 2, 3, 4, 5, 6, 7):
    check_let_in([("a", 4), ("b", 8), ("c", 4)], free_blocks, 4)
for free_blocks in (2, 4, 5, 6, 7, 8):
    check_let_in([("long", 20)], free_blocks, 4)
with drawn("check_admit_whole") as draw:
    for _ in range(10):
        block_size = random_int(1, 6, draw)
        waiting = [(name, random_int(1, 3, draw)) for name in random_names(draw, 3)] + [
            ("long", random_int(5, 40, draw))
        ]
        total = sum(math.ceil(missing / block_size) for _, missing in waiting)
        for free_blocks in range(max(0, total - 4), total + 4):
            check_let_in(waiting, free_blocks, block_size)

# %% [markdown] nbgrader={"grade_id": "text_victims"}
# ## 6. Preemption: choosing victims
#
# Running requests grow by a token per step, and at some point a decode needs a block and none is free. A request must
# give up its blocks: *preemption*. The last to arrive has waited least and is preempted first.
#
# **Build** `choose_victims(running, request_id, needed, free_blocks)`. `running` is a list of `(id, num_held)`, blocks
# held, in order, the last to arrive at the end. Request `request_id`, one of them, needs `needed` more blocks. Return
# the list of victims, last come first: as few as are needed. If the blocks of all that came after `request_id` are not
# enough, then `request_id` itself is the last in the list: it is preempted too, and none before it.
#
# **Hint:** go from the end of the list; stop as soon as enough is free, and stop at `request_id`.
#
# **Trap (thrash):** do not preempt when the free blocks are enough, nor one more than needed. Each victim recomputes
# all its tokens.


# %% nbgrader={"grade_id": "choose_victims", "solution": true}
def choose_victims(running, request_id, needed, free_blocks):
    """The victims whose blocks request_id needs. running: [(id, num_held)] -> ids, last come first."""
    ### BEGIN SOLUTION
    victims = []
    for victim, num_held in reversed(running):
        if free_blocks >= needed:
            break
        victims.append(victim)
        free_blocks += num_held
        if victim == request_id:
            break
    return victims
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_victims", "grade": true, "points": 1}
# property: victims come from the end, as few as are needed, and never from before the request that needs blocks.
# question: Who has waited longest: those at the end of the line, or those before them?
# hint: while free < needed: take the last; if it is the request itself, that was the last one.
# explanation: Running [a, b, c, d], b lacks 2 blocks; d holds 1, c holds 3. d goes: 1 free, not enough; c goes: 4 free,
#   enough, so stop. If b itself becomes the last that is left, it is the victim and needs nothing any more; a, before
#   it, is never touched.
def check_chosen(running, request_id, needed, free_blocks, expected):
    seen = unchanging(choose_victims)(list(running), request_id, needed, free_blocks)
    print(f"{running}: {request_id} needs {needed}, {free_blocks} free: {seen}")
    case = f"{running}: {request_id} needs {needed} blocks, {free_blocks} are free"
    assert isinstance(seen, tuple | list), f"{case}: expected a list of ids, saw {seen!r}"
    assert list(seen) == expected, f"{case}: expected {expected}, saw {list(seen)}"


running = [("a", 3), ("b", 2), ("c", 1), ("d", 4)]
check_chosen(running, "a", 1, 1, [])
check_chosen(running, "a", 1, 0, ["d"])
check_chosen(running, "a", 5, 0, ["d", "c"])
check_chosen(running, "b", 7, 2, ["d", "c"])
check_chosen(running, "b", 9, 0, ["d", "c", "b"])
check_chosen(running, "d", 1, 0, ["d"])
check_chosen(running, "c", 0, 0, [])
with drawn("check_victims") as draw:
    for size in (1, 2, 3, 5, random_int(2, 7, draw), 40):
        running = [(name, random_int(1, 6, draw)) for name in random_names(draw, size)]
        for place in {0, size // 2, size - 1, random_int(0, size - 1, draw)}:
            name, free = running[place][0], random_int(0, 3, draw)
            behind, gained = running[:place:-1], free  # last come first
            check_chosen(running, name, random_int(0, free, draw), free, [])
            for number, (_, held) in enumerate(behind, 1):
                names = [each for each, _ in behind[:number]]
                check_chosen(running, name, gained + 1, free, names)
                gained += held
                check_chosen(running, name, gained, free, names)  # just enough
            check_chosen(running, name, gained + random_int(1, 5, draw), free, [each for each, _ in behind] + [name])
    running = [("a", 3), ("b", 2), ("c", 1), ("d", 9), ("e", 1)]
    check_chosen(running, "a", 9, 0, ["e", "d"])  # d alone would do: e comes first all the same

# %% [markdown] nbgrader={"grade_id": "text_order"}
# ## 7. The order of the queue
#
# So far requests wait in order of arrival. With priorities, urgent requests go first, and others may wait forever if
# urgent ones keep arriving. *Aging* prevents that: waiting makes a request more urgent.
#
# **Build** `queue_order(requests, now, aging)`. `requests` is a list of dicts with `id`, `arrival` (seconds) and
# `priority` (a number, the *smaller* goes first, as in Unix and vLLM). `aging` is how many priority levels a request
# gains per second of waiting; 0 is no aging. At time `now` (seconds) a request's urgency is
#
# `priority - aging * (now - arrival)`
#
# Return the ids, the smallest urgency first; ties by earlier arrival; equal arrivals in the given order. With equal
# priorities that is first come, first served, with or without aging.
#
# **Hint:** `sorted` with a tuple as key; it is stable. The order of two requests never changes with `now` (why?), so an
# engine may sort them once, when they arrive.
#
# **Trap (wrong way):** smaller is more urgent, so waiting must make the number smaller.


# %% nbgrader={"grade_id": "queue_order", "solution": true}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    ### BEGIN SOLUTION

    def key(request):
        return request["priority"] - aging * (now - request["arrival"]), request["arrival"]

    return [request["id"] for request in sorted(requests, key=key)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "check_order", "grade": true, "points": 1}
# property: the smallest priority - aging x waited goes first; equals by arrival, then in the order given.
# question: Two requests have equal urgency: what decides then?
# hint: sorted(requests, key=...) with a tuple (urgency, arrival) as key.
# explanation: Aging 0.5 at time 10. x: priority 4, arrived at 0, has waited 10: 4 - 5 = -1. y: priority 0, arrived at
#   9: 0 - 0.5 = -0.5. x goes first, though its priority is worse. Equal urgency goes by arrival, and equal arrival by
#   the order in which they were given.
def check_line(rows, now, aging, expected):
    requests = [{"id": name, "arrival": arrival, "priority": priority} for name, arrival, priority in rows]
    seen = unchanging(queue_order)(requests, now, aging)
    print(f"(id, arrival, priority) {rows}, now {now}, aging {aging}: {seen}")
    assert list(seen) == expected, f"{rows}, now {now}, aging {aging}: expected {expected}, saw {list(seen)}"


rows = [("late", 8.0, 0), ("z", 1.0, 0), ("urgent", 9.0, -2), ("patient", 0.0, 3)]
check_line(rows, 10.0, 0.0, ["urgent", "z", "late", "patient"])
check_line(rows, 10.0, 1.0, ["z", "patient", "urgent", "late"])  # urgency -9, -7, -3, -2
check_line([("b", 4.0, 0), ("a", 4.0, 0), ("c", 2.0, 0), ("d", 4.0, 0)], 6.0, 0.25, ["c", "b", "a", "d"])
check_line([("b", 4.0, 1), ("a", 2.0, 0), ("c", 0.0, 2), ("d", 4.0, -1)], 4.0, 0.5, ["a", "d", "c", "b"])  # a and d: -1
with drawn("check_order") as draw:
    for case in range(10):
        for aging in (0.0, 0.25, 2.0):
            names, now = random_names(draw, random_int(3, 9, draw)), 20.0 + random_int(0, 40, draw) / 2
            urgencies = [random_int(-9, 9, draw) / 2 for _ in range(1 + case % 4)]  # few: many are equal
            turns = sorted({(urgency, random_int(0, 8, draw) / 2) for urgency in urgencies for _ in range(3)})
            places = [random_int(0, len(turns) - 1, draw) for _ in names]
            rows = [
                (name, turns[i][1], turns[i][0] + aging * (now - turns[i][1]))
                for name, i in zip(names, places, strict=True)
            ]
            check_line(
                rows,
                now,
                aging,
                [name for turn in range(len(turns)) for name, i in zip(names, places, strict=True) if i == turn],
            )
    check_line(
        [("a", 0.0, 0.0004), ("b", 1.0, 0.0), ("c", 2.0, 0.0002)], 3.0, 0.0, ["b", "c", "a"]
    )  # differences are small
    check_line([("a", 0.0, 0.0004), ("b", 2.0**-12, 0.0), ("c", 2.0**-13, 0.0)], 3.0, 0.5, ["c", "b", "a"])
    check_line([("a", 1.0, 2.0**-30), ("b", 1.0, 0.0), ("c", 1.0, 2.0**-31)], 3.0, 0.0, ["b", "c", "a"])
    check_line([("a", 8.75, 1), ("b", 8.25, 1), ("c", 8.5, 1)], 9.0, 0.0, ["b", "c", "a"])  # arrivals within a second
    for size in (16.0, 1024.0, 2.0**17):  # long waits, great differences
        rows = [("a", size, -1), ("b", 2 * size, -2), ("c", 0.0, 2 * size), ("d", size / 2, size / 4), ("e", 0.0, -3)]
        check_line(rows, 3 * size, 1.0, ["e", "d", "a", "b", "c"])
        check_line([(name, 0.0, -abs(row)) for name, row, _ in rows[:4]], 9.0, 0.0, ["b", "a", "d", "c"])
    check_line([("a", 3.0, 0), ("b", 1.0, 7)], 9.0, 2.0, ["a", "b"])
    check_line([("a", 3.0, 0), ("b", 1.0, 3)], 9.0, 2.0, ["b", "a"])  # the same ids once more, otherwise

# %% [markdown] nbgrader={"grade_id": "text_scheduler"}
# ## 8. The scheduler
#
# **Build** the class `Scheduler` from your pieces. It sees no output lengths, tokens or blocks: it is told what
# happened and decides what to do. Ids are strings.
#
# - `Scheduler(max_num_seqs, max_num_batched_tokens, block_size, aging)`: at most `max_num_seqs` requests run at a time;
#   `max_num_batched_tokens` is the budget of a step, at least `max_num_seqs`, so that every decode always gets its
#   token.
# - `add(info)`: a new request waits. `info` is a dict: `id`, `num_tokens` of its prompt, `arrival`, `priority`.
# - `schedule(now, free_blocks)` returns `(plan, preempted)`: how many tokens each request computes in this step, and a
#   list of the requests that lose their place and all their blocks, in any order. `free_blocks` is the number of blocks
#   that are free at this moment.
# - `update(report)`: `report` is `{id: (computed, sampled, finished)}`, in any order: `computed` more tokens of the
#   request are in the cache, `sampled` (0 or 1) more are known. A finished one is removed. A row samples when it has
#   computed the last known token: a decode, or the last chunk of a prompt.
# - `abort(request_id)`: the request is gone. This may come at any moment, even between `schedule` and `update`. So may
#   `add`, and an id that is gone may be added again.
#
# `schedule` goes through these steps:
#
# 1. All requests, running and waiting, form one line: the result of `queue_order` for all of them, given in the order
#    in which they were added.
# 2. The running ones, in this order, get the blocks that their known tokens still need. If there are too few,
#    `choose_victims` picks the victims. An admitted request holds blocks for all tokens it had at admission, so only
#    decodes need more.
# 3. `plan_step` distributes the budget among those still running.
# 4. If none was preempted in this step, `admit` admits from the head of the waiting requests, with the remaining
#    budget, places and blocks.
#
# `make_room` is step 2 as a separate method. Only your `schedule` calls it, so the contents of `running` are up to you.
#
# You can rely on this: the blocks of preempted, finished or aborted requests are free at once; the blocks that a plan's
# rows need, and all blocks of admitted requests, are taken when it runs; and every request fits into an empty cache by
# itself.
#
# **Hint:** per request keep how many tokens are known, how many are computed, how many blocks it holds, and whether it
# runs. Missing is known minus computed. A preempted request is a waiting one with more known tokens.
#
# **Trap (discarded tokens):** a victim's computed tokens are 0 again, but its generated tokens stay known; the user may
# already have read them. When it is readmitted, its prompt *and* generated tokens are missing.
#
# **Trap (same step):** a victim has no row in the step that preempts it: it would write into blocks that belong to
# another request by then. So free blocks for all running requests before you plan any row.
#
# **Trap (admitted at once):** after a preemption, the few free blocks are needed by the running requests, in this step
# or the next. A request admitted with them is the next victim.
#
# **Trap (late news):** a report may name a request that was aborted while its step ran, and `abort` may name one that
# has just finished. Both are harmless, and neither revives a request.


# %% nbgrader={"grade_id": "Scheduler", "solution": true}
class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Integers only, no tensors."""

    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        ### BEGIN SOLUTION
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self.aging = aging
        self.requests = {}  # by id, in order of arrival
        ### END SOLUTION

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        ### BEGIN SOLUTION
        state = {"known": info["num_tokens"], "computed": 0, "blocks": 0, "runs": False}
        self.requests[info["id"]] = info | state
        ### END SOLUTION

    def schedule(self, now, free_blocks):
        """One step: (plan, [ids of the preempted])."""
        ### BEGIN SOLUTION
        line = [self.requests[name] for name in queue_order(list(self.requests.values()), now, self.aging)]
        preempted, free_blocks = self.make_room([r for r in line if r["runs"]], free_blocks)

        running = [r for r in line if r["runs"]]
        plan = plan_step([(r["id"], r["known"] - r["computed"]) for r in running], self.max_num_batched_tokens)
        if preempted:
            return plan, preempted

        waiting = [(r["id"], r["known"]) for r in line if not r["runs"]]
        budget = self.max_num_batched_tokens - sum(plan.values())
        admitted = admit(waiting, budget, self.max_num_seqs - len(running), free_blocks, self.block_size)
        for name in admitted:
            request = self.requests[name]
            request["runs"], request["blocks"] = True, more_blocks(request["known"], 0, self.block_size)
        return plan | admitted, preempted
        ### END SOLUTION

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all running requests, in order. -> (ids of the preempted, free blocks)."""
        ### BEGIN SOLUTION
        preempted = []
        for request in running:
            if not request["runs"]:  # preempted a moment ago
                continue
            needed = more_blocks(request["known"], request["blocks"], self.block_size)
            held = [(r["id"], r["blocks"]) for r in running if r["runs"]]
            for name in choose_victims(held, request["id"], needed, free_blocks):
                victim = self.requests[name]
                free_blocks += victim["blocks"]
                victim.update(computed=0, blocks=0, runs=False)
                preempted.append(name)
            if request["runs"]:
                request["blocks"] += needed
                free_blocks -= needed
        return preempted, free_blocks
        ### END SOLUTION

    def update(self, report):
        """Results of a step: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        ### BEGIN SOLUTION
        for name, (computed, sampled, finished) in report.items():
            if name not in self.requests:
                continue
            self.requests[name]["computed"] += computed
            self.requests[name]["known"] += sampled
            if finished:
                del self.requests[name]
        ### END SOLUTION

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        ### BEGIN SOLUTION
        self.requests.pop(request_id, None)
        ### END SOLUTION


# %% nbgrader={"grade_id": "check_limits", "grade": true, "points": 1}
# property: no step has more tokens than the budget, no more requests run than there are places, no row is empty.
# question: After the running requests got their tokens, how many tokens may newly admitted ones get?
# hint: what plan_step uses is not left for admit; a running request has a place, with or without a row.
# explanation: Budget 16, 4 places, 3 running that decode: they use 3 tokens, so 13 are left for who is admitted, and 1
#   place. A running request without a row in this step still has its place. If admission does not see what was used,
#   the step gets more than 16 tokens, or a fifth request.
assert asked(Scheduler(2, 8, 4, 0.0), 100.0, 10) == ({}, []), "where nobody is, schedule returns ({}, [])"
world = World(
    {0: [("a", 30, 4), ("b", 9, 6), ("c", 3, 8), ("d", 2, 5)], 3: [("e", 5, 3)]}, 60, max_num_seqs=3, budget=8
)
world.run().show()
print("tokens per step", [sum(plan.values()) for plan in world.plans], "with a budget of 8")
world.expect("limits")
with drawn("check_limits") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for finish, arrivals, sizes in (
        (True, {1: [("1", 4, 3), ("2", 11, 8), ("3", 11, 6)], 3: [("4", 11, 7)], 4: [("5", 6, 5)]}, (49, 2, 2, 4)),
        (False, {2: [("1", 2, 7), ("5", 4, 1)], 3: [("6", 6, 3)]}, (5, 2, 2, 6)),
    ):
        fixed_world(arrivals, *sizes).run().expect("limits", finish=finish)
    for memory in ("ample", "short", "tight") * 4:
        random_world(draw, memory).run().expect("limits", finish=memory == "ample")


# %% nbgrader={"grade_id": "check_missing", "grade": true, "points": 1}
# property: a request computes each token once: chunks that add up to its prompt exactly, then one token per step.
# question: A prompt of 10 tokens had chunks of 6 and 4: what does it miss after its first sampled token?
# hint: missing = known - computed; update adds what was computed and what was sampled.
# explanation: Known 10, computed 0: missing 10. After a chunk of 6: missing 4. After 4 more and one sampled token:
#   known 11, computed 10, missing 1. From then on each step computes one and samples one. If the sampled token is not
#   added to known, or added twice, requests stop or repeat.
world = World({0: [("a", 20, 4)]}, 60, budget=8).run()
world.show()
seen = [plan.get("a") for plan in world.plans]
print("a prompt of 20 tokens, 4 to generate, budget 8:", seen)
world.expect("chunks")
assert seen == [8, 8, 4, 1, 1, 1], f"expected 8, 8, 4 tokens of the prompt and 1, 1, 1, saw {seen}"
arrivals = {0: [("d", 8, 12, 1)], 1: [("long", 40, 2, 0)]}
for num_blocks in (13, 14):
    world = World(arrivals, num_blocks, budget=8, rank=urgent_first).run()
    print("d runs out of blocks while a more urgent prompt of 40 tokens is computed in chunks:")
    world.show()
    world.expect("chunks")
with drawn("check_missing") as draw:
    # The same for every course, for mistakes that show in few workloads.
    arrivals, sizes = {1: [("1", 2, 5, 2), ("2", 12, 2, 1)], 2: [("3", 11, 5, 2)]}, (19, 4, 4, 4)
    fixed_world(arrivals, *sizes, rank=urgent_first).run().expect("chunks")
    for places, budget in ((24, 600), (2, 4000)):
        large_world(draw, places, budget, 2 * budget, 4).run().expect("chunks")
    for memory in ("ample", "short", "tight") * 4:
        random_world(draw, memory).run().expect("chunks", finish=memory == "ample")
        random_world(draw, memory, priorities=(0, 1, 2), rank=urgent_first).run().expect(
            "chunks", finish=memory == "ample"
        )


# %% nbgrader={"grade_id": "check_decodes", "grade": true, "points": 1}
# property: while a long prompt is read in chunks, every request that decodes gets its token in every step.
# question: While a long prompt is read, what does plan_step get to choose from?
# hint: plan_step must see all running requests, each with its missing tokens.
# explanation: One long prompt of 100 and two that decode, budget 8: steps of 6 + 1 + 1 tokens. All running requests go
#   into one plan, with what each misses; if the prompt gets its chunk in a call of its own, the decodes get what it
#   leaves, which is nothing.
world = World({0: [("a", 3, 12), ("b", 2, 12)], 2: [("long", 60, 2)]}, 60, budget=10).run()
world.show()
world.expect("decodes")
gaps = [step for step, plan in enumerate(world.plans[:12]) if step > 1 and {plan.get("a"), plan.get("b")} != {1}]
assert not gaps, f"a and b decode in each of the steps 2 to 11; in steps {gaps} not both have one token"
world = World({0: [("a", 3, 9), ("b", 2, 9)], 2: [("long", 60, 2, -1)]}, 60, budget=10, rank=urgent_first).run()
print("the same with a long prompt that is more urgent:")
world.show()
world.expect("decodes")
with drawn("check_decodes") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for finish, arrivals, sizes in (
        (False, {2: [("5", 3, 6), ("1", 2, 5), ("2", 7, 3)], 4: [("3", 1, 8)]}, (5, 3, 3, 6)),
        (False, {0: [("6", 3, 7)], 2: [("4", 2, 3)], 3: [("5", 3, 4)]}, (11, 1, 5, 6)),
        (True, {2: [("5", 4, 3)], 4: [("4", 6, 7)], 6: [("3", 12, 5)]}, (26, 2, 2, 8)),
        (False, {2: [("1", 3, 3), ("2", 2, 8)], 4: [("3", 1, 7), ("4", 5, 7), ("5", 10, 3)]}, (8, 3, 4, 10)),
    ):
        fixed_world(arrivals, *sizes).run().expect("decodes", finish=finish)
    for memory in ("ample", "short", "tight") * 4:
        random_world(draw, memory, longest_prompt=60).run().expect("decodes", finish=memory == "ample")


# %% nbgrader={"grade_id": "check_memory", "grade": true, "points": 1}
# property: no plan needs more blocks than there are, counting those of its victims; who is let in fits as a whole.
# question: Which blocks are still free after this step's decodes have taken theirs?
# hint: blocks that the decodes take in this step are not free for admit.
# explanation: 3 blocks are free; two decodes are at the end of a block and take 1 each; so 1 is left for admission. A
#   prompt of 2 blocks is not let in. What a victim gives back is counted as free once, and only in this step's plan.
for arrivals, num_blocks in (
    ({0: [("a", 8, 6), ("b", 16, 3)]}, 6),
    ({0: [("a", 8, 3), ("b", 8, 3), ("c", 8, 3)]}, 5),
    ({0: [("a", 8, 4)], 1: [("b", 16, 2)]}, 6),  # in step 1 a takes one of the 4 free blocks
):
    world = World(arrivals, num_blocks).run()
    print(num_blocks, "blocks of 4:")
    world.show()
    world.expect("memory", "room")
world = World({0: [("a", 20, 9), ("b", 8, 6)], 1: [("c", 28, 2)]}, num_blocks=8, budget=32).run({2: ["a"]})
print("8 blocks of 4; a is aborted while step 2 runs:")
world.show()
world.expect("memory", "room")
with drawn("check_memory") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for arrivals, hang_up, sizes in (
        (
            {2: [("1", 11, 4), ("2", 5, 3)], 3: [("3", 10, 8)], 4: [("4", 12, 3)], 5: [("5", 3, 8)], 7: [("6", 3, 8)]},
            {9: ["3"]},
            (17, 1, 3, 4),
        ),
        (
            {1: [("1", 1, 2)], 2: [("5", 12, 3), ("2", 11, 7)], 4: [("4", 2, 3)], 5: [("6", 10, 7), ("3", 8, 6)]},
            {},
            (17, 2, 5, 14),
        ),
        (
            {0: [("1", 10, 6), ("2", 8, 4)], 1: [("3", 5, 8), ("4", 10, 4)], 3: [("5", 6, 3)]},
            {1: ["4"], 7: ["2"]},
            (15, 2, 4, 5),
        ),
        ({2: [("5", 6, 1)], 3: [("3", 10, 1)], 5: [("2", 2, 3)]}, {}, (3, 4, 3, 7)),
        ({2: [("1", 8, 6), ("6", 5, 8), ("5", 11, 7), ("2", 9, 7)]}, {5: ["1"], 6: ["5"]}, (7, 3, 3, 11)),
        (
            {2: [("3", 4, 5)], 4: [("2", 5, 8)], 5: [("5", 1, 3)], 6: [("1", 12, 3), ("6", 2, 4), ("4", 5, 4)]},
            {7: ["2"], 10: ["3", "5"]},
            (6, 4, 2, 3),
        ),
        (
            {3: [("1", 5, 8)], 4: [("2", 5, 8), ("3", 25, 4), ("4", 13, 6)], 7: [("5", 27, 5)]},
            {5: ["1"], 8: ["4"], 14: ["5"]},
            (34, 1, 1, 6),
        ),
        (
            {3: [("1", 23, 9), ("2", 3, 11), ("3", 24, 4), ("4", 27, 6)], 6: [("5", 3, 11)]},
            {7: ["5"], 12: ["3"]},
            (58, 1, 3, 10),
        ),
    ):
        fixed_world(arrivals, *sizes).run(hang_up).expect("memory", "room")
    for _ in range(8):
        for memory in ("short", "tight"):
            random_world(draw, memory).run().expect("memory", "room")
            random_world(draw, memory, longest_prompt=10, longest_output=30).run().expect("memory", "room")
            world = random_world(draw, memory)  # and with requests that are aborted while a step runs
            world.run(random_hang_up(world, draw)).expect("memory", "room")


# %% nbgrader={"grade_id": "check_turn", "grade": true, "points": 1}
# property: requests are admitted and prefilled in order of arrival, each in the first step in which it fits.
# question: A request finished in the last update: in which step is its place used again?
# hint: a place that became free in the last update is filled now; what is left of a step's budget is used.
# explanation: Two places, one free since the last update; the line's first needs 20 tokens, 12 are left of the budget:
#   it is admitted now with a chunk of 12, and the other 8 follow. Waiting until 20 fit at once would leave the place
#   empty and the budget unused.
world = World(
    {0: [("a", 4, 3), ("b", 4, 6), ("c", 4, 2), ("d", 9, 2), ("e", 6, 2)]}, 60, max_num_seqs=2, budget=8
).run()
world.show()
world.expect("turn", "idle")
first = {name: next(step for step, plan in enumerate(world.plans) if name in plan) for name in "abcde"}
assert first["c"] == 3, f"a has its last token in step 2, c must have its place in step 3, saw step {first['c']}"
world = World({0: [(name, 3, 2) for name in ("a", "b", "c", "d", "e", "f")]}, 60, max_num_seqs=6, budget=20).run()
world.show()
world.expect("turn", "idle")
for num_blocks in (4, 5):
    print(num_blocks, "blocks: c waits, and b is preempted")
    world = World({0: [("a", 8, 3), ("b", 8, 2), ("c", 4, 1)]}, num_blocks, max_num_seqs=2, budget=24).run()
    world.show()
    world.expect("turn", "idle")
scheduler = Scheduler(1, 8, 4, 0.0)
for name, arrival in (("late", 2.0), ("early", 1.0)):
    scheduler.add({"id": name, "num_tokens": 3, "arrival": arrival, "priority": 0})
seen = asked(scheduler, 3.0, 50)
assert seen == ({"early": 3}, []), f"one place, and early arrived before late, though it was added after it: saw {seen}"
with drawn("check_turn") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for arrivals, sizes in (
        ({1: [("5", 8, 5), ("2", 5, 1), ("1", 5, 7)], 3: [("6", 1, 1)]}, (6, 2, 2, 2)),
        ({1: [("1", 1, 8)], 2: [("2", 7, 8), ("3", 1, 4)]}, (7, 2, 4, 7)),
        ({0: [("1", 14, 10)], 2: [("2", 20, 11), ("3", 18, 10)], 3: [("4", 13, 6)], 6: [("5", 22, 8)]}, (32, 2, 4, 17)),
    ):
        fixed_world(arrivals, *sizes).run().expect("turn", "idle")
    large_world(draw, 24, 600, 8, 20).run().expect("turn", "idle")
    for memory in ("ample", "short", "tight") * 3:
        for early in (False, True):
            random_world(draw, memory, early=early).run().expect("turn", "idle")


# %% nbgrader={"grade_id": "check_preemption", "grade": true, "points": 1}
# property: when blocks run out, those at the end of the line are preempted, no more than needed; a victim has no tokens
#   in that step, and none is admitted.
# question: May a request that is preempted in this step also have a row in it?
# hint: find blocks for all running requests before you plan any row; no admission in a step that preempts; a decode
#   that lacks a block gets one, or is a victim itself.
# explanation: Line [a, b, c], no block free, a and b need one each. c is preempted and gives back 2: enough, so b
#   stays. c has no row, and nobody is admitted in this step, since room made by force is for those who run. If rows
#   were planned before, c would have one for blocks that are gone.
world = World({0: [("x", 8, 9)], 1: [("m", 8, 9), ("d", 4, 9)]}, num_blocks=8, budget=24).run()
world.show()
print("victims", [names for names in world.victims if names])
world.expect("preemption")
assert any(world.victims), "8 blocks of 4 are not enough for these three: somebody must be preempted"
arrivals = {0: [("v", 16, 10, 5)], 1: [("a", 8, 8, 0)], 6: [("u", 4, 2, 1)]}
world = World(arrivals, num_blocks=9, budget=24, rank=urgent_first).run()
print("with priorities v 5, a 0, u 1 (the smaller is the more urgent):")
world.show()
world.expect("preemption")
arrivals, rank = {0: [("v", 8, 14, 2)], 6: [("a", 8, 8, 0)]}, functools.partial(aged, aging=1.0)
world = World(arrivals, num_blocks=8, budget=24, aging=1.0, rank=rank).run()
print("with priorities v 2, a 0 and aging 1: v has waited longer, and stays:")
world.show()
world.expect("preemption")
print("two that need a block in the same step, and small ones behind them:")
for num_blocks in (4, 5, 6):
    world = World({0: [("a", 4, 6), ("b", 4, 6), ("c", 3, 6), ("d", 2, 6)]}, num_blocks).run()
    world.show()
    world.expect("preemption")
with drawn("check_preemption") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for rank, arrivals, sizes in (
        (first_come, {2: [("1", 1, 1)], 3: [("2", 2, 4)], 5: [("3", 12, 1)], 7: [("4", 10, 5)]}, (5, 4, 3, 5)),
        (first_come, {1: [("4", 3, 5)], 2: [("5", 5, 5)], 3: [("1", 6, 7)]}, (5, 3, 4, 10)),
        (urgent_first, {2: [("1", 12, 7, 2)], 4: [("2", 11, 6), ("3", 6, 3, 2)], 5: [("4", 3, 5, 2)]}, (12, 2, 3, 5)),
        (
            urgent_first,
            {2: [("6", 4, 2, 1)], 3: [("1", 12, 1), ("4", 1, 1, 1), ("5", 5, 4)], 4: [("3", 6, 6, 1)]},
            (3, 4, 3, 11),
        ),
    ):
        fixed_world(arrivals, *sizes, rank=rank).run().expect("preemption")
    arrivals = {0: [("long", 8, 33, 9)], 2: [("0", 1, 4)], 7: [("1", 1, 2, 1)], 13: [("2", 6, 6, 1)], 18: [("3", 1, 4)],
                21: [("4", 5, 6)], 24: [("5", 3, 6, 1)], 28: [("6", 2, 4)], 33: [("7", 4, 2)], 36: [("8", 3, 6, 1)]}  # fmt: skip
    world = fixed_world(arrivals, 6, 2, 3, 19, rank=urgent_first).run()  # one request is preempted five times
    world.expect("preemption")
    arrivals, sizes = {1: [("1", 5, 2, 1)], 2: [("2", 1, 8, 2)], 3: [("3", 2, 5)]}, (3, 3, 4, 8, 1.0)
    fixed_world(arrivals, *sizes, rank=functools.partial(aged, aging=sizes[-1])).run().expect("preemption")
    for _ in range(8):
        for memory in ("short", "tight"):
            random_world(draw, memory).run().expect("preemption")
            random_world(draw, memory, priorities=(0, 1, 2), rank=urgent_first).run().expect("preemption")
        rank = functools.partial(aged, aging=0.25)
        random_world(draw, "short", priorities=(0, 1, 3), aging=0.25, rank=rank).run().expect("preemption")
    for num_small in (2, 3, 4):  # the two before them need a block in the same step
        names, block_size, output = random_names(draw, 2 + num_small), random_int(1, 4, draw), random_int(5, 9, draw)
        rows = [(name, block_size * (1 + (i < 2)), output) for i, name in enumerate(names)]
        for num_blocks in range(num_small + 4, num_small + 8):
            if num_blocks >= max(room_for(prompt + output, block_size) for _, prompt, output in rows):
                World({0: rows}, num_blocks, block_size, len(rows)).run().expect("preemption")
    # The first to arrive is the last in line, and others wait before it.
    for last in ([("u", 4, 2, 1)], [("u", 4, 2, 1), ("t", 4, 2, 2)]):
        for aging, rank in ((0.0, urgent_first), (0.25, functools.partial(aged, aging=0.25))):
            arrivals = {0: [("v", 16, 10, 5)], 1: [("a", 8, 8, 0)], 6: last}
            World(arrivals, num_blocks=9, budget=24, aging=aging, rank=rank).run().expect("preemption")


# %% nbgrader={"grade_id": "check_return", "grade": true, "points": 1}
# property: a preempted request keeps its rank and, when readmitted, recomputes prompt and generated tokens.
# question: A request with 10 prompt and 5 generated tokens is preempted: how many tokens does it miss then?
# hint: computed and blocks go to 0, known stays as it is, and so does the arrival.
# explanation: 10 prompt tokens, 5 generated, preempted: it knows 15 and has computed 0 of them, so it misses 15 when it
#   comes back, and holds no blocks. What was generated was sent to a user and is not drawn again; with its old arrival
#   it stands before all who came later.
world = World({0: [("a", 8, 9), ("b", 8, 9)], 1: [("c", 3, 4)]}, num_blocks=6, budget=24).run()
world.show()
world.expect("recompute", "turn")
computed = {name: sum(plan.get(name, 0) for plan in world.plans) for name in "abc"}
print("tokens computed in all:", computed)
back, victim = next(((step, names[0]) for step, names in enumerate(world.victims) if names), (0, None))
assert victim, "6 blocks of 4 are not enough for these three: somebody must be preempted"
prompt, again = {"a": 8, "b": 8, "c": 3}[victim], next((p[victim] for p in world.plans[back + 1 :] if victim in p), 0)
assert again > prompt, (
    f"{victim} had a prompt of {prompt} and generated tokens; readmitted it computes all of them, saw {again}"
)
print("one finishes and others are preempted, in the same step:")
for num_blocks in (5, 6, 7):
    rows = [("a", 2, 1), ("b", 4, 5), ("c", 4, 5), ("d", 4, 5), ("e", 4, 5)]
    world = World({0: rows}, num_blocks, max_num_seqs=5, budget=24).run()
    world.show()
    world.expect("recompute", "turn")
with drawn("check_return") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for arrivals, sizes in (
        ({1: [("5", 8, 5), ("2", 5, 1), ("1", 5, 7)], 3: [("6", 1, 1)]}, (6, 2, 2, 2)),
        ({1: [("1", 12, 2)], 2: [("2", 1, 5)], 3: [("3", 12, 4), ("4", 3, 3)], 5: [("5", 2, 1)]}, (16, 1, 5, 9)),
    ):
        fixed_world(arrivals, *sizes).run().expect("recompute", "turn")
    for _ in range(8):
        for memory in ("short", "tight"):
            random_world(draw, memory).run().expect("recompute", "turn")
            random_world(draw, memory, longest_prompt=10, longest_output=30).run().expect("recompute", "turn")
        random_world(draw, "tight", 12, 12, (0, 1, 2), rank=urgent_first).run().expect("recompute", "turn")


# %% nbgrader={"grade_id": "check_abort", "grade": true, "points": 1}
# property: what is finished or aborted is gone at once: no tokens, no place; abort and late reports are never an error.
# question: Where can a request be when it is aborted: in one list only?
# hint: abort forgets the request wherever it is; update skips ids it does not know, and goes on with the others.
# explanation: A request may wait, run, or be preempted. Aborted, it is in none of them: no row in the next step, and
#   its place is free in it. The step that was under way still reports its token; that report is about nobody, and is
#   skipped. The other ids of the same report count.
world = World({0: [("a", 4, 6), ("b", 20, 3), ("c", 4, 5), ("d", 3, 3)]}, 60, max_num_seqs=2, budget=8)
world.run({1: ["b"], 2: ["d"], 3: ["a"]}).show()  # aborted while steps 1, 2, 3 run
world.expect("gone", "turn", "idle")
world = World({0: [("a", 30, 6), ("b", 30, 2)]}, num_blocks=12)
world.run({2: ["a"]}).show()
world.expect("gone", "turn", "idle")


def abort_victims(world):
    """The same workload again, twice: all victims of the first run are aborted in the step that preempts them, or in
    the step after it."""
    ledger = world.ledger
    for later in (0, 1):
        again = World(world.arrivals, ledger.num_blocks, ledger.block_size, ledger.max_num_seqs, ledger.budget)
        again.run({step + later: names for step, names in enumerate(world.victims)}).expect("gone", "turn", "idle")


abort_victims(World({0: [("a", 8, 9), ("b", 8, 9)], 1: [("c", 3, 4)]}, num_blocks=6, budget=24).run())


def check_report(report, finished):
    """A report about some requests that just had their first step, and others that are gone."""
    names = [name for name in report if "gone" not in name]
    scheduler = Scheduler(len(names), 40, 4, 0.0)
    for name in names:
        scheduler.add({"id": name, "num_tokens": 3, "arrival": 1.0, "priority": 0})
    asked(scheduler, 1.0, 50)
    scheduler.update({name: (3, 1, name in finished) for name in report})
    expected = {name: 1 for name in names if name not in finished}
    seen, victims = asked(scheduler, 2.0, 50)
    case = f"after a report about {report}, of which {finished} are finished"
    assert seen == expected, f"{case}: the next plan is {to_yours(expected)}, saw {to_yours(seen)}"
    assert not victims, f"{case}: there are blocks enough, and {victims} are preempted"


for report in (["x", "y", "gone"], ["x", "gone", "y"], ["gone", "x", "y"], ["gone", "y", "gone too", "x"]):
    check_report(report, ["x"])
    check_report(report, ["y", "gone"])
scheduler = Scheduler(3, 12, 4, 0.0)
for name, num_tokens in (("x", 3), ("y", 3), ("long", 40), ("late", 5)):
    scheduler.add({"id": name, "num_tokens": num_tokens, "arrival": 1.0, "priority": 0})
asked(scheduler, 1.0, 30)  # a budget of 12: 6 tokens of the long one, and no place for the last
scheduler.update({"x": (3, 1, True), "y": (3, 1, False), "long": (6, 0, False)})
for name, state, computed in (
    ("x", None, 0),
    ("nobody", None, 0),
    ("y", "running", 3),
    ("y", None, 0),
    ("late", "waiting", 0),
    ("long", "running", 6),
    ("late", None, 0),
):
    error = None
    try:
        scheduler.abort(name)
    except NotImplementedError:
        raise
    except Exception as raised:
        error = raised
    there = state is not None
    whom = f"a request that is {state}, {computed} tokens computed" if there else "one that is gone, or was never there"
    assert error is None, f"abort({name!r}) of {whom} raised {error!r}"
seen = asked(scheduler, 2.0, 9)
assert seen == ({}, []), f"x is finished and all others are aborted, nothing is left to do: saw {seen}"
again = Scheduler(1, 8, 4, 0.0)
for name in ("x", "y"):
    again.add({"id": name, "num_tokens": 3, "arrival": 1.0, "priority": 0})
again.abort("x")
again.add({"id": "x", "num_tokens": 5, "arrival": 1.0, "priority": 0})
seen = asked(again, 2.0, 50)
case = "x and y arrived at the same time; x was aborted, and added again after y"
assert seen == ({"y": 3}, []), f"{case}: y has the one place, saw {seen}"
with drawn("check_abort") as draw:
    # The same for every course, for mistakes that show in few workloads.
    for arrivals, hang_up, early, sizes in (
        (
            {1: [("1", 6, 1)], 3: [("2", 10, 4)], 4: [("3", 3, 1)], 5: [("4", 2, 6)], 6: [("5", 10, 4)]},
            {4: ["1"]},
            True,
            (7, 2, 3, 3),
        ),
        (
            {
                1: [("3", 12, 3)],
                2: [("5", 6, 7)],
                4: [("1", 10, 6)],
                6: [("6", 4, 2)],
                7: [("4", 4, 2)],
                8: [("2", 4, 4)],
            },
            {3: ["5"], 5: ["3"], 11: ["1"]},
            False,
            (4, 4, 3, 12),
        ),
        ({2: [("6", 4, 6), ("1", 11, 4), ("5", 12, 8), ("2", 11, 5), ("4", 12, 1)]}, {}, False, (34, 1, 3, 11)),
    ):
        fixed_world(arrivals, *sizes, early=early).run(hang_up).expect("gone", "turn", "idle")
    for name in ("y", "x"):  # both ids are free again
        scheduler.add({"id": name, "num_tokens": 5, "arrival": 3.0, "priority": 0})
        scheduler.update({"nobody": (1, 1, False)})
        for num_tokens in (5, 1):
            seen = asked(scheduler, 3.0, 9)
            case = f"{name} was gone; a new request of that id, with a prompt of 5 tokens, now misses {num_tokens}"
            assert seen == ({name: num_tokens}, []), f"{case}: saw {seen}"
            scheduler.update({"nobody": (1, 1, False), name: (num_tokens, 1, num_tokens == 1)})
    for _ in range(6):
        report = [*random_names(draw, 5), "gone", "gone too"]
        report = [report[i] for i in torch.randperm(len(report), generator=draw).tolist()]
        check_report(report, [name for name in report if random_int(0, 1, draw)])
    for memory in ("ample", "short", "tight") * 3:
        world = random_world(draw, memory, early=random_int(0, 1, draw) == 1)
        world.run(random_hang_up(world, draw)).expect("gone", "turn", "idle")
    for _ in range(4):
        abort_victims(random_world(draw, "short").run())
    for places in (1, 2, 3):  # x runs, is aborted, and comes again behind y and z, which arrived at the same time
        again = Scheduler(places, 12, 4, 0.0)
        for name in ("x", "y", "z"):
            again.add({"id": name, "num_tokens": 3, "arrival": 1.0, "priority": 0})
        asked(again, 1.0, 50)
        again.abort("x")
        again.add({"id": "x", "num_tokens": 5, "arrival": 1.0, "priority": 0})
        again.update(dict.fromkeys("xyz"[1:places], (3, 1, True)))
        expected, others = (
            {name: 5 if name == "x" else 3 for name in [*"xyz"[places:], "x"][:places]},
            list("xyz"[1:places]),
        )
        seen = asked(again, 2.0, 50)
        case = f"x, y, z, {places} places: x ran, was aborted and came again, behind all others; then {others} finished"
        assert seen == (expected, []), f"{case}: expected {to_yours(expected)}, saw {to_yours(seen[0])}"

    def abort_survivors(world):
        """The same workload again: in the steps that preempt, those that run are aborted, and their places are free."""
        ledger = world.ledger
        again = World(world.arrivals, ledger.num_blocks, ledger.block_size, ledger.max_num_seqs, ledger.budget)
        again.run({step: list(world.plans[step]) for step, names in enumerate(world.victims) if names})
        again.expect("gone", "turn", "idle")

    abort_survivors(
        World({0: [("a", 8, 9), ("b", 8, 9)], 1: [("c", 3, 4)]}, num_blocks=6, max_num_seqs=2, budget=24).run()
    )


# %% nbgrader={"grade_id": "check_starvation", "grade": true, "points": 1}
# property: no request waits forever: not behind more urgent ones if there is aging, not a large one behind small ones.
# question: Does the order of the line change with time if nobody arrives?
# hint: the line is queue_order(all, now, aging), with the now and the aging that you were given.
# explanation: With aging 1, a request of priority 5 that has waited 6 has urgency -1 and passes a new one of priority
#   0. With an order computed once at arrival it would never pass. A large one at the head holds the line until it fits;
#   if others overtake it, it waits as long as they come.
urgent = {step: [(f"u{step}", 2, 2, 0)] for step in range(1, 30)}
world = World({0: [("first", 2, 2, 0), ("patient", 2, 2, 6)]} | urgent, 60, max_num_seqs=1, aging=1.0)
world.run()
begin = next((step for step, plan in enumerate(world.plans) if "patient" in plan), None)
print(f"priority 6 beside a stream of priority 0, one place, aging of 1 level per second: begins in step {begin}")
assert begin in range(15), f"only u1 to u5 are more urgent; patient must begin by step 14, saw {begin}"
small = {step: [(f"s{step}", 4, 6)] for step in range(1, 25)}
world = World({0: [("s0", 4, 6)]} | small | {3: [("large", 40, 2), ("s3", 4, 6)]}, num_blocks=13, max_num_seqs=8).run()
begin = next((step for step, plan in enumerate(world.plans) if "large" in plan), None)
print(f"a prompt of 40 tokens in a stream of prompts of 4: begins in step {begin}")
assert begin in range(21), f"the large request came in step 3 and begins in step {begin}"


def check_waited(aging, waited):
    """A place for one of two: patient has waited, and so gains aging * waited levels on urgent, which comes now."""
    for lead, first in ((1, "patient"), (-1, "urgent")):
        scheduler, priority = Scheduler(1, 8, 4, aging), aging * waited - lead
        scheduler.add({"id": "patient", "num_tokens": 3, "arrival": 100.0, "priority": priority})
        scheduler.add({"id": "urgent", "num_tokens": 3, "arrival": 100.0 + waited, "priority": 0})
        seen = asked(scheduler, 100.0 + waited, 50)
        case = f"aging {aging:g}, priority {priority:g} that has waited {waited:g} s beside priority 0 that comes now"
        print(f"{case}: {first} begins")
        assert seen == ({first: 3}, []), (
            f"{case}: {first} is more urgent by 1 and has the one place, saw {to_yours(seen[0])}"
        )


check_waited(4.0, 10.0)
check_waited(0.5, 1000.0)
with drawn("check_starvation") as draw:
    check_waited(random_int(3, 20, draw) / 2, 2.0 ** random_int(2, 17, draw))
    check_waited(random_int(1, 8, draw) / 8, 1000.0 * random_int(1, 100, draw))
    # The same for every course, for mistakes that show in few workloads.
    for arrivals, sizes in (
        (
            {
                2: [("2", 4, 2, 2), ("6", 6, 3, 2)],
                3: [("5", 10, 5, 2)],
                4: [("4", 12, 8, 1)],
                5: [("1", 9, 3, 2)],
                7: [("3", 12, 2, 1)],
            },
            (55, 2, 1, 2, 0.5),
        ),
        ({0: [("4", 4, 8)], 1: [("2", 7, 7)], 2: [("1", 5, 3)], 4: [("6", 10, 5)]}, (57, 1, 2, 12, 0.5)),
        ({2: [("2", 8, 7, 2)], 3: [("3", 9, 6, 1)], 5: [("6", 2, 2, 1)]}, (20, 3, 2, 3, 0.875)),
        ({0: [("1", 2, 2), ("2", 2, 2, 1), ("3", 2, 2, 3)]}, (60, 4, 3, 16, 0.5)),
    ):
        fixed_world(arrivals, *sizes, rank=functools.partial(aged, aging=sizes[-1])).run().expect("turn", "idle")
    for _ in range(16):  # what a request waits for is a place or the budget, never a block
        aging = random_int(1, 8, draw) / 8
        rank = functools.partial(aged, aging=aging)
        world = random_world(draw, "ample", priorities=(0, 1, 3), aging=aging, rank=rank)
        world.ledger.num_blocks = 10_000
        world.run().expect("turn", "idle")

# %% [markdown] nbgrader={"grade_id": "text_engine"}
# ## 9. Inside the engine
#
# The engine asks a *scheduler* for the plan of every step. `scheduler_parts` wraps yours: it passes ids and counts to
# it, and does the rest of an engine's work with the result: block tables, token ids and stop conditions. Model,
# attention, cache and sampler are the engine's own.
#
# Whatever you schedule, the text must be the one each prompt gives by itself. That holds because a row's numbers do not
# depend on the rest of the batch, nor on how a prompt is chunked, nor on whether its tokens are recomputed. In the cell
# below the ledger checks every plan and names the first broken promise; the number of steps is counted in the engine's
# trace.


# %% nbgrader={"grade_id": "engine_parts"}
from reference_impl.assembly.lab_parts import LabEngine, course_llm, scheduler_parts


class Judged:
    """Your scheduler, and the ledger that checks it. limits: max_num_seqs, max_num_batched_tokens."""

    def __init__(self, num_blocks, block_size, limits):
        self.yours = Scheduler(*limits, block_size, 0.0)
        self.ledger = Ledger(num_blocks, block_size, *limits)

    def add(self, info):
        self.ledger.add(info)
        self.yours.add(info)

    def abort(self, request_id):
        self.ledger.live.pop(request_id)
        self.yours.abort(request_id)

    def schedule(self, now, free_blocks):
        plan, preempted = asked(self.yours, now, free_blocks)
        rows = self.ledger.judge(now, plan, preempted)
        for promise, text in self.ledger.faults:
            raise AssertionError(f"{text} ({PROVED_BY[promise]} proves this)")
        return rows, preempted

    def update(self, report):
        for request_id, done in report.items():
            self.ledger.ran(request_id, *done)
        self.yours.update(report)


def serve(prompts, num_new_tokens, yours, hang_up=None, **limits):
    """Greedy output for prompts of token ids, all in one engine. hang_up: {step: number of the prompt to abort}.

    Returns the outputs and the engine's trace.
    """
    parts = {}
    if yours:
        sizes = limits["num_blocks"], limits["block_size"]
        judged = Judged(*sizes, (limits["max_num_seqs"], limits["max_num_batched_tokens"]))
        parts = scheduler_parts(judged, *sizes)
    engine = LabEngine(course_llm(), {"prefix_cache": "off", **limits}, **parts)
    for prompt in prompts:
        engine.add(prompt, num_new_tokens)
    outputs = engine.run({step: str(number) for step, number in (hang_up or {}).items()})
    return list(outputs.values()), engine.trace


def check_served(prompts, num_new_tokens, hang_up=None, **limits):
    """Serves with your scheduler, and each prompt by itself with the engine's; compares the tokens."""
    seen, trace = serve(prompts, num_new_tokens, True, hang_up, **limits)
    serial_steps, aborted = 0, set((hang_up or {}).values())
    for number, prompt in enumerate(prompts):
        [expected], alone = serve([prompt], num_new_tokens, False, **limits)
        serial_steps += len(alone.steps())
        got = seen[number]
        wanted = expected[: len(got)] if number in aborted else expected
        assert got == wanted, f"prompt {number} by itself gives {wanted}, with your scheduler it gave {got}"
    steps, preempted = len(trace.steps()), sum(len(step.preempted) for step in trace.steps())
    print(f"{len(prompts)} prompts: {steps} steps, {serial_steps} one after another; {preempted} preemptions")
    assert steps < serial_steps, f"{steps} steps, and {serial_steps} if each prompt is served by itself"
    return seen


# %% nbgrader={"grade_id": "check_engine", "grade": true, "points": 2}
# property: with your scheduler the engine gives each prompt the text it gives it alone, in fewer steps.
# question: Which promise does the message name, and in which check above is it tested alone?
# hint: the message names the first promise that is broken; make that promise's own check pass first.
# explanation: The engine runs your plans: rows, victims, then update. The same prompt must give the same text alone and
#   in company, so what differs is work done twice or not at all: a token computed at a wrong count, or a victim whose
#   tokens were forgotten.
texts = [
    "def add(a, b):\n",
    "import os\n",
    "class Reader:\n    def __init__(self, path):\n        self.path = path\n",
    "x = [",
]
prompts = [course_llm().encode(text) for text in texts]
print("prompts of", [len(prompt) for prompt in prompts], "tokens; blocks of 4, at most 12 new tokens in a step")
outputs = check_served(prompts, 8, block_size=4, num_blocks=12, max_num_seqs=3, max_num_batched_tokens=12)
for text, tokens in zip(texts, outputs, strict=True):
    print(repr(text), "->", repr(course_llm().tokenizer.decode(tokens)))
### BEGIN HIDDEN TESTS
draw = rng("check_engine")
# The same for every course, for mistakes that show in few workloads.
for lengths, hang_up, num_blocks, block_size, places, budget in (
    ([3, 22, 12, 6, 7], {2: 2}, 19, 2, 4, 19),
    ([3, 7, 10, 6, 22], {8: 1}, 19, 2, 3, 20),
    ([15, 13, 8, 13, 2], {4: 2}, 19, 2, 4, 16),
    ([13, 10, 8, 5, 14], {5: 1}, 19, 2, 3, 17),
    ([14, 24, 2, 13, 13], {7: 0}, 11, 4, 3, 17),
):
    prompts = [list(range(100, 100 + length)) for length in lengths]
    limits = {"block_size": block_size, "max_num_seqs": places, "max_num_batched_tokens": budget}
    serve(prompts, 9, True, hang_up, num_blocks=num_blocks, **limits)
prompts = [torch.randint(100, 4000, (random_int(2, 24, draw),), generator=draw).tolist() for _ in range(5)]
limits = {"block_size": random_int(2, 5, draw), "max_num_seqs": random_int(3, 4, draw)}
budget, num_blocks = random_int(5, 20, draw), math.ceil((24 + 9) / limits["block_size"]) + 2
hang_up = {random_int(1, 8, draw): random_int(0, 4, draw)}
check_served(prompts, 9, hang_up, num_blocks=num_blocks, max_num_batched_tokens=budget, **limits)
### END HIDDEN TESTS

# %% [markdown] nbgrader={"grade_id": "text_measure"}
# ## 10. Steps and seconds
#
# The same prompts one after another, and together under your scheduler. The ratio of steps is exact. The ratio of
# seconds depends on this model and machine, so it is printed and never checked: a step with eight rows takes longer
# than a step with one, and how much longer depends on what limits it. The last line is the host's work: the share of
# the time spent inside `schedule` and `update`, yours and the ledger's. The shorter a step is on the device, the larger
# this share; that is why engines for fast devices plan the next step while the current one still runs.

# %% nbgrader={"grade_id": "measure"} inferlab={"where": "notebook"}
import time


def timed(function, spent):
    def run(*args):
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            spent.append(time.perf_counter() - started)

    return run


prompts = [course_llm().encode(f"def function_{i}(path):\n    return ") for i in range(8)]
limits = {"block_size": 16, "num_blocks": 64, "max_num_batched_tokens": 64}
serve(prompts[:1], 2, False, max_num_seqs=1, **limits)  # warm-up
spent, schedule, update = [], Judged.schedule, Judged.update
Judged.schedule, Judged.update = timed(schedule, spent), timed(update, spent)
seconds, steps, outputs = [], [], []
for yours, places in ((False, 1), (True, 8)):
    started = time.perf_counter()
    tokens, trace = serve(prompts, 24, yours, max_num_seqs=places, **limits)
    seconds.append(time.perf_counter() - started)
    steps.append(len(trace.steps()))
    outputs.append(tokens)
Judged.schedule, Judged.update = schedule, update
print(f"one at a time: {steps[0]} steps, {seconds[0]:.2f} s; together: {steps[1]} steps, {seconds[1]:.2f} s")
print(f"{steps[0] / steps[1]:.1f}x fewer steps, {seconds[0] / seconds[1]:.1f}x less time, "
      f"{'same tokens' if outputs[0] == outputs[1] else 'tokens differ (a near tie, or a bug)'}")  # fmt: skip
print(f"scheduling: {sum(spent) / steps[1] * 1e3:.2f} ms per step, {sum(spent) / seconds[1]:.1%} of the time")

# %% [markdown] nbgrader={"grade_id": "text_milestone"}
# ## 11. Your scheduler serves texts
#
# Your scheduler decides what each step computes, for three requests at once. With all checks passed,
# `inferlab lab check` shows this, too.

# %% nbgrader={"grade_id": "milestone"} inferlab={"where": "milestone"}
from reference_impl.assembly.lab_parts import DEMO_PROMPT, show_served

sizes = 32, 4
parts = scheduler_parts(Judged(*sizes, (3, 16)), *sizes)
limits = {"num_blocks": 32, "block_size": 4, "max_num_seqs": 3, "max_num_batched_tokens": 16}
engine = LabEngine(course_llm(), {"prefix_cache": "off", **limits}, **parts)
for text, num_tokens in (
    (DEMO_PROMPT, 19),
    ("def read_file(filename):\n    try:\n", 16),
    ('class Queue:\n    def empty(self):\n        """', 16),
):
    engine.add(course_llm().encode(text), num_tokens)
engine.run()
show_served("Your scheduler just served these texts", engine, course_llm())

# %% [markdown] nbgrader={"grade_id": "extensions"}
# ## Further (not graded)
#
# - **Worst case.** Let `info` carry `max_tokens` and admit only requests that fit with all the tokens they may ever
#   have. Then none is ever preempted. Compare steps and running requests with what you built, with short and with long
#   outputs.
# - **Swap.** Instead of recomputing a victim's tokens, its blocks can be copied to host memory and back. What else does
#   `schedule` have to return, and from how many tokens on is copying cheaper than recomputing?
# - **Read a real one.** Open vLLM's `vllm/v1/core/sched/scheduler.py` and explain `schedule()` on one page. Where does
#   it distribute the budget, which requests does it preempt, what can be admitted in a step that preempts, and what
#   does it have that you did not need?
# - **A preemptive policy.** Let an urgent waiting request take the place of a less urgent running one. What keeps two
#   requests from preempting each other forever?
