// A member of a consumer group: takes leased jobs, extends their leases, and answers them.

import { Client } from "./client.js";
import { Closed, GroupMissing, InDoubt, LeaseLost, refusal } from "./errors.js";
import { decodeEnd } from "./notices.js";
import * as pg from "./protocol.js";
import { CLOCK, JOB_INFO, LEASE, OP, ST } from "./protocol.js";
import { Lease, makeItem } from "./session.js";

const JOIN_AGAIN_MS = 1000;
const ENDED_MAX = 65_536; // answered leases that a consumer remembers
const GRANTED_PARTS = 120; // leases count as at least this part of `leaseMs`
const BACKOFF = -1n; // delay of a NACK that the settings of the group choose

/** A leased job. `attempt` is 1 for the first one; `ticket` is the same in all attempts, so use it to
 * make handlers idempotent. */
export class Job {
  #consumer;
  #answer = null; // [op, promise] of the answer
  #extending = false;
  #limited = false; // the longest lease of the group limited the last extension
  #lost = false;

  constructor(consumer, info, topic, key, payload, lease) {
    this.#consumer = consumer;
    this.topic = topic;
    this.key = key;
    const end = decodeEnd(Number(info.ticket & 0xffn), info.flags, key, payload);
    this.payload = end.payload;
    this.cause = end.cause; // EXPIRED for a timer
    this.verdict = end.verdict; // the end of an operation; null for a timer
    this.occurrence = end.occurrence; // schedule and nominalNs of an occurrence; else null
    this.ticket = info.ticket >> 8n;
    this.attempt = info.attempt;
    this.priority = info.priority;
    this.missed = info.missed; // timers that this one stands for, by a late policy
    this.deadlineNs = info.deadline_ns;
    this.firedNs = info.fired_ns;
    this.lease = lease; // the struct pg_lease
    this.endsMs = 0; // end of the lease by performance.now(); Infinity under a virtual clock
  }

  /** True once the lease has ended without an answer: another member may have the job. */
  get lost() {
    const ended = performance.now() >= this.endsMs && (this.#limited || !this.#extending);
    return this.#lost || (ended && this.#answer === null);
  }

  get answered() {
    return this.#answer !== null;
  }

  /** End the job. All answers throw LeaseLost if the lease has ended. */
  ack() {
    return this.#respond(OP.JOB_ACK);
  }

  /** The attempt failed. `delayMs` until the next one; without it the group's backoff. */
  nack(error = "", { delayMs } = {}) {
    const delay = delayMs === undefined ? BACKOFF : pg.nanoseconds("delayMs", delayMs);
    return this.#respond(OP.JOB_NACK, { time_ns: delay }, errorText(error));
  }

  /** Give the job back. It counts as no failed attempt. */
  release() {
    return this.#respond(OP.JOB_RELEASE);
  }

  /** Make the job a dead letter. */
  reject(error = "") {
    return this.#respond(OP.JOB_REJECT, {}, errorText(error));
  }

  /** Let the lease end in `ms`, or later. The consumer does so by itself while it has the job. */
  async extend(ms) {
    const sentMs = performance.now();
    this.#extending = true;
    try {
      const time_ns = pg.nanoseconds("ms", ms, 0.001);
      const leftNs = await this.#send(OP.JOB_EXTEND, { time_ns });
      this.#limited = leftNs < time_ns;
      this.endsMs = Math.max(this.endsMs, sentMs + Number(leftNs) / 1e6);
      this.#consumer.granted(Number(leftNs) / 1e6);
    } finally {
      this.#extending = false;
    }
  }

  /** True if an extension would be the next step of an open job whose lease ends in less than
   * `ms`, or at an unknown time. */
  endsWithin(ms) {
    const open = this.#answer === null && !this.#extending && !this.#lost;
    return open && (this.endsMs === Infinity || this.endsMs - performance.now() < ms);
  }

  /** True if the longest lease of the group limits the lease, so that no extension helps. */
  get limited() {
    return this.#limited;
  }

  lose() {
    this.#lost = true;
  }

  /** A second call of the same answer waits for the first one. */
  #respond(op, fields, text) {
    if (this.#answer?.[0] === op) return this.#answer[1];
    if (this.#answer !== null) return Promise.reject(new TypeError("the job has another answer"));
    this.#answer = [op, this.#sendAnswer(op, fields, text)];
    return this.#answer[1];
  }

  async #sendAnswer(op, fields, text) {
    try {
      await this.#send(op, fields, text);
      this.#consumer.ended(this);
    } catch (error) {
      this.#answer = null; // the daemon has not taken the answer
      throw error;
    }
  }

  async #send(op, fields, text) {
    if (this.#lost) throw this.#leaseLost();
    const { client } = this.#consumer;
    const key = new Lease(this.lease, this.key);
    const put = client.session.put(makeItem(op, client.namespace, "", key, fields, text));
    const { status, ticket, deadlineNs } = await put.catch((error) => {
      throw error instanceof InDoubt ? this.#leaseLost() : error;
    });
    if (status === ST.LEASE_LOST) throw this.#leaseLost();
    if (status !== ST.DONE) throw refusal(this.key, status, ticket, deadlineNs);
    return deadlineNs; // of an extension: the time until the end of the lease
  }

  #leaseLost() {
    this.#lost = true;
    this.#consumer.ended(this);
    return new LeaseLost(this.key, this.ticket, this.attempt);
  }
}

