"""What several commands share, written once: options, and what an error looks like."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

from reference_impl.cli.messages import described, is_usage, say
from reference_impl.features.kv_formats.formats import FORMATS
from reference_impl.features.speculative.growth import DYNAMIC

_KV_DTYPE = f"Keys and values in the cache: auto (the model's dtype), {' or '.join(FORMATS)}."
_ATTENTION = (
    "triton (our kernels), torch, or auto: triton on a GPU that they are made for. "
    "compiled: for one stream on a CPU, half a minute to load the first time; needs a C++ compiler."
)
_OVERLAP = "Plan a step while the one before it runs: on, off, or auto: on a GPU."
_WORKER = (
    "Where the model computes: here, or process: in one of its own, to which this one sends steps; with --tp or --pp "
    "each rank has one, or is a thread of this one: threads."
)
_STEP_SECONDS = (
    "With --worker process, how long a step may take; with --tp, how long no rank may come to a collective, at most "
    "30. Then the engine ends with an error that names the worker."
)
_RANKS = "Processes that divide the model, each with some heads and columns of every layer (CPU)."
_EXPERTS = "With --tp, each process has some experts of a mixture, whole, and not columns of each."
_STAGES = "Processes that divide the model, each with some of the layers (CPU)."
_SPECULATIVE = (
    "Draft tokens ahead: ngram, suffix, draft, eagle, mtp, medusa, early-exit, lookahead, or off. "
    "Greedy and seeded texts stay the same."
)
_DRAFT_MODEL = (
    "The draft model with --speculative draft, eagle, mtp, medusa: a smaller model, a feature head, a module of "
    "multi-token prediction, Medusa heads; "
    "given as the model is."
)
_EXIT_LAYER = "Of the model's layers so many draft with --speculative early-exit; default: half of them."
_LOOKAHEAD = "With --speculative lookahead: columns of its window, length of its n-grams, candidates; default: 3,3,3."
_DRAFTS = "Draft tokens of a request in a step; default: 4 with --speculative."
_DRAFT_TREE = (
    "With --speculative eagle or mtp, a draft tree: how many each of a level has behind it, such as 4,2,2; "
    "or dynamic: grown in each step, where the head is sure."
)
_ACCEPTANCE = (
    "How draft tokens are kept: exact, or typical: more of them, LOSSY: with a temperature texts are no longer "
    "distributed as the model's."
)
_NOISE = (
    "What tokens are drawn with: one-number for each position, or gumbel: one for every token, so that of seeded "
    "requests more of a draft model's tokens are kept. Seeded texts are others."
)
_INVARIANT = "Compute each token by itself: logits whose bits do not depend on the batch, at the price of sharing none."
_GRAPHS = "Replay steps in which all decode as CUDA graphs: on, off, or auto: on a GPU with our kernels."


def can_be_written(path: Path | None) -> Path | None:
    """An option's path, if it can be written: checked now, not when all is computed. Raises typer.BadParameter."""
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; expected the name of a file")
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}")
    if path is not None and not os.access(path.absolute().parent, os.W_OK):
        raise typer.BadParameter(f"no permission to write into the folder {path.absolute().parent}")
    return path


MODEL = "A Hugging Face folder or id (org/name), or target / draft for a course model"
Model = Annotated[str, typer.Argument(help=f"{MODEL}.")]
GenerationConfig = Annotated[
    str,
    typer.Option(
        help="Sampling that is not asked for: auto, as the model's generation_config.json says, or vllm: not."
    ),
]
Timeline = Annotated[
    Path | None,
    typer.Option(callback=can_be_written, help="At the end, write a timeline for ui.perfetto.dev here."),
]


