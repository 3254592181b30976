"""Wheel and sdist work in an empty environment outside of the checkout: a client adds a timer, and
its notice arrives."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from made_bronze import Plan, put, segments_of
from real_daemon import Daemon

from purgatoryd.cli.install import PLACES
from purgatoryd.pipeline.lake import Lake

pytestmark = [pytest.mark.tier("all"), pytest.mark.xdist_group("test_packaging")]

ROOT = Path(__file__).resolve().parent.parent

ADD_TO_NOTICE = """
from purgatoryd.clients import Client, Subscriber

with Subscriber("packed", topics=["orders"]) as subscriber, Client("packed") as client:
    client.add("order:42", delay=0.01, topic="orders", payload=b"paid?")
    notice = subscriber.get(timeout=30)
assert (notice.key, notice.payload) == ("order:42", b"paid?"), notice
print("noticed")
"""


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a package as pip does, by a call of the build backend. `kind` is sdist or wheel."""
    code = f"from setuptools.build_meta import build_{kind} as b; print(b({str(out)!r}))"
    return out / run(sys.executable, "-c", code, cwd=source).split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked sdist. So the sdist has all files that a build needs."""
    out = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as packed:
        packed.extractall(out, filter="data")
    return build("wheel", out / sdist.name.removesuffix(".tar.gz"), out)


NEEDS_SPARK = """
from purgatoryd.pipeline.session import session
from purgatoryd.shm_layout.errors import ExtraMissing

try:
    session()
except ExtraMissing as error:
    print(error)
"""


def names_the_extras(python: Path, folder: Path) -> None:
    """Check that the pipeline's messages name the extra to install if no extra is installed."""
    command = [
        str(python.with_name("purgatoryd")),
        "pipeline",
        "ship",
        "--wal-dir",
        ".",
        "--lake",
        ".",
    ]
    ship = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (ship.returncode, ship.stdout) == (7, "")
    path = "where PATH is the checkout or the wheel of purgatoryd"
    assert ship.stderr == f"purgatoryd: pyarrow is missing: pip install 'PATH[lake]', {path}\n"
    assert "pip install 'PATH[spark]'" in run(python, "-c", NEEDS_SPARK, cwd=folder)


LIGHT = """
import sys

class Missing:
    def find_spec(self, name, *_):
        if name.split(".")[0] in {missing}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from purgatoryd.cli import main
main()
"""


def with_only(extra: str) -> str:
    """Return Python code that runs the command line as if only this extra were installed. Imports
    of the pipeline's other packages fail."""
    reported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {
        name: {re.split("[^a-z0-9-]", one)[0] for one in reported[name]}
        for name in ("spark", extra)
    }
    return LIGHT.replace("{missing}", repr((names["spark"] | {"numpy"}) - names[extra]))


@pytest.mark.parametrize(
    ("command", "reported"),
    [
        (("cold", "status", "--lake", "."), "version"),
        (("cold", "cancel", "order:1", "--lake", "."), "1 keys; the daemon: not asked"),
        (("bulk-load-agent", "."), ""),
        (("rebalance-plan", "show", "--lake", "."), ""),
        (("ship", "--wal-dir", ".", "--lake", "lake"), ""),
        (("status", "--json", "--lake", "shipped"), '"complete_to"'),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_extra_of_a_daemons_host_is_enough(
    command: tuple[str, ...], reported: str, tmp_path: Path
) -> None:
    (tmp_path / "shipped").mkdir()
    put(Lake(tmp_path / "shipped"), segments_of(Plan(600))[0])
    done = subprocess.run(
        [sys.executable, "-c", with_only("lake"), "pipeline", *command], cwd=tmp_path, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1, 7), done.stderr
    assert "Traceback" not in done.stderr
    assert reported in done.stdout


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_installed_goes_from_add_to_notice(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, daemon_dir: Path
) -> None:
    package: Path = request.getfixturevalue(kind)
    run(sys.executable, "-m", "venv", "--without-pip", "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", package, cwd=tmp_path)
    daemon = Daemon("packed", daemon_dir, ("--capacity", "1000"), python=str(python))
    try:
        assert run(python, "-c", ADD_TO_NOTICE, cwd=tmp_path, env=daemon.env) == "noticed\n"
        reported = run(python.with_name("purgatoryd"), "--version", cwd=tmp_path)
        assert reported.startswith("purgatoryd ")
        names_the_extras(python, tmp_path)
        run(
            python.with_name("purgatoryd"), "stop", "--name", "packed", cwd=tmp_path, env=daemon.env
        )
    finally:
        daemon.close()


def test_wheel_holds_one_tree_for_every_python(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "-cp311-abi3-linux_" in wheel.name
    assert {name.split("/")[0].split("-")[0] for name in names} == {"purgatoryd"}
    for part in ("shm_layout", "daemon", "clients", "pipeline", "cli"):
        assert f"purgatoryd/{part}/py.typed" in names
    assert "purgatoryd/shm_layout/_core.abi3.so" in names
    assert "purgatoryd/clients/_pack.abi3.so" in names
    assert "purgatoryd/shm_layout/layout.h" in names
    assert "purgatoryd/pipeline/report.html.j2" in names
    assert {f"purgatoryd/systemd/{name}" for name in (*PLACES, "default.toml")} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".o", "core.h"))]


def test_sdist_holds_what_a_reader_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    needed = {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "setup.py", "tests/conftest.py"}
    assert needed <= names
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "shm_layout").rglob("*.[ch]")} <= names
