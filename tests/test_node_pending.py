"""Selections, bulk loads and past notices of the Node client of examples/node."""

from __future__ import annotations

import os
from pathlib import Path

import example_clients
import pytest
from node_client import command, newest, script
from real_daemon import PATIENCE_S, StartDaemon, eventually

from purgatoryd.clients import Client

pytestmark = pytest.mark.tier("all")


def test_selected_timers_are_listed_counted_moved_and_cancelled(
    node: Path, daemon: StartDaemon
) -> None:
    demo = daemon("demo")
    found = script(node, demo, """
const client = new pg.Client(place, { namespace: "shop" });
const at = (n) => 10n ** 18n + BigInt(n) * 10n ** 9n; // ns on the daemon's clock, decades ahead
const rows = Array.from({ length: 3000 }, (_, n) => [
  `o:${n}`,
  {
    deadlineNs: at((n * 7919) % 3000),
    topic: n % 3 ? "a" : "b",
    tag: n % 2 ? "odd" : "even",
    priority: n % 10,
    payload: `${n}`,
  },
]);
await client.addMany(rows);
await client.watch("operation", pg.anyOf(["x"]), { timeoutMs: 3600_000 });
const [half, soon] = [at(1500), new Date(Date.now() + 3600_000)];
const counts = await Promise.all(
  [
    {},
    { prefix: "o:1" },
    { prefix: Buffer.from("o:1") },
    { topic: "b" },
    { tag: "odd", topic: "a" },
    { dueFrom: half },
    { dueBefore: half, tag: "even" },
    { dueFrom: soon },
    { dueBefore: soon },
  ].map((one) => client.countTimers(one)),
);
const pages = [];
let cursor = null;
do {
  const page = await client.listTimers({ tag: "odd", limit: 400, cursor, payloads: true });
  pages.push(page.timers);
  cursor = page.cursor;
} while (cursor !== null);
const listed = pages.flat();
const sorted = listed.every((one, n) => n === 0 || listed[n - 1].deadlineNs <= one.deadlineNs);
const one = listed.find((timer) => timer.key === "o:17");
const before = one.deadlineNs;
const moved = await client.rescheduleWhere({ prefix: "o:17" }, { shiftMs: -1500 });
const after = (await client.get("o:17")).deadlineNs;
const later = await client.rescheduleWhere({ prefix: "o:18" }, { delayMs: 3600_000 });
const id = Buffer.alloc(16, 7);
const cancelled = await client.cancelWhere({ tag: "odd" }, { id });
const repeated = await client.cancelWhere({}, { id }); // the id of a sweep begins no second one
const status = await client.sweepStatus(id);
const stopped = await client.stopSweep(id);
const none = await client.sweepStatus(Buffer.alloc(16, 8));
const why = async (call) => {
  try {
    await call();
    return "";
  } catch (error) {
    return error.name;
  }
};
show({
  counts,
  pages: pages.map((page) => page.length),
  sorted,
  keys: new Set(listed.map((timer) => timer.key)).size,
  one: [`${one.payload}`, one.tag, one.priority, one.topic],
  shift: after - before,
  moved: moved.done,
  later: later.done,
  sweeps: [cancelled, repeated, status, stopped, none].map((sweep) => [sweep.state, sweep.done]),
  all: (await client.sweeps()).length,
  left: await client.countTimers(),
  operation: (await client.get("operation")).status,
  errors: [
    await why(() => client.countTimers({ color: 1 })),
    await why(() => client.cancelWhere({ prefix: "" })),
    await why(() => client.rescheduleWhere({}, {})),
    await why(() => client.rescheduleWhere({}, { shiftMs: 0 })),
    await why(() => client.rescheduleWhere({}, { shiftMs: 1, delayMs: 1 })),
    await why(() => client.listTimers({ limit: 0 })),
    await why(() => client.sweepStatus(Buffer.alloc(16))),
  ],
});
await client.close();
""")  # fmt: skip
    assert found["counts"] == [3000, 1111, 0, 1000, 1000, 1500, 750, 3000, 0]
    assert found["pages"] == [400, 400, 400, 300]
    assert (found["sorted"], found["keys"]) == (True, 1500)
    assert found["one"] == ["17", "odd", 7, "a"]
    assert found["shift"] == -1_500_000_000
    assert (found["moved"], found["later"]) == (111, 111)
    assert found["sweeps"] == [*[["DONE", 1500]] * 4, ["NONE", 0]]
    assert (found["all"], found["left"], found["operation"]) == (3, 1500, "FOUND")
    assert set(found["errors"]) == {"TypeError", "RangeError"}


