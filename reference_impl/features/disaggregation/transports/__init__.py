"""How pages get into another process's memory: shells of one interface.

interface.py      what they promise: Transport, PageMemory, Link; what a failed write says
pages.py          what they share: slots, descriptions, and the thread that writes
shared_memory.py  processes of one machine that map the same memory
tcp.py            frames over a connection, received straight into the slot; with tcp_frames.py, tcp_receiver.py
nixl.py           NIXL over UCX: the extra `transfer`, Linux
"""
