"""Schedules of the Node client of examples/node, written from docs/protocol.md."""

from __future__ import annotations

from pathlib import Path

import pytest
from node_client import script, script_while_killed
from real_daemon import StartDaemon

from purgatoryd.clients import Client

pytestmark = pytest.mark.tier("all")


def test_a_schedule_is_put_changed_listed_and_deleted(node: Path, daemon: StartDaemon) -> None:
    demo = daemon("demo")
    found = script(node, demo, """
const client = new pg.Client(place, { namespace: "reports" });
const why = (promise) =>
  promise.then(
    () => "none",
    (error) => [error.name, error.status],
  );
const daily = {
  cron: "0 9 * * 1-5",
  tz: "Europe/Berlin",
  topic: "report",
  tag: "mail",
  priority: 3,
};
const limits = { payload: "p", count: 100, until: new Date("2040-01-01"), jitterMs: 5 };
const put = await client.putSchedule("daily", { ...daily, ...limits });
const repeated = await client.putSchedule("daily", { ...daily, ...limits });
const changed = await client.putSchedule("daily", { ...daily, ...limits, count: 99 });
const probe = await client.putSchedule("probe", { everyMs: 3600_000, overlap: "delay" });
const errors = [
  await why(client.putSchedule("bad", { cron: "0 9 * * 99" })),
  await why(client.putSchedule("bad", { cron: "0 9 * * *", tz: "Mars/Olympus" })),
  await why(client.putSchedule("bad", { everyMs: 1000, cron: "* * * * *" })),
  await why(client.putSchedule("bad", { everyMs: 0 })),
  await why(client.putSchedule("", { everyMs: 1000 })),
  await why(client.putSchedule("bad", { everyMs: 1000, overlap: "often" })),
  await why(client.pauseSchedule("none")),
  await why(client.triggerSchedule("none")),
  await why(client.previewSchedule("none", 1)),
];
const paused = await client.pauseSchedule("daily");
const resumed = await client.resumeSchedule("daily");
const keys = (await client.schedules()).map((one) => one.key).sort();
const read = await client.getSchedule("daily");
const gone = [
  await client.deleteSchedule("probe"),
  await client.deleteSchedule("probe"),
  await client.getSchedule("probe"),
];
show({
  put: { ...put, payload: `${put.payload}` },
  kept: repeated.status,
  errors,
  keys,
  gone,
  changed: [changed.status, changed.revision, changed.count],
  probe: [probe.everyMs, probe.overlap],
  paused: [paused.paused, paused.ticket],
  resumed: [resumed.paused, resumed.nextNs === read.nextNs],
});
await client.close();
""")  # fmt: skip
    put = found["put"]
    wanted = {
        "key": "daily", "topic": "report", "payload": "p", "tag": "mail", "priority": 3,
        "everyMs": None, "cron": "0 9 * * 1-5", "tz": "Europe/Berlin", "count": 100, "jitterMs": 5,
        "overlap": "allow", "revision": 1, "occurrences": 1, "paused": False, "status": "ADDED",
    }  # fmt: skip
    assert {name: put[name] for name in wanted} == wanted
    assert found["kept"] == "KEPT"
    assert found["changed"] == ["REPLACED", 2, 99]
    assert found["probe"] == [3600_000, "delay"]
    assert found["errors"] == [
        ["ScheduleRefused", "BAD_SPEC"], ["ScheduleRefused", "BAD_SPEC"], ["TypeError", None],
        ["RangeError", None], ["RangeError", None], ["RangeError", None],
        *[["ScheduleRefused", "UNKNOWN"]] * 3,
    ]  # fmt: skip
    assert found["keys"] == ["daily", "probe"]
    assert found["paused"] == [True, 0]
    assert found["resumed"] == [False, True]
    assert found["gone"] == [True, False, None]
    with Client("demo", namespace="reports") as client:
        schedule = client.get_schedule("daily")
        assert schedule is not None
        assert (schedule.count, schedule.revision, schedule.payload) == (99, 2, b"p")


