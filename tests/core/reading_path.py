"""The reading path: the modules of the core, in the order in which a prompt becomes text. What is not listed here is
not in the core. The words that all of them use, `interfaces/`, are counted apart.

A module may import those listed, the words, the twins of the kernels, and torch, NumPy and tokenizers.
"""

from __future__ import annotations

import ast
import itertools
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

PATH = tuple(
    f"core/{name}"
    for name in (
        "llm", "prompts", "detokenizer",  # text in, text out
        "alone", "requests", "engine", "engine_feature", "hooks",  # the loop
        "scheduler", "ranking",  # how many tokens of which request
        "kv_manager", "references", "block_pool",  # blocks
        "planner",  # the message for the worker
        "worker", "worker_feature", "slots", "batch", "staging",  # what computes it
        "decoder", "model_config", "linear", "rotary", "attention", "kv_cache",  # the model
        "sampler", "philox",  # from logits to tokens
    )
)  # fmt: skip
WORDS = ("blocks", "request", "plan", "step", "batch", "planning", "computing", "events", "abilities",
         "sampling_fields")  # fmt: skip
TWINS = "kernels/reference"

# Of `tokenize`; comments, docstrings and layout aside: what one reads in two days. Lines would count how it is set out.
MOST_TOKENS = 24_000
MOST_LINES_OF_WORDS = 1_500  # with what a page store needs of a KV manager, which was in a file not counted here
LONGEST_FUNCTION = 40
ABOVE = ("features", "assembly", "models", "observe", "serving", "simulation", "bench", "cli")


def source(package: Path, module: str) -> str:
    return (package / f"{module}.py").read_text("utf-8")


def num_tokens(package: Path, module: str) -> int:
    """A string that stands alone is a docstring."""
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    layout |= {tokenize.ENDMARKER}
    with (package / f"{module}.py").open("rb") as file:
        tokens = [*tokenize.tokenize(file.readline)]
    lines = itertools.groupby(tokens, lambda token: token.type in layout)
    found = [[token.type for token in line] for is_layout, line in lines if not is_layout]
    return sum(len(line) for line in found if line != [tokenize.STRING])


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


def named_features(package: Path, module: str) -> list[str]:
    """Strings with which a module could import a feature by its name; docstrings may speak of them."""
    tree = ast.parse(source(package, module))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    pattern = re.compile(rf"\b({'|'.join(ABOVE)})\b")
    return [node.value for node in texts if id(node) not in documents and pattern.search(node.value)]


def functions(package: Path, module: str) -> Iterator[tuple[str, int]]:
    """(name, lines)."""
    for node in ast.walk(ast.parse(source(package, module))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1


def lines(package: Path, module: str) -> int:
    return source(package, module).count("\n")
