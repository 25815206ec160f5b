"""What the user's machine says reaches no test, and what a test needs of the machine is a marker or a fixture.

A test that needs something carries the marker of that name, or one of its fixtures asks for the fixture of that name.
It is skipped where that is missing, and the run ends by saying so; with INFERLAB_CI=1 it fails if anything but a gpu
test was skipped.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib.util
import json
import locale
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from tests.neutral import neutral

if TYPE_CHECKING:
    from reference_impl.core.decoder import Decoder
    from tests.warm import Warm

_OF_THE_TERMINAL = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "COLORTERM", "TTY_COMPATIBLE")


def _become_neutral() -> None:
    """For this process and all that it starts: no configuration, home, locale, proxy, time zone or umask of the user's.

    Caches that are costly to fill stay from run to run, inside the repository.
    """
    os.umask(0o022)
    home = tempfile.mkdtemp(prefix="inferlab-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    found = neutral(os.environ, home)
    for name in os.environ.keys() - found.keys():
        del os.environ[name]
    os.environ |= found
    with contextlib.suppress(locale.Error):  # not every system has it under this name
        locale.setlocale(locale.LC_ALL, "C.UTF-8")
    time.tzset()


_become_neutral()

# Tests bound what could hang, never speed: a loaded machine must not fail a property by being slow. In CI the examples
# are the same every time, so that whether a change lands is not luck; on your machine they differ from run to run.
_CI = bool(os.environ.get("INFERLAB_CI"))
settings.register_profile(
    "inferlab",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=_CI,
    database=None if _CI else settings().database,
)
settings.register_profile("few", settings.get_profile("inferlab"), max_examples=30)
settings.load_profile("inferlab")

# A shell's background job ignores SIGINT, and one under nohup SIGHUP; so would all it starts, and some tests send both.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def random_model() -> Callable[..., Decoder]:
    """random_model(dtype, **config fields): a small Qwen3 (or another architecture) with random weights, made once.

    device: where it lies; kernels: "auto", "triton" or "torch".
    """

    @functools.cache
    def make(dtype: str = "float64", **changes: Any) -> Decoder:
        import torch

        from reference_impl.assembly.model import build_model
        from reference_impl.models.config_json import parse_model_config
        from reference_impl.models.loader import destinations

        device, kernels = torch.device(changes.pop("device", "cpu")), changes.pop("kernels", "auto")
        raw = {
            "architectures": [changes.pop("architecture", "Qwen3ForCausalLM")], "vocab_size": 61, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 128, "dtype": dtype, **changes,
        }  # fmt: skip
        torch_dtype = getattr(torch, dtype)
        model = build_model(parse_model_config(raw), torch_dtype, device, kernels=kernels)
        random = torch.Generator().manual_seed(0)
        for (shape, _), store in destinations(model).values():
            norm = len(shape) == 1
            store(torch.randn(shape, generator=random, dtype=torch.float64) * (0.3 if norm else 0.25) + norm)
        for linear in model.linears():
            linear.method.finish(linear.params)
        return model

    return make


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], None]], Path]:
    """made_once(name, make): a copy of the folder that make(folder) filled when the run first asked for it.

    For what is costly to make and does not depend on who makes it, such as a graded class.
    """
    shared = Path(os.environ.get("INFERLAB_ONCE") or tmp_path_factory.getbasetemp())  # tests/selection/run.py

    def get(name: str, make: Callable[[Path], None]) -> Path:
        made = shared / f"once-{name}"
        with (shared / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait here while the first one makes it
            if not made.exists():
                unfinished = Path(tempfile.mkdtemp(prefix=f"once-{name}-", dir=shared))  # it stays if `make` fails
                make(unfinished)
                unfinished.rename(made)
        return Path(shutil.copytree(made, tmp_path_factory.mktemp(name) / name, symlinks=True))

    return get


@pytest.fixture(scope="module")
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 that a server which is told its number can have, again after its end; meanwhile the system
    gives it to nothing that asks for any port. (Linux: bound with SO_REUSEADDR and not listening.)"""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Runs programs in a Python that has already imported torch and what a notebook's kernel needs: tests/warm.py."""
    from tests.warm import PROGRAMS, SHARED, Warm

    address = os.environ.get(SHARED)
    made = Warm(address=address) if address else Warm(*PROGRAMS)
    yield made
    made.close()


@pytest.fixture(scope="session")
def examiners_start_warm() -> Iterator[Callable[[], str]]:
    """From now on examiners and processes for learners' code are forks of a Python that has imported torch, unless
    bubblewrap starts them. Gives the function that says, and may have to start, which Python that is."""
    from tests.warm import EXAMINERS, SHARED, STARTS, Warm, starts_warm

    shared = os.environ.get(SHARED)
    with contextlib.ExitStack() as stack:

        @functools.cache
        def address() -> str:
            return shared or stack.enter_context(contextlib.closing(Warm("torch", "numpy"))).address

        stack.enter_context(starts_warm(address, EXAMINERS))
        if shared:
            os.environ[STARTS] = json.dumps([shared, EXAMINERS])  # for programs that are run in a fork of it
        yield address


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """say(text): a line for the end of the run, for what a test left to another run, and why."""
    return lambda text: record_property("say", text)


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_bwrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return None if tried.returncode == 0 else f"bubblewrap cannot isolate here: {tried.stderr.strip()}"


