"""Every calculator can be imported first, alone, on a machine without torch."""

import json
import subprocess
import sys
from pathlib import Path

import reference_impl

HOME = Path(reference_impl.__file__).parent.parent
MODULES = sorted(path.stem for path in (HOME / "reference_impl/theory").glob("*.py") if path.stem != "__init__")

# A fresh start for each, in one process: whatever reference_impl had loaded is forgotten.
PROGRAM = f"""
import sys, json, importlib
sys.path.insert(0, {str(HOME)!r})
sys.modules.update(dict.fromkeys(["torch", "triton", "transformers", "scipy", "matplotlib"]))
import reference_impl.theory
loaded = {{"package": sorted(sys.modules)}}
for name in {MODULES!r}:
    for known in [m for m in sys.modules if m.startswith("reference_impl")]:
        del sys.modules[known]
    importlib.import_module("reference_impl.theory." + name)
    loaded[name] = [m for m in sys.modules if m.startswith("reference_impl")]
print(json.dumps(loaded))
"""


def test_each_calculator_imports_alone_without_torch_and_sees_no_other_part() -> None:
    done = subprocess.run([sys.executable, "-I", "-c", PROGRAM], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "numpy" not in loaded.pop("package"), "importing the package itself loads nothing"
    assert set(loaded) == set(MODULES)
    for name, modules in loaded.items():
        others = [m for m in modules if not m.startswith("reference_impl.theory") and m != "reference_impl"]
        assert others == [], f"{name} imports another part"