@dataclass(frozen=True)
class EngineOptions:
    """How the engine computes: options of a command and, under the same names, of LLM."""

    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; default: the checkpoint's.")] = None
    quantization: Annotated[str, typer.Option(help="Weights of the linear layers: none, fp8, int8 or int4.")] = "none"
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", "--kv-cache-dtype", help=_KV_DTYPE)] = "auto"
    attention: Annotated[str, typer.Option(help=_ATTENTION)] = "auto"
    overlap: Annotated[str, typer.Option(help=_OVERLAP)] = "auto"
    graphs: Annotated[str, typer.Option(help=_GRAPHS)] = "auto"
    batch_invariant: Annotated[bool, typer.Option("--batch-invariant", help=_INVARIANT)] = False
    speculative: Annotated[str, typer.Option(help=_SPECULATIVE)] = "off"
    draft_model: Annotated[str | None, typer.Option(help=_DRAFT_MODEL)] = None
    exit_layer: Annotated[int, typer.Option(min=0, help=_EXIT_LAYER, show_default=False)] = 0
    lookahead: Annotated[str | None, typer.Option(help=_LOOKAHEAD)] = None
    num_drafts: Annotated[int, typer.Option(min=0, help=_DRAFTS, show_default=False)] = 0
    draft_tree: Annotated[str | None, typer.Option(help=_DRAFT_TREE)] = None
    acceptance: Annotated[str, typer.Option(help=_ACCEPTANCE)] = "exact"
    sampling_noise: Annotated[str, typer.Option(help=_NOISE)] = "one-number"
    worker: Annotated[str, typer.Option(help=_WORKER)] = "here"
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "--tp", min=1, help=_RANKS)] = 1
    pipeline_parallel_size: Annotated[int, typer.Option("--pipeline-parallel-size", "--pp", min=1, help=_STAGES)] = 1
    enable_expert_parallel: Annotated[bool, typer.Option("--enable-expert-parallel", help=_EXPERTS)] = False
    step_seconds: Annotated[int, typer.Option(min=1, help=_STEP_SECONDS)] = 300

    def of_llm(self) -> dict[str, Any]:
        """The options as arguments of LLM. Raises OSError or ValueError, see `folder_of`; ValueError for wrong
        numbers."""
        return vars(self) | {
            "draft_model": None if self.draft_model is None else folder_of(self.draft_model),
            "draft_tree": _tree(self.draft_tree),
            "lookahead": () if self.lookahead is None else _integers("lookahead", self.lookahead, "3,3,3"),
        }


def _tree(given: str | None) -> tuple[int, ...] | str:
    """The numbers of a draft tree, or the word that says how it is grown."""
    if given is None or given.startswith(DYNAMIC):
        return given or ()
    return _integers("draft_tree", given, "4,2,2")


def _integers(name: str, given: str, example: str) -> tuple[int, ...]:
    """The integers of a text such as "4,2,2". Raises ValueError for anything else."""
    try:
        return tuple(map(int, given.split(",")))
    except ValueError:
        raise ValueError(
            f"EngineConfig.{name}: expected numbers between commas, such as {example}, got {given!r}"
        ) from None


def with_engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of EngineOptions as options of its own, in the place of its parameter `engine`, which
    gets all of them. `engine` and the parameters after it are keywords."""
    signature, hints = inspect.signature(command, eval_str=True), get_type_hints(EngineOptions, include_extras=True)
    names = [field.name for field in fields(EngineOptions)]
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(EngineOptions)
    ]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        command(engine=EngineOptions(**{name: arguments.pop(name) for name in names}), **arguments)

    shown = [new for p in signature.parameters.values() for new in (options if p.name == "engine" else [p])]
    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]  # what typer looks at
    return run


def folder_of(model: str) -> Path:
    """The folder of a course model's name, of a path, or of a hub's id, whose model may be fetched."""
    from reference_impl.assembly.config import COURSE_MODELS, course_model
    from reference_impl.models.hub import model_folder

    return course_model(model) if model in COURSE_MODELS else model_folder(model)


def name_of(model: str) -> str:
    """The name by which clients of a server call a model, unless told another: a folder's name, or a hub's id."""
    from reference_impl.models.hub import is_hub_id

    return model if is_hub_id(model) else model.rstrip("/").rpartition("/")[2]


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """Ends the command with one line for what was asked for and cannot be, and for memory that does not suffice."""
    try:
        yield
    except (ValueError, OSError) as error:
        fail(described(error), 2 if is_usage(error) else 1)
    except (MemoryError, RuntimeError) as error:
        if not _is_memory(error):
            raise
        fail(
            "the memory does not suffice. Smaller: --quantization int4, --dtype bfloat16, a smaller model or shape, "
            f"fewer or shorter requests. ({str(error).partition(chr(10))[0]})"
        )


def _is_memory(error: BaseException) -> bool:
    """Whether memory is missing: torch's allocator of a CPU has no exception of its own for it."""
    own = type(error).__name__ == "OutOfMemoryError"  # torch's of a GPU; torch itself is not imported here
    return own or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends the command. status: 1, or 2 for what was typed wrongly."""
    say(message)
    raise typer.Exit(status) from None
