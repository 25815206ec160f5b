"""A process that shares memory or writes into it, for test_transport_processes.py: `KIND receive|write`.

It tells what it does in lines of JSON on its standard output, and ends when its standard input does.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import zlib

from reference_impl.features.disaggregation.transports.interface import Transport
from reference_impl.features.disaggregation.transports.nixl import NixlTransport
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from reference_impl.features.disaggregation.transports.tcp import TcpTransport

KEY = b"k" * 32
SLOTS, SLOT = 8, 2 << 20  # of a memory shared with another process: more than sockets buffer


def transport_of(kind: str, owner: str) -> Transport:
    if kind == "tcp":
        return TcpTransport(owner, KEY)
    return SharedMemoryTransport(owner) if kind == "shared_memory" else NixlTransport(owner)


def say(*words: object) -> None:
    print(json.dumps(words), flush=True)


def receive(kind: str) -> None:
    transport = transport_of(kind, "decode-0")
    memory, description = transport.share("prefill-0", SLOTS, SLOT)
    say("shared", description.decode())
    for _ in sys.stdin:
        say("crc", [zlib.crc32(memory.slot(number)) for number in range(SLOTS)])
    transport.close()


def write(kind: str) -> None:
    """Writes one letter over and over, the next one in each turn, and goes on when a write fails."""
    transport = transport_of(kind, "prefill-0")
    link = transport.connect(sys.stdin.readline().encode())
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    turn = 0
    while not over.is_set():
        content = memoryview(bytes([ord("a") + turn % 26]) * SLOT)
        error = link.write([(content, slot) for slot in range(SLOTS)], time.monotonic() + 5).exception(60)
        say("written" if error is None else "failed", turn, str(error))
        turn += 1
        time.sleep(0.01)
    transport.close()


if __name__ == "__main__":
    {"receive": receive, "write": write}[sys.argv[2]](sys.argv[1])
