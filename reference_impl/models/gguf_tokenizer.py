"""The tokenizer that lies in a GGUF file, as one of Hugging Face's tokenizers.

A file may have it whole (tokenizer.huggingface.json). Most have parts: tokens, their types, and merges of bytes
("gpt2") or scores ("llama", SentencePiece's BPE). How text is cut before merges is only a name there
(tokenizer.ggml.pre), whose pattern each reader has to know: llama.cpp's src/llama-vocab.cpp is where they are defined.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from reference_impl.models.config_reader import ConfigError
from reference_impl.models.gguf_file import GgufFile
from reference_impl.models.json_file import shown

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PATTERNS = {
    "gpt-2": (_GPT2,),
    "llama-bpe": (rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORDS}|\p{{N}}|{_REST}",),
    "smollm": (r"\p{N}", _GPT2),
}
_LONGEST = 4096  # characters of a token, which may be cut at each of them
# Texts of tokens that end an answer, by which llama.cpp finds them (llama-vocab.cpp, special_eog_ids): a file names one
# as eos_token_id, and its template ends turns with another.
_ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>",
    "[e~[",
)  # fmt: skip
# What stands between files of code ends an answer, too: by its text only where the file does not name its id.
_BETWEEN_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Where all of the first are there, the second ends no turn, also where the file names its id.
_NO_ENDS = (
    *(({first, call}, "<|end|>") for first in ("<|return|>", "<|flush|>") for call in ("<|call|>", "<|calls|>")),
    ({"<|tool_response>"}, "</s>"),
)
_CONTROL, _USER = 3, 4  # types of tokens: one that is never written as text, and one that is never cut


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a file. Raises ConfigError for one that is not known. A tokenizer.json beside the file is taken
    where the file has only parts, and these are not known."""
    data, beside = file.metadata, file.path.parent / "tokenizer.json"
    if isinstance(whole := data.get("tokenizer.huggingface.json"), str):
        return _whole(whole, file.path)
    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre")
    if kind == "llama":
        made = _sentencepiece(file)
    elif kind == "gpt2" and isinstance(pre, str) and pre in _PATTERNS:
        made = _bytes(file, pre)
    elif beside.is_file():
        return _whole(beside.read_text("utf-8"), beside)
    else:
        expected = f"llama, or gpt2 with tokenizer.ggml.pre one of {', '.join(_PATTERNS)}"
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model: expected {expected}; found {shown(kind)} with {shown(pre)}: put the "
            "tokenizer.json of the model that it was made of beside the file"
        )
    _add_special(made, file)
    return made


def _whole(text: str, where: Path) -> Tokenizer:
    try:
        made = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ConfigError(f"{where}: not a tokenizer of Hugging Face's tokenizers ({error})") from None
    made.no_truncation()  # which it may have been saved with, and which is not meant for prompts
    made.no_padding()
    return made


def _list(file: GgufFile, name: str, kind: type, length: int | None = None) -> list[Any]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    good = isinstance(found, list) and all(isinstance(one, kind) for one in found)
    if not isinstance(found, list) or not good or (length is not None and len(found) != length):
        expected = f"a list of {'' if length is None else f'{length:,} '}{kind.__name__}s"
        raise _error(file, name, expected, found)
    return found


def _tokens(file: GgufFile) -> list[str]:
    """The tokens of the file. An empty one has the name that llama.cpp gives it."""
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(_list(file, "tokens", str))]


def _vocabulary(file: GgufFile) -> dict[str, int]:
    """The tokens' places. Raises ConfigError for tokens that are there twice, or are long beyond any vocabulary's."""
    tokens = _tokens(file)
    found = {token: i for i, token in enumerate(tokens)}
    if wrong := next((token for token in tokens if len(token) > _LONGEST), None):
        raise _error(file, "tokens", f"tokens of at most {_LONGEST:,} characters", wrong)
    if len(found) != len(tokens):
        raise _error(file, "tokens", "each token once", next(t for i, t in enumerate(tokens) if found[t] != i))
    return found


