"""Runs and compiles a Triton kernel that is given as source: nothing else of the one who wrote it is here.

Shipped into the sandbox, and used in a learner's notebook as well, so that a check means the same in both. A launch
goes through Triton's interpreter, made strict: what would go wrong on a GPU is an error here. It counts what every
program loads and stores, in this module and not in anything that a kernel can reach.

    python kernel_run.py < request.json     compiles, in a process without the interpreter (`compile_source` starts it)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import linecache
import math
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from typing import Any

GAP = 1 << 20  # bytes before and after every tensor of a launch
REGISTERS = 65_536  # of a multiprocessor
COMPILE_SECONDS = 120.0  # a kernel that spills much takes long to assemble
# Names a folder of results, for the proof of a lab, which compiles the same kernel for each of its cases. A learner's
# process in isolation does not have it.
KEPT = "INFERLAB_COMPILED_KERNELS"


class Traffic:
    """What the programs of one launch loaded and stored, per tensor of the launch, by its parameter's name.

    loads, stores: how many numbers, over all programs. most_loads: how often one program loaded the same number, at
    most. most_stores: how often the same number was stored, by all programs together: on a GPU their order is unknown.
    """

    def __init__(self) -> None:
        self.loads: dict[str, int] = {}
        self.stores: dict[str, int] = {}
        self.most_loads: dict[str, int] = {}
        self.most_stores: dict[str, int] = {}

    def begin(self, name: str) -> None:
        for counts in vars(self).values():
            counts[name] = 0


class _Place:
    """The place of a tensor of the launch. counts: loads of each number by the program that runs now; stored: stores of
    each number by all programs."""

    def __init__(self, name: str, tensor: Any, traffic: Traffic):
        import numpy as np

        self.name, self.size, self.begin = name, tensor.element_size(), tensor.data_ptr()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        self.end = self.begin + (last + 1) * self.size
        self.counts, self.stored, self.traffic = np.zeros(last + 1, np.int64), np.zeros(last + 1, np.int64), traffic
        traffic.begin(name)

    def next_program(self) -> None:
        if self.counts.size:
            self.traffic.most_loads[self.name] = max(self.traffic.most_loads[self.name], int(self.counts.max()))
        self.counts[:] = 0


class _Watch:
    """The hooks into the interpreter, for one launch."""

    def __init__(self) -> None:
        self.traffic, self.places = Traffic(), list[_Place]()

    def small(self, what: str, shape: Sequence[int]) -> None:
        if math.prod(shape) >= REGISTERS:
            raise ValueError(f"{what} of a tile of {list(shape)}: a multiprocessor has {REGISTERS:,} registers for all")

    def arguments(self, names: Sequence[str], args: list[Any], kwargs: dict[str, Any]) -> None:
        """Moves a launch's tensors, with a gap before and after each, so that none begins where another one ends."""
        import numpy as np
        import torch

        moved: dict[int, Any] = {}
        for name, tensor in [*zip(names, args, strict=False), *kwargs.items()]:
            if not isinstance(tensor, torch.Tensor):
                continue
            if not tensor.numel():
                self.traffic.begin(name)
                continue
            old, at = tensor.untyped_storage(), (tensor.storage_offset(), tensor.shape, tensor.stride())
            if old.data_ptr() not in moved:
                room = np.empty(len(old) + 2 * GAP, np.uint8)
                middle = torch.frombuffer(room, dtype=torch.uint8, offset=GAP, count=len(old))
                moved[old.data_ptr()] = middle.untyped_storage()
                moved[old.data_ptr()].copy_(old)
            tensor.set_(moved[old.data_ptr()], *at)
            self.places.append(_Place(name, tensor, self.traffic))

    def look(self, what: str, pointers: Any, mask: Any, program: Any) -> None:
        import numpy as np

        shape = pointers.data.shape
        self.small(what, shape)
        mask = getattr(mask, "data", mask)  # of a block pointer: an array
        at = pointers.data[np.broadcast_to(np.asarray(mask, bool), shape)].astype(np.int64)
        outside = np.ones(at.shape, bool)
        for place in self.places:
            here = (at >= place.begin) & (at < place.end)
            outside &= ~here
            if not here.any():
                continue
            loaded, numbers = what == "a tl.load", (at[here] - place.begin) // place.size
            counts = self.traffic.loads if loaded else self.traffic.stores
            counts[place.name] += len(numbers)
            np.add.at(place.counts if loaded else place.stored, numbers, 1)
        if not outside.any():
            return
        one = int(at[outside][0])
        near = min(self.places, key=lambda place: max(place.begin - one, one - place.end), default=None)
        if near is None:
            raise IndexError(f"program {program}: {what}, and no tensor of the launch holds a number")
        behind = one >= near.end
        off = (one - near.end) // near.size + 1 if behind else (near.begin - one) // near.size
        raise IndexError(
            f"program {program}: {what} of {at.size} numbers, {int(outside.sum())} of them outside of every tensor, "
            f"one of these {off} {'behind the last' if behind else 'before the first'} of {near.name}. Is the mask "
            "missing, or an offset wrong?"
        )


