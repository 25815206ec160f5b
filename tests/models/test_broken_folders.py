"""Folders that are broken in one place: one error that names file and field, before memory or time is taken.

What is taken is counted (allocations of Python, bytes of torch's tensors, calls), never timed.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grader.cli import app
from reference_impl import LLM, course_model
from reference_impl.cli import messages
from reference_impl.models.config_reader import ConfigError
from reference_impl.models.json_file import read_object

Break = Callable[[Path], object]
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NEST = "[" * 10_000
HUGE = 10**12


def change(file: str, **fields: Any) -> Break:
    """Other values of fields; `...` removes one."""

    def breaks(folder: Path) -> None:
        raw = json.loads((folder / file).read_text("utf-8")) | fields
        (folder / file).write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}), "utf-8")

    return breaks


def write(file: str, content: str | bytes) -> Break:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / file).write_bytes(content)


def cut(file: str, length: int) -> Break:
    """Only the first bytes of it; a negative length: all but the last."""
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:length])


def instead_a_folder(file: str) -> Break:
    return lambda folder: ((folder / file).unlink(), (folder / file).mkdir())


def shards(names: Any) -> Break:
    """An index instead of the one file. names: its weight_map, or the name of the file that all tensors are in."""

    def breaks(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001.safetensors")
        table = {"model.norm.weight": names} if isinstance(names, str) else names
        (folder / INDEX).write_text(json.dumps({"weight_map": table}), "utf-8")

    return breaks


def header(edit: Callable[[dict[str, Any]], object] | bytes) -> Break:
    """Another header of the weights, whose bytes stay."""

    def breaks(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        new = edit
        if not isinstance(new, bytes):
            table = json.loads(raw[8 : 8 + length])
            new(table)
            new = json.dumps(table).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return breaks


def rope(**fields: Any) -> Break:
    whole = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return change(CONFIG, rope_scaling=whole | {"original_max_position_embeddings": 512} | fields)


def more_tokens(folder: Path) -> None:
    """A tokenizer that has more tokens than the model: of the draft model with half the embedding."""
    change(TOKENIZER, added_tokens=[])(folder)
    raw = json.loads((folder / TOKENIZER).read_text("utf-8"))
    raw["model"]["vocab"] |= {f"one more {i}": 4096 + i for i in range(9)}
    (folder / TOKENIZER).write_text(json.dumps(raw), "utf-8")


def added_token(folder: Path) -> None:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    raw = json.loads((folder / TOKENIZER).read_text("utf-8"))
    raw["added_tokens"].append({"id": 5000, "content": "<extra>", **plain})
    (folder / TOKENIZER).write_text(json.dumps(raw), "utf-8")


def is_no_file(folder: Path) -> None:
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(folder / "nowhere")


# name -> (what breaks it, the file that the error names, what else it says)
BROKEN: dict[str, tuple[Break, str, str]] = {
    # config.json, the file
    "config is a nest": (write(CONFIG, NEST), CONFIG, "nested too deep"),
    "config is an object in a nest": (write(CONFIG, '{"a":' * 10_000), CONFIG, "nested too deep"),
    "config is empty": (write(CONFIG, ""), CONFIG, "not valid JSON"),
    "config is cut": (cut(CONFIG, 200), CONFIG, "not valid JSON"),
    "config is a list": (write(CONFIG, "[]"), CONFIG, "expected a JSON object, found list"),
    "config is UTF-16": (write(CONFIG, '{"a": 1}'.encode("utf-16")), CONFIG, "not valid JSON"),
    "config has a number of many digits": (write(CONFIG, '{"vocab_size": 1%s}' % ("0" * 5000)), CONFIG, "not valid"),
    "config is a folder": (instead_a_folder(CONFIG), CONFIG, "no such file"),
    "config is a link to nothing": (is_no_file, CONFIG, "no such file"),
    "generation config is a nest": (write("generation_config.json", NEST), "generation_config.json", "too deep"),
    "generation config is a string": (write("generation_config.json", '"a"'), "generation_config.json", "found str"),
    # its fields
    "many words": (change(CONFIG, vocab_size=HUGE), CONFIG, "vocab_size: expected at most 2,147,483,647"),
    "as many words as may be": (change(CONFIG, vocab_size=2**31 - 1), CONFIG, "vocab_size 2,147,483,647"),
    "many layers": (change(CONFIG, num_hidden_layers=10**9), CONFIG, "num_hidden_layers: expected at most 4,096"),
    "as many layers as may be": (
        change(CONFIG, num_hidden_layers=4096, intermediate_size=10**6), CONFIG, "num_hidden_layers 4,096"
    ),
    "wide": (change(CONFIG, hidden_size=2**30), CONFIG, "hidden_size 1,073,741,824"),
    "wide inside": (change(CONFIG, intermediate_size=2**31 - 1), CONFIG, "intermediate_size 2,147,483,647"),
    "many heads": (change(CONFIG, num_attention_heads=HUGE), CONFIG, "num_attention_heads: expected at most 4,096"),
    "large heads": (change(CONFIG, head_dim=2**31 - 2), CONFIG, "sizes of the weights"),
    "many positions": (change(CONFIG, max_position_embeddings=HUGE), CONFIG, "max_position_embeddings: expected at"),
    "as many positions as may be": (
        change(CONFIG, max_position_embeddings=2**31 - 1), "", "max_position_embeddings: cosines and sines"
    ),
    "a size below 0": (change(CONFIG, hidden_size=-128), CONFIG, "hidden_size: expected a positive integer, found -"),
    "a size of 0": (change(CONFIG, num_key_value_heads=0), CONFIG, "num_key_value_heads: expected a positive"),
    "a size that is true": (change(CONFIG, num_hidden_layers=True), CONFIG, "num_hidden_layers: expected a positive"),
    "a size with a fraction": (change(CONFIG, vocab_size=4096.0), CONFIG, "vocab_size: expected a positive integer"),
    "a size in words": (change(CONFIG, vocab_size="4096"), CONFIG, "vocab_size: expected a positive integer"),
    "a size that is a list": (change(CONFIG, head_dim=[[64] * 10_000]), CONFIG, "head_dim: expected a positive"),
    "a size that is missing": (change(CONFIG, intermediate_size=...), CONFIG, "intermediate_size: expected"),
    "an odd head": (change(CONFIG, head_dim=63), CONFIG, "head_dim: expected an even number"),
    "no finite norm": (change(CONFIG, rms_norm_eps=float("nan")), CONFIG, "rms_norm_eps: expected a positive"),
    "a norm too small": (change(CONFIG, rms_norm_eps=1e-320), CONFIG, "rms_norm_eps: expected a number from 1e-30"),
    "a base of many digits": (change(CONFIG, rope_theta=10**400), CONFIG, "rope_theta: expected a number from 1e-30"),
    "an end beyond all tokens": (
        change("generation_config.json", eos_token_id=10**30), CONFIG, "eos_token_id in generation_config.json"
    ),
    "layers of no kind": (change(CONFIG, layer_types=["x"] * 10_000), CONFIG, "layer_types: expected a list of 2"),
    "frequencies alike": (rope(low_freq_factor=4.0), CONFIG, "high_freq_factor: expected a number above"),
    "frequencies upside down": (rope(low_freq_factor=8), CONFIG, "high_freq_factor: expected a number above"),
    "a frequency of 0": (rope(low_freq_factor=0), CONFIG, "low_freq_factor: expected a positive number"),
    "a factor that is infinite": (rope(factor=float("inf")), CONFIG, "factor: expected a positive number"),
    # weights
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), WEIGHTS, "no such file"),
    "weights are a folder": (instead_a_folder(WEIGHTS), WEIGHTS, "found a folder"),
    "weights are empty": (write(WEIGHTS, b""), WEIGHTS, "expected the sizes of|not a complete"),
    "half a header length": (cut(WEIGHTS, 5), WEIGHTS, "not a complete safetensors file"),
    "half a header": (cut(WEIGHTS, 500), WEIGHTS, "not a complete safetensors file"),
    "the last byte is missing": (cut(WEIGHTS, -1), WEIGHTS, "not a complete safetensors file"),
    "a header without end": (write(WEIGHTS, b"\xff" * 64), WEIGHTS, "not a complete safetensors file"),
    "a header of brackets": (header(NEST.encode()), WEIGHTS, "not a complete safetensors file"),
    "a header of another shape": (header(b'{"a": 1}'), WEIGHTS, "not a complete safetensors file"),
    "a tensor beyond the file": (
        header(lambda t: t["model.norm.weight"].update(data_offsets=[0, HUGE])), WEIGHTS, "not a complete"
    ),
    "a tensor of a type that is none": (
        header(lambda t: t["model.norm.weight"].update(dtype="F3")), WEIGHTS, "not a complete"
    ),
    "a tensor of another shape": (
        header(lambda t: t["model.norm.weight"].update(shape=[64, 2])), WEIGHTS, "model.norm.weight: expected shape"
    ),
    # index of weights
    "index is a nest": (lambda f: (shards("x")(f), write(INDEX, NEST)(f)), INDEX, "nested too deep"),
    "index leads up": (shards("../model.safetensors"), INDEX, "weight_map.* file in this folder, found '../model"),
    "index leads up later": (shards("a/../../b.safetensors"), INDEX, "in this folder, found 'a/../../b"),
    "index leads anywhere": (shards("/etc/passwd.safetensors"), INDEX, "in this folder, found '/etc"),
    "index leads up in Windows": (shards("..\\x.safetensors"), INDEX, "in this folder, found"),
    "index names another kind": (shards("weights.bin"), INDEX, "expected the name of a .safetensors file"),
    "index names a folder": (
        lambda f: (shards("d.safetensors")(f), (f / "d.safetensors").mkdir()), "d.safetensors", "found a folder"
    ),
    "index names what is not there": (shards("gone.safetensors"), "gone.safetensors", "no such file"),
    "index has a name too long": (shards("x" * 5000 + ".safetensors"), INDEX, "weight_map"),
    "index has a name with a zero": (shards("a\0.safetensors"), INDEX, "weight_map"),
    "index names nothing": (shards({}), INDEX, "weight_map: expected an object"),
    "index is a list": (shards([]), INDEX, "weight_map: expected an object"),
    "index has numbers": (shards({"a": 5}), INDEX, "weight_map, 'a': expected the name"),
    "index of many files": (
        shards({f"t{i}": f"{i}.safetensors" for i in range(20_000)}), "0.safetensors", "no such file"
    ),
    # tokenizer.json
    "tokenizer is empty": (write(TOKENIZER, ""), TOKENIZER, "not a tokenizer"),
    "tokenizer is a page": (write(TOKENIZER, "<html>"), TOKENIZER, "not a tokenizer"),
    "tokenizer is a nest": (write(TOKENIZER, NEST), TOKENIZER, "not a tokenizer"),
    "tokenizer is a list": (write(TOKENIZER, "[]"), TOKENIZER, "not a tokenizer"),
    "tokenizer has nothing": (write(TOKENIZER, "{}"), TOKENIZER, "not a tokenizer"),
    "tokenizer is cut": (cut(TOKENIZER, 100_000), TOKENIZER, "not a tokenizer"),
    "tokenizer is not UTF-8": (cut(TOKENIZER, 0), TOKENIZER, "not a tokenizer"),
    "tokenizer has no model": (change(TOKENIZER, model=...), TOKENIZER, "not a tokenizer"),
    "tokenizer has an unknown model": (change(TOKENIZER, model={"type": "X"}), TOKENIZER, "not a tokenizer"),
    "tokenizer has more tokens": (more_tokens, TOKENIZER, "vocabulary: expected at most 4,096 tokens"),
    "tokenizer has an added token": (added_token, TOKENIZER, "vocabulary: expected at most 4,096 tokens"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(course_model("draft"), tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What loading and counting import is there before anything is counted."""
    with Counted():
        LLM(course_model("draft"), num_blocks=8)


