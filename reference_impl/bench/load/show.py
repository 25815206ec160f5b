"""A report for people to read."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from reference_impl.bench.load.intervals import Estimate
from reference_impl.bench.load.report import PERCENTS, Report


def show(result: Report, console: Console) -> None:
    setup, goals = result.setup, result.objectives
    table = Table(
        title=escape(f"{setup['load']['workload']}, {setup['loop']}, {setup['form']}"),
        box=box.SIMPLE,
        title_justify="left",
    )
    for heading in ("ms", "mean", *(f"p{p}" for p in PERCENTS), "values"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for row in result.rows:
        cells = [_ms(row.percentiles[p]) for p in PERCENTS]
        table.add_row(row.name, f"{row.mean * 1e3:.1f}", *cells, str(row.num_values))
    console.print(table)
    share, sent = result.attainment, result.attainment_from_sent
    if stopped := setup["stopped"]:
        partial = (
            f"partial     stopped after {result.num_requests} of {stopped['of']} requests; {stopped['under_way']} were "
            f"under way, the first of them for {stopped['longest_seconds']:.1f} s, and are in no figure, planned rate "
            "included: the longest waits are missing, so latencies are too low"
        )
        console.print(escape(partial), style="yellow", highlight=False)
    lines = [
        f"requests    {result.num_succeeded} of {result.num_requests} succeeded in {result.seconds:.1f} s; planned "
        f"{result.planned_rate:.2f}/s, succeeded {result.request_rate:.2f}/s",
        f"tokens      {result.output_rate:.1f} output/s, {result.prompt_rate:.1f} prompt/s; output "
        f"{result.num_output_tokens} of {result.asked_output_tokens} asked, prompt {result.num_prompt_tokens} of "
        f"{result.asked_prompt_tokens}",
        f"goodput     {result.goodput:.2f} requests/s with TTFT <= {goals.ttft:g} s and TPOT <= {goals.tpot:g} s",
        f"attainment  {_percent(share)} of all requests from planned; {_percent(sent)} from sent",
    ]
    console.print(escape("\n".join(lines)), highlight=False)
    for kind, count in result.errors.items():
        what = " ".join(result.examples[kind].split())[:200]
        console.print(escape(f"failed      {count} x {kind}: {what}"), style="red", highlight=False)
    for remark in remarks(result):
        console.print(escape(f"note        {remark}"), style="dim", highlight=False)


def remarks(result: Report) -> list[str]:
    """What a reader has to know to read the figures."""
    setup = result.setup
    found = [f"the server refused {' '.join(form.split())[:200]}" for form in setup["refused_forms"]]
    if result.errors:
        found.append(f"percentiles are of the {result.num_succeeded} that succeeded; attainment and goodput are of all")
    if setup["num_cut"]:
        found.append(f"{setup['num_cut']} requests were cut to --max-prompt and --max-output")
    if setup["num_with_images"]:
        found.append(
            f"{setup['num_with_images']} requests have images: of them only the number of tokens was sent, as part of "
            "the prompt. No picture was sent, so the server encoded none"
        )
    if setup["loop"].startswith("closed"):
        found.append("in a closed loop users wait for the server: these latencies say nothing about a fixed rate")
    by_chunks = result.num_succeeded - result.tokens_counted_by_server
    if by_chunks:
        found.append(f"{by_chunks} answers came without usage: their chunks were counted as tokens")
    if result.ended_without_done:
        found.append(f"{result.ended_without_done} answers ended with a finish_reason and without [DONE]")
    if result.tokens_per_chunk is not None and result.tokens_per_chunk > 1.05:
        found.append(f"{result.tokens_per_chunk:.2f} tokens in a chunk on average: ITL is the gap between chunks")
    if result.lost_output_tokens:
        found.append(f"{result.lost_output_tokens} tokens of failed requests are in no figure")
    return [*found, result.method]


def _ms(estimate: Estimate) -> str:
    """The estimate as value [low, high]; an open end where there are too few values for a limit."""
    value = f"{estimate.value * 1e3:.1f}"
    if estimate.low is None and estimate.high is None:
        return value
    low, high = ("–" if limit is None else f"{limit * 1e3:.1f}" for limit in (estimate.low, estimate.high))
    return f"{value} [{low}, {high}]"


def _percent(estimate: Estimate) -> str:
    assert estimate.low is not None
    assert estimate.high is not None
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"
