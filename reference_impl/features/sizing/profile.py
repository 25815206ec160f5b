"""Memory for keys and values on a GPU: what the worst steps leave.

A step's activations, logits and workspaces depend on the kernels, the sampler and the libraries below. Instead of
guessing, steps that need the most are run before the cache is there, and the device is asked for their peaks: a prompt
that takes the whole budget of tokens; as many rows as possible, all of which sample; and as many that decode, without
drafts and with as many drafts as they may have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from reference_impl.features.sizing.memory import give_back
from reference_impl.interfaces import KVSpec, Request, Row, SamplingParams, StepPlan
from reference_impl.models.config_reader import ConfigError

if TYPE_CHECKING:
    import torch

    from reference_impl.assembly.config import EngineConfig

# Everything that needs memory: sorting, histories, the model's own distribution.
HUNGRY = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1,
    frequency_penalty=0.1, logprobs=20, seed=0, logit_bias={0: 1.0}, min_tokens=1, stop_token_ids=(0,),
)  # fmt: skip
WorstStep = tuple[StepPlan, Mapping[str, Request]]


@dataclass(frozen=True)
class Measured:
    """The memory of a device, in bytes. in_use: by all processes, before the cache and between steps. peaks: that of
    each run, beyond in_use."""

    total: int
    in_use: int
    peaks: tuple[int, ...]


class DeviceMemory(Protocol):
    """Asks a device for its memory."""

    @property
    def total(self) -> int: ...

    def measure(self, runs: Sequence[Callable[[], object]]) -> Measured: ...


class CudaMemory:
    """Measures a GPU: peaks by torch's allocator, exactly; what is in use between steps by the driver, which counts
    other processes, too."""

    def __init__(self, device: torch.device):
        import torch

        self.device, self.total = device, int(torch.cuda.mem_get_info(device)[1])

    def measure(self, runs: Sequence[Callable[[], object]]) -> Measured:
        import torch

        highest = []
        give_back(self.device)  # an engine that is no longer used may still hold its cache
        for run in runs:
            torch.cuda.reset_peak_memory_stats(self.device)
            run()
            torch.cuda.synchronize(self.device)
            highest.append(torch.cuda.max_memory_allocated(self.device))
        give_back(self.device)
        stays = torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0]
        return Measured(self.total, self.total - int(free), tuple(peak - stays for peak in highest))


def worst_steps(
    config: EngineConfig, specs: Sequence[KVSpec], longest: int, vocab: int, room: int, by_model: bool = False
) -> list[WorstStep]:
    """The steps that need the most memory, for a cache of one block, which stands for all blocks of all rows.

    The one that decodes comes first: the workspace that torch's attention keeps from it is then there in the others.

    longest: positions of a sequence. room: the tokens that the device could hold at all; together the rows see no more,
    except that one of them is as long as possible. by_model: drafts come from a model in the worker; otherwise the step
    names them.
    """
    budget = config.max_num_batched_tokens
    few, many = -(-budget // longest), min(config.max_num_seqs, budget)
    shapes = [(rows, budget // rows) for rows in dict.fromkeys((min(few, many), many))]
    k = min(config.num_drafts, longest - 1)
    shared = [min(k, max(0, budget - many - k * row)) for row in range(many)]  # of each row, as far as the budget goes
    steps: list[WorstStep] = []
    for rows, new, drafting in [
        (many, 1, False), *((rows, new, False) for rows, new in shapes), *([(many, 1, True)] if shared[0] else []),
    ]:  # fmt: skip
        # Without a seed drafts are verified by rejection, which compares whole distributions.
        sampling = replace(HUNGRY, seed=None) if drafting else HUNGRY
        requests: dict[str, Request] = {}
        new, plan = min(new, longest), []
        for row in range(rows):
            num_drafts = shared[row] if drafting else 0
            drafts = () if by_model else tuple(i % vocab for i in range(num_drafts))
            end = longest if row == 0 else min(longest, max(new + num_drafts, room // rows))
            blocks, length = [0] * -(-end // specs[0].block_size), end - num_drafts
            tokens = [(row + i) % vocab for i in range(length)]
            requests[str(row)] = Request(
                str(row), tokens, length - new, sampling, seed=row, arrival=0.0, block_tables=[blocks for _ in specs]
            )
            plan.append(Row(str(row), length - new, new, True, num_drafts, drafts))
        steps.append((StepPlan(0, tuple(plan)), requests))
    return steps


def bytes_of_graphs(measured: Measured, steps: Sequence[WorstStep], widest: int | None = None) -> int:
    """The bytes to reserve for CUDA graphs. Captured steps have memory of their own. They share it, but a large one
    cannot always use the pieces of smaller ones, and logits are copied out of it: so the largest peak of `steps` that
    decode, with drafts or without, is counted twice. Their inputs, what the driver keeps for them, and what the
    allocator loses in gaps are left to the rest of the device.

    steps: those measured. widest: tokens of a step with drafts, if larger ones are not captured.
    """
    peaks = [0]
    for peak, (plan, _) in zip(measured.peaks, steps, strict=True):
        wide = plan.num_tokens > len(plan.rows)
        if all(row.num_tokens == 1 for row in plan.rows):
            peaks.append(peak * min(widest, plan.num_tokens) // plan.num_tokens if wide and widest else peak)
    return 2 * max(peaks)


def bytes_for_cache(measured: Measured, memory_percent: float, of_graphs: int) -> int:
    """The bytes that memory_percent of the device leave for the cache; may be negative. of_graphs: bytes."""
    needed = max(measured.peaks) + of_graphs
    return int(measured.total * memory_percent // 100) - measured.in_use - needed


def profiled_blocks(
    measured: Measured, config: EngineConfig, each: int, num_groups: int, longest: int, of_graphs: int = 0
) -> int:
    """The number of blocks, of `each` bytes, that fit, but no more than max_num_seqs sequences of `longest` tokens need
    in num_groups KV groups. of_graphs: bytes. ConfigError, with the numbers, if not even one fits."""
    left = bytes_for_cache(measured, config.memory_percent, of_graphs)
    if left < each:
        in_graphs = f" CUDA graphs {of_graphs / 2**20:,.1f} MiB," if of_graphs else ""
        raise ConfigError(
            f"no memory is left for keys and values: {config.memory_percent:g} % (memory_percent) of "
            f"{measured.total / 2**20:,.1f} MiB are to be used; weights and other users of the device have "
            f"{measured.in_use / 2**20:,.1f} MiB, the largest step (max_num_batched_tokens "
            f"{config.max_num_batched_tokens}, max_num_seqs {config.max_num_seqs}) takes "
            f"{max(measured.peaks) / 2**20:,.1f} MiB,{in_graphs} and a block of {config.block_size} tokens "
            f"{each / 2**20:,.3f} MiB. Lower max_num_batched_tokens or max_num_seqs, raise memory_percent, quantize "
            "the model, or give back what other engines hold"
        )
    most = config.max_num_seqs * num_groups * -(-longest // config.block_size)
    return min(left // each, most)
