"""The entry point of `inferlab`. A module of its own: `import grader` loads no commands."""

import sys


def command():  # type: () -> None
    """Runs `inferlab`. Ctrl-C while its modules are being imported ends it as quietly as later."""
    # jsonschema, which nbformat and nbgrader import, checks IRIs by it where it is installed (Jupyter brings it); to be
    # imported it compiles a grammar, 2.5 s. A notebook's schema has no IRI.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    try:
        from grader.cli import main
    except KeyboardInterrupt:
        sys.exit(130)
    main()
