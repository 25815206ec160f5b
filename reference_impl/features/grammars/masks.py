"""A grammar's masks in a worker: as bits, from the host's bytes to scores that rule the other tokens out; the part of a
step that waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reference_impl.core.staging import to_device
from reference_impl.core.worker import StepRun
from reference_impl.core.worker_feature import StepPart
from reference_impl.interfaces import Masks


@dataclass(frozen=True)
class Allowed:
    """The masks of some of the logits. rows: which of the logits. masks: theirs; see `Grammar.allowed`."""

    rows: Sequence[int]
    masks: Sequence[bytes]


def masked(scores: Tensor, allowed: Allowed) -> Tensor:
    """The scores [num_rows, vocab_size] with -inf for what is not allowed; a new tensor if there is a mask."""
    if not allowed.rows:
        return scores
    bits = np.frombuffer(bytearray().join(allowed.masks), np.uint8).reshape(len(allowed.rows), -1)
    t = to_device({"rows": np.array(allowed.rows), "bits": bits}, scores.device)
    token = torch.arange(scores.shape[1], device=scores.device)
    ruled_out = (t["bits"][:, token // 8] >> (token % 8)) & 1 == 0
    # What is allowed stays above what is ruled out, whatever the model and the penalties made of it.
    finite = scores[t["rows"]].nan_to_num(nan=torch.finfo(scores.dtype).min)
    scores = scores.clone()
    scores[t["rows"]] = finite.masked_fill(ruled_out, -torch.inf)
    return scores


def usable(masks: Sequence[bytes | None], vocab_size: int) -> Allowed:
    """The masks, of those of each row, that `check_mask` accepts."""
    size = -(-vocab_size // 8)
    rows = [at for at, mask in enumerate(masks) if mask and len(mask) == size and allows_any(mask, vocab_size)]
    return Allowed(rows, [masks[at] or b"" for at in rows])


def one_of(masks: bytes, at: int, number: int) -> bytes:
    """Mask `at` of `number` masks joined. If they cannot be split evenly, all of them: `check_mask` then raises."""
    size, rest = divmod(len(masks), number)
    return masks if number == 1 or rest else masks[at * size : (at + 1) * size]


def allows_any(mask: bytes, vocab_size: int) -> bool:
    return bool(int.from_bytes(mask, "little") & ((1 << vocab_size) - 1))


def check_mask(mask: bytes, vocab_size: int, request_id: str) -> None:
    """Raises ValueError unless the mask has a bit for each token, and at least one is set."""
    expected = -(-vocab_size // 8)
    if not isinstance(mask, bytes) or len(mask) != expected:
        got = f"{len(mask)} bytes" if isinstance(mask, bytes) else repr(type(mask).__name__)
        raise ValueError(
            f"request {request_id!r}: its grammar's mask must be {expected} bytes, a bit for each of {vocab_size} "
            f"tokens; got {got}"
        )
    if not allows_any(mask, vocab_size):
        raise ValueError(f"request {request_id!r}: its grammar allows no token; abort it, or let the grammar end it")


class MaskPart(StepPart):
    allowed: Allowed | None = None

    def needs_logits(self, run: StepRun) -> bool:
        return True

    def waits(self, run: StepRun) -> bool:
        return self.allowed is None

    def allow(self, run: StepRun, masks: Masks) -> None:
        batch, vocab_size = run.batch, run.worker.model.config.vocab_size
        rows, found, first = [], [], 0
        for place, row in enumerate(batch.sampling):
            if place and batch.sampling[place - 1] != row:
                first = place
            given, number = masks.rows[batch.order[row]], 1 + (batch.drafts[row] if batch.drafts else 0)
            if given is None:
                continue
            mask, is_named = one_of(given, place - first, number), run.step.rows[batch.order[row]].drafts
            if place > first and not is_named and not allows_any(mask, vocab_size):
                continue  # it stands behind a draft that will not be kept
            check_mask(mask, vocab_size, batch.request_ids[row])
            rows.append(place)
            found.append(mask)
        self.allowed = Allowed(rows, found)
        run.masked = rows, [masks.rows[at] is not None for at in batch.order]

    def move_scores(self, run: StepRun) -> None:
        assert self.allowed is not None  # `waits`
        run.scores = masked(run.scores, self.allowed)


def finish(run: StepRun, masks: Masks) -> None:
    """Samples a step under its masks. ValueError if they are another step's, or are not masks; RuntimeError if the step
    waits for none."""
    step = run.step
    if not run.waits:
        raise RuntimeError(f"step {step.step_id} waits for no masks: it was submitted without, or has them")
    if (masks.step_id, len(masks.rows)) != (step.step_id, len(step.rows)):
        raise ValueError(
            f"step {step.step_id} of {len(step.rows)} rows got masks of step {masks.step_id} for {len(masks.rows)}"
        )
    (part,) = (part for part in run.parts if isinstance(part, MaskPart))
    part.allow(run, masks)
    run.end()
