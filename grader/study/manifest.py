"""The manifest of the course, chapters/course.yaml: which chapters and labs there are, in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from grader.study.workspace import chapters_root

Slug = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
Minutes = Annotated[int, Field(ge=5, le=360)]


class ManifestError(ValueError):
    """course.yaml cannot be read: says which entry, and what was expected."""


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Part(_Entry):
    """One notebook of a chapter: `name` is its file name without the ending."""

    name: Slug
    title: str = Field(min_length=1)
    minutes: Minutes


class Lab(_Entry):
    """One lab of a chapter. points: sum over its checks; None as long as the lab is not released."""

    slug: Slug
    title: str = Field(min_length=1)
    minutes: Minutes
    points: int | None = Field(default=None, ge=1)


class Chapter(_Entry):
    number: int = Field(ge=0, le=99)
    slug: Slug
    title: str = Field(min_length=1)
    status: Literal["finished", "begun", "planned"]  # begun: it has parts, and more are to come
    minutes: Minutes
    prerequisites: tuple[int, ...]
    parts: tuple[Part, ...] = ()
    labs: tuple[Lab, ...] = ()

    @property
    def folder(self) -> str:
        """Name of the chapter's folder, in chapters/, labs/ and solutions/ alike: `02_kv_cache`."""
        return f"{self.number:02d}_{self.slug}"

    @model_validator(mode="after")
    def _parts_and_status_agree(self) -> Chapter:
        if (self.status == "planned") == bool(self.parts):
            raise ValueError(f"chapter {self.number}: expected parts unless it is planned, got {self.status}")
        if self.parts and sum(part.minutes for part in self.parts) != self.minutes:
            raise ValueError(f"chapter {self.number}: expected minutes to be the sum of its parts, got {self.minutes}")
        return self


class Course(_Entry):
    title: str = Field(min_length=1)
    install_url: str  # what `pip install` takes on Colab; empty as long as the course is not published
    chapters: tuple[Chapter, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _prerequisites_come_first(self) -> Course:
        seen: set[int] = set()
        for chapter in self.chapters:
            if chapter.number in seen:
                raise ValueError(f"chapter {chapter.number} is listed twice; numbers are ids")
            if late := set(chapter.prerequisites) - seen:
                raise ValueError(f"chapter {chapter.number}: prerequisites {sorted(late)} are not listed before it")
            seen.add(chapter.number)
        return self

    def chapter(self, number: int) -> Chapter:
        """The chapter with this id. Raises ManifestError where there is none."""
        for chapter in self.chapters:
            if chapter.number == number:
                return chapter
        known = ", ".join(f"{chapter.number:02d}" for chapter in self.chapters)
        raise ManifestError(f"there is no chapter {number:02d}; the course has {known}")


def load_course(path: Path | None = None) -> Course:
    """Reads and checks course.yaml: of this installation, or the file given."""
    path = path or chapters_root() / "course.yaml"
    try:
        return Course.model_validate(yaml.safe_load(path.read_text("utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ManifestError(f"{path}: {error}") from None
