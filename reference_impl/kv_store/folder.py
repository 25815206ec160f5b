"""A page store in a folder: the prefix cache outlives the engine, and engines on one machine can share it."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path


class FolderStore:
    """One file for each page, named by its key in hexadecimal. Use a folder of its own for each checkpoint.

    max_bytes: of all files together; beyond it the pages that were saved or loaded least recently are deleted. Several
    processes may use one folder: a page is a whole file or none, and one that another process deletes meanwhile is a
    load that fails. timeout: see `PageStore`. ValueError for a limit below 1 byte, OSError if the folder cannot be
    made.
    """

    def __init__(self, folder: str | Path, max_bytes: int = 1 << 30, timeout: float = 5.0):
        if max_bytes < 1:
            raise ValueError(f"max_bytes: expected at least 1, got {max_bytes}")
        self.folder, self.max_bytes, self.timeout = Path(folder), max_bytes, timeout
        self.folder.mkdir(parents=True, exist_ok=True)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="page-store")  # one: files are written in order

    def __reduce__(self) -> tuple[type[FolderStore], tuple[Path, int, float]]:
        """Pickled, it is another store over the same folder: so a worker in another process can have one."""
        return FolderStore, (self.folder, self.max_bytes, self.timeout)

    def num_stored(self, keys: Sequence[bytes]) -> int:
        return next((i for i, key in enumerate(keys) if not self._file(key).exists()), len(keys))

    def load(self, keys: Sequence[bytes]) -> Future[Sequence[bytes]]:
        return self._thread.submit(self._load, list(keys))

    def save(self, pages: Mapping[bytes, bytes]) -> Future[None]:
        return self._thread.submit(self._save, dict(pages))

    def close(self) -> None:
        """Waits for what is being saved."""
        self._thread.shutdown()

    def _file(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}.page"

    def _load(self, keys: list[bytes]) -> list[bytes]:
        pages = []
        for key in keys:
            pages.append(self._file(key).read_bytes())
            os.utime(self._file(key))
        return pages

    def _save(self, pages: dict[bytes, bytes]) -> None:
        for key, content in pages.items():
            draft = self.folder / f"{key.hex()}.{os.getpid()}.{threading.get_native_id()}"
            draft.write_bytes(content)
            draft.replace(self._file(key))
        self._delete_oldest()

    def _delete_oldest(self) -> None:
        found = []
        for file in self.folder.glob("*.page"):
            try:
                status = file.stat()
            except FileNotFoundError:  # deleted by another process
                continue
            found.append((status.st_mtime_ns, file, status.st_size))
        total = sum(size for _, _, size in found)
        for _, file, size in sorted(found):
            if total <= self.max_bytes:
                return
            file.unlink(missing_ok=True)
            total -= size
