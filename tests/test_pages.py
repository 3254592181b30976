"""The pages of docs agree with the code, state each thing once, and keep within their length."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import pytest

from purgatoryd import clients
from purgatoryd.cli import api
from purgatoryd.cli.app import COMMANDS
from purgatoryd.cli.exits import MEANING
from purgatoryd.cli.settings import FLAG_OF
from purgatoryd.daemon.config import BOUNDS, DEFAULTS
from purgatoryd.pipeline.reference import TABLES, VIOLATIONS
from purgatoryd.shm_layout import errors

pytestmark = pytest.mark.tier("check")

ROOT, DOCS = pages.ROOT, pages.DOCS
TEXTS = {
    path: path.read_text()
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md")))
}
WRITTEN = [ROOT / "CONTRIBUTING.md", *(path for path in TEXTS if path.parent != DOCS / "reference")]
REFERENCES = ("api", "cli", "settings", "errors", "metrics", "tables")
NOT_COUNTED = {DOCS / "reference" / f"{name}.md" for name in (*REFERENCES[:4], "words")}
"""Pages that are generated as a whole, and the table that `make lint` compares with the code."""
WORDS_MAX, GUIDE_WORDS_MAX = 27_480, 3_000
WORDS_OF = {ROOT / "README.md": 900, ROOT / "CHANGELOG.md": 560}
LINE_MAX = 120
NO_GUIDES = {DOCS / "protocol.md", DOCS / "architecture.md"}
"""Pages whose words count in the total, but have no limit of their own."""
_GENERATED = (
    re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL),
    re.compile(r"<!-- ([\w ]+): begin -->.*?<!-- \1: end -->", re.DOTALL),
    re.compile(r"<!-- (?:struct|enum|limits|metrics|table)\b[^>]*-->.*?<!-- end -->", re.DOTALL),
)
_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|c|h|toml|yml))(?:::(\w+))?`")


def words(path: Path) -> int:
    """Return the number of words of a page, without code blocks and generated parts."""
    if path in NOT_COUNTED:
        return 0
    text = TEXTS[path]
    for generated in _GENERATED:
        text = generated.sub("", text)
    return sum(1 for word in text.split() if re.search(r"\w", word))


def rows(page: str) -> dict[str, list[str]]:
    """Return the other cells of each table row, by the name in its first cell."""
    found: dict[str, list[str]] = {}
    for line in TEXTS[DOCS / "reference" / f"{page}.md"].splitlines():
        first, *others = (cell.strip() for cell in line.strip("|").split(" | "))
        if name := re.fullmatch(r"(?:&emsp;)*`([^`]+)`", first):
            assert name[1] not in found or page in ("metrics", "tables"), f"{page}: {first} twice"
            found[name[1]] = others
    return found


@pytest.mark.parametrize("path", pages.GENERATED, ids=lambda path: path.name)
def test_a_generated_page_is_current(path: Path) -> None:
    text = path.read_text()
    assert pages.GENERATED[path](text) == text, "run: make docs"


def test_the_pages_have_at_most_as_many_words_as_promised() -> None:
    found = {path: words(path) for path in TEXTS}
    guides = dict.fromkeys(found.keys() - NO_GUIDES, GUIDE_WORDS_MAX)
    for path, most in (guides | WORDS_OF).items():
        assert found[path] <= most, path.name
    assert sum(found.values()) <= WORDS_MAX


def test_the_readme_begins_with_what_why_the_picture_and_the_commands() -> None:
    first, _, rest = TEXTS[ROOT / "README.md"].partition("\n## ")
    parts = ("Timers for all", "Use it where", "![", "\nmake run", "\nmake test")
    places = [first.find(part) for part in parts]
    assert places == sorted(places)
    assert places[0] > 0
    assert len(first.splitlines()) < 20
    assert rest.index("Why\n") < rest.index("You need ")


def test_words_are_counted_without_code_and_generated_parts() -> None:
    assert words(DOCS / "operations.md") > 1_000
    assert words(DOCS / "reference" / "settings.md") == 0
    tables = words(DOCS / "reference" / "tables.md")
    assert 20 < tables < 200


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_lines_of_written_sentences_fit_an_editor(path: Path) -> None:
    text = path.read_text()
    for generated in _GENERATED:
        text = generated.sub("", text)
    lines = [line for line in text.splitlines() if not line.startswith(("|", "![", "<!--"))]
    assert [line for line in lines if len(line) > LINE_MAX] == []


def test_each_setting_has_its_default_and_limits_on_the_page() -> None:
    found = rows("settings")
    assert found.keys() == {"name", *FLAG_OF.values()}
    for field, flag in FLAG_OF.items():
        default, limits, _, about = found[flag]
        assert default == pages.default_of(field)
        assert limits or field not in BOUNDS
        assert about.endswith("."), flag
    assert DEFAULTS["capacity"] == int(found["capacity"][0].replace(",", ""))


def test_each_error_has_its_cause_remedy_and_exit_code_on_the_page() -> None:
    known = {
        kind.__name__
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.PurgatorydError)
    }
    found = rows("errors")
    assert found.keys() == known
    for name, (when, remedy, code) in found.items():
        assert when.endswith("."), name
        assert remedy.endswith("."), name
        assert int(code) in set(MEANING), name


def test_each_exit_code_is_on_the_page_of_errors_alone() -> None:
    for code, meaning in MEANING.items():
        row = f"| {code.value} | {meaning} |"
        assert [path.name for path in TEXTS if row in TEXTS[path]] == ["errors.md"]


def test_the_socket_directory_is_on_one_page() -> None:
    named = [path.name for path, text in TEXTS.items() if "/tmp/purgatoryd-UID" in text]
    assert named == ["cli.md"]


def test_no_guide_states_the_default_of_a_setting() -> None:
    """A long number, or a default next to the word "default", stands only on the settings page."""
    found = rows("settings")
    long_ones = {
        flag: found[flag][0] for flag in found if re.fullmatch(r"[\d,]{5,}", found[flag][0])
    }
    for path in DOCS.glob("*.md"):
        text = re.sub(r"^```.*?^```$", "", TEXTS[path], flags=re.MULTILINE | re.DOTALL)
        for flag, default in long_ones.items():
            near = rf"`(?:--)?{flag}`[^.|]{{0,40}}(?<![\d,]){default}(?![\d,])"
            assert not re.search(near, text), f"{path.name}: {flag}"
        assert not re.search(r"`(?:--)?log-level` is", text), path.name


@pytest.mark.parametrize("page", ["errors", "metrics"])
def test_no_reference_lists_a_name_of_another(page: str) -> None:
    listed = [name for name in rows(page) if re.match(r"[A-Z]|purgatoryd_", name)]
    assert len(listed) > 50
    others = [TEXTS[DOCS / "reference" / f"{name}.md"] for name in REFERENCES if name != page]
    for name in listed:
        assert not any(re.search(rf"^\| \[?`{name}`", text, re.MULTILINE) for text in others), name


def test_each_command_is_on_the_page_of_the_command_line() -> None:
    for command in COMMANDS:
        pattern = rf"^## purgatoryd {command}( |$)"
        assert re.search(pattern, TEXTS[DOCS / "reference" / "cli.md"], re.MULTILINE), command


def test_each_exported_name_is_on_the_page_of_the_interface() -> None:
    page = TEXTS[DOCS / "reference" / "api.md"]
    found = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.*) \|$", page, re.MULTILINE)
    assert [name for name, _ in found] == api.exports()
    assert [name for name, about in found if not about.endswith(".")] == []


def test_errors_that_the_interface_names_are_exported() -> None:
    page = TEXTS[DOCS / "reference" / "api.md"]
    named = set(re.findall(r"\b[A-Z]\w+", page)) & rows("errors").keys()
    assert "InvalidSetting" in named
    assert named - set(clients.__all__) == set()


def test_each_column_and_each_violation_has_a_meaning() -> None:
    columns = [column for table in TABLES.values() for column in table.columns]
    assert [column.name for column in columns if not column.about] == []
    source = "".join(path.read_text() for path in (ROOT / "pipeline").glob("*.py")
                     if path.name != "reference.py")  # fmt: skip
    assert [kind for kind in VIOLATIONS if not re.search(rf"['\"]{kind}['\"]", source)] == []
    assert set(re.findall(r'Check\(\s*"(\w+)"', source)) <= VIOLATIONS.keys()


def files() -> list[str]:
    """Return the paths of all files of the repository that a page may name."""
    folders = ("tests", "daemon", "clients", "cli", "pipeline", "shm_layout", "docs", "benchmarks")
    found = [one for folder in (*folders, ".ci", "examples") for one in (ROOT / folder).rglob("*")]
    return [path.relative_to(ROOT).as_posix() for path in found]


def test_files_and_tests_that_pages_name_exist() -> None:
    there = files()
    for path, text in TEXTS.items():
        for name, test in set(_FILE.findall(text)):
            known = any(one == name or one.endswith(f"/{name}") for one in there)
            assert known or name in OF_USERS, f"{path.name} names {name}"
            if test:
                assert f"def {test}(" in (ROOT / name).read_text(), f"{path.name}: {test}"


def is_tested(row: str) -> bool:
    """Return whether a row of features names a file of tests, and each file and each test that it
    names exists."""
    named = re.findall(r"`(tests/[^`:]+)(?:::(\w+))?`", row)
    return bool(named) and all(has_test(ROOT / file, test) for file, test in named)


def has_test(path: Path, test: str) -> bool:
    """Return whether a file exists and, if `test` is given, defines it."""
    found = path.is_file() and re.search(r"^(async )?def test_", path.read_text(), re.MULTILINE)
    return bool(found) and (not test or f"def {test}(" in path.read_text())


def test_each_feature_names_its_test() -> None:
    features = re.findall(r"^\| (?!feature |---).*$", TEXTS[DOCS / "features.md"], re.MULTILINE)
    assert len(features) > 20
    assert [row for row in features if not is_tested(row)] == []
    here = "`tests/test_pages.py"
    assert is_tested(f"| a | b | {here}` |")
    assert is_tested(f"| a | b | {here}::test_each_feature_names_its_test`, {here}` |")
    for bad in (
        "test_pages",
        "`tests/test_none.py`",
        f"{here}::test_none`",
        f"{here}`, `tests/x.py`",
    ):
        assert not is_tested(f"| a | b | {bad} |")


OF_USERS = {"prometheus.yml", "fleet.toml", "purgatoryd.toml", "default.toml"}
"""Files that readers of the pages create; the repository does not contain them."""


# ---- the pictures --------------------------------------------------------------------------------


def test_files_that_the_picture_of_a_timer_names_exist() -> None:
    named = set(re.findall(r"[a-z_/]+\.(?:py|c|h|md)\b", (DOCS / "architecture.svg").read_text()))
    assert len(named) > 20
    there = files()
    assert [one for one in named if not any(f"/{path}".endswith(f"/{one}") for path in there)] == []


# ---- the site ------------------------------------------------------------------------------------


@pytest.mark.tier("all")
def test_the_site_is_built_and_needs_no_other_host(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    command = [str(mkdocs), "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.relative_to(tmp_path / "site").with_suffix(".md").as_posix()
             for path in (tmp_path / "site").rglob("*.html")}  # fmt: skip
    assert {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} <= built
    for path in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(
            r"<(?:script|img|link rel=\"stylesheet\")[^>]*(?:src|href)=\"?(https?:[^\" >]+)",
            path.read_text(),
        )
        assert fetched == [], path.name
    shutil.rmtree(tmp_path / "site")