def test_delivered_timers_are_cancelled_with_their_jobs(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
await client.createGroup("mailers", ["orders"]);
const keys = Array.from({ length: 40 }, (_, n) => `k${n}`);
await client.addMany(keys.map((key) => [key, { delayMs: 0, topic: "orders" }]));
const jobs = await pg.Consumer.open(place, {
  namespace: "shop",
  group: "mailers",
  topics: ["orders"],
  maxInFlight: 1,
});
const held = await jobs.next();
while ((await client.group("mailers")).waiting < 39) {}
const fired = (await client.cancelMany(keys)).map((one) => one.status);
const ended = (await client.cancelMany(keys, { delivered: true })).map((one) => one.status);
const { waiting, leased } = await client.group("mailers");
await held.ack();
await jobs.close();
const count = (statuses, name) => statuses.filter((status) => status === name).length;
show([
  count(fired, "FIRED"),
  count(fired, "LEASED"),
  count(ended, "CANCELLED"),
  count(ended, "LEASED"),
  waiting,
  leased,
]);
await client.close();
""")  # fmt: skip
    assert found == [39, 1, 39, 1, 0, 1]


def test_a_bulk_load_has_runs_holes_and_an_end(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "billing" });
const id = Buffer.from("0123456789abcdef");
const rows = Array.from({ length: 5000 }, (_, n) => [
  `b:${n}`,
  { delayMs: 3600_000, mode: "replace" },
]);
const count = (answers) =>
  answers.reduce((sum, { status }) => ({ ...sum, [status]: (sum[status] ?? 0) + 1 }), {});
const addRows = (from, upto, more = {}) =>
  client.addMany(rows.slice(from, upto), { bulkLoad: { id, firstRow: from, ...more } }).then(count);
const first = [await addRows(0, 1000), await addRows(2000, 3000)];
const status = await client.bulkLoadStatus(id);
const holes = [
  status.missing(0, 5000),
  status.missing(500, 1500),
  status.missing(2n ** 40n, 2n ** 40n + 5n),
];
const cancelled = count(
  await client.cancelMany(["b:1", "none"], { bulkLoad: { id, firstRow: 4000 } }),
);
const again = await addRows(0, 5000);
const claimed = await client.openBulkLoad(id, 5);
const fenced = await addRows(0, 1, { fencingToken: 4 });
const refused = await client.openBulkLoad(id, 4).catch((error) => [error.name, error.error]);
await client.closeBulkLoad(id, 5);
const closed = await client.addMany([["new", { delayMs: 1 }]], {
  bulkLoad: { id, firstRow: 9000, fencingToken: 5 },
});
const end = (await client.bulkLoadStatus(id)).state;
await client.forgetBulkLoad(id);
const errors = [];
for (const bulkLoad of [
  { id: Buffer.alloc(16) },
  { id: "x" },
  { id, firstRow: -1 },
  { id, firstRow: 2n ** 63n },
]) {
  errors.push(
    await client.addMany(rows.slice(0, 1), { bulkLoad }).then(
      () => "",
      (error) => error.name,
    ),
  );
}
const { missing, ...fields } = status;
show({
  first,
  status: fields,
  holes,
  cancelled,
  again,
  claimed: claimed.fencingToken,
  fenced,
  refused,
  closed: count(closed),
  end,
  forgotten: (await client.bulkLoadStatus(id)).state,
  errors,
});
await client.close();
""")  # fmt: skip
    assert found["first"] == [{"ADDED": 1000}, {"ADDED": 1000}]
    assert found["status"] == {
        "state": "OPEN", "rows": 2000, "upto": 3000, "fencingToken": 0, "uid": os.getuid()
    }  # fmt: skip
    assert found["holes"] == [
        [{"first": 1000, "upto": 2000}, {"first": 3000, "upto": 5000}],
        [{"first": 1000, "upto": 1500}],
        [{"first": 2**40, "upto": 2**40 + 5}],
    ]
    assert found["cancelled"] == {"CANCELLED": 1, "UNKNOWN": 1}
    assert found["again"] == {"BULK_LOADED": 2002, "ADDED": 2998}
    assert found["claimed"] == 5
    assert found["fenced"] == {"FENCED": 1}
    assert found["refused"] == ["MessageRefused", "FENCED"]
    assert found["closed"] == {"CLOSED": 1}
    assert (found["end"], found["forgotten"]) == ("CLOSED", "NONE")
    assert found["errors"] == ["RangeError"] * 4


