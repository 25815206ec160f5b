"""llama.cpp in a process and an environment of its own; nothing of it is imported here (llama_worker.py runs there).

The environment is the user's: a virtual environment with llama-cpp-python and gguf, named by INFERLAB_LLAMA_CPP.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

VARIABLE = "INFERLAB_LLAMA_CPP"
WORKER = Path(__file__).with_name("llama_worker.py")
HOW = (
    "python -m venv FOLDER; FOLDER/bin/pip install llama-cpp-python gguf (compiles llama.cpp: a C++ compiler and some "
    f"ten minutes); then {VARIABLE}=FOLDER before the same command"
)


class PeerFailed(Exception):
    """There is no llama.cpp to compare with, or it refused, or its process ended: why."""


class LlamaCpp:
    """Models of llama.cpp, by name, as `llama_worker.Worker` has them. A context manager, which ends the process."""

    def __init__(self, python: str | Path, worker: Path):
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        command = [str(python), "-I", str(worker)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True, encoding="utf-8"
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._to, self._from = process, process.stdin, process.stdout

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # of a request that an ended process did not read
            self._to.close()
        self._process.wait()
        self._from.close()
        self._said.close()

    def ask(self, do: str, **what: Any) -> Any:
        """PeerFailed with what the process said, if it refuses, or has ended."""
        try:
            self._to.write(json.dumps({"do": do, **what}) + "\n")
            self._to.flush()
            line = self._from.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"llama.cpp: {do}: its process ended with {self._process.wait()}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(f"llama.cpp: {do}: {answer['error']}")
        return answer["result"]

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")[-500:].strip()

    def generate(self, name: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """Greedy; all prompts in each step."""
        texts: list[list[int]] = self.ask("generate", name=name, prompts=prompts, new_tokens=new_tokens)
        return texts

    def logits(self, name: str, tokens: list[int]) -> torch.Tensor:
        """[vocab_size] float32, after tokens."""
        return torch.tensor(self.ask("logits", name=name, tokens=tokens))


def start() -> tuple[LlamaCpp, dict[str, str]]:
    """The process, in the environment that INFERLAB_LLAMA_CPP names, and its versions. PeerFailed if there is none, or
    if it lacks one of the packages."""
    peer = LlamaCpp(_interpreter(), WORKER)
    try:
        return peer, peer.ask("versions")
    except PeerFailed:
        peer.__exit__()
        raise


def _interpreter() -> Path:
    folder = os.environ.get(VARIABLE)
    if not folder:
        raise PeerFailed(f"{VARIABLE} names no environment with llama.cpp")
    candidates = [Path(folder).expanduser() / name for name in ("bin/python", "Scripts/python.exe")]
    for python in candidates:
        if python.is_file():
            return python
    raise PeerFailed(f"{VARIABLE}: expected a virtual environment, with bin/python, got {folder}")
