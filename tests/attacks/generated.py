"""Hostile submissions made by a generator: pieces of code, cells and files, put together as a number says.

What a piece does is not known to the grader's tests one by one: what must hold of all of them is in `test_generated.py`.
"""

from __future__ import annotations

# ruff: noqa: E501  # one piece a line
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MARK = "HOSTILEMARK"  # in all that would run in a browser: no page may hold it in a tag or in a script
Notebook = dict[str, Any]


@dataclass(frozen=True)
class Generated:
    """A submission. raw: the file. base: what its solution cells hold before the edits. pieces: what was done.

    hangs: something in it may never end.
    """

    raw: bytes
    base: str
    pieces: list[str] = field(default_factory=list)
    hangs: bool = False


# What runs before, after, or inside of a learner's code. {n} is a drawn number.
CODE = {
    "exits": "raise SystemExit",
    "ends its process": "import os\nos._exit({n} % 3)",
    "kills itself": "import os, signal\nos.kill(os.getpid(), [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM][{n} % 3])",
    "interrupts": "raise KeyboardInterrupt",
    "ends a generator": "raise StopIteration({n})",
    "raises what cannot be shown": "class E(Exception):\n    def __str__(self): raise ValueError\n    __repr__ = __str__\nraise E",
    "raises what is shown for ever": "class E(Exception):\n    def __str__(self):\n        return str(self) + 'x'\nraise E",
    "raises a deep chain": "def f(n):\n    try:\n        if n: f(n - 1)\n        raise ValueError(n)\n    except ValueError as e:\n        raise KeyError(n) from e\nf(150)",
    "raises a group": "raise BaseExceptionGroup('g', [ExceptionGroup('h', [ValueError(i)]) for i in range({n} + 1)])",
    "a long message": "raise ValueError('<&>' * 10 ** 6)",
    "a message of surrogates": "raise ValueError('\\ud800\\x00\\x1b[2J\\u202e' * {n})",
    "a large integer": "raise ValueError(10 ** 20_000)",
    "recursion": "def f(): return f()\nf()",
    "deep attributes": "x = lambda: 0\nfor _ in range(3): x = x\nx" + ".__class__" * 600,
    "a nested list": "x = []\nfor _ in range(100_000): x = [x]\nWindow = x",
    "a list that holds itself": "x = []\nx.append(x)\nWindow = apply_all = x",
    "names of surrogates": "globals()['\\ud800'] = globals()['__repr__'] = globals()[''] = 1",
    "prints": "print('<b onclick={m}>' * 100_000)",
    "prints control characters": "import sys\nsys.stdout.buffer.write(bytes(range(256)) * {n})",
    "closes its files": "import os\nfor fd in range({n}): \n    try: os.close(fd)\n    except OSError: pass",
    "writes to its channel": "import os\ntry: os.write(3, b'\\xff' * {n})\nexcept OSError: pass",
    "forks": "import os\nos.fork()",
    "threads": "import threading, time\nfor _ in range({n}): threading.Thread(target=time.sleep, args=(999,), daemon=True).start()",
    "a thread that is waited for": "import threading, time\nthreading.Thread(target=time.sleep, args=(999,)).start()",
    "at exit": "import atexit, time\natexit.register(time.sleep, 999)",
    "patches comparison": "import torch\ntorch.equal = torch.allclose = lambda *_, **__: True",
    "patches builtins": "import builtins\nbuiltins.len = builtins.isinstance = lambda *_: 5",
    "patches import": "import builtins\nbuiltins.__import__ = None",
    "patches json": "import json\njson.dumps = json.loads = lambda *_, **__: None",
    "deletes names": "for name in list(globals()): globals().pop(name)",
    "collects rubbish": "import gc\nfor o in gc.get_objects():\n    try: o.clear()\n    except Exception: pass",
    "traces": "import sys\nsys.settrace(lambda *_: 1 / 0)",
    "a low recursion limit": "import sys\nsys.setrecursionlimit(40)",
    "a high recursion limit": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
    "digits": "import sys\nsys.set_int_max_str_digits(0)\nx = 10 ** 50_000\nprint(x)",
    "little memory": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))",
    "few files": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))",
    "looks for tests": "import sys, glob\nprint([m for m in sys.modules if 'grader' in m], glob.glob('/**/*.ipynb'))",
    "html in a name": "class {m}: pass\n{m}.__name__ = {m}.__qualname__ = '<script>{m}()</script>'\nWindow = {m}",
    "a metaclass that raises": "class M(type):\n    def __getattribute__(c, n): raise ValueError(n)\nclass Window(metaclass=M): pass",
    "a class that is nothing": "class Window:\n    def __getattribute__(self, name): raise AttributeError\n    def __len__(self): return -1",
    "not Python": "def f(:\n  <script>{m}()</script>",
    "deep brackets": "(" * 300 + ")" * 300,
    "many brackets": "[" * 20_000,
    "a long literal": "x = " + "9" * 5_000,
    "a magic cell": "%%bash\nrm -rf /",
    "a magic line": "%javascript {m}()\n!true",
    "null": "x = 1\0",
    "form feeds": "\x0c\x1a\u2028x = 1\r\ry = 2",
}
HANGING = {
    "loops": "while True: pass",
    "sleeps": "import time\ntime.sleep(9999)",
    "waits for input": "import os\nr, w = os.pipe()\nos.read(r, 1)",
    "loops and cannot be stopped": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "a regular expression": "import re\nre.match('(a+)+$', 'a' * 64 + 'b')",
    "an endless generator": "import itertools\nWindow = list(itertools.count())",
    "grows": "x = ['x']\nwhile len(x) < 10 ** 12: x += x",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
}
# What a method or function of the learner's returns.
RESULTS = {
    "nothing": "None", "itself": "self", "a string": "'5'", "bytes": "b'x' * {n}", "a large integer": "10 ** 5_000",
    "not a number": "float('nan')", "infinity": "-float('inf')", "minus one": "-1", "a class": "type", "a module": "torch",
    "a generator": "(i for i in range({n}))", "a lambda": "lambda *_: 5", "a set": "{{1, 2}}", "complex": "1j",
    "a nested list": "eval('[' * 80 + ']' * 80)", "many": "list(range(10 ** 6))", "a text of surrogates": "'\\ud800' * {n}",
    "html": "'<img src=x onerror={m}()>'", "a dict of odd keys": "{{None: 1, (1, 2): 2, 'x': {{}}}}", "a view": "torch.zeros(3, 4).T[::2]",
    "a sparse tensor": "torch.eye(3).to_sparse()", "a tensor without numbers": "torch.empty(0, 3, 0)", "a meta tensor": "torch.empty(3, device='meta')",
    "a tensor of another dtype": "torch.zeros(3, dtype=torch.complex64)", "a tensor that requires gradients": "torch.zeros(3, requires_grad=True)",
    "an expanded tensor": "torch.zeros(1).expand(10 ** 8)", "a quantized tensor": "torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)",
    "an exception": "ValueError('x')", "a bool that is not": "type('B', (int,), {{'__bool__': lambda s: 1 / 0}})(5)",
    "a str that is not": "type('S', (str,), {{'__len__': lambda s: -1, '__iter__': lambda s: s}})('x')",
    "a list that is not": "type('L', (list,), {{'__iter__': lambda s: iter(int, 1), '__len__': lambda s: 3}})()",
    "an ellipsis": "...", "a slice": "slice(None, {n})", "a weak reference": "__import__('weakref').ref(torch.Tensor)",
}  # fmt: skip
HANGING_RESULTS = {"what never ends": "list(iter(int, 1))", "a wait": "__import__('time').sleep(9999)"}
MARKUP = [
    "<script>{m}()</script>", "<img src=x onerror={m}()>", "<svg onload={m}()>", "[x](javascript:{m}())",
    "<iframe srcdoc='<script>{m}()</script>'></iframe>", "</textarea></pre></script><script>{m}()</script>",
    "```\n</code></pre><script>{m}()</script>", "$$\\href{{javascript:{m}()}}{{x}}$$", "![x](attachment:{m}.svg)",
    "<style>@import '{m}'</style>", "<a href='java\tscript:{m}()'>x</a>", "<meta http-equiv=refresh content='0;{m}'>",
    "<form action='/{m}'><input name=x autofocus onfocus={m}()></form>", "{{{{ {m} }}}}{{% include '{m}' %}}", "<!--" * 500,
]  # fmt: skip


