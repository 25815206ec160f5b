"""A page store in a folder: the prefix cache outlives the engine, and engines on one machine can share it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

_LONGEST_SAVE = 600  # seconds; no page takes as long to write


class FolderStore:
    """One file for each page, named by its key in hexadecimal. Pages of other models and formats have other keys.

    max_bytes: the limit for all pages together; beyond it those saved or loaded least recently are deleted. Several
    processes may use one folder: a page is a whole file or none, and loading a page that another process deletes
    meanwhile fails. timeout: see `PageStore`. ValueError for a limit that is not an integer above 0, OSError if the
    folder cannot be made.
    """

    def __init__(self, folder: str | Path, max_bytes: int = 1 << 30, timeout: float = 5.0):
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise ValueError(f"max_bytes: expected an integer of at least 1, got {max_bytes!r}")
        self.folder, self.max_bytes, self.timeout = Path(folder).absolute(), max_bytes, timeout
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-store")  # one: files are written in order

    def __reduce__(self) -> tuple[type[FolderStore], tuple[Path, int, float]]:
        """Pickles it as another store over the same folder, so that a worker in another process can have one."""
        return FolderStore, (self.folder, self.max_bytes, self.timeout)

    def num_stored(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if not os.path.isfile(self._file(key))), len(keys))

    def page_buffers(self, keys: Sequence[bytes], layers: range, num_bytes: int) -> Sequence[memoryview]:
        return [memoryview(bytearray(num_bytes)) for _ in keys]

    def release(self, keys: Sequence[bytes]) -> None:
        """Nothing to do: memory is free when no reference is left."""

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[memoryview]]:
        return self._thread.submit(self._load, list(keys))

    def save(self, pages: Mapping[bytes, bytes | memoryview]) -> Future[None]:
        return self._thread.submit(self._save, dict(pages))

    def close(self) -> None:
        """Waits for what is being saved."""
        self._thread.shutdown()

    def _file(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.page"

    def _load(self, keys: list[bytes]) -> list[memoryview]:
        pages = []
        for key in keys:
            pages.append(memoryview(self._file(key).read_bytes()))
            with contextlib.suppress(OSError):  # a folder that can only be read
                os.utime(self._file(key))
        return pages

    def _save(self, pages: dict[bytes, bytes | memoryview]) -> None:
        for key, content in pages.items():
            draft = self.folder / f"{key.hex()}.{os.getpid()}-{threading.get_native_id()}.draft"
            try:
                draft.write_bytes(content)
                draft.replace(self._file(key))
            finally:
                draft.unlink(missing_ok=True)
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        found = []
        for file in self.folder.iterdir():
            with contextlib.suppress(OSError):  # deleted by another process, or not ours to look at
                status = file.lstat()
                if not stat.S_ISREG(status.st_mode):
                    continue
                if file.suffix == ".page":
                    found.append((status.st_mtime_ns, file, status.st_size))
                elif file.suffix == ".draft" and time.time() - status.st_mtime > _LONGEST_SAVE:
                    file.unlink()  # its writer was killed
        total = sum(size for _, _, size in found)
        for _, file, size in sorted(found):
            if total <= self.max_bytes:
                return
            with contextlib.suppress(OSError):
                file.unlink()
                total -= size
