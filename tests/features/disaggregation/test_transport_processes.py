"""Transports between two processes, one of which is stopped and killed. Both tests start processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from reference_impl.features.disaggregation.transports.interface import (
    Transport,
    WriteTimeout,
)
from tests.features.disaggregation.transport_peer import SLOT, SLOTS, transport_of
from tests.features.disaggregation.writes import KINDS, LONG, failed, page, soon, write

ROOT = Path(__file__).resolve().parents[3]
Make = Callable[[str, str], Transport]


@pytest.fixture
def make() -> Iterator[Make]:
    """make(kind, owner): a transport, closed at the end."""
    with ExitStack() as stack:
        yield lambda kind, owner: stack.enter_context(closing(transport_of(kind, owner)))


class Peer:
    """A process of transport_peer.py, see there."""

    def __init__(self, kind: str, role: str):
        command = [sys.executable, "-P", "-m", "tests.features.disaggregation.transport_peer", kind, role]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._watchdog = threading.Timer(LONG, self.process.kill)  # then `hear` fails rather than wait
        self._watchdog.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._watchdog.cancel()
        self._watchdog.join()
        self.process.kill()  # also when it is stopped
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, *kinds: str) -> list[Any]:
        """The next of its lines that begins with one of these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("[") and (words := json.loads(line))[0] in kinds:
                return list(words)
        raise AssertionError(f"the process ended before it said {kinds}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        while (state := Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]) != "T":
            assert state in "RSD"
            time.sleep(0.001)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_is_stopped_or_killed_holds_up_nobody(
    kind: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts two processes. Shared memory can be written while its reader is stopped, and so it could by NIXL, if that
    had not to go over TCP here."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    writer = make(kind, "prefill-0")
    with Peer(kind, "receive") as peer:
        description = peer.hear("shared")[1].encode()
        link = writer.connect(description)
        pages = [(page(number, SLOT), number) for number in range(SLOTS)]
        write(link, pages)
        peer.say("sum")
        assert peer.hear("crc")[1] == [zlib.crc32(content) for content, _ in pages]
        peer.stop()
        stopped = link.write([(page(10 + number, SLOT), number) for number in range(SLOTS)], soon(1))
        if kind == "shared_memory":
            stopped.result(LONG)
        else:
            error = failed(stopped)
            assert isinstance(error, WriteTimeout)
            assert "decode-0" in str(error)
            assert not error.stopped.done()  # it may all still arrive
            assert "decode-0" in str(failed(link.write(pages, soon())))  # at once
            peer.go_on()
            error.stopped.result(LONG)
            link.close()
            link = writer.connect(description)
        peer.go_on()
        write(link, pages)
        peer.say("sum")
        assert peer.hear("crc")[1] == [zlib.crc32(content) for content, _ in pages]
        peer.process.kill()
        peer.process.wait()
        assert "decode-0" in str(failed(link.write(pages, soon(2))))
        again = writer.connect(description)
        assert "decode-0" in str(failed(again.write(pages, soon(2))))
    with Peer(kind, "receive") as peer:  # and another one takes its place
        write(writer.connect(peer.hear("shared")[1].encode()), pages)
        peer.say("sum")
        assert peer.hear("crc")[1] == [zlib.crc32(content) for content, _ in pages]


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_that_is_stopped_in_a_write_and_cut_off_changes_nothing_when_it_goes_on(kind: str, make: Make) -> None:
    """Starts a process."""
    receiver = make(kind, "decode-0")
    old, description = receiver.share("prefill-0", SLOTS, SLOT)
    with Peer(kind, "write") as peer:
        peer.say(description.decode())
        turn = peer.hear("written")[1]
        assert {bytes(old.slot(SLOTS - 1)[:1])} <= {bytes([ord("a") + turn % 26]), bytes([ord("a") + (turn + 1) % 26])}
        peer.stop()
        receiver.cut_off("prefill-0")
        new, of_new = receiver.share("prefill-0", SLOTS, SLOT)
        for number in range(SLOTS):
            new.slot(number)[:] = b"\0" * SLOT
        peer.go_on()
        heard = peer.hear("written", "failed")
        while heard[1] < turn + 3:  # at least one write was begun behind the cut
            heard = peer.hear("written", "failed")
        if kind == "nixl":
            assert heard[0] == "written"  # into addresses that are not used any longer
        else:
            assert heard[0] == "failed"
            assert "decode-0" in heard[2]
        assert [bytes(new.slot(number)) for number in range(SLOTS)] == [bytes(SLOT)] * SLOTS
        peer.process.kill()
        peer.process.wait()
        # One that takes its place writes into the new memory.
        write(make(kind, "prefill-0").connect(of_new), [(page(1, SLOT), 1)])
        assert new.slot(1) == page(1, SLOT)