@contextlib.contextmanager
def _watching(watch: _Watch) -> Iterator[None]:
    """Makes the interpreter reject what goes wrong on a GPU, and count.

    By itself it reads and writes beyond the end of a tensor, which gives wrong numbers or ends the process; what a load
    without `other` leaves out is 0; and tiles may have any size.
    """
    from unittest import mock

    import numpy as np
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, interpreter_builder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    dot, copied, begin = (
        InterpreterBuilder.create_dot,
        GridExecutor._init_args_hst,
        InterpreterBuilder.set_grid_idx,
    )

    def spaced(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = copied(self, args, kwargs)
        watch.arguments(self.arg_names, args, kwargs)
        return args, kwargs

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> Any:
        for place in watch.places:
            place.next_program()
        return begin(self, x, y, z)

    def watched_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
        watch.look("a tl.load", pointers, mask, interpreter_builder.grid_idx)
        kind = pointers.get_element_ty()
        if other is None and kind.is_floating() and "bf16" not in str(kind):  # on a GPU: anything
            numpy_kind = {16: np.float16, 32: np.float32, 64: np.float64}.get(kind.primitive_bitwidth)
            if numpy_kind is not None:
                other = TensorHandle(np.full(pointers.data.shape, np.nan, numpy_kind), kind)
        return load(self, pointers, mask, other, *rest, **named)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        watch.look("a tl.store", pointers, mask, interpreter_builder.grid_idx)
        return store(self, pointers, value, mask, *rest, **named)

    def watched_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        if a.data.shape[-1] < 16:
            shapes = f"{list(a.data.shape)} and {list(b.data.shape)}"
            raise ValueError(f"tl.dot of {shapes}: a GPU needs at least 16 columns in the first")
        watch.small("a tl.dot", (a.data.shape[-2], b.data.shape[-1]))
        return dot(self, a, b, *rest)

    hooks = {
        "create_masked_load": watched_load, "create_masked_store": watched_store, "create_dot": watched_dot,
        "set_grid_idx": set_grid_idx,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(GridExecutor, "_init_args_hst", spaced))
        for name, hook in hooks.items():
            stack.enter_context(mock.patch.object(InterpreterBuilder, name, hook))
        yield
    for place in watch.places:
        place.next_program()
        watch.traffic.most_stores[place.name] = int(place.stored.max(initial=0))


def run_source(
    sources: Sequence[Sequence[str]], name: str, grid: Sequence[int], args: Sequence[Any], constants: dict[str, Any]
) -> Traffic:
    """Run kernel `name` on tensors, in place. sources: pairs (cell, text), from `grader.examination.kernel_source`.

    Raises what the kernel raises, and RuntimeError where Triton's interpreter is another one than this is written for.
    """
    import torch

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("expected TRITON_INTERPRET=1, set before Triton is imported: this runs in the interpreter")
    kernel = getattr(_module(sources), name)
    watch = _Watch()
    try:
        with _watching(watch), torch.no_grad():
            kernel[tuple(grid)](*args, **constants)
    except Exception as error:  # the interpreter wraps what a kernel raises in its own
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise cause from None
    return watch.traffic


def _module(sources: Sequence[Sequence[str]]) -> types.ModuleType:
    """A module of the kernels' sources, whose lines Triton and tracebacks find under the cells' names."""
    import triton
    import triton.language

    module = types.ModuleType("learners_kernels")
    vars(module).update(triton=triton, tl=triton.language)
    for cell, text in sources:
        filename = f"<cell {cell}>"
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        exec(compile(text, filename, "exec", dont_inherit=True), vars(module))
    return module


# ---------------------------------------------------------------- compiling


def compile_source(
    sources: Sequence[Sequence[str]], name: str, arguments: dict[str, str], constants: dict[str, Any], capability: int
) -> dict[str, Any]:
    """Compile kernel `name` for an NVIDIA GPU of this compute capability (80: A100), which need not be here.

    arguments: the types of the parameters that are no constants, in order, as Triton writes them ("*fp16", "i32").
    Returns {"registers", "spilled", "shared", "factors", "tensor_cores"}, per thread, in bytes per thread and per
    program, of its tl.dot and of its instructions; or {"error": text}.
    """
    text = "import triton\nimport triton.language as tl\n\n" + "\n".join(text for _, text in sources)
    request = {"text": text, "name": name, "arguments": arguments, "constants": constants, "for": capability}
    folder = os.environ.get(KEPT)
    if folder is None:
        return _compiled_elsewhere(request)
    file = os.path.join(folder, hashlib.sha256(json.dumps(request).encode()).hexdigest())
    if not os.path.exists(file):
        with open(f"{file}.{os.getpid()}", "w", encoding="utf-8") as out:
            json.dump(_compiled_elsewhere(request), out)
        os.replace(out.name, file)
    with open(file, encoding="utf-8") as kept:
        answer: dict[str, Any] = json.load(kept)
    return answer


def _compiled_elsewhere(request: dict[str, Any]) -> dict[str, Any]:
    """Compiles in a process without the interpreter; returns what `compile_source` returns."""
    with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": folder, "PYTHONWARNINGS": "ignore", "HOME": folder}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", "-s", "-B", __file__, folder]
        try:
            done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, env=environment,
                                  timeout=COMPILE_SECONDS)  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"the compiler was stopped after {COMPILE_SECONDS:.0f} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"the compiler ended with status {done.returncode}: {done.stderr[-1000:]}"}
    return answer


