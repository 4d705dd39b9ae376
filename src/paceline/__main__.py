"""``python -m paceline`` and the installed command ``paceline``: Ctrl-C is exit code 130, while modules load, too."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line."""
    try:
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
