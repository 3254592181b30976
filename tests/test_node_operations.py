"""Operations of the Node client of examples/node, written from docs/protocol.md."""

from __future__ import annotations

import json
from pathlib import Path

import example_clients
import pytest
from node_client import command, script, script_while_killed
from real_daemon import PATIENCE_S, StartDaemon, eventually

from purgatoryd.clients import Admin, AllOf, Purgatory

pytestmark = pytest.mark.tier("all")


def test_each_condition_ends_its_operation(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "broker" });
const soon = { timeoutMs: 3600_000, payload: "p" };
const all = await client.watch("all", pg.allOf({ a: 5, b: 7 }), soon);
const any = await client.watch("any", pg.anyOf(["c", "d"]), soon);
const most = await client.watch(
  "most",
  pg.quorum(
    new Map([
      [Buffer.from([0, 255]), 2],
      ["e", 1],
      ["f", 1],
    ]),
    2,
  ),
  soon,
);
const sum = await client.watch("sum", pg.sumOf({ g: null, h: 3 }, { atLeast: 10, cap: 6 }), soon);
let calls = 0;
const test = pg.when(async () => {
  if (++calls === 1) throw new Error("the first call fails");
  return calls > 2;
}, ["i"]);
const own = await client.watch("when", test, soon);
const ended = [
  await client.advance("a", 5),
  await client.advance("b", 7n),
  await client.advance("b", 9),
  await client.bump("d"),
  await client.advance(Buffer.from([0, 255]), 2),
  await client.bump("f"),
  await client.bump("g", 100),
  await client.advance("h", 7),
];
const results = await Promise.all([all, any, most, sum].map((one) => one.result()));
while (own.ended === null) await client.bump("i");
const view = (one) => [one.cause, one.watermarks, one.missing.map(String), `${one.payload}`];
show({ ended, results: results.map(view), when: own.ended.cause, more: calls > 2 });
await client.close();
""")  # fmt: skip
    assert found["ended"] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert found["results"] == [
        ["SATISFIED", [5, 7], [], "p"], ["SATISFIED", [0, 1], ["c"], "p"],
        ["SATISFIED", [2, 0, 1], ["e"], "p"], ["SATISFIED", [100, 7], [], "p"],
    ]  # fmt: skip
    assert (found["when"], found["more"]) == ("SATISFIED", True)


def test_an_operation_ends_by_failure_deadline_and_cancel(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo"), """
const client = new pg.Client(place, { namespace: "broker" });
const armed = async (key, keys, timeoutMs) => client.watch(key, pg.allOf(keys), { timeoutMs });
const failed = await armed("failed", ["a", "b"], 3600_000);
const one = [await client.fail("b", 7), await client.clear("b"), await client.clear("none")];
const expired = await armed("expired", ["c"], 1);
const cancelled = await armed("cancelled", ["d"], 3600_000);
const moved = [await cancelled.extend(7200_000), (await client.get("cancelled")).deadlineNs];
const many = await Promise.all(
  Array.from({ length: 1500 }, (_, n) => armed(`m${n}`, ["gate"], 3600_000)),
);
const keys = await client.cancelForKey("gate");
await cancelled.cancel();
const outcomes = await Promise.all(
  [failed, expired, cancelled, ...many].map((one) => one.result()),
);
const late = [await cancelled.extend(1), await cancelled.cancel(), await client.forget("gate")];
const exists = await client
  .watch("x", pg.anyOf(["y"]), { timeoutMs: 3600_000 })
  .then(() => armed("x", ["z"], 1))
  .catch((error) => error.name);
show({
  one,
  moved: moved[0] && BigInt(moved[1]) > cancelled.ended.armedNs + 7000_000_000_000n,
  causes: outcomes.slice(0, 3).map((one) => [one.cause, one.error, one.failed]),
  late,
  exists,
  many: [new Set(keys).size, outcomes.slice(3).filter((one) => one.cause === "CANCELLED").length],
});
await client.close();
""")  # fmt: skip
    assert found["one"] == [1, True, False]
    assert found["moved"] is True
    assert found["causes"] == [["FAILED", 7, ["b"]], ["EXPIRED", 0, []], ["CANCELLED", 0, []]]
    assert found["many"] == [1500, 1500]
    assert found["late"] == [False, False, True]
    assert found["exists"] == "Exists"


def test_a_looked_up_operation_shows_its_watch_keys(node: Path, daemon: StartDaemon) -> None:
    demo = daemon("demo")
    with Purgatory("demo", namespace="broker") as owner:
        owner.watch("req", AllOf({"a": 5, "b": 7}, own=["b"]), timeout=3600, payload=b"p")
        owner.advance("a", 5)
        owner.fail("b", 9)
        owner.watch("req", AllOf({"a": 6, "c": 7}, own=["c"]), timeout=3600, payload=b"p")
        found = script(node, demo, """
const client = new pg.Client(place, { namespace: "broker" });
const { operation, payload, topic, status } = await client.get("req");
show([operation.condition, operation.keys, `${payload}`, topic, status, operation.ownerUid]);
await client.close();
""")  # fmt: skip
    plain = {"cap": 0, "reached": False, "error": 0}
    condition, keys, *others = found
    assert condition == "ALL"
    assert keys == [
        {**plain, "key": "a", "target": 6, "watermark": 5, "own": False},
        {**plain, "key": "c", "target": 7, "watermark": 0, "own": True},
    ]
    assert others[:3] == ["p", "", "FOUND"]


def test_a_full_inbox_and_bad_conditions_are_errors(node: Path, daemon: StartDaemon) -> None:
    found = script(node, daemon("demo", "--inbox", "3"), """
