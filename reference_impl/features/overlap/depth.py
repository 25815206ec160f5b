"""How many steps are in flight, by what the parts can do and EngineConfig.overlap asks for."""

from __future__ import annotations

from reference_impl.interfaces import DefersReuse, Executor, KVManager, PlansAhead, PlansStages, RunsStages, Scheduler


def stages_for(overlap: str, kv: KVManager, executor: Executor) -> int:
    """How many stages a scheduler plans for: the executor's, where as many steps are to be in flight.

    ValueError unless an executor that runs stages has at least one.
    """
    if not isinstance(executor, RunsStages):
        return 1
    if executor.num_stages < 1:
        raise ValueError(f"{type(executor).__name__}.num_stages: expected at least 1, got {executor.num_stages}")
    wanted = overlap == "on" or (overlap == "auto" and isinstance(kv, DefersReuse))
    return executor.num_stages if wanted else 1


def depth_for(overlap: str, device_type: str, scheduler: Scheduler, kv: KVManager, executor: Executor) -> int:
    """EngineConfig.overlap for these parts: the executor's stages, 2 for overlapped steps, 1 for one at a time.

    auto: of stages, and on a GPU; where all parts can. ValueError where "on" cannot be, or the scheduler plans for
    stages, and not for as many.
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
