# Everything position by position and head by head, in plain Python; the cache is two lists of one-token tensors.

# %% nbgrader={"grade_id": "generate_no_cache"}
def generate_no_cache(model, prompt, num_new_tokens):
    new = []
    while len(new) != num_new_tokens:
        best, logits = 0, model(prompt + new, 0).tolist()
        for token in range(len(logits)):
            if logits[token] > logits[best]:
                best = token
        new.append(best)
    return new


# %% nbgrader={"grade_id": "KVCache"}
import torch


class KVCache:
    def __init__(self, num_kv_heads, head_dim, max_len):
        self.room = max_len
        self.shape = (0, num_kv_heads, head_dim)
        self.tokens = []  # one (key, value) each

    def append(self, k, v):
        if len(k) > self.room:
            raise ValueError("the cache is full")
        for key, value in zip(k, v, strict=True):
            self.tokens.append((key.clone(), value.clone()))
        self.room -= len(k)

    def view(self):
        if not self.tokens:
            return torch.empty(self.shape), torch.empty(self.shape)
        keys, values = zip(*self.tokens, strict=True)
        return torch.stack(keys), torch.stack(values)

    def __len__(self):
        return len(self.tokens)


# %% nbgrader={"grade_id": "attend"}
import math


def attend(q, k, v, past_len):
    num_new, num_heads, head_dim = q.shape
    out = torch.zeros_like(q)
    for i in range(num_new):
        for h in range(num_heads):
            g = h * k.shape[1] // num_heads
            scores = [float(q[i, h] @ k[j, g]) / math.sqrt(head_dim) for j in range(past_len + i + 1)]
            largest = max(scores)
            exps = [math.exp(s - largest) for s in scores]
            for j, e in enumerate(exps):
                out[i, h] += e / sum(exps) * v[j, g]
    return out


# %% nbgrader={"grade_id": "attention_step"}
def attention_step(cache, attend, q, k, v):
    cache.append(k, v)
    return attend(q, *cache.view(), len(cache) - len(q))


# %% nbgrader={"grade_id": "generate_cached"}
def generate_cached(model, prompt, num_new_tokens, chunk_size):
    fed, waiting, new = 0, list(prompt), []
    while len(new) < num_new_tokens:
        chunk, waiting = waiting[:chunk_size], waiting[chunk_size:]
        logits = model(chunk, fed)
        fed += len(chunk)
        if not waiting:
            new.append(int(logits.argmax()))
            waiting = new[-1:]
    return new


# %% nbgrader={"grade_id": "attend_batch"}
def attend_batch(q, k, v, k_cache, v_cache, lengths):
    rows, num_new = q.shape[:2]
    outs = []
    for r in range(rows):
        for i in range(num_new):
            k_cache[r, lengths[r] + i] = k[r, i]
            v_cache[r, lengths[r] + i] = v[r, i]
        outs.append(torch.stack([row_of(q[r, i], k_cache[r], v_cache[r], lengths[r] + i + 1) for i in range(num_new)]))
    return torch.stack(outs)


def row_of(q, k, v, num_keys):
    """One query [num_heads, head_dim], one head after another."""
    group, heads = len(q) // k.shape[1], []
    for h in range(len(q)):
        weights = torch.softmax(k[:num_keys, h // group] @ q[h] / math.sqrt(len(q[h])), 0)
        heads.append(weights @ v[:num_keys, h // group])
    return torch.stack(heads)


# %% nbgrader={"grade_id": "max_new_tokens"}
def max_new_tokens(budget_bytes, num_users, config, prompt_len, bytes_per_value=2):
    one_token = 0
    for _layer in range(config["num_hidden_layers"]):
        for _head in range(config["num_key_value_heads"]):
            one_token += (config["head_dim"] + config["head_dim"]) * bytes_per_value
    left = budget_bytes // num_users // one_token - prompt_len
    return left if left > 0 else 0
