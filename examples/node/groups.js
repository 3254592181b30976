// Consumer groups and their dead letters.

import { GroupMismatch, GroupMissing, MessageRefused, groupRefusal } from "./errors.js";
import { decodeEnd } from "./notices.js";
import * as pg from "./protocol.js";
import { DA, ERR, G, GA, M, nameOf } from "./protocol.js";

const DEAD_PAGE = 256;

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

export const groups = (Base) =>
  class extends Base {
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

    async #changeDead(action, group, given) {
      const ticket = pg.whole("ticket", given, 0n, (1n << 56n) - 1n);
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
  };

function lengths([namespace, name]) {
  return { namespace_len: namespace.length, name_len: name.length };
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

const CHOICES = { onDead: ["skip", "block"], full: ["refuse", "drop_oldest"] };

function packSettings(settings) {
  const unknown = Object.keys(settings).filter((name) => !(name in GROUP_DEFAULTS));
  if (unknown.length > 0) throw new TypeError(`unknown setting ${unknown}`);
  for (const [name, choices] of Object.entries(CHOICES)) {
    if (!choices.includes(settings[name])) throw new RangeError(`${name} is one of ${choices}`);
  }
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
    const end = decodeEnd(
      Number(head.ticket & 255n),
      head.flags,
      key,
      reader.take(head.payload_len),
    );
    const error = reader.text(head.error_len);
    const reason = nameOf(pg.JR, head.reason);
    const times = { deadlineNs: head.deadline_ns, firedNs: head.fired_ns };
    const { attempts, priority } = head;
    yield {
      key,
      ...end,
      topic,
      ticket: head.ticket >> 8n,
      attempts,
      priority,
      ...times,
      reason,
      error,
    };
  }
}
