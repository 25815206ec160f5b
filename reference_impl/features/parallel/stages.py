"""A model cut into stages, each with some of its layers (pipeline parallelism).

The first stage looks the tokens up, each stage hands its hidden states [tokens, hidden_size] to the next, and the last
samples. While one stage computes a step, the stage before it computes the next step: see `features/stages`, which plans
for that. All stages get all steps, so each has the same slots and block tables, with the keys and values of its own
layers. What the last stage sampled reaches the others with the next step that is submitted.

A stage may be several ranks, each with a part of every layer: then each hands over to the rank with the same part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.parallel.meeting import Meeting
from reference_impl.features.parallel.model import Built, ModelPart, RankModel
from reference_impl.features.parallel.shared_memory import Board
from reference_impl.features.process.worker import WorkerError
from reference_impl.interfaces import Appended, Opened, Reply, SamplingParams, Step, StepRow
from reference_impl.interfaces.collectives import CollectiveError, Messages
from reference_impl.models.loader import Cut, Destination, NoHead

_PLAIN = SamplingParams()

# --- in a stage -------------------------------------------------------------------------------------------------------


class StageModel:
    """Some of the layers: a `ModelPart`. layers: those of each stage."""

    def __init__(self, messages: Messages, layers: Sequence[range]):
        self.messages, self.layers = messages, layers[messages.rank]
        self.is_first, self.is_last = messages.rank == 0, messages.rank == messages.size - 1

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        # One embedding that is the head, too, is in both the first and the last stage.
        self.has_embedding = self.is_first or (self.is_last and whole.tied_embeddings)
        return replace(whole, stage=self.layers, shard_of=whole)

    def refusal(self, wrong: ValueError, built: Callable[[ModelConfig], Built]) -> Exception:
        return wrong

    def shrink(self, model: Decoder) -> None:
        if not self.has_embedding:
            model.embedding = model.embedding.new_empty(0, model.config.hidden_size)
        if not self.is_last:
            NoHead(model)

    def leaves(self, name: str) -> bool:
        if name.startswith("model.layers."):
            number = name.split(".")[2]
            return number.isdecimal() and int(number) not in self.layers
        if name.startswith("model.embed_tokens."):
            return not self.has_embedding
        return name.startswith("lm_head.") and not self.is_last

    def cut(self, model: Decoder, table: dict[str, Destination]) -> tuple[dict[str, Destination], dict[str, Cut]]:
        """Nothing of a tensor is cut."""
        return {name: found for name, found in table.items() if not self.leaves(name)}, {}

    def join(self, model: Decoder) -> None:
        """Has the stage take its input from the one before it, and hand its output to the next."""
        for layer in model.layers:
            layer.register_forward_hook(self._count)
        if not self.is_first:
            model.embed = Received(self.messages)  # type: ignore[method-assign, assignment]
        if not self.is_last:
            model.layers[-1].register_forward_hook(self._hand_over)

    def _count(self, layer: Any, inputs: Any, output: Any) -> None:
        self.messages.go_on()

    def _hand_over(self, layer: Any, inputs: Any, output: Tensor) -> None:
        self.messages.send(output, self.messages.rank + 1)


class DividedStage:
    """A part of each of a stage's layers: a `ModelPart`."""

    def __init__(self, stage: StageModel, rank: RankModel):
        self.stage, self.rank = stage, rank
        self.refusal = rank.refusal

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        return self.rank.config_of(self.stage.config_of(whole))

    def shrink(self, model: Decoder) -> None:
        self.rank.shrink(model)
        self.stage.shrink(model)

    def leaves(self, name: str) -> bool:
        return self.stage.leaves(name) or self.rank.leaves(name)

    def cut(self, model: Decoder, table: dict[str, Destination]) -> tuple[dict[str, Destination], dict[str, Cut]]:
        table, _ = self.stage.cut(model, table)
        return self.rank.cut(model, table)

    def join(self, model: Decoder) -> None:
        self.rank.join(model)
        self.stage.join(model)


class Column:
    """`Messages` between the ranks that have the same part in their stages: a rank's number is its stage."""

    def __init__(self, links: Meeting):
        self.links, self.rank, self.size = links, links.place // links.size, links.num_places // links.size
        self.go_on = links.go_on

    @property
    def step(self) -> int:
        return self.links.step

    def send(self, x: Tensor, to: int) -> None:
        self.links.send(x, to * self.links.size + self.links.rank)

    def recv(self, source: int) -> Tensor:
        return self.links.recv(source * self.links.size + self.links.rank)


def part_of(links: Meeting, layers: Sequence[range] | None, by_expert: bool = False) -> ModelPart:
    """How the model of a rank is made. layers: those of each stage, None where there is one; by_expert: see
    `RankModel`."""
    if layers is None:
        return RankModel(links, by_expert)
    stage = StageModel(Column(links), layers)
    return stage if links.size == 1 else DividedStage(stage, RankModel(links, by_expert))


