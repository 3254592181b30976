"""Settings of `purgatoryd run`: their meaning, their precedence, and refused values."""

from __future__ import annotations

import json
import re
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import assume, given
from hypothesis import strategies as st

from purgatoryd.cli import units
from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.settings import FLAG_OF, GROUPS, variable
from purgatoryd.daemon.config import BOUNDS, DEFAULTS, Config
from purgatoryd.shm_layout.errors import InvalidName, InvalidSetting

pytestmark = pytest.mark.tier("check")


@pytest.fixture(autouse=True)
def no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("name", *FLAG_OF.values(), "config"):
        monkeypatch.delenv(variable(name), raising=False)


def print_config(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["run", "--print-config", *args], env=env)


def effective(*args: str, env: dict[str, str] | None = None) -> dict[str, tuple[Any, str]]:
    result = print_config("--json", *args, env=env)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["setting"]: (line["value"], line["source"]) for line in lines}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "purgatoryd.toml"
    path.write_text('name = "web"\ncapacity = 1000\npayload-memory = "1M"\ntick = "1ms"\n')
    return path


def test_flag_wins_over_environment_over_file_over_default(toml: Path) -> None:
    env = {"PURGATORYD_CAPACITY": "2000", "PURGATORYD_TICK": "2ms", "PURGATORYD_CONFIG": str(toml)}
    found = effective("--tick", "3ms", env=env)
    assert found["tick"] == ("3ms", "flag")
    assert found["capacity"] == (2000, "environment")
    assert found["payload-memory"] == ("1M", "config file")
    assert found["name"] == ("web", "config file")
    assert found["fanout"] == (256, "default")


def test_printed_settings_are_a_config_file_that_means_the_same(toml: Path, tmp_path: Path) -> None:
    options = (
        "--clock",
        "virtual",
        "--wall-origin",
        "2013-01-01T00:00:00-05:00",
        "--replay-buffer",
        "9",
    )
    first = print_config("--config", str(toml), *options)
    copy = tmp_path / "copy.toml"
    copy.write_text(first.stdout)
    second = print_config("--config", str(copy))
    assert tomllib.loads(first.stdout) == tomllib.loads(second.stdout)
    assert tomllib.loads(first.stdout)["wall-origin"] == "2013-01-01T05:00:00Z"
    assert tomllib.loads(first.stdout)["replay-buffer"] == 16


def test_every_setting_of_the_daemon_has_a_flag() -> None:
    assert set(FLAG_OF) == set(DEFAULTS)


def sections(help_text: str) -> dict[str, list[str]]:
    """Return the flags under each heading of a help text."""
    found: dict[str, list[str]] = {}
    heading = ""
    for line in help_text.splitlines():
        if title := re.fullmatch(r"(\S.*):", line):
            heading = title[1]
        elif heading and (flag := re.match(r"  --([a-z-]+)", line)):
            found.setdefault(heading, []).append(flag[1])
    return found


def test_help_shows_every_setting_once_under_the_heading_of_its_group() -> None:
    shown = sections(CliRunner().invoke(app, ["run", "--help"]).output)
    options = shown.pop("Options")
    assert shown == {heading: [row[0] for row in rows] for heading, rows in GROUPS.items()}
    assert sorted(FLAG_OF.values()) == sorted(flag for flags in shown.values() for flag in flags)
    assert set(options).isdisjoint(FLAG_OF.values())


@pytest.mark.parametrize("text", ["colour = 1\n", "payload_memory = 1\n", "[run]\nname = 'a'\n"])
def test_unknown_key_in_the_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    result = print_config("--config", str(path))
    assert result.exit_code == Exit.USAGE
    assert "unknown setting" in result.stderr
    assert str(path) in result.stderr


def test_unknown_variable() -> None:
    result = print_config("--json", env={"PURGATORYD_CAPACTY": "1"})
    assert result.exit_code == Exit.USAGE
    reported = json.loads(result.stderr)
    assert (reported["error"], reported["setting"]) == ("UnknownSetting", "PURGATORYD_CAPACTY")


