"""One model on several ranks: each has a part of every layer (tensor parallelism, Shoeybi et al. 2019, "Megatron-LM").

shares.py    which heads, columns and tokens of the vocabulary each rank has: integers only
meeting.py   the collectives, made of one operation: all ranks show a tensor, and see what the others show
threads.py, shared_memory.py    two ways to do that
all_reduce.py  the all-reduce in the ways in which libraries do it, over send and recv
loading.py   what of each tensor of a checkpoint a rank reads
model.py     a rank's model: its config, and where the ranks' partial sums are added
group.py     the ranks as one executor: each gets every step; what holds up a step is named
"""