class Counted(TorchDispatchMode):
    """num_bytes: of all tensors that torch makes meanwhile."""

    num_bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), options: Any = None) -> Any:
        made = operator(*given, **(options or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.num_bytes += tensor.numel() * tensor.itemsize
        return made


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_one_error_that_names_the_file(name: str, folder: Path, monkeypatch: Any) -> None:
    breaks, file, said = BROKEN[name]
    breaks(folder)
    monkeypatch.setattr("reference_impl.assembly.model.free_bytes", lambda device: 64 << 30)  # on whatever machine
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    tracemalloc.start()
    sys.setprofile(count)
    try:
        with Counted() as tensors, pytest.raises(ValueError, match=said) as error:
            LLM(folder, num_blocks=8)
        _, most = tracemalloc.get_traced_memory()
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    assert "\n" not in str(error.value)
    assert str(folder / file) in str(error.value) or not file
    assert len(str(error.value)) < 1000
    assert tensors.num_bytes < 100 << 20
    assert most < 32 << 20
    assert calls < 500_000


def test_a_model_that_is_whole_is_loaded_within_the_same_bounds(folder: Path) -> None:
    with Counted() as tensors:
        LLM(folder, num_blocks=8)
    assert tensors.num_bytes < 100 << 20


def test_a_special_token_beyond_the_vocabulary_is_allowed(folder: Path) -> None:
    """Gemma 3's tokenizer has one for images."""
    added_token(folder)
    raw = json.loads((folder / TOKENIZER).read_text("utf-8"))
    raw["added_tokens"][-1]["special"] = True
    (folder / TOKENIZER).write_text(json.dumps(raw), "utf-8")
    llm = LLM(folder, num_blocks=8)
    with pytest.raises(ValueError, match="'<extra>'.* is outside the vocabulary"):
        llm.generate(["a", "b <extra>"])
    assert len(llm.generate("a <extra")) == 1


def test_weights_may_be_links_to_anywhere(folder: Path, tmp_path: Path) -> None:
    """As in Hugging Face's cache."""
    shards("model-00001.safetensors")(folder)
    (folder / "model-00001.safetensors").rename(tmp_path / "blob")
    (folder / "model-00001.safetensors").symlink_to(tmp_path / "blob")
    assert LLM(folder, num_blocks=8).engine.num_blocks == 8


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / INDEX
    with file.open("wb") as opened:
        opened.truncate(1 << 40)  # of which the disk holds nothing
    monkeypatch.setattr(Path, "read_text", lambda *given: pytest.fail("it was read"))
    with pytest.raises(ConfigError, match=rf"{INDEX}: expected at most 1,000 bytes of JSON, found 1,099,511,627,776"):
        read_object(file, ConfigError, 1000)


# --- the commands -----------------------------------------------------------------------------------------------------


def inferlab(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own."""
    program = str(Path(sys.executable).with_name("inferlab"))
    plain = {**os.environ, "NO_COLOR": "1", "COLUMNS": "1000"}
    return subprocess.run([program, *words], capture_output=True, text=True, timeout=600, env=plain)


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """here(*words): what `inferlab *words` does, in this process; and whatever else is written to its outputs."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        capfd.readouterr()
        status = messages.run(app, list(words))
        return subprocess.CompletedProcess(words, status, *capfd.readouterr())

    return run


def is_one_line(done: subprocess.CompletedProcess[str], file: Path) -> None:
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"inferlab: error: {file}: ")


@pytest.mark.parametrize(
    "name",
    ["config is a nest", "many layers", "index leads up", "tokenizer is cut", "tokenizer has more tokens"],
)
def test_generate_ends_with_one_line(name: str, folder: Path, here) -> None:
    breaks, file, _ = BROKEN[name]
    breaks(folder)
    is_one_line(here("generate", "x", "--model", str(folder), "--max-tokens", "1"), folder / file)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("frequencies alike", "tokenizer is a list")]


# Its engine is a process each time: here one folder whose config is broken, one of broken weights, below a tokenizer.
@pytest.mark.parametrize("name", ["half a header", "many words", *SLOW])
def test_serve_ends_with_one_line(name: str, folder: Path, here) -> None:
    breaks, file, _ = BROKEN[name]
    breaks(folder)
    done = here("serve", str(folder), "--port", "0")
    assert done.stdout == ""
    is_one_line(done, folder / file)


def test_so_they_do_in_a_process_of_their_own(folder: Path) -> None:
    """And nothing that is there before or after the command adds a line."""
    breaks, file, _ = BROKEN["tokenizer is cut"]
    breaks(folder)
    is_one_line(inferlab("generate", "x", "--model", str(folder), "--max-tokens", "1"), folder / file)
    done = inferlab("serve", str(folder), "--port", "0")
    assert done.stdout == ""
    is_one_line(done, folder / file)


def test_so_it_does_where_the_model_computes_in_another_process(folder: Path, here) -> None:
    BROKEN["half a header"][0](folder)
    done = here("generate", "x", "--model", str(folder), "--worker", "process")
    is_one_line(done, folder / WEIGHTS)
    assert f"{folder / WEIGHTS}: not a complete safetensors file" in done.stderr


@pytest.mark.parametrize("name", ["config is a nest", "tokenizer is empty"])
def test_doctor_s_finding_names_the_file(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grader.doctor import engine_row

    breaks, file, _ = BROKEN[name]
    breaks(folder)
    monkeypatch.setattr("reference_impl.assembly.config.course_model", lambda name: folder)
    row = engine_row()
    assert row.verdict == "fail"
    assert str(folder / file) in row.found
    assert "\n" not in row.found
