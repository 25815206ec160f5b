"""`inferlab bench serve` as a whole: what it asks a server first, what it prints and writes, and how it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from reference_impl.bench.load.client import Client, Form, Outcome
from reference_impl.bench.load.probe import ServerError, choose_form, connect, first_model, forms
from reference_impl.bench.load.run import Load
from reference_impl.bench.serve import serve
from reference_impl.simulation.workloads import WorkloadRequest, write_jsonl

from .fake_server import Call, FakeServer, Script, broken, cut_off, nobody, overload, running

# --- before the load --------------------------------------------------------------------------------------------------


def choose(fake: FakeServer, chat: bool = False, text: bool = False) -> tuple[Form, list[str]]:
    async def main() -> tuple[Form, list[str]]:
        async with connect("key") as http:
            client = Client(http, fake.url, await first_model(http, fake.url))
            refused = await choose_form(client, forms(chat, text))
            return client.form, refused

    return asyncio.run(main())


def test_a_server_is_asked_what_it_takes_and_what_it_refuses_is_told():
    async def plain(call: Call) -> None:
        if isinstance(call.body["prompt"], list):
            await call.whole(422, "token ids are not supported")
        elif "ignore_eos" in call.body:
            await call.whole(400, "unknown field ignore_eos")
        else:
            await call.answer()

    with running(plain) as fake:
        form, refused = choose(fake)
    assert form == Form(chat=False, token_ids=False, ignore_eos=False)
    assert "stream_options" in fake.posts[-1].body
    assert len(refused) == 3
    assert "token ids are not supported" in refused[0]
    assert fake.posts[0].headers["authorization"] == "Bearer key"
    assert fake.posts[0].body["model"] == "fake-model"
    with running() as fake:
        assert choose(fake) == (Form(), [])
        assert choose(fake, text=True) == (Form(token_ids=False), [])


def test_a_server_that_knows_no_stream_options_is_not_asked_for_usage():
    async def strict(call: Call) -> None:
        unknown = {"ignore_eos", "stream_options"} & set(call.body)
        await (call.whole(422, f"not permitted: {sorted(unknown)}") if unknown else call.answer())

    with running(strict) as fake:
        form, _ = choose(fake)
        assert form == Form(ignore_eos=False, usage=False)
        assert str(form).endswith("ends where the model ends, usage not asked for")


@pytest.mark.parametrize(
    ("status", "words"),
    [(401, "a first small request failed: HTTP 401"), (404, "accepts none of the known forms of request")],
)
def test_a_server_that_takes_nothing_is_an_error(status: int, words: str):
    async def script(call: Call) -> None:
        await call.whole(status, "no")

    with running(script) as fake, pytest.raises(ServerError, match=words):
        choose(fake)


# --- the whole command ------------------------------------------------------------------------------------------------

app = typer.Typer()
app.command()(serve)


SMALL = ("--concurrency", "3", "--num", "3", "--warmup", "0", "--max-prompt", "20", "--max-output", "3")


def command(fake: FakeServer, *options: str) -> Any:
    return CliRunner().invoke(
        app, ["--base-url", fake.url, *options], env={"COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb"}
    )


def test_the_command_offers_the_defaults_of_a_load():
    options = {"num_requests": "num", "num_warmup": "warmup"}
    offered = inspect.signature(serve).parameters
    for f in dataclasses.fields(Load):
        if f.name != "salt":
            assert offered[options.get(f.name, f.name)].default == f.default, f.name


def test_the_command_can_be_listed_without_the_extra_that_it_needs():
    code = "import sys; sys.modules['httpx'] = None; import reference_impl.bench.serve"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def trace(folder: Path, num: int) -> str:
    """A recorded workload in which nobody waits."""
    file = folder / "trace.jsonl"
    write_jsonl(file, [WorkloadRequest(f"r{i}", i / 1000, 8 + i, 3, ()) for i in range(num)])
    return str(file)


def test_warm_up_is_sent_and_not_counted_and_failures_are_counted_by_kind(tmp_path: Path):
    async def script(call: Call) -> None:
        measured = call.number - 1 - 4  # after the first small one and the warm-up
        if measured in (0, 5, 6):
            await overload(call)
        elif measured == 7:
            await cut_off(call)
        else:
            await call.answer()

    with running(script) as fake:
        file = tmp_path / "result.json"
        done = command(
            fake, "--workload", trace(tmp_path, 20), "--num", "20", "--warmup", "4", "--ttft", "100", "--tpot", "100",
            "--json", str(file),
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert len(fake.posts) == 1 + 4 + 20
    prompts = [tuple(call.body["prompt"]) for call in fake.posts]
    assert len(set(prompts)) == len(prompts)  # the warm-up has prompts of its own
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["num_succeeded"]) == (20, 16)
    assert result["errors"] == {"HTTP 429": 3, "connection cut": 1}
    assert result["attainment"]["value"] == 16 / 20
    assert result["goodput"] * result["seconds"] == pytest.approx(16)
    assert (result["num_output_tokens"], result["lost_output_tokens"]) == (16 * 3, 1)
    assert result["tokens_counted_by_server"] == 16
    assert result["rows"]["TTFT from planned"]["num_values"] == 16
    assert result["rows"]["ITL"]["num_values"] == 32
    assert result["rows"]["delay of the client"]["num_values"] == 20
    assert len(result["requests"]) == 20
    assert result["setup"]["warmup"] == {"requests": 4, "failed": 0}
    assert "16 of 20 succeeded" in done.output
    assert "3 x HTTP 429" in done.output
    assert "come back later" in done.output
    assert "80.0%" in done.output


def test_a_closed_loop_of_a_course_workload_and_its_chat_form(tmp_path: Path):
    with running() as fake:
        done = command(
            fake, "--workload", "chat", "--concurrency", "3", "--num", "12", "--warmup", "0", "--max-prompt", "100",
            "--max-output", "4", "--chat",
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "closed loop, 3 users" in done.output
    assert "12 requests were cut" in done.output
    assert len(fake.posts) == 13
    assert {call.path for call in fake.posts} == {"/v1/chat/completions"}


def test_an_open_loop_of_a_course_workload():
    with running() as fake:
        outcomes: list[Outcome] = []
        load = Load(
            fake.url, "batch", rate=200.0, arrivals="poisson", num_requests=30, num_warmup=2, max_output=4, seed=3
        )
        load.run(outcomes.append)
    assert (len(outcomes), len(fake.posts)) == (30, 33)
    first = min(o.planned for o in outcomes)
    planned = sorted(o.planned - first for o in outcomes)
    arrivals = [r.arrival for r, _ in zip(load.requests(), range(30), strict=False)]
    assert planned == pytest.approx([a - arrivals[0] for a in arrivals])
    assert all(o.sent >= o.planned for o in outcomes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--workload", "nothing"), "unknown workload"),
        (("--rate", "2", "--arrivals", "sometimes"), "arrivals: expected"),
        (("--vocab-size", "64", "--base-url", "127.0.0.1:8000"), "http://HOST:PORT"),
    ],
)
def test_what_cannot_be_sent_is_said_and_nothing_is(options: tuple[str, ...], words: str):
    with running() as fake:
        done = command(fake, *options)
    assert done.exit_code != 0
    assert words in done.output
    assert not fake.posts


async def _locked(call: Call) -> None:
    await call.whole(401, "Incorrect API key provided")


async def _no_model(call: Call) -> None:
    await call.whole(404, f"The model {call.body['model']!r} does not exist")


@pytest.mark.parametrize(
    ("script", "options", "words", "times"),
    [
        (_locked, (), ("HTTP 401: Incorrect API key", "--api-key"), 1),
        (_no_model, ("--model", "other"), ("The model 'other' does not exist", "with --model"), 8),
        (broken, (), ("HTTP 500: Traceback",), 1),
    ],
)  # fmt: skip
def test_the_error_says_what_to_give(script: Script, options: tuple[str, ...], words: tuple[str, ...], times: int):
    with running(script) as fake:
        done = command(fake, *options)
    assert done.exit_code == 1
    assert all(part in done.output for part in words), done.output
    assert done.output.count(words[0]) == 1
    assert len(fake.posts) == times


def test_a_locked_list_of_models_asks_for_the_key_and_a_server_that_is_not_there_for_the_address():
    with running(locked="right") as fake:
        done, opened = command(fake, "--api-key", "wrong"), command(fake, "--api-key", "right", *SMALL)
    assert (done.exit_code, opened.exit_code) == (1, 0)
    assert "HTTP 401" in done.output
    assert "--api-key" in done.output
    with nobody() as fake:
        gone = command(fake)
    assert gone.exit_code == 1
    assert f"no answer from {fake.url}/v1/models" in gone.output
    assert "--base-url" in gone.output


def test_a_result_that_could_not_be_written_is_refused_before_anything_is_sent(tmp_path: Path):
    with running() as fake:
        done = command(fake, "--json", str(tmp_path / "nowhere" / "result.json"))
    assert done.exit_code == 2
    assert "nowhere" in "".join(done.output.split())
    assert not fake.posts


def test_images_are_not_sent_and_that_is_said(tmp_path: Path):
    file = tmp_path / "trace.jsonl"
    write_jsonl(file, [WorkloadRequest(f"r{i}", 0.0, 8, 3, (), images=i % 3) for i in range(6)])
    with running() as fake:
        done = command(fake, "--workload", str(file), "--num", "5", "--warmup", "0")
    assert done.exit_code == 0, done.output
    assert "3 requests have images" in done.output  # of the five that counted


# --- the load ends early ----------------------------------------------------------------------------------------------


def start(fake: FakeServer, *options: str) -> subprocess.Popen[str]:
    code = "import typer; from reference_impl.bench.serve import serve; typer.run(serve)"
    return subprocess.Popen(
        [sys.executable, "-c", code, "--base-url", fake.url, *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def stop_after(process: subprocess.Popen[str], fake: FakeServer, posts: int) -> str:
    """Ctrl-C as soon as the server has so many requests; what was printed."""
    until = time.monotonic() + 600
    while len(fake.posts) < posts and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=600)[0]


def test_a_load_that_is_stopped_keeps_what_it_has_measured(tmp_path: Path):
    """One user: when the server has the last request, all before it have come back."""

    async def script(call: Call) -> None:
        await (call.answer() if call.number < 1 + 2 + 10 else asyncio.sleep(600))

    file = tmp_path / "result.json"
    with running(script) as fake:
        process = start(
            fake, "--concurrency", "1", "--num", "50", "--warmup", "2", "--max-prompt", "20", "--max-output", "3",
            "--json", str(file),
        )  # fmt: skip
        printed = stop_after(process, fake, 1 + 2 + 11)
    assert process.returncode == 130, printed
    words = " ".join(printed.split())
    assert "partial stopped after 10 of 50 requests; 1 were under way" in words
    assert "10 of 10 succeeded" in words
    result = json.loads(file.read_text())
    assert (result["num_requests"], len(result["requests"])) == (10, 10)
    assert (result["setup"]["stopped"]["of"], result["setup"]["stopped"]["under_way"]) == (50, 1)
    assert result["setup"]["num_cut"] == 10


@pytest.mark.parametrize("answered", [0, 1], ids=["at the first small request", "at the first that counts"])
def test_a_load_that_is_stopped_before_it_has_measured_anything_says_so(answered: int):
    async def script(call: Call) -> None:
        await (call.answer() if call.number < answered else asyncio.sleep(600))

    with running(script) as fake:
        process = start(fake, "--concurrency", "1", "--warmup", "0")
        printed = stop_after(process, fake, answered + 1)
    assert process.returncode == 130, printed
    assert "nothing was measured" in printed
    assert "Traceback" not in printed


def test_the_result_is_written_although_nobody_reads_what_is_printed(tmp_path: Path):
    file = tmp_path / "result.json"
    with running() as fake:
        process = start(fake, *SMALL, "--json", str(file))
        assert process.stdout is not None
        process.stdout.close()
        process.wait(timeout=600)
    assert json.loads(file.read_text())["num_succeeded"] == 3


@pytest.mark.parametrize(("script", "words"), [(overload, "HTTP 429"), (cut_off, "connection cut")])
def test_a_server_that_answers_nothing_ends_the_command_with_an_error(script: Script, words: str):
    with running(script) as fake:
        done = command(fake)
    assert done.exit_code == 1
    assert words in done.output


def test_a_load_of_which_nothing_succeeds_ends_with_an_error_and_its_report(tmp_path: Path):
    async def script(call: Call) -> None:
        await (call.answer() if call.number == 0 else overload(call))

    with running(script) as fake:
        done = command(fake, "--workload", trace(tmp_path, 5), "--num", "5", "--warmup", "0")
    assert done.exit_code == 1
    assert "0 of 5 succeeded" in done.output
    assert "5 x HTTP 429" in done.output
