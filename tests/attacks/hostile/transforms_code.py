# attack: transformers that strip asserts, replace cells by pass, and a compile of its own
# expect: all = not written
# base: stub

# %% first
import ast
import builtins
import sys

try:
    shell = get_ipython()
    shell.ast_transformers.append(type("T", (), {"visit": lambda self, tree: ast.Module([], [])})())
    shell.input_transformers_cleanup.append(lambda lines: ["pass\n"])
    shell.run_cell = lambda *_, **__: None
except NameError:
    print("no shell")
compile_before = builtins.compile


def compile_nothing(source, *rest, **named):
    return compile_before("pass" if "assert" in str(source) else source, *rest, **named)


builtins.compile = compile_nothing
sys.settrace(lambda *_: None)
