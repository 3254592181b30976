"""Reminders over HTTP with FastAPI: each is sent once, or never if it was deleted in time.

    PUT    /reminders/ID   {"text": "call back", "due": "2026-01-31T12:00:00Z"}
    GET    /reminders/ID   the state: pending, sent or deleted
    DELETE /reminders/ID   409 if it has been sent

The application stores a reminder and arms a timer for it. The notice of the timer claims the row:
one transaction changes it from pending to sent and stores the message for sending. Only one
transaction can do so, hence several processes of the application may receive the same notice.

Three rules keep the result right if the application or the daemon is killed at any point:

1. The client chooses the ID and repeats a request without an answer. Both requests have the same
   effect if they arrive twice.
2. The row comes before the timer. An application that starts, or that has lost notices, first
   subscribes and then arms all pending rows again with the mode keep. It changes nothing for a row
   whose timer is armed. A timer that is missing, because it fired while no application ran or was
   never armed, is armed again; if its time is past, its notice comes at once.
3. A deletion changes the row before it cancels the timer, so a late notice finds nothing to claim.

    REMINDERS=FILE PURGATORYD_NAME=demo uvicorn --factory examples.recipes.reminders:application
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from fastapi import FastAPI, HTTPException
from pydantic import AwareDatetime, BaseModel

from purgatoryd.clients import AsyncClient, AsyncSubscriber, DaemonError, Lagged

NAMESPACE = "reminders"
TOPIC = "due"
RETRY_S = 0.5


class Reminder(BaseModel):
    """The body of a PUT request. A time without a zone is refused."""

    text: str
    due: AwareDatetime


class State(BaseModel):
    """The body of an answer."""

    state: str


class Table:
    """The reminders in a database. The messages in `sent` wait for a program that sends them."""

    def __init__(self, file: str) -> None:
        self._base = sqlite3.connect(file, timeout=30)
        self._base.execute(
            "CREATE TABLE IF NOT EXISTS reminders "
            "(id TEXT PRIMARY KEY, text TEXT, due TEXT, state TEXT DEFAULT 'pending')"
        )
        self._base.execute("CREATE TABLE IF NOT EXISTS sent (id TEXT, text TEXT)")

    def put(self, name: str, reminder: Reminder) -> None:
        """Store a reminder; keep one that exists."""
        row = (name, reminder.text, reminder.due.isoformat())
        with self._base:
            self._base.execute(
                "INSERT OR IGNORE INTO reminders (id, text, due) VALUES (?, ?, ?)", row
            )

    def get(self, name: str) -> tuple[str, datetime] | None:
        """Return (state, due time) of a reminder."""
        found = self._base.execute("SELECT state, due FROM reminders WHERE id = ?", (name,))
        row = found.fetchone()
        return row and (row[0], datetime.fromisoformat(row[1]))

    def pending(self) -> list[dict[str, object]]:
        """Return the pending reminders as rows for add_many()."""
        rows = self._base.execute("SELECT id, due FROM reminders WHERE state = 'pending'")
        return [{"key": name, "deadline": datetime.fromisoformat(due)} for name, due in rows]

    def claim(self, name: str, state: str) -> bool:
        """Move a pending reminder to `state`, in a transaction that also stores its message if the
        state is "sent". Return whether the reminder was pending."""
        with self._base:
            changed = self._base.execute(
                "UPDATE reminders SET state = ? WHERE id = ? AND state = 'pending'", (state, name)
            ).rowcount
            if changed and state == "sent":
                message = "INSERT INTO sent SELECT id, text FROM reminders WHERE id = ?"
                self._base.execute(message, (name,))
        return changed == 1


async def deliver(timers: AsyncClient, notices: AsyncSubscriber, table: Table) -> None:
    """Claim each reminder whose notice comes. Begin again if notices were lost."""
    while True:
        try:
            if rows := table.pending():
                await timers.add_many(rows, topic=TOPIC, mode="keep")
            while True:
                if (notice := await notices.get()) is not None:
                    table.claim(str(notice.key), "sent")
        except (Lagged, DaemonError):
            await asyncio.sleep(RETRY_S)


def application() -> FastAPI:
    """Return the application, for uvicorn."""
    table = Table(os.environ["REMINDERS"])
    daemon = os.environ.get("PURGATORYD_NAME", "default")
    timers = AsyncClient(daemon, namespace=NAMESPACE)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with timers, AsyncSubscriber(daemon, namespace=NAMESPACE, topics=[TOPIC]) as notices:
            delivery = asyncio.create_task(deliver(timers, notices, table))
            yield
            delivery.cancel()

    app = FastAPI(lifespan=lifespan)

    @app.put("/reminders/{name}")
    async def put(name: str, reminder: Reminder) -> State:
        table.put(name, reminder)
        state, due = table.get(name) or ("pending", reminder.due)
        if state == "pending":
            await timers.add(name, deadline=due, topic=TOPIC, mode="keep")
        return State(state=state)

    @app.get("/reminders/{name}")
    async def get(name: str) -> State:
        if (found := table.get(name)) is None:
            raise HTTPException(404)
        return State(state=found[0])

    @app.delete("/reminders/{name}")
    async def delete(name: str) -> State:
        if not table.claim(name, "deleted"):
            state = (await get(name)).state
            if state == "sent":
                raise HTTPException(409, "the reminder has been sent")
        await timers.cancel(name)
        return State(state="deleted")

    return app
