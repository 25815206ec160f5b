"""`inferlab quantize`, `inferlab eval` and `inferlab eval-kv`. Heavy imports happen inside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reference_impl.cli.options import MODEL, Model, errors_in_a_line, fail, folder_of
from reference_impl.features.kv_formats.formats import FORMATS

if TYPE_CHECKING:
    from torch import Tensor

    from reference_impl.models.quantization.recipes import Recipe

_SCANNED = 4  # calibration rows that the scan of --bits looks at
_METHOD = (
    "rtn, gptq, awq, rotate, rotate-gptq (to --scheme, or int4), gptq-int3, gptq-int2, smoothquant (to w8a8), or the "
    "name of a scheme, rounded to nearest."
)
_SCHEME = (
    "int4, int4-zeros, int3, int3-zeros, int2, int2-zeros, int8, w8a8, w4a8, fp8, fp8-weights, fp8-tensor, fp8-static, "
    "fp8-block, nvfp4, nvfp4-w4a4, mxfp4, mxfp4-w4a4, mxfp8, nf4, ternary."
)

_BITS = (
    "Mixed precision: no more bits a weight than this in the mean, all scales counted. Each linear layer gets the "
    "scheme of --choices that a scan finds best: it loads the whole model and needs --calibration."
)

_LM_HEAD = (
    "Quantize lm_head, too, to this scheme (int8, fp8, ...), rounded as the method rounds layers. One that is tied to "
    "the embedding is written beside it, which stays as it is."
)

_TASKS = (
    "Ask it so many questions of each kind: values to find, JSON to write, code to go on with. Needs a chat template."
)


def quantize(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write: not there yet, or empty.")],
    method: Annotated[str, typer.Option(help=_METHOD)] = "rtn",
    scheme: Annotated[str | None, typer.Option(help=_SCHEME)] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="A text, for methods that look at activations.", exists=True, dir_okay=False),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Windows of the text to calibrate with.")] = 32,
    length: Annotated[int, typer.Option(min=1, help="Tokens of each.")] = 256,
    group_size: Annotated[
        int | None, typer.Option(min=1, help="Inputs that share a scale; default: the scheme's.")
    ] = None,
    damping: Annotated[float, typer.Option(min=0, help="GPTQ: of the Hessian's mean diagonal.")] = 0.01,
    act_order: Annotated[bool, typer.Option(help="GPTQ: columns with large inputs first.")] = True,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="SmoothQuant: how much goes over to weights.")] = 0.5,
    dense: Annotated[bool, typer.Option("--dense", help="Write float32, to compare packed weights with.")] = False,
    clip: Annotated[
        bool | None,
        typer.Option(help="Search how much of each group's extremes to cut; default: awq does, others don't."),
    ] = None,
    lm_head: Annotated[str | None, typer.Option("--lm-head", help=_LM_HEAD)] = None,
    bits: Annotated[float | None, typer.Option(min=1, help=_BITS)] = None,
    choices: Annotated[str, typer.Option(help="With --bits: schemes, between commas.")] = "int4,int8",
) -> None:
    """Quantize a model's linear layers into another folder, a layer at a time.

    The weights are written packed, as compressed-tensors has them. That format has no nf4 and no ternary: those are
    written dense, as the float32 numbers that their codes stand for, which saves nothing. So are all with --dense.
    A run that was stopped goes on where it was, when it is started again with the same options; so does the scan of
    --bits, which may then get other --bits.
    """
    from reference_impl.models.quantization.forms import Dense
    from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
    from reference_impl.models.quantization.recipes import METHODS, SCHEMES

    with errors_in_a_line():
        if method not in METHODS:
            fail(f"--method: expected one of {', '.join(METHODS)}, got {method!r}", 2)
        recipe = replace(
            METHODS[method], scheme=scheme or METHODS[method].scheme, group_size=group_size, damping=damping,
            act_order=act_order, alpha=alpha, clip=METHODS[method].clip if clip is None else clip, lm_head=lm_head,
        )  # fmt: skip
        source = folder_of(model)
        tokens = None
        if clip and SCHEMES[recipe.scheme].per != "group":
            fail(f"--clip: expected a scheme with scales per group, got {recipe.scheme}: leave --clip out", 2)
        if recipe.calibrated or bits:
            if calibration is None:
                why = "--bits" if bits and not recipe.calibrated else method
                fail(f"--calibration: {why} looks at activations: expected a file of text, got none", 2)
            tokens = _tokens(source, calibration, rows, length)
        notes: dict[str, Any] = {}
        if bits and tokens is not None:
            recipe, notes = _mixed(source, output, tokens, recipe, bits, choices.split(","))
        with _progress("layer") as show:
            form = Dense() if dense else None
            report = quantize_folder(Job(source, output, recipe, tokens, form, progress=show, notes=notes))
    _say_report(output, report)


def _tokens(source: Path, text: Path, rows: int, length: int) -> Tensor:
    from reference_impl.features.chat.prompts import ChatEncoder
    from reference_impl.models.quantization.calibration import calibration_tokens

    return calibration_tokens(ChatEncoder(source).tokens_of(text.read_text("utf-8")), rows, length)


def _mixed(
    source: Path, output: Path, tokens: Tensor, recipe: Recipe, bits: float, names: list[str]
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe with a scheme for each linear layer, and what the report says of it."""
    import torch

    from reference_impl.assembly.model import load_model
    from reference_impl.core.linear import UnquantizedLinear
    from reference_impl.models.quantization.scan import plain, scan_folder
    from reference_impl.models.quantization.sensitivity import allocate

    with _progress("scanned") as show:
        plain_method = UnquantizedLinear(torch.float32, torch.device("cpu"))  # whose matrices can be written to
        load = partial(load_model, source, torch.float32, linear_method=plain_method)
        costs, weights = scan_folder(source, output, load, tokens[:_SCANNED], recipe, names, show)
    try:
        chosen = allocate(costs, int(bits * weights))
    except ValueError as error:
        raise ValueError(f"--bits: {error}: {weights:,} weights") from None
    counts = ", ".join(f"{name} in {list(chosen.values()).count(name)}" for name in names)
    typer.echo(f"linear layers: {counts} of {len(chosen)}")
    return replace(recipe, by_layer=chosen), {"mixed": {"asked_bits": bits, "costs": plain(costs)}}


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], object]]:
    """Yields show(done, of), which draws a bar; where there is no terminal it shows nothing."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    console = Console()
    columns = TextColumn(what), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, of: shown.update(task, completed=done, total=of)


def _say_report(output: Path, report: dict[str, Any]) -> None:
    worst: dict[str, tuple[float, int]] = {}
    for index, layer in enumerate(report["layers"]):
        for name, error in (layer["output_errors"] or layer["weight_errors"]).items():
            kind = name.rpartition(".")[2]
            worst[kind] = max(worst.get(kind, (0.0, 0)), (error, index))
    sizes = f"{report['file_bytes'] / 1e6:.2f} MB, before {report['file_bytes_before'] / 1e6:.2f} MB"
    typer.echo(f"wrote {output}: {report['quantized_weights']:,} weights of {report['bits_per_weight']:.3f} bits")
    if report["form"] == "dense":
        why = f"compressed-tensors has no {' or '.join(report['no_form'])}" if report["no_form"] else "as asked"
        typer.echo(f"  these files are dense, float32 ({why}): {sizes}")
        typer.echo(f"  packed, the quantized weights would be {report['quantized_bytes'] / 1e6:.2f} MB")
    else:
        typer.echo(f"  {report['quantized_bytes'] / 1e6:.2f} MB, {report['form']}; all files {sizes}")
    if head := report.get("lm_head"):
        untied = ", untied from the embedding, which stays" if head["untied"] else ""
        typer.echo(f"  lm_head: {head['bytes'] / 1e6:.2f} MB, {head['scheme']}{untied}")
    of = "outputs over the calibration rows" if report["layers"][0]["output_errors"] else "weights"
    shown = ", ".join(f"{kind} {error:.3f} (layer {index})" for kind, (error, index) in worst.items())
    typer.echo(f"  largest relative error of {of}: {shown}")


def evaluate(
    model: Model,
    text: Annotated[
        Path, typer.Option(help="What is predicted: a text that it has not seen.", exists=True, dir_okay=False)
    ],
    against: Annotated[str | None, typer.Option(help=f"The model it was made from. {MODEL}.")] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 256,
    windows: Annotated[int, typer.Option(min=2, help="No more of them than this.")] = 64,
    tasks: Annotated[int, typer.Option(min=0, help=_TASKS)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object.")] = False,
) -> None:
    """How good a model is on a text, and how far it has moved from another: perplexity, KL, same first token.

    With --tasks also what it can: find a value some way back, write valid JSON, go on with the text's functions so that
    they parse. Each figure has a 95 % interval, from drawing windows or tasks anew; differences are paired. Exact
    methods are judged by tests, never by this.
    """
    from reference_impl.bench import abilities, quality

    with errors_in_a_line():
        if tasks == 1:
            fail("--tasks: expected 0 or at least 2, since one says nothing of how much they differ; got 1", 2)
        other = None if against is None else folder_of(against)
        found = quality.evaluate(folder_of(model), other, text, length, windows, tasks)
    if as_json:
        measures = {name: asdict(estimate) for name, estimate in found["found"].items()}
        about = {"model": model, "against": against, "text": str(text), "windows": found["windows"], "length": length}
        typer.echo(json.dumps(about | {"measures": measures, "tasks": abilities.plain(found["abilities"])}, indent=2))
        return
    typer.echo(f"{found['windows']} windows of {length} tokens of {text}, in float32; 95 % intervals in brackets")
    typer.echo("\n".join(quality.lines(found["found"]) + abilities.lines(found["abilities"])))


def evaluate_kv(
    model: Model,
    text: Annotated[
        Path, typer.Option(help="What is predicted: a text that it has not seen.", exists=True, dir_okay=False)
    ],
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help=f"{', '.join(FORMATS)}, with commas.")] = (
        "fp8,int8,int4"
    ),
    fake: Annotated[
        str, typer.Option(help="What no cache stores, rounded for the comparison: kivi (keys by channel).")
    ] = "",
    edges: Annotated[str, typer.Option(help="Where bands of distances begin.")] = "0,16,64,256",
    length: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    windows: Annotated[int, typer.Option(min=2, help="No more of them than this.")] = 8,
    needles: Annotated[int, typer.Option(min=0, help="Needles at each depth; 0: none.")] = 0,
    block_size: Annotated[int, typer.Option(min=1, help="Of kivi: tokens that share a channel's scale.")] = 16,
) -> None:
    """What a KV cache of fewer bits costs, by how far back the rounded tokens lie; and needles at depths.

    Only the keys and values at these distances are rounded. KL and agreement are to the same model with all of them as
    they are, in float32; each figure has a 95 % interval, from drawing windows anew.
    """
    from reference_impl.bench import kv_quality

    with errors_in_a_line():
        try:
            numbers = [int(edge) for edge in edges.split(",")]
        except ValueError:
            fail(f"--edges: expected whole numbers with commas between them, got {edges!r}", 2)
        formats, fakes = ([name for name in names.split(",") if name] for names in (kv_dtype, fake))
        _, said = kv_quality.evaluate(
            folder_of(model), text, formats, fakes, numbers, length, windows, needles, block_size
        )
    typer.echo("\n".join(said))
