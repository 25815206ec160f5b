"""The engine's scheduler: the core's, with the features that an engine's options need, and no others. So a step does
nothing for a feature that is off.

Each feature is a scheduler of its own, the core's with one or two methods extended. Here they are one class:
each method's `super()` is that of the next in the line, and the core comes last.
"""

from __future__ import annotations

from typing import Any, Literal

from reference_impl.core.ranking import FirstCome
from reference_impl.core.scheduler import Scheduler
from reference_impl.features.admission.worst_case import WorstCaseAdmission
from reference_impl.features.beams.scheduling import Branching
from reference_impl.features.overlap.scheduling import WaitsForBlocks
from reference_impl.features.policies.overtaking import Overtaking
from reference_impl.features.pooling.scheduling import PoolsPrompts
from reference_impl.features.scoring.scheduling import ScoresPrompts
from reference_impl.features.speculative.adapting import Adapting
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.scheduling import Drafting
from reference_impl.features.speculative.tree import Tree
from reference_impl.features.speculative.tree_scheduling import TreeDrafting
from reference_impl.features.stages.scheduling import Staged
from reference_impl.features.swap.scheduling import Swapping
from reference_impl.features.transfer.scheduling import LoadsPages
from reference_impl.interfaces import DefersReuse, FetchesPages, HostProposer, KVManager, Policy


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
    shows_guesses: bool = False,
) -> Scheduler:
    """admission: "fill" admits a request when its known tokens fit, and preempts when blocks run out later;
    "worst_case" when all it may ever have fits. preemption: "recompute" drops the blocks, "swap" moves them to the host
    (and drops them where that is full). num_drafts: guesses that a decoding row has verified, as far as budget and
    blocks allow; host_proposer: what makes them, None: the worker's own proposer; adaptive_drafts: no more than pay.
    num_stages: of an executor that `RunsStages`, otherwise 1. tree: guesses are a tree of this shape, or grown so;
    max_len: then, positions of a request. must_follow: as of `Adapting`. shows_guesses: as of `Drafting`.
    """
    policy = FirstCome() if policy is None else policy
    drafting: tuple[type[Scheduler], bool, dict[str, Any]]
    drafts = {"num_drafts": num_drafts, "host_proposer": host_proposer, "shows_guesses": shows_guesses}
    drafting = Drafting, num_drafts > 0, drafts
    if adaptive_drafts:
        drafting = Adapting, num_drafts > 0, drafts | {"must_follow": must_follow}
    if tree is not None:
        drafting = TreeDrafting, True, {"tree": tree, "max_len": max_len, "shows_guesses": shows_guesses}
    features: list[tuple[type[Scheduler], bool, dict[str, Any]]] = [  # whether it is needed, and its options
        (LoadsPages, isinstance(kv, FetchesPages), {}),
        (Overtaking, policy.preemptive, {}),
        (Staged, num_stages > 1, {"num_stages": num_stages}),
        drafting,
        (WaitsForBlocks, isinstance(kv, DefersReuse), {}),
        (Swapping, preemption == "swap", {}),
        (WorstCaseAdmission, admission == "worst_case", {}),
        (Branching, True, {}),  # what one request may ask for costs the others nothing
        (ScoresPrompts, True, {}),
        (PoolsPrompts, True, {}),
    ]
    needed = [(feature, options) for feature, is_needed, options in features if is_needed]
    line = type("ContinuousBatching", (*(feature for feature, _ in needed), Scheduler), {})
    options = {name: value for _, options in needed for name, value in options.items()}
    return line(kv, max_num_seqs, max_num_batched_tokens, policy, **options)
