"""The front door: text in, text out, in order, and nothing left behind."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from reference_impl.assembly.config import course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM, RequestOutput
from reference_impl.interfaces import SamplingParams

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
TEMPLATE = """{{- bos_token }}{% for m in messages %}
{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
<|{{ m.role }}|>{{ m.content }}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the course's tokenizer, written without `transformers`."""
    path = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 4096, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "tie_word_embeddings": True, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_bytes((course_model("target") / "tokenizer.json").read_bytes())
    special = {"bos_token": {"content": "<|im_start|>", "special": True}, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps({**special, "chat_template": TEMPLATE}))
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (4096, 16), "model.norm.weight": (16,)}
    for i in range(2):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm.weight": (16,), p + "post_attention_layernorm.weight": (16,)}
        shapes |= {p + f"self_attn.{x}_proj.weight": (n, 16) for x, n in (("q", 16), ("k", 8), ("v", 8), ("o", 16))}
        shapes |= {p + "mlp.gate_proj.weight": (24, 16), p + "mlp.up_proj.weight": (24, 16)}
        shapes |= {p + "mlp.down_proj.weight": (16, 24)}
    save_file({n: torch.randn(s, generator=generator) for n, s in shapes.items()}, path / "model.safetensors")
    return path


@pytest.fixture
def llm(folder: Path) -> LLM:
    return LLM(folder, block_size=4, num_blocks=40)


def is_idle(engine: Engine) -> bool:
    return not engine.has_work() and not engine.requests and engine.kv.num_available == engine.num_blocks


def test_results_come_in_the_order_of_the_prompts_whenever_they_finish(llm: LLM) -> None:
    prompts = ["import os", "x", "def f(a, b):\n    return", "a b c d e f"]
    params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (9, 1, 5, 2)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == [llm.encode(p) for p in prompts]
    assert [len(o.token_ids) for o in outputs] == [9, 1, 5, 2]
    assert [o.text for o in outputs] == [llm.tokenizer.decode(o.token_ids) for o in outputs]
    alone = [llm.generate(p, s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in outputs] == alone
    assert is_idle(llm.engine)


def test_streaming_gives_the_text_of_generate(llm: LLM) -> None:
    for sampling in (GREEDY, SamplingParams(max_tokens=20, seed=7, stop="e"), SamplingParams(max_tokens=1, seed=1)):
        assert "".join(llm.stream("import os", sampling)) == llm.generate("import os", sampling)[0].text
    assert is_idle(llm.engine)


def test_two_streams_side_by_side_lose_no_text(llm: LLM) -> None:
    alone = {p: llm.generate(p, GREEDY)[0].text for p in ("import", "class A", "x")}
    first, second = llm.stream("import", GREEDY), llm.stream("class A", GREEDY)
    texts = {"import": next(first), "class A": next(second)}
    assert llm.generate("x", GREEDY)[0].text == alone["x"]
    texts["import"] += "".join(first)
    texts["class A"] += "".join(second)
    assert texts == {p: alone[p] for p in texts}
    assert is_idle(llm.engine)


def test_leaving_a_stream_early_frees_all_blocks(llm: LLM) -> None:
    for piece in llm.stream("import os", SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)):
        assert piece
        break
    assert is_idle(llm.engine)
    pieces = llm.stream("import os", GREEDY)
    next(pieces)
    assert not is_idle(llm.engine)
    pieces.close()
    assert is_idle(llm.engine)


def test_a_stream_that_nobody_reads_never_starts(llm: LLM) -> None:
    llm.stream("import os", GREEDY)
    assert is_idle(llm.engine)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([5, 4096], r"prompt token 4096 is outside the vocabulary \[0, 4096\)"),
        ([-1], "prompt token -1 is outside"),
        ([1.5], "expected token ids, which are integers"),
        ([5] * 64, "the prompt has 64 tokens; at most 63 and one token of output fit"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused_and_its_neighbours_are_not_left_behind(
    llm: LLM, prompt: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["import os", prompt, "x"], GREEDY)
    assert is_idle(llm.engine)
    with pytest.raises(ValueError, match=message):
        list(llm.stream(prompt, GREEDY))
    assert is_idle(llm.engine)


@pytest.mark.parametrize("prompt", [None, 5, b"a", [b"a"], [None], ["a", 1.5], [bytearray(b"a")]], ids=repr)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="a prompt: expected a text or a sequence of token ids, got "):
        llm.generate(prompt, GREEDY)
    assert is_idle(llm.engine)


