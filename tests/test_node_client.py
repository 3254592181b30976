"""The Node client of examples/node, written from docs/protocol.md, while processes are killed."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import example_clients
import pytest
from node_client import SOURCES, script
from real_daemon import PATIENCE_S, StartDaemon

from purgatoryd.clients import Client
from purgatoryd.shm_layout import layout
from purgatoryd.shm_layout._core import lib

pytestmark = pytest.mark.tier("all")

STRUCTS, CONSTANTS = ((SOURCES / name).read_text() for name in ("structs.js", "constants.js"))
TYPES = {
    "u8": "uint8_t", "u16": "uint16_t", "u32": "uint32_t", "u64": "uint64_t", "i64": "int64_t",
    "id": "uint8_t",
}  # fmt: skip


@pytest.fixture
def demo_command(node: Path) -> list[str]:
    return ["node", str(node / "demo.js")]


# ---- the layout ----------------------------------------------------------------------------------


def structs() -> dict[str, tuple[int, list[tuple[str, str, int]]]]:
    """Return size and fields (name, type, offset) of each struct of structs.js, by name."""
    shared = re.search(r"^const SETTINGS = \{\n(.*?)^\};", STRUCTS, re.M | re.S)
    assert shared is not None
    text = STRUCTS.replace("  ...SETTINGS,", shared[1])
    found = re.findall(r'new Struct\("(\w+)", (\d+), (\{.*?\}|SETTINGS)\)', text, re.S)
    return {
        name: (
            int(size),
            [
                (field, kind, int(offset))
                for field, kind, offset in re.findall(
                    r'(\w+): \["(\w+)", (\d+)\]', shared[1] if body == "SETTINGS" else body
                )
            ],
        )
        for name, size, body in found
    }


def laid_out(name: str) -> dict[str, tuple[int, str]]:
    """Return offset and type of each field of a struct of the layout. A nested struct counts as its
    fields, an array as its first element."""
    found: dict[str, tuple[int, str]] = {}
    for field, offset, kind in layout.fields(name):
        if kind.kind == "struct":
            found |= laid_out(kind.cname.removeprefix("struct "))
        else:
            found[field] = (offset, kind.item.cname if kind.kind == "array" else kind.cname)
    return found


@pytest.mark.tier("check")
def test_its_structs_are_those_of_the_layout() -> None:
    found = structs()
    assert len(found) == STRUCTS.count("new Struct(") >= 35
    for name, (size, fields) in found.items():
        assert size == layout.size_of(name), name
        wanted = laid_out(name)
        assert fields, name
        for field, kind, offset in fields:
            assert (offset, TYPES[kind]) == wanted[field], f"{name}.{field}"


@pytest.mark.tier("check")
def test_its_constants_are_those_of_the_layout() -> None:
    limits = re.findall(r"^export const (PG_\w+) = (-?\d+)n?;", CONSTANTS, re.M)
    assert len(limits) == CONSTANTS.count("export const PG_") >= 25
    for name, value in limits:
        assert int(value) == getattr(lib, name), name
    assert f"WIRE_MAGIC = {lib.PG_WIRE_MAGIC:#x}" in CONSTANTS
    assert f"NOTICE_MAGIC = {lib.PG_NOTICE_MAGIC:#x}" in CONSTANTS
    enums = re.findall(r"^export const ([A-Z_]+) = \{(.*?)\};", CONSTANTS, re.M | re.S)
    assert len(enums) == CONSTANTS.count("= {") >= 25
    for prefix, body in enums:
        for name, value in re.findall(r"(\w+): (\d+)", body):
            assert int(value) == getattr(lib, f"PG_{prefix}_{name}"), f"{prefix}.{name}"


# ---- calls ---------------------------------------------------------------------------------------


def test_timers_are_added_looked_up_and_cancelled(node: Path, daemon: StartDaemon) -> None:
    demo = daemon("demo")
    found = script(node, demo, """
const client = new pg.Client(place, { namespace: "shop" });
const timer = await client.add("a", { delayMs: 3600_000, topic: "orders", payload: "pay up" });
const [again, ...others] = await client.addMany([
  ["a", { delayMs: 1 }], ["b", { at: new Date(Date.now() + 1e9) }],
  [Buffer.from([0, 255]), { delayMs: 3600_000 }],
]);
const [a, missing, c] = await client.getMany(["a", "none", Buffer.from([0, 255])]);
const second = await client.add("a", { delayMs: 1, mode: "keep" });
const cancelled = await Promise.all(["a", "a"].map((key) => client.cancel(key)));
let fired = "";
while (fired !== "FIRED") {
  if (fired !== "UNKNOWN") await client.add("now", { delayMs: 0 });
  fired = (await client.cancel("now")).status;
}
show({ timer, again: [again.name, again.status, again.ticket], others,
  a: { ...a, payload: `${a.payload}` }, missing, c: c.ticket, second, cancelled });
