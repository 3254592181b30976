"""OpenMetrics: a daemon's metrics as Prometheus receives them, the alerts and the dashboard."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from machine import needs
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from real_daemon import (
    PATIENCE_S,
    Daemon,
    StartDaemon,
    clean_environment,
    eventually,
    remove_arena_files,
    used,
)

from purgatoryd.cli import exposition
from purgatoryd.cli.app import app
from purgatoryd.cli.exits import Exit
from purgatoryd.cli.exposition import (
    EDGES_NS,
    SLOW_NS,
    WAITING_EDGES_NS,
    deployment_families,
    exported,
    families,
    registry,
    table,
    text,
)
from purgatoryd.cli.metrics import address_of
from purgatoryd.clients import Client
from purgatoryd.shm_layout.errors import PermissionDenied
from purgatoryd.shm_layout.layout import DaemonState, Degraded, fields
from purgatoryd.shm_layout.metrics import COUNTERS, GAUGES, Histogram, Metrics, upper_edge_ns
from purgatoryd.shm_layout.shards import ShardTable, write_table
from purgatoryd.shm_layout.status_file import StatusFile, StatusRecord

pytestmark = pytest.mark.tier("check")

DOCS = Path(__file__).resolve().parent.parent / "docs"
RULES = yaml.safe_load((DOCS / "monitoring" / "purgatoryd.rules.yml").read_text())
CASES = Path(__file__).parent / "alerts.yml"
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Return the value of every sample by (name, labels). The parser refuses invalid text."""
    reported = text_string_to_metric_families(text)  # type: ignore[no-untyped-call]
    found: list[Sample] = [sample for family in reported for sample in family.samples]
    return {(s.name, frozenset(s.labels.items())): s.value for s in found}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"purgatoryd_{name}", frozenset({"daemon": "demo", **labels}.items())]


# ---- the text --------------------------------------------------------------------------------


@pytest.mark.tier("test")
def test_a_daemon_is_reported_in_openmetrics(daemon: StartDaemon) -> None:
    used(daemon)
    done = CliRunner().invoke(app, ["metrics", "--name", "demo"], catch_exceptions=False)
    found = parsed(done.stdout)
    assert value(found, "up") == value(found, "expiries_total") == 1
    assert value(found, "state", state="ready") == 1
    assert value(found, "namespace_timers", namespace="shop") == 2
    assert value(found, "refused_total", reason="quota") == 0
    assert value(found, "structural_lateness_seconds_count") == 1
    assert value(found, "stage_seconds_bucket", stage="remote", le="+Inf") == 2


@pytest.mark.tier("test")
def test_the_jobs_of_consumer_groups_are_reported(daemon: StartDaemon) -> None:
    daemon("demo")
    with Client("demo", namespace="shop") as client:
        client.create_group("mailers", ["orders"])
        assert value(parsed(text("demo")), "group_oldest_seconds", **MAILERS) == 0
        client.add_many([(f"k{n}", 0) for n in range(3)], topic="orders")
        eventually(lambda: client.group("mailers").waiting == 3)
    eventually(lambda: value(parsed(text("demo")), "group_oldest_seconds", **MAILERS) > 0)
    found = parsed(text("demo"))
    jobs = {s: value(found, "group_jobs", **MAILERS, state=s) for s in ("waiting", "dead")}
    assert jobs == {"waiting": 3, "dead": 0}


MAILERS = {"namespace": "shop", "group": "mailers"}
HOUR_NS = 3600 * 10**9


@pytest.mark.parametrize(
    ("name", "family", "edges_ns", "longest_ns"),
    [
        ("structural_lateness", "structural", EDGES_NS, HOUR_NS),
        ("remote", "stage_", WAITING_EDGES_NS, 9 * 365 * 24 * HOUR_NS),
    ],
)
def test_a_histogram_keeps_every_value_below_its_ends(
    name: str, family: str, edges_ns: list[int], longest_ns: int
) -> None:
    counts = [0] * 488
    for bucket in (0, 100, 227, 228, 400, 487):
        counts[bucket] = 1
    histogram = Histogram(name, tuple(counts), 2 * 10**9, 2**63 - 1)
    known = Metrics(DaemonState.READY, Degraded(0), {}, {}, {name: histogram}, [], [])
    (found,) = [f for f in families("demo", known) if family in f.name]
    reached = {s.labels["le"]: s.value for s in found.samples if s.name.endswith("_bucket")}
    for edge_ns, (end, count) in zip([*edges_ns, 2**63], reached.items(), strict=True):
        below = [b for b, n in enumerate(counts) if n and upper_edge_ns(b) <= edge_ns]
        assert count == len(below), end
    assert any(SLOW_NS <= edge_ns < SLOW_NS * 1.01 for edge_ns in edges_ns)
    assert edges_ns[-1] > longest_ns