def _error(file: GgufFile, name: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{file.path}: tokenizer.ggml.{name}: expected {expected}, found {shown(found)}")


def _bytes(file: GgufFile, pre: str) -> Tokenizer:
    """A tokenizer with BPE of bytes, like GPT-2's: merges are written as two tokens and a space."""
    vocabulary, merges = _vocabulary(file), [merge.split(" ") for merge in _list(file, "merges", str)]
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise _error(file, "merges", "two tokens with a space, which are one token without it", " ".join(merge))
    pairs = [(left, right) for left, right in merges]
    made = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe"))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    made.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    return made


def _sentencepiece(file: GgufFile) -> Tokenizer:
    """A tokenizer like SentencePiece's BPE: the pair whose token has the highest score is merged first, so merges are
    in the order of scores."""
    vocabulary = _vocabulary(file)
    tokens = list(vocabulary)
    scores = _list(file, "scores", float, len(tokens))
    if wrong := [score for score in scores if not isfinite(score)]:
        raise _error(file, "scores", "finite numbers", wrong[0])
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
        halves = [pair for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
        halves.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in halves]
    merges.sort(key=lambda merge: -merge[0])  # stable: equal scores in the order of tokens
    unknown = special_id(file, "unknown")
    unk = tokens[unknown] if type(unknown) is int and 0 <= unknown < len(tokens) else None
    made = Tokenizer(
        models.BPE(vocabulary, [pair for _, pair in merges], unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    spaced, space = file.metadata.get("tokenizer.ggml.add_space_prefix", True), normalizers.Replace(" ", "▁")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space] if spaced else [space])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return made


def special_id(file: GgufFile, name: str) -> Any:
    """What the file says of a special token's id, "bos", "eos", "unknown", ...; where it says nothing, what llama.cpp
    takes for SentencePiece's vocabularies; None for no id."""
    tokens, default = file.metadata.get("tokenizer.ggml.tokens"), None
    if file.metadata.get("tokenizer.ggml.model") == "llama" and isinstance(tokens, list):
        default = {"unknown": 0, "bos": 1, "eos": 2}.get(name)
        default = None if default is None or default >= len(tokens) else default
    return file.metadata.get(f"tokenizer.ggml.{name}_token_id", default)


def ends_by_text(file: GgufFile) -> tuple[dict[str, int], list[int]]:
    """The tokens of the file that end an answer by their text, with their ids; and the ids of those that beside these
    end none."""
    tokens, whole = file.metadata.get("tokenizer.ggml.tokens"), file.metadata.get("tokenizer.huggingface.json")
    named = ends_between_files(file)
    texts = (*_ENDS, *(text for kind, own in _BETWEEN_FILES.items() if kind not in named for text in own))
    if isinstance(tokens, list):
        places = {token: at for at, token in enumerate(tokens) if isinstance(token, str) and token in texts}
    elif isinstance(whole, str):
        made = _whole(whole, file.path)
        places = {text: token for text in texts if (token := made.token_to_id(text)) is not None}
    else:
        return {}, []
    others = {text for all_of, text in _NO_ENDS if all_of | {text} <= places.keys()}
    return places, [places.pop(text) for text in others]


def ends_between_files(file: GgufFile) -> dict[str, int]:
    """The ids that the file names for what stands between files of code; llama.cpp leaves out one that no token has."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    found = {kind: file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in _BETWEEN_FILES}
    most = len(tokens) if isinstance(tokens, list) else 0
    return {kind: token for kind, token in found.items() if type(token) is int and 0 <= token < most}


def _add_special(made: Tokenizer, file: GgufFile) -> None:
    tokens = _tokens(file)
    types = _list(file, "token_type", int, len(tokens)) if "tokenizer.ggml.token_type" in file.metadata else []
    for kind, add in ((_CONTROL, made.add_special_tokens), (_USER, made.add_tokens)):
        named = [token for token, own in zip(tokens, types, strict=False) if own == kind]
        add([AddedToken(token, normalized=False, special=kind == _CONTROL) for token in named])
    # What ends an answer is no text of it, whatever its type.
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in ends_by_text(file)[0]])
    model, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    begins = model == "llama" or pre == "llama-bpe"  # where the file does not say it, as in llama.cpp
    around = []
    for name, default in (("bos", begins), ("eos", False)):  # eos: models for embeddings
        place = special_id(file, name)
        asked = file.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        around.append([place] if asked and type(place) is int and 0 <= place < len(tokens) else [])
    first, last = ([tokens[place] for place in places] for places in around)
    if first or last:
        made.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", "$B", *last],
            special_tokens=[(tokens[place], place) for place in {*around[0], *around[1]}],
        )  # fmt: skip


def special_tokens(file: GgufFile) -> dict[str, str]:
    """The special tokens that a chat template may name: {"bos_token": ...}."""
    tokens, found = file.metadata.get("tokenizer.ggml.tokens"), {}
    for name, field in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        place = special_id(file, field)
        if isinstance(tokens, list) and type(place) is int and 0 <= place < len(tokens):
            found[name] = str(tokens[place])
    return found
