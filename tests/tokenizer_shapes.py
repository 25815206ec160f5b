"""Small tokenizers of the shapes that checkpoints have."""

from __future__ import annotations

import functools

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXTS = (
    "hello 日本日本.", "Grüße, naïve café! 😀👩‍👩‍👧 ok", "Привет, мир\n\n  два  пробела", "日本語テキスト。中文",
    "  x = [1, 2]\n\ty", "สวัสดี שלום مرحبا", "e\u0301 ▁ x", "  ", "😀",
)  # fmt: skip


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    return made


def fallback(prefix: bool = True) -> Tokenizer:
    """As of Llama 2, Mistral and Phi-3; without the prefix as of Gemma, and of GGUF files that say so."""
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["<unk>", "<s>", "</s>", *in_bytes, *"▁helotx=[]12,.k", "▁h", "lo", "▁▁"]
    made = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [("▁", "h"), ("l", "o"), ("▁", "▁")], unk_token="<unk>",
            fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    spaces = [normalizers.Replace(" ", "▁")]
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return made


def unigram() -> Tokenizer:
    pieces = ["▁", *sorted({c for text in TEXTS for c in text} - {" ", "▁"}), "▁hello", "日本"]
    made = Tokenizer(models.Unigram([("<unk>", -20.0), *((piece, -1.0 - len(piece)) for piece in pieces)], 0, False))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def word_piece() -> Tokenizer:
    letters = sorted({c for text in TEXTS for c in text if not c.isspace()})
    pieces = ["[UNK]", *letters, *(f"##{letter}" for letter in letters), "hello", "##本日"]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return made


SHAPES = {
    "byte-level": byte_level, "byte fallback": fallback, "byte fallback, no prefix": lambda: fallback(False),
    "unigram": unigram, "word pieces": word_piece,
}  # fmt: skip


@functools.cache
def tokenizer(shape: str) -> Tokenizer:
    made = SHAPES[shape]()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    return made
