"""The words of the engine: the data that flows between its parts, and what each part promises.

Imports nothing but the standard library, so that every room can import it. A part is swapped by passing your own to
`Engine(..., parts=Parts(...))`.

    blocks <- request <- plan, step, batch       the data
    planning, computing                          what every part promises
    abilities                                    what some parts can do besides
"""

from reference_impl.interfaces.abilities import (
    AttendsToCache,
    CapturesGraphs,
    DefersReuse,
    HasScales,
    NamesKernels,
    NamesTensors,
    PinsPrefixes,
    PlansAhead,
    PlansStages,
    ReadsScales,
    RunsStages,
    SwapsOut,
    TakesBounds,
    TakesMasks,
    WaitsOnPurpose,
    has_scales,
    takes_bounds,
)
from reference_impl.interfaces.batch import Batch, GroupTables, Sampled
from reference_impl.interfaces.blocks import (
    NO_BLOCK,
    BlockId,
    BlockPair,
    KVKind,
    KVSpec,
    Page,
    PageTransfer,
    TransferEnd,
    Transfers,
)
from reference_impl.interfaces.computing import (
    AttentionBackend,
    Executor,
    KVCache,
    LinearMethod,
    Proposer,
    Sampler,
    TensorSpec,
)
from reference_impl.interfaces.pages import FetchesPages, HoldsPages, LayeredPageStore, PageStore, text_of
from reference_impl.interfaces.plan import Row, StepOutput, StepPlan
from reference_impl.interfaces.planning import BlockPool, Clock, HostProposer, KVManager, Policy, PrefixIndex, Scheduler
from reference_impl.interfaces.request import (
    Asking,
    Grammar,
    Pooling,
    Request,
    RequestState,
    SamplingParams,
    TokenLogprobs,
)
from reference_impl.interfaces.step import Appended, Masks, Opened, Reply, Rewound, Step, StepRow, TableUpdate

__all__ = [
    "NO_BLOCK",
    "Appended",
    "Asking",
    "AttendsToCache",
    "AttentionBackend",
    "Batch",
    "BlockId",
    "BlockPair",
    "BlockPool",
    "CapturesGraphs",
    "Clock",
    "DefersReuse",
    "Executor",
    "FetchesPages",
    "Grammar",
    "GroupTables",
    "HasScales",
    "HoldsPages",
    "HostProposer",
    "KVCache",
    "KVKind",
    "KVManager",
    "KVSpec",
    "LayeredPageStore",
    "LinearMethod",
    "Masks",
    "NamesKernels",
    "NamesTensors",
    "Opened",
    "Page",
    "PageStore",
    "PageTransfer",
    "PinsPrefixes",
    "PlansAhead",
    "PlansStages",
    "Policy",
    "Pooling",
    "PrefixIndex",
    "Proposer",
    "ReadsScales",
    "Reply",
    "Request",
    "RequestState",
    "Rewound",
    "Row",
    "RunsStages",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "Scheduler",
    "Step",
    "StepOutput",
    "StepPlan",
    "StepRow",
    "SwapsOut",
    "TableUpdate",
    "TakesBounds",
    "TakesMasks",
    "TensorSpec",
    "TokenLogprobs",
    "TransferEnd",
    "Transfers",
    "WaitsOnPurpose",
    "has_scales",
    "takes_bounds",
    "text_of",
]