def generate(number: int, seed: str, solution: str, release: str) -> Generated:
    """Submission `number` of a class drawn by `seed`. solution, release: the lab's notebooks, as text."""
    draw = random.Random(f"{seed} {number}")
    notebook: Notebook = json.loads(release)
    base = draw.choice(["solved", "solved", "stub"])
    if base == "solved":
        sources = {cell["id"]: cell["source"] for cell in json.loads(solution)["cells"]}
        for cell in notebook["cells"]:
            if cell["metadata"]["nbgrader"]["solution"]:
                cell["source"] = sources[cell["id"]]
    pieces: list[str] = []
    hangs = False
    for _ in range(draw.choice([1, 1, 2, 3])):
        edit = draw.choice([_code, _code, _code, _result, _result, _markup, _cells, _values])
        _mended(notebook)
        hangs |= bool(edit(draw, notebook, pieces))
    raw = json.dumps(notebook).encode()
    if draw.random() < 0.12:
        raw = _damaged(draw, raw, pieces)
    return Generated(raw, base, pieces, hangs)


def _filled(text: str, draw: random.Random) -> str:
    return text.replace("{n}", str(draw.randrange(1, 60))).replace("{m}", MARK).replace("{{", "{").replace("}}", "}")


def _cell(source: str, kind: str = "code", **more: Any) -> dict[str, Any]:
    made = {
        "cell_type": kind,
        "metadata": {},
        "source": source,
        "id": f"x{zlib.crc32(source.encode(errors='replace'))}",
    }
    return made | ({"outputs": [], "execution_count": None} if kind == "code" else {}) | more


