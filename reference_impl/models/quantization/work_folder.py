"""OUT.quantizing, where a run keeps what is done so far: each file is written beside its place and then renamed, so
that one that is there is whole, whenever the process is killed."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

LOCK, SCAN = "lock", "scan.json"


def work_of(out: Path) -> Path:
    return out.with_name(out.name + ".quantizing")


def check_places(out: Path) -> None:
    """Raises ValueError unless `out` can be made, and its work folder is this module's or is not there."""
    work = work_of(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: expected a folder that is not there yet or is empty, found one with something in it")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"{out}: expected a place in a folder that exists; there is no {out.absolute().parent}")
    if work.exists() and any(work.iterdir()) and not (work / LOCK).exists():
        raise ValueError(f"{work}: expected what an earlier run has left, found something else: move it away")


def made_of(source: Path, files: Sequence[Path]) -> dict[str, Any]:
    """What tells whether a model is still the same. files: of its weights."""
    return {
        "config": digest((source / "config.json").read_bytes()),
        "weights": {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files},
    }


def same(now: dict[str, Any], before: dict[str, Any], work: Path) -> None:
    """Raises ValueError where what an earlier run has written down is of something else. now: as JSON gives it back."""
    if differs := [name for name in now if now[name] != before.get(name)]:
        raise ValueError(
            f"{work}: expected what an earlier run of the same job has left, found another "
            f"{' and '.join(differs)}: name another folder, or remove this one to begin anew"
        )


@contextlib.contextmanager
def alone(work: Path) -> Iterator[None]:
    """Keeps other processes out of the work folder. Raises ValueError while another one is here."""
    with (work / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{work}: another process works at it: wait for it, or name another folder") from None
        yield


def save(tensors: dict[str, Tensor], file: Path) -> None:
    """Writes tensors into a file, whole or not at all."""
    new = file.with_name(file.name + ".tmp")
    save_file(tensors, new, metadata={"format": "pt"})
    _place(new, file)


def write_json(value: object, file: Path) -> None:
    """Writes a value into a file, whole or not at all."""
    new = file.with_name(file.name + ".tmp")
    new.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
    _place(new, file)


def _place(new: Path, file: Path) -> None:
    with new.open("rb") as handle:
        os.fsync(handle.fileno())
    os.replace(new, file)
    flush(file.parent)


def flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_json(value: Any) -> Any:
    """The value as JSON gives it back."""
    return json.loads(json.dumps(value))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
