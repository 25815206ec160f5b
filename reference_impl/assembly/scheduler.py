"""The engine's scheduler: the core's, with only those features that the engine's options need. So a step does nothing
for a feature that is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from reference_impl.core.scheduler import Scheduler, SchedulerFeature, known_tokens
from reference_impl.features.beams.scheduling import Branching
from reference_impl.features.overlap.scheduling import WaitsForBlocks
from reference_impl.features.pooling.scheduling import PoolsPrompts
from reference_impl.interfaces import DefersReuse, FetchesPages, HostProposer, KVManager, Policy

if TYPE_CHECKING:
    from reference_impl.features.speculative.growth import Growth
    from reference_impl.features.speculative.tree import Tree


def continuous_batching(
    kv: KVManager,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    policy: Policy | None = None,
    admission: Literal["fill", "worst_case"] = "fill",
    preemption: Literal["recompute", "swap"] = "recompute",
    num_drafts: int = 0,
    host_proposer: HostProposer | None = None,
    adaptive_drafts: bool = False,
    num_stages: int = 1,
    tree: Tree | Growth | None = None,
    max_len: int = 0,
    must_follow: bool = True,
    shows_drafts: bool = False,
) -> Scheduler:
    """The scheduler for these options. admission: "fill" admits a request when its known tokens fit, and preempts when
    blocks run out later; "worst_case" when all it may ever have fits. preemption: "recompute" drops the blocks, "swap"
    moves them to the host (and drops them where that is full). num_drafts: drafts verified for each decoding row, as
    far as budget and blocks allow; host_proposer: makes them; None: the worker does; adaptive_drafts: no more than pay.
    num_stages: those of an executor that `RunsStages`, otherwise 1. tree: the shape of draft trees, or how they grow;
    max_len: positions of a request, for trees. must_follow: see `Adapting`. shows_drafts: see `Drafting`.
    """
    kind: type[Scheduler] = Scheduler
    options: dict[str, Any] = {}
    if num_drafts or tree is not None:
        from reference_impl.features.speculative.scheduling import Drafting

        kind, options = Drafting, {"shows_drafts": shows_drafts}
        if tree is not None:
            from reference_impl.features.speculative.tree_scheduling import TreeDrafting

            kind, options = TreeDrafting, options | {"tree": tree, "max_len": max_len}
        else:
            options |= {"num_drafts": num_drafts, "host_proposer": host_proposer}
            if adaptive_drafts:
                from reference_impl.features.speculative.adapting import Adapting

                kind, options = Adapting, options | {"must_follow": must_follow}
    needs = known_tokens
    if admission == "worst_case":
        from reference_impl.features.admission.worst_case import most_tokens

        needs = most_tokens
    scheduler = kind(kv, max_num_seqs, max_num_batched_tokens, policy, needs, **options)
    features: list[SchedulerFeature] = []
    if isinstance(kv, FetchesPages):
        from reference_impl.features.transfer.scheduling import LoadsPages

        features.append(LoadsPages(scheduler))
    if num_stages > 1:
        from reference_impl.features.stages.scheduling import Staged

        features.append(Staged(scheduler, num_stages))
    if isinstance(kv, DefersReuse):
        features.append(WaitsForBlocks(scheduler))
    if preemption == "swap":
        from reference_impl.features.swap.scheduling import Swapping

        features.append(Swapping(scheduler))
    features += [Branching(scheduler), PoolsPrompts(scheduler)]  # what requests ask for costs the others nothing
    for feature in features:
        scheduler.hooks.add(feature)
    return scheduler
