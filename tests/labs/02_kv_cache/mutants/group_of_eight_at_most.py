# fault: no more than eight query heads share a KV head, the others read the last one.
# fails: check_heads

# %% nbgrader={"grade_id": "attend"}
import math
import torch


def attend(q, k, v, past_len):
    """Causal attention of new tokens over a cache that holds them and the past_len tokens before them.

    q [num_new, num_heads, head_dim]; k, v [num_slots, num_kv_heads, head_dim] -> like q.
    """
    num_new, num_heads, head_dim = q.shape
    num_tokens = past_len + num_new
    group = min(8, num_heads // k.shape[1])
    k = k[:num_tokens].repeat_interleave(group, dim=1)  # [num_tokens, num_heads, head_dim]
    v = v[:num_tokens].repeat_interleave(group, dim=1)
    k, v = (torch.cat([t] + [t[:, -1:]] * (num_heads - t.shape[1]), 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head_dim)
    query_position = torch.arange(past_len, num_tokens)
    visible = torch.arange(num_tokens)[None] <= query_position[:, None]  # [num_new, num_tokens]
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, v)
