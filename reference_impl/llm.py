"""The front door by the name under which it is imported: `assembly/llm.py` makes it of the core and the annexes."""

from reference_impl.assembly.devices import DTYPES, choose_device, choose_dtype
from reference_impl.assembly.llm import LLM, Generation, RequestOutput

__all__ = ["DTYPES", "LLM", "Generation", "RequestOutput", "choose_device", "choose_dtype"]
