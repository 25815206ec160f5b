"""`SamplingParams.bad_words`: what vLLM keeps out of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from reference_impl import LLM, SamplingParams, course_model
from reference_impl.features.grammars.bad_words import BadWords

PROMPT = "def add(a, b):\n    return"
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def of_vllm(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """By vLLM's rule (SamplingParams.update_from_tokenizer): as the word is at a text's start; and behind a space, if
    that begins with another token and is as many."""
    found: list[list[int]] = []
    for word in words:
        for space in ("", " "):
            tokens = tokenizer.encode(space + word.lstrip(), add_special_tokens=False).ids
            if not space or (tokens[0] != found[-1][0] and len(tokens) == len(found[-1])):
                found.append(tokens)
    return found


@pytest.mark.parametrize("options", [{}, {"speculative": "ngram", "num_drafts": 3}], ids=["plain", "drafts"])
def test_every_token_is_the_likeliest_that_completes_no_word(options: dict) -> None:
    """By brute force: each next token asked for alone, with a bias against all tokens of the vocabulary that would
    complete a word. Words: what the answer itself has, of one token and of several, with and without a space before."""
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", num_blocks=64, **options)
    assert llm.tokenizer is not None
    prompt, tokenizer = llm.encode(PROMPT), llm.tokenizer

    def answer(words: Sequence[str]) -> list[int]:
        return list(llm.generate([PROMPT], replace(GREEDY, bad_words=words))[0].outputs[0].token_ids)

    def by_force(words: Sequence[str]) -> list[int]:
        kept_out, found = of_vllm(words, tokenizer), []
        while len(found) < GREEDY.max_tokens and not set(found[-1:]) & set(llm.engine.model.config.eos_token_ids):
            bad = {tokens[-1] for tokens in kept_out if tokens[:-1] == found[len(found) + 1 - len(tokens) :]}
            one = replace(GREEDY, max_tokens=1, logit_bias=dict.fromkeys(bad, -100))
            found += llm.generate([{"prompt_token_ids": [*prompt, *found]}], one)[0].outputs[0].token_ids
        return found

    plain, words = answer([]), []
    for length in (1, 2, 3):
        written = (tokenizer.decode(plain[at : at + length]) for at in range(len(plain) - length + 1))
        words.append([word for word in dict.fromkeys(written) if word.strip()][:4])
    for several in ([words[0][0]], [words[1][0]], [" " + words[2][0].lstrip()], [*words[0], *words[1], *words[2]]):
        found = answer(several)
        assert found == by_force(several)
        assert found != plain


def test_words_are_the_tokens_that_they_are_in_vllm() -> None:
    """For tokenizers that write a space as a part of the next token, as a token, and before each text."""
    text = ["a", "b", "▁", "▁a", "▁ab", "ab", "ba", "<unk>"]
    sentences = Tokenizer(models.Unigram([(piece, -len(text) + len(piece)) for piece in text], unk_id=7))
    sentences.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    sentences.decoder = decoders.Metaspace()
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    course = Tokenizer.from_file(str(course_model("draft") / "tokenizer.json"))
    for tokenizer in (sentences, words, course):
        size = tokenizer.get_vocab_size() + 1
        for word in ("a", " a", "  b", "ab", "a b", "ba ab", "return", " return", "self.x", "日本", "<|im_end|>"):
            spelt = BadWords(SamplingParams(bad_words=[word]), tokenizer, size, ()).spelt
            assert spelt == [tuple(tokens) for tokens in of_vllm([word], tokenizer)]


def test_words_that_could_leave_nothing_are_refused() -> None:
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", num_blocks=16)
    [end, *_] = llm.engine.model.config.eos_token_ids
    assert llm.tokenizer is not None
    [token] = llm.tokenizer.encode("return").ids
    for options in ({"allowed_token_ids": [token]}, {"allowed_token_ids": [token, end], "min_tokens": 2}):
        with pytest.raises(ValueError, match="bad_words: together they could rule out every token"):
            llm.generate([PROMPT], SamplingParams(bad_words=["return"], **options))
    [found] = llm.generate([PROMPT], replace(GREEDY, bad_words=["return"], allowed_token_ids=[token, end]))
    assert set(found.outputs[0].token_ids) <= {end}


def test_a_token_that_the_model_does_not_have_is_in_no_answer() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    words = BadWords(SamplingParams(bad_words=["c", "b"]), tokenizer, 2, ())
    assert words.spelt == [(1,)]
    assert words.allowed([]) == bytes([1])


def test_an_engine_without_a_tokenizer_says_so() -> None:
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", num_blocks=16)
    with pytest.raises(ValueError, match=r"bad_words: .* use LLM\.generate"):
        llm.engine.add([5, 6], SamplingParams(bad_words=["x"]))
