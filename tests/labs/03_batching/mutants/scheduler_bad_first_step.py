# fault: the first plan has a row for an id that nobody added, and blocks are never counted.
# fails: check_memory, check_preemption, check_return, check_abort, check_engine, check_turn, check_starvation

# %% nbgrader={"grade_id": "Scheduler"}
class Scheduler:
    """Continuous batching with chunked prefill and preemption by recomputation. Integers only, no tensors."""

    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.block_size = block_size
        self.aging = aging
        self.requests = {}  # by id, in order of arrival

    def add(self, info):
        """A new request: a dict with id, num_tokens (of the prompt), arrival (seconds) and priority."""
        state = {"known": info["num_tokens"], "computed": 0, "blocks": 0, "runs": False}
        self.requests[info["id"]] = info | state

    def schedule(self, now, free_blocks):
        """One step: (plan, [ids of the preempted])."""
        line = [self.requests[name] for name in queue_order(list(self.requests.values()), now, self.aging)]
        preempted, started = [], bool(getattr(self, "started", False))
        self.started = bool(line)

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
        return plan | admitted | ({} if started or not line else {"nobody": 1}), preempted

    def make_room(self, running, free_blocks):
        """Blocks for the known tokens of all running requests, in order. -> (ids of the preempted, free blocks)."""
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

    def update(self, report):
        """Results of a step: {id: (computed tokens, sampled tokens, finished)}. Unknown ids were aborted."""
        for name, (computed, sampled, finished) in report.items():
            if name not in self.requests:
                continue
            self.requests[name]["computed"] += computed
            self.requests[name]["known"] += sampled
            if finished:
                del self.requests[name]

    def abort(self, request_id):
        """The request is gone; one that is unknown, or gone already, is no error."""
        self.requests.pop(request_id, None)
