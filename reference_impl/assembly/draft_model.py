"""A draft model (features/speculative) beside an engine's model: whether the two fit; what its cache holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

from reference_impl.assembly.config import ConfigError, EngineConfig
from reference_impl.assembly.kv_cache import widths
from reference_impl.assembly.parts import Drafts, DraftsFromHidden, Parts
from reference_impl.interfaces import KVSpec

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder
    from reference_impl.features.speculative.feature_head import FeatureHead


def method_of(draft: Drafts) -> str:
    """The value of EngineConfig.speculative that stands for this kind of draft model."""
    return draft.method if isinstance(draft, DraftsFromHidden) else "draft"


def must_follow(config: EngineConfig, draft: Drafts | None) -> bool:
    """Whether a draft model must compute every step's tokens to go on drafting: see `Adapting`. draft: None also where
    it is in another process; then the config's method counts."""
    from reference_impl.assembly.speculation import EARLY_EXIT

    method = config.speculative if draft is None else method_of(draft)
    return method not in ("medusa", EARLY_EXIT)


def has_cache(draft: Drafts | None) -> TypeGuard[Decoder | FeatureHead]:
    """Whether the draft model has a KV cache of its own, beside the target's."""
    return draft is not None and hasattr(draft, "rotary")


def exit_layer(config: EngineConfig, target: Decoder) -> int:
    """How many of the target's first layers draft; 0: none. ConfigError if exit_layer is not below the target's number
    of layers, or is given without early exit."""
    from reference_impl.assembly.speculation import EARLY_EXIT

    if config.speculative != EARLY_EXIT:
        if config.exit_layer:
            raise ConfigError(
                f"exit_layer={config.exit_layer} is for speculative={EARLY_EXIT!r}, and it is "
                f"{config.speculative!r}: leave exit_layer out"
            )
        return 0
    most = target.config.num_layers - 1
    if not config.exit_layer <= most or not most:
        raise ConfigError(
            f"exit_layer: expected fewer layers than the model's {target.config.num_layers}, got {config.exit_layer}"
        )
    return config.exit_layer or target.config.num_layers // 2


def draft_spec(draft: Decoder | FeatureHead, config: EngineConfig) -> KVSpec:
    """The KV spec of the draft model's own cache, one group of all its layers."""
    c = draft.config
    each = widths(config.kv_dtype, draft.dtype)
    return KVSpec(c.num_layers, c.num_kv_heads, c.head_dim, config.block_size, **each)


def check_draft_model(
    parts: Parts, target: Decoder, specs: Sequence[KVSpec], longest: int, config: EngineConfig
) -> None:
    """Raises ConfigError if Parts.draft_model cannot draft for the target. specs: the target's KV groups. longest: the
    most tokens of a sequence."""
    from reference_impl.assembly.speculation import BY_MODEL, tree_of

    draft = parts.draft_model
    if draft is None:
        return
    given = f"Parts.draft_model, {type(draft).__name__}"
    if isinstance(draft, type) or not hasattr(draft, "hidden_states"):
        raise ConfigError(f"{given}: expected a model, as load_model gives one, got {draft!r}")
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"{given}: expected the target's vocabulary of {target.config.vocab_size:,} tokens, found "
            f"{draft.config.vocab_size:,}: take a draft whose config.json has the target's vocab_size. Padding counts, "
            "too: models of one family may differ in it, and do not go together"
        )
    method = method_of(draft)
    if config.speculative not in ("off", method):
        raise ConfigError(
            f"{given}: expected {BY_MODEL[config.speculative]}, since speculative={config.speculative!r}: set it to "
            f"{method!r}"
        )
    if method != "draft" and draft.config.hidden_size != target.config.hidden_size:
        raise ConfigError(
            f"{given}: expected a head for hidden states of {target.config.hidden_size:,} numbers, found "
            f"{draft.config.hidden_size:,}: it was trained for another model"
        )
    num_heads = getattr(draft.config, "num_heads", 0) if method == "medusa" else config.num_drafts
    if config.num_drafts > num_heads:
        raise ConfigError(
            f"{given}: expected a head for each of num_drafts={config.num_drafts} draft tokens, found {num_heads}: set "
            f"num_drafts={num_heads}"
        )
    tree = tree_of(config)
    if tree is not None and (width := tree.width) > target.config.vocab_size:
        raise ConfigError(
            f"draft_tree: a node has {width} children, and the vocabulary {target.config.vocab_size:,} tokens: "
            "expected no more than these"
        )
    if draft.device != target.device:
        raise ConfigError(f"{given}: expected it on {target.device}, with the target, found it on {draft.device}")
    if has_cache(draft):
        _check_cache(draft, given, parts, specs, longest)


def _check_cache(draft: Decoder | FeatureHead, given: str, parts: Parts, specs: Sequence[KVSpec], longest: int) -> None:
    """Raises ConfigError if the draft model's cache cannot use the target's block tables."""
    positions = min(draft.config.max_position, draft.rotary.max_position)
    if positions < longest:
        raise ConfigError(
            f"{given}: expected positions for {longest:,} tokens (max_model_len), found {positions:,}: set "
            f"max_model_len={positions}, or load the draft with more"
        )
    windows = {"the target": [spec.window for spec in specs], given: draft.config.layer_windows}
    for who, found in windows.items():
        if shorter := [window for window in found if window is not None and window < longest]:
            raise ConfigError(
                f"{who} has layers with a sliding window of {min(shorter):,} tokens: the draft's cache goes by the "
                f"target's block tables, so that both must keep all of {longest:,} tokens (max_model_len). Leave the "
                "draft model out, or set a max_model_len that no window is shorter than"
            )
    if parts.page_store is not None:
        raise ConfigError(
            f"{given}, and Parts.page_store are given: pages of a store have no keys and values of a draft model. "
            "Leave one of the two out"
        )
