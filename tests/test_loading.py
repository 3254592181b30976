"""Rows of loads and of the cold tier in a real daemon: each once, whatever is killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from cold_driver import Mortal, keys_in, small_pieces, spark_of_python
from conftest import StartDaemon
from real_daemon import Daemon, eventually, notices, stats

from purgatoryd.clients import Client
from purgatoryd.pipeline import cold
from purgatoryd.pipeline.loading import Answers, Loader, runs
from purgatoryd.pipeline.promote import promote
from purgatoryd.pipeline.tier import Tier
from purgatoryd.shm_layout.arena import Reader
from purgatoryd.shm_layout.errors import LoadRefused

HOUR_NS = 3600 * 10**9
NO_SPARK: Any = None


def fired(daemon: Daemon, topic: str = "default", namespace: str = "default") -> list[Any]:
    """The keys of all notices."""
    reader = Reader.attach(daemon.paths)
    try:
        return [one.key for one in notices(reader, namespace, topic)]
    finally:
        reader.close()


def has_expired(daemon: Daemon, count: int) -> None:
    """Returns once so many timers have."""
    eventually(lambda: stats(daemon)["expiries"] == count)


def test_rows_of_many_namespaces_topics_and_types(daemon: StartDaemon) -> None:
    demo = daemon()
    names = ["a", "a", "b", "a", "b", "b"]
    kinds = ["str", "str", "bytes", "uuid", "uuid", "bytes"]
    raw = [uuid4().bytes for _ in names]
    keys = [
        key.hex().encode() if kind == "str" else key for key, kind in zip(raw, kinds, strict=True)
    ]
    rows = pa.table({
        "namespace": names, "key_type": kinds, "key": pa.array(keys, pa.binary()),
        "topic": [f"t{i % 2}" for i in range(6)], "payload": pa.array(raw, pa.binary()),
        "delay": [3600.0] * 6, "row": [0, 1, 2, 3, 9, 10],
    })  # fmt: skip
    assert [run.num_rows for run in runs(rows)] == [2, 1, 1, 1, 1]
    load = uuid4()
    with Loader(demo.name) as loader:
        assert loader.add(load, rows).counts == {"ADDED": 6}
        assert loader.add(load, rows).counts == {"LOADED": 6}
        with Client(demo.name, namespace="b") as client:
            timer = client.get(UUID(bytes=raw[4]))
        assert timer is not None
        assert (timer.topic, timer.payload) == ("t0", raw[4])
        assert loader.cancel(rows) == {"CANCELLED": 6}
        assert loader.cancel(rows) == {"UNKNOWN": 6}


# ---- the cold tier -----------------------------------------------------------------------------


def cold_rows(first: int, last: int, due_ns: int) -> pa.Table:
    rows = [
        {"namespace": "shop", "key_type": "str", "key": b"k%d" % i, "topic": "t", "payload": b"p",
         "deadline_ns": due_ns + i}
        for i in range(first, last)
    ]  # fmt: skip
    return pa.Table.from_pylist(rows)


def test_windows_that_are_killed_fire_every_timer_once(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    small_pieces(monkeypatch, 50)
    demo, tier, past_ns = daemon(), Tier(tmp_path), time.time_ns() - 2 * HOUR_NS
    with Loader(demo.name) as loader:
        mortal, deaths, killed = Mortal(monkeypatch, loader), 0, True

        def bring() -> object:
            return promote(NO_SPARK, tier, past_ns + 10**6, loader)

        while killed:
            first = deaths * 100
            cold.load(tier, cold_rows(first, first + 100, past_ns), f"load {deaths}", loader)
            deaths += 1
            killed = mortal.run(bring, deaths)
            bring()
    assert deaths >= 7
    count = deaths * 100
    has_expired(demo, count)
    assert sorted(fired(demo, "t", "shop")) == sorted(f"k{i}" for i in range(count))


def test_a_cancel_reaches_what_the_daemon_has(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    demo, tier, due_ns = daemon(), Tier(tmp_path), time.time_ns() + HOUR_NS
    rows = cold_rows(0, 100, due_ns)
    with Loader(demo.name) as loader:
        cold.load(tier, rows, "one", loader)
        promote(NO_SPARK, tier, due_ns + 50, loader)
        assert cold.cancel(tier, rows.slice(45, 10), loader) == {"CANCELLED": 5, "UNKNOWN": 5}
        assert stats(demo)["live"] == 45
        (window,) = promote(NO_SPARK, tier, due_ns + 100, loader)
        assert window.results == {"ADDED": 45}
    with Client(demo.name, namespace="shop") as client:
        timer = client.get("k0")
    assert timer is not None
    assert timer.deadline_at is not None
    assert timer.deadline_at.timestamp() == pytest.approx(due_ns / 1e9, abs=1e-3)


def test_a_window_without_room_goes_on_later(
    daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark_of_python(monkeypatch)
    demo, tier, due_ns = (
        daemon("demo", "--capacity", "60"),
        Tier(tmp_path),
        time.time_ns() + HOUR_NS,
    )
    rows = cold_rows(0, 100, due_ns)
    with Loader(demo.name) as loader:
        cold.load(tier, rows, "one", loader)
        with pytest.raises(LoadRefused) as caught:
            promote(NO_SPARK, tier, due_ns + 100, loader)
        assert caught.value.counts == {"ADDED": 60, "FULL": 40}
        assert tier.unfinished() is not None
        loader.cancel(rows.slice(0, 40))
        (window,) = promote(NO_SPARK, tier, due_ns + 100, loader)
        assert window.results == {"LOADED": 60, "ADDED": 40}
    assert {key[2] for key in keys_in(rows.slice(40))} == {b"k%d" % i for i in range(40, 100)}
    assert stats(demo)["live"] == 60


def test_answers_add_up() -> None:
    one = Answers()
    one.counts.update({"ADDED": 3, "FULL": 2, "LOADED": 4})
    one.add(one)
    assert (one.refused, one.refusals) == (4, {"FULL": 4})
