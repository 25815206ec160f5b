"""What a workload file may say (YAML), and the errors that say where it is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from reference_impl.simulation.workloads.arrivals import Arrivals
from reference_impl.simulation.workloads.distributions import Distribution, Documented, NotNegative


class WorkloadError(ValueError):
    """A workload or a trace that cannot be used: file, line and field, what was expected, what came."""


Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Tenants(Documented):
    """`num` customers. The r-th sends in proportion to r^-zipf, and its requests begin with its own system prompt."""

    num: Count
    zipf: NotNegative
    system_prompt: Distribution


class Documents(Documented):
    """Retrieved texts between system prompt and session: `per_turn` or `per_session` of a store of `num`.

    The r-th most popular is drawn in proportion to r^-zipf; the same one twice in a prompt is left out.
    """

    num: Count
    zipf: NotNegative
    drawn: Literal["per_turn", "per_session"]
    count: Distribution
    tokens: Distribution


class Images(Documented):
    """Images at the start of a session, unique to it."""

    count: Distribution
    tokens: Distribution


class KeepOutput(Documented):
    probability: Share


class AnswerSpeed(Documented):
    seconds: NotNegative


class Limit(Documented):
    tokens: Count


class Workload(BaseModel):
    """A workload. Lengths in tokens, times in seconds.

    A session sends `turns` requests. The prompt of each is: system prompt, documents, then the session's own text:
    images, and all messages up to now with the outputs between them. Outputs stay in the text with probability
    keep_output. first_message: the first turn's message where it differs from the others (a file, a task).
    A first prompt longer than max_prompt_tokens is cut at the end; a later one ends the session instead.
    think: pause between an answer and the next request. answer_seconds_per_token: how long an answer takes, as an open
    loop plans it, which cannot wait for the answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    about: str
    tenants: Tenants
    documents: Documents | None = None
    images: Images | None = None
    turns: Distribution
    first_message: Distribution | None = None
    message: Distribution
    output: Distribution
    keep_output: KeepOutput | None = None
    think: Distribution | None = None
    answer_seconds_per_token: AnswerSpeed | None = None
    max_prompt_tokens: Limit
    arrivals: Arrivals

    @model_validator(mode="after")
    def _complete(self) -> Workload:
        if not (self.arrivals.source.strip() or self.arrivals.because.strip()):
            raise ValueError("arrivals: expected a source, or because: why this was chosen")
        if self.has_sessions:
            for name in ("keep_output", "think", "answer_seconds_per_token"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name}: needed where sessions have several turns")
        return self

    @property
    def has_sessions(self) -> bool:
        return not (self.turns.distribution == "constant" and self.turns.value == 1)


def read_workload(path: Path) -> Workload:
    """The workload of a YAML file. Raises WorkloadError: what is wrong, as file:line: field."""
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        raw = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path}: cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise WorkloadError(f"{path}{line}: no YAML: {getattr(error, 'problem', error)}") from error
    if node is None or not isinstance(raw, dict):
        raise WorkloadError(f"{path}: expected fields and values, got {type(raw).__name__}")
    if (twice := _twice(node)) is not None:
        raise WorkloadError(f"{path}:{twice.start_mark.line + 1}: {twice.value}: given twice")
    try:
        return Workload.model_validate(raw)
    except ValidationError as error:
        found = [_where(path, node, raw, e["loc"]) + _said(e) for e in error.errors(include_url=False)]
        raise WorkloadError("\n".join(found)) from error


def _said(error: Any) -> str:
    if error["type"] in ("missing", "extra_forbidden"):
        return "missing" if error["type"] == "missing" else "no such field"
    said, given = error["msg"].removeprefix("Value error, "), error["input"]
    return str(said) if isinstance(given, dict | BaseModel) else f"{said}, got {given!r}"


def _where(path: Path, node: yaml.Node, raw: Any, loc: Sequence[int | str]) -> str:
    """The place of a pydantic location as file:line: field.field: without the kinds of a union, which it names too."""
    line, names = node.start_mark.line + 1, []
    for step, part in enumerate(loc):
        last = step == len(loc) - 1
        if isinstance(raw, dict) and isinstance(node, yaml.MappingNode) and part in raw:
            key, node = next((k, v) for k, v in node.value if k.value == part)
            raw, line = raw[part], key.start_mark.line + 1
            names.append(str(part))
        elif isinstance(raw, list) and isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            raw, node = raw[part], node.value[part]
            line = node.start_mark.line + 1
            names.append(str(part))
        elif last and isinstance(raw, dict) and part not in (raw.get("distribution"), raw.get("process")):
            names.append(str(part))  # a field that is missing
    return f"{path}:{line}: {'.'.join(names)}: " if names else f"{path}:{line}: "


def _twice(node: yaml.Node) -> yaml.Node | None:
    """The first key that stands twice in its mapping: YAML would silently take the last."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if key.value in seen:
                found: yaml.Node = key
                return found
            seen.add(key.value)
            if (inner := _twice(value)) is not None:
                return inner
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            if (inner := _twice(value)) is not None:
                return inner
    return None
