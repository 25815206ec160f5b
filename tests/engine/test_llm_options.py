"""What the command line says reaches the engine: in `generate`, and in the process that `serve` starts for it."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from typer.testing import CliRunner

from reference_impl.assembly import llm as front_door
from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.names import options_of
from reference_impl.bench import profiling
from reference_impl.cli import app
from reference_impl.cli.options import EngineOptions
from reference_impl.interfaces import SamplingParams
from reference_impl.serving import process, server
from tests.executor.forked import start_beside
from tests.warm import Warm

# Option -> a value that nothing has, and what the engine says to it.
WRONG = {
    "--quantization": "--quantization: expected one of none, fp8, int8, int4, got 'strange'",
    "--kv-dtype": "--kv-dtype: expected one of auto, fp8, fp8_e5m2, int8, int4, got 'strange'",
    "--overlap": "--overlap: expected one of auto, on, off, got 'strange'",
    "--graphs": "--graphs: expected one of auto, on, off, got 'strange'",
    "--attention": "--attention: expected one of auto, triton, torch, compiled, got 'strange'",
    "--sampling-noise": "--sampling-noise: expected one of one-number, gumbel, got 'strange'",
    "--worker": "--worker: expected 'here', 'process' or 'threads', got 'strange'",
    "--draft-tree": "--draft-tree: expected numbers between commas, such as 4,2,2, got 'strange'",
}
# The address is nobody's: a server that let the value pass would end all the same.
COMMANDS = {"generate": ["import os", "--model", "draft"], "serve": ["draft", "--host", "203.0.113.1"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("option", WRONG)
def test_an_option_reaches_the_engine(command: str, option: str, warm: Warm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "start_beside", functools.partial(start_beside, warm))
    done = CliRunner().invoke(app, [command, *COMMANDS[command], option, "strange"])
    assert done.exit_code == 2
    assert f"inferlab: error: {WRONG[option]}" in done.stderr


def test_generate_says_what_a_quantized_model_says() -> None:
    words = ["--quantization", "int8", "--overlap", "off", "--graphs", "off", "--dtype", "float32", "--max-tokens", "8"]
    done = CliRunner().invoke(app, ["generate", "def f(", "--model", "draft", *words])
    assert done.exit_code == 0, done.output
    llm = LLM(course_model("draft"), dtype="float32", quantization="int8", overlap="off", graphs="off")
    assert done.stdout == "def f(" + llm.generate("def f(", SamplingParams(max_tokens=8, temperature=0))[0].text


@pytest.mark.parametrize("command", ["generate", "serve", "profile"])
def test_help_shows_every_option_of_the_engine_once_with_its_default(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}).output
    for field in fields(EngineOptions):
        name = "--" + field.name.replace("_", "-")
        [line] = [line for line in shown.splitlines() if re.match(rf"\W*{name}[ ,]", line)]
        assert field.default in (None, False) or f"[default: {field.default}]" in line
    assert len(re.findall("--kv-cache-dtype", shown)) == 1
    assert not re.search(r"--engine\b(?!-)", shown)


@pytest.mark.parametrize(("given", "tree"), [(None, ()), ("3", (3,)), ("4,2,2", (4, 2, 2))])
def test_a_tree_is_given_as_numbers_between_commas(given: str | None, tree: tuple[int, ...]) -> None:
    assert EngineOptions(draft_tree=given).of_llm()["draft_tree"] == tree


# vLLM's options of its server -> what reaches the engine's config.
SERVED = {
    ("--max-model-len", "64"): ("max_model_len", 64),
    ("--block-size", "8"): ("block_size", 8),
    ("--max-num-batched-tokens", "32"): ("max_num_batched_tokens", 32),
    ("--max-num-seqs", "3"): ("max_num_seqs", 3),
    ("--gpu-memory-utilization", "0.5"): ("memory_percent", 50.0),
    ("--enable-prefix-caching",): ("prefix_cache", "hash"),
    ("--no-enable-prefix-caching",): ("prefix_cache", "off"),
    ("--kv-cache-dtype", "int8"): ("kv_dtype", "int8"),
    ("--kv-dtype", "int8"): ("kv_dtype", "int8"),
    ("--seed", "7"): ("seed", 7),
    ("--batch-invariant",): ("batch_invariant", True),
    ("--speculative", "suffix"): ("speculative", "suffix"),
    ("--num-drafts", "3"): ("num_drafts", 3),
    ("--sampling-noise", "gumbel"): ("sampling_noise", "gumbel"),
    ("--tensor-parallel-size", "2"): ("tensor_parallel_size", 2),
    ("--tp", "2"): ("tensor_parallel_size", 2),
    ("--pp", "2"): ("pipeline_parallel_size", 2),
}


@pytest.mark.parametrize("words", SERVED, ids=" ".join)
def test_serve_has_vllms_names(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Path, dict[str, Any]]] = []

    def make(folder: Path, host: str, port: int, **options: Any) -> NoReturn:
        made.append((folder, options))
        raise ValueError("enough")

    monkeypatch.setattr(server, "make", make)
    done = CliRunner().invoke(app, ["serve", "draft", "--served-model-name", "mine", *words])
    assert "error: enough" in done.stderr
    [(folder, options)] = made
    assert (folder, options["name"]) == (course_model("draft"), "mine")
    of_the_server = (
        "name", "api_keys", "max_unfinished", "max_body_bytes", "shutdown_seconds", "trace", "tool_call_parser",
        "chat_template", "restarts", "data_parallel_size", "router", "prefill", "decode", "peers_port",
    )  # fmt: skip
    of_the_llm = ("dtype", "quantization", "worker", "draft_model", "generation_config")
    config = EngineConfig(**options_of({n: v for n, v in options.items() if n not in (*of_the_server, *of_the_llm)}))
    name, value = SERVED[words]
    assert dataclasses.asdict(config) == dataclasses.asdict(EngineConfig()) | {name: value}


def out_of_memory() -> RuntimeError:
    """What torch says on this CPU."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(1 << 60, dtype=torch.uint8)
    return error.value


@pytest.mark.parametrize("error", [out_of_memory(), torch.OutOfMemoryError("CUDA out of memory"), MemoryError("numpy")])
@pytest.mark.parametrize("words", [["generate", "a"], ["profile"], ["profile", "--shape", "llama-3-8b"]])
def test_too_little_memory_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: list[str]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise error

    monkeypatch.setattr(front_door, "LLM", fail)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert done.stderr.startswith("inferlab: error: the memory does not suffice. Smaller: --quantization int4")
    assert done.stderr.count("\n") == 1


def test_a_fault_of_ours_is_not_taken_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(front_door, "LLM", fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        CliRunner().invoke(app, ["generate", "a"], catch_exceptions=False)


def test_the_worker_may_be_a_process_of_its_own() -> None:
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 60}
    sampling = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    texts = []
    for worker in ("here", "process"):
        llm = LLM(course_model("draft"), worker=worker, quantization="int8", **options)
        texts.append([output.text for output in llm.generate(["def f(x):", "import"], sampling)])
        llm.engine.close()
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match="worker: expected 'here', 'process' or 'threads', got 'there'"):
        LLM(course_model("draft"), worker="there", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loads its model from a folder"):
        LLM(shape="qwen3-0.6b", dummy_weights=True, worker="process", num_blocks=60)
    with pytest.raises(ValueError, match="--worker process: only this process can be profiled"):
        profiling.run(None, "decode", 1, 16, 1, None, shape="qwen3-0.6b", worker="process")