await client.close();
const closed = await client.add("x", { delayMs: 1 }).catch((error) => error);
if (!(closed instanceof pg.Closed)) throw closed;
""")  # fmt: skip
    timer = found["timer"]
    assert timer["status"] == "ADDED"
    assert found["again"] == ["Exists", "EXISTS", timer["ticket"]]
    others = found["others"]
    assert [one["status"] for one in others] == ["ADDED", "ADDED"]
    assert found["a"] == {
        "key": "a", "topic": "orders", "payload": "pay up", "ticket": timer["ticket"],
        "deadlineNs": timer["deadlineNs"], "wallNs": None, "status": "FOUND",
    }  # fmt: skip
    assert found["missing"] is None
    assert found["c"] == others[1]["ticket"]
    assert found["second"] == {**timer, "status": "KEPT"}
    cancelled = found["cancelled"]
    assert [one["status"] for one in cancelled] == ["CANCELLED", "UNKNOWN"]
    with Client("demo", namespace="shop") as client:
        assert client.get("a") is None
        assert client.get("b") is not None


def test_a_timer_has_its_options(node: Path, daemon: StartDaemon) -> None:
    demo = daemon("demo")
    found = script(node, demo, """
const client = new pg.Client(place, { namespace: "shop" });
const options = { topic: "orders", tag: "eu", priority: 7, orderKey: "ann", late: ["skip", 500] };
await client.add("a", { ...options, delayMs: 3600_000, payload: "p" });
await client.add("b", { delayMs: 0, uniqueForMs: 60_000 });
while ((await client.get("b")) !== null) {}
const second = await client.add("b", { delayMs: 0 }).catch((error) => error);
show([second.name, second.status]);
await client.close();
""")  # fmt: skip
    assert found == ["Exists", "EXISTS"]
    with Client("demo", namespace="shop") as client:
        timer = client.get("a")
        assert timer is not None
        assert (timer.tag, timer.priority, timer.late) == ("eu", 7, ("skip", 0.5))
        client.add("other", 3600, topic="orders", order_key="ann")
        other = client.get("other")
        assert other is not None
        assert timer.payload == b"p"
        assert timer.order_key == other.order_key


def test_bad_arguments_are_errors_before_anything_is_sent(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), r"""
const client = new pg.Client(place, { namespace: "shop" });
const calls = {
  "empty key": () => client.add("", { delayMs: 1 }),
  "long key": () => client.add("k".repeat(256), { delayMs: 1 }),
  "number as key": () => client.add(7, { delayMs: 1 }),
  "negative delay": () => client.add("k", { delayMs: -1 }),
  "no number": () => client.add("k", { delayMs: NaN }),
  "no time": () => client.add("k", {}),
  "two times": () => client.add("k", { delayMs: 1, deadlineNs: 1n }),
  "unknown option": () => client.add("k", { delayMs: 1, color: "x" }),
  "long tag": () => client.add("k", { delayMs: 1, tag: "x".repeat(64) }),
  "high priority": () => client.add("k", { delayMs: 1, priority: 10 }),
  "empty order key": () => client.add("k", { delayMs: 1, orderKey: "" }),
  "late without a grace": () => client.add("k", { delayMs: 1, late: "skip" }),
  "no unique time": () => client.add("k", { delayMs: 1, uniqueForMs: 0 }),
  "unknown mode": () => client.add("k", { delayMs: 1, mode: "often" }),
  "long payload": () => client.add("k", { delayMs: 1, payload: Buffer.alloc(65537) }),
  "NUL in a topic": () => client.add("k", { delayMs: 1, topic: "a\0b" }),
  "long delay": () => client.add("k", { delayMs: 1e300 }),
  "late date": () => client.add("k", { at: new Date(8.64e15) }),
  "half a nanosecond": () => client.add("k", { deadlineNs: 0.5 }),
  "text as deadline": () => client.add("k", { deadlineNs: "soon" }),
  "negative ticket": () => client.cancel("k", { ticket: -1n }),
  "text as ticket": () => client.unpark("k", "first", ""),
  "half a character": () => client.add("\ud800", { delayMs: 1 }),
  "unknown setting": () => client.createGroup("g", ["orders"], { backof: 1 }),
  "half an attempt": () => client.createGroup("g", ["orders"], { maxAttempts: 2.5 }),
  "text as attempts": () => client.createGroup("g", ["orders"], { maxAttempts: "many" }),
  "unknown choice": () => client.createGroup("g", ["orders"], { onDead: "blocks" }),
  "half a dead letter": () => client.dropDead("g", 0.5),
  "long group": () => client.group("g".repeat(64)),
};
const found = {};
for (const [name, call] of Object.entries(calls)) {
  found[name] = await call().then(() => "", (error) => error.name);
}
show(found);
await client.close();
""")  # fmt: skip
    assert len(found) == 29
    assert set(found.values()) == {"TypeError", "RangeError"}
    with Client("demo", namespace="shop") as client:
        assert client.get("k") is None


def test_a_refused_timer_has_its_status(node: Path, daemon: StartDaemon) -> None:
    demo = daemon("demo", "--capacity", "100")
    found = script(node, demo, """
