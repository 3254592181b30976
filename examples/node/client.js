// Timers and consumer groups of one namespace.

import { createHash } from "node:crypto";

import { GroupMismatch, GroupMissing, MessageRefused, groupRefusal, refusal } from "./errors.js";
import * as pg from "./protocol.js";
import { DA, ERR, EXT, G, GA, ITEM, LATE, M, MODE, OP, ST, T, nameOf } from "./protocol.js";
import { Session, makeItem } from "./session.js";

const QUERY_RECORDS = 100; // a reply has space for the payloads of so many timers
const DEAD_PAGE = 256;
const REFUSED = 16; // statuses from here on are refusals
const NO_TIME = -(1n << 63n);

/** Settings of a new consumer group, in the units of Consumer. */
export const GROUP_DEFAULTS = {
  maxBacklog: 4096,
  maxBytes: 2 * 2 ** 20,
  retentionMs: 0,
  maxLeaseMs: 3_600_000,
  backoffMs: 1000,
  backoffCapMs: 600_000,
  rate: 0,
  maxAttempts: 20,
  maxDead: 1000,
  ordered: false,
  onDead: "skip",
  full: "refuse",
};

/** The client of a namespace. `daemon` is DIR/NAME, such as "/run/purgatoryd/demo". `worker` names
 * this client in the WAL. The session outlives its process by `graceMs`. `durable`: calls that
 * change something return once the WAL has the change on disk. */
export class Client {
  constructor(daemon, { namespace, worker = "node", graceMs = 0, durable = false }) {
    pg.encodeText("namespace", namespace, 1, pg.PG_NAMESPACE_MAX);
    this.namespace = namespace;
    this.session = new Session(`ipc://${daemon}.cmd`, { worker, graceMs, durable });
  }

  /** End the session. Calls without an answer fail with Closed. */
  close() {
    return this.session.close();
  }

  // ---- timers ------------------------------------------------------------------------------------

  /** Arm a timer that fires after `delayMs`, at the Date `at`, or at `deadlineNs` on
   * CLOCK_BOOTTIME. Return ticket, deadlineNs and status: ADDED, or by the mode REPLACED, KEPT,
   * EXTENDED or PARKED. Throws Exists, FullGroup, Refused.
   *
   * `tag`: a text for selections. `priority`, 0 to 9, and `orderKey` order the jobs of consumer
   * groups. `late`: "fire", or ["skip" | "coalesce", grace in ms], in place of the policy of the
   * topic. `uniqueForMs`: no other timer gets the key for that time. */
  async add(key, { topic = "", payload, mode = "error", ...options }) {
    const modeNumber = MODE[mode.toUpperCase()];
    if (modeNumber === undefined) throw new RangeError(`mode ${mode} is unknown`);
    const { tag, priority, orderKey, late, uniqueForMs, ...time } = options;
    const fields = { mode: modeNumber, ...timeOf(time) };
    const items = encodeItems({ tag, priority, orderKey, late, uniqueForMs });
    const bytes = pg.encodePayload(payload);
    return this.#put(makeItem(OP.PUT, this.namespace, topic, key, fields, bytes, items));
  }

  /** Add timers in batches: rows of [key, options of add()]. Return for each what add() returns,
   * or its error. */
  async addMany(rows) {
    const added = await Promise.allSettled(rows.map(([key, options]) => this.add(key, options)));
    return added.map((one) => one.value ?? one.reason);
  }

  /** Cancel a timer. Return status CANCELLED, FIRED (too late), LEASED (a consumer has the job) or
   * UNKNOWN, and the ticket. `delivered`: end the jobs of a timer that has fired as well, unless a
   * consumer has one. */
  async cancel(key, { ticket = 0n, delivered = false } = {}) {
    const fields = { value: ticket, flags: delivered ? 1 : 0 };
    return this.#put(makeItem(OP.CANCEL, this.namespace, "", key, fields));
  }

