# Dataclasses and a queue for each state; recursion over the line; a plan may be counted as computed when it is made.

# %% nbgrader={"grade_id": "choose_victims"}
def choose_victims(running, request_id, needed, free_blocks):
    """The victims whose blocks request_id needs. running: [(id, num_held)] -> ids, last come first."""
    if free_blocks >= needed:
        return []
    *others, (last, held) = running
    return [last] + ([] if last == request_id else choose_victims(others, request_id, needed, free_blocks + held))


# %% nbgrader={"grade_id": "queue_order"}
def queue_order(requests, now, aging):
    """Ids by priority - aging x seconds waited, then by arrival. requests: dicts with id, arrival, priority."""
    if len(requests) < 2:
        return [request["id"] for request in requests]

    def rank(request):
        return request["priority"] - aging * (now - request["arrival"]), request["arrival"]

    middle, *_ = requests
    before = [request for request in requests if rank(request) < rank(middle)]
    equal = [request["id"] for request in requests if rank(request) == rank(middle)]
    after = [request for request in requests if rank(request) > rank(middle)]
    return queue_order(before, now, aging) + equal + queue_order(after, now, aging)


# %% nbgrader={"grade_id": "Scheduler"}
from dataclasses import dataclass, field


@dataclass
class State:
    info: dict
    known: int
    computed: int = 0
    held: int = 0


@dataclass
class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Integers only, no tensors."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    aging: float = 0.0
    known: dict = field(default_factory=dict)  # all, in the order in which they were added
    running: set = field(default_factory=set)

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        self.known[info["id"]] = State(info, info["num_tokens"])

    def schedule(self, now, free_blocks):
        """One step: (plan, [ids of the preempted])."""
        line = queue_order([state.info for state in self.known.values()], now, self.aging)
        preempted, free_blocks = self.make_room([name for name in line if name in self.running], free_blocks)
        rows = [(n, self.known[n].known - self.known[n].computed) for n in line if n in self.running]
        plan = dict(plan_step(rows, self.max_num_batched_tokens))
        waiting = [(n, self.known[n].known) for n in line if n not in self.running and not preempted]
        left, places = self.max_num_batched_tokens - sum(plan.values()), self.max_num_seqs - len(self.running)
        for name, num_tokens in admit(waiting, left, places, free_blocks, self.block_size).items():
            self.known[name].held = more_blocks(self.known[name].known, 0, self.block_size)
            self.running.add(name)
            plan[name] = num_tokens
        for name, num_tokens in plan.items():
            self.known[name].computed += num_tokens
        return [plan, tuple(preempted)]

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all running requests, in order. -> (ids of the preempted, free blocks)."""
        if not running:
            return [], free_blocks
        head, *rest = running
        lack = more_blocks(self.known[head].known, self.known[head].held, self.block_size)
        victims = choose_victims([(name, self.known[name].held) for name in running], head, lack, free_blocks)
        for name in victims:
            free_blocks += self.known[name].held
            self.known[name].held = self.known[name].computed = 0
            self.running.discard(name)
        if head in self.running:
            self.known[head].held += lack
            free_blocks -= lack
        more, free_blocks = self.make_room([name for name in rest if name in self.running], free_blocks)
        return [*victims, *more], free_blocks

    def update(self, report):
        """Results of a step: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        for name in set(report) & set(self.known):
            _, sampled, finished = report[name]
            self.known[name].known += sampled
            if finished:
                self.abort(name)

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        self.known.pop(request_id, None)
        self.running.discard(request_id)
