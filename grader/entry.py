"""The entry point of `inferlab`. A module of its own: `import grader` loads no commands."""

import sys


def command():  # type: () -> None
    """The command `inferlab`. Ctrl-C while its modules are being imported ends it as quietly as later."""
    import importlib

    try:
        main = importlib.import_module("grader.cli").main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
