"""An environment without what a user, a company, a classroom or a desktop changes."""

from __future__ import annotations

import os
import re
import site
from collections.abc import Mapping
from pathlib import Path

# Variables with which a user, a company, a classroom or a desktop changes what programs do. Kept are PYTHONPATH and
# PYTHONUSERBASE, by which packages may be found, and those of the bytecode cache.
_OF_THE_USER = re.compile(
    r"(PIP|XDG|LC|GIT|JUPYTER|OPENAI|SSL_CERT)_.*|IPYTHON.*|MPL.*|PYTHON(?!PATH$|USERBASE$|DONTWRITE|PYCACHE).+"
    r"|LANG|LANGUAGE|TZ|.*_PROXY|(REQUESTS|CURL)_CA_BUNDLE|DISPLAY|WAYLAND_DISPLAY|BROWSER|SSH_CONNECTION"
    r"|INFERLAB_(HOME|DATA|INSTALL_URL|COMMIT)",
    re.IGNORECASE,
)


def neutral(environment: Mapping[str, str], home: str) -> dict[str, str]:
    """What is left of it, with `home` for home. Caches that are costly to fill are the repository's."""
    left = {name: value for name, value in environment.items() if not _OF_THE_USER.fullmatch(name)}
    cache = Path(__file__).resolve().parent.parent / ".pytest_cache"
    return left | {
        "HOME": home, "USERPROFILE": home, "PYTHONUSERBASE": site.getuserbase(),
        "LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TZ": "UTC", "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost", "HF_HUB_OFFLINE": "1",
        # Nothing is fetched: what a test installs it has made, or finds installed.
        "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        # A checkout may belong to another user than the one who runs the tests, and git may know no name.
        "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
        "GIT_CONFIG_KEY_1": "user.name", "GIT_CONFIG_VALUE_1": "Test",
        "GIT_CONFIG_KEY_2": "user.email", "GIT_CONFIG_VALUE_2": "test@example.org",
        "MPLCONFIGDIR": str(cache / "matplotlib"), "TRITON_CACHE_DIR": str(cache / "triton"),
    }  # fmt: skip