def _code(draw: random.Random, notebook: Notebook, pieces: list[str]) -> bool:
    hangs = draw.random() < 0.08
    name = draw.choice(sorted(HANGING if hangs else CODE))
    text = (HANGING if hangs else CODE)[name].replace("{n}", str(draw.randrange(1, 60))).replace("{m}", MARK)
    place = draw.choice(["an added cell", "a solution cell", "a function"])
    pieces.append(f"{name}, in {place}")
    solutions = [cell for cell in notebook["cells"] if cell["metadata"].get("nbgrader", {}).get("solution")]
    if place == "an added cell" or not solutions:
        notebook["cells"].insert(draw.randrange(len(notebook["cells"]) + 1), _cell(text))
        return hangs
    cell = draw.choice(solutions)
    source = "".join(cell["source"])
    if place == "a function":
        _into_a_function(draw, cell, source, text)
    else:
        cell["source"] = f"{text}\n{source}" if draw.random() < 0.5 else f"{source}\n{text}"
    return hangs


def _into_a_function(draw: random.Random, cell: dict[str, Any], source: str, text: str) -> None:
    """Behind the first line of one of the functions."""
    lines = source.split("\n")
    heads = [i for i, line in enumerate(lines) if line.lstrip().startswith("def ") and line.rstrip().endswith(":")]
    if not heads:
        cell["source"] = f"{source}\n{text}"
        return
    at = draw.choice(heads)
    indent = " " * (len(lines[at]) - len(lines[at].lstrip()) + 4)
    lines[at + 1 : at + 1] = [indent + line for line in text.split("\n")]
    cell["source"] = "\n".join(lines)


def _result(draw: random.Random, notebook: Notebook, pieces: list[str]) -> bool:
    hangs = draw.random() < 0.05
    name = draw.choice(sorted(HANGING_RESULTS if hangs else RESULTS))
    text = _filled((HANGING_RESULTS if hangs else RESULTS)[name], draw)
    function = draw.choice(["__init__", "append", "mean", "__len__", "__iter__", "__getattr__", "__eq__", "apply_all"])
    pieces.append(f"{function} returns {name}")
    if function == "apply_all":
        notebook["cells"].append(_cell(f"import torch\ndef apply_all(self, *_, **__):\n    return {text}"))
    else:
        notebook["cells"].append(
            _cell(f"import torch\ndef odd(self, *_, **__):\n    return {text}\nWindow.{function} = odd")
        )
    return hangs


