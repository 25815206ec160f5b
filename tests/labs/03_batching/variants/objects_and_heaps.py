# Small classes for requests, heaps for the queue, victims found by bisection over sums.

# %% nbgrader={"grade_id": "static_batching"}
def static_batching(lengths, max_num_seqs):
    """Batches in the order given, each as long as its longest. -> (steps, useful share of the row-steps)."""
    if not lengths:
        return 0, 1.0
    head, rest = lengths[:max_num_seqs], lengths[max_num_seqs:]
    steps, useful = static_batching(rest, max_num_seqs)
    row_steps = sum(rest) / useful + max(head) * len(head)
    return steps + max(head), sum(lengths) / row_steps


# %% nbgrader={"grade_id": "continuous_batching"}
import heapq


def continuous_batching(lengths, max_num_seqs):
    """A free place is filled before the next step. -> for each request the step (from 1) of its last token."""
    free_after, finished = [0] * max_num_seqs, []
    for length in lengths:
        step = heapq.heappop(free_after) + length
        heapq.heappush(free_after, step)
        finished.append(step)
    return finished


# %% nbgrader={"grade_id": "plan_step"}
from itertools import accumulate


def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    line = sorted(running, key=lambda row: row[1] > 1)  # stable: decodes first
    given_before = accumulate((missing for _, missing in line), initial=0)
    shares = {name: min(missing, budget - before) for (name, missing), before in zip(line, given_before, strict=False)}
    return {name: n for name, n in shares.items() if n >= 1}


# %% nbgrader={"grade_id": "more_blocks"}
def more_blocks(num_tokens, num_held, block_size):
    """How many blocks a request that holds num_held lacks for num_tokens tokens in all."""
    full, rest = divmod(num_tokens, block_size)
    total = full + (1 if rest else 0)
    return total - num_held if total > num_held else 0


# %% nbgrader={"grade_id": "admit"}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Lets in from the head of the line while all of a request fits. waiting: [(id, missing)] -> {id: n}."""
    if not waiting or budget <= 0 or num_places <= 0:
        return {}
    (name, missing), *behind = waiting
    needed = more_blocks(missing, 0, block_size)
    if needed > free_blocks:
        return {}
    now = min(missing, budget)
    return {name: now} | admit(behind, budget - now, num_places - 1, free_blocks - needed, block_size)


# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    line = list(running)
    victims = []
    while free_blocks < needed and request_id not in victims:
        name, held = line.pop()
        victims.append(name)
        free_blocks += held
    return tuple(victims)


# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    import heapq

    heap = []
    for number, request in enumerate(requests):
        waited = now - request["arrival"]
        heapq.heappush(heap, (request["priority"] - aging * waited, -waited, number, request["id"]))
    return [heapq.heappop(heap)[-1] for _ in range(len(heap))]


# %% nbgrader={"grade_id": "Scheduler"}
class Task:
    def __init__(self, info):
        self.info, self.known, self.computed, self.blocks = dict(info), info["num_tokens"], 0, None

    @property
    def missing(self):
        return self.known - self.computed

    @property
    def running(self):
        return self.blocks is not None


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Whole numbers only, no tensors."""

    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.max_num_seqs, self.budget, self.block_size, self.aging = (
            max_num_seqs,
            max_num_batched_tokens,
            block_size,
            aging,
        )
        self.tasks = {}

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        self.tasks[info["id"]] = Task(info)

    def schedule(self, now, free_blocks):
        """One step: ({id: new tokens}, [ids of the preempted])."""
        line = queue_order([task.info for task in self.tasks.values()], now, self.aging)
        running = [name for name in line if self.tasks[name].running]
        preempted, free_blocks = self.make_room(running, free_blocks)
        running = [name for name in running if name not in preempted]
        plan = plan_step([(name, self.tasks[name].missing) for name in running], self.budget)
        if not preempted:
            waiting = [(name, self.tasks[name].known) for name in line if name not in running]
            left, places = self.budget - sum(plan.values()), self.max_num_seqs - len(running)
            for name, n in admit(waiting, left, places, free_blocks, self.block_size).items():
                plan[name], self.tasks[name].blocks = n, more_blocks(self.tasks[name].known, 0, self.block_size)
        return plan, preempted

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all that run, in order. -> (ids of the preempted, blocks still free)."""
        lacking = {n: more_blocks(self.tasks[n].known, self.tasks[n].blocks, self.block_size) for n in running}
        stay = list(running)
        while sum(lacking[name] for name in stay) > free_blocks:  # the shortest tail that is enough
            last = self.tasks[stay.pop()]
            free_blocks += last.blocks
            last.blocks, last.computed = None, 0
        for name in stay:
            self.tasks[name].blocks += lacking[name]
            free_blocks -= lacking[name]
        return running[len(stay) :][::-1], free_blocks

    def update(self, report):
        """What a step did: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        for name in report.keys() & self.tasks.keys():
            computed, sampled, finished = report[name]
            task = self.tasks[name]
            task.computed, task.known = task.computed + computed, task.known + sampled
            if finished:
                self.abort(name)

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        if request_id in self.tasks:
            del self.tasks[request_id]