def _compile(request: dict[str, Any], folder: str) -> dict[str, Any]:
    import importlib.util

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    file = os.path.join(folder, "kernels.py")
    with open(file, "w", encoding="utf-8") as out:  # Triton reads a kernel's lines from its file
        out.write(request["text"])
    spec = importlib.util.spec_from_file_location("learners_kernels", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel = getattr(module, request["name"])
    arguments, constants = request["arguments"], request["constants"]
    names = list(kernel.arg_names)
    pointers = [names.index(key) for key, kind in arguments.items() if kind.startswith("*")]
    try:
        built = triton.compile(
            ASTSource(
                fn=kernel,
                signature={key: arguments.get(key, "constexpr") for key in names},
                constexprs={(names.index(key),): value for key, value in constants.items()},
                attrs={(at,): [["tt.divisibility", 16]] for at in pointers},
            ),
            target=GPUTarget("cuda", request["for"], 32),
        )
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return {"error": f"{type(error).__name__}: " + "\n".join(lines[-12:]).replace(file, "your kernel")}
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    binary = os.path.join(folder, "kernel.cubin")
    with open(binary, "wb") as out_bytes:
        out_bytes.write(built.asm["cubin"])
    usage = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    # As in %part = tt.dot %even, %low, %acc : tensor<16x16xf16> * tensor<16x32xf16> -> ...
    factors = re.findall(r"\btt\.dot\b.* : tensor<[\dx]+x(\w+)> \* tensor<[\dx]+x(\w+)>", built.asm["ttir"])
    # As in mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: the result's type, both factors', the sum's.
    products = re.findall(r"\bw?g?mma\.\S*\.row\.col\.(\w+)\.(\w+)\.", built.asm["ptx"])
    return {
        "registers": found["REG"], "spilled": found["STACK"], "shared": int(built.metadata.shared),
        "factors": sorted({kind for pair in factors for kind in pair}),
        "tensor_cores": sorted({f"{factor} into {result}" for result, factor in products}),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(_compile(json.load(sys.stdin), sys.argv[1])))
