"""The text of a request that is handed over in mid-answer: what was shown where it began and what is shown where it
goes on are together the text without a hand-over, whatever the seam cuts. It is cut before every token."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from reference_impl.assembly.config import course_model
from reference_impl.assembly.llm import LLM, Generation
from reference_impl.features.handover.message import from_json, to_json
from reference_impl.features.handover.progress import Handover, Progress, hand_over
from reference_impl.interfaces import RequestFinished, SamplingParams
from tests.tokenizer_shapes import byte_level, fallback

TEXT = "o 日本 lo 😀é日本 – 👩‍👧 né 日本"


@dataclass(frozen=True)
class Only:
    """Allows one text, and then anything."""

    text: tuple[int, ...]
    vocab_size: int

    def allowed(self, output: Sequence[int]) -> bytes:
        mask = np.ones(self.vocab_size, np.uint8)
        if len(output) < len(self.text):
            mask[:] = 0
            mask[self.text[len(output)]] = 1
        return np.packbits(mask, bitorder="little").tobytes()


def an_llm(tokenizer: Tokenizer | None = None, **options: Any) -> LLM:
    llm = LLM(course_model("draft"), "float64", **({"num_blocks": 400, "prefix_cache": "off"} | options))
    llm.tokenizer = tokenizer or llm.tokenizer
    return llm


@dataclass(frozen=True)
class Cut:
    handover: Handover
    shown: str  # before it


def run(llm: LLM, *generations: Generation) -> list[str]:
    """To the end: the text of each, in pieces as they come, joined."""
    texts = [generation.take() for generation in generations]
    while any(generation.unfinished for generation in generations):
        llm.step()
        texts = [text + generation.take() for text, generation in zip(texts, generations, strict=True)]
    return texts


def cut_everywhere(
    llm: LLM, prompt: Sequence[int], sampling: SamplingParams, **options: Any
) -> tuple[Generation, str, list[Cut]]:
    """The answer without a hand-over, its text in pieces, and the hand-overs before each of its tokens."""
    whole, shown, cuts = llm.start(prompt, sampling, **options), "", []
    while whole.unfinished:
        cuts.append(Cut(from_json(json.loads(json.dumps(to_json(hand_over(whole.request))))), shown))
        llm.step()
        shown += whole.take()
    assert [len(cut.handover.progress.tokens) for cut in cuts] == [*range(len(cuts))]
    return whole, shown, cuts


def start(llm: LLM, cut: Cut, **options: Any) -> Generation:
    handover = cut.handover
    return llm.start(handover.prompt, handover.sampling, resume=handover.progress, **options)


def check_all(llm: LLM, whole: Generation, shown: str, cuts: Sequence[Cut], **options: Any) -> None:
    expected = whole.output()
    assert shown == expected.text
    generations = [start(llm, cut, **options) for cut in cuts]
    texts = run(llm, *generations)
    ends = {e.request_id: e.num_output_tokens for e in llm.engine.trace.events if isinstance(e, RequestFinished)}
    for cut, generation, text in zip(cuts, generations, texts, strict=True):
        output = generation.output()
        assert cut.shown + text == expected.text
        assert (output.text, output.token_ids) == (expected.text, expected.token_ids)
        assert (output.finish_reason, output.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert (output.prompt_token_ids, output.cut_by) == (expected.prompt_token_ids, expected.cut_by)
        num_written = len(expected.token_ids) - len(cut.handover.progress.tokens)
        assert (output.metrics.num_output_tokens, ends[output.request_id]) == (num_written, num_written)
        llm.leave(generation)
    assert llm.engine.requests == {}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "all of it": ("length", {}),
    "a stop string": ("stop", {"stop": ["never", "本 – 👩"]}),
    "a stop string that is shown": ("stop", {"stop": "👩‍👧 n", "include_stop_str_in_output": True}),
    "not before min_tokens": ("stop", {"stop": "日本", "min_tokens": 14}),
    "a stop string that ends with the last token": ("stop", {"stop": "é 日本"}),
    "what may become a stop string": ("length", {"stop": "日本!"}),
    "no text": ("length", {"detokenize": False}),
}


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [*((fallback, name) for name in ASKED), (byte_level, "all of it"), (byte_level, "a stop string")],
)
def test_pieces_of_characters_and_of_stop_strings_come_whole(tokenizer: Any, name: str) -> None:
    made = tokenizer()
    here, there = an_llm(made), an_llm(made, block_size=3, max_num_batched_tokens=300)
    *prompt, split = made.encode("x = é").ids  # the first token of the answer completes a character
    tokens = (split, *made.encode(TEXT).ids)
    reason, asked = ASKED[name]
    sampling = SamplingParams(max_tokens=len(tokens), temperature=0, ignore_eos=True, **asked)
    grammar = Only(tokens, here.engine.model.config.vocab_size)
    whole, shown, cuts = cut_everywhere(here, prompt, sampling, grammar=grammar)
    assert whole.finish_reason == reason
    assert len(cuts) > 12
    check_all(there, whole, shown, cuts, grammar=grammar)


@pytest.mark.parametrize(
    "options", [{"speculative": "ngram", "num_drafts": 4}, {"overlap": "on", "prefix_cache": "radix"}]
)
def test_a_text_that_is_drawn_goes_on(options: dict[str, Any]) -> None:
    """With words that it may not have (their grammar is made anew from the parameters), penalties, and a stop string
    that is cut: it ends within a draft, and the tokens behind it are taken back."""
    here, there = an_llm(), an_llm(**options)
    prompt = here.encode("def open_file(file):\n    return file\n\ndef open_file(file):\n")
    sampling = SamplingParams(
        max_tokens=30, temperature=0.6, seed=2, bad_words=["return", "self"], frequency_penalty=0.1, min_tokens=3,
    )  # fmt: skip
    whole, shown, cuts = cut_everywhere(here, prompt, sampling)
    assert len(cuts) > 20
    check_all(there, whole, shown, cuts)
    stop = shown[len(shown) // 2 : len(shown) // 2 + 4]
    stopping = SamplingParams(**{**vars(sampling), "stop": stop})
    whole, shown, cuts = cut_everywhere(here, prompt, stopping)
    assert (whole.finish_reason, whole.stop_reason) == ("stop", stop)
    check_all(there, whole, shown, cuts)


def test_tokens_that_were_not_shown_yet_are_shown_where_it_goes_on() -> None:
    made = fallback()
    here, there = an_llm(made), an_llm(made, block_size=4)
    prompt, tokens = made.encode("x").ids, tuple(made.encode("lo日本").ids)
    grammar = Only(tokens, here.engine.model.config.vocab_size)
    sampling = SamplingParams(max_tokens=len(tokens), temperature=0, ignore_eos=True)
    _, shown, cuts = cut_everywhere(here, prompt, sampling, grammar=grammar)
    for number, cut in enumerate(cuts):
        for unstreamed in range(number + 1):
            progress = replace(cut.handover.progress, num_unstreamed=unstreamed)
            late = Cut(replace(cut.handover, progress=progress), cuts[number - unstreamed].shown)
            generation = start(there, late, grammar=grammar)
            first = generation.take()  # what is certain already, before any step
            assert late.shown + first == cut.shown
            assert late.shown + first + run(there, generation)[0] == shown
            there.leave(generation)


@pytest.mark.parametrize("num_unstreamed", [0, 1])
def test_a_text_that_has_its_stop_string_is_not_gone_on_with(num_unstreamed: int) -> None:
    """Nothing is left to generate: it is refused, or finished at once where the end was not shown yet."""
    made = fallback()
    llm = an_llm(made)
    tokens = tuple(made.encode("lo日本").ids)
    sampling = SamplingParams(max_tokens=20, stop="日本", ignore_eos=True)
    progress = Progress(1, tokens, num_unstreamed=num_unstreamed)
    cut = Cut(Handover((5, 6), sampling, progress), " lo" if num_unstreamed else "")
    if num_unstreamed:
        generation = start(llm, cut)
        assert (generation.take(), generation.finish_reason) == ("", "stop")
        assert generation.output().text == " lo"
        llm.leave(generation)
    else:
        with pytest.raises(ValueError, match="has its stop string '日本': nothing is left"):
            start(llm, cut)
    assert llm.engine.requests == {}
    assert llm.engine.kv.num_available == llm.engine.num_blocks


def test_stop_strings_need_a_tokenizer_where_it_goes_on_too() -> None:
    llm = an_llm()
    llm.tokenizer = None
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        start(llm, Cut(Handover((5, 6), SamplingParams(stop="a"), Progress(1, (7,))), ""))