const client = new pg.Client(place, { namespace: "shop" });
const rows = Array.from({ length: 200 }, (_, n) => [`k${n}`, { delayMs: 3600_000 }]);
const added = await client.addMany(rows);
const reserved = await client.add("k", { delayMs: 1, topic: "_events" }).catch((error) => error);
show({ statuses: added.map((one) => one.status), names: added.map((one) => one.name ?? ""),
       reserved: [reserved.name, reserved.status] });
await client.close();
""")  # fmt: skip
    statuses, names = found["statuses"], found["names"]
    assert statuses.count("ADDED") + statuses.count("FULL") == 200
    assert statuses.count("FULL") == names.count("Refused") > 0
    assert found["reserved"] == ["Refused", "DENIED"]


def test_a_durable_client_needs_a_wal(node: Path, daemon: StartDaemon, tmp_path: Path) -> None:
    text = """
const client = new pg.Client(place, { namespace: "shop", durable: true });
const add = (key) => client.add(key, { delayMs: 3600_000 });
const added = await Promise.all(["a", "b"].map((key) => add(key).catch((error) => error)));
show(added.map((one) => one.status ?? [one.name, one.error]));
await client.close();
"""
    demo = daemon("demo")
    assert script(node, demo, text) == [["MessageRefused", "NO_WAL"]] * 2
    demo.restart("--wal-dir", str(tmp_path / "wal"))
    assert script(node, demo, text) == ["ADDED", "ADDED"]


def test_consumer_groups_are_created_changed_and_deleted(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const why = (promise) => promise.then(() => "none", (error) => `${error.name} ${error.reason}`);
const given = { maxAttempts: 3, backoffMs: 0.5 };
const made = await client.createGroup("mailers", ["orders", "bills"], given);
const same = await client.createGroup("mailers", ["bills", "orders"], { maxAttempts: 3 });
const other = { maxAttempts: 4 };
const settings = await why(client.createGroup("mailers", ["orders", "bills"], other));
const topics = await why(client.createGroup("mailers", ["orders"]));
const changed = await client.changeGroup("mailers", { maxAttempts: 9 });
const paused = await client.pauseGroup("mailers");
const resumed = await client.resumeGroup("mailers");
const huge = await why(client.createGroup("other", ["x"], { maxBacklog: 1e6 }));
const names = (await client.groups()).map((one) => one.name);
await client.deleteGroup("mailers");
const missing = await why(client.group("mailers"));
show({ made, same, settings, topics, changed, paused: [paused.paused, resumed.paused], huge, names,
  missing });
await client.close();
""")  # fmt: skip
    made = found["made"]
    assert sorted(made["topics"]) == ["bills", "orders"]
    assert made["settings"]["maxAttempts"] == 3
    assert made["settings"]["backoffMs"] == 0.5
    assert found["same"] == made
    assert found["changed"] == {**made, "settings": {**made["settings"], "maxAttempts": 9}}
    assert found["settings"] == found["topics"] == "GroupMismatch MISMATCH"
    assert found["paused"] == [True, False]
    assert found["huge"] == "GroupRefused JOBS"
    assert found["names"] == ["mailers"]
    assert found["missing"] == "GroupMissing MISSING"


