"""Flags point a person at source that honest work has no use for, and leave honest work alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grader.examination.flags import MAX_FLAG, MAX_FLAGS, flags
from grader.examination.submission import Added, Submission

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9]*_*/*.py"))

FLAGGED = {
    "import grader": "imports grader",
    "from solutions.kv import x": "imports solutions.kv.x",
    "import reference_impl.assembly.engine as e": "imports reference_impl.assembly.engine",
    "from reference_impl.assembly import engine": "imports reference_impl.assembly.engine",
    "import importlib\nm = importlib.import_module('reference_impl.kv')": "names reference_impl.kv",
    "m = __import__('x')": "calls __import__",
    "import ctypes": "imports ctypes",
    "import gc\nx = gc.get_objects()": "uses gc.get_objects",
    "from gc import get_referrers as g": "imports gc.get_referrers",
    "import inspect as i\nx = i.stack()": "uses inspect.stack",
    "import sys\nf = sys._getframe(1)": "uses sys._getframe",
    "import subprocess": "imports subprocess",
    "import socket": "imports socket",
    "import os\nif os.fork(): pass": "uses os.fork",
    "from os import fork": "imports os.fork",
    "exec('x = 1')": "calls exec",
    "y = eval('1')": "calls eval",
    "import torch\ntorch.equal = lambda *a: True": "replaces torch.equal",
    "import torch\ntorch.Tensor.__eq__ = None": "replaces torch.Tensor.__eq__",
    "import torch as t\nt.nn.functional.softmax = 1": "replaces torch.nn.functional.softmax",
    "import torch\nsetattr(torch, 'equal', 1)": "replaces a part of torch",
    "import builtins\nbuiltins.len = 3": "replaces builtins.len",
    "import sys\nsys.modules['x'] = 1": "changes sys.modules",
    "x = (i for i in ()).gi_frame": "uses gi_frame",
    "x = object.__subclasses__()": "uses __subclasses__",
}


def found(lab: Any, source: str) -> list[str]:
    return flags(lab, Submission({"Window": source}))


@pytest.mark.parametrize(("source", "text"), FLAGGED.items())
def test_what_honest_work_has_no_use_for_is_flagged_with_its_line(lab: Any, source: str, text: str) -> None:
    assert [flag for flag in found(lab, "import math\n" + source) if flag.endswith(text)]
    assert found(lab, "import math\n" + source)[0].startswith("cell Window, line ")


HONEST = """
import os, sys, gc, inspect, math, importlib, json
from reference_impl.interfaces import Request
import reference_impl.interfaces as ri
import torch
from torch import nn
torch.backends.cudnn.benchmark = True
class Net(nn.Module):
    '''Uses eval and exec of the grader.'''
    def __init__(self):
        super().__init__()
        self.weight, self.path = 1, os.path.join("a", "b")
    def eval(self): return self
    def fork(self): return Net()
def helper(model, x):
    model.eval(); model.exec(x); model.weight = 3; x.grad = None
    compiled = torch.compile(model)
    gc.collect(); inspect.signature(helper); sys.stdout.flush(); os.getpid()
    return {"grader": 1, "solutions": 2, "f_back": 3}
def fork(): ...
setattr(helper, "calls", 0)
helper.calls += 1
"""


def test_honest_code_is_not_flagged(lab: Any) -> None:
    assert found(lab, HONEST) == []


def test_in_cells_of_their_own_learners_may_look_at_the_course(lab: Any) -> None:
    look = (
        "import grader, inspect, reference_impl.assembly.engine, subprocess\n"
        "grader.check()\ninspect.getsource(grader.check)"
    )
    assert flags(lab, Submission({}, [Added(None, "code", look), Added(None, "markdown", "import ctypes")])) == []
    assert flags(lab, Submission({}, [Added(None, "code", "%timeit 1\nimport ctypes")])) == [
        "cell added-0, line 2: imports ctypes"
    ]


@pytest.mark.parametrize("source", ["def broken(:", "x = " + "(" * 5000, "\0", "-" * 100_000 + "1", "é = '\udcff'"])
def test_what_cannot_be_read_is_not_flagged(lab: Any, source: str) -> None:
    assert found(lab, source) == []


def test_of_a_long_chain_of_attributes_not_every_part_walks_all_before_it() -> None:
    """256 kB of such chains took a minute of the ten that a submission has."""
    import ast

    from grader.examination import flags as module

    seen = 0

    class Counted(ast.Attribute):
        @property
        def value(self) -> ast.AST:
            nonlocal seen
            seen += 1
            return self.before

    node: ast.AST = ast.Name("torch")
    for _ in range(1000):
        node, before = Counted(attr="b"), node
        node.before = before
    assert module._dotted(node, {"torch": "torch"}) == ""
    assert seen <= module.LONGEST_NAME
    watched = max(name.count(".") for name in (*module.INSIDES, *module.TOOLS, *module.SETTINGS))
    assert watched + 1 < module.LONGEST_NAME


def test_flags_are_few(lab: Any) -> None:
    assert len(found(lab, "\n".join(["exec('')"] * 500))) == MAX_FLAGS


@pytest.mark.parametrize(
    "source", sorted((ROOT / "solutions").glob("[0-9]*_*/*.py")), ids=lambda path: path.parent.name
)
def test_no_reference_and_no_variant_is_flagged(source: Path) -> None:
    from grader.labs.lab import lab_from_notebook
    from grader.labs.lab_source import solution_notebook
    from grader.proofs.proof import cases

    lab = lab_from_notebook(solution_notebook(source), source.parent.name, source.stem)
    for case in cases(lab, ROOT / "tests" / "labs" / source.parent.name):
        assert flags(lab, case.submission) == []


def test_a_flag_changes_no_points(examine: Any) -> None:
    result = examine(added=("import ctypes",))
    assert (result.status, result.flags) == ("passed", ["cell added-0, line 1: imports ctypes"])


def test_one_flag_is_a_line_that_a_person_reads(lab: Any) -> None:
    long = "a." * 600 + "b"
    found = flags(
        lab, Submission(added=[Added(None, "code", f"import torch\ntorch.{'a' * 9000} = 1\ntorch.{long} = 1")])
    )
    assert found
    assert max(map(len, found)) <= MAX_FLAG


def test_code_that_cannot_be_looked_through_is_said_to_be_and_no_more(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grader.examination import flags as module

    def deep(*_: Any) -> Any:
        raise RecursionError

    monkeypatch.setattr(module, "_findings", deep)
    added = [Added(None, "code", "import torch")]
    assert flags(lab, Submission(added=added)) == ["its code cannot be looked through: RecursionError"]
