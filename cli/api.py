"""Generates docs/api.md: `python -m purgatoryd.cli.api > docs/api.md`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

from purgatoryd import clients
from purgatoryd.cli.exits import exit_of_class
from purgatoryd.shm_layout import errors

_INTRO = """\
# The Python interface

This page is generated from the docstrings by `make docs`; a test fails if it is out of date.
`help(purgatoryd.clients.Client)` shows arguments and errors.

The interface is what `purgatoryd.clients` exports. Other modules may change without notice.
"""

_ERRORS = """\
## Errors

Every error is a `PurgatorydError`. An indented error is a subclass of the one above it. The exit
code is that of a command that ends with the error.
"""


OWNERLESS = "The owner of a namespace that every user may use."


def first_sentence(of: object) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


def _exports() -> Iterator[str]:
    for name in sorted(clients.__all__):
        value = getattr(clients, name)
        if inspect.isclass(value) and issubclass(value, BaseException):
            continue
        about = first_sentence(value) if callable(value) else OWNERLESS
        yield f"| `{name}` | {about} |"


def _tree(kind: type[errors.PurgatorydError], depth: int = 0) -> Iterator[str]:
    name = "&nbsp;" * 4 * depth + f"`{kind.__name__}`"
    yield f"| {name} | {int(exit_of_class(kind))} | {first_sentence(kind)} |"
    below = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    for one in sorted(below, key=lambda one: one.__name__):
        yield from _tree(one, depth + 1)


def page() -> str:
    """Return the page."""
    parts = [
        _INTRO,
        "| name | what it is |\n| --- | --- |\n" + "\n".join(_exports()) + "\n",
        _ERRORS,
        "| error | exit code | when |\n| --- | --- | --- |\n"
        + "\n".join(_tree(errors.PurgatorydError))
        + "\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
