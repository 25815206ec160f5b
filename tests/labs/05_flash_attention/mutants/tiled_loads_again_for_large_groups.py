# fault: of a group of more than three query heads, every third loads the keys once more.
# fails: check_traffic

# %% nbgrader={"grade_id": "tiled_attention"}
def tiled_attention(hbm, q_len, kv_len, num_heads, num_kv_heads, block_m, block_n, first):
    G = num_heads // num_kv_heads
    for g in range(num_kv_heads):
        for i in range(math.ceil(q_len / block_m)):
            qs = torch.stack([hbm.load("q", g * G + r, i) for r in range(G)]).double()
            pos = first + i * block_m + torch.arange(qs.shape[1])
            m = torch.full(qs.shape[:2], -math.inf, dtype=torch.float64)
            total = torch.zeros_like(m)
            acc = torch.zeros_like(qs)
            j = 0
            while j * block_n < kv_len and j * block_n <= int(pos[-1]):
                [hbm.load("k", g, j) for _ in range(0, G - 3, 3)]
                k, v = hbm.load("k", g, j).double(), hbm.load("v", g, j).double()
                s = torch.einsum("rmd,nd->rmn", qs, k) / qs.shape[2] ** 0.5
                s = s.masked_fill((j * block_n + torch.arange(len(k)))[None] > pos[:, None], -math.inf)
                new = torch.maximum(m, s.amax(-1))
                f, w = (m - new).exp(), (s - new[..., None]).exp()
                total, acc, m = total * f + w.sum(-1), acc * f[..., None] + w @ v, new
                j += 1
            for r in range(G):
                hbm.store("o", g * G + r, i, (acc[r] / total[r][:, None]).float())
