"""Markers of tests that need something of the machine: skipped where it is missing, and the run ends by saying so.

With INFERLAB_CI=1 a run fails if anything but a gpu test was skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from reference_impl.models.decoder import Decoder

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

        from reference_impl.config import parse_model_config
        from reference_impl.layers.backend import choose_kernels
        from reference_impl.models.decoder import Decoder
        from reference_impl.models.loader import destinations

        device, kernels = torch.device(changes.pop("device", "cpu")), changes.pop("kernels", "auto")
        raw = {
            "architectures": [changes.pop("architecture", "Qwen3ForCausalLM")], "vocab_size": 61, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": 128, "dtype": dtype, **changes,
        }  # fmt: skip
        torch_dtype = getattr(torch, dtype)
        chosen = choose_kernels(kernels, device, torch_dtype)
        model = Decoder(parse_model_config(raw), torch_dtype, device, kernels=chosen)
        random = torch.Generator().manual_seed(0)
        for shape, store in destinations(model).values():
            norm = len(shape) == 1
            store(torch.randn(shape, generator=random, dtype=torch.float64) * (0.3 if norm else 0.25) + norm)
        for linear in model.linears():
            linear.method.finish(linear.params)
        return model

    return make


def _no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _no_bwrap() -> str | None:
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return None if tried.returncode == 0 else f"bubblewrap cannot isolate here: {tried.stderr.strip()}"


def _no_program(*alternatives: str) -> Callable[[], str | None]:
    return lambda: None if any(map(shutil.which, alternatives)) else f"not installed: {' or '.join(alternatives)}"


_MISSING: dict[str, Callable[[], str | None]] = {
    "gpu": _no_gpu,
    "bwrap": _no_bwrap,
    "browser": _no_program("chromium", "chromium-browser", "google-chrome"),
    "postgres": _no_program("postgres", "pg_ctlcluster"),
    "redis": _no_program("redis-server"),
}


@functools.cache
def _why_missing(marker: str) -> str | None:
    return _MISSING[marker]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: tests of servers, attacks and whole batches wait half of their time. (With two
    more all takes as long: what is gained in waiting is lost in sharing.)"""
    return (os.cpu_count() or 1) + 1


LAB_PROOFS = "tests/labs/test_labs.py"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker runs all of a file, so that a course that many of its tests look at is graded once; except the proofs of
    the labs, minutes each, which any worker may take, and which begin: at the end one worker would run them alone."""
    from xdist.scheduler import LoadScopeScheduling

    class ProofsApart(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if LAB_PROOFS in nodeid else nodeid.split("::", 1)[0]

    return ProofsApart(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LAB_PROOFS not in item.nodeid)
    for item in items:
        for marker in _MISSING:
            if item.get_closest_marker(marker) and (reason := _why_missing(marker)):
                item.add_marker(pytest.mark.skip(reason=f"{marker}: {reason}"))


def pytest_collection_finish() -> None:
    """By now the modules whose kernels run in Triton's interpreter have said so."""
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
        marker = next((name for name in _MISSING if reason.startswith(f"{name}: ")), "unmarked")
        skipped[marker, reason.removeprefix(f"{marker}: ")] += 1
    return skipped


def _forbidden(config: pytest.Config) -> bool:
    return os.environ.get("INFERLAB_CI") == "1" and any(marker != "gpu" for marker, _ in _skipped(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    controller = not hasattr(session.config, "workerinput")
    if controller and session.exitstatus == pytest.ExitCode.OK and _forbidden(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    terminalreporter.section("skipped for want of something")
    skipped = _skipped(config)
    for (marker, reason), count in sorted(skipped.items()):
        terminalreporter.line(f"{marker}: {count} skipped: {reason}")
    if not skipped:
        terminalreporter.line("nothing")
    if "not slow" in config.option.markexpr:
        terminalreporter.line("slow: not run; `make test-all` runs them")
    if _forbidden(config):
        terminalreporter.line("FAILED: INFERLAB_CI=1 allows only gpu tests to be skipped", red=True)