def test_jobs_are_answered(node: Path, daemon: StartDaemon) -> None:
    """Each answer has its effect, a lost lease refuses answers, and dead letters come back."""
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const group = { namespace: "shop", group: "mailers", topics: ["orders"] };
const settings = { maxAttempts: 2, backoffMs: 0, leaseMs: 300_000, maxLeaseMs: 1500 };
const jobs = await pg.Consumer.open(place, { ...group, ...settings });
const arm = (key) => client.add(key, { delayMs: 0, topic: "orders", payload: "pay up" });
const timer = await arm("a");
const first = await jobs.next();
const leased = (await client.cancel("a")).status;
await first.nack("no stamps");
const second = await jobs.next();
const view = (job) => [job.key, `${job.payload}`, job.ticket === timer.ticket, job.attempt];
const seen = [first, second].map(view);
await second.nack(new Error("still none"));
await arm("b");
const rejected = await jobs.next();
await rejected.reject("x".repeat(1023) + "é");
const dead = [];
for await (const { key, attempts, reason, error } of client.deadLetters("mailers")) {
  dead.push([key, attempts, reason, error]);
}
const requeued = await client.requeueDead("mailers", second.ticket);
const third = await jobs.next();
await third.release();
const fourth = await jobs.next();
await Promise.all([fourth.ack(), fourth.ack()]);
const both = await fourth.release().catch((error) => error.name);
await arm("c");
const held = await jobs.next();
await held.extend(1);
while (!held.lost) await new Promise((resolve) => setTimeout(resolve, 1));
const lost = await held.ack().catch((error) => [error.name, error.key, error.attempt]);
const again = await jobs.next();
await again.ack();
const dropped = await client.dropDead("mailers");
await arm("d");
const drained = await jobs.next();
const closing = jobs.close();
await drained.ack();
await closing;
const { acked, dead: left, members } = await client.group("mailers");
const end = await jobs.next();
show({ leased, seen, dead, requeued, attempts: [third.attempt, fourth.attempt], both, lost,
  again: [again.key, again.attempt], dropped, counts: [acked, left, members], end });
await client.close();
""")  # fmt: skip
    assert found["leased"] == "LEASED"
    assert found["seen"] == [["a", "pay up", True, 1], ["a", "pay up", True, 2]]
    assert found["dead"] == [
        ["a", 2, "MAX_ATTEMPTS", "Error: still none"], ["b", 1, "REJECTED", "x" * 1023]
    ]  # fmt: skip
    assert found["requeued"] == 1
    assert found["attempts"] == [1, 1]
    assert found["both"] == "TypeError"
    assert found["lost"] == ["LeaseLost", "c", 1]
    assert found["again"] == ["c", 2]
    assert found["dropped"] == 1
    assert found["counts"] == [3, 0, 0]
    assert found["end"] is None


def test_heartbeats_extend_a_lease_while_the_handler_runs(node: Path, daemon: StartDaemon) -> None:
    """A handler runs longer than a lease. The job is not leased again."""
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const group = { namespace: "shop", group: "g", topics: ["t"], leaseMs: 1000 };
const jobs = await pg.Consumer.open(place, group);
await client.add("slow", { delayMs: 0, topic: "t" });
const attempts = [];
await jobs.run(async (job) => {
  attempts.push([job.attempt, job.lost]);
  await new Promise((resolve) => setTimeout(resolve, 2500));
  attempts.push([job.attempt, job.lost]);
  jobs.stop();
});
await jobs.close();
show({ attempts, acked: (await client.group("g")).acked });
await client.close();
""")  # fmt: skip
    assert found == {"attempts": [[1, False], [1, False]], "acked": 1}


def test_a_longer_lease_of_the_group_holds_at_once(node: Path, daemon: StartDaemon) -> None:
    """The client takes the end of a lease from the daemon's answer. After maxLeaseMs was raised, it
    holds a job for longer than the earlier limit."""
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const group = { namespace: "shop", group: "g", topics: ["t"], leaseMs: 600, maxLeaseMs: 2000 };
const jobs = await pg.Consumer.open(place, group);
await client.add("slow", { delayMs: 0, topic: "t" });
const job = await jobs.next();
await client.changeGroup("g", { maxLeaseMs: 3600_000 });
await new Promise((resolve) => setTimeout(resolve, 4000));
const lost = job.lost;
await job.ack();
await jobs.close();
const { acked, retried } = await client.group("g");
show([lost, acked, retried]);
await client.close();
""")  # fmt: skip
    assert found == [False, 1, 0]


def test_a_lease_ends_at_the_limit_of_the_group(node: Path, daemon: StartDaemon) -> None:
    """The client releases a job without a handler before its lease ends, as no failed attempt."""
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const group = {
  namespace: "shop",
  group: "g",
  topics: ["t"],
  backoffMs: 3600_000,
  backoffCapMs: 3600_000,
};
const jobs = await pg.Consumer.open(place, { ...group, leaseMs: 300_000, maxLeaseMs: 1000 });
await client.addMany(["a", "b"].map((key) => [key, { delayMs: 0, topic: "t" }]));
const first = await jobs.next();
while (!first.lost) await new Promise((resolve) => setTimeout(resolve, 10));
const ack = await first.ack().catch((error) => error.name);
await new Promise((resolve) => setTimeout(resolve, 2000));
const second = await jobs.next();
await second.ack();
await jobs.close();
const { acked, retried } = await client.group("g");
show([ack, second.attempt, acked, retried]);
await client.close();
""")  # fmt: skip
    assert found == ["LeaseLost", 1, 1, 1]


