"""The Spark session: which Java it uses, its settings, and messages about missing parts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purgatoryd.pipeline import extras
from purgatoryd.pipeline.session import java_home, java_major, settings, wrapped
from purgatoryd.shm_layout.errors import ExtraMissing

pytestmark = pytest.mark.tier("test")


def fake_java(home: Path, version: str) -> Path:
    """Create a Java home whose `java` prints this version for -version, else its arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f'#!/bin/sh\n[ "$1" = -version ] && echo \'openjdk version "{version}"\' >&2 || echo "$@"\n'
    )
    java.chmod(0o755)
    return home


@pytest.mark.parametrize(
    ("version", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_402", 8), ("25-ea", 25)]
)
def test_the_major_version_is_read(tmp_path: Path, version: str, major: int) -> None:
    assert java_major(fake_java(tmp_path, version)) == major


def test_no_java_has_no_version(tmp_path: Path) -> None:
    assert java_major(tmp_path) == 0


def test_java_home_comes_first_then_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, other = fake_java(tmp_path / "a", "17.0.1"), fake_java(tmp_path / "b", "21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(named))
    monkeypatch.setenv("PATH", str(other / "bin"), prepend=os.pathsep)
    assert java_home() == named
    (named / "bin" / "java").unlink()
    assert java_home() == other


@pytest.fixture
def only_old_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    old = fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setenv("JAVA_HOME", str(old))
    monkeypatch.setenv("PATH", str(old / "bin"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return old


def test_the_wheel_is_taken_where_java_is_too_old(only_old_java: Path) -> None:
    home = java_home()
    assert java_major(home) >= 17
    assert home.parent == Path(os.environ["XDG_CACHE_HOME"]) / "purgatoryd"
    assert java_home() == home
    vector = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-version"], check=False
    )
    assert vector.returncode == 0


def test_the_wrapper_drops_one_argument_only(tmp_path: Path) -> None:
    home = wrapped(fake_java(tmp_path / "jre", "21"), tmp_path / "cache")
    said = subprocess.run(
        [
            home / "bin" / "java",
            "-a b",
            "--add-modules=jdk.incubator.vector",
            "--add-modules=x",
            "*",
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout == "-a b --add-modules=x *\n"


def test_no_java_is_a_clear_error(only_old_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purgatoryd.pipeline.session.find_spec", lambda name: None)
    with pytest.raises(ExtraMissing) as caught:
        java_home()
    assert f"{only_old_java} has 11" in str(caught.value)
    assert "PATH[jre]" in str(caught.value)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExtraMissing, match=r"pip install 'PATH\[spark\]'"):
        extras.need("no_such_module", "spark")


def test_settings_can_all_be_set_otherwise() -> None:
    assert settings(None, {})["spark.master"] == "local[*]"
    assert settings(None, {"spark.driver.memory": "4g"})["spark.driver.memory"] == "4g"
    on_cluster = settings("spark://host:7077", {"spark.executor.cores": "1"})
    assert on_cluster["spark.executor.cores"] == "1"
    assert "spark.driver.host" not in on_cluster
    assert settings(None, {"spark.master": "local[1]"})["spark.master"] == "local[1]"


def test_help_imports_neither_spark_nor_arrow() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from purgatoryd.cli.app import app;"
        "done = CliRunner().invoke(app, ['pipeline', '--help']); assert done.exit_code == 0, done;"
        "assert not {'pyspark', 'pyarrow', 'pandas', 'py4j'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_session_on_one_box_looks_for_no_address(spark: SparkSession) -> None:
    """If Spark looks for the host's address, it prints a warning about the result."""
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert os.environ["SPARK_LOCAL_IP"]


def test_the_session_works_in_utc(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    hours = spark.sql("SELECT hour(timestamp_micros(0)) AS hour, count(*) AS n GROUP BY 1")
    assert [tuple(row) for row in hours.collect()] == [(0, 1)]
