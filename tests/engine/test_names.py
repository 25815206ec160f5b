"""What code that was written for vLLM says to an LLM, and what it gets."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.names import options_of
from reference_impl.interfaces import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(course_model("draft"), dtype="float32", num_blocks=60)


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"gpu_memory_utilization": 0.5}, {"memory_percent": 50.0}),
        ({"gpu_memory_utilization": 1}, {"memory_percent": 100}),
        ({"enable_prefix_caching": True}, {"prefix_cache": "hash"}),
        ({"enable_prefix_caching": False}, {"prefix_cache": "off"}),
        ({"enable_prefix_caching": True, "prefix_cache": "radix"}, {"prefix_cache": "radix"}),
        ({"enable_prefix_caching": None, "prefix_cache": "radix"}, {"prefix_cache": "radix"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_dtype": "fp8"}),
        ({"kv_cache_dtype": "int8"}, {"kv_dtype": "int8"}),
        ({"kv_cache_dtype": "int4"}, {"kv_dtype": "int4"}),
        ({"num_gpu_blocks_override": 9}, {"num_blocks": 9}),
        ({"kv_cache_memory_bytes": 1 << 20}, {"kv_cache_bytes": 1 << 20}),
        ({"enforce_eager": True}, {"graphs": "off"}),
        ({"enforce_eager": False}, {}),
        ({"tensor_parallel_size": 1}, {"tensor_parallel_size": 1}),
        ({"trust_remote_code": True, "swap_space": 4, "enable_chunked_prefill": True, "revision": None}, {}),
        ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2}),
        ({"data_parallel_size": 1, "load_format": "auto", "hf_overrides": {}, "served_model_name": "x"}, {}),
        ({"max_model_len": 64, "seed": 3, "max_num_seqs": 2}, {"max_model_len": 64, "seed": 3, "max_num_seqs": 2}),
    ],
    ids=str,
)
def test_vllms_names_mean_the_same_here(given: dict[str, Any], means: dict[str, Any]) -> None:
    assert options_of(given) == means
    EngineConfig(**means)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size: expected None or 1, got 2: no other is implemented"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill: expected None or True, got False"),
        ({"revision": "main"}, "revision: expected None, got 'main'"),
        ({"gpu_memory_utilization": 90}, "a share from 0.01 to 1, got 90"),
        ({"gpu_memory_utilization": 0}, "a share from 0.01 to 1, got 0"),
        ({"gpu_memory_utilization": True}, "a share from 0.01 to 1, got True"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching: expected True or False, got 'yes'"),
        ({"kv_cache_dtype": "int2"}, "kv_dtype: expected one of auto, fp8, fp8_e5m2, int8, int4, got 'int2'"),
        ({"enable_prefix_caching": False, "prefix_cache": "hash"}, "contradict each other: leave one out"),
        ({"kv_cache_dtype": "int8", "kv_dtype": "fp8"}, "kv_cache_dtype='int8' and kv_dtype='fp8' contradict"),
        ({"seed": -1}, "EngineConfig.seed: expected an integer of at least 0, got -1"),
        ({"max_model_len": 1 << 20}, "max_model_len 1048576 is above the model's"),
    ],
    ids=str,
)
def test_what_they_cannot_mean_is_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is looked at below)
        LLM(course_model("draft"), **given)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_num_seq", "max_num_seqs"), ("gpu_memory_utilisation", "gpu_memory_utilization"), ("dtyp", "dtype"),
        ("kv_cache_dtypes", "kv_cache_dtype"), ("quantisation", "quantization"), ("max_len", "max_model_len"),
    ],
)  # fmt: skip
def test_an_unknown_option_is_a_type_error_with_near_matches(name: str, near: str) -> None:
    with pytest.raises(TypeError, match=rf"LLM has no option {name}: did you mean .*\b{near}\b.*\?"):
        LLM(course_model("draft"), **{name: 1})
    with pytest.raises(TypeError, match="no option zzz: EngineConfig says which there are"):
        LLM(course_model("draft"), zzz=1)


def test_on_a_cpu_a_share_of_the_gpus_memory_has_no_effect_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    plain = LLM(course_model("draft"), dtype="float32", device="cpu")
    assert not caplog.records
    asked = LLM(course_model("draft"), dtype="float32", device="cpu", gpu_memory_utilization=0.3)
    assert asked.engine.num_blocks == plain.engine.num_blocks
    assert ["gpu_memory_utilization has no effect on a CPU" in record.message for record in caplog.records] == [True]


def test_a_seed_of_the_engine_makes_texts_without_one_repeat() -> None:
    drawn = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True, n=2)

    def texts(seed: int | None) -> list[list[int]]:
        llm = LLM(course_model("draft"), dtype="float32", num_blocks=60, seed=seed)
        return [s.token_ids for o in llm.generate(["def f(", "def f("], drawn) for s in o.outputs]

    one = texts(5)
    assert texts(5) == one
    assert texts(6) != one
    assert texts(None) != texts(None)
    assert len({tuple(tokens) for tokens in one}) == 4  # each request has another
    own = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True, seed=1)
    a, b = (LLM(course_model("draft"), dtype="float32", num_blocks=60, seed=s) for s in (5, None))
    assert a.generate("def f(", own)[0].token_ids == b.generate("def f(", own)[0].token_ids


def test_dtypes_have_vllms_names_too() -> None:
    for name, dtype in (("auto", None), ("half", "float16"), ("float", "float32")):
        loaded = [LLM(course_model("draft"), dtype=given, num_blocks=8).engine.model.dtype for given in (name, dtype)]
        assert loaded[0] == loaded[1]


def test_prompts_may_be_dicts_and_parameters_one_for_each(llm: LLM) -> None:
    text, ids = "def fibonacci(n):", [5, 6, 7]
    plain = [llm.generate(text, GREEDY)[0], llm.generate([ids], GREEDY)[0]]
    short = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    dicts = [{"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "xyz"}]
    found = llm.generate(dicts, [GREEDY, GREEDY, short])  # type: ignore[arg-type]
    assert [o.token_ids for o in found] == [plain[0].token_ids, plain[1].token_ids, plain[1].token_ids[:2]]
    assert [o.prompt for o in found] == [text, None, "xyz"]
    assert [o.prompt_token_ids for o in found] == [llm.encode(text), ids, ids]
    assert llm.generate({"prompt": text}, sampling_params=GREEDY, use_tqdm=False)[0].text == plain[0].text
    assert "".join(llm.stream({"prompt": text}, GREEDY)) == plain[0].text
    found = [llm.embed(given)[0].outputs for given in ({"prompt_token_ids": ids}, ids, [{"prompt_token_ids": ids}])]
    assert found[0] == found[1] == found[2]
    assert llm.beam_search({"prompt": text}, 2, 4) == llm.beam_search(text, 2, 4)
    with pytest.raises(ValueError, match="3 prompts but 2 sampling parameters"):
        llm.generate([ids] * 3, [GREEDY] * 2)
    with pytest.raises(TypeError, match="sampling and sampling_params are the same"):
        llm.generate(ids, GREEDY, sampling_params=GREEDY)
    assert llm.generate(ids, GREEDY, lora_request=None, priority=None)[0].token_ids == plain[1].token_ids
    with pytest.raises(ValueError, match="priority: expected None, got"):
        llm.generate(ids, GREEDY, priority=[1])  # type: ignore[arg-type]
    for wrong, said in (({"prompt": 5}, "expected a text"), ({"prompt": "a", "mm_data": {}}, "a prompt has 'mm_data'")):
        with pytest.raises(ValueError, match=said):
            llm.generate(wrong, GREEDY)  # type: ignore[arg-type]


def test_outputs_are_what_vllm_gives(llm: LLM) -> None:
    [answer] = llm.generate(["def f(x):"], SamplingParams(max_tokens=5, temperature=1, seed=2, n=2, logprobs=3))
    assert (answer.finished, answer.prompt, answer.prompt_token_ids) == (True, "def f(x):", llm.encode("def f(x):"))
    assert isinstance(answer.request_id, str)
    assert [o.index for o in answer.outputs] == [0, 1]
    for output, flat in zip(answer.outputs, (answer, *answer.others), strict=True):
        assert (output.text, output.token_ids, output.finish_reason) == (flat.text, flat.token_ids, flat.finish_reason)
        assert output.finished()
        assert output.logprobs is not None
        assert output.cumulative_logprob is not None
        assert math.isclose(output.cumulative_logprob, sum(r.logprob for r in flat.logprobs))
        for token, found, report in zip(output.token_ids, output.logprobs, flat.logprobs, strict=True):
            assert found[token].logprob == report.logprob
            assert {p.rank: t for t, p in found.items() if p.rank} == dict(enumerate((t for t, _ in report.top), 1))
            assert found[report.top[0][0]].rank == 1
            assert llm.tokenizer is not None
            assert found[token].decoded_token == llm.tokenizer.decode([token])
    [plain] = llm.generate([[5, 6]], GREEDY)
    assert (plain.outputs[0].logprobs, plain.outputs[0].cumulative_logprob, plain.prompt) == (None, None, None)


def test_as_many_tokens_as_fit_and_all_of_the_vocabulary(llm: LLM) -> None:
    """vLLM's max_tokens=None, logprobs=-1, detokenize=False."""
    few = LLM(course_model("draft"), dtype="float32", num_blocks=60, max_model_len=40)
    [whole] = few.generate([[5] * 9], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))  # type: ignore[arg-type]
    assert (len(whole.token_ids), whole.finish_reason, whole.cut_by) == (31, "length", "max_model_len")
    asked = SamplingParams(max_tokens=2, temperature=0, logprobs=-1, prompt_logprobs=-1, detokenize=False)
    [plain] = llm.generate([[5, 6, 7]], GREEDY)
    [output] = llm.generate([[5, 6, 7]], asked)
    size = llm.engine.model.config.vocab_size
    assert (output.text, output.token_ids) == ("", plain.token_ids[:2])
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    assert [len(found) for found in output.outputs[0].logprobs] == [size] * 2
    assert [len(report.top) for report in output.prompt_logprobs if report] == [size] * 2
    for report in output.logprobs:
        assert math.isclose(math.fsum(math.exp(logprob) for _, logprob in report.top), 1, rel_tol=1e-4)