def _markup(draw: random.Random, notebook: Notebook, pieces: list[str]) -> None:
    text = _filled(draw.choice(MARKUP), draw)
    kind = draw.choice(["markdown", "raw", "code", "markdown", "heading", f"<{MARK}>"])
    more: dict[str, Any] = {}
    if kind == "markdown":
        more["attachments"] = {f"{MARK}.svg": {"image/svg+xml": f"<svg onload={MARK}()>", "text/html": text}}
    if kind == "code":
        data = {"text/html": text, "application/javascript": f"{MARK}()", "text/plain": text}
        more["outputs"] = [
            {"output_type": "display_data", "data": data, "metadata": {}},
            {"output_type": "stream", "name": "stdout", "text": text},
            {"output_type": "error", "ename": text, "evalue": text, "traceback": [text, "\x1b[31m" + text]},
        ]
    pieces.append(f"markup in a {kind} cell")
    notebook["cells"].insert(draw.randrange(len(notebook["cells"]) + 1), _cell(text, kind, **more))


def _cells(draw: random.Random, notebook: Notebook, pieces: list[str]) -> None:
    cells = notebook["cells"]
    name = draw.choice(["dropped", "doubled", "reversed", "renamed", "retyped", "emptied", "regraded", "many"])
    pieces.append(f"cells {name}")
    one = draw.choice(cells)
    if name == "dropped":
        del cells[:: draw.randrange(1, 4)]
    elif name == "doubled":
        cells += json.loads(json.dumps(cells))
    elif name == "reversed":
        cells.reverse()
    elif name == "renamed":
        one["id"] = one["metadata"].setdefault("nbgrader", {})["grade_id"] = draw.choice(
            ["check_len", "", "../x", MARK, 7]
        )
    elif name == "retyped":
        one["cell_type"] = draw.choice(["markdown", "raw", "code", 7, None])
    elif name == "emptied":
        one.clear()
    elif name == "regraded":
        for cell in cells:
            if isinstance(grading := cell["metadata"].get("nbgrader"), dict):
                grading.update(points=10**9, grade=True, solution=draw.random() < 0.5, locked=False)
    else:
        cells += [_cell(f"x{i} = {i}") for i in range(draw.randrange(200, 900))]


def _values(draw: random.Random, notebook: Notebook, pieces: list[str]) -> None:
    values: list[Callable[[], Any]] = [
        lambda: None, lambda: 7, lambda: -1, lambda: [], lambda: {}, lambda: MARK, lambda: "x" * 10**5, lambda: 1e308,
        lambda: [[[[]]]], lambda: {"": {"": ""}}, lambda: True, lambda: float("nan"), lambda: 10**4000,
    ]  # fmt: skip
    value = draw.choice(values)()
    holder = draw.choice([notebook, draw.choice(notebook["cells"]), notebook["metadata"]])
    if not isinstance(holder, dict):
        return
    key = draw.choice([*sorted(holder), "kernelspec", "language_info", "nbgrader", "widgets", "source", "attachments"])
    pieces.append(f"{key} is {str(value)[:20]}")
    holder[key] = value


def _mended(notebook: Notebook) -> None:
    """What the next edit has to find: cells that are dicts, with metadata."""
    cells = notebook.get("cells")
    cells = [cell for cell in cells if isinstance(cell, dict)] if isinstance(cells, list) else []
    notebook["cells"] = cells or [_cell("x = 1")]
    for holder in [notebook, *notebook["cells"]]:
        if not isinstance(holder.get("metadata"), dict):
            holder["metadata"] = {}
    for cell in notebook["cells"]:
        if not isinstance(cell["metadata"].get("nbgrader", {}), dict):
            cell["metadata"]["nbgrader"] = {}
        if not isinstance(cell.get("source"), str | list):
            cell["source"] = ""


def _damaged(draw: random.Random, raw: bytes, pieces: list[str]) -> bytes:
    name = draw.choice(["cut", "flipped", "nested", "brackets", "zeros", "utf-16", "long", "twice"])
    pieces.append(f"file: {name}")
    if name == "cut":
        return raw[: draw.randrange(len(raw))]
    if name == "flipped":
        changed = bytearray(raw)
        for _ in range(draw.randrange(1, 20)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        return bytes(changed)
    if name == "nested":
        return b'{"cells": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    if name == "brackets":
        return raw.replace(b'"source": ', b'"source": "' + b"[(" * 150_000 + b'", "old": ', 1)
    if name == "long":
        return raw[:-1] + b', "x": ' + b"9" * 6_000 + b"}"
    return {"zeros": bytes(5_000), "utf-16": raw.decode().encode("utf-16"), "twice": raw + raw}[name]
