"""Who makes the drafts of a worker: from its options to a source."""

from __future__ import annotations

from typing import Any

from reference_impl.core.sampler import TorchSampler
from reference_impl.core.slots import Slots
from reference_impl.features.gumbel.sampler import GumbelSampler
from reference_impl.features.speculative.draft_model import DraftModel
from reference_impl.features.speculative.feature_head import KeepsHidden
from reference_impl.features.speculative.growth import Growth
from reference_impl.features.speculative.head_source import HeadSource
from reference_impl.features.speculative.lookahead import Shape
from reference_impl.features.speculative.lookahead_source import LookaheadSource
from reference_impl.features.speculative.model_source import Draft, ModelSource
from reference_impl.features.speculative.sources import Source
from reference_impl.features.speculative.tree import Tree
from reference_impl.interfaces import AttentionBackend, Sampler, takes_bounds


def tap_on(model: Any, draft: Draft) -> KeepsHidden | None:
    """Wraps the model for the worker so that its hidden states are kept, where drafts are made from them; else None."""
    if isinstance(draft, DraftModel):
        return None
    draft.model.follow(model)
    return KeepsHidden(model)


def source_of(
    slots: Slots, sampler: Sampler | TorchSampler, tap: KeepsHidden | None, draft: Draft | None,
    tree: Tree | Growth | None, lookahead: Shape | None,
) -> Source:  # fmt: skip
    """The source of a worker's drafts. One of draft and lookahead is given. tap: see `tap_on`."""
    if lookahead is not None:
        return LookaheadSource(lookahead, slots)
    assert draft is not None
    if isinstance(draft, DraftModel):
        return ModelSource(draft, sampler)
    assert tap is not None
    return HeadSource(draft, sampler, tap, tree)


def needs_lengths(sampler: Sampler | TorchSampler, *attention: AttentionBackend) -> bool:
    """Whether any of these needs the lengths of texts on the host, so that each step is waited for before the next."""
    on_device = isinstance(sampler, TorchSampler) and (sampler.captures or isinstance(sampler, GumbelSampler))
    return not (on_device and all(map(takes_bounds, attention)))