def test_what_ended_a_text_is_said(llm: LLM) -> None:
    free = llm.generate("def f(x):", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))[0]
    stop, token = free.text[10:13], free.token_ids[4]
    by_text = llm.generate("def f(x):", SamplingParams(max_tokens=30, temperature=0, stop=stop))[0].outputs[0]
    by_token = llm.generate("def f(x):", SamplingParams(max_tokens=30, temperature=0, stop_token_ids=(token,)))[0]
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", stop)
    assert (by_token.outputs[0].finish_reason, by_token.stop_reason) == ("stop", token)
    assert (free.stop_reason, free.cut_by) == (None, "max_tokens")


def test_a_request_that_the_cache_cuts_says_so(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(course_model("draft"), dtype="float32", num_blocks=3, block_size=16, max_model_len=64)
    long = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    [cut] = llm.generate([[5] * 20], long)
    assert (len(cut.token_ids), cut.finish_reason, cut.cut_by) == (29, "length", "kv_cache")
    [line] = [record.getMessage() for record in caplog.records]
    assert "cut at 49 tokens: the KV cache (3 blocks of 16) holds no more of one; 64 were allowed" in line
    caplog.clear()
    [asked] = llm.generate([[5] * 20], SamplingParams(max_tokens=29, temperature=0, ignore_eos=True))
    assert asked.cut_by == "max_tokens"
    roomy = LLM(course_model("draft"), dtype="float32", num_blocks=30, max_model_len=64)
    assert roomy.generate([[5] * 20], long)[0].cut_by == "max_model_len"
    assert not caplog.records


def test_the_text_keeps_what_ended_it_where_this_is_asked(llm: LLM) -> None:
    base: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
    free = llm.generate("def f(x):", SamplingParams(**base, ignore_eos=True))[0]
    stop = free.text[10:13]
    at = free.text.index(stop)
    for kept in (False, True):
        p = SamplingParams(**base, stop=stop, include_stop_str_in_output=kept)
        assert llm.generate("def f(x):", p)[0].text == free.text[: at + len(stop) * kept]
        assert "".join(llm.stream("def f(x):", p)) == free.text[: at + len(stop) * kept]
    assert llm.tokenizer is not None
    token = free.token_ids[4]
    base["stop_token_ids"] = (token,)
    asked = [SamplingParams(**base, include_stop_str_in_output=kept) for kept in (False, True)]
    texts = [output.text for output in llm.generate(["def f(x):"] * 2, asked)]
    first = free.token_ids.index(token)
    assert texts == [llm.tokenizer.decode(free.token_ids[:n]) for n in (first, first + 1)]


def test_special_tokens_are_text_where_this_is_asked(llm: LLM) -> None:
    assert llm.tokenizer is not None
    [end] = llm.engine.model.config.eos_token_ids[:1]
    p: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {end: 100}, "ignore_eos": True}
    name = llm.tokenizer.decode([end], skip_special_tokens=False)
    assert name
    assert llm.generate("def f(x):", SamplingParams(**p))[0].text == ""
    assert llm.generate("def f(x):", SamplingParams(**p, skip_special_tokens=False))[0].text == 3 * name
    p["ignore_eos"] = False
    for kept in (False, True):
        asked = SamplingParams(**p, skip_special_tokens=False, include_stop_str_in_output=kept)
        assert llm.generate("def f(x):", asked)[0].text == name * kept


