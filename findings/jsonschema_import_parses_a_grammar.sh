#!/usr/bin/env bash
# jsonschema 4.26.0 with the extra "format-nongpl" (which jupyter_events asks for, so every Jupyter installation has it):
# `import jsonschema` imports rfc3987_syntax 1.1.0, which builds a Lark parser when it is imported. Seen on Python 3.11,
# Linux x86-64, 2026-11-29: 2.7 of the 2.9 CPU seconds that `import jsonschema` took, in each process that imports
# nbformat, nbconvert, nbgrader or jupytext, although no schema of a notebook names the formats iri and iri-reference.
# With sys.modules["rfc3987_syntax"] = None beforehand jsonschema goes on without it. Counted here: modules, not seconds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'jsonschema[format-nongpl]==4.26.0' rfc3987-syntax==1.1.0 lark==1.3.1
"$folder/venv/bin/python" - <<'PY'
import subprocess
import sys

CODE = """
import sys, time
if {without}:
    sys.modules["rfc3987_syntax"] = None
begin = time.process_time()
import jsonschema
took = time.process_time() - begin
jsonschema.validate({{"cells": []}}, {{"type": "object", "required": ["cells"]}})
print("lark" in sys.modules, f"{{took:.2f}}")
"""
found = {}
for without in (False, True):
    done = subprocess.run([sys.executable, "-c", CODE.format(without=without)], capture_output=True, text=True, check=True)
    found[without], seconds = done.stdout.split()
    print(f"rfc3987_syntax {'hidden' if without else 'found '}: parser built {found[without]:5}, import took {seconds} s")
assert found == {False: "True", True: "False"}, "this has changed"
PY
