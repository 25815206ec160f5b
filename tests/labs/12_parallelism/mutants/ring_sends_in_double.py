# fault: keys and values travel as float64.
# fails: check_ring

# %% nbgrader={"grade_id": "ring_attention"}
def ring_attention(group, q, k, v, positions):
    """Causal attention of this rank's tokens over those of all ranks."""
    n, rank, block = group.size, group.rank, torch.stack((k, v)).double()
    found = None
    for turn in range(n):
        theirs = positions[(rank - turn) % n]
        one = attend(q, block[0], block[1], positions[rank][:, None] >= theirs)
        found = one if found is None else merge(*found, *one)
        if turn < n - 1:
            block = group.exchange({(rank + 1) % n: block}, [(rank - 1) % n])[(rank - 1) % n]
    return found[0].to(q.dtype)
