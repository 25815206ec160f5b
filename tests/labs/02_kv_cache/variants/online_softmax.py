# Attention key by key with a running maximum and sum, in float64; tokens by recursion; a budget that counts up.

# %% nbgrader={"grade_id": "generate_cached"}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    def after(start, todo, left):
        logits = model(todo[:chunk_size], start)
        start, todo = start + len(todo[:chunk_size]), todo[chunk_size:]
        if todo:
            return after(start, todo, left)
        token = int(logits.argmax())
        return [token] if left == 1 else [token, *after(start, [token], left - 1)]

    return after(0, prompt, num_new_tokens)


# %% nbgrader={"grade_id": "KVCache"}
import torch


class KVCache:
    """Doubles its memory when it must."""

    __slots__ = ("both", "limit", "used")

    def __init__(self, num_kv_heads, head_dim, max_len):
        self.both, self.limit, self.used = torch.empty(1, 2, num_kv_heads, head_dim), max_len, 0

    def append(self, k, v):
        if self.limit - self.used < len(k):
            raise ValueError(f"{self.limit} is the limit")
        while len(self.both) < self.used + len(k):
            self.both = torch.cat((self.both, torch.empty_like(self.both)))
        for key, value in zip(k, v, strict=True):
            self.both[self.used, 0], self.both[self.used, 1] = key, value
            self.used += 1

    def view(self):
        return self.both[: self.used].unbind(1)

    def __len__(self):
        return self.used


# %% nbgrader={"grade_id": "attend"}


def attend(q, k, v, past_len):
    num_new, heads, dim = q.shape
    kv_head = torch.arange(heads) // (heads // k.shape[1])
    position = past_len + torch.arange(num_new)[:, None]
    largest = torch.full((num_new, heads), float("-inf"), dtype=torch.float64)
    total, out = torch.zeros_like(largest), torch.zeros(num_new, heads, dim, dtype=torch.float64)
    for j in range(past_len + num_new):
        score = (q.double() * k[j, kv_head].double()).sum(-1) / dim**0.5
        score = torch.where(position >= j, score, float("-inf"))
        new = torch.maximum(largest, score)
        shrink, weight = (largest - new).exp(), (score - new).exp()
        total = total * shrink + weight
        out = out * shrink[..., None] + weight[..., None] * v[j, kv_head].double()
        largest = new
    return (out / total[..., None]).float()


# %% nbgrader={"grade_id": "attend_batch"}


def attend_batch(q, k, v, k_cache, v_cache, lengths):
    rows, num_new, heads, dim = q.shape
    out = torch.zeros_like(q)
    for r in range(rows):
        k_cache[r].narrow(0, lengths[r], num_new).copy_(k[r])
        v_cache[r].narrow(0, lengths[r], num_new).copy_(v[r])
        for i in range(num_new):
            seen = lengths[r] + i + 1
            keys, values = (cache[r, :seen].double() for cache in (k_cache, v_cache))
            grouped = q[r, i].double().view(keys.shape[1], -1, dim)  # [kv heads, group, head_dim]
            weights = torch.einsum("ghd,kgd->ghk", grouped, keys).div(dim**0.5).softmax(-1)
            out[r, i] = torch.einsum("ghk,kgd->ghd", weights, values).reshape(heads, dim)
    return out


# %% nbgrader={"grade_id": "max_new_tokens"}
def max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2):
    step = num_users * bytes_per_value * 2 * config["num_hidden_layers"]
    step *= config["num_key_value_heads"] * config["head_dim"]
    new, power = 0, 1 << 40
    while power:  # binary search for the largest number that fits
        if (prompt_len + new + power) * step <= budget_bytes:
            new += power
        power >>= 1
    return new
