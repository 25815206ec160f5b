"""`inferlab plan`: what it prints, its JSON, its flags for two servers, and one line for what cannot be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from reference_impl.cli import app
from reference_impl.cli.messages import run

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert run(app, ["plan", *arguments]) == status
    out, err = capsys.readouterr()
    return err if status else out


def of(gpus: int, *more: str, model: str = "llama-3-70b", gpu: str = "h100") -> list[str]:
    return ["--model", model, "--gpu", gpu, "--gpus", str(gpus), *more]


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(said(capsys, *arguments, "--json"))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "--help")
    assert "inferlab plan --model llama-3-70b --gpu h100 --gpus 8 --ttft 0.5 --tpot 0.05" in " ".join(shown.split())


def test_the_example_shows_layouts_reasons_messages_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, *of(8, "--ttft", "0.5", "--tpot", "0.05"))
    for part in (
        "tp 8 ", "1,327,130", "Why: tp 8: ", "all-reduce, two-shot", "over NVLink 4", "take the same time at 2.2 MB",
        "does not fit: dp 8: 141 GB of weights on a GPU with 72.0 GB to use: 69.1 GB missing",
        "inferlab serve MODEL --tp 8 ", "vllm serve MODEL --tensor-parallel-size 8 --max-model-len 1280 ",
    ):  # fmt: skip
        assert part in shown
    assert max(map(len, shown.splitlines())) < 250


def test_numbers_of_the_register_come_out_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for gpus, floor, tokens in ((2, 22.5, 8850), (4, 12.0, 448e3), (8, 6.8, 1.33e6)):
        by_hand = ["--pp", "1", "--dp", "1", "--all-reduce-us", "10"]
        [layout] = as_json(capsys, *of(gpus, *by_hand, "--weights-gb", "140"))["layouts"]
        assert layout["floor"] * 1e3 == pytest.approx(floor, abs=0.05)
        [layout] = as_json(capsys, *of(gpus, *by_hand, "--weights-gb", "141.1"))["layouts"]
        assert layout["kv_tokens"] == pytest.approx(tokens, rel=3e-3)
    assert "(its floor would be 41.8 ms)" in said(capsys, *of(2, "--weights-gb", "140"))


def test_json_has_every_layout_and_those_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, *of(8))
    names = [each["name"] for each in (*found["layouts"], *found["rejected"])]
    assert len(names) == len(set(names)) == 10, "tp, pp and dp with a product of 8"
    assert found["one_shot_meets_ring_at"] == pytest.approx(2.23e6, rel=1e-3)
    assert {"name", "tp", "ttft", "tpot", "tokens_per_second", "kv_tokens", "per_token", "server", "vllm"} <= set(
        found["layouts"][0]
    )
    alone = as_json(capsys, *of(1, model="qwen3-0.6b"))
    assert alone["one_shot_meets_ring_at"] is None


def flags(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    best = as_json(capsys, *arguments)["layouts"][0]
    return best["server"], best["vllm"]


def test_flags_are_those_of_both_servers(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = flags(capsys, *of(16, "--tp", "4", "--pp", "2", "--dp", "2", "--batch", "10", "--kv-bits", "8"))
    assert ours.startswith("inferlab serve MODEL --tp 4 --pp 2 --dp 2 --kv-dtype fp8 --max-num-seqs 5  #")
    assert theirs == (
        "vllm serve MODEL --tensor-parallel-size 4 --pipeline-parallel-size 2 --data-parallel-size 2 "
        "--kv-cache-dtype fp8 --max-model-len 1280 --max-num-seqs 5 --gpu-memory-utilization 0.9"
        "  # 16 GPUs on 2 nodes: these have to be joined first"
    )
    ours, theirs = flags(capsys, *of(6, "--tp", "6"))
    assert ours.startswith("inferlab serve MODEL --tp 6 ")
    assert (
        theirs == "vllm serve: no command, 6 ranks do not divide 64 query heads, 8 KV heads, 28672 MLP columns evenly"
    )


def test_flags_leave_room_for_the_replica_that_has_one_request_more(capsys: pytest.CaptureFixture[str]) -> None:
    for command in flags(capsys, *of(2, "--dp", "2", "--batch", "101", model="llama-3-8b")):
        assert "--max-num-seqs 51" in command


def test_where_a_server_cannot_have_what_was_planned_no_command_claims_it(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = flags(capsys, *of(8, "--prompt", "10000"))
    for command in (ours, theirs):
        assert command.endswith(" no command, a request has 10,256 tokens and the model a context of 8,192")
    ours, theirs = flags(capsys, *of(4, "--kv-bits", "4", "--weight-bits", "4"))
    assert "--quantization int4 --kv-dtype int4" in ours
    assert theirs == "vllm serve: no command is known here for a cache of 4 bits, but for 8 and 16"
    ours, theirs = flags(capsys, *of(4, "--weight-bits", "4"))
    assert theirs.endswith("  # MODEL: a checkpoint of 4 bits")
    assert "for weights of 6 bits it has no option" in flags(capsys, *of(4, "--weight-bits", "6"))[0]
    assert "for a cache of 12 bits it has no option" in flags(capsys, *of(4, "--kv-bits", "12"))[0]


def test_bits_other_than_a_stored_models_are_asked_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--quantization int4" in flags(capsys, *of(1, "--weight-bits", "4", model="target", gpu="t4"))[0]
    assert "--quantization" not in flags(capsys, *of(1, "--weight-bits", "16", model="target", gpu="t4"))[0]


def test_flags_of_experts_say_where_they_are_divided(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM divides experts among the ranks of all replicas, our server inside one."""
    mixtral = {"model": "mixtral-8x7b"}
    ours, theirs = flags(capsys, *of(4, "--tp", "4", "--ep", "4", **mixtral))
    assert "--tp 4 --enable-expert-parallel" in ours
    assert "--tensor-parallel-size 4 --enable-expert-parallel" in theirs
    ours, theirs = flags(capsys, *of(4, "--tp", "2", "--ep", "4", **mixtral))
    assert ours == "inferlab serve: no command, it divides experts inside a replica only"
    assert "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel" in theirs
    ours, theirs = flags(capsys, *of(4, "--tp", "2", "--dp", "2", "--ep", "2", **mixtral))
    assert "--tp 2 --dp 2 --enable-expert-parallel" in ours
    assert "--data-parallel-size" not in theirs
    assert theirs.endswith("# one server for each of 2 replicas")


