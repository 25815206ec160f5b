# fault: the last block is not attended to.
# trap: a hop short
# fails: check_ring

# %% nbgrader={"grade_id": "ring_attention"}
def ring_attention(group, q, k, v, positions):
    """Causal attention of this rank's tokens over those of all ranks."""
    n, rank, block = group.size, group.rank, torch.stack((k, v))
    found = None
    for turn in range(max(1, n - 1)):
        theirs = positions[(rank - turn) % n]
        one = attend(q, block[0], block[1], positions[rank][:, None] >= theirs)
        found = one if found is None else merge(*found, *one)
        if turn < n - 1:
            block = group.exchange({(rank + 1) % n: block}, [(rank - 1) % n])[(rank - 1) % n]
    return found[0].to(q.dtype)
