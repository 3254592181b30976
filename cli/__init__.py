"""The `purgatoryd` command.

A short command spends most of its time importing modules. So each command is in a module that is
imported when the command runs, and that module imports what its command needs.
"""

import gc

ALLOCATIONS = 100_000
"""Container objects that Python may create before it looks for garbage. Importing all modules of
a short command creates fewer."""


def main() -> None:
    """Run `purgatoryd`, then end the process. The installed script calls it."""
    gc.set_threshold(ALLOCATIONS)
    try:
        from purgatoryd.cli import app  # after set_threshold(), which speeds up the import

        app.main()
    finally:
        gc.freeze()  # no last garbage collection: the operating system frees the memory faster


__all__ = ["main"]