class Received:
    """In the place of an embedding: the hidden states [tokens, hidden_size] of the stage before this one."""

    def __init__(self, messages: Messages):
        self.messages = messages

    def __call__(self, ids: Tensor) -> Tensor:
        x = self.messages.recv(self.messages.rank - 1)
        if len(x) != len(ids):
            m = self.messages
            raise CollectiveError(
                f"step {m.step}: stage {m.rank} has {len(ids)} tokens, and stage {m.rank - 1} computed {len(x)}: they "
                "are not at the same step any more"
            )
        return x


# --- where steps are planned ------------------------------------------------------------------------------------------


class Stages:
    """What each rank gets of a step, and what their replies make together. Ranks are numbered by stage, and in it by
    the part that they have of each layer; width: how many there are in a stage.

    The ranks of the last stage get each step as it is, the others one that samples nothing. What was sampled is
    appended to their slots with the next step, unless the slot was closed meanwhile.
    """

    def __init__(self, num_stages: int, width: int = 1):
        self.num_stages, self.width, self.size = num_stages, width, num_stages * width
        self.last = range(self.size - width, self.size)  # the ranks that sample, and so take masks
        self._requests: dict[int, Opened] = {}  # by slot
        self._rows: dict[int, list[tuple[StepRow, Opened]]] = {}  # by step in flight
        self._new: dict[int, Appended] = {}  # by slot: what the next step tells

    def steps(self, step: Step) -> Sequence[Step]:
        """What each rank gets of a step."""
        if self.num_stages == 1:
            return [step] * self.width
        for slot in (*step.closed, *(new.slot for new in step.opened)):
            self._requests.pop(slot, None)
            self._new.pop(slot, None)
        self._requests |= {new.slot: new for new in step.opened}
        self._rows[step.step_id] = [(row, self._requests[row.slot]) for row in step.rows]
        earlier = replace(
            step,
            opened=tuple(new._replace(sampling=_PLAIN, pooling=None) for new in step.opened),
            appended=(*self._new.values(), *step.appended),
            rows=tuple(row._replace(samples=False) for row in step.rows),
            takes_masks=False,
        )
        self._new = {}
        return [*[earlier] * self.last.start, *[step] * self.width]

    def reply(self, step: int, replies: Sequence[Reply]) -> Reply:
        """What the replies of all ranks make together: that of the last stage, whose ranks must agree."""
        found = [replies[rank] for rank in self.last]
        check_alike(step, self.last, [reply.tokens for reply in found], "tokens")
        if self.num_stages > 1:
            self._remember(step, found[0])
        return replace(found[0], ranks=tuple(time for reply in replies for time in reply.ranks))

    def _remember(self, step: int, reply: Reply) -> None:
        for given_up in [number for number in self._rows if number < step]:  # its masks never came
            del self._rows[given_up]
        for (row, request), tokens in zip(self._rows.pop(step), reply.tokens, strict=True):
            if tokens and self._requests.get(row.slot) is request and not request.holds:
                self._new[row.slot] = Appended(row.slot, row.start + row.num_tokens, tokens)

    def late(self, board: Board, step: int, within: str, unanswered: Sequence[int]) -> tuple[Sequence[int], str]:
        """The ranks that all others wait for, and what they did not do; none where that is not known. within: a time,
        for the text; unanswered: the ranks whose reply is awaited.

        Stages behind one that has not answered wait for it. In a stage it is those that came to the fewest meetings,
        or, if it stopped behind the step's last one, those that did not answer.
        """
        if self.num_stages > 1 and not unanswered:
            return (), ""
        first = unanswered[0] // self.width if unanswered and self.num_stages > 1 else 0
        stage = range(first * self.width, (first + 1) * self.width)
        late, call = board.waited_for(stage)
        if late:
            return late, f"did not come to {call}{within}, for which all others wait"
        awaited = [rank for rank in unanswered if rank in stage]
        if not 0 < len(awaited) < self.size:
            return (), ""
        others = ", and all others did"
        if len(awaited) < len(unanswered):
            others = ", and those behind it wait for it"
        return awaited, f"did not answer step {step}{within}{others}"


def check_alike(step: int, ranks: Sequence[int], found: Sequence[Any], what: str) -> Any:
    """Returns what all ranks found. WorkerError where one found something else than the first of them."""
    for rank, each in zip(ranks, found, strict=True):
        if each != found[0]:
            raise WorkerError(
                f"step {step}: rank {rank} has other {what} than rank {ranks[0]}: {each} and {found[0]}", step, rank
            )
    return found[0]
