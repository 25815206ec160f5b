"""The generated tasks of `reference_impl/bench/tasks.py`, which `inferlab eval` asks, too."""

from reference_impl.bench.tasks import EVALUATION_SEED, Task, copying, json_call, made_up_word, retrieval

__all__ = ["EVALUATION_SEED", "Task", "copying", "json_call", "made_up_word", "retrieval"]
