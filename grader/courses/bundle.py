"""What students get: one zip with the released notebooks and a page that says what to do; scanned before it is written.

    README.md    released/NN_slug/SLUG.ipynb

Students unpack it into a folder of theirs and make that folder their workspace. There `inferlab lab start` copies a
notebook out of `released/`, so a later bundle in the same folder overwrites no work, and `inferlab lab check` takes the
release of their course, not the public one (`grader.study.workspace.labs_root`).
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from grader.course import CourseError, course_secret, is_private, master_secret
from grader.courses.leaks import Hidden, Leak, notebook_leaks, text_leaks
from grader.labs.lab import load_lab
from grader.study.workspace import RELEASED
from grader.study.workspace_files import write_atomically

STAMP = (2020, 1, 1, 0, 0, 0)  # the same content gives the same file

README = """\
# Labs of your course

{labs}

{about}

## Once

1. Install `inferlab` as your instructor says: from the course's repository with `make learn`, or its wheel with
   `pip install`. You need Python 3.11 or later.
2. Unpack this file into a folder of its own, for example `llm-course`, and say that it is your workspace:
   `export INFERLAB_HOME=~/llm-course` (in every new terminal, or in your shell's profile).

## Each lab

```
inferlab lab start {first}      # copies the notebook from released/ to labs/, where you work in it
inferlab learn             # opens JupyterLab in your workspace
inferlab lab check {first}      # the checks that you can see, on the saved notebook
```

`released/` stays as it is: the check compares with it. A later bundle is unpacked into the same folder; it changes
`released/` and never `labs/`. Hidden tests check the same properties on other inputs.

Without the command line: copy a notebook out of `released/`, open it in Jupyter and run its cells; the checks in it are
complete. Hand in the notebook from `labs/`, under its name, the way your instructor says.
"""

PRIVATE = """\
They are labs of `inferlab` {version} with conventions of your course: read each text as if you had never seen the lab
elsewhere. A solution that was written for another course fails checks that say which convention it misses."""
PUBLIC = "They are the labs of `inferlab` {version}."


def make_bundle(root: Path, slugs: Sequence[str], target: Path) -> list[str]:
    """Write the bundle of these released labs to `target`; returns the names of its files.

    Raises CourseError, which names the places, if anything in it must not leave; then nothing is written.
    """
    files = {"README.md": _readme(slugs, is_private(root))}
    found: list[Leak] = []
    for slug in slugs:
        path = _released(root, slug)
        files[f"{RELEASED}/{slug}/{path.name}"] = path.read_bytes()
        found += release_leaks(root, slug, path)
    hidden = _hidden(root, None)
    found += text_leaks(files["README.md"].decode(), "README.md", hidden)
    content = _zip(files)
    with zipfile.ZipFile(io.BytesIO(content)) as written:  # check what was really written
        if {name: written.read(name) for name in written.namelist()} != files:
            found.append(Leak(target.name, "does not hold what it should"))
    refuse(found, f"{target} was not written")
    write_atomically(target, content)
    return list(files)


def release_leaks(root: Path, slug: str, path: Path) -> list[Leak]:
    """What the released notebook at `path` holds that students must not get. Raises CourseError."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        return [Leak(f"labs/{slug}/{path.name}", "is not UTF-8")]
    return notebook_leaks(text, f"labs/{slug}/{path.name}", _hidden(root, slug))


def refuse(found: Iterable[Leak], what: str) -> None:
    """Raise CourseError with every place, if there is any."""
    if places := "\n".join(f"  {leak}" for leak in dict.fromkeys(found)):
        raise CourseError(f"{what}: students must not get this:\n{places}\nMend the source and release the lab again.")


def _hidden(root: Path, slug: str | None) -> Hidden:
    """What must not leave the course: of lab `slug` each line (of all labs if None), of other labs whole cells."""
    hidden = Hidden()
    hidden.add_secret(master_secret(root), "the course's secret")
    notebooks = sorted((root / "solutions").glob("[0-9]*_*/*.ipynb"))
    if slug is not None and slug not in {path.parent.name for path in notebooks}:
        raise CourseError(f"solutions/{slug} is missing, so what is hidden is not known: inferlab grade release {slug}")
    for path in notebooks:
        name = path.parent.name
        hidden.add_secret(course_secret(root, name), f"the secret of {name}")
        if slug in (None, name):
            hidden.add_lab(load_lab(path))
        else:
            hidden.add_other_lab(load_lab(path))
    for folder in (root.resolve(), Path.home()):
        if len(folder.parts) > 1:
            hidden.raw[f"{folder}{os.sep}".encode()] = "a path of this machine"
    return hidden


def _released(root: Path, slug: str) -> Path:
    """The one notebook of a released lab. Raises CourseError if there is anything else beside it."""
    folder = root / "labs" / slug
    files = [p for p in sorted(folder.rglob("*")) if ".ipynb_checkpoints" not in p.parts and not p.is_dir()]
    if len(files) != 1 or files[0].suffix != ".ipynb" or files[0].is_symlink() or files[0].parent != folder:
        there = ", ".join(p.relative_to(folder).as_posix() for p in files) or "nothing"
        raise CourseError(f"{folder} must hold the released notebook and nothing else; there is {there}")
    return files[0]


def _readme(slugs: Sequence[str], private: bool) -> bytes:
    labs = "\n".join(f"- lab {slug.split('_')[0]}: `{RELEASED}/{slug}`" for slug in slugs)
    about = (PRIVATE if private else PUBLIC).format(version=version("inferlab"))
    return README.format(labs=labs, about=about, first=slugs[0].split("_")[0]).encode()


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, STAMP)
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()
