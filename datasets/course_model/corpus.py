"""Text that every Python carries: the standard library's source, its docstrings, the language reference.

A document is a (name, text) pair. Whole files are held out, chosen by the hash of their name, so
training and held-out text never share a file; held-out documents that quote a training file
(eight equal lines in a row) are dropped.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
from pathlib import Path

SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__", "_bundled"}
HELD_OUT_SHARE = 0.03
QUOTE_LINES = 8

Document = tuple[str, str]


def _is_table(text: str) -> bool:
    """Character maps and generated tables teach a language model nothing."""
    lines = text.splitlines()
    return sum("0x" in line or "\\x" in line for line in lines) > 0.2 * len(lines)


def source_files() -> list[Document]:
    """Every module of the standard library, its test packages left out; sorted, so reproducible."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS and not f.startswith("config-"))
        for file in sorted(files):
            path = Path(folder) / file
            name = path.relative_to(root).as_posix()
            if path.suffix != ".py" or name == "pydoc_data/topics.py" or name.startswith("_sysconfigdata"):
                continue
            text = path.read_text("utf-8", errors="replace")
            if text.strip() and not _is_table(text):
                documents.append((name, text))
    return documents


def language_reference() -> list[Document]:
    """The language reference as `help()` shows it, one document a topic."""
    from pydoc_data.topics import topics

    return [(f"topics/{name}", text.strip()) for name, text in sorted(topics.items())]


def builtin_docstrings() -> list[Document]:
    """Docstrings of modules written in C: they are in no source file."""
    documents = []
    for module_name in sorted(set(sys.builtin_module_names) | {"math", "_struct", "select", "zlib", "_json"}):
        try:
            module = importlib.import_module(module_name)
        except ImportError:  # not built on this platform
            continue
        parts = []
        for name, member in sorted(vars(module).items(), key=lambda item: item[0]):
            doc = inspect.getdoc(member) if callable(member) else None
            if doc and not name.startswith("_"):
                parts.append(f"{module_name}.{name}\n{doc}")
        if parts:
            documents.append((f"docstrings/{module_name}", "\n\n".join(parts)))
    return documents


def docstring_pairs(documents: list[Document]) -> list[tuple[str, str]]:
    """(qualified name with arguments, first paragraph of its docstring) from the given sources."""
    pairs = []
    for name, text in documents:
        if not name.endswith(".py"):
            continue
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        module = name[:-3].replace("/", ".").removesuffix(".__init__")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                doc = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
                if 20 <= len(doc) <= 300:
                    args = f"({ast.unparse(node.args)})" if isinstance(node, ast.FunctionDef) else ""
                    if len(args) < 80:
                        pairs.append((f"{module}.{node.name}{args}", doc))
    return pairs


def _is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def _line_windows(text: str) -> set[int]:
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 3]
    return {hash(tuple(lines[i : i + QUOTE_LINES])) for i in range(len(lines) - QUOTE_LINES + 1)}


def split() -> tuple[list[Document], list[Document]]:
    """(training, held-out) documents."""
    documents = source_files() + language_reference() + builtin_docstrings()
    train = [d for d in documents if not _is_held_out(d[0])]
    held_out = [d for d in documents if _is_held_out(d[0])]
    seen: set[int] = set()
    for _, text in train:
        seen |= _line_windows(text)
    return train, [d for d in held_out if not _line_windows(d[1]) & seen]


def fingerprint(documents: list[Document]) -> str:
    """SHA-256 over names and texts: which data a model card talks about."""
    digest = hashlib.sha256()
    for name, text in documents:
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
    return digest.hexdigest()