def test_an_array_of_ids_is_one_prompt(llm: LLM) -> None:
    expected = llm.generate([5, 9], GREEDY)[0].token_ids
    assert llm.generate(np.array([5, 9]), GREEDY)[0].token_ids == expected
    assert [output.token_ids for output in llm.generate([np.array([5, 9]), [5, 9]], GREEDY)] == [expected] * 2


def test_the_longest_prompt_that_fits_gets_one_token(llm: LLM) -> None:
    output = llm.generate([[5] * 63], GREEDY)[0]
    assert len(output.token_ids) == 1
    assert output.finish_reason == "length"


def test_a_small_cache_limits_the_length_and_says_so(folder: Path) -> None:
    llm = LLM(folder, block_size=4, num_blocks=5)
    assert len(llm.generate([[5] * 20], GREEDY)[0].token_ids) == 1
    with pytest.raises(ValueError, match=r"at most 20 and one token of output fit .*5 blocks of 4"):
        llm.generate([[5] * 21], GREEDY)


def test_sampling_parameters_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts but 1 sampling parameters"):
        llm.generate(["a", "b"], [GREEDY])
    assert llm.generate([], GREEDY) == []


def test_one_prompt_of_text_or_of_ids_is_one_request(llm: LLM) -> None:
    ids = llm.encode("import os")
    expected = llm.generate("import os", GREEDY)[0].token_ids
    for prompt in (ids, [ids], tuple(ids), torch.tensor(ids), ["import os"]):
        (output,) = llm.generate(prompt if not isinstance(prompt, torch.Tensor) else [prompt.tolist()], GREEDY)
        assert output.token_ids == expected


@pytest.mark.parametrize("seqs", [1, 3])
def test_more_requests_than_seats_are_all_served(folder: Path, seqs: int) -> None:
    llm = LLM(folder, block_size=4, num_blocks=16, max_num_seqs=seqs, max_num_batched_tokens=7)
    prompts = [random.Random(i).choices(range(3, 4096), k=3 + i) for i in range(9)]
    outputs = llm.generate(prompts, GREEDY)
    plenty = LLM(folder).generate(prompts, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plenty]
    assert max(s.num_running for s in llm.engine.trace.steps()) <= seqs
    assert is_idle(llm.engine)


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_with_few_blocks(folder: Path) -> None:
    params = [SamplingParams(max_tokens=15, temperature=1.1, seed=i, ignore_eos=True) for i in range(5)]
    prompts = [[10 * i + 3] * (i + 2) for i in range(5)]
    alone = [LLM(folder).generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    assert [o.token_ids for o in LLM(folder).generate(prompts, params)] == alone
    tight = LLM(folder, block_size=2, num_blocks=12, max_num_batched_tokens=3)
    assert [o.token_ids for o in tight.generate(prompts, params)] == alone
    assert any(s.preempted for s in tight.engine.trace.steps())
    assert len({tuple(a) for a in alone}) == 5


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    outputs = llm.generate(["import os"] * 4, SamplingParams(max_tokens=12, ignore_eos=True))
    assert len({tuple(o.token_ids) for o in outputs}) == 4


def greedy_tokens(llm: LLM, prompt: str) -> list[int]:
    return llm.generate(prompt, GREEDY)[0].token_ids


def test_an_end_token_stops_and_is_not_text(llm: LLM) -> None:
    tokens = greedy_tokens(llm, "import os")
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop_token_ids=(tokens[place],))
    output = llm.generate("import os", sampling)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[: place + 1]
    assert output.text == llm.tokenizer.decode(tokens[:place])
    assert "".join(llm.stream("import os", sampling)) == output.text


def test_the_models_own_end_token_stops_unless_it_is_ignored(folder: Path) -> None:
    llm = LLM(folder)
    tokens = greedy_tokens(llm, "import os")
    place = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    config = json.loads((folder / "config.json").read_text())
    other = folder.parent / f"{folder.name}-eos"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "eos_token_id": [0, tokens[place]]}))
    llm = LLM(other)
    assert llm.generate("import os", SamplingParams(max_tokens=12, temperature=0))[0].token_ids == tokens[: place + 1]
    assert greedy_tokens(llm, "import os") == tokens


def test_a_stop_string_stops_the_request_and_keeps_the_tokens(llm: LLM) -> None:
    full = llm.generate("import os", GREEDY)[0]
    middle = full.text[len(full.text) // 2 :][:3]
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, stop=[middle, "never there"])
    output = llm.generate("import os", sampling)[0]
    assert output.finish_reason == "stop"
    assert output.text == full.text[: full.text.index(middle)]
    assert output.token_ids == full.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < 12
    assert "".join(llm.stream("import os", sampling)) == output.text
    assert is_idle(llm.engine)


