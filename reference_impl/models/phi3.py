"""Phi-3 (Abdin et al. 2024; transformers' models/phi3/modeling_phi3.py), Phi-4: a Llama, stored and rotated otherwise.

Its checkpoint has q, k and v in one matrix, and gate and up in another, with the rows in the order in which `Linear`
stacks those of other families: so they are taken as they are.

LongRoPE (Ding et al. 2024) divides each rotary frequency by a factor of its own. There are two sets of factors: the
short ones for texts of up to original_max_position_embeddings tokens, the long ones for all others. When a text grows
beyond, all its keys and values have to be computed again, with the other set, and it can share no prefix with shorter
texts. This engine computes a token once, so it serves texts up to there and refuses to go beyond
(`config_rope.reason_for_limit`). To choose one set for good, by the longest text allowed, would give other numbers than
`transformers` has.
"""

from __future__ import annotations

from typing import Any

from reference_impl.core.decoder import GatedMLP
from reference_impl.models.partial_rotary import PartialRotaryLayer


class Phi3Layer(PartialRotaryLayer):
    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        assert isinstance(self.mlp, GatedMLP)
        for linear, name in ((self.qkv, "qkv_proj"), (self.mlp.gate_up, "gate_up_proj")):
            linear.parts = {name: linear.out_features}
