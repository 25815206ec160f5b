"""A model in stages: the texts of one process whatever the schedule, its layers between the stages, what a lost stage
says."""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import signal
import threading
from array import array
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from reference_impl.assembly.config import EngineConfig, course_model
from reference_impl.assembly.engine import Engine
from reference_impl.assembly.llm import LLM
from reference_impl.assembly.model import load_model
from reference_impl.assembly.ranks import ranked_engine
from reference_impl.core.decoder import Decoder
from reference_impl.features.parallel.loading import bytes_of_layers
from reference_impl.features.parallel.shares import stages_of
from reference_impl.features.parallel.stages import StageModel, Stages, part_of
from reference_impl.features.parallel.threads import ThreadGroup
from reference_impl.features.process.worker import WorkerError
from reference_impl.interfaces import Appended, Opened, Reply, SamplingParams, Step, StepDone, StepRow
from reference_impl.interfaces.collectives import RankTime
from reference_impl.models.quantization.head import StoredHead
from reference_impl.models.quantization.quantize_folder import Job, quantize_folder
from reference_impl.models.quantization.recipes import METHODS
from reference_impl.models.quantization.scheme import Activations, Scheme
from reference_impl.observe.perfetto import to_perfetto
from reference_impl.observe.trace import idle_share
from tests.examples import examples
from tests.executor.forked import forked_workers, kill  # noqa: F401
from tests.features.parallel.test_models import AWQ, FAMILIES, GPTQ, IDS, QUANTIZED, together
from tests.features.parallel.test_processes import ASKED, forked_ranked, ranked, serve  # noqa: F401
from tests.features.parallel.test_schedules import check_alike, closing, workloads
from tests.features.parallel.test_schedules import serve as served
from tests.models.conftest import VARIANTS, edit, our_logits, save  # noqa: F401
from tests.models.test_gptq_awq import written as written_in_words  # noqa: F401
from tests.models.test_stored_weights import written  # noqa: F401
from tests.quantization.conftest import make_folder  # noqa: F401

