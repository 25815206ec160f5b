# fault: requests arrive when schedule first sees them, whatever add says.
# fails: check_turn, check_starvation

# %% nbgrader={"grade_id": "Scheduler"}
class Scheduler:
    def __init__(self, max_num_seqs, max_num_batched_tokens, block_size, aging=0.0):
        self.seqs, self.budget, self.size, self.aging = max_num_seqs, max_num_batched_tokens, block_size, aging
        self.all = {}

    def add(self, info):
        self.all[info["id"]] = dict(info, known=info["num_tokens"], computed=0, held=0, runs=False)

    def schedule(self, now, free_blocks):
        line = [
            self.all[i]
            for i in queue_order(
                [dict(r, arrival=r.setdefault("seen", now)) for r in self.all.values()], now, self.aging
            )
        ]
        running = [r for r in line if r["runs"]]
        preempted, free = self.make_room(running, free_blocks)
        running = [r for r in running if r["runs"]]
        plan = plan_step([(r["id"], r["known"] - r["computed"]) for r in running], self.budget)
        if not preempted:
            waiting = [(r["id"], r["known"] - r["computed"]) for r in line if not r["runs"]]
            new = admit(waiting, self.budget - sum(plan.values()), self.seqs - len(running), free, self.size)
            for name in new:
                r = self.all[name]
                r["runs"], r["held"] = True, more_blocks(r["known"], 0, self.size)
            plan.update(new)
        return plan, preempted

    def make_room(self, running, free_blocks):
        gone = []
        for r in running:
            if not r["runs"]:
                continue
            need = more_blocks(r["known"], r["held"], self.size)
            if need > free_blocks:
                alive = [(x["id"], x["held"]) for x in running if x["runs"]]
                for name in choose_victims(alive, r["id"], need, free_blocks):
                    victim = self.all[name]
                    free_blocks += victim["held"]
                    victim.update(held=0, computed=0, runs=False)
                    gone.append(name)
            if r["runs"]:
                free_blocks -= need
                r["held"] += need
        return gone, free_blocks

    def update(self, report):
        for name, (computed, sampled, finished) in report.items():
            r = self.all.get(name)
            if r is None:
                continue
            if finished:
                del self.all[name]
                continue
            r["computed"] += computed
            r["known"] += sampled

    def abort(self, request_id):
        self.all.pop(request_id, None)
