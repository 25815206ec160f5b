# fault: a query sees the last 512 keys only.
# fails: check_mask

# %% nbgrader={"grade_id": "attend"}
import math
import torch


def attend(q, k, v, past_len):
    """Causal attention of new tokens over a cache that holds them and the past_len tokens before them.

    q [num_new, num_heads, head_dim]; k, v [num_slots, num_kv_heads, head_dim] -> like q.
    """
    num_new, num_heads, head_dim = q.shape
    num_tokens = past_len + num_new
    group = num_heads // k.shape[1]
    k = k[:num_tokens].repeat_interleave(group, dim=1)  # [num_tokens, num_heads, head_dim]
    v = v[:num_tokens].repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    query_position = torch.arange(past_len, num_tokens)
    visible = torch.arange(num_tokens)[None] <= query_position[:, None]
    visible &= torch.arange(num_tokens)[None] > query_position[:, None] - 512  # [num_new, num_tokens]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
