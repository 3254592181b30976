"""Completion in bash, zsh and fish: commands, options and names."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from real_daemon import PATIENCE_S, StartDaemon, clean_environment

from purgatoryd.clients import Client

pytestmark = pytest.mark.tier("all")

SCRIPT = Path(sys.executable).with_name("purgatoryd")
SHELLS = ("bash", "zsh", "fish")


def ask(shell: str, line: str, env: dict[str, str]) -> list[str]:
    """Return the completions of the last word of `line`, as the script of `shell` gets them."""
    words = line.split(" ")
    asked = {
        "_PURGATORYD_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": words[-1] if shell == "fish" else str(len(words) - 1),
    }
    run = subprocess.run(
        [SCRIPT], env=env | asked, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert run.stderr == ""
    lines = run.stdout.splitlines()
    if shell == "zsh":  # type, value, help, each on a line
        return lines[1::3]
    return [one.partition(",")[2].partition("\t")[0] for one in lines if one]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_and_options(shell: str, daemon_dir: Path) -> None:
    env = clean_environment(daemon_dir)
    assert ask(shell, "purgatoryd ca", env) == ["cancel"]
    assert ask(shell, "purgatoryd namespace cr", env) == ["create"]
    assert ask(shell, "purgatoryd add --mo", env) == ["--mode"]
    assert set(ask(shell, "purgatoryd add --mode ex", env)) == {"extend"}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_names(shell: str, daemon: StartDaemon) -> None:
    demo = daemon("demo")
    daemon("deep")
    with Client("demo", namespace="shop") as client:
        client.add("k", 3600, topic="orders")
    assert ask(shell, "purgatoryd get --name d", demo.env) == ["deep", "demo"]
    named = "purgatoryd add --name demo"
    assert ask(shell, f"{named} -n s", demo.env) == ["shop"]
    assert ask(shell, f"{named} -n shop -t o", demo.env) == ["orders"]
    assert ask(shell, f"{named} -t o", demo.env) == []
    assert ask(shell, f"{named} -n _", demo.env) == []
    assert ask(shell, "purgatoryd topic set --name demo -n shop or", demo.env) == ["orders"]


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_without_a_daemon_is_empty_and_silent(shell: str, daemon_dir: Path) -> None:
    env = clean_environment(daemon_dir)
    for line in ("get --name d", "add -n s", "add -t o", "add --name UPPER -n s",
                 "run --config missing.toml -n s"):  # fmt: skip
        assert ask(shell, f"purgatoryd {line}", env) == []


def test_completion_of_an_interpreted_time_prints_nothing(daemon_dir: Path) -> None:
    env = clean_environment(daemon_dir)
    assert ask("bash", "purgatoryd add --deadline now --mode ex", env) == ["extend"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_reads_the_script(shell: str, daemon_dir: Path) -> None:
    """A shell that is installed runs the script; bash also completes a word with it."""
    env = clean_environment(daemon_dir) | {"_PURGATORYD_COMPLETE": f"{shell}_source"}
    script = subprocess.run(
        [SCRIPT], env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    assert f"_PURGATORYD_COMPLETE={shell}_complete" in script
    if shutil.which(shell) is None:
        return
    if shell != "bash":
        subprocess.run([shell, "-n"], input=script, text=True, timeout=PATIENCE_S, check=True)
        return
    program = (
        f"{script}\nCOMP_WORDS=({SCRIPT} ca); COMP_CWORD=1; _purgatoryd_completion {SCRIPT};"
        'echo "${COMPREPLY[@]}"'
    )
    run = subprocess.run(
        ["bash", "-c", program], env=clean_environment(daemon_dir), capture_output=True,
        text=True, timeout=PATIENCE_S, check=True,
    )  # fmt: skip
    assert (run.stdout, run.stderr) == ("cancel\n", "")
