"""Generate docs/reference/api.md, the Python interface, from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import MethodDescriptorType
from typing import Any

from purgatoryd import clients

_INTRO = """\
# The Python interface

`purgatoryd.clients` exports these names, and the [errors](errors.md). Every other module may change
without notice.
"""
OWNERLESS = "The owner of a namespace without one."
_WIDTH = 96
_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**",
}  # fmt: skip


def first_sentence(of: object) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = " ".join((inspect.getdoc(of) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0]


def exports() -> list[str]:
    """Return the exported names that are not errors."""
    found = {name: getattr(clients, name) for name in sorted(clients.__all__)}
    return [name for name, value in found.items() if not _is_error(value)]


def _is_error(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Return the signature as code. A long signature has one parameter per line."""
    signature = inspect.signature(function)
    shown = list(_parameters(signature))
    returns = signature.return_annotation
    end = "" if returns is inspect.Signature.empty else f" -> {returns}"
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) > _WIDTH:
        line = f"{name}(\n    " + ",\n    ".join(shown) + f",\n){end}"
    return f"```py\n{line}\n```\n"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or one.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD
        text = _STARS.get(one.kind, "") + one.name
        if one.annotation is not inspect.Parameter.empty:
            text += f": {one.annotation}"
        if one.default is not inspect.Parameter.empty:
            default = "..." if repr(one.default).startswith("<") else repr(one.default)
            text += f" = {default}" if ":" in text else f"={default}"
        yield text


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) for the public methods and properties of a class and of its bases in this
    package. A method in C is shown as the method in Python that it speeds up."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("purgatoryd."):
            methods = vars(base).items()
            found |= {k: v for k, v in methods if not isinstance(v, MethodDescriptorType)}
    for name, value in found.items():
        shown = isinstance(value, property | staticmethod | classmethod) or inspect.isfunction(
            value
        )
        if shown and not name.startswith("_") and inspect.getdoc(getattr(kind, name)):
            yield name, value if inspect.isfunction(value) else getattr(kind, name)


def _entry(name: str) -> Iterator[str]:
    value = getattr(clients, name)
    yield f"## {name}\n"
    if not inspect.isclass(value):
        yield f"{inspect.getdoc(value) if callable(value) else OWNERLESS}\n"
        return
    if "__init__" in vars(value) and not issubclass(value, tuple):
        yield _signature(name, value)
    yield f"{inspect.getdoc(value)}\n"
    for method, function in _methods(value):
        yield f"### {name}.{method}\n"
        if callable(function):
            yield _signature(method, function)
        yield f"{inspect.getdoc(function)}\n"


def page() -> str:
    """Return the whole page."""
    rows = []
    for name in exports():
        value = getattr(clients, name)
        about = first_sentence(value) if callable(value) else OWNERLESS
        rows.append(f"| [`{name}`](#{name.lower()}) | {about} |")
    index = "| name | meaning |\n| --- | --- |\n" + "\n".join(rows) + "\n"
    return "\n".join([_INTRO, index, *(part for name in exports() for part in _entry(name))])
