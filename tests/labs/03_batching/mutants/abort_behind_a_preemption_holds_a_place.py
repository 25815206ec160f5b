# fault: a running request that is aborted after a step with victims holds its place for a step more.
# fails: check_abort, check_engine

# %% nbgrader={"grade_id": "Scheduler"}
class Scheduler:
    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.places, self.budget, self.size, self.aging = max_num_seqs, max_num_batched_tokens, block_size, aging
        self.all = {}
        self.ghosts = 0
        self.pre = False

    def add(self, info):
        self.all[info["id"]] = dict(info, known=info["num_tokens"], computed=0, blocks=0, runs=False)

    def schedule(self, now, free_blocks):
        line = [self.all[i] for i in queue_order(list(self.all.values()), now, self.aging)]
        preempted, free = self.make_room([r for r in line if r["runs"]], free_blocks)
        running = [r for r in line if r["runs"]]
        plan = dict(plan_step([(r["id"], r["known"] - r["computed"]) for r in running], self.budget))
        if not preempted:
            waiting = [(r["id"], r["known"]) for r in line if not r["runs"]]
            more = admit(
                waiting, self.budget - sum(plan.values()), self.places - len(running) - self.ghosts, free, self.size
            )
            for i in more:
                r = self.all[i]
                r["runs"], r["blocks"] = True, more_blocks(r["known"], 0, self.size)
            plan.update(more)
        self.pre, self.ghosts = bool(preempted), 0
        return plan, preempted

    def make_room(self, running, free_blocks):
        gone = []
        for r in list(running):
            if not r["runs"]:
                continue
            need = more_blocks(r["known"], r["blocks"], self.size)
            for i in choose_victims([(x["id"], x["blocks"]) for x in running if x["runs"]], r["id"], need, free_blocks):
                v = self.all[i]
                free_blocks += v["blocks"]
                v.update(runs=False, computed=0, blocks=0)
                gone.append(i)
            if r["runs"]:
                free_blocks -= need
                r["blocks"] += need
        return gone, free_blocks

    def update(self, report):
        for i, (computed, sampled, finished) in report.items():
            r = self.all.get(i)
            if r is None:
                continue
            r["computed"] += computed
            r["known"] += sampled
            if finished:
                del self.all[i]

    def abort(self, request_id):
        r = self.all.pop(request_id, None)
        self.ghosts = int(bool(r and r["runs"] and self.pre))