RELOAD = """
const client = new pg.Client(place, { namespace: "billing" });
const id = Buffer.from("0123456789abcdef");
const rows = Array.from({ length: 400 }, (_, n) => [
  `r:${n}`,
  { delayMs: 0, topic: "bills", payload: `${n}` },
]);
const added = { ADDED: 0, BULK_LOADED: 0 };
for (let round = 0; round < 12; round++) {
  const answers = await client.addMany(rows, { bulkLoad: { id, firstRow: (round >> 1) * 400 } });
  for (const { status } of answers) added[status]++;
  show(round);
}
await client.addMany(
  Array.from({ length: 6000 }, (_, n) => [`t:${n}`, { delayMs: 3600_000, tag: "x" }]),
);
show("sweep");
const sweep = await client.cancelWhere({ tag: "x" });
while ((await client.countTimers()) > 0) {}
const past = new pg.PastNotices(place, { namespace: "billing" });
const events = [];
for await (const event of past.read({ topic: "bills", first: 1n, last: 2400n })) events.push(event);
const sequences = new Set(events.map((event) => event.sequence)).size;
const payloads = new Set(events.map((event) => `${event.payload}`)).size;
show({
  added,
  sweep: [sweep.state, sweep.done],
  types: [...new Set(events.map((event) => event.type))],
  events: events.length,
  sequences,
  payloads,
});
past.close();
await client.close();
"""


@pytest.mark.costly("kills a daemon five times while a program adds and cancels timers")
def test_rows_and_sweeps_count_once_while_the_daemon_is_killed(
    node: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo", "--capacity", "20000")
    with example_clients.running(command(node, demo, RELOAD), tmp_path / "out.txt") as program:
        for lines in (2, 5, 8, 11):
            eventually(lambda: len(program.lines()) >= lines)  # noqa: B023
            example_clients.crash(demo)
        eventually(lambda: ['"sweep"'] in program.lines())
        example_clients.crash(demo)
        assert program.process.wait(2 * PATIENCE_S) == 0
    assert newest(program.log) == {
        "added": {"ADDED": 2400, "BULK_LOADED": 2400}, "sweep": ["DONE", 6000],
        "types": ["notice"], "events": 2400, "sequences": 2400, "payloads": 400,
    }  # fmt: skip


def test_lost_notices_are_read_later(node: Path, daemon: StartDaemon, tmp_path: Path) -> None:
    """Notices that no subscriber had are read from the past, those of the write-ahead log as well;
    the range of another stream is refused."""
    demo = daemon("demo", "--wal-dir", str(tmp_path / "wal"), "--replay-buffer", "1024")
    with Client("demo", namespace="shop", durable=True, timeout=PATIENCE_S) as client:
        for start in range(0, 3000, 1000):
            client.add_many([(f"k{start + n}", 0.0, "orders", b"p") for n in range(1000)])
            eventually(lambda: client.count_timers() == 0)
    demo.kill()
    demo.start()
    found = script(node, demo, """
const past = new pg.PastNotices(place, { namespace: "shop" });
const notices = new pg.Subscriber(place, { namespace: "shop", topic: "orders" });
const client = new pg.Client(place, { namespace: "shop" });
await notices.live();
await client.add("new", { delayMs: 0, topic: "orders" });
let live = null;
for await (const event of notices)
  if (event.type === "notice") {
    live = event;
    break;
  }
const read = async (range) => {
  const found = [];
  for await (const event of past.read({ topic: "orders", ...range })) found.push(event);
  return found;
};
const all = await read({ first: 1n, last: live.sequence });
const some = await read({ first: 10, last: 19n });
const beyond = await read({ first: live.sequence + 1n, last: live.sequence + 5n }).catch(
  (error) => error.name,
);
const foreign = await read({ first: 1n, last: 5n, streamId: 7n, incarnation: 1n }).catch(
  (error) => error.error,
);
const stats = await past.stats();
show({
  live: [live.key, live.sequence],
  keys: new Set(all.map((event) => event.key)).size,
  all: all.length,
  order: all.every((event, n) => event.sequence === BigInt(n + 1)),
  some: some.map((event) => event.sequence),
  beyond,
  foreign,
  capacity: stats.replay_capacity,
});
past.close();
const closed = await past.stats().catch((error) => error.name);
if (closed !== "Closed") throw new Error(closed);
notices.close();
await client.close();
""")  # fmt: skip
    assert found["live"] == ["new", 3001]
    assert (found["keys"], found["all"], found["order"]) == (3001, 3001, True)
    assert found["some"] == list(range(10, 20))
    assert found["foreign"] == "CURSOR"
    assert found["capacity"] == 1024
    assert found["beyond"] == []


def test_a_subscription_is_live_before_the_first_timer(node: Path, daemon: StartDaemon) -> None:
    """No notice is missing after live(): twenty subscribers get the first notice each."""
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const firsts = [];
for (let n = 0; n < 20; n++) {
  const notices = new pg.Subscriber(place, { namespace: "shop", topic: `t${n}` });
  await notices.live();
  await client.add(`k${n}`, { delayMs: 0, topic: `t${n}` });
  for await (const { type, key, sequence } of notices) {
    firsts.push([type, key, sequence]);
    break;
  }
  notices.close();
}
show(firsts);
await client.close();
""")  # fmt: skip
    assert found == [["notice", f"k{n}", 1] for n in range(20)]