def test_one_token_of_output(llm: LLM) -> None:
    output = llm.generate("import os", SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))[0]
    assert output.token_ids == greedy_tokens(llm, "import os")[:1]
    assert output.finish_reason == "length"
    assert output.metrics.num_output_tokens == 1
    assert output.metrics.tpot is None


def test_logprobs_cover_every_token_and_survive_preemption(folder: Path) -> None:
    sampling = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True, logprobs=2)
    prompts = [[3, 4, 5], [6, 7, 8, 9]]
    roomy = LLM(folder).generate(prompts, sampling)
    tight_llm = LLM(folder, block_size=2, num_blocks=10)
    tight = tight_llm.generate(prompts, sampling)
    assert any(s.preempted for s in tight_llm.engine.trace.steps())
    for a, b in zip(roomy, tight, strict=True):
        assert [x.token for x in b.logprobs] == b.token_ids == a.token_ids
        assert [x.logprob for x in b.logprobs] == pytest.approx([x.logprob for x in a.logprobs], abs=1e-4)
        assert all(x.top[0] == (x.token, x.logprob) for x in b.logprobs)


def test_a_conversation_goes_through_the_chat_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "héllo"}, {"role": "assistant", "content": "hi"}]
    text = "<|im_start|><|user|>héllo\n<|assistant|>hi\n<|assistant|>"
    assert llm.chat_prompt(messages) == llm.tokenizer.encode(text, add_special_tokens=False).ids
    assert llm.chat(messages, GREEDY)[0].prompt_token_ids == llm.chat_prompt(messages)
    with pytest.raises(ValueError, match="no tools here"):
        llm.chat_prompt([{"role": "tool", "content": ""}])


def test_several_conversations_are_answered_together(llm: LLM) -> None:
    """vLLM's documented example: outputs = llm.chat(conversations, sampling_params=..., use_tqdm=...)."""
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    outputs = llm.chat(conversations, sampling_params=GREEDY, use_tqdm=True)
    assert [o.outputs[0].token_ids for o in outputs] == [llm.chat(c, GREEDY)[0].token_ids for c in conversations]
    assert [o.prompt_token_ids for o in outputs] == [llm.chat_prompt(c) for c in conversations]
    each = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (1, 2, 3)]
    assert [len(o.outputs[0].token_ids) for o in llm.chat(conversations, each)] == [1, 2, 3]
    with pytest.raises(TypeError, match="sampling and sampling_params are the same"):
        llm.chat(conversations, GREEDY, sampling_params=GREEDY)


def test_the_tokenizer_of_transformers_is_at_hand() -> None:
    llm = LLM(course_model("draft"), num_blocks=8)
    theirs, messages = llm.get_tokenizer(), [{"role": "user", "content": "What is 1 + 1?"}]
    assert theirs.encode("def f(x):") == llm.encode("def f(x):")
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == llm.chat_text(messages)
    small = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 64, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    shape = LLM(shape=small, dummy_weights=True, num_blocks=8)
    with pytest.raises(ValueError, match="a shape with dummy weights has no tokenizer"):
        shape.get_tokenizer()


@pytest.mark.parametrize("form", ["jinja file", "named list"])
def test_a_chat_template_may_be_a_file_or_one_of_several(folder: Path, tmp_path: Path, form: str) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if form == "jinja file":
        (tmp_path / "chat_template.jinja").write_text("J{{ messages[0].content }}{{ eos_token }}")
        expected = "Jhi<|im_end|>"
    else:
        templates = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        expected = "Dhi"
    llm = LLM(tmp_path)
    assert llm.chat_prompt([{"role": "user", "content": "hi"}]) == llm.tokenizer.encode(expected).ids


def test_the_course_tokenizer_gives_the_conversation_that_transformers_gives(folder: Path, tmp_path: Path) -> None:
    import transformers

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((course_model("target") / name).read_bytes())
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    messages = [{"role": "user", "content": "What is 1 + 1?\n"}, {"role": "assistant", "content": "2"}] * 2
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert LLM(tmp_path).chat_prompt(messages) == ids


def test_a_folder_without_a_tokenizer_takes_ids_and_refuses_text(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    llm = LLM(tmp_path)
    output = llm.generate([[3, 4, 5]], GREEDY)[0]
    assert output.token_ids == LLM(folder).generate([[3, 4, 5]], GREEDY)[0].token_ids
    assert output.text == ""
    for wrong in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ValueError, match=r"no tokenizer\.json|no chat template"):
            wrong()
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        llm.generate([[3]], SamplingParams(stop="x"))
    assert is_idle(llm.engine)