def test_stop_strings_do_not_count_before_min_tokens(llm: LLM) -> None:
    base: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "logit_bias": {}, "ignore_eos": True}
    free = llm.generate("def f(x):", SamplingParams(**base))[0]
    assert llm.tokenizer is not None
    stop = next(c for c in free.text if free.text.count(c) > 3)
    new = [b[len(a) :] for a, b in itertools.pairwise(llm.tokenizer.decode(free.token_ids[:n]) for n in range(41))]
    for least in (0, 1, 5, 12, 40):
        got = llm.generate("def f(x):", SamplingParams(**base, stop=stop, min_tokens=least))[0]
        assert len(got.token_ids) == next((n for n, text in enumerate(new, 1) if stop in text and n > least), 40)
        assert free.text.startswith(got.text)


def test_a_stop_string_may_begin_before_min_tokens_and_end_behind_them(llm: LLM) -> None:
    base: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    free = llm.generate("def f(x):", SamplingParams(**base))[0]
    assert llm.tokenizer is not None
    before, after = (llm.tokenizer.decode(free.token_ids[:n]) for n in (8, 9))
    stop = after[len(before) - 2 :]
    got = llm.generate("def f(x):", SamplingParams(**base, stop=stop, min_tokens=8))[0]
    assert (got.text, got.finish_reason) == (free.text[: free.text.index(stop, len(before) - 2)], "stop")