def test_occurrences_are_previewed_triggered_and_filled_in(node: Path, daemon: StartDaemon) -> None:
    """A job of an occurrence names its schedule and its nominal time."""
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "reports" });
const group = { namespace: "reports", group: "g", topics: ["report"] };
const jobs = await pg.Consumer.open(place, group);
await client.putSchedule("daily", { cron: "0 0 * * *", topic: "report", payload: "p" });
const iso = (ns) => new Date(Number(ns / 1_000_000n)).toISOString();
const from = new Date("2026-01-01T12:00:00Z");
const preview = (await client.previewSchedule("daily", 2, from)).map(iso);
const other = (
  await client.preview(2, { cron: "0 0 1 1 *", after: from, until: new Date("2027-06-01") })
).map(iso);
const tickets = [
  await client.triggerSchedule("daily", from),
  await client.triggerSchedule("daily", from),
];
const first = await jobs.next();
await first.ack();
const filled = await client.backfillSchedule(
  "daily",
  new Date("2020-01-01"),
  new Date("2020-12-31"),
);
const again = await client.backfillSchedule(
  "daily",
  new Date("2020-12-30"),
  new Date("2020-12-31"),
);
const future = await client.backfillSchedule("daily", from, new Date("2199-01-01")).catch(
  (error) => [error.name, error.status],
);
const days = new Set();
while (days.size < 366) {
  const job = await jobs.next();
  days.add(
    `${job.occurrence.schedule} ${iso(job.occurrence.nominalNs)} ${job.payload} ${job.verdict}`,
  );
  await job.ack();
}
const repeated = await client.backfillSchedule(
  "daily",
  new Date("2020-12-30"),
  new Date("2020-12-31"),
  { repeat: true },
);
const jobsAgain = [];
while (jobsAgain.length < repeated.armed) {
  const job = await jobs.next();
  jobsAgain.push(iso(job.occurrence.nominalNs));
  await job.ack();
}
show({
  repeated: jobsAgain.sort(),
  future,
  preview,
  other,
  same: tickets[0] === tickets[1] && first.ticket === tickets[0],
  first: [first.occurrence.schedule, iso(first.occurrence.nominalNs)],
  armed: filled.armed,
  nominal: [iso(filled.nominalNs[0]), iso(filled.nominalNs.at(-1)), filled.nominalNs.length],
  again: [again.armed, again.nominalNs.length],
  days: [...days].sort().slice(-1),
});
await jobs.close();
await client.close();
""")  # fmt: skip
    day = "T00:00:00.000Z"
    assert found["repeated"] == [f"2020-12-30{day}", f"2020-12-31{day}"]
    assert found["future"] == ["ScheduleRefused", "TOO_FAR"]
    assert found["preview"] == [f"2026-01-02{day}", f"2026-01-03{day}"]
    assert found["other"] == [f"2027-01-01{day}"]
    assert found["same"] is True
    assert found["first"] == ["daily", "2026-01-01T12:00:00.000Z"]
    assert found["armed"] == 366
    assert found["nominal"] == [f"2020-01-01{day}", f"2020-12-31{day}", 366]
    assert found["again"] == [0, 2]
    assert found["days"] == [f"daily 2020-12-31{day} p null"]


RUNS = """
const client = new pg.Client(place, { namespace: "reports" });
const put = await client.putSchedule("tick", { everyMs: 10, count: 300, topic: "ticks" });
show("put");
const hours = (n) => new Date(n * 3600_000);
let [stopped, runs] = [false, 0];
process.on("SIGTERM", () => (stopped = true));
for (; !stopped || (await client.getSchedule("tick")).ticket !== 0n; runs++) {
  await client.putSchedule("hourly", { cron: "0 * * * *", topic: "hours", tag: `run ${runs}` });
  await client.triggerSchedule("hourly", hours(1e5 + runs));
  await client.backfillSchedule("hourly", hours(10 * runs), hours(10 * runs + 9));
  show(runs);
}
const past = new pg.PastNotices(place, { namespace: "reports" });
const nominal = async (topic, last) => {
  const found = [];
  for await (const event of past.read({ topic, first: 1n, last: BigInt(last) })) {
    found.push(event.occurrence.nominalNs);
  }
  return found.sort((one, other) => Number(one - other));
};
const hour = 3600_000_000_000n;
const hourly = (await nominal("hours", 11 * runs)).map((ns) => Number(ns / hour));
const ticks = await nominal("ticks", 300);
const steps = new Set(ticks.map((ns, n) => ns - (ticks[n - 1] ?? put.putNs)));
const { revision } = await client.getSchedule("hourly");
show({ runs, revision, filled: new Set(hourly.slice(0, 10 * runs)).size, hourly: hourly.length,
  triggered: new Set(hourly.slice(10 * runs)).size, ticks: ticks.length, steps: [...steps] });
past.close();
await client.close();
"""


@pytest.mark.costly("kills a daemon four times while a program changes and runs schedules")
def test_each_occurrence_fires_once_while_the_daemon_is_killed(
    node: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo")
    found = script_while_killed(node, demo, RUNS, tmp_path / "out.txt", 4)
    runs = found["runs"]
    assert runs >= 12
    assert found == {
        "runs": runs, "revision": runs, "filled": 10 * runs, "hourly": 11 * runs, "triggered": runs,
        "ticks": 300, "steps": [10_000_000],
    }  # fmt: skip
