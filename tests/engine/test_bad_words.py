"""`SamplingParams.bad_words`: what vLLM keeps out of an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reference_impl import LLM, SamplingParams, course_model


@pytest.mark.parametrize("options", [{}, {"speculative": "ngram", "num_drafts": 3}], ids=["plain", "guesses"])
def test_the_token_that_would_complete_a_word_is_not_drawn(options: dict) -> None:
    """Word by word what the greedy answer has is kept out: of one token, and of two. The first tokens of a longer one
    stay, and so does the answer up to its last."""
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", num_blocks=64, **options)
    greedy = SamplingParams(max_tokens=24, temperature=0)

    def answer(*words: str) -> list[int]:
        [found] = llm.generate(["def add(a, b):\n    return"], replace(greedy, bad_words=list(words)))
        return list(found.outputs[0].token_ids)

    plain, encode = answer(), lambda text: llm.tokenizer.encode(text, add_special_tokens=False).ids
    seen = 0
    for length in (1, 2):
        for at in range(len(plain) - length + 1):
            tokens = plain[at : at + length]
            word = llm.tokenizer.decode(tokens)
            if not word.strip() or encode(word.lstrip()) != tokens:
                continue
            seen += 1
            found = answer(word)
            forms = [tokens, encode(" " + word.lstrip())]
            before = min(i for i in range(len(plain)) if plain[i : i + length] in forms) + length - 1
            assert found[:before] == plain[:before]
            assert found[before] != plain[before]
            assert all(found[i : i + length] not in forms for i in range(len(found)))
    assert seen >= 2


def test_an_engine_without_a_tokenizer_says_so() -> None:
    llm = LLM(course_model("draft"), dtype="float32", device="cpu", num_blocks=16)
    with pytest.raises(ValueError, match=r"bad_words: .* use LLM\.generate"):
        llm.engine.add([5, 6], SamplingParams(bad_words=["x"]))
