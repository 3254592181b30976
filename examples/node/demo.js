// A worked example of the client, which tests/test_node_client.py runs while it kills the daemon and
// this process:
//
//     node demo.js work DIR/NAME COUNT    arm COUNT timers, cancel every third, print each answer;
//                                         SIGTERM ends it after the answers to what it has sent
//     node demo.js listen DIR/NAME        print the notices, and the ranges that were lost
//     node demo.js consume DIR/NAME       take jobs, and print the begin and the ack of each, with
//                                         the time of CLOCK_MONOTONIC in ns; SIGTERM ends it

import { writeSync } from "node:fs";

import { Client, Consumer, Subscriber } from "./index.js";
import { ST } from "./protocol.js";

const NAMES = { namespace: "shop", topic: "orders" };
const ROUND = 60; // timers between two waits

/** Print a line at once, so that a kill afterwards does not lose it. */
function print(...words) {
  writeSync(1, `${words.join(" ")}\n`);
}

let stopped = false;

/** Arm timers, cancel every third, and print the answers. */
async function oneRound(client, first, count) {
  const keys = Array.from({ length: count }, (_, n) => `order:${first + n}`);
  const rows = keys.map((key, n) => {
    return [key, { topic: NAMES.topic, delayMs: ((first + n) % 50) * 4, payload: "pay up" }];
  });
  const added = await client.addMany(rows);
  const thirds = keys.map((key, n) => n % 3 === 0 && client.cancel(key, { ticket: added[n].ticket }));
  const cancelled = await Promise.all(thirds);
  keys.forEach((key, n) => {
    const status = added[n].number ?? ST[added[n].status];
    print(key, added[n].ticket, status, cancelled[n] ? ST[cancelled[n].status] : 0);
  });
}

async function work(daemon, count) {
  const client = new Client(daemon, { namespace: NAMES.namespace, worker: "demo in Node" });
  process.on("SIGTERM", () => (stopped = true));
  for (let done = 0; done < count && !stopped; done += ROUND) {
    await oneRound(client, done, Math.min(ROUND, count - done));
  }
  await client.close();
}

async function listen(daemon) {
  for await (const event of new Subscriber(daemon, NAMES)) {
    const late = event.firedNs - event.deadlineNs;
    if (event.type === "notice") {
      print("notice", event.sequence, event.ticket, late, event.key, event.payload);
    } else if (event.type === "lost") {
      print("lost", event.first, event.last);
    } else {
      print("new stream");
    }
  }
}

async function consume(daemon) {
  const options = { namespace: NAMES.namespace, topics: [NAMES.topic], group: "mailers" };
  const jobs = await Consumer.open(daemon, { ...options, worker: "demo in Node", maxInFlight: 8 });
  process.on("SIGTERM", () => jobs.stop());
  print("ready");
  await jobs.run(
    async (job) => {
      print("start", job.ticket, job.attempt, process.hrtime.bigint(), job.key, job.payload);
      await new Promise((resolve) => setTimeout(resolve, 2));
      await job.ack();
      print("acked", job.ticket, job.attempt, process.hrtime.bigint());
    },
    { concurrency: 4 },
  );
  await jobs.close();
}

const [command, daemon, count] = process.argv.slice(2);
if (command === "work" && count !== undefined) await work(daemon, Number(count));
else if (command === "listen" && daemon !== undefined) await listen(daemon);
else if (command === "consume" && daemon !== undefined) await consume(daemon);
else {
  console.error("usage: node demo.js work DIR/NAME COUNT | listen DIR/NAME | consume DIR/NAME");
  process.exitCode = 2;
}
