"""The engine by the name under which it is imported: `assembly/engine.py` makes it of the core and the annexes."""

from reference_impl.annexes.pins.engine import Pin
from reference_impl.assembly.engine import Engine
from reference_impl.core_engine import StepResult

__all__ = ["Engine", "Pin", "StepResult"]
