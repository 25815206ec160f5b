"""llama.cpp in a process and an environment of its own; nothing of it is imported here (llama_worker.py runs there).

The environment is the user's: a virtual environment with llama-cpp-python and gguf, named by INFERLAB_LLAMA_CPP.
"""

from __future__ import annotations

from pathlib import Path

import torch

from reference_impl.bench.peer_process import PeerFailed, PeerProcess, interpreter

VARIABLE = "INFERLAB_LLAMA_CPP"
WORKER = Path(__file__).with_name("llama_worker.py")
HOW = (
    "python -m venv FOLDER; FOLDER/bin/pip install llama-cpp-python gguf (compiles llama.cpp: a C++ compiler and some "
    f"ten minutes); then {VARIABLE}=FOLDER before the same command"
)


class LlamaCpp(PeerProcess):
    """Models of llama.cpp, by name, as `llama_worker.Worker` has them."""

    def __init__(self, python: str | Path, worker: Path):
        super().__init__("llama.cpp", python, worker)

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
    peer = LlamaCpp(interpreter(VARIABLE, "llama.cpp"), WORKER)
    try:
        return peer, peer.ask("versions")
    except PeerFailed:
        peer.__exit__()
        raise