def _no_postgres() -> str | None:
    found = any(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or shutil.which("initdb")
    return None if found else "not installed: PostgreSQL's initdb"


def _no_program(*alternatives: str) -> Callable[[], str | None]:
    return lambda: None if any(map(shutil.which, alternatives)) else f"not installed: {' or '.join(alternatives)}"


def _no_nixl() -> str | None:
    return None if importlib.util.find_spec("nixl_cu12") else "not installed: nixl-cu12"


class _Need(NamedTuple):
    why_missing: Callable[[], str | None]
    remedy: str


_NEEDS = {
    "gpu": _Need(_no_gpu, "on a machine that has one: .venv/bin/python -P -m pytest -m gpu"),
    "bwrap": _Need(_no_bwrap, "apt-get install bubblewrap; what forbids it to isolate says: inferlab grade doctor"),
    "browser": _Need(_no_program("chromium", "chromium-browser", "google-chrome"), "apt-get install chromium"),
    "postgres": _Need(_no_postgres, "apt-get install postgresql"),
    "redis": _Need(_no_program("redis-server"), "apt-get install redis-server"),
    "curl": _Need(_no_program("curl"), "apt-get install curl"),
    "git": _Need(_no_program("git"), "apt-get install git"),
    "compiler": _Need(_no_program("g++", "clang++"), "apt-get install g++"),
    "nixl": _Need(_no_nixl, ".venv/bin/pip install -c constraints.txt -e '.[transfer]' (Linux)"),
}


def _fixture_named(need: str) -> Any:
    """For a fixture to ask for, as `bwrap: None`: whoever uses that fixture, however indirectly, has the marker."""

    @pytest.fixture(scope="session", name=need)
    def stand_in() -> None:
        pass

    return stand_in


_bwrap, _browser, _postgres, _redis = map(_fixture_named, ("bwrap", "browser", "postgres", "redis"))


@functools.cache
def _why_missing(marker: str) -> str | None:
    return _NEEDS[marker].why_missing()


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":  # `make test`; see also tests/examples.py
        settings.load_profile("few")
    if __name__ == "tests.conftest":  # and not in the copies of this file that tests make
        from tests.selection import plugin

        plugin.register(config)


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in _NEEDS:
            if marker in getattr(item, "fixturenames", ()):
                item.add_marker(marker)
            if item.get_closest_marker(marker) and (reason := _why_missing(marker)):
                remedy = f"To have them run: {_NEEDS[marker].remedy}"
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}. {remedy}"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # until pytest_collection_finish: little of what is made meanwhile is garbage


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """How wide the user's terminal is and what it can show is for pytest's own report, and for no program in a test."""
    if session.config.pluginmanager.has_plugin("terminalreporter"):  # a worker has none
        writer = session.config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth  # pytest would look again
    for name in _OF_THE_TERMINAL:
        os.environ.pop(name, None)
    os.environ |= {"TERM": "xterm", "COLUMNS": "80", "LINES": "25"}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What a test draws without a seed of its own does not depend on the tests that ran before it."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    # Seeds of requests without one.
    if requests := sys.modules.get("reference_impl.core.requests"):
        requests.urandom = random.randbytes  # type: ignore[attr-defined]


def pytest_collection_finish() -> None:
    """By now the modules whose kernels run in Triton's interpreter have said so."""
    # Thousands of tests and all that they import are no garbage; each collection would look through them.
    gc.collect()
    gc.freeze()
    gc.enable()
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        from tests.interpreter import quicken

        quicken()


def _skipped(config: pytest.Config) -> Counter[tuple[str, str]]:
    """(marker, reason) of the tests that did not run; the marker is "unmarked" where a test skipped itself."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped: Counter[tuple[str, str]] = Counter()
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        marker = next((name for name in _NEEDS if reason.startswith(f"{name}: ")), "unmarked")
        skipped[marker, reason.removeprefix(f"{marker}: ")] += 1
    return skipped


def _said(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    reports = [report for key in ("passed", "failed") for report in reporter.stats.get(key, [])]
    return sorted({str(text) for report in reports for key, text in report.user_properties if key == "say"})


def _forbidden(config: pytest.Config) -> bool:
    return os.environ.get("INFERLAB_CI") == "1" and any(marker != "gpu" for marker, _ in _skipped(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _forbidden(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> Generator[None, None, None]:
    """Last of all sections, after failures and the list of every test that was skipped."""
    yield
    if said := _said(config):
        terminalreporter.section("what ran in part")
        for line in said:
            terminalreporter.line(line)
    terminalreporter.section("what did not run")
    skipped = _skipped(config)
    for (marker, reason), count in sorted(skipped.items()):
        terminalreporter.line(f"{marker}: {count} skipped: {reason}")
    if "not slow" in config.option.markexpr:
        terminalreporter.line("slow: left out. To have them run: make test-all")
    elif not skipped:
        terminalreporter.line("nothing: all ran")
    if _forbidden(config):
        terminalreporter.line("FAILED: INFERLAB_CI=1 allows only gpu tests to be skipped", red=True)
