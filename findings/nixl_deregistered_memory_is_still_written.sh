#!/usr/bin/env bash
# nixl-cu12 1.5.1 (UCX, two processes of one machine): `deregister_memory` takes nothing back. A peer that was given the
# region's metadata before goes on writing there: its transfers end with "DONE", and the bytes are in the receiver's
# memory. So memory from which a peer was cut off must never be used for anything else in this process; and where it was
# freed, such a write goes wherever the next allocation put these addresses. Two more, of the same version: `import
# nixl_cu12` sets `logging.raiseExceptions` to False for the whole process, and an agent with its progress thread (the
# default) that does nothing takes a fifth of a core. Seen 2026-11-30 on Python 3.11, Linux x86-64.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q numpy
"$folder/venv/bin/pip" install -q --no-deps nixl-cu12==1.5.1 # its torch is not needed for this
NIXL_LOG_LEVEL=WARN "$folder/venv/bin/python" - <<'PY'
import logging
import multiprocessing
import time

assert logging.raiseExceptions
import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

assert not logging.raiseExceptions, "this has changed"
SIZE = 1 << 20


def receiver(pipe):
    agent = nixl_agent("receiver", nixl_agent_config(backends=["UCX"]))
    memory = np.zeros(SIZE, np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, SIZE, 0, "")], "DRAM")
    pipe.send((agent.get_partial_agent_metadata(registered, True, ["UCX"]), memory.ctypes.data))
    pipe.recv()  # written once
    agent.deregister_memory(registered)
    memory[:] = 0
    pipe.send(None)
    pipe.recv()  # written again
    pipe.send(int(memory.sum()))
    begin = time.process_time()
    time.sleep(2)
    pipe.send((time.process_time() - begin) / 2)


mine, theirs = multiprocessing.get_context("fork").Pipe()
process = multiprocessing.get_context("fork").Process(target=receiver, args=(theirs,))
process.start()
metadata, address = mine.recv()
agent = nixl_agent("sender", nixl_agent_config(backends=["UCX"]))
name = agent.add_remote_agent(metadata)
ones = np.ones(SIZE, np.uint8)
agent.register_memory([(ones.ctypes.data, SIZE, 0, "")], "DRAM")


def write():
    sides = [agent.get_xfer_descs([(at, SIZE, 0)], "DRAM") for at in (ones.ctypes.data, address)]
    handle = agent.initialize_xfer("WRITE", *sides, name)
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    return state


print("first write:", write())
mine.send(None)
mine.recv()
late = write()
mine.send(None)
arrived, share = mine.recv(), mine.recv()
process.join()
print(f"after deregister_memory: {late}, {arrived} of {SIZE} bytes were written; an agent at rest took {share:.0%} of a core")
assert (late, arrived) == ("DONE", SIZE), "this has changed"
PY
