"""A step that is like another one needs no machine code of its own: compiling it would stop the service for seconds."""

from __future__ import annotations

import os

from tests.warm import Warm

# Triton's own launcher is asked which code it would compile, with a driver that has no GPU. Addresses are those of
# tensors on the CPU, as an allocator of a GPU gives them: multiples of 16 bytes.
ASKED = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from reference_impl.interfaces import Batch, GroupTables
from reference_impl.kernels import launch
from reference_impl.kernels.architectures import ARCHITECTURES
from reference_impl.features.windows.groups import kv_specs
from reference_impl.core.kv_cache import PagedKVCache
from reference_impl.features.fusion.attention import TritonAttention

class Driver:
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

class Compiled(Exception):
    pass

def compile(source, **options):
    asked.add((source.name, source.hash()))
    raise Compiled

def described(kernel, arguments, constants, options):
    kernel.device_caches[0]  # makes the binder, which sets kernel.compile
    kernel.compile = compile
    try:
        kernel.warmup(*arguments, grid=(1,), **constants, **options)
    except Compiled:
        pass
    return written(kernel, arguments, constants, options)

driver.set_active(Driver())
asked, written, launch.described = set(), launch.described, described
specs = kv_specs((None,), 2, 64, 16, bits_per_value=16)
cache, cpu = PagedKVCache(specs, 4, torch.float16, torch.device("cpu")), torch.device("cpu")
launch.prepare(cpu)
attention = TritonAttention(0.125)

def step(decoding, blocks):
    lens = (1,) * decoding + (33, 40)
    rows, tokens = len(lens), sum(lens)
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    batch = Batch(
        torch.zeros(tokens, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64), starts, starts[1:].clone(),
        torch.arange(rows), ("r",) * rows, lens, (64,) * rows, decoding, 16,
        (GroupTables(None, torch.arange(tokens), torch.zeros(rows, blocks, dtype=torch.int32)),), (0,),
    )
    attention.plan(batch)
    attention.attend(torch.zeros(tokens, 4, 64, dtype=torch.float16), 0, cache, batch)

with launch.recording(ARCHITECTURES["sm_90"]):
    for decoding in (1, 2, 3, 4, 8):
        for blocks in (1, 4, 5, 16):
            step(decoding, blocks)
print(sorted(name for name, _ in asked))
"""


def test_attention_is_compiled_once_wherever_the_rows_of_several_queries_begin(warm: Warm) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run(("-c", ASKED), environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['_flash_attention', '_paged_decode']"
