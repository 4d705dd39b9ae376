"""``python -m paceline`` and the command ``paceline``. Ctrl-C ends them with exit code 130, even during imports."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line interface."""
    try:
        from paceline.cli.main import app

        app()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