def test_variables_that_are_no_settings_are_known() -> None:
    assert effective(env={"PURGATORYD_DIR": "/x", "PURGATORYD_REQUIRE": "qemu"})


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--capacity", "0"], "capacity = 0 (flag): must be from 1 to 134217728"),
        (["--tick", "1s"], "must be from 1000 to 100000000 ns"),
        (["--tick", "soon"], "'soon' is not a duration such as"),
        (["--payload-memory", "16X"], "is not a size such as"),
        (["--wall-origin", "2013-01-01"], "has no offset from UTC"),
        (["--wall-origin", "2013-01-01T00:00Z"], "must be 0 with the real clock"),
        (["--name", "No"], "daemon name 'No' must consist of"),
        (["--colour", "red"], "No such option"),
    ],
)
def test_bad_values_say_the_bound(args: list[str], said: str) -> None:
    result = print_config(*args)
    assert result.exit_code == Exit.USAGE
    assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "said", "code"),
    [
        ("= 1", "must be a TOML file", Exit.USAGE),
        (None, "cannot be read: No such file", Exit.UNUSABLE),
    ],
)
def test_file_that_cannot_be_used(text: str | None, said: str, code: Exit, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_text(text)
    result = print_config("--config", str(path))
    assert result.exit_code == code
    assert said in result.stderr


@pytest.mark.parametrize("value", ["true", "[1]"])
def test_value_in_the_file_of_a_wrong_type(value: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"capacity = {value}\n")
    result = print_config("--config", str(path))
    assert result.exit_code == Exit.USAGE
    assert "must be a number or a string" in result.stderr


def test_config_keeps_its_bounds() -> None:
    for setting, (low, high) in BOUNDS.items():
        for value in (low - 1, high + 1):
            if setting == "replay_bytes_max" and value <= 0:
                continue
            with pytest.raises(InvalidSetting) as caught:
                Config(name="a", **{setting: value})  # type: ignore[arg-type]
            assert (caught.value.setting, caught.value.value) == (setting, value)
    with pytest.raises(InvalidSetting, match="power of two"):
        Config(name="a", replay_capacity=100)
    with pytest.raises(InvalidName):
        Config(name="A")


def test_replay_memory_is_half_of_the_payload_memory_unless_given() -> None:
    assert Config(name="a", payload_bytes=2**20).replay_bytes_max == 2**19
    assert Config(name="a", replay_bytes_max=4096).replay_bytes_max == 4096


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0s", 0),
        ("65.536us", 65_536),
        ("1.50s", 1_500_000_000),
        ("1h30m", 5_400_000_000_000),
        ("1.5h", 5_400_000_000_000),
        ("1w1d1h1m1s1ms1us1ns", 694_861_001_001_001),
        ("1h90m", 9_000_000_000_000),
        ("1m0.5s", 60_500_000_000),
        ("106751d", 106751 * 86_400 * 10**9),
        ("9223372036854775807ns", 2**63 - 1),
    ],
)
def test_durations(text: str, ns: int) -> None:
    assert units.Duration().convert(text, None, None) == ns


@pytest.mark.parametrize(
    "ns", [0, 1, 999, 1_000, 65_536, 1_000_000, 90_000_000_000, 3_600 * 10**9, 2**63 - 1]
)
def test_exact_durations_read_back(ns: int) -> None:
    assert units.Duration().convert(units.exact_duration(ns), None, None) == ns


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 16 * 2**20, 3 * 2**30, 2**30 + 1])
def test_exact_sizes_read_back(count: int) -> None:
    assert units.Size().convert(units.exact_size(count), None, None) == count


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("2", "write 2s"),
        ("0", "write 0s"),
        ("2.5", "write 2.5s"),
        *((text, "is not a duration such as")
          for text in ("", "1e3s", "nan", "inf", "never", "1 s", " 1s", "1s ", "1h 30m", "-3s",
                       "+3s", "--1", "s", "1S", "1H", "1min", "1y", "1.s", ".5s", "1h30", "1,5s",
                       "\u0661s", "1s\n")),
        ("30m1h", "the largest first"),
        ("1h1h", "each unit once"),
        ("1s1ms1s", "the largest first"),
        ("1.5h30m", "decimal point before its last unit"),
        ("0.5ns", "whole number of nanoseconds"),
        ("0.0000000001s", "whole number of nanoseconds"),
        ("9223372036854775808ns", "longest duration"),
        ("15251w", "longest duration"),
    ],
)  # fmt: skip
def test_texts_that_are_no_duration(text: str, reason: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(reason)):
        units.Duration().convert(text, None, None)