const client = new pg.Client(place, { namespace: "broker" });
const soon = { timeoutMs: 3600_000 };
const watch = (n) => client.watch(`k${n}`, pg.anyOf(["a"]), soon).catch((error) => error);
const three = await Promise.all([1, 2, 3].map(watch));
const refused = await watch(4);
await three[0].cancel();
await three[0].result();
let again = await watch(5); // the daemon takes the acknowledgement a moment later
while (again instanceof pg.Refused) again = await watch(5);
const calls = {
  "no keys": () => pg.allOf([]),
  "high target": () => pg.allOf({ a: 2n ** 63n }),
  "half a target": () => pg.allOf({ a: 0.5 }),
  "large quorum": () => pg.quorum(["a"], 2),
  "no function": () => pg.when(true, ["a"]),
  "no code": () => client.fail("a", 0),
  backwards: () => client.bump("a", -1),
  "foreign own key": () => client.watch("x", pg.anyOf(["a"]), { ...soon, own: ["b"] }),
  "no timeout": () => client.watch("x", pg.anyOf(["a"]), {}),
};
const names = [];
for (const call of Object.values(calls)) {
  names.push(
    await (async () => call())().then(
      () => "",
      (error) => error.name,
    ),
  );
}
const twice = await client.watch("x", pg.anyOf(["b", "b"]), soon).catch((error) => error.status);
show({
  refused: [refused.name, refused.status, refused.deadlineNs],
  again: again.key,
  names,
  twice,
});
await client.close();
""")  # fmt: skip
    assert found["refused"] == ["Refused", "BUSY", 3]
    assert found["again"] == "k5"
    assert set(found["names"]) <= {"TypeError", "RangeError"}
    assert len(found["names"]) == 9
    assert found["twice"] in ("DUPLICATE", "BUSY")


def test_a_lost_session_fails_its_operations(
    node: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    demo = daemon("demo")
    text = """
const client = new pg.Client(place, { namespace: "broker" });
const old = await client.watch("old", pg.anyOf(["a"]), { timeoutMs: 3600_000 });
show("armed");
// A PING every 15 s would notice the loss as well.
const asking = setInterval(() => client.get("x"), 50);
const lost = await old.result().catch((error) => error.name);
clearInterval(asking);
const young = await client.watch("young", pg.anyOf(["b"]), { timeoutMs: 3600_000 });
await client.bump("b");
show([lost, (await young.result()).cause]);
await client.close();
"""
    with example_clients.running(command(node, demo, text), tmp_path / "out.txt") as program:
        eventually(lambda: program.lines())
        with Admin("demo") as admin:
            [session] = [one for one in admin.sessions() if one.pid == program.process.pid]
            admin.drop_session(session.session)
        assert program.process.wait(PATIENCE_S) == 0
    assert json.loads(program.log.read_text().split("\n")[1]) == ["SessionExpired", "SATISFIED"]


ROUNDS = """
const client = new pg.Client(place, { namespace: "broker", graceMs: 60_000 });
let [stopped, rounds] = [false, 0];
process.on("SIGTERM", () => (stopped = true));
const wrong = [];
const total = await client.watch("total", pg.allOf({ count: 2n ** 62n }), { timeoutMs: 3600_000 });
const ends = (n) => [["SATISFIED", 0], ["FAILED", 9], ["CANCELLED", 0]][n % 3];
async function one(n) {
  const own = [`${n}:a`, `${n}:b`];
  const options = { timeoutMs: 3600_000, own, topic: "ends", payload: `${n}` };
  const operation = await client.watch(`op:${n}`, pg.allOf(own), options);
  await client.bump(own[0]);
  if (n % 3 === 0) await client.bump(own[1]);
  else if (n % 3 === 1) await client.fail(own[1], 9);
  else await operation.cancel();
  const { cause, error, watermarks, payload } = await operation.result();
  await client.bump("count");
  const right = [...ends(n), 1, `${n}`].join() === [cause, error, watermarks[0], payload].join();
  if (!right) wrong.push([n, cause, error, Number(watermarks[0])]);
}
for (; !stopped; rounds++) {
  await Promise.all(Array.from({ length: 30 }, (_, n) => one(30 * rounds + n)));
  show(rounds);
}
const count = (await client.get("total")).operation.keys[0].watermark;
const past = new pg.PastNotices(place, { namespace: "broker" });
const seen = {};
let events = 0;
for await (const event of past.read({ topic: "ends", first: 1n, last: BigInt(30 * rounds) })) {
  seen[event.payload] = [event.cause, event.verdict?.error, event.key];
  events++;
}
const wanted = Array.from({ length: 30 * rounds }, (_, n) => [...ends(n), `op:${n}`].join());
const unlike = wanted.filter((text, n) => seen[n]?.join() !== text).length;
show({ rounds, count, wrong, events, unlike });
past.close();
await client.close();
"""


@pytest.mark.costly("kills a daemon six times while a program arms and ends operations")
def test_each_operation_ends_once_while_the_daemon_is_killed(
    node: Path, daemon: StartDaemon, tmp_path: Path
) -> None:
    """Each operation has the right outcome, each bump counts once, and each end is published
    once."""
    demo = daemon("demo", "--capacity", "20000")
    found = script_while_killed(node, demo, ROUNDS, tmp_path / "out.txt", 6)
    operations = 30 * found["rounds"]
    assert operations >= 600
    assert found == {
        "rounds": found["rounds"], "count": operations, "wrong": [],
        "events": operations, "unlike": 0,
    }  # fmt: skip
