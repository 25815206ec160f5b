"""llama.cpp as a peer, without llama.cpp: the file that is written for it, the process that is spoken with, the batches
that it would get, and a whole run with another engine in its place. Here, too, a wrong answer is noticed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reference_impl.assembly.model import load_model
from reference_impl.bench import cpu_llama, cpu_quantized, llama_worker
from reference_impl.bench.cpu_llama import LlamaCpp
from reference_impl.bench.peer_process import PeerFailed
from reference_impl.features.baselines.no_cache import RecomputeAttention
from reference_impl.features.baselines.ragged import ragged_batch

SMALL = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sharp") / "model"
    cpu_quantized.make_model(made, **cpu_llama.SHARP)
    return made


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_the_file_has_the_weights_under_their_names_in_this_kind(kind: str, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    assert llama_worker.convert(str(folder), str(file), kind) == {"bytes": file.stat().st_size}
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    weights = load_file(folder / "model.safetensors")
    assert len(found) == len(weights) == 2 + 9 * 2  # lm_head is the embedding
    kinds = {tensor.tensor_type.name for name, tensor in found.items() if not name.endswith("norm.weight")}
    assert kinds == {kind.upper()}
    down = found["blk.1.ffn_down.weight"]
    assert down.shape.tolist() == [96, 64]  # of GGUF: columns first
    values = gguf.quants.dequantize(down.data, down.tensor_type)
    expected = weights["model.layers.1.mlp.down_proj.weight"].float().numpy()
    assert np.abs(values - expected).max() <= {"f16": 1e-7, "q8_0": 0.01, "q4_0": 0.2}[kind]
    norm = found["blk.0.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert np.array_equal(norm.data, weights["model.layers.0.input_layernorm.weight"].float().numpy())


def test_rows_of_q_and_k_are_interleaved_within_a_head_and_those_of_v_are_not(folder: Path, tmp_path: Path) -> None:
    llama_worker.convert(str(folder), str(tmp_path / "x.gguf"), "f16")
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    weights = load_file(folder / "model.safetensors")
    for name, heads in (("q", 4), ("k", 2)):
        theirs = weights[f"model.layers.0.self_attn.{name}_proj.weight"].float().numpy()
        for head in range(heads):
            for i in range(8):  # llama.cpp rotates rows 2 i and 2 i + 1, Hugging Face's model i and 8 + i
                ours = found[f"blk.0.attn_{name}.weight"][16 * head + 2 * i : 16 * head + 2 * i + 2]
                assert np.array_equal(ours, theirs[[16 * head + i, 16 * head + 8 + i]])
    assert np.array_equal(found["blk.0.attn_v.weight"], weights["model.layers.0.self_attn.v_proj.weight"].float())


def test_what_cannot_be_converted_is_refused(tmp_path: Path) -> None:
    cpu_quantized.make_model(tmp_path, **cpu_llama.SHARP | {"tie_word_embeddings": False})
    with pytest.raises(ValueError, match="expected a LlamaForCausalLM with tied embeddings, found"):
        llama_worker.convert(str(tmp_path), str(tmp_path / "x.gguf"), "f16")


class Toy:
    """As much of the module llama_cpp as is called. Its model: the likeliest token is the number of tokens in the
    sequence times 31, plus their sum, modulo the vocabulary."""

    vocab_size = 97

    def __init__(self) -> None:
        self.cells: dict[int, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 1

    def llama_vocab_n_tokens(self, _: Any) -> int:
        return self.vocab_size

    def llama_context_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_init_from_model(self, _: Any, params: SimpleNamespace) -> SimpleNamespace:
        assert params.n_threads == params.n_threads_batch == 2
        assert params.n_ctx == params.n_seq_max * 16
        return params

    def llama_memory_clear(self, _: Any, __: bool) -> None:
        self.cells.clear()

    def llama_batch_init(self, size: int, _: int, __: int) -> SimpleNamespace:
        lists = {name: [None] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[None] for _ in range(size)], **lists)

    def llama_decode(self, context: Any, batch: SimpleNamespace) -> int:
        rows = []
        for i in range(batch.n_tokens):
            (sequence,) = batch.seq_id[i]
            assert batch.n_seq_id[i] == 1
            assert sequence < context.n_seq_max
            own = self.cells.setdefault(sequence, [])
            assert batch.pos[i] == len(own)
            own.append(batch.token[i])
            if batch.logits[i]:
                rows.append(np.eye(self.vocab_size, dtype=np.float32)[(31 * len(own) + sum(own)) % self.vocab_size])
        self.logits = np.stack(rows)
        return 0

    def llama_get_logits(self, _: Any) -> Any:
        return self.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))


def test_a_batch_gives_each_sequence_its_own_tokens_and_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", Toy())  # type: ignore[arg-type]
    model = llama_worker.Model("x.gguf", threads=2, length=16)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5]]
    expected = [list(prompt) for prompt in prompts]
    for own in expected:
        for _ in range(4):
            own.append((31 * len(own) + sum(own)) % Toy.vocab_size)
    for _ in range(2):  # what the first left is gone
        found = model.generate(prompts, 4)
        assert [[*prompt, *text] for prompt, text in zip(prompts, found, strict=True)] == expected
    assert int(np.argmax(model.logits(prompts[2]))) == expected[2][5]


def test_the_worker_writes_a_file_says_what_is_wrong_and_goes_on(folder: Path, tmp_path: Path) -> None:
    with LlamaCpp("llama.cpp", sys.executable, cpu_llama.WORKER) as peer:
        with pytest.raises(PeerFailed, match="llama.cpp: dance: KeyError: 'dance'"):
            peer.ask("dance")
        with pytest.raises(PeerFailed, match="convert: FileNotFoundError: .*config.json"):
            peer.ask("convert", folder=str(tmp_path), file=str(tmp_path / "x.gguf"), kind="f16")
        answer = peer.ask("convert", folder=str(folder), file=str(tmp_path / "x.gguf"), kind="q4_0")
    assert answer == {"bytes": (tmp_path / "x.gguf").stat().st_size}


def test_a_process_that_ends_is_no_hang_and_its_last_words_are_said(tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\ninput()\nsys.exit('GGML_ASSERT(false) failed')\n")
    with LlamaCpp("llama.cpp", sys.executable, worker) as peer:
        for _ in range(2):
            with pytest.raises(PeerFailed, match=r"generate: its process ended with 1: GGML_ASSERT\(false\) failed"):
                peer.generate("f16", [[1]], 1)


def test_without_an_environment_it_says_how_to_have_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("INFERLAB_LLAMA_CPP", raising=False)
    assert cpu_llama.main(["--rounds", "1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("cpu_llama: not measured: INFERLAB_LLAMA_CPP names no environment with llama.cpp; to have")
    assert "pip install llama-cpp-python gguf" in said
    monkeypatch.setenv("INFERLAB_LLAMA_CPP", str(tmp_path))
    assert f"expected a virtual environment, with bin/python, got {tmp_path}" in cpu_llama.run(rounds=1)["not_measured"]


def test_an_environment_without_the_package_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python, worker = tmp_path / "bin" / "python", tmp_path / "worker.py"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    worker.write_text("import a_package_that_is_not_there\n")
    monkeypatch.setenv("INFERLAB_LLAMA_CPP", str(tmp_path))
    monkeypatch.setattr(cpu_llama, "WORKER", worker)
    said = cpu_llama.run(rounds=1)["not_measured"]
    assert "No module named 'a_package_that_is_not_there'; to have it: python -m venv FOLDER" in said


class Stand:
    """Another engine in llama.cpp's place: ours, in float32, of the file that is written for llama.cpp."""

    def __init__(self) -> None:
        self.models: dict[str, Any] = {}

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, do: str, **what: Any) -> Any:
        if do == "convert":
            return llama_worker.convert(**what)
        assert do == "load"
        assert what["threads"] == torch.get_num_threads()
        self.models[what["name"]] = load_model(what["file"], torch.float32)

    @torch.inference_mode()
    def logits(self, name: str, tokens: list[int]) -> torch.Tensor:
        model = self.models[name]
        batch = ragged_batch([(tokens, 0)], len(tokens), torch.device("cpu"))
        batch.logits_indices = torch.tensor([len(tokens) - 1])
        return model(batch, None, RecomputeAttention(model.config.attention_scale))[0]

    def generate(self, name: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        for prompt, text in zip(prompts, texts, strict=True):
            for _ in range(new_tokens):
                text.append(int(self.logits(name, [*prompt, *text]).argmax()))
        return texts


@pytest.fixture(params=["traced", pytest.param("compiled", marks=(pytest.mark.compiler, pytest.mark.slow))])
def as_traced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be compiled runs as it was traced: a compiler takes half a minute for it, and what it makes is proven
    in tests/features/compiled."""
    if request.param == "traced":
        monkeypatch.setattr("torch._inductor.compile", lambda graph, arguments, options: graph)


def test_every_candidate_is_timed_and_verified(as_traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaCpp, "started", lambda *_: (Stand(), {"llama-cpp-python": "0.0.stand"}))
    # One that is compiled: each takes seconds.
    monkeypatch.setattr(cpu_llama, "ONE_STREAM", {**cpu_llama.BESIDE, "int8, compiled": "q8_0"})
    result = cpu_llama.run(rounds=1, new_tokens=2, streams=2, **SMALL)
    ours, theirs = ["bfloat16", "int8", "int4"], ["f16", "q8_0", "q4_0"]
    assert list(result["one stream"]["tokens_per_second"]) == [*ours, "int8, compiled", *theirs]
    assert list(result["one stream"]["times_as_long"]) == [*ours, "int8, compiled"]
    assert list(result["batch"]["tokens_per_second"]) == ["float32", *ours, *theirs]
    assert list(result["batch"]["times_as_long"]) == ["float32", *ours]
    verified = result["verified"]
    assert verified["sharp_logits_apart"] < 1e-4
    assert set(verified) == {
        "sharp_logits_apart", "bfloat16, one stream", "float32, batch", "bfloat16, batch", "int8", "int4", "q8_0",
        "q4_0",
    }  # fmt: skip
    assert verified["float32, batch"]["rows"] == 2
    for case in ("one stream", "batch"):
        speed = {name: 1 / spread["median"] for name, spread in result[case]["tokens_per_second"].items()}
        pairs = {"float32": "f16", "int8, compiled": "q8_0", **dict(zip(ours, theirs, strict=True))}
        for name, spread in result[case]["times_as_long"].items():
            assert spread["median"] == pytest.approx(speed[name] / speed[pairs[name]])
    shown = cpu_llama.markdown(result)
    assert shown.count("\n| one stream, ") == 4
    assert shown.count("\n| 2 requests, ") == 4
    assert "| 2 requests, float32 beside f16 |" in shown
    assert "llama-cpp-python 0.0.stand" in shown


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_0"])
def test_a_wrong_token_of_llama_cpp_stops_it(kind: str, tmp_path: Path) -> None:
    peer, source = Stand(), tmp_path / "model"
    cpu_quantized.make_model(source, **SMALL)
    kinds = ("f16", "q8_0", "q4_0")
    for name in kinds:
        cpu_llama.load(peer, source, name)  # type: ignore[arg-type]
    rows = {name: peer.generate(name, cpu_llama.prompts_of(1), 2) for name in kinds}
    ours = dict.fromkeys(("float32", "bfloat16"), rows["f16"])
    right = cpu_llama._verified(source, {}, {case: {**rows, **ours} for case in ("one stream", "batch")})
    assert right["float32, batch"]["rows_equal"] == 1
    assert right["q4_0"]["largest_gap_to_first_choice"] < 1e-5
    wrong = {**rows, **ours, kind: [[rows[kind][0][0], 17]]}
    with pytest.raises(RuntimeError, match="not a near-tie"):
        cpu_llama._verified(source, {}, {"one stream": {**rows, **ours}, "batch": wrong})


def test_rows_of_q_and_k_in_the_wrong_order_stop_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llama_worker, "permuted", lambda weight, heads: weight)
    with pytest.raises(RuntimeError, match="logits of the converted model are .* of the largest away"):
        cpu_llama.check_conversion(Stand(), tmp_path / "model")  # type: ignore[arg-type]


def test_of_a_process_that_fails_midway_the_result_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Stand):
        def ask(self, do: str, **what: Any) -> Any:
            raise PeerFailed("llama.cpp: load: out of memory")

    monkeypatch.setattr(LlamaCpp, "started", lambda *_: (Failing(), {}))
    assert cpu_llama.run(rounds=1, **SMALL) == {"not_measured": "llama.cpp: load: out of memory"}