@given(counts=st.lists(st.integers(0, 10**6) | st.none(), min_size=8, max_size=8))
def test_each_combination_of_units_is_their_sum(counts: list[int | None]) -> None:
    scale = list(reversed(units.NS_PER.items()))
    parts = [(n, u, ns) for n, (u, ns) in zip(counts, scale, strict=True) if n is not None]
    text = "".join(f"{n}{u}" for n, u, _ in parts)
    assume(text)
    wanted = sum(n * ns for n, _, ns in parts)
    if wanted <= units.DURATION_MAX_NS:
        assert units.parse_duration(text) == wanted
    else:
        with pytest.raises(ValueError, match="longest"):
            units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("100ms", 0.1), ("0s", 0.0), ("inf", 1e9), ("never", 1e9), ("9999w", 1e9)]
)
def test_a_limit_may_be_endless(text: str, seconds: float) -> None:
    assert units.Limit().convert(text, None, None) == seconds


def test_a_limit_needs_a_unit() -> None:
    with pytest.raises(click.BadParameter, match="write 5s"):
        units.Limit().convert("5", None, None)


def test_no_setting_takes_a_bare_number_as_a_duration(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    rows = (row for group in GROUPS.values() for row in group)
    spans = [flag for flag, _, kind, _ in rows if isinstance(kind, units.Duration)]
    assert spans
    for flag in spans:
        path.write_text(f"{flag} = 5\n")
        for done in (
            print_config(f"--{flag}", "5"),
            print_config(env={variable(flag): "5"}),
            print_config("--config", str(path)),
        ):
            assert (done.exit_code, done.stdout) == (Exit.USAGE, "")
            assert "'5' has no unit: write 5s" in " ".join(done.stderr.split())


def test_moment_has_an_offset() -> None:
    moment = units.Moment().convert("2026-01-31T12:00:00Z", None, None)
    assert moment == datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0ns"),
        (999, "999ns"),
        (65_536, "65.54us"),
        (59_000_000_000, "59s"),
        (60_000_000_000, "1m"),
        (-90_000_000_000, "-1m 30s"),
        (7_559_999_999_999, "2h 5m"),
        (7_200_000_000_000, "2h"),
        (86_399_999_999_999, "23h 59m"),
        (1_000 * 86_400 * 10**9 + 1, "1,000d"),
    ],
)
def test_durations_for_people(ns: int, text: str) -> None:
    assert units.format_duration(ns) == text


@pytest.mark.parametrize(
    ("left_ns", "text"), [(7_500_000_000_000, "in 2h 5m"), (-180_000_000_000, "3m ago")]
)
def test_relative_times_for_people(left_ns: int, text: str) -> None:
    assert units.format_relative(left_ns) == text


def test_settings_that_may_be_repeated(tmp_path: Path) -> None:
    assert effective()["allow-uid"] == ([], "default")
    assert effective("--allow-uid", "5", "--allow-uid", "7")["allow-uid"] == ([5, 7], "flag")
    assert effective(env={"PURGATORYD_ADMIN_UID": "5 7"})["admin-uid"] == ([5, 7], "environment")
    path = tmp_path / "c.toml"
    for text in ("allow-gid = [5, '7']\n", "allow-gid = 5\n"):
        path.write_text(text)
        found = effective("--config", str(path))["allow-gid"]
        assert found == ([5, 7] if "[" in text else [5], "config file")
    first = print_config("--allow-uid", "5", "--admin-uid", "6", "--quota-bytes", "1M")
    path.write_text(first.stdout)
    assert tomllib.loads(print_config("--config", str(path)).stdout) == tomllib.loads(first.stdout)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("allow-uid = [-1]\n", "allow-uid = -1 (config file): must be from 0 to 4294967294"),
        ("allow-uid = [true]\n", "must be a number or a string"),
        ("allow-uid = ['root']\n", "not a valid integer"),
        ("quota-ops = 2000000000\n", "must be from 0 to 1000000000"),
        ("accounts = 0\n", "must be from 1 to 65535"),
    ],
)
def test_bad_ids_and_quotas(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    result = print_config("--config", str(path))
    assert result.exit_code == Exit.USAGE
    assert said in result.stderr
