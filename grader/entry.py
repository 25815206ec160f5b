"""What the command `inferlab` starts: by itself, since whoever imports `grader` does not need the commands."""

import sys


def command():  # type: () -> None
    """The command `inferlab`. Ctrl-C while its modules are being imported ends it as quietly as later."""
    import importlib

    try:
        main = importlib.import_module("grader.cli").main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