def test_our_flags_are_options_that_serve_has() -> None:
    serve: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {option for parameter in serve.params for option in parameter.opts}
    assert options > {
        "--tp", "--pp", "--dp", "--enable-expert-parallel", "--quantization", "--kv-dtype", "--max-num-seqs"
    }  # fmt: skip


def test_a_folder_is_read_with_its_bits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B), "utf-8")
    plain = as_json(capsys, *of(1, model=str(tmp_path)))
    assert plain["parameters"] == 8_030_261_248
    assert str(tmp_path) in plain["layouts"][0]["server"]
    (spaced := tmp_path / "a folder").mkdir()
    (spaced / "config.json").write_text(json.dumps(LLAMA_8B), "utf-8")
    for command in flags(capsys, *of(1, model=str(spaced))):
        assert f" serve '{spaced}' --" in command
    for stored, bits in (
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
    ):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"quantization_config": stored}), "utf-8")
        found = as_json(capsys, *of(1, model=str(tmp_path)))
        assert found["weight_bits"] == bits
        tables = 2 * 128_256 * 4096
        by_hand = (8_030_261_248 - tables) * bits / 8 + tables * 2
        assert found["layouts"][0]["weights"] == pytest.approx(by_hand, rel=1e-3), "embedding and head in 16 bits"
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA_8B | {"quantization_config": {"quant_method": "x"}}), "utf-8"
    )
    assert "--weight-bits: expected them" in said(capsys, *of(1, model=str(tmp_path)), status=2)


def test_a_course_model_has_a_plan_too(capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = flags(capsys, *of(2, "--tp", "2", model="target", gpu="t4"))
    assert ours.startswith("inferlab serve target --tp 2 ")
    assert theirs.startswith("vllm serve MODEL ")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (of(1), 1, "69.1 GB missing. Nearest that works: 2 GPUs, or weights of 8 bits"),
        # By hand: 16,600 requests' 1,279 tokens of 327,680 bytes and the weights are 7.10 TB: 99 GPUs of 72 GB or more.
        (of(97, "--batch", "16600"), 1, "Nearest that works: 112 GPUs"),
        (of(8, model="llama-4"), 1, "there is no model 'llama-4'; nearest: "),
        (of(8, gpu="h300"), 1, "there is no GPU 'h300'; nearest: "),
        (of(8, model="meta-llama/Llama-3-70B"), 2, "a model of the hub is not fetched for a plan; give a folder with"),
        (of(12, "--tp", "12"), 1, "cannot be divided among 12 ranks; nearest that works: 8 or 16"),
        (of(8, "--tpot", "0"), 2, "--tpot: expected more than 0 s, and a finite time, got 0"),
        (of(8, "--reserve-gb", "100"), 1, "100 GB are reserved on each GPU, and 72.0 GB of it may be used"),
        (of(8, model=""), 1, "there is no model ''; known: "),
        (of(0), 2, "--gpus: expected 1 or more, got '0'"),
        (of(8, model="no/such.json"), 1, "no/such.json: there is no such file or folder"),
    ],
)
def test_what_cannot_be_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, message: str
) -> None:
    line = said(capsys, *arguments, status=status)
    assert message in line
    assert line.startswith("inferlab: error: ")
    assert line.count("\n") == 1


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "gpt2"}', '{"model_type": "llama"}'])
def test_a_file_that_is_no_models_config_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "odd.json").write_text(text, "utf-8")
    line = said(capsys, *of(1, model=str(tmp_path / "odd.json")), status=1)
    assert f"{tmp_path / 'odd.json'}: " in line
    assert line.count("\n") == 1


def test_it_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers']));"
        "from reference_impl.cli import app; from reference_impl.cli.messages import run;"
        f"sys.exit(run(app, {['plan', *of(8)]!r}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Why: " in done.stdout
