# fault: one largest score for all heads of a group.
# fails: check_tiled

# %% nbgrader={"grade_id": "tiled_attention"}
def tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first):
    """Causal attention of tiles loaded from hbm; the output is stored there. Query 0 is at position `first`."""
    group = num_heads // num_kv_heads
    for kv_head in range(num_kv_heads):
        heads = range(kv_head * group, (kv_head + 1) * group)
        for i in range(-(-q_len // block_m)):
            query = torch.stack([hbm.load("q", head, i) for head in heads])  # [group, rows, head_dim]
            position = first + i * block_m + torch.arange(query.shape[1])
            largest = torch.full(query.shape[:2], -math.inf)
            total, acc = torch.zeros(query.shape[:2]), torch.zeros_like(query)
            seen = min(kv_len, int(position[-1]) + 1)  # keys visible to the last query, and so to any
            for j in range(-(-seen // block_n)):
                key, value = hbm.load("k", kv_head, j), hbm.load("v", kv_head, j)
                score = query @ key.T / math.sqrt(query.shape[2])
                visible = j * block_n + torch.arange(len(key)) <= position[:, None]
                score = score.masked_fill(~visible, -math.inf)
                new = torch.maximum(
                    largest, score.amax(-1).amax(0)
                )  # the first tile has a key for every query: it is finite
                weight, shrink = torch.exp(score - new[..., None]), torch.exp(largest - new)
                total = total * shrink + weight.sum(-1)
                acc = acc * shrink[..., None] + weight @ value
                largest = new
            for number, head in enumerate(heads):
                hbm.store("o", head, i, acc[number] / total[number][:, None])
