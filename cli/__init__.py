"""The `purgatoryd` command.

Each command imports its part when it runs, so that `--help` is quick and needs no daemon.
"""

from purgatoryd.cli.app import main

__all__ = ["main"]
