"""Makes .venv and installs this project into it: `python3 .ci/install.py learn` (or `test`). Standard library only.

torch comes first, by the exact pin of constraints.txt: asked for by a range, pip would take the newest build instead.
A torch that is already there and new enough is kept. TORCH_INDEX=URL chooses where torch comes from, for a CPU build.
Nothing is installed twice: a stamp in .venv remembers what pyproject.toml and constraints.txt asked for. A line says
which step runs; what pip says goes to .venv/install.log, and where pip fails its end is shown.
"""

# Any Python must be able to read this file, to say that it is too old: the rest is in installing.py, beside it.
import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    found = sys.version.split()[0]
    needed = "Python 3.11 or later is needed, and this is %s. With another one:" % found  # noqa: UP031
    sys.exit("inferlab: error: " + needed + " make learn PYTHON=python3.12, or python3.12 .ci/install.py learn")

EXTRAS = ("learn", "grade", "serve", "test")


def main(arguments):  # type: (list[str]) -> None
    if len(arguments) != 1 or arguments[0] not in EXTRAS:
        sys.exit("inferlab: error: expected what to install for, one of " + ", ".join(EXTRAS))
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import installing

    installing.main(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
