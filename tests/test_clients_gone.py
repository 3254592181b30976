"""Sessions of clients that are gone, and the bound of the session table, with a real daemon."""

from __future__ import annotations

import asyncio

import pytest
from conftest import StartDaemon

from purgatoryd.clients import AsyncClient, Client, SessionTableFull

NEVER_S = 1e6
"""A timeout that no test waits for: what is refused at once needs none of it."""

# ---- the session table -----------------------------------------------------------------------


def test_one_client_more_than_sessions_is_refused_at_once(daemon: StartDaemon) -> None:
    daemon("demo", "--sessions", "2")
    with Client("demo"), Client("demo") as second:
        with pytest.raises(SessionTableFull, match=r"2 of 2 sessions are open.*raise --sessions"):
            Client("demo", timeout=NEVER_S)
        second.close()
        with Client("demo") as third:
            third.add("k", 60.0)


def test_one_asyncio_client_more_than_sessions_is_refused_at_once(daemon: StartDaemon) -> None:
    daemon("demo", "--sessions", "1")

    async def refused() -> None:
        async with AsyncClient("demo"):
            with pytest.raises(SessionTableFull):
                async with AsyncClient("demo", timeout=NEVER_S):
                    pass

    asyncio.run(refused())