/** Return the bytes of an error text, cut to the limit between two characters. */
function errorText(error) {
  const bytes = Buffer.from(String(error));
  let end = Math.min(bytes.length, pg.PG_JOB_ERROR_MAX);
  while (end < bytes.length && (bytes[end] & 0xc0) === 0x80) end--;
  return bytes.subarray(0, end);
}

/** Takes jobs of a consumer group. Use Consumer.open(). */
export class Consumer {
  #group;
  #leaseMs;
  #credits;
  #jobs = new Map(); // jobs without a confirmed answer, by lease
  #ended = new Set(); // answered leases, which the daemon may repeat
  #ready = []; // jobs that no caller has
  #takers = []; // callers that wait for a job
  #stopping = false;
  #error = null;
  #grantedMs; // length of the leases that the daemon grants: the group may limit it
  #timer;
  #changed = []; // callers that wait for the end of a job

  /** Join a group, and create it if it is missing. `settings`, such as maxAttempts, are those of
   * GROUP_DEFAULTS. At most `maxInFlight` jobs are leased to this consumer. */
  static async open(daemon, options) {
    const { namespace, group, topics, leaseMs = 30_000, maxInFlight = 64, ...others } = options;
    const { worker, durable, ...settings } = others;
    const client = new Client(daemon, { namespace, worker, durable });
    try {
      await client.createGroup(group, topics, settings);
      const consumer = new Consumer(client, group, leaseMs, maxInFlight);
      await consumer.#join();
      return consumer;
    } catch (error) {
      await client.close();
      throw error;
    }
  }

