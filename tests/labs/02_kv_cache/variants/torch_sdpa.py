# Vectorised with torch's own attention and an explicit mask; the cache is a list of pieces that view() joins.

# %% nbgrader={"grade_id": "KVCache"}
import torch


class KVCache:
    def __init__(self, num_kv_heads, head_dim, max_len):
        self.pieces = [torch.zeros(2, 0, num_kv_heads, head_dim)]
        self.max_len = max_len

    def append(self, k, v):
        if len(self) + len(k) > self.max_len:
            raise ValueError(f"{len(self)} + {len(k)} tokens are more than {self.max_len}")
        self.pieces.append(torch.stack((k, v)))  # stack copies

    def view(self):
        return tuple(torch.cat(self.pieces, dim=1))

    def __len__(self):
        return sum(piece.shape[1] for piece in self.pieces)


# %% nbgrader={"grade_id": "attend"}
def attend(q, k, v, past_len):
    length = past_len + q.shape[0]
    visible = torch.ones(q.shape[0], length, dtype=torch.bool).tril(diagonal=past_len)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k[:length].transpose(0, 1), v[:length].transpose(0, 1), attn_mask=visible, enable_gqa=True
    )
    return out.transpose(0, 1)


# %% nbgrader={"grade_id": "generate_cached"}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    chunks = [prompt[i : i + chunk_size] for i in range(0, len(prompt), chunk_size)]
    position, output = 0, []
    while True:
        chunk = chunks.pop(0)
        logits = model(chunk, position)
        position += len(chunk)
        if chunks:
            continue
        output.append(logits.argmax().item())
        if len(output) == num_new_tokens:
            return output
        chunks.append([output[-1]])


# %% nbgrader={"grade_id": "attend_batch"}
def attend_batch(q, k, v, k_cache, v_cache, lengths):
    num_new, max_len = q.shape[1], k_cache.shape[1]
    slot = torch.arange(max_len)
    visible = torch.stack([slot <= n + torch.arange(num_new)[:, None] for n in lengths])  # [rows, num_new, max_len]
    for r, n in enumerate(lengths):
        k_cache[r, n : n + num_new], v_cache[r, n : n + num_new] = k[r], v[r]
    used = visible[:, -1, :, None, None]
    keys, values = (torch.where(used, cache, 0.0).transpose(1, 2) for cache in (k_cache, v_cache))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=visible[:, None], enable_gqa=True
    )
    return out.transpose(1, 2)


# %% nbgrader={"grade_id": "max_new_tokens"}
import math


def max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2):
    numbers = math.prod(config[name] for name in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    context, _ = divmod(budget_bytes, 2 * numbers * bytes_per_value * num_users)
    return max(context, prompt_len) - prompt_len
