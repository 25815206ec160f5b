"""What a person should look at in a submission's source: a static reading of its cells, for the instructor only.

A flag never changes points. It names what honest work on a lab has no use for: the course's own machinery, the
interpreter's insides, other processes, replaced functions of a library. What a sandbox stops is not flagged.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from grader.examination.cell_source import plain_python
from grader.examination.submission import Submission
from grader.labs.lab import Lab

MAX_FLAGS = 20
MAX_FLAG = 200  # characters of one: a name can be as long as a submission
LONGEST_NAME = 16  # attributes of a name that is looked up: none that is watched has more

# In solution cells only: in cells of their own learners look at the engine, call grader.check() and print sources.
COURSE = ("reference_impl", "grader", "solutions")
TOOLS = {
    "subprocess": None,
    "importlib": {"import_module", "reload", "util", "machinery"},
    "inspect": {"stack", "currentframe", "trace", "getsource", "getmembers", "getouterframes", "getinnerframes"},
}
# In all cells. None: the import alone; otherwise the names of it that count.
INSIDES = {
    "ctypes": None,
    "socket": None,
    "gc": {"get_objects", "get_referrers", "get_referents"},
    "sys": {"_getframe", "_current_frames", "settrace", "setprofile"},
    "os": {"fork", "forkpty", "kill", "killpg", "system", "popen", "execv", "execve", "execvp", "posix_spawn", "_exit"},
}
ATTRIBUTES = {"f_back", "f_globals", "f_locals", "f_builtins", "gi_frame", "tb_frame", "__globals__", "__subclasses__"}
# Settings that libraries ask to be assigned.
SETTINGS = ("torch.backends", "torch._dynamo.config", "torch._inductor.config", "sys.stdout", "sys.stderr")


def flags(lab: Lab, submission: Submission) -> list[str]:
    """One line per finding, "cell NAME, line N: imports ctypes"; at most MAX_FLAGS. Raises nothing: to look at a
    submission must not keep it from being graded.
    """
    try:
        found = _found(lab, submission)
    except Exception as error:  # RecursionError, MemoryError: code that was written to be unreadable
        return [f"its code cannot be looked through: {type(error).__name__}"]
    return [flag if len(flag) <= MAX_FLAG else f"{flag[: MAX_FLAG - 2]} …" for flag in found]


def _found(lab: Lab, submission: Submission) -> list[str]:
    solutions = {cell.grade_id for cell in lab.of_kind("solution")}
    cells = [(name, source, True) for name, source in submission.answers.items() if name in solutions]
    cells += [
        (f"added-{number}", added.source, False)
        for number, added in enumerate(submission.added)
        if added.cell_type == "code"
    ]
    trees = [(name, tree, strict) for name, source, strict in cells if (tree := _parsed(source)) is not None]
    modules: dict[str, str] = {}  # name in the cells -> what was imported under it
    for _, tree, _ in trees:
        modules.update(_imports(tree))
    found: dict[str, None] = {}
    for name, tree, strict in trees:
        own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        for node in ast.walk(tree):
            for text in _findings(node, modules, own, strict):
                found[f"cell {name}, line {getattr(node, 'lineno', 0)}: {text}"] = None
    return list(found)[:MAX_FLAGS]


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(plain_python(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _imports(tree: ast.Module) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update({a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0]
                          for a in node.names})  # fmt: skip
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
    return names


def _findings(node: ast.AST, modules: dict[str, str], own: set[str], strict: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (f"imports {a.name}" for a in node.names if _suspicious(a.name, None, strict))
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        for alias in node.names:
            if _suspicious(node.module, alias.name, strict):
                yield f"imports {node.module}.{alias.name}"
    elif isinstance(node, ast.Attribute):
        if node.attr in ATTRIBUTES:
            yield f"uses {node.attr}"
        module, _, _ = _dotted(node, modules).rpartition(".")
        if module in INSIDES and node.attr in (INSIDES[module] or ()):
            yield f"uses {module}.{node.attr}"
        if strict and module in TOOLS and node.attr in (TOOLS[module] or ()):
            yield f"uses {module}.{node.attr}"
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from _call(node, node.func.id, modules, own, strict)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        for target in targets:
            if isinstance(target, ast.Subscript) and _dotted(target.value, modules) in ("sys.modules", "sys.meta_path"):
                yield f"changes {_dotted(target.value, modules)}"
            path = _dotted(target, modules)
            if isinstance(target, ast.Attribute) and path and not path.startswith(SETTINGS):
                yield f"replaces {path}"
    elif strict and isinstance(node, ast.Constant) and isinstance(node.value, str):
        named = re.fullmatch(r"(reference_impl|grader|solutions)(\.\w+)+", node.value)
        if named and not _interfaces(node.value):
            yield f"names {node.value[:80]}"


def _call(node: ast.Call, name: str, modules: dict[str, str], own: set[str], strict: bool) -> Iterator[str]:
    if name in own or name in modules:
        return
    if strict and name in ("exec", "eval", "__import__"):
        yield f"calls {name}"
    if name in ("setattr", "delattr") and node.args and (path := _dotted(node.args[0], modules)):
        yield f"replaces a part of {path}"


def _suspicious(module: str, name: str | None, strict: bool) -> bool:
    """Whether `import module`, or `from module import name`, is to be flagged."""
    root = module.split(".")[0]
    if root in COURSE:
        return strict and not (_interfaces(module) or (module == "reference_impl" and name == "interfaces"))
    watched = INSIDES | (TOOLS if strict else {})
    if root not in watched:
        return False
    counted = watched[root]
    return counted is None or name in counted


def _interfaces(module: str) -> bool:
    return module == "reference_impl.interfaces" or module.startswith("reference_impl.interfaces.")


def _dotted(node: ast.AST, modules: dict[str, str]) -> str:
    """`torch.nn.functional` for such an expression whose first name is an imported module; otherwise nothing."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        if len(parts) == LONGEST_NAME:  # of a longer chain each part would walk all before it
            return ""
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in modules:
        return ""
    return ".".join([modules[node.id], *reversed(parts)])