  /** Return an armed timer, or null. */
  async get(key) {
    return (await this.getMany([key]))[0];
  }

  /** Return the armed timers of keys; null for a key without one. */
  async getMany(keys) {
    const items = keys.map((key) => makeItem(OP.GET, this.namespace, "", key));
    const found = [];
    for (let at = 0; at < items.length; at += QUERY_RECORDS) {
      const part = items.slice(at, at + QUERY_RECORDS);
      const { body } = await this.session.query(part);
      const reader = new pg.Reader(body);
      for (const item of part) found.push(readInfo(reader, item.key));
    }
    return found;
  }

  async #put(item) {
    const { status, ticket, deadlineNs } = await this.session.put(item);
    if (status >= REFUSED || status === ST.EXISTS) {
      throw refusal(item.key, status, ticket, deadlineNs);
    }
    return { status: nameOf(ST, status), ticket, deadlineNs };
  }

  // ---- consumer groups ---------------------------------------------------------------------------

  /** Create a consumer group, and return it. One that exists stays as it is. Throws GroupMismatch
   * if it has other topics, or another value of a given setting; GroupRefused. */
  async createGroup(group, topics, { start = "latest", ...settings } = {}) {
    const found = await this.#groups(GA.DESCRIBE, group);
    if (found.length > 0) return agreeing(found[0], topics, settings);
    const names = topics.map((topic) => pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX));
    const fields = { ...packSettings({ ...GROUP_DEFAULTS, ...settings }), topics: names.length };
    fields.earliest = start === "earliest" ? 1 : 0;
    return (await this.#groups(GA.CREATE, group, fields, names))[0];
  }

  /** Return settings and counts of a consumer group. Throws GroupMissing. */
  async group(group) {
    const [found] = await this.#groups(GA.DESCRIBE, group);
    if (found === undefined) throw new GroupMissing(group, [BigInt(pg.GR.MISSING), 0n]);
    return found;
  }

  /** Return the consumer groups of the namespace. */
  groups() {
    return this.#groups(GA.DESCRIBE, "");
  }

  /** Change the given settings of a consumer group, and return it. */
  async changeGroup(group, settings) {
    const before = (await this.group(group)).settings;
    return (await this.#groups(GA.CHANGE, group, packSettings({ ...before, ...settings })))[0];
  }

  /** Delete a consumer group with its jobs and dead letters. */
  async deleteGroup(group) {
    await this.#groups(GA.DELETE, group);
  }

  /** Lease no jobs of a consumer group until resumeGroup(). */
  async pauseGroup(group) {
    return (await this.#groups(GA.PAUSE, group))[0];
  }

  /** Lease jobs of a paused consumer group again. */
  async resumeGroup(group) {
    return (await this.#groups(GA.RESUME, group))[0];
  }

  async #groups(action, group, fields = {}, topics = []) {
    const names = this.#names(group, action === GA.DESCRIBE ? 0 : 1);
    const ask = pg.GROUP_ASK.pack({ ...fields, ...lengths(names), action });
    const listed = topics.flatMap((topic) => [Buffer.from([topic.length]), topic]);
    const { frame, body } = await this.#about(group, M.GROUP, [ask, ...names, ...listed]);
    const reader = new pg.Reader(body);
    return Array.from({ length: frame.count }, () => readGroup(reader));
  }

  /** Iterate over the dead letters of a consumer group, oldest first. */
  async *deadLetters(group) {
    let after = 0n;
    do {
      const { frame, body } = await this.#dead(DA.LIST, group, { after, most: DEAD_PAGE });
      yield* readDead(new pg.Reader(body), frame.count);
      after = frame.details[1];
    } while (after !== 0n);
  }

  /** Let dead letters wait again, with all their attempts. Return their number. `ticket`: only
   * this one. */
  requeueDead(group, ticket = 0n) {
    return this.#changeDead(DA.REQUEUE, group, ticket);
  }

  /** Remove dead letters. Return their number. `ticket`: only this one. */
  dropDead(group, ticket = 0n) {
    return this.#changeDead(DA.DROP, group, ticket);
  }

  async #changeDead(action, group, ticket) {
    let [changed, more] = [0n, 0n];
    do {
      more = (await this.#dead(action, group, { ticket })).frame.detail;
      changed += more;
    } while (more !== 0n && ticket === 0n);
    return Number(changed);
  }

  #dead(action, group, fields) {
    const names = this.#names(group, 1);
    const ask = pg.DEAD_ASK.pack({ ...fields, ...lengths(names), action });
    return this.#about(group, M.DEAD, [ask, ...names]);
  }

  #names(group, least) {
    const name = pg.encodeText("consumer group", group, least, pg.PG_GROUP_NAME_MAX);
    return [Buffer.from(this.namespace), name];
  }

  async #about(group, message, parts) {
    try {
      return await this.session.ask(message, Buffer.concat(parts));
    } catch (error) {
      const refused = error instanceof MessageRefused && error.number === ERR.GROUP;
      throw refused ? groupRefusal(group, error.detail) : error;
    }
  }
}

