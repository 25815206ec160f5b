"""The reading path: the modules of the core, in the order in which a prompt becomes text. What is not listed here is
not in the core. The words that all of them use, `interfaces/`, are counted apart.

A module may import those listed, the words, and torch, NumPy and tokenizers; `FEATURES` are what has still to move out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PATH = (
    "core_llm", "prompts", "detokenizer",  # text in, text out
    "core_parts", "core_requests", "core_engine", "clock",  # the loop
    "scheduler/scheduler", "scheduler/queue", "scheduler/policy",  # how many tokens of which request
    "kv/manager", "kv/block_pool", "kv/cache_key",  # blocks
    "planner",  # the message for the worker
    "executor/local", "executor/slots", "executor/batch", "staging",  # the worker
    "models/decoder", "model_config", "layers/linear", "layers/mlp", "layers/norm", "layers/rotary",  # the model
    "layers/attention", "kernels/reference/attention", "kernels/reference/rows", "kv_store/cache",  # attention
    "sampling/sampler", "sampling/philox",  # from logits to tokens
)  # fmt: skip
WORDS = ("blocks", "request", "plan", "step", "batch", "planning", "computing", "events", "abilities")

# The goal is 2,800 lines, with comments. Until all features have moved out, the number that is reached.
MOST_LINES = 4_790
MOST_LINES_OF_WORDS = 1_175
LONGEST_FUNCTION = 40
# Longer ones that are left: twins of kernels, whose arguments and shapes take up most of their lines, and a table.
LONGER = {
    "executor/batch": {"_ragged"},
    "kernels/reference/attention": {"flash_attention"},
    "kernels/reference/rows": {"rotate_and_write"},
    "model_config": {"parse_model_config"},
}
# Modules that are not in the core, and that modules of the core still import.
FEATURES = {
    "config", "config_reader", "executor/drafts", "executor/graphs", "executor/pages", "executor/pooling",
    "executor/scoring", "kernels", "kernels/reference", "layers/backend", "layers/by_rows", "layers/linear_methods",
    "layers/packed_linear", "models/moe", "models/olmo2", "models/phi3", "sampling/masks", "sampling/penalties",
}  # fmt: skip
ANNEXES = ("annexes", "assembly")


def source(package: Path, module: str) -> str:
    return (package / f"{module}.py").read_text("utf-8")


def imports(package: Path, module: str) -> Iterator[str]:
    """Modules of the package that a module imports when it runs, at its top or later: as paths, without `.py`."""
    tree = ast.parse(source(package, module))
    for node in ast.walk(tree):  # what is imported for types alone is not there when it runs
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if _is_module(package, name) else node.module or "" for name in whole]
        else:
            continue
        yield from (name.split(".", 1)[1].replace(".", "/") for name in names if name.startswith(f"{package.name}."))


def _is_module(package: Path, name: str) -> bool:
    place = package.parent / name.replace(".", "/")
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def named_annexes(package: Path, module: str) -> list[str]:
    """Strings with which a module could import an annex by its name; docstrings may speak of them."""
    tree = ast.parse(source(package, module))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    pattern = re.compile(rf"\b({'|'.join(ANNEXES)})\b")
    return [node.value for node in texts if id(node) not in documents and pattern.search(node.value)]


def functions(package: Path, module: str) -> Iterator[tuple[str, int]]:
    """(name, lines)."""
    for node in ast.walk(ast.parse(source(package, module))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1
