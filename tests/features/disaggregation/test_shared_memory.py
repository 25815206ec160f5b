"""Shared memory as a transport: names, descriptors, and what a description may open."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

from reference_impl.features.disaggregation.transports import shared_memory
from reference_impl.features.disaggregation.transports.shared_memory import SharedMemoryTransport
from tests.features.disaggregation.writes import failed, page, soon, write


def test_shared_memory_leaves_no_name_and_no_descriptor() -> None:
    gc.collect()
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    receiver, writer = SharedMemoryTransport("decode-0"), SharedMemoryTransport("prefill-0")
    memory, description = receiver.share("prefill-0", 4, 1 << 16)
    write(writer.connect(description), [(page(1, 1 << 16), 2)])
    view = memory.slot(2)
    assert set(os.listdir("/dev/shm")) == before[1]
    writer.close()
    receiver.close()
    assert view == page(1, 1 << 16)  # still mapped: nothing that has a view of it crashes
    del view, memory, writer, receiver
    gc.collect()
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


def test_a_peer_cannot_shrink_or_grow_shared_memory_under_its_reader() -> None:
    receiver = SharedMemoryTransport("decode-0")
    _, description = receiver.share("prefill-0", 1, 4096)
    with open(json.loads(description)["path"], "r+b") as file:
        for size in (0, 1 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(file.fileno(), size)
    receiver.close()


def test_shared_memory_opens_nothing_but_a_segment(tmp_path: Path) -> None:
    transport = SharedMemoryTransport("prefill-0")
    path = tmp_path / "file"
    path.write_bytes(bytes(64 + 16))
    said = {
        "transport": "shared_memory", "owner": "liar", "num_slots": 1, "slot_bytes": 64, "path": str(path),
        "token": "00" * 16,
    }  # fmt: skip
    with pytest.raises(ValueError, match="expected the path of a segment"):
        transport.connect(json.dumps(said).encode())
    with path.open("r+b") as file:  # an open file of the right size and token, by a path of the right form
        said["path"] = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        link = transport.connect(json.dumps(said).encode())
        assert "is not its memory any longer" in str(failed(link.write([(page(1, 64), 0)], soon())))
    assert path.read_bytes() == bytes(64 + 16)
    # A segment of the same size, by a number that was that of another one before.
    memory, description = transport.share("prefill-1", 1, 64)
    link = transport.connect(json.dumps(json.loads(description) | {"token": "00" * 16}).encode())
    assert "is not its memory any longer" in str(failed(link.write([(page(1, 64), 0)], soon())))
    assert memory.slot(0) == bytes(64)
    transport.close()


def test_without_memfd_a_segment_is_a_file_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    receiver, writer = SharedMemoryTransport("decode-0"), SharedMemoryTransport("prefill-0")
    memory, description = receiver.share("prefill-0", 2, 64)
    path = Path(json.loads(description)["path"])
    assert path.exists()
    write(writer.connect(description), [(page(1, 64), 1)])
    assert memory.slot(1) == page(1, 64)
    receiver.close()
    assert not path.exists()
    writer.close()
    assert shared_memory._is_segment(0)
