"""A stop string that is a special token: it is text, and ends one, only where special tokens are; as in vLLM."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from reference_impl import SamplingParams, course_model
from reference_impl.features.texts.stream import AskedTextStream


@pytest.mark.parametrize("skips", [True, False])
def test_it_ends_the_text_where_special_tokens_are_text(skips: bool) -> None:
    tokenizer, special = Tokenizer.from_file(str(course_model("draft") / "tokenizer.json")), "<|im_end|>"
    tokens = [*tokenizer.encode("a b").ids, tokenizer.token_to_id(special), *tokenizer.encode(" c").ids]
    stream = AskedTextStream(tokenizer, [], SamplingParams(stop=special, skip_special_tokens=skips))
    text = "".join(map(stream.push, tokens)) + stream.finish()
    assert (text, stream.stopped_by) == (("a b c", None) if skips else ("a b", special))
