"""OLMo-2 (OLMo team 2024, "2 OLMo 2 Furious"; transformers' models/olmo2/modeling_olmo2.py): norms in other places.

Nothing is normalised on its way into attention and MLP; what comes out of them is, before it is added to the residual
stream: x + norm(attention(x)), then x + norm(mlp(x)). So the products get the stream as it is, and the norms set the
size of what a layer adds to it: training was steadier. `DecoderLayer` reads that from the config (input_norms and
output_norms); what is left is here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def normalise_across_heads(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    rms_norm: Callable[[Tensor, Tensor | None, float], Tensor],
) -> Tensor:
    """RMSNorm of each token's queries, all heads together, and of its keys; the values stay. OLMo-2's QK-norm.

    Qwen3 and Gemma 3 divide each head by its own size, which our kernel does as it rotates (`rotate_and_write`). Here a
    head that is larger than its neighbours stays so, and no head can be normalised before all of them are known: hence
    a step of its own.

    qkv [num_tokens, width of q, k and v] -> the same shape; q_weight [width of q], k_weight [width of k].
    """
    k_start, v_start = len(q_weight), len(q_weight) + len(k_weight)
    q, k, v = qkv[:, :k_start], qkv[:, k_start:v_start], qkv[:, v_start:]
    return torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v), dim=1)
