"""Which conventions a private course drew for its labs, and the list of them for the instructor."""

from __future__ import annotations

from pathlib import Path

from grader.course import course_secret, is_private
from grader.labs.convention import Option, draw, load_conventions

LIST_HEAD = """\
# What this course's labs differ in from the public ones

Written by `inferlab grade release`. Students read it in their notebooks.

| lab | what | here |
|---|---|---|"""


def drawn(root: Path, source: Path) -> list[Option]:
    """What the course in `root` drew for the lab of `source`; nothing in a course of public labs. Raises LabError."""
    slug = source.parent.name
    return draw(load_conventions(source), course_secret(root, slug)) if is_private(root) else []


def list_drawn(root: Path, sources: Path) -> None:
    """Write conventions.md: in what the released labs of a private course differ from the public ones."""
    if not is_private(root):
        return
    lines = [LIST_HEAD]
    for folder in sorted((root / "solutions").glob("[0-9]*_*")):
        for source in sorted((sources / folder.name).glob("*.py")):
            about = [convention.about for convention in load_conventions(source)]
            rows = zip(about, drawn(root, source), strict=True)
            lines += [f"| {folder.name} | {what} | {option.says} |" for what, option in rows]
            if not about:
                lines.append(f"| {folder.name} | | nothing: no convention is written for it yet |")
    (root / "conventions.md").write_text("\n".join(lines) + "\n", "utf-8")