  constructor(client, group, leaseMs, maxInFlight) {
    if (!Number.isInteger(maxInFlight) || maxInFlight < 1 || maxInFlight > pg.PG_CREDITS_MAX) {
      throw new RangeError(`maxInFlight must be 1 to ${pg.PG_CREDITS_MAX}`);
    }
    this.client = client;
    this.#group = group;
    this.#leaseMs = this.#grantedMs = leaseMs;
    this.#credits = maxInFlight;
    client.session.on("jobs", (body, count) => this.#take(body, count));
    client.session.on("open", () => this.#joinAgain());
    client.session.on("expired", () => this.#loseAll());
    client.session.on("failed", (error) => this.#fail(error));
    client.session.keepAlive();
    this.#timer = setTimeout(() => this.#heartbeat(), leaseMs / 12);
  }

  // ---- jobs for callers --------------------------------------------------------------------------

  /** Return the next job; null once the consumer stops. */
  next() {
    if (this.#error !== null) return Promise.reject(this.#error);
    if (this.#ready.length > 0) return Promise.resolve(this.#ready.shift());
    if (this.#stopping) return Promise.resolve(null);
    return new Promise((resolve, reject) => this.#takers.push({ resolve, reject }));
  }

  async *[Symbol.asyncIterator]() {
    for (let job = await this.next(); job !== null; job = await this.next()) yield job;
  }

  /** Call `handler` for each job: ack when it returns, nack when it throws. Return after stop(),
   * once all handlers have ended. */
  async run(handler, { concurrency = 1 } = {}) {
    await Promise.all(Array.from({ length: concurrency }, () => this.#work(handler)));
  }

  async #work(handler) {
    for await (const job of this) {
      try {
        await handler(job);
      } catch (error) {
        if (!(error instanceof LeaseLost)) console.error(`job ${job.ticket} failed:`, error);
        if (!job.answered && !job.lost) await job.nack(error).catch(ignoreLost);
        continue;
      }
      if (!job.answered && !job.lost) await job.ack().catch(ignoreLost);
    }
  }

  /** Take no more jobs, and give back those that no caller has. Safe in a signal handler. */
  stop() {
    if (this.#stopping) return;
    this.#stopping = true;
    this.#credits = 0;
    this.#join().catch(() => {});
    for (const job of this.#ready.splice(0)) job.release().catch(() => {});
    for (const taker of this.#takers.splice(0)) taker.resolve(null);
  }

  /** Stop, wait up to `drainMs` for the answers of the jobs that callers have, and leave. Jobs
   * without an answer go to other members, as no failed attempt. */
  async close({ drainMs = 30_000 } = {}) {
    this.stop();
    const endMs = performance.now() + drainMs;
    while (this.#jobs.size > 0 && this.#error === null && performance.now() < endMs) {
      await this.#change(endMs - performance.now());
    }
    await this.client.close();
    clearTimeout(this.#timer);
  }

  #change(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#changed.push(() => {
        clearTimeout(timer);
        resolve();
      });
    });
  }

  // ---- membership --------------------------------------------------------------------------------

  /** Join, and again after each reconnect, because the daemon may have forgotten this member. */
  async #join() {
    const { session, namespace } = this.client;
    const lease = { time_ns: pg.nanoseconds("leaseMs", this.#leaseMs, 1), value: this.#credits };
    const put = session.put(makeItem(OP.JOIN, namespace, "", this.#group, lease));
    const answer = await put.catch((error) => {
      if (error instanceof InDoubt) return null; // another session opens, and joins
      throw error;
    });
    if (answer?.status === ST.NO_GROUP) {
      throw new GroupMissing(this.#group, [BigInt(pg.GR.MISSING), 0n]);
    }
    if (answer?.status === ST.STOPPING) setTimeout(() => this.#joinAgain(), JOIN_AGAIN_MS);
    else if (answer !== null && answer.status !== ST.DONE) {
      throw refusal(this.#group, answer.status, answer.ticket, answer.deadlineNs);
    }
  }

  #joinAgain() {
    this.#join().catch((error) => this.#fail(error));
  }

  /** Look at all leases, 12 times in the length of one. */
  #heartbeat() {
    for (const job of [...this.#jobs.values()]) this.#keep(job);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#heartbeat(), this.#grantedMs / 12);
  }

  /** Extend a lease that ends in less than two thirds of its length. Give back a job without a caller
   * whose lease cannot be extended, because a release is no failed attempt. Forget a job whose lease
   * has ended. */
  #keep(job) {
    if (job.lost) {
      job.lose();
      this.ended(job);
    } else if (job.limited && job.endsWithin(this.#grantedMs / 2) && this.#ready.includes(job)) {
      this.#ready = this.#ready.filter((one) => one !== job);
      job.release().catch(() => {});
    } else if (job.endsWithin((this.#grantedMs * 2) / 3)) {
      job.extend(this.#leaseMs).catch(() => {});
    }
  }

  /** Note the length of an extended lease: the longest lease of the group may have been raised. */
  granted(ms) {
    this.#grantedMs = Math.max(this.#grantedMs, Math.min(ms, this.#leaseMs));
  }

  /** Note the length of a new lease, and look at it in time. */
  #leased(ms) {
    const granted = Math.min(Math.max(ms, this.#leaseMs / GRANTED_PARTS), this.#leaseMs);
    const shorter = granted < this.#grantedMs;
    this.#grantedMs = granted;
    if (!shorter) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#heartbeat(), granted / 12);
  }

  #loseAll() {
    for (const job of this.#jobs.values()) job.lose();
    this.#jobs.clear();
    this.#ended.clear();
    this.#ready = [];
    this.#wake();
  }

  /** Let all callers that wait for jobs fail. After close() they get no more jobs instead. */
  #fail(error) {
    if (this.#stopping && error instanceof Closed) return;
    this.#error ??= error;
    this.#ready = [];
    for (const taker of this.#takers.splice(0)) taker.reject(error);
    this.#wake();
  }

  #wake() {
    for (const wake of this.#changed.splice(0)) wake();
  }

  // ---- jobs of the daemon ------------------------------------------------------------------------

  /** Take jobs. A message without jobs reports that the group was deleted. */
  #take(body, count) {
    if (count === 0) {
      this.#loseAll();
      this.#joinAgain();
    }
    const reader = new pg.Reader(body);
    const infos = Array.from({ length: count }, () => reader.struct(JOB_INFO));
    for (const info of infos) this.#takeJob(info, reader);
  }

  /** After a JOIN the daemon repeats jobs that this consumer has, or has answered. */
  #takeJob(info, reader) {
    const topic = reader.text(info.topic_len);
    const key = pg.decodeKey(info.key_type, reader.take(info.key_len));
    const payload = reader.take(info.payload_len);
    const lease = LEASE.pack({ ticket: info.ticket >> 8n, row: info.row, lease: info.lease });
    const name = lease.toString("latin1");
    if (this.#ended.has(name)) return;
    const job = this.#jobs.get(name) ?? new Job(this, info, topic, key, payload, lease);
    job.endsMs = Math.max(job.endsMs, this.#endsMs(info));
    if (this.#jobs.has(name)) return;
    this.#jobs.set(name, job);
    this.#leased(Number(info.lease_ends_ns - info.now_ns) / 1e6);
    this.#handOn(job);
  }

  #endsMs(info) {
    if (this.client.session.clock === CLOCK.VIRTUAL) return Infinity;
    return performance.now() + Number(info.lease_ends_ns - info.now_ns) / 1e6;
  }

  #handOn(job) {
    if (this.#stopping) job.release().catch(() => {});
    else if (this.#takers.length > 0) this.#takers.shift().resolve(job);
    else this.#ready.push(job);
  }

  /** Forget a job whose lease has ended, or whose answer the daemon has confirmed. */
  ended(job) {
    const name = job.lease.toString("latin1");
    if (!this.#jobs.delete(name)) return;
    this.#ready = this.#ready.filter((one) => one !== job);
    this.#ended.add(name);
    if (this.#ended.size > ENDED_MAX) this.#ended.delete(this.#ended.values().next().value);
    this.#wake();
  }
}

/** Do not report that a lease has ended: another member has the job. */
function ignoreLost(error) {
  if (!(error instanceof LeaseLost)) throw error;
}