def test_samples_are_found_also_where_the_scheduler_takes_them_as_requests_of_their_own() -> None:
    from reference_impl.assembly.parts import Parts
    from reference_impl.core.block_pool import BlockPool
    from reference_impl.core.kv_manager import KVManager
    from reference_impl.features.baselines.static_batching import StaticBatching

    pool = BlockPool(64)
    kv = KVManager(pool, 16)
    parts = Parts(block_pool=pool, kv_manager=kv, scheduler=StaticBatching(kv, 4))
    static = LLM(course_model("draft"), dtype="float32", num_blocks=64, parts=parts)
    plain = LLM(course_model("draft"), dtype="float32", num_blocks=64)
    sampling = SamplingParams(max_tokens=6, n=3, seed=1)
    answers = [one.generate("import os", sampling)[0] for one in (static, plain)]
    texts = [[answer.text, *(other.text for other in answer.others)] for answer in answers]
    assert len(texts[0]) == 3
    assert texts[0] == texts[1]


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """Also where the tests were started in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_raises")
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("part", ["schedule", "submit", "collect", "update"])
def test_ctrl_c_ends_what_runs_and_the_engine_goes_on(part: str, overlap: str, folder: Path, monkeypatch) -> None:
    """Wherever in a step it is pressed; another text that is streamed from the same engine misses nothing."""
    llm = LLM(folder, block_size=4, num_blocks=40, overlap=overlap)
    expected = [o.text for o in llm.generate(["import os", "x"], GREEDY)]
    other = llm.start("x", GREEDY)
    owner = llm.engine.scheduler if part in ("schedule", "update") else llm.engine.executor
    inner, calls = getattr(owner, part), 0

    def pressed(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            signal.raise_signal(signal.SIGINT)
        return inner(*arguments)

    monkeypatch.setattr(owner, part, pressed)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("import os", GREEDY)
    assert calls == 4
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert list(llm.engine.requests) == [other.request.id]
    while other.unfinished:
        llm.step()
    assert other.output().text == expected[1]
    llm.leave(other)
    assert is_idle(llm.engine)
    assert llm.generate("import os", GREEDY)[0].text == expected[0]


@pytest.mark.usefixtures("ctrl_c_raises")
def test_who_presses_ctrl_c_twice_does_not_wait_for_a_step_that_hangs(folder: Path, monkeypatch) -> None:
    llm = LLM(folder, block_size=4, num_blocks=40)
    reached = []

    def hangs(ticket: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        reached.append("once")
        signal.raise_signal(signal.SIGINT)
        reached.append("twice")

    monkeypatch.setattr(llm.engine.executor, "collect", hangs)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("import os", GREEDY)
    assert reached == ["once"]


QWEN = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}{{ '!' if loud }}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def test_a_chat_takes_tools_parts_and_a_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    told = {"chat_template": QWEN, "chat_template_kwargs": {"loud": True}}
    text = f"{json.dumps(TOOL)}<|user|>hi<|assistant|>!"
    expected = llm.tokenizer.encode(text, add_special_tokens=False).ids
    assert llm.chat(messages, GREEDY, tools=[TOOL], **told)[0].prompt_token_ids == expected
    without = llm.tokenizer.encode("<|user|>hi<|assistant|>!", add_special_tokens=False).ids
    assert llm.chat(messages, GREEDY, tools=[TOOL], tool_choice="none", **told)[0].prompt_token_ids == without
    with pytest.raises(ValueError, match="tool_choice: expected 'auto' or 'none', got 'required'"):
        llm.chat(messages, GREEDY, tools=[TOOL], tool_choice="required")  # type: ignore[arg-type]
    assert is_idle(llm.engine)


def test_calls_of_tools_are_found_in_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(folder, tool_call_parser="hermes")
    made = llm.generate
    said = 'Wait.<tool_call>{"name": "f", "arguments": {"a": [1]}}</tool_call>'

    def generate(*args: Any) -> list[RequestOutput]:
        return [replace(made(*args)[0], text=said, finish_reason="stop")]

    monkeypatch.setattr(llm, "generate", generate)
    messages = [{"role": "user", "content": "x"}]
    [output] = llm.chat(messages, GREEDY, tools=[TOOL])
    assert (output.text, output.finish_reason) == ("Wait.", "tool_calls")
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("f", '{"a": [1]}')]
    for [plain] in (llm.chat(messages, GREEDY), llm.chat(messages, GREEDY, tools=[TOOL], tool_choice="none")):
        assert (plain.text, plain.finish_reason, plain.tool_calls) == (said, "stop", ())
    with pytest.raises(ValueError, match="tool_call_parser: expected 'hermes' or"):
        LLM(folder, tool_call_parser="mistral")
