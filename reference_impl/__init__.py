"""An LLM inference engine you can read in a weekend.

`import reference_impl` is cheap: torch is imported when an engine name is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if sys.version_info < (3, 11):  # noqa: UP036
    raise ImportError("inferlab needs Python 3.11 or later, and this is " + sys.version.split()[0])

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
    return getattr(import_module(f"reference_impl.{_HOMES[name]}"), name)


class _Older:
    """Until 2026-11-29 `features` was `annexes`, and notebooks of learners still import from there."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if f"{name}.".startswith(f"{__name__}.annexes.") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.name.replace(".annexes", ".features", 1))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Importing has put this module's older name in its __spec__."""
        assert module.__spec__
        module.__spec__ = module.__spec__.loader_state


class _NotFound:
    """The last finder that is asked: a module of this package that no other finder has is explained. Until the engine
    was sorted into rooms its modules had other names, and learners keep their notebooks."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.startswith(f"{__name__}."):
            raise ModuleNotFoundError(
                f"No module named {name!r}. The engine's modules are in rooms (core, features, assembly, ...), see "
                "reference_impl/README.md. If this is a cell of an older notebook, `inferlab learn --update` lays its "
                "present version beside yours; take the import from there",
                name=name,
            )


sys.meta_path.insert(0, _Older())  # before the one that would load a second copy from the folder
sys.meta_path.append(_NotFound)
