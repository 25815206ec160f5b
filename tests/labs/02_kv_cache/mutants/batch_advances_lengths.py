# fault: advances the caller's lengths in place.
# fails: check_batch_writes

# %% nbgrader={"grade_id": "attend_batch"}
import math
import torch


def attend_batch(q, k, v, k_cache, v_cache, lengths):
    """One step: writes k and v into the caches, then attends. Row r holds lengths[r] tokens.

    q [rows, num_new, num_heads, head_dim] -> like q; k, v [rows, num_new, num_kv_heads, head_dim];
    k_cache, v_cache [rows, max_len, num_kv_heads, head_dim], changed in place.
    """
    rows, num_new, num_heads, head_dim = q.shape
    position = torch.tensor(lengths)[:, None] + torch.arange(num_new)  # [rows, num_new], of the new tokens
    row = torch.arange(rows)[:, None]
    lengths[:] = [n + num_new for n in lengths]
    k_cache[row, position] = k
    v_cache[row, position] = v
    max_len, group = k_cache.shape[1], num_heads // k_cache.shape[2]
    unused = torch.arange(max_len) > position[:, -1:]  # [rows, max_len], true in the padding
    keys = k_cache.masked_fill(unused[..., None, None], 0).repeat_interleave(group, dim=2)
    values = v_cache.masked_fill(unused[..., None, None], 0).repeat_interleave(group, dim=2)
    scores = torch.einsum("rqhd,rkhd->rhqk", q, keys) / math.sqrt(head_dim)
    hidden = torch.arange(max_len) > position[..., None]  # [rows, num_new, max_len]
    weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("rhqk,rkhd->rqhd", weights, values)
