# All requests stand in one list that is sorted once, when one arrives: as no two change their order while time passes,
# it stays sorted. Nothing is used but counts; of the parts only admit is called.

# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    key = {i: (r["priority"] + aging * r["arrival"], r["arrival"], i) for i, r in enumerate(requests)}
    return [requests[i]["id"] for i in sorted(key, key=key.get)]


# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    decodes = [name for name, missing in running if missing == 1][:budget]
    plan = dict.fromkeys(decodes, 1)
    budget -= len(decodes)
    for name, missing in running:
        if missing > 1 and budget > 0:
            plan[name] = min(missing, budget)
            budget -= plan[name]
    return plan


# %% nbgrader={"grade_id": "Scheduler"}
import bisect
import math


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Whole numbers only, no tensors."""

    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.block_size, self.aging = block_size, aging
        self.line, self.known, self.computed, self.held, self.count = [], {}, {}, {}, 0

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        rank = info["priority"] + self.aging * info["arrival"]
        bisect.insort(self.line, (rank, info["arrival"], self.count, info["id"]))
        self.count += 1
        self.known[info["id"]], self.computed[info["id"]] = info["num_tokens"], 0

    def schedule(self, now, free_blocks):
        """One step: ({id: new tokens}, [ids of the preempted])."""
        names = [entry[-1] for entry in self.line]
        preempted, free_blocks = self.make_room([name for name in names if name in self.held], free_blocks)
        plan, budget = {}, self.max_num_batched_tokens
        for many in (False, True):
            for name in names:
                missing = self.known[name] - self.computed[name]
                if name in self.held and (missing > 1) == many and budget:
                    plan[name] = min(missing, budget)
                    budget -= plan[name]
        places = 0 if preempted else self.max_num_seqs - len(self.held)
        waiting = [(name, self.known[name]) for name in names if name not in self.held]
        for name, num_tokens in admit(waiting, budget, places, free_blocks, self.block_size).items():
            self.held[name] = math.ceil(self.known[name] / self.block_size)
            plan[name] = num_tokens
        return plan, preempted

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all that run, in order. -> (ids of the preempted, blocks still free)."""
        preempted = []
        for name in running:
            while name in self.held:
                needed = math.ceil(self.known[name] / self.block_size) - self.held[name]
                if needed <= free_blocks:
                    self.held[name] += max(0, needed)
                    free_blocks -= max(0, needed)
                    break
                victim = [other for other in running if other in self.held][-1]
                free_blocks += self.held.pop(victim)
                self.computed[victim] = 0
                preempted.append(victim)
        return preempted, free_blocks

    def update(self, report):
        """What a step did: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        for name, (computed, sampled, finished) in report.items():
            if finished:
                self.abort(name)
            elif name in self.known:
                self.computed[name] += computed
                self.known[name] += sampled

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        self.line = [entry for entry in self.line if entry[-1] != request_id]
        for counts in (self.known, self.computed, self.held):
            counts.pop(request_id, None)
