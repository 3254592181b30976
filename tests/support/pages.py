"""Write all pages, tables and pictures of the docs that are generated from the code: `make docs`.

GENERATED maps each file to a function that returns the new text of the file from its current text.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import yaml
from lint_script import lint_script

from purgatoryd.cli import api, exposition, reference, size, units
from purgatoryd.cli.exits import MEANING, exit_of_class
from purgatoryd.cli.service import run_command
from purgatoryd.cli.settings import FLAG_OF, GROUPS, variable
from purgatoryd.daemon import config
from purgatoryd.daemon.reload import RELOADED
from purgatoryd.pipeline import reference as tables
from purgatoryd.shm_layout import errors
from purgatoryd.shm_layout import reference as layout

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
RULES = DOCS / "monitoring" / "purgatoryd.rules.yml"
PROMISES = ROOT / "tests" / "promises.toml"

TYPE_OF = {option.name: option.type for option in run_command.params}
_SHOWN_AS = {
    "replay_bytes_max": "half of `payload-memory`",
    "wall_origin_ns": "1970",
    "allow_uids": "everybody",
    "allow_gids": "everybody",
}
"""Descriptions of the defaults that the daemon computes."""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    cells = [tuple(head), *map(tuple, rows)]
    cells.insert(1, tuple("---" for _ in cells[0]))
    return "".join("| " + " | ".join(row).replace("\n", " ") + " |\n" for row in cells)


# ---- settings ----------------------------------------------------------------------------------


def settings_page(_: str) -> str:
    """Return the page of settings: the default, limits and meaning of each setting."""
    about = attribute_docs(config.Config)
    parts = [
        "# Settings\n",
        "A flag of `purgatoryd run` wins over its environment variable, that over the TOML file of "
        "`--config`, and that over the default.\nThe setting `payload-memory` is the flag "
        f"`--payload-memory`, the variable `{variable('payload-memory')}` and the TOML key "
        "`payload-memory`.\nSizes take K, M and G (1024), durations ns to d. Unknown names are "
        "errors. A reload applies settings with a *yes* at once, the others\ncount from the next "
        "start. `purgatoryd run --print-config` prints the settings in effect and their sources.\n",
        '```toml\nname = "demo"\ncapacity = 1_000_000\npayload-memory = "128M"\n'
        "replay-buffer = 262_144\n```\n",
        "## General\n",
        table(
            ("setting", "default", "limits", "reload", "meaning"),
            [("`name`", "`default`", "1 to 32 bytes of a-z, 0-9 and -", "", "Name of the daemon.")],
        ),
    ]
    for group, settings in GROUPS.items():
        names = [name for _, name, *_ in settings]
        rows = (
            (f"`{FLAG_OF[name]}`", default_of(name), limits_of(name),
             "yes" if name in RELOADED else "", with_flags(about[name]))
            for name in names
        )  # fmt: skip
        head = ("setting", "default", "limits", "reload", "meaning")
        parts += [f"## {group}\n", table(head, rows)]
    return "\n".join(parts)


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, each as one line."""
    found = re.findall(
        r'^    (\w+): [^\n]*\n    """(.*?)"""$', inspect.getsource(kind), re.MULTILINE | re.DOTALL
    )
    return {name: " ".join(text.split()) for name, text in found}


def with_flags(text: str) -> str:
    """Return the text with the names of flags instead of the names of Config's fields."""
    return re.sub(r"`(\w+)`", lambda found: f"`{FLAG_OF.get(found[1], found[1])}`", text)


def default_of(name: str) -> str:
    """Return the default of a field of Config, as the page shows it."""
    value = config.DEFAULTS[name]
    if name in _SHOWN_AS or value in ("", ()):
        return _SHOWN_AS.get(name, "none")
    return written(name, value)