// ---- encoding and decoding -----------------------------------------------------------------------

function lengths([namespace, name]) {
  return { namespace_len: namespace.length, name_len: name.length };
}

/** A delay begins when the daemon applies the record, because Node cannot read CLOCK_BOOTTIME. */
function timeOf({ delayMs, at, deadlineNs, ...others }) {
  const given = [delayMs, at, deadlineNs].filter((time) => time !== undefined);
  if (given.length !== 1 || Object.keys(others).length > 0) {
    const options = "topic, payload, mode, tag, priority, orderKey, late, uniqueForMs";
    throw new TypeError(`add() takes ${options} and one of delayMs, at, deadlineNs`);
  }
  if (delayMs !== undefined) {
    return { time_kind: T.DELAY, time_ns: pg.nanoseconds("delayMs", delayMs) };
  }
  if (at === undefined) return { time_kind: T.BOOT, time_ns: deadlineNs };
  return { time_kind: T.WALL, time_ns: pg.nanoseconds("at", at.getTime()) };
}

/** Return the extension items of a PUT, in the order of their kinds. */
function encodeItems({ tag, priority, orderKey, late, uniqueForMs }) {
  const items = [];
  const item = (kind, extra, value) => items.push(ITEM.pack({ kind, extra, value }));
  if (tag !== undefined) {
    const text = pg.encodeText("tag", tag, 1, pg.PG_TAG_MAX);
    item(EXT.TAG, text.length, 0n);
    items.push(text, Buffer.alloc(-text.length & 15));
  }
  if (priority !== undefined) {
    if (!Number.isInteger(priority) || priority < 0 || priority > pg.PG_PRIORITY_MAX) {
      throw new RangeError("a priority is a whole number from 0 to 9");
    }
    item(EXT.PRIORITY, priority, 0n);
  }
  if (orderKey !== undefined) {
    const hash = createHash("sha256").update(pg.encodeKey(orderKey)[1]).digest();
    item(EXT.ORDER, 0, hash.readBigInt64LE());
  }
  if (late !== undefined) item(EXT.LATE, ...lateOf(late));
  if (uniqueForMs !== undefined) {
    item(EXT.UNIQUE, 0, pg.nanoseconds("uniqueForMs", uniqueForMs, 0.001));
  }
  return Buffer.concat(items);
}

function lateOf(late) {
  if (late === "fire") return [LATE.FIRE, 0n];
  const [policy, graceMs] = Array.isArray(late) ? late : [];
  if (policy !== "skip" && policy !== "coalesce") {
    throw new RangeError('late is "fire", ["skip", ms] or ["coalesce", ms]');
  }
  return [LATE[policy.toUpperCase()], pg.nanoseconds("the grace", graceMs, 0.001)];
}

