# Generators, __slots__ for each request, a named tuple for the answer; the same dict is handed out in each step.

# %% nbgrader={"grade_id": "static_batching"}
from fractions import Fraction
from itertools import islice, repeat, takewhile


def static_batching(lengths, max_num_seqs):
    """Batches in the order given, each as long as its longest. -> (steps, useful share of the row-steps)."""
    rest = iter(lengths)
    batches = takewhile(bool, (tuple(islice(rest, max_num_seqs)) for _ in repeat(None)))
    steps, slots = map(sum, zip(*((max(batch), max(batch) * len(batch)) for batch in batches), strict=True))
    return [steps, float(Fraction(sum(lengths), slots))]


# %% nbgrader={"grade_id": "continuous_batching"}
def continuous_batching(lengths, max_num_seqs):
    """A free place is filled before the next step. -> for each request the step (from 1) of its last token."""

    def ends():
        running = []
        for length in lengths:
            begin = 0 if len(running) < max_num_seqs else running.pop(running.index(min(running)))
            running.append(begin + length)
            yield begin + length

    return list(ends())


# %% nbgrader={"grade_id": "plan_step"}
from collections import OrderedDict


def plan_step(running, budget):
    """Distributes `budget` new tokens. running: [(id, missing)] in order -> plan, every n at least 1."""

    def rows(left):
        for many in (False, True):
            for name, missing in running:
                if (missing > 1) is many and left > 0:
                    yield name, min(missing, left)
                    left -= min(missing, left)

    return OrderedDict(rows(budget))


# %% nbgrader={"grade_id": "admit"}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Admits from the head of the line while all of a request fits. waiting: [(id, missing)] -> plan."""

    def rows(left, free):
        for name, missing in waiting[:num_places]:
            free -= more_blocks(missing, 0, block_size)
            if left < 1 or free < 0:
                return
            yield name, min(missing, left)
            left -= min(missing, left)

    return OrderedDict(rows(budget, free_blocks))


# %% nbgrader={"grade_id": "Scheduler"}
from collections import namedtuple

Answer = namedtuple("Answer", "plan preempted")


class Entry:
    __slots__ = ("blocks", "computed", "info", "known")

    def __init__(self, info):
        self.info, self.known = info, info["num_tokens"]
        self.lose()

    def lose(self):
        self.computed, self.blocks = 0, 0


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Integers only, no tensors."""

    __slots__ = ("answer", "entries", "settings")

    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.settings = max_num_seqs, max_num_batched_tokens, block_size, aging
        self.entries, self.answer = {}, Answer({}, [])

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        self.entries[info["id"]] = Entry(info)

    def schedule(self, now, free_blocks):
        """One step: (plan, [ids of the preempted])."""
        places, budget, block_size, aging = self.settings
        line = queue_order([entry.info for entry in self.entries.values()], now, aging)
        running = [name for name in line if self.entries[name].blocks]
        preempted, free_blocks = self.make_room(running, free_blocks)
        running = [name for name in running if self.entries[name].blocks]
        rows = plan_step([(n, self.entries[n].known - self.entries[n].computed) for n in running], budget)
        if not preempted:
            waiting = [(name, self.entries[name].known) for name in line if not self.entries[name].blocks]
            left = budget - sum(rows.values())
            more = admit(waiting, left, places - len(running), free_blocks, block_size)
            for name in more:
                self.entries[name].blocks = more_blocks(self.entries[name].known, 0, block_size)
            rows.update(more)
        self.answer.plan.clear()
        self.answer.plan.update(rows)
        self.answer.preempted[:] = preempted
        return self.answer

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all running requests, in order. -> (ids of the preempted, free blocks)."""
        stay, preempted = list(running), []
        while stay:
            lacks = [more_blocks(self.entries[n].known, self.entries[n].blocks, self.settings[2]) for n in stay]
            if sum(lacks) <= free_blocks:
                break
            preempted.insert(0, stay.pop())
            free_blocks += self.entries[preempted[0]].blocks
            self.entries[preempted[0]].lose()
        for name, lack in zip(stay, lacks if stay else (), strict=True):
            self.entries[name].blocks += lack
            free_blocks -= lack
        return preempted, free_blocks

    def update(self, report):
        """Results of a step: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        while report:
            name, (computed, sampled, finished) = report.popitem()
            if finished:
                self.abort(name)
            elif entry := self.entries.get(name):
                entry.computed += computed
                entry.known += sampled

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        self.entries.pop(request_id, None)
