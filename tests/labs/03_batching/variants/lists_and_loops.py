# Two lists, running and waiting, that are sorted again in every step; blocks are recomputed from counts, never stored.

# %% nbgrader={"grade_id": "static_batching"}
def static_batching(lengths, max_num_seqs):
    """Batches in the order given, each as long as its longest. -> (steps, useful share of the row-steps)."""
    steps, row_steps, batch = 0, 0, []
    for number, length in enumerate(lengths):
        batch.append(length)
        if len(batch) == max_num_seqs or number == len(lengths) - 1:
            steps += max(batch)
            row_steps += max(batch) * len(batch)
            batch = []
    return [steps, sum(lengths) / row_steps]


# %% nbgrader={"grade_id": "continuous_batching"}
def continuous_batching(lengths, max_num_seqs):
    """A free place is filled before the next step. -> for each request the step (from 1) of its last token."""
    last_used = [0] * max_num_seqs
    finished = []
    for length in lengths:
        place = min(range(max_num_seqs), key=lambda p: last_used[p])
        last_used[place] += length
        finished.append(last_used[place])
    return finished


# %% nbgrader={"grade_id": "plan_step"}
def plan_step(running, budget):
    """Shares out `budget` new tokens. running: [(id, missing)] in order -> {id: n}, every n at least 1."""
    plan = {}
    for decodes in (True, False):
        for name, missing in running:
            left = budget - sum(plan.values())
            if (missing == 1) == decodes and left > 0:
                plan[name] = missing if missing < left else left
    return plan


# %% nbgrader={"grade_id": "more_blocks"}
def more_blocks(num_tokens, num_held, block_size):
    """How many blocks a request that holds num_held lacks for num_tokens tokens in all."""
    lacking = 0
    while (num_held + lacking) * block_size < num_tokens:
        lacking += 1
    return lacking


# %% nbgrader={"grade_id": "admit"}
def admit(waiting, budget, num_places, free_blocks, block_size):
    """Lets in from the head of the line while all of a request fits. waiting: [(id, missing)] -> {id: n}."""
    result = {}
    taken = 0
    for name, missing in waiting[:num_places]:
        left = budget - sum(result.values())
        taken += math.ceil(missing / block_size)
        if left <= 0 or taken > free_blocks:
            return result
        result[name] = min(missing, left)
    return result


# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """Who gives blocks back so that request_id gets `needed`. running: [(id, num_held)] -> ids, last come first."""
    names = [name for name, _ in running]
    first_allowed = names.index(request_id)
    for count in range(len(running) - first_allowed + 1):
        victims = running[len(running) - count :]
        if free_blocks + sum(held for _, held in victims) >= needed or count == len(running) - first_allowed:
            return [name for name, _ in reversed(victims)]


# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    line = []
    for request in sorted(requests, key=lambda r: r["arrival"]):
        urgency = request["priority"] - aging * (now - request["arrival"])
        place = len(line)
        while place > 0 and line[place - 1][0] > urgency:
            place -= 1
        line.insert(place, (urgency, request["id"]))
    return [name for _, name in line]


# %% nbgrader={"grade_id": "Scheduler"}
class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Whole numbers only, no tensors."""

    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.limits = (max_num_seqs, max_num_batched_tokens)
        self.block_size = block_size
        self.aging = aging
        self.running, self.waiting, self.num_added = [], [], 0

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        request = dict(info)
        request["known"], request["computed"], request["at_admission"] = info["num_tokens"], 0, 0
        request["number"] = self.num_added
        self.num_added += 1
        self.waiting.append(request)

    def schedule(self, now, free_blocks):
        """One step: ({id: new tokens}, [ids of the preempted])."""
        places, budget = self.limits
        for line in (self.running, self.waiting):
            line.sort(key=lambda request: request["number"])
            order = queue_order(line, now, self.aging)
            line.sort(key=lambda request: order.index(request["id"]))
        preempted, free_blocks = self.make_room(self.running, free_blocks)

        plan = plan_step([(r["id"], r["known"] - r["computed"]) for r in self.running], budget)
        if not preempted:
            line = [(r["id"], r["known"]) for r in self.waiting]
            left = budget - sum(plan.values())
            for name, n in admit(line, left, places - len(self.running), free_blocks, self.block_size).items():
                request = self.waiting.pop(0)
                request["at_admission"] = request["known"]
                self.running.append(request)
                plan[name] = n
        return plan, preempted

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all that run, in order. -> (ids of the preempted, blocks still free)."""

        def held(request):  # of tokens in the cache, or reserved when it was let in
            return math.ceil(max(request["computed"], request["at_admission"]) / self.block_size)

        preempted, place, grown = [], 0, {}
        while place < len(running):
            request = running[place]
            needed = more_blocks(request["known"], held(request), self.block_size)
            rows = [(r["id"], held(r) + grown.get(r["id"], 0)) for r in running]
            for name in choose_victims(rows, request["id"], needed, free_blocks):
                victim = running.pop()
                free_blocks += held(victim)
                victim["computed"] = victim["at_admission"] = 0
                self.waiting.append(victim)
                preempted.append(name)
            if request["id"] not in preempted:
                free_blocks -= needed
                grown[request["id"]] = needed
            place += 1
        return preempted, free_blocks

    def update(self, report):
        """What a step did: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        for request in list(self.running):
            computed, sampled, finished = report.get(request["id"], (0, 0, False))
            request["computed"] += computed
            request["known"] += sampled
            if finished:
                self.running.remove(request)

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        self.running = [request for request in self.running if request["id"] != request_id]
        self.waiting = [request for request in self.waiting if request["id"] != request_id]
