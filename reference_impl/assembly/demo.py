"""The demo of the course's model: for `inferlab doctor`, `inferlab generate` without a prompt, and START.ipynb.

A model this small repeats itself soon. After this prompt its greedy text is a whole function, and STOP ends it there.
"""

from __future__ import annotations

from reference_impl.interfaces import SamplingParams

PROMPT = "def open_file(file):\n"
STOP = ("\n\n",)
ABOUT = "7 M parameters, trained on Python's own sources"


def demo_sampling(max_tokens: int = 48) -> SamplingParams:
    """The demo's parameters: greedy, up to the first empty line."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=STOP)