CONFIG = EngineConfig(num_blocks=40, block_size=8, pipeline_parallel_size=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of four layers."""
    from tests.models.conftest import _build

    made = {}
    for name, variant in (("llama", "llama_biases"), ("windows", "gemma3")):
        made[name] = tmp_path_factory.mktemp(name)
        _build(variant, num_hidden_layers=4).to(torch.float64).save_pretrained(made[name])
    return made


@pytest.mark.parametrize("name", ["llama", "windows"])
@given(
    workload=workloads(), size=st.sampled_from([2, 3, 4]), width=st.sampled_from([1, 1, 2]),
    kv_dtype=st.sampled_from(["auto", "auto", "int8"]),
)  # fmt: skip
@settings(max_examples=examples(20))
def test_texts_are_those_of_one_process(
    folders: dict[str, Path], name: str, workload: Any, size: int, width: int, kv_dtype: str
) -> None:
    asked, options = workload
    options |= {"speculative": "off", "kv_dtype": kv_dtype}
    if name == "windows":  # each stage has a layer of each group
        options |= {"prefix_cache": "off", "num_blocks": 200}
        size = 2
    plain = EngineConfig(
        num_blocks=200, prefix_cache="off", sampling_noise=options["sampling_noise"], kv_dtype=kv_dtype
    )
    folder = folders[name]
    expected = served(Engine(load_model(folder, torch.float64), plain), asked)
    config = EngineConfig(**options, pipeline_parallel_size=size, tensor_parallel_size=width)
    with closing(ranked_engine(folder, config, dtype="float64", ranks="threads")) as engine:
        check_alike(served(engine, asked), expected)
        assert engine.kv.num_available == engine.num_blocks


DIVIDED = ("llama_biases", "llama3_rope_tied", "gemma2", "mixtral", "olmo2", "phi3_all")


@pytest.mark.parametrize("variant", [n if n in DIVIDED else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_so_are_those_of_stages_whose_layers_are_divided(variant: str, save: Any, our_logits: Any) -> None:  # noqa: F811
    _, folder = save(variant, torch.float64)
    whole = load_model(folder, torch.float64)
    size = whole.config.num_layers
    by_expert = whole.config.experts is not None
    group, layers = ThreadGroup(2 * size, width=2), stages_of(*bytes_of_layers(folder, size), size)
    models = [
        load_model(folder, torch.float64, rank=part_of(group.rank(i), layers, by_expert)) for i in range(2 * size)
    ]
    assert all(model.config.whole == whole.config for model in models)
    found = together(models, lambda model: our_logits(model, *IDS))
    for mine, its, other in zip(our_logits(whole, *IDS), *found[-2:], strict=True):
        assert torch.equal(its, other), "the same bits on both ranks of the last stage"
        assert float((mine - its).abs().max()) <= 1e-12 * float(mine.abs().max())
    tied = whole.lm_head is None
    rows = [len(model.embedding) for model in models]
    assert sum(rows) == whole.config.vocab_size * (1 + tied)
    assert not any(rows[2:-2])


@pytest.mark.parametrize("variant", [n if n in FAMILIES else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS])
def test_logits_of_the_last_stage_are_those_of_one_process(variant: str, save: Any, our_logits: Any) -> None:  # noqa: F811
    _, folder = save(variant, torch.float64)
    whole = load_model(folder, torch.float64)
    for size in {2, whole.config.num_layers}:
        group, layers = ThreadGroup(size), stages_of(*bytes_of_layers(folder, whole.config.num_layers), size)
        models = [load_model(folder, torch.float64, rank=StageModel(group.rank(i), layers)) for i in range(size)]
        assert [[layer.index for layer in model.layers] for model in models] == [[*own] for own in layers]
        found = together(models, lambda model: our_logits(model, *IDS))
        for mine, its in zip(our_logits(whole, *IDS), found[-1], strict=True):
            assert torch.equal(mine, its), "the same operations in the same order"
        own = sum(layer.num_parameters() for model in models for layer in model.layers)
        assert own == sum(layer.num_parameters() for layer in whole.layers)
        tied = whole.lm_head is None
        assert [len(model.embedding) > 0 for model in models] == [True, *[False] * (size - 2), tied]
        assert [model.lm_head is not None and len(model.lm_head) > 0 for model in models[:-1]] == [False] * (size - 1)


def check_stages(folder: Path, our_logits: Any) -> list[Decoder]:  # noqa: F811
    whole, group = load_model(folder, torch.float64), ThreadGroup(2)
    layers = stages_of(*bytes_of_layers(folder, whole.config.num_layers), 2)
    models = [load_model(folder, torch.float64, rank=StageModel(group.rank(i), layers)) for i in range(2)]
    found = together(models, lambda model: our_logits(model, *IDS))
    for mine, its in zip(our_logits(whole, *IDS), found[-1], strict=True):
        assert torch.equal(mine, its)
    return models


@pytest.mark.parametrize("scheme", [*QUANTIZED, Scheme("int8", "channel", activations=Activations("int8"))], ids=str)
def test_what_comes_quantized_is_as_in_one_process(scheme: Scheme, written: Any, our_logits: Any) -> None:  # noqa: F811
    folder, _ = written(scheme)
    check_stages(folder, our_logits)


@pytest.mark.parametrize("raw", [AWQ, GPTQ | {"desc_act": True}], ids=["awq", "act-order"])
def test_so_is_act_order(raw: dict[str, Any], written_in_words: Any, our_logits: Any) -> None:  # noqa: F811
    folder, _ = written_in_words(raw, num_hidden_layers=2)
    check_stages(folder, our_logits)


@pytest.mark.parametrize("tied", [True, False])
def test_so_is_a_quantized_head(tied: bool, make_folder: Any, our_logits: Any, tmp_path: Path) -> None:  # noqa: F811
    source = make_folder(vocab_size=97, tie_word_embeddings=tied)
    quantize_folder(Job(source, tmp_path / "out", dataclasses.replace(METHODS["rtn"], lm_head="int8")))
    first, last = check_stages(tmp_path / "out", our_logits)
    assert isinstance(last.head, StoredHead)
    assert not isinstance(first.head, StoredHead)


@given(layers=st.lists(st.integers(1, 9), min_size=1, max_size=7), head=st.integers(0, 30), data=st.data())
@settings(max_examples=examples(100))
def test_no_other_cut_has_a_cheaper_dearest_stage(layers: list[int], head: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(layers)))

    def dearest(stages: list[range]) -> float:
        costs = [float(sum(layers[i] for i in stage)) for stage in stages]
        return max(*costs[:-1], costs[-1] + head / 2, 0)

    found = stages_of(layers, head, size)
    assert [i for stage in found for i in stage] == [*range(len(layers))]
    assert all(len(stage) for stage in found)
    for cuts in itertools.combinations(range(1, len(layers)), size - 1):
        ends = (*cuts, len(layers))
        assert dearest(found) <= dearest([range(a, b) for a, b in zip((0, *cuts), ends, strict=True)])


def test_the_last_of_equal_stages_has_fewer_layers_for_its_head() -> None:
    folder, config = course_model("target"), load_model(course_model("target")).config
    layers, head = bytes_of_layers(folder, config.num_layers)
    assert head == config.vocab_size * config.hidden_size * 2, "bfloat16 in its file, tied"
    assert len(set(layers)) == 1
    assert [len(stage) for stage in stages_of([10] * 8, 40, 2)] == [5, 3]
    with pytest.raises(ValueError, match="pipeline_parallel_size: expected at most 8, the layers of this model, got 9"):
        stages_of([10] * 8, 40, 9)


def test_a_file_that_is_not_whole_is_named(tmp_path: Path) -> None:
    shutil.copytree(course_model("draft"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"{file}: not a complete safetensors file"):
        ranked_engine(tmp_path / "model", CONFIG, ranks="threads")


@pytest.mark.parametrize("layout", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_a_gguf_file_is_refused_by_name(layout: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=f"{file}: a GGUF file is not divided among ranks"):
        ranked_engine(file, EngineConfig(num_blocks=40, **{layout: 2}), ranks="threads")


def test_a_stage_does_not_read_what_others_have(save: Any) -> None:  # noqa: F811
    """A tensor of wrong shape is found by the stage that has it alone."""
    _, folder = save("llama_biases", torch.float64)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.0.self_attn.o_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    group = ThreadGroup(2)
    load_model(folder, torch.float64, rank=StageModel(group.rank(1), [range(1), range(1, 2)]))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.o_proj\.weight"):
        load_model(folder, torch.float64, rank=StageModel(group.rank(0), [range(1), range(1, 2)]))


def opened(slot: int, name: str, holds: bool = False) -> Opened:
    sampling = SamplingParams(temperature=0, logprobs=2)
    return Opened(slot, name, array("q", [1, 2]), 2, 0, sampling, 0, 0, holds, pooling=None)


def reply(number: int, *tokens: tuple[int, ...]) -> Reply:
    return Reply(number, tokens, {}, 0.0, 0.0)


def test_what_was_sampled_reaches_the_other_stages_with_the_next_step_unless_its_slot_was_closed() -> None:
    stages, row = Stages(3), StepRow(0, 0, 2, True)
    first = Step(1, opened=(opened(0, "a"), opened(1, "b"), opened(2, "c", holds=True)), takes_masks=True,
                 rows=(row, row._replace(slot=1), row._replace(slot=2)))  # fmt: skip
    *earlier, last = stages.steps(first)
    assert last is first
    assert len(earlier) == 2
    assert earlier[0].opened[0].sampling == SamplingParams(), "nothing is sampled there"
    assert not earlier[0].takes_masks
    assert not any(row.samples for row in earlier[0].rows)
    closing_step = Step(2, closed=(1,), opened=(opened(1, "d"),))  # while step 1 is in flight
    assert stages.steps(closing_step)[0].appended == ()
    assert stages.reply(1, [reply(1), reply(1), reply(1, (7,), (8,), (9,))]).tokens == ((7,), (8,), (9,))
    told = stages.steps(Step(3))
    assert [each.appended for each in told] == [(Appended(0, 2, (7,)),)] * 2 + [()]
    assert stages.steps(Step(4))[0].appended == (), "once"


def test_two_steps_are_in_flight_at_the_same_time() -> None:
    """The last stage does not go on before the first one has begun the next step."""
    engine = ranked_engine(course_model("draft"), CONFIG, ranks="threads")
    first, last = engine.executor.executors
    begun: dict[int, threading.Event] = defaultdict(threading.Event)
    submit_first, submit_last = first.submit, last.submit
    overlapped = []

    def begin(step: Step) -> Any:
        begun[step.step_id].set()
        return submit_first(step)

    def follow(step: Step) -> Any:
        if 1 < step.step_id < 8:  # four requests, two a step, of six tokens: there is a next one
            overlapped.append(begun[step.step_id + 1].wait(60))
        return submit_last(step)

    first.submit, last.submit = begin, follow
    with closing(engine):
        for i in range(4):
            engine.add([5, 9, 3 + i], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), f"r{i}")
        while engine.has_work():
            engine.step()
    assert len(overlapped) > 3
    assert all(overlapped)


def test_the_trace_says_when_each_rank_did_a_step_and_perfetto_shows_it() -> None:
    engine = ranked_engine(course_model("draft"), dataclasses.replace(CONFIG, tensor_parallel_size=2), ranks="threads")
    with closing(engine):
        engine.add([5, 9, 3], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), "a")
        run(engine)
        steps = engine.trace.steps()
    for step in steps:
        assert len(step.ranks) == 4
        assert step.ranks[2][:2] == (step.started_at, step.finished_at), "of a step its last stage's"
        assert all(time.waited >= 0 and time.started_at <= time.finished_at for time in step.ranks)
    assert 0 < idle_share(steps) < 1
    events = to_perfetto(engine.trace)["traceEvents"]
    tracks = {event["args"]["name"] for event in events if event["ph"] == "M" and event["pid"] == 3}
    assert tracks == {"ranks", "rank 0", "rank 1", "rank 2", "rank 3"}
    slices = [event for event in events if event["ph"] == "X" and event["pid"] == 3]
    assert len(slices) == 4 * len(steps)
    assert all(event["args"]["waited_ms"] >= 0 for event in slices)


@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (2, 1), (4, 4), (4, 32)])
def test_the_idle_share_of_stages_that_are_filled_once_is_the_bubble(stages: int, batches: int) -> None:
    """Each stage has a step a second later than the one before it; the last one has had it, and waited for it."""

    def step(number: int) -> StepDone:
        ranks = tuple(RankTime(number, number + stage + 1.0, float(stage)) for stage in range(stages))
        return StepDone(number, number, number + stages, (), (), 0, 0, 0, ranks=ranks)

    steps = [step(number) for number in range(batches)]
    assert idle_share(steps) == pytest.approx((stages - 1) / (batches + stages - 1))
    assert idle_share([dataclasses.replace(one, ranks=()) for one in steps]) == 0


def test_beams_grammars_and_embeddings_of_stages() -> None:
    one = LLM(course_model("draft"), dtype="float64", device="cpu", num_blocks=60)
    two = LLM(course_model("draft"), dtype="float64", device="cpu", num_blocks=60, pipeline_parallel_size=2,
              worker="threads")  # fmt: skip
    found, embedded = list[Any](), list[Any]()
    with closing(two.engine):
        for llm in (one, two):
            found.append([beam.tokens for beam in llm.beam_search("def f(", width=3, max_tokens=6)])
            embedded.append(llm.embed(["class A:"])[0].outputs.embedding)
        assert found[0] == found[1]
        assert embedded[0] == pytest.approx(embedded[1])
        texts: list[Any] = []
        for llm in (one, two):
            firsts = [llm.engine.add([i, 2], SamplingParams(max_tokens=9, temperature=0), f"g{i}",
                                     grammar=[Sums(), None][i % 2]) for i in range(5)]  # fmt: skip
            while llm.engine.has_work():
                llm.engine.step()
            texts.append([request.tokens for request in firsts])
        assert texts[0] == texts[1]


def test_a_request_whose_numbers_are_not_finite_ends_alone() -> None:
    engine = ranked_engine(course_model("draft"), CONFIG, ranks="threads")
    engine.executor.executors[0].executor.model.embedding[7] = torch.nan
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, allowed_token_ids=[1, 2, 3])
    with closing(engine):
        broken, right = (engine.add(prompt, sampling, name) for prompt, name in (([7, 9], "a"), ([5, 9], "b")))
        run(engine)
    assert "not all finite numbers; of a model in stages the place is not looked for" in str(broken.error)
    assert right.error is None
    assert len(right.output_tokens) == 4


class Sums:
    """A grammar whose masks depend on all that was written."""

    def allowed(self, output: Sequence[int]) -> bytes:
        token = (sum(output) + 7 * len(output)) % 300
        return (1 << token | 1 << (token + 5) % 300).to_bytes(512, "little")


def run(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


# --- in processes -----------------------------------------------------------------------------------------------------


def test_stages_in_processes_write_the_text_of_one_process(forked_ranked) -> None:  # noqa: F811
    expected = serve(Engine(load_model(course_model("draft"), torch.float32), EngineConfig(num_blocks=40)))
    engine = forked_ranked(CONFIG)
    assert serve(engine) == expected
    first, last = engine.executor.reports()
    assert first.num_bytes > 0
    assert last.num_bytes == 0


def test_stages_whose_layers_are_divided_write_the_text_of_one_process_and_a_stopped_rank_is_named(
    ranked: Any,  # noqa: F811
) -> None:
    expected = serve(Engine(load_model(course_model("draft"), torch.float32), EngineConfig(num_blocks=40)))
    engine = ranked(dataclasses.replace(CONFIG, tensor_parallel_size=2))
    assert serve(engine) == expected
    reports = engine.executor.reports()
    assert [report.rank for report in reports] == [0, 1, 2, 3]
    assert reports[0].num_bytes == reports[1].num_bytes > 0
    engine.add(*ASKED[0])
    engine.step()
    os.kill(engine.executor.ranks[2].pid, signal.SIGSTOP)
    engine.executor.seconds = 1
    with pytest.raises(WorkerError, match=r"rank 2 \(process \d+\) did not (come to all_|answer step)") as caught:
        run(engine)
    assert caught.value.rank == 2


def test_a_stage_that_is_killed_is_named(forked_ranked) -> None:  # noqa: F811
    engine = forked_ranked(CONFIG)
    engine.add(*ASKED[0])
    engine.step()
    kill(engine.executor.ranks[0])
    with pytest.raises(WorkerError, match=r"worker 0 \(process \d+\) was killed by signal 9") as caught:
        run(engine)
    assert caught.value.rank == 0
    assert all(rank._process.poll() is not None for rank in engine.executor.ranks)


def test_a_stage_that_is_stopped_is_named_and_not_the_one_that_waits_for_it(ranked) -> None:  # noqa: F811
    engine = ranked(CONFIG)
    engine.add(*ASKED[0])
    engine.step()
    os.kill(engine.executor.ranks[0].pid, signal.SIGSTOP)
    engine.executor.seconds = 1
    late = (
        r"rank 0 \(process \d+\) did not answer step \d+ within 1 s, and (those behind it wait for it|all others did)"
    )
    with pytest.raises(WorkerError, match=late) as caught:
        run(engine)
    assert caught.value.rank == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculative": "ngram"}, "speculative='ngram': a draft is tried by all stages"),
        ({"graphs": "on"}, "graphs='on'"),
        ({"attention": "triton"}, "attention='triton'"),
    ],
)
def test_what_does_not_go_with_stages_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(CONFIG, **options)
    with pytest.raises(ValueError, match=f"pipeline_parallel_size=2 with {message}.*. Leave one of the two out"):
        ranked_engine(course_model("draft"), config)
    with pytest.raises(ValueError, match="expected at most 2, the layers of this model, got 70"):
        ranked_engine(course_model("draft"), dataclasses.replace(CONFIG, pipeline_parallel_size=70))
