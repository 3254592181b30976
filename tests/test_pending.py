"""Pending timers with tags, by clients of a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.clients import AsyncClient, Client, InvalidArgument
from purgatoryd.clients.local_channel import Transport
from purgatoryd.shm_layout.layout import Status

pytestmark = pytest.mark.tier("test")

BAD: list[Any] = ["", "t" * 64, "ä" * 32, "a\0b", "\ud800", 7, b"t"]


@pytest.fixture(params=["ring", "zmq"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def client(daemon: StartDaemon, transport: Transport) -> Iterator[Client]:
    daemon("demo", "--clock", "virtual")
    with Client("demo", timeout=PATIENCE_S, transport=transport) as client:
        yield client


def tag_of(client: Client, key: str) -> str | None:
    found = client.get(key)
    assert found is not None
    return found.tag


@pytest.mark.parametrize("tag", BAD, ids=range(len(BAD)))
def test_a_bad_tag_changes_nothing(client: Client, tag: Any) -> None:
    with pytest.raises(InvalidArgument, match="tag"):
        client.add("a", 1, tag=tag)
    with pytest.raises(InvalidArgument, match="tag"):
        client.add("a", 1, tag=tag, wait=False)
    columns = {"key": ["a"], "delay": [1], "tag": [tag]}
    for many in ([{"key": "a", "delay": 1, "tag": tag}], columns):
        with pytest.raises(InvalidArgument, match="tag"):
            client.add_many(many)
    with pytest.raises(InvalidArgument, match="tag"):
        client.add_many([("a", 1)], tag=tag)
    assert client.get("a") is None


def test_every_kind_of_add_takes_a_tag(client: Client, transport: Transport) -> None:
    client.add("single", 1, tag="one")
    client.add("slow", 1, within=0.5, tag="ü" * 31)
    for n in range(3):
        client.add(f"later{n}", 1, tag=f"later{n}", wait=False)
    client.flush()
    client.add_many([{"key": "row", "delay": 1, "tag": "own"}, ("tuple", 1)], tag="common")
    client.add_many({"key": ["c0", "c1", "c2"], "delay": [1, 1, 1], "tag": ["x", None, "y"]})
    client.add_many({"key": np.array(["n0", "n1"]), "delay": np.ones(2)}, tag="all")
    arrow = pa.table({"key": ["a0", "a1"], "delay": [1, 1], "tag": pa.array([None, "z"])})
    client.add_many(arrow, tag="rest")

    async def run() -> None:
        async with AsyncClient("demo", transport=transport) as other:
            await other.add("async", 1, tag="async")
            await other.add_many([("async-row", 1)], tag="rows")

    asyncio.run(run())
    expected = {
        "single": "one", "slow": "ü" * 31, "later0": "later0", "later2": "later2", "row": "own",
        "tuple": "common", "c0": "x", "c1": None, "c2": "y", "n0": "all", "n1": "all", "a0": "rest",
        "a1": "z", "async": "async", "async-row": "rows",
    }  # fmt: skip
    assert {key: tag_of(client, key) for key in expected} == expected


def test_an_add_of_an_armed_key_follows_its_mode(client: Client) -> None:
    client.add("k", 10, tag="first")
    assert client.add("k", 20, mode="extend", tag="second").status is Status.EXTENDED
    assert client.add("k", 30, mode="keep", tag="second").status is Status.KEPT
    assert tag_of(client, "k") == "first"
    client.add("k", 5, mode="replace", tag="second")
    assert tag_of(client, "k") == "second"
    client.add("k", 5, mode="replace")
    assert tag_of(client, "k") is None
