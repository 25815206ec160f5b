"""`inferlab bench serve`: puts a load on an OpenAI-compatible server and says what its users would have seen.

The command only: httpx belongs to an extra, and every other command runs without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

EXAMPLE = "Example: inferlab bench serve --workload chat --rate 4 --num 200 --ttft 0.5 --tpot 0.05"


def serve(
    base_url: Annotated[
        str, typer.Option(help="Of the server; /v1 at its end is taken off.")
    ] = "http://127.0.0.1:8000",
    workload: Annotated[
        str, typer.Option(help="agents, batch, chat, code_completion, rag, vision_language, or a .yaml or .jsonl file.")
    ] = "chat",
    rate: Annotated[float | None, typer.Option(min=1e-6, help="Requests per second; default: its own.")] = None,
    arrivals: Annotated[str | None, typer.Option(help="poisson, bursty or diurnal; default: its own.")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Closed loop: number of users. With --rate or --arrivals: most requests in flight."),
    ] = None,
    think: Annotated[float, typer.Option(min=0, help="Closed loop: mean seconds between two requests.")] = 0.0,
    num: Annotated[int, typer.Option(min=1, help="Requests that count.")] = 200,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before these, which do not count.")] = 8,
    ttft: Annotated[float, typer.Option(min=0, help="Objective: seconds to the first token.")] = 0.5,
    tpot: Annotated[float, typer.Option(min=0, help="Objective: seconds for each further token, on average.")] = 0.05,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same requests at the same times.")] = 0,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="/v1/chat/completions in place of /v1/completions.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Prompts as text, also where token ids would do.")] = False,
    vocab_size: Annotated[int, typer.Option(min=64, help="Token ids of prompts stay below it.")] = 1024,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Cut longer prompts to this many tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Cut longer outputs to this many tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.001, help="Seconds until a request is given up.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="INFERLAB_API_KEY", help="Sent as a bearer token.")] = None,
    to_json: Annotated[
        Path | None,
        typer.Option("--json", dir_okay=False, writable=True, help="Write all of it there, and each request."),
    ] = None,
) -> None:
    """Put a load on a server: percentiles with intervals, goodput, and every failure by kind.

    Requests are sent when the workload says, whatever comes back, unless --concurrency alone closes the loop. Latency
    is counted from the moment a request was planned, and beside it from the moment it was sent. Ctrl-C ends the load:
    what was measured until then is printed and written, marked as partial.
    """
    from rich.console import Console

    try:
        from reference_impl.bench.load.probe import ServerError
        from reference_impl.bench.load.report import Objectives, report
        from reference_impl.bench.load.run import Load, watched
        from reference_impl.bench.load.show import show
    except ImportError as error:
        needed = f"{shlex.quote(sys.executable)} -m pip install 'inferlab[serve]'"
        typer.secho(f"inferlab: error: {error}. The load generator needs more packages: {needed}", fg="red", err=True)
        raise typer.Exit(1) from None
    address = urlsplit(base_url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise typer.BadParameter(f"expected http://HOST:PORT, got {base_url!r}", param_hint="--base-url")
    if to_json is not None and not os.access(to_json.resolve().parent, os.W_OK):  # now, not when all is measured
        raise typer.BadParameter(f"cannot write into the folder {to_json.resolve().parent}", param_hint="--json")
    load = Load(
        base_url.rstrip("/").removesuffix("/v1"), workload, rate, arrivals, concurrency, think, num, warmup, seed,
        model, chat, text, vocab_size, max_prompt, max_output, temperature, timeout,
    )  # fmt: skip
    console = Console()
    try:
        # The server's variable may hold several keys.
        outcomes, setup = watched(load, next(iter((api_key or "").split()), None), console)
        if not outcomes and setup["stopped"]:
            raise KeyboardInterrupt
        result = report(outcomes, Objectives(ttft, tpot), {"load": dataclasses.asdict(load), **setup})
    except (ServerError, ValueError, FileNotFoundError) as error:
        typer.secho(f"inferlab: error: {error}", fg="red", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.secho("stopped before any request had ended: nothing was measured", fg="red", err=True)
        raise typer.Exit(130) from None
    if to_json is not None:
        content = {**result.as_dict(), "requests": [dataclasses.asdict(o) for o in outcomes]}
        to_json.write_text(json.dumps(content, indent=1) + "\n")  # first: the reader of stdout may go away
    show(result, console)
    if to_json is not None:
        typer.echo(f"wrote {to_json}")
    if setup["stopped"]:
        raise typer.Exit(130)
    if not result.num_succeeded:
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    app = typer.Typer(add_completion=False)
    app.command(epilog=EXAMPLE)(serve)
    return int(app(args=arguments, prog_name="inferlab bench serve") or 0)  # which raises SystemExit