def test_a_missing_daemon_is_reported(daemon_dir: Path) -> None:
    done = CliRunner().invoke(app, ["metrics", "--name", "nobody"])
    assert done.exit_code == Exit.NO_DAEMON


# ---- the endpoint ----------------------------------------------------------------------------


@contextmanager
def serving(directory: Path, address: str) -> Iterator[str]:
    """Run `purgatoryd metrics --serve`; yield its URL."""
    with endpoint(directory, address) as (_, reported):
        yield reported


@contextmanager
def endpoint(directory: Path, address: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run the endpoint; yield (process, URL)."""
    command = ["-m", "purgatoryd.cli", "metrics", "--name", "demo", "--serve", address]
    with subprocess.Popen(
        [sys.executable, *command], env=clean_environment(directory), stdout=subprocess.PIPE,
        text=True, bufsize=1,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().split()[-1]
        finally:
            process.kill()


def scraped(url: str) -> Samples:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return parsed(answer.read().decode())


@pytest.mark.tier("all")
def test_the_endpoint_answers_for_a_daemon_that_hangs_and_for_none(
    daemon: StartDaemon, daemon_dir: Path
) -> None:
    one = used(daemon)
    with serving(daemon_dir, "127.0.0.1:0") as url:
        os.kill(one.pid, signal.SIGSTOP)
        found = scraped(url)
        assert (value(found, "up"), value(found, "expiries_total")) == (1, 1)
        one.kill()
        found = scraped(url)
        assert (value(found, "up"), value(found, "expiries_total")) == (0, 1)
        remove_arena_files(one.paths)
        found = scraped(url)
        assert (value(found, "up"), value(found, "readable"), len(found)) == (0, 0, 2)


def test_an_unreadable_daemon_hides_no_other(
    daemon_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(name: str) -> Metrics:
        if name == "demo-1-0":
            raise PermissionDenied(name)
        return Metrics(DaemonState.READY, Degraded(0), {}, {}, {}, [], [])

    def readable() -> dict[str, float]:
        found = parsed(generate_latest(registry("demo")).decode())  # type: ignore[no-untyped-call]
        return {dict(labels)["daemon"]: is_so for (name, labels), is_so in found.items()
                if name == "purgatoryd_readable"}  # fmt: skip

    monkeypatch.setattr(exposition, "read", read)
    write_table(daemon_dir, ShardTable("demo", 1, 1, 2))
    StatusFile(daemon_dir, "demo").write(StatusRecord(DaemonState.READY, 0, 0, 0))
    assert readable() == {"demo": 1, "demo-1-0": 0, "demo-1-1": 1}
    (daemon_dir / "demo.status").write_text("")
    assert readable() == {"demo": 0, "demo-1-0": 0, "demo-1-1": 1}
    (daemon_dir / "demo.shards").write_text("")
    assert readable() == {"demo": 0}


@pytest.mark.tier("all")
def test_an_arena_of_another_version_is_not_said_to_be_down(daemon: StartDaemon) -> None:
    one = daemon("demo")
    one.kill()
    (offset,) = (at for field, at, _ in fields("pg_header") if field == "abi_major")
    os.pwrite((fd := os.open(f"/dev/shm/{one.paths.arena}", os.O_RDWR)), b"\xff", offset)
    os.close(fd)
    names = {sample.name: sample.value for family in exported("demo") for sample in family.samples}
    assert names == {"purgatoryd_readable": 0}


@pytest.mark.tier("all")
def test_the_endpoint_follows_the_shards(daemon: StartDaemon, daemon_dir: Path) -> None:
    def ready(found: Samples) -> set[str]:
        return {dict(labels)["daemon"] for (name, labels), is_up in found.items()
                if name == "purgatoryd_up" and is_up}  # fmt: skip

    one = daemon("demo", "--shards", "2", "--capacity", "100")
    with serving(daemon_dir, "127.0.0.1:0") as url:
        assert ready(scraped(url)) == {"demo", "demo-1-0", "demo-1-1"}
        one.restart("--shards", "3")
        assert ready(scraped(url)) == {"demo", "demo-2-0", "demo-2-1", "demo-2-2"}


def asked(url: str, host: str | None = None) -> int:
    """Request the URL; return the HTTP status of the answer."""
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_loopback_endpoint_gives_the_figures_to_this_host_alone(daemon_dir: Path) -> None:
    with serving(daemon_dir, "127.0.0.1:0") as url:
        assert asked(url) == asked(url, "localhost:9464") == 200
        assert asked(url, "evil.example") == asked(url, "127.0.0.1.evil.example") == 421
        assert asked(url.removesuffix("metrics")) == asked(f"{url}/more") == 404


def test_an_endpoint_for_others_has_any_name(daemon_dir: Path) -> None:
    with serving(daemon_dir, "0.0.0.0:0") as url:
        assert asked(url.replace("0.0.0.0", "127.0.0.1"), "host.example") == 200


@pytest.mark.tier("all")
def test_a_unix_socket_is_for_the_group(daemon: StartDaemon, daemon_dir: Path) -> None:
    used(daemon)
    path = daemon_dir / "metrics"
    with serving(daemon_dir, str(path)) as reported:
        assert reported == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE_S)
            client.connect(str(path))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            with client.makefile("rb") as answer:
                assert b" 200 " in answer.readline()
                assert b"\npurgatoryd_up{" in answer.read()
    with serving(daemon_dir, str(path)) as reported:
        assert reported == str(path), "the socket that a dead endpoint left is replaced"


def test_an_endpoint_that_is_stopped_leaves_no_socket(daemon_dir: Path) -> None:
    path = daemon_dir / "metrics"
    with endpoint(daemon_dir, str(path)) as (process, _):
        assert path.exists()
        process.terminate()
        assert process.wait(PATIENCE_S) == Exit.DONE
        assert not path.exists()


@pytest.mark.parametrize("address", ["9464", "host:", "host:x", "host:65536", ""])
def test_an_invalid_address_is_refused(address: str) -> None:
    done = CliRunner().invoke(app, ["metrics", "--serve", address])
    assert (done.exit_code, "neither HOST:PORT" in done.stderr) == (Exit.USAGE, True)


def test_addresses_are_parsed() -> None:
    def at(text: str | None) -> object:
        return address_of(None, None, text)  # type: ignore[arg-type]

    assert at(":9464") == ("127.0.0.1", 9464)
    assert at("[::1]:9464") == ("::1", 9464)
    assert at("./metrics") == "./metrics"
    assert at(None) is None


# ---- alerts, dashboard, page -----------------------------------------------------------------

PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds to each sample."""
LABEL = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def expressions() -> dict[str, str]:
    """Return the Prometheus query of each alert and of each panel's target, by name."""
    rules = {rule["alert"]: rule["expr"] for rule in ALERTS}
    panels = {
        f"{panel['title']} {number}": target["expr"]
        for panel in DASHBOARD["panels"]
        for number, target in enumerate(panel["targets"])
    }
    return rules | panels


@pytest.fixture(scope="module")
def exposed() -> dict[str, dict[str, set[str]]]:
    """Return, for each sample name of a working daemon, its labels and their values."""
    names: dict[str, dict[str, set[str]]] = {"up": {"job": {"purgatoryd"}}}
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PURGATORYD_DIR", directory)
        one = Daemon("demo", Path(directory), ("--wal-dir", f"{directory}/WAL"))
        try:
            used(lambda *_: one)
            with Client("demo", namespace="shop") as client:
                client.create_group("mailers", ["orders"])
            found = parsed(text("demo"))
        finally:
            one.close()
            remove_arena_files(one.paths)
    of_shards = StatusRecord(DaemonState.READY, 0, 0, 0)
    samples = [sample for one in deployment_families("demo", of_shards) for sample in one.samples]
    for name, labels in [*found, *((one.name, one.labels.items()) for one in samples)]:
        for label, value in labels:
            names.setdefault(name, {}).setdefault(label, set()).add(value)
    return names


@pytest.mark.parametrize("title", expressions())
def test_alerts_and_panels_use_existing_samples(
    title: str, exposed: dict[str, dict[str, set[str]]]
) -> None:
    expression = expressions()[title]
    asked = set(re.findall(r"\b(?:purgatoryd_\w+|up(?=\{))", re.sub(r'"[^"]*"', '""', expression)))
    assert asked
    assert asked <= exposed.keys()
    for name, matchers in re.findall(r"(\w+)\{([^}]*)\}", expression):
        for label, _, values in LABEL.findall(matchers):
            assert values == "$daemon" or set(values.split("|")) <= exposed[name][label], name
    labels = {label for name in asked for label in exposed[name]} | PROMETHEUS
    for grouped in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        assert set(grouped.split(", ")) <= labels


def test_planned_waiting_alerts_nobody() -> None:
    for rule in ALERTS:
        stages = [v for k, op, v in LABEL.findall(rule["expr"]) if k == "stage" and op == "=~"]
        assert all("remote" not in one.split("|") for one in stages)
        assert ("stage_seconds" in rule["expr"]) == bool(stages)


@pytest.mark.tier("all")
def test_the_slow_alert_sees_all_that_a_daemon_owns_of_a_call(daemon: StartDaemon) -> None:
    """Each histogram that the alert uses has counted the calls of one client and one subscriber."""
    used(daemon)
    found = parsed(text("demo"))
    (slow,) = (rule["expr"] for rule in ALERTS if rule["alert"] == "PurgatorydSlow")
    (stages,) = (values for _, _, values in LABEL.findall(slow))
    assert set(stages.split("|")) == {"request_queue", "response_queue", "send"}
    assert all(value(found, "stage_seconds_count", stage=one) for one in stages.split("|"))
    assert "purgatoryd_batch_service_seconds_bucket" in slow
    assert value(found, "batch_service_seconds_count")


def test_every_alert_has_a_meaning_and_an_action() -> None:
    alerts = [rule["alert"] for rule in ALERTS]
    assert len(set(alerts)) == len(alerts)
    page = (DOCS / "reference" / "metrics.md").read_text()
    assert re.findall(r"^\| `(Purgatoryd\w+)` \|", page, re.MULTILINE) == alerts
    assert all(rule["annotations"]["description"].endswith(".") for rule in ALERTS)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_prometheus_accepts_every_alert(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"\d+[smh]", rule.get("for", "0s"))
    assert rule["labels"]["severity"] in ("warning", "critical")
    named = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert set(named) <= {"daemon", "group", "instance", "reason", "stage"}
    assert rule["expr"].count("(") == rule["expr"].count(")")


def promtool(*arguments: str | Path) -> None:
    """Run promtool. If it fails, the test fails with its output."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.tier("test")
def test_alerts_come_when_they_should_and_only_then() -> None:
    needs("promtool")
    promtool("test", "rules", CASES)


def test_every_alert_is_tried_with_healthy_samples() -> None:
    """Each alert has a case that raises it. It also has a case that does not, because its samples
    stay below the limit or do not last long enough."""
    tried = {
        (look["alertname"], bool(look.get("exp_alerts")))
        for case in yaml.safe_load(CASES.read_text())["tests"]
        if '"well"' in str(case["input_series"])
        for look in case["alert_rule_test"]
    }
    assert tried == {(rule["alert"], comes) for rule in ALERTS for comes in (True, False)}


def test_prometheus_accepts_the_queries_of_panels(tmp_path: Path) -> None:
    needs("promtool")
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    rules = [{"record": "panel", "expr": one.replace("$__rate_interval", "5m")} for one in asked]
    (tmp_path / "panels.yml").write_text(
        yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]})
    )
    promtool("check", "rules", "--lint=none", tmp_path / "panels.yml")


def known_names() -> set[str]:
    """Return the names of all samples that a daemon can publish."""
    names = set(re.findall(r"^\| `(purgatoryd_\w+)` \| (\w+) ", table(), re.MULTILINE))
    parts = {"histogram": ("_bucket", "_count", "_sum")}
    return {name + part for name, kind in names for part in parts.get(kind, ("",))}


def test_the_table_has_every_metric() -> None:
    assert len(known_names()) > len(COUNTERS | GAUGES) - 10
