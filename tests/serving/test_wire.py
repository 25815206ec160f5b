"""Messages to engines elsewhere come back as they were, and nothing else is made of bytes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_impl import SamplingParams
from reference_impl.features.handover.progress import Progress
from reference_impl.interfaces import TokenLogprobs
from reference_impl.serving.wire import decode, encode

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.integers(0, 9) | st.binary(), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.text(min_size=1), st.lists(plain, max_size=5))
def test_what_is_sent_comes(kind: str, rest: list[Any]) -> None:
    assert decode(encode((kind, *rest))) == (kind, *rest)


def test_requests_and_pieces_come_as_they_are() -> None:
    sampling = SamplingParams(
        max_tokens=7, temperature=0.5, seed=2**64 - 1, stop=["a", "b"], stop_token_ids=(3, 4), logit_bias={5: -1.5},
        logprobs=2, allowed_token_ids=[1, 2],
    )  # fmt: skip
    reports = (TokenLogprobs(3, -0.5, ((3, -0.5), (4, -math.inf))),)
    progress = Progress(5, (3,), 1, num_unstreamed=1, logprobs=reports)
    options = {"resume": progress, "transfers": {"t": "peer"}, "push_to": ["t", "peer"], "cache_salt": None}
    command = ("start", -3, "id", [[1, 2]], sampling, options)
    assert decode(encode(command)) == command
    row = [7, 0, "text", [3], [reports[0]], "stop", None, "a", None, None, None]
    assert decode(encode(("step", [row], [[7, [3, 1, 0]]]))) == ("step", [row], [[7, [3, 1, 0]]])


@pytest.mark.parametrize("content", [
    b"", b"\xff", b"[]", b"{}", b"[1]", b'"step"', b"[null]", b"[" * 100_000,
    json.dumps(["a", {"~": "Path", "value": "/"}]).encode(),
    json.dumps(["a", {"value": 1}]).encode(),
    json.dumps(["a", {"~": "bytes", "value": "*"}]).encode(),
    json.dumps(["a", {"~": "dict", "value": [[1]]}]).encode(),
    json.dumps(["a", {"~": "dict", "value": [[[1], 2]]}]).encode(),
    json.dumps(["a", {"~": "SamplingParams", "max_tokens": -1}]).encode(),
    json.dumps(["a", {"~": "SamplingParams", "unheard": 1}]).encode(),
    json.dumps(["a", {"~": ["bytes"], "value": ""}]).encode(),
])  # fmt: skip
def test_what_nobody_sent_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"cannot be read|expected a message"):
        decode(content)


def test_what_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match="got object"):
        encode(("a", object()))
