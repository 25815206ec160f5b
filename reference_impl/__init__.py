"""An LLM inference engine you can read in a weekend.

`import reference_impl` is cheap: torch is imported when an engine name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reference_impl.assembly.config import EngineConfig, course_model
    from reference_impl.assembly.engine import Engine
    from reference_impl.assembly.llm import LLM, RequestOutput
    from reference_impl.assembly.model import load_model
    from reference_impl.assembly.parts import Parts
    from reference_impl.interfaces import SamplingParams

_HOMES = {
    "LLM": "assembly.llm",
    "RequestOutput": "assembly.llm",
    "Engine": "assembly.engine",
    "Parts": "assembly.parts",
    "EngineConfig": "assembly.config",
    "course_model": "assembly.config",
    "SamplingParams": "interfaces",
    "load_model": "assembly.model",
}
__all__ = [
    "LLM",
    "Engine",
    "EngineConfig",
    "Parts",
    "RequestOutput",
    "SamplingParams",
    "course_model",
    "load_model",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'reference_impl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"reference_impl.{_HOMES[name]}"), name)