function readInfo(reader, key) {
  const info = reader.struct(pg.INFO);
  const status = Number(info.ticket & 255n);
  reader.take(info.namespace_len);
  const topic = reader.text(info.topic_len);
  reader.take(info.key_len);
  const payload = Buffer.from(reader.take(info.payload_len));
  reader.take(info.ext_bytes);
  if (status === ST.UNKNOWN) return null;
  if (status >= REFUSED) throw refusal(key, status, 0n, 0n);
  const wallNs = info.wall_ns === NO_TIME ? null : info.wall_ns;
  const [ticket, deadlineNs] = [info.ticket >> 8n, info.deadline_ns];
  return { key, topic, payload, ticket, deadlineNs, wallNs, status: nameOf(ST, status) };
}

const TIMES = {
  retentionMs: "retention_ns",
  maxLeaseMs: "max_lease_ns",
  backoffMs: "backoff_base_ns",
  backoffCapMs: "backoff_cap_ns",
};
const COUNTS = {
  maxBacklog: "max_jobs",
  maxBytes: "max_bytes",
  rate: "rate",
  maxAttempts: "max_attempts",
  maxDead: "max_dead",
};

function packSettings(settings) {
  const unknown = Object.keys(settings).filter((name) => !(name in GROUP_DEFAULTS));
  if (unknown.length > 0) throw new TypeError(`unknown setting ${unknown}`);
  const fields = {};
  for (const [name, field] of Object.entries(TIMES)) {
    fields[field] = pg.nanoseconds(name, settings[name]);
  }
  for (const [name, field] of Object.entries(COUNTS)) fields[field] = settings[name];
  fields.flags =
    (settings.ordered ? G.ORDERED : 0) +
    (settings.onDead === "block" ? G.BLOCK : 0) +
    (settings.full === "drop_oldest" ? G.DROP_OLDEST : 0);
  return fields;
}

function unpackSettings(fields) {
  const settings = {};
  for (const [name, field] of Object.entries(TIMES)) settings[name] = Number(fields[field]) / 1e6;
  for (const [name, field] of Object.entries(COUNTS)) settings[name] = Number(fields[field]);
  settings.ordered = (fields.flags & G.ORDERED) !== 0;
  settings.onDead = fields.flags & G.BLOCK ? "block" : "skip";
  settings.full = fields.flags & G.DROP_OLDEST ? "drop_oldest" : "refuse";
  return settings;
}

function readGroup(reader) {
  const info = reader.struct(pg.GROUP_INFO);
  const counts = ["pending", "waiting", "leased", "delayed", "dead", "bytes", "acked", "retried"];
  const group = { namespace: reader.text(info.namespace_len), name: reader.text(info.name_len) };
  group.topics = Array.from({ length: info.topics }, () => reader.text(reader.take(1)[0]));
  group.settings = unpackSettings(info);
  group.paused = (info.flags & G.PAUSED) !== 0;
  group.members = info.members;
  for (const name of [...counts, "dropped"]) group[name] = Number(info[name]);
  return group;
}

/** Return the consumer group, or throw GroupMismatch. */
function agreeing(found, topics, settings) {
  const sameTopics = [...new Set(topics)].sort().join("\0") === [...found.topics].sort().join("\0");
  const differs = Object.keys(settings).some((name) => found.settings[name] !== settings[name]);
  if (sameTopics && !differs) return found;
  throw new GroupMismatch(found.name, [BigInt(pg.GR.MISMATCH), 0n]);
}

function* readDead(reader, count) {
  const heads = Array.from({ length: count }, () => reader.struct(pg.DEAD_INFO));
  for (const head of heads) {
    const topic = reader.text(head.topic_len);
    const key = pg.decodeKey(head.key_type, reader.take(head.key_len));
    const payload = Buffer.from(reader.take(head.payload_len));
    const error = reader.text(head.error_len);
    const reason = nameOf(pg.JR, head.reason);
    const ticket = head.ticket >> 8n;
    yield { key, payload, topic, ticket, attempts: head.attempts, reason, error };
  }
}
