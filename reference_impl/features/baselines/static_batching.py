"""Static batching: a batch starts together and ends together, when its longest output has ended.

Offline inference over padded rectangles, as with `transformers.generate` and FasterTransformer. Its four costs:

1. A request that arrives while a batch runs waits for the longest output in it.
2. A batch that is not full waits to be filled (`stream_is_open`).
3. A row that has its last token keeps its seat and its memory, and continues to compute: a rectangle has no holes.
4. Prompts are padded to the longest.
"""

from __future__ import annotations

from reference_impl.features.baselines.whole_requests import WholeRequests
from reference_impl.interfaces import KVManager, Request, Row, StepOutput, StepPlan


class StaticBatching(WholeRequests):
    """Batches of up to max_num_seqs rows (fewer where blocks run out). Requests are returned when their batch ends.

    The third cost is really paid: a row that has ended computes its last position again, at what a decoding row of
    its length costs, and nothing is sampled. The fourth is only counted: the engine's prompts are ragged.

    stream_is_open: whether more requests will come, so that a batch waits until it is full; set it to False when the
    last has come.
    """

    def __init__(self, kv: KVManager, max_num_seqs: int, stream_is_open: bool = False):
        super().__init__(kv, max_num_seqs)
        self.stream_is_open = stream_is_open
        self._rows = 0  # of the running batch, also of those aborted since
        self.row_steps = 0  # rows x steps, over all batches
        self.wasted_row_steps = 0  # of these, by rows that had their last token
        self.prompt_tokens = 0  # rows x longest prompt
        self.wasted_prompt_tokens = 0  # of these, padding

    def has_work(self) -> bool:
        return bool(self.running) or self.may_start()

    def schedule(self, now: float) -> StepPlan:
        """The next step's plan: every request in the batch gets a row, even with nothing left to compute."""
        entered: list[Request] = []
        if not self.running:
            entered = self._let_in() if self.may_start() else []
            self._start(entered)
        self.row_steps += self._rows
        self.wasted_row_steps += self._rows - sum(request.finish_reason is None for request in self.running)
        return self._plan([self.row_of(request) for request in self.running], entered)

    def update(self, plan: StepPlan, output: StepOutput) -> list[Request]:
        """Returns no request or, when the longest output has ended, the whole batch."""
        self._append(plan, output)
        if any(request.finish_reason is None for request in self.running):
            return []
        batch, self.running = self.running, []
        for request in batch:
            self._leave(request)
        return batch

    def may_start(self) -> bool:
        return len(self.waiting) >= (self.max_num_seqs if self.stream_is_open else 1)

    def _start(self, batch: list[Request]) -> None:
        self._rows = len(batch)
        lengths = [request.num_prompt_tokens for request in batch]
        rectangle = len(batch) * max(lengths, default=0)
        self.prompt_tokens += rectangle
        self.wasted_prompt_tokens += rectangle - sum(lengths)

    def row_of(self, request: Request) -> Row:
        if request.finish_reason is None:
            return super().row_of(request)
        return Row(request.id, request.num_computed_tokens - 1, 1, samples=False)