def limits_of(name: str) -> str:
    """Return the bounds or the choices of a field of Config."""
    if bounds := config.BOUNDS.get(name):
        return " to ".join(written(name, bound) for bound in bounds)
    if choices := getattr(TYPE_OF[name], "choices", ()):
        return ", ".join(choices)
    if isinstance(config.DEFAULTS[name], bool):
        return "true, false"
    return "may be repeated" if isinstance(config.DEFAULTS[name], tuple) else ""


def written(name: str, value: object) -> str:
    """Return a value in the notation of its flag. Large numbers have separators."""
    if isinstance(value, bool) or not isinstance(value, int):
        return str(value).lower()
    kind = TYPE_OF[name]
    if isinstance(kind, units.Duration):
        return units.exact_duration(value)
    if isinstance(kind, units.Size) and len(units.exact_size(value)) < 8:
        return units.exact_size(value)
    return f"{value:,}"


# ---- errors ------------------------------------------------------------------------------------


def errors_page(_: str) -> str:
    """Return the page of errors and exit codes."""
    codes = ((str(code.value), meaning) for code, meaning in MEANING.items())
    return "\n".join(
        [
            "# Errors\n",
            "An error of `purgatoryd.clients` keeps its figures as attributes. An indented error "
            "is a kind of the one above it.\nCommands print the message on stderr, with `--json` "
            "as an object with all figures, and exit with the code.\n",
            table(("error", "when", "what to do", "exit code"), _errors(errors.PurgatorydError)),
            "## Exit codes\n",
            table(("code", "meaning"), codes),
        ]
    )


def _errors(kind: type[errors.PurgatorydError], depth: int = 0) -> Iterator[tuple[str, ...]]:
    name = "&emsp;" * depth + f"`{kind.__name__}`"
    yield name, api.first_sentence(kind), remedy(kind), str(int(exit_of_class(kind)))
    below = [one for one in kind.__subclasses__() if one.__module__ == errors.__name__]
    for one in sorted(below, key=lambda one: one.__name__):
        yield from _errors(one, depth + 1)


def remedy(kind: type) -> str:
    """Return the "What to do:" part of an error's docstring."""
    return " ".join((inspect.getdoc(kind) or "").partition("What to do: ")[2].split())


# ---- tables in pages -----------------------------------------------------------------------------


def between_marks(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the begin and end comments `name`."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    assert found, f"the page has no marks {name!r}"
    return before + begin + text + end + after


def alarms() -> Iterator[tuple[str, str, str]]:
    """Yield (alarm, severity, description) of each alarm."""
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            about = " ".join(rule["annotations"]["description"].split())
            yield f"`{rule['alert']}`", rule["labels"]["severity"], about


def metrics_page(page: str) -> str:
    """Return the page of metrics with its generated tables."""
    text = table(("alarm", "severity", "meaning and remedy"), alarms())
    return between_marks(exposition.refresh(page), "alarms", text)


def promises() -> Iterator[tuple[str, str, str]]:
    """Yield (text, tests in `make test`, other tests) of each promise."""
    for one in tomllib.loads(PROMISES.read_text())["promise"]:
        yield one["text"], one["quick"], one["longer"]


def development_page(page: str) -> str:
    """Return the page of development with the table of promises."""
    head = ("promise", "in `make test`", "in `make test-all` and longer runs")
    return between_marks(page, "promises", table(head, promises()))


GENERATED: dict[Path, Callable[[str], str]] = {
    DOCS / "reference" / "api.md": lambda _: api.page(),
    DOCS / "reference" / "cli.md": lambda _: reference.text(),
    DOCS / "reference" / "settings.md": settings_page,
    DOCS / "reference" / "errors.md": errors_page,
    DOCS / "reference" / "metrics.md": metrics_page,
    DOCS / "reference" / "tables.md": tables.refresh,
    DOCS / "protocol.md": layout.refresh,
    DOCS / "operations.md": size.refresh,
    DOCS / "development.md": development_page,
    DOCS / "img" / "modules.svg": lambda _: lint_script("picture").svg(),
}

if __name__ == "__main__":
    for path, make in GENERATED.items():
        path.write_text(make(path.read_text() if path.exists() else ""))
