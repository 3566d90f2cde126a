"""Where the ``podtune`` command begins. lint goes by itself: the import of typer alone, which the other
commands need, takes longer than a file may.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run one command; a user's error becomes one message and its exit code, never a traceback."""
    if sys.argv[1:2] != ["lint"]:
        from podtune.cli import main as others

        others()
        return
    from podtune.commands.lint import main as lint
    from podtune.run.errors import UserError, report

    try:
        sys.exit(lint(sys.argv[2:]))
    except UserError as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
