"""A model cut into stages, each with some of its layers (pipeline parallelism).

The first stage looks the tokens up, each stage hands its hidden states [tokens, hidden_size] to the next, and the last
samples. While one stage computes a step, the stage before it computes the next step: see `features/stages`, which plans
for that. All stages get all steps, so each has the same slots and block tables, with the keys and values of its own
layers. What the last stage sampled reaches the others with the next step that is submitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from reference_impl.core.decoder import Decoder
from reference_impl.core.model_config import ModelConfig
from reference_impl.features.parallel.shared_memory import Board
from reference_impl.interfaces import Appended, Opened, Reply, SamplingParams, Step, StepRow
from reference_impl.interfaces.collectives import CollectiveError, Messages
from reference_impl.models.loader import Cut, Destination, NoHead

_PLAIN = SamplingParams()

# --- in a stage -------------------------------------------------------------------------------------------------------


class StageModel:
    """How a stage's model is made, like `RankModel`. layers: those of each stage."""

    def __init__(self, messages: Messages, layers: Sequence[range]):
        self.messages, self.layers = messages, layers[messages.rank]
        self.is_first, self.is_last = messages.rank == 0, messages.rank == messages.size - 1

    def config_of(self, whole: ModelConfig) -> ModelConfig:
        """The config of this stage's model."""
        # One embedding that is the head, too, is in both the first and the last stage.
        self.has_embedding = self.is_first or (self.is_last and whole.tied_embeddings)
        return replace(whole, stage=self.layers, shard_of=whole)

    def refusal(
        self, wrong: ValueError, built: Callable[[ModelConfig], tuple[Decoder, dict[str, Destination]]]
    ) -> Exception:
        return wrong

    def shrink(self, model: Decoder) -> None:
        """Gives up the room for an embedding and a head that other stages have."""
        if not self.has_embedding:
            model.embedding = model.embedding.new_empty(0, model.config.hidden_size)
        if not self.is_last:
            NoHead(model)

    def leaves(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is of other stages alone."""
        if name.startswith("model.layers."):
            number = name.split(".")[2]
            return number.isdecimal() and int(number) not in self.layers
        if name.startswith("model.embed_tokens."):
            return not self.has_embedding
        return name.startswith("lm_head.") and not self.is_last

    def cut(self, model: Decoder, table: dict[str, Destination]) -> tuple[dict[str, Destination], dict[str, Cut]]:
        """The destinations of this stage's model; nothing of a tensor is cut."""
        return {name: found for name, found in table.items() if not self.leaves(name)}, {}

    def join(self, model: Decoder) -> None:
        """Connects the stage with those beside it. The model has its weights."""
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
    """A `Division`: the last stage gets each step as it is, the others one that samples nothing. What was sampled is
    appended to their slots with the next step, unless the slot was closed meanwhile."""

    def __init__(self, num_stages: int):
        self.num_stages = num_stages
        self._requests: dict[int, Opened] = {}  # by slot
        self._rows: dict[int, list[tuple[StepRow, Opened]]] = {}  # by step in flight
        self._new: dict[int, Appended] = {}  # by slot: what the next step tells

    def steps(self, step: Step, size: int) -> Sequence[Step]:
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
        return [*[earlier] * (size - 1), step]

    def samplers(self, size: int) -> Sequence[int]:
        return (size - 1,)

    def reply(self, step: int, replies: Sequence[Reply]) -> Reply:
        """That of the last stage."""
        for given_up in [number for number in self._rows if number < step]:  # its masks never came
            del self._rows[given_up]
        for (row, request), tokens in zip(self._rows.pop(step), replies[-1].tokens, strict=True):
            if tokens and self._requests.get(row.slot) is request and not request.holds:
                self._new[row.slot] = Appended(row.slot, row.start + row.num_tokens, tokens)
        return replies[-1]

    def late(self, board: Board, step: int, within: str, unanswered: Sequence[int]) -> tuple[Sequence[int], str]:
        """The first one: those behind it wait for what it hands over."""
        first, behind = unanswered[:1], unanswered[1:]
        return first, f"did not answer step {step}{within}" + (", and those behind it wait for it" if behind else "")
