"""`inferlab generate`, `serve`, `plan`, `profile`, `quantize`, `eval`, `eval-kv`, `bench`. Heavy imports happen inside
them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reference_impl.bench import names
from reference_impl.bench import serve as load
from reference_impl.cli import planning, quantizing
from reference_impl.cli.messages import described, install
from reference_impl.cli.options import (
    MODEL,
    EngineOptions,
    GenerationConfig,
    Model,
    Timeline,
    errors_in_a_line,
    fail,
    folder_of,
    name_of,
    with_engine_options,
)

if TYPE_CHECKING:
    from reference_impl.observe.trace import Trace

app = typer.Typer(no_args_is_help=True)


@app.command(epilog='Example: inferlab generate "class Stack:" --max-tokens 48 --temperature 0.7 --seed 1')
@with_engine_options
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="Text to continue, or with --chat a message to answer. Left out: a function's first line."),
    ] = None,
    model: Annotated[str, typer.Option(help=f"{MODEL}.")] = "target",
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: the model's, or 0.")] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Only the likeliest tokens that together reach it; 1 is all; default: the model's, or 1."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    *,
    engine: EngineOptions,
    chat: Annotated[bool, typer.Option(help="Wrap the prompt in the model's chat template.")] = False,
    generation_config: GenerationConfig = "auto",
    trace: Timeline = None,
) -> None:
    """Continue a text with the engine, token by token, and say how long it took."""
    from reference_impl.assembly import demo
    from reference_impl.assembly.llm import LLM
    from reference_impl.assembly.stored_weights import paths_of
    from reference_impl.interfaces import SamplingParams
    from reference_impl.observe.trace import DraftUse

    with errors_in_a_line():
        llm = LLM(folder_of(model), generation_config=generation_config, **engine.of_llm())
        stop = demo.STOP if prompt is None and not chat else ()
        prompt = demo.PROMPT if prompt is None else prompt
        asked = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed, "stop": stop}
        given = {name: value for name, value in asked.items() if value is not None}
        sampling = SamplingParams(**{"temperature": 0.0} | llm.sampling_defaults | given)
        ids = llm.chat_prompt([{"role": "user", "content": prompt}]) if chat else llm.encode(prompt)
        if not chat:
            typer.echo(prompt, nl=False)
        for piece in llm.stream(ids, sampling):
            typer.echo(piece, nl=False)
    m = llm.engine.trace.metrics("0")
    tpot = "-" if m.tpot is None else f"{m.tpot * 1e3:.1f} ms"
    drafts = DraftUse.of(llm.engine.trace.steps())
    kept = f"{drafts.num_accepted_tokens} of {drafts.num_draft_tokens} draft tokens kept, " if drafts.num_drafts else ""
    kept += "by typical acceptance, which is lossy, " if drafts.num_lossy else ""
    kept += f"none made in {drafts.num_steps_off} steps, where they would lose, " if drafts.num_steps_off else ""
    paths = ", ".join(f"{path} ({count} layers)" for path, count in paths_of(llm.engine.model).items())
    stored = f", weights that came quantized: {paths}" if paths else ""
    about = f"The course's model: {demo.ABOUT}. " if model == "target" else ""
    typer.secho(
        f"\n[{about}{m.num_output_tokens} tokens, TTFT {(m.ttft or 0) * 1e3:.0f} ms, TPOT {tpot}, "
        f"{m.tokens_per_second or 0:.0f} tokens/s, {kept}"
        f"{str(llm.engine.model.dtype).removeprefix('torch.')}{stored}, "
        f"attention {'+'.join(sorted({name for step in llm.engine.trace.steps() for name in step.attention}))}]",
        dim=True,
        err=True,
    )
    if trace is not None:
        _write_trace(llm.engine.trace, trace)


@app.command(epilog="Example: inferlab serve target --port 8000")
@with_engine_options
def serve(
    model: Model = "target",
    host: Annotated[str, typer.Option(help="Where to listen. Anything but loopback lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call it; default: the folder.")] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(envvar="INFERLAB_API_KEY", help="Clients must show it. Several are allowed.")
    ] = None,
    *,
    engine: EngineOptions,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests in one step.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="New tokens in one step.")] = 2048,
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt and its answer; default: the model's.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a block of the KV cache.")] = 16,
    seed: Annotated[int | None, typer.Option(min=0, help="Of requests without a seed; default: new ones.")] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=1.0,
            help="Of a GPU's memory, the share for weights, activations and cache; default: 0.9. On a CPU: none.",
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None, typer.Option(help="Reuse keys and values of prompts that begin alike; default: where it can be.")
    ] = None,
    kv_cache_mb: Annotated[
        int | None,
        typer.Option(min=1, help="Memory for keys and values; default: 256, and on a GPU what it has left."),
    ] = None,
    max_unfinished: Annotated[int, typer.Option(min=1, help="Running and waiting; more are answered with 429.")] = 512,
    max_body_kb: Annotated[int, typer.Option(min=1, help="Longest body of a request.")] = 4096,
    shutdown_seconds: Annotated[float, typer.Option(min=0, help="What runs may go on for so long after Ctrl-C.")] = 10,
    tool_call_parser: Annotated[str | None, typer.Option(help="The model's: hermes or llama3_json.")] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A file with a Jinja template, for the model's own.", exists=True, dir_okay=False),
    ] = None,
    engine_restarts: Annotated[
        int, typer.Option(min=0, help="Times within 5 minutes that an engine which is lost is started again.")
    ] = 3,
    engine_restart_wait: Annotated[
        float,
        typer.Option(min=0, max=60, help="Seconds before the first of them; each further one waits twice as long."),
    ] = 1.0,
    data_parallel_size: Annotated[
        int, typer.Option("--data-parallel-size", "--dp", min=1, help="Engines that share the requests.")
    ] = 1,
    prefill: Annotated[int, typer.Option(min=0, help="Engines that compute prompts for those of --decode.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Engines that answer, where others compute prompts.")] = 0,
    peers: Annotated[
        str | None, typer.Option(help="HOST:PORT, of this machine, where engines of other machines join them.")
    ] = None,
    role: Annotated[str | None, typer.Option(help="Only an engine, for --join: prefill or decode.")] = None,
    join: Annotated[str | None, typer.Option(help="HOST:PORT of a server with --peers, to join.")] = None,
    join_key: Annotated[
        Path | None, typer.Option(help="A file with the key that both have, of --peers and --join.", dir_okay=False)
    ] = None,
    router: Annotated[
        str, typer.Option(help="Which of them gets a request: prefix, least_tokens or round_robin.")
    ] = "prefix",
    generation_config: GenerationConfig = "auto",
    trace: Timeline = None,
) -> None:
    """Serve a model to any OpenAI client.

    /status shows what the engine does; its figures are at /status.json.
    /requests/ID/timeline is the timeline of an answer.
    /metrics is for Prometheus and needs no API key; these do.
    """
    try:
        from reference_impl.serving import joining, server
        from reference_impl.serving.supervision import Restarts
    except ImportError as error:
        fail(f"{error}. The server needs more packages: {install('serve')}")

    with errors_in_a_line():
        of_engine: dict[str, Any] = {
            "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len, "block_size": block_size, "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
            "enable_prefix_caching": enable_prefix_caching, "generation_config": generation_config,
            "kv_cache_bytes": None if kv_cache_mb is None else kv_cache_mb << 20, **engine.of_llm(),
        }  # fmt: skip
        if role is not None or join is not None:
            return joining.serve_as_told(folder_of(model), role, join, join_key, **of_engine)
        running = server.make(
            folder_of(model), host, port, name=served_model_name or name_of(model),
            api_keys=tuple(api_key or ()), max_unfinished=max_unfinished, max_body_bytes=max_body_kb << 10,
            shutdown_seconds=shutdown_seconds, trace=trace,
            restarts=Restarts(engine_restarts, wait=engine_restart_wait), tool_call_parser=tool_call_parser,
            chat_template=chat_template, data_parallel_size=data_parallel_size, router=router, prefill=prefill,
            decode=decode, peers_port=joining.port_of(peers, join_key), **of_engine,
        )  # fmt: skip
    running.serve()
    if running.failure is not None:
        fail(running.failure)


def _write_trace(trace: Trace, file: Path) -> None:
    from reference_impl.observe.perfetto import write_perfetto

    try:
        write_perfetto(trace, file)
    except OSError as error:
        fail(f"the timeline could not be written: {described(error)}")
    typer.echo(f"wrote {file}; open it in ui.perfetto.dev", err=True)


@app.command(epilog="Example: inferlab profile --batch 4 --trace step.json")
@with_engine_options
def profile(
    model: Annotated[str | None, typer.Argument(help=f"{MODEL}; default: target.")] = None,
    shape: Annotated[str | None, typer.Option(help="Random weights in a known model's shape: llama-3-8b, ...")] = None,
    phase: Annotated[str, typer.Option(help="decode (a token for each request) or prefill (new prompts).")] = "decode",
    batch: Annotated[int, typer.Option(min=1, help="Requests in a step.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    steps: Annotated[int, typer.Option(min=1, help="Steps to profile.")] = 5,
    *,
    engine: EngineOptions,
    trace: Timeline = None,
) -> None:
    """Where the time of a step goes: its five longest operators or kernels, against what the theory asks of them."""
    from reference_impl.bench import profiling

    with errors_in_a_line():
        if model is not None and shape is not None:
            raise ValueError(f"shape: expected a model or --shape, got both {model!r} and --shape {shape}")
        folder = None if shape is not None else folder_of(model or "target")
        profiling.run(folder, phase, batch, context, steps, trace, shape=shape, **engine.of_llm())


app.command("plan", epilog="Example: inferlab plan --model llama-3-70b --gpu h100 --gpus 8 --ttft 0.5 --tpot 0.05")(
    planning.plan_layouts
)
app.command(epilog="Example: inferlab quantize target --method gptq --calibration TEXT -o OUT")(quantizing.quantize)
app.command("eval", epilog="Example: inferlab eval OUT --against target --text TEXT")(quantizing.evaluate)
app.command("eval-kv", epilog="Example: inferlab eval-kv target --text TEXT --kv-dtype int8,int4 --needles 8")(
    quantizing.evaluate_kv
)

bench_app = typer.Typer(no_args_is_help=True, help="Measure, with ratios and a stamped result.")
app.add_typer(bench_app, name="bench")
bench_app.command("serve", epilog=load.EXAMPLE)(load.serve)


def _mount(name: str, what: str, example: str) -> None:
    """Adds a bench, which has a parser of its own and gets everything that is written after its name."""

    def bench(context: typer.Context) -> None:
        raise typer.Exit(names.run(name, context.args))

    bench_app.command(
        name, help=what, epilog=f"Example: inferlab bench {name} {example}".rstrip(), add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )(bench)  # fmt: skip


for _name, _row in names.BENCHES.items():
    if _name != "serve":
        _mount(_name, *_row)