def test_jobs_and_notices_of_an_operation_have_its_verdict(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const jobs = await pg.Consumer.open(place, { namespace: "shop", group: "g", topics: ["t"] });
const notices = new pg.Subscriber(place, { namespace: "shop", topic: "t" });
await notices.live();
const condition = pg.quorum(["a", "b", "c"], 2);
const options = { timeoutMs: 3600_000, topic: "t", payload: "p" };
const operation = await client.watch("op", condition, options);
await client.advance("b", 1);
await client.fail("a", 7);
await client.fail("c", 9);
const { elapsedNs } = await operation.result();
const job = await jobs.next();
let notice;
for await (notice of notices) if (notice.type === "notice") break;
await job.reject("no");
let letter;
for await (letter of client.deadLetters("g")) break;
const view = ({ key, payload, cause, verdict, occurrence }) => [
  key,
  `${payload}`,
  cause,
  verdict.keys,
  verdict.missing,
  verdict.error,
  verdict.elapsedNs === elapsedNs,
  occurrence,
];
show([job, notice, letter].map(view));
notices.close();
await jobs.close();
await client.close();
""")  # fmt: skip
    assert found == [["op", "p", "FAILED", 3, [0, 2], 7, True, None]] * 3


def test_a_subscriber_receives_all_topics_of_a_namespace(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "shop" });
const notices = new pg.Subscriber(place, { namespace: "shop" });
let number = 0;
const adding = setInterval(() => {
  for (const topic of ["orders", "bills"]) {
    client.add(`k${number++}`, { delayMs: 0, topic, payload: topic }).catch(() => {});
  }
}, 20);
const seen = {};
for await (const { type, namespace, topic, payload, sequence, cause } of notices) {
  seen[topic] = [type, namespace, `${payload}`, cause, sequence >= 1n];
  if (Object.keys(seen).length === 2) break;
}
clearInterval(adding);
notices.close();
await client.close();
show(seen);
""")  # fmt: skip
    assert found == {
        topic: ["notice", "shop", topic, "EXPIRED", True] for topic in ("orders", "bills")
    }


# ---- kills ---------------------------------------------------------------------------------------


@pytest.mark.costly("runs two programs and kills a daemon six times")
def test_each_timer_fires_once_or_is_cancelled_while_the_daemon_is_killed(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_timers(demo_command, daemon("demo", "--capacity", "20000"), tmp_path)


@pytest.mark.costly("starts twelve programs, and kills them and a daemon twelve times")
def test_kills_of_consumers_and_daemon_lose_no_job(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_jobs(demo_command, daemon("demo"), tmp_path, 12)


def test_a_consumer_ends_after_sigterm_without_failed_attempts(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_stop(demo_command, daemon("demo"), tmp_path)


def test_a_consumer_whose_session_ended_joins_again(
    demo_command: list[str], daemon: StartDaemon, tmp_path: Path
) -> None:
    example_clients.check_lost_session(demo_command, daemon("demo"), tmp_path)


def test_a_session_survives_a_restart_of_the_daemon(node: Path, daemon: StartDaemon) -> None:
    """A lease outlasts a kill of the daemon: the job is answered in the same session."""
    demo = daemon("demo")
    head = f'import * as pg from "{node}/index.js"; const place = "{demo.dir}/demo";'
    text = """
const client = new pg.Client(place, { namespace: "shop" });
const jobs = await pg.Consumer.open(place, { namespace: "shop", group: "g", topics: ["t"] });
await client.add("k", { delayMs: 0, topic: "t" });
const job = await jobs.next();
console.log("held");
await new Promise((resolve) => process.stdin.once("data", resolve));
await job.ack();
const { acked, retried } = await client.group("g");
await jobs.close();
await client.close();
console.log(acked, retried, job.attempt);
process.exit();
"""
    with subprocess.Popen(
        ["node", "--input-type=module", "--eval", head + text],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            example_clients.crash(demo)
            out, _ = process.communicate("go\n", timeout=PATIENCE_S)
            assert out == "1 0 1\n"
        finally:
            process.kill()
