# fault: the ranks sum through a variable that only a notebook lets them share.
# trap: own memory
# fails: check_sum, check_uneven, check_bytes

# %% nbgrader={"grade_id": "all_reduce"}
board = {}


def all_reduce(comm, x):
    board[comm.rank] = x
    for r in range(comm.world_size):
        if r != comm.rank:
            comm.send(r, 0)
            comm.recv(r)
    return sum(board[r] for r in range(comm.world_size))
