"""llama.cpp's side of `cpu_llama.py`: run in its own environment by peer_process.py, imports nothing of this project.

The weights are those of a folder as `transformers` saves it, in bfloat16, written as GGUF by the package gguf, as
llama.cpp's convert_hf_to_gguf.py does: matrices in f16, q8_0 or q4_0 (all of them, the embedding too, which is lm_head
here), norms in float32. Tokens are numbers: the file has no tokenizer.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import struct
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def stored_tensors(file: Path) -> Iterator[tuple[str, Array]]:
    """(name, values in float32) of a safetensors file whose tensors are bfloat16: the upper half of a float32 each."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        entries = json.loads(opened.read(length))
    data = np.memmap(file, np.uint8, "r", offset=8 + length)
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{file}: {name}: expected BF16, found {entry['dtype']}")
        begin, end = entry["data_offsets"]
        halves = data[begin:end].view(np.uint16).astype(np.uint32)
        yield name, (halves << 16).view(np.float32).reshape(entry["shape"])


def permuted(weight: Array, heads: int) -> Array:
    """Rows of q or k in llama.cpp's order: it rotates the pairs (2 i, 2 i + 1) of a head, Hugging Face's models
    (i, i + head_dim / 2). Source: LlamaModel.permute of convert_hf_to_gguf.py."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def convert(folder: str, file: str, kind: str) -> dict[str, int]:
    """Writes `file`. kind: of the matrices, f16, q8_0 or q4_0. The answer: its bytes."""
    import gguf

    config = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"] or not config["tie_word_embeddings"]:
        raise ValueError(f"{folder}: expected a LlamaForCausalLM with tied embeddings, found {config['architectures']}")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    kinds = gguf.GGMLQuantizationType
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, "llama")
    describe(writer, config)
    for name, values in stored_tensors(Path(folder) / "model.safetensors"):
        if (projection := name.split(".")[-2]) in heads:
            values = permuted(values, heads[projection])
        own = kinds.F32 if values.ndim == 1 else kinds[kind.upper()]
        theirs = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(theirs, gguf.quants.quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {"bytes": Path(file).stat().st_size}


def describe(writer: Any, config: dict[str, Any]) -> None:
    """writer: a gguf.GGUFWriter; config: of config.json, where transformers 5 has rope_theta in rope_parameters."""
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


class Model:
    """A GGUF file in llama.cpp, and a context for each number of sequences.

    Its own functions are called, not the class Llama of the Python package, which copies logits and samples in Python.
    """

    def __init__(self, file: str, threads: int, length: int):
        self.lib: Any = importlib.import_module("llama_cpp")
        self.lib.llama_backend_init()
        self.threads, self.length = threads, length
        self.contexts: dict[int, Any] = {}
        self.model = self.lib.llama_model_load_from_file(file.encode(), self.lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        self.vocab_size = int(self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model)))

    def _context(self, sequences: int) -> Any:
        if sequences not in self.contexts:
            params = self.lib.llama_context_default_params()
            params.n_ctx = params.n_batch = sequences * self.length
            params.n_seq_max = sequences
            params.n_threads = params.n_threads_batch = self.threads
            context = self.lib.llama_init_from_model(self.model, params)
            if not context:
                raise RuntimeError(f"llama.cpp makes no context of {sequences} sequences of {self.length} tokens")
            self.contexts[sequences] = context
        return self.contexts[sequences]

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest next token new_tokens times, all prompts in each step."""
        context = self._context(len(prompts))
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)
        texts: list[list[int]] = [[] for _ in prompts]
        batch = self.lib.llama_batch_init(sum(map(len, prompts)), 0, 1)
        try:
            inputs, start = [list(prompt) for prompt in prompts], [0] * len(prompts)
            for _ in range(new_tokens):
                chosen = self._step(context, batch, inputs, start).argmax(1).tolist()
                start = [at + len(own) for at, own in zip(start, inputs, strict=True)]
                inputs = [[token] for token in chosen]
                for text, token in zip(texts, chosen, strict=True):
                    text.append(token)
        finally:
            self.lib.llama_batch_free(batch)
        return texts

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """Logits of all tokens, after these."""
        context = self._context(1)
        self.lib.llama_memory_clear(self.lib.llama_get_memory(context), False)
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        try:
            found: list[float] = self._step(context, batch, [list(tokens)], [0])[0].tolist()
        finally:
            self.lib.llama_batch_free(batch)
        return found

    def _step(self, context: Any, batch: Any, inputs: list[list[int]], start: list[int]) -> Array:
        """[sequences, vocab_size] float32, after the last token of each sequence; a view until the next step."""
        i = 0
        for sequence, (tokens, at) in enumerate(zip(inputs, start, strict=True)):
            for offset, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, at + offset
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = offset == len(tokens) - 1
                i += 1
        batch.n_tokens = i
        if (status := self.lib.llama_decode(context, batch)) != 0:
            raise RuntimeError(f"llama_decode: expected 0, got {status} for {i} tokens")
        found = ctypes.cast(self.lib.llama_get_logits(context), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(found, shape=(len(inputs), self.vocab_size))


class Worker:
    """What can be asked. Models are kept by name."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}

    def versions(self) -> dict[str, str]:
        lib: Any = importlib.import_module("llama_cpp")
        found = {name: metadata.version(name) for name in ("llama-cpp-python", "gguf")}
        return {**found, "system": lib.llama_print_system_info().decode().strip()}

    def load(self, name: str, file: str, threads: int, length: int) -> None:
        """length: the tokens of a sequence at most."""
        self.models[name] = Model(file, threads, length)

    def generate(self, name: str, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        return self.models[name].generate(prompts, new_tokens)

    def logits(self, name: str, tokens: list[int]) -> list[float]:
        return self.models[name].logits(tokens)


_worker = Worker()
CALLS = {
    "versions": _worker.versions, "convert": convert, "load": _worker.load, "generate": _worker.generate,
    "logits": _worker.logits,
}  # fmt: skip
