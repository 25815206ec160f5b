"""Decides how many steps are in flight, by what the parts can do and what EngineConfig.overlap asks for."""

from __future__ import annotations

from reference_impl.interfaces import DefersReuse, Executor, KVManager, PlansAhead, PlansStages, RunsStages, Scheduler


def stages_for(overlap: str, kv: KVManager, executor: Executor) -> int:
    """How many stages a scheduler plans for: the executor's, if as many steps are to be in flight, otherwise 1.

    ValueError if an executor that runs stages has none.
    """
    if not isinstance(executor, RunsStages):
        return 1
    if executor.num_stages < 1:
        raise ValueError(f"{type(executor).__name__}.num_stages: expected at least 1, got {executor.num_stages}")
    wanted = overlap == "on" or (overlap == "auto" and isinstance(kv, DefersReuse))
    return executor.num_stages if wanted else 1


def depth_for(overlap: str, device_type: str, scheduler: Scheduler, kv: KVManager, executor: Executor) -> int:
    """How many steps may be in flight: the executor's stages, 2 for overlapped steps, 1 for one at a time.

    overlap "auto": steps overlap with stages and on a GPU, if all parts can. ValueError if "on" is not possible, or if
    the scheduler plans for another number of stages.
    """
    stages = executor.num_stages if isinstance(executor, RunsStages) else 1
    able = {"kv_manager (step_submitted, step_collected)": isinstance(kv, DefersReuse)}
    if stages > 1:
        plans = isinstance(scheduler, PlansStages) and scheduler.num_stages == stages
        able = {f"scheduler (advance, num_stages={stages})": plans} | able
    else:
        able = {"scheduler (advance)": isinstance(scheduler, PlansAhead)} | able
        able["executor (max_in_flight; a sampler that waits for its tokens cannot)"] = executor.max_in_flight > 1
    unable = [name for name, is_able in able.items() if not is_able]
    if unable and overlap == "on":
        raise ValueError(f"overlap='on' needs parts that can do it; these cannot: {', '.join(unable)}")
    wanted = overlap == "on" or (overlap == "auto" and (stages > 1 or device_type == "cuda"))
    depth = max(2, stages) if wanted and not unable else 1
    if isinstance(scheduler, PlansStages) and scheduler.num_stages not in (1, depth):
        raise ValueError(
            f"{type(scheduler).__name__} plans for num_stages={scheduler.num_stages}; here at most {depth} steps are "
            f"in flight (executor's num_stages: {stages}, overlap={overlap!r}): make it for as many, or for 1"
        )
    return depth
