// Schedules: objects in the daemon that arm one timer after another.

import { MessageRefused, ScheduleRefused } from "./errors.js";
import { checkPriority, encodeTag } from "./items.js";
import * as pg from "./protocol.js";
import { ERR, M, OVERLAP, SA, SCHEDULE, ST, nameOf } from "./protocol.js";

const EVERY_LEAST_MS = 1;
const { PG_NOMINAL_NONE, SCHEDULE_ASK, SCHEDULE_INFO, SCHEDULE_REPLY } = pg;

export const schedules = (Base) =>
  class extends Base {
    /** Add a schedule, or change it if it has other settings. Return it, with status ADDED,
     * REPLACED or KEPT.
     *
     * Give `everyMs`, or `cron` with the time zone `tz`, UTC without one. `count`: number of
     * occurrences. `until`: latest nominal time, a Date. `jitterMs`: an occurrence is up to this
     * much later. `overlap`: "allow", "skip", "queue" or "delay". `topic`, `payload`, `tag` and `priority`
     * are those of the occurrences. Throws ScheduleRefused. */
    async putSchedule(key, { topic = "", payload, tag, priority, ...options }) {
      const { count = 0, until, jitterMs = 0, overlap = "allow", ...spec } = options;
      if (!(String(overlap).toUpperCase() in OVERLAP)) throw new RangeError(`overlap ${overlap}`);
      const bytes = {
        ...encodeSpec(spec),
        topic: pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX),
        payload: pg.encodePayload(payload),
        ...(tag === undefined ? {} : { tag: encodeTag(tag) }),
      };
      const urgency =
        priority === undefined ? {} : { has_priority: 1, priority: checkPriority(priority) };
      const fields = {
        ...urgency,
        overlap: OVERLAP[overlap.toUpperCase()],
        until: untilOf(until),
        jitter_ns: pg.nanoseconds("jitterMs", jitterMs),
        count: pg.whole("count", count, 0n, pg.PG_NOMINAL_NONE),
      };
      const { infos, status } = await this.#schedule(SA.PUT, key, fields, bytes);
      return { ...infos[0], status: nameOf(ST, status) };
    }

    /** Return a schedule, or null. */
    async getSchedule(key) {
      return (await this.#schedule(SA.GET, key)).infos[0] ?? null;
    }

    /** Return the schedules of the namespace. */
    async schedules() {
      const found = new Map(); // by key: a repeated message may report a schedule twice
      for (let from = 0n; from !== PG_NOMINAL_NONE;) {
        const { infos, next } = await this.#schedule(SA.LIST, "", { from });
        for (const info of infos) found.set(info.key, info);
        from = next;
      }
      return [...found.values()];
    }

    /** Remove a schedule and its armed occurrence. Return false if there is none. */
    async deleteSchedule(key) {
      return (await this.#schedule(SA.DELETE, key)).status !== ST.UNKNOWN;
    }

    /** Arm no occurrence until resumeSchedule(). Return the schedule. */
    async pauseSchedule(key) {
      return (await this.#existing(SA.PAUSE, key)).infos[0];
    }

    /** Go on with the first occurrence after the current time. Return the schedule. */
    async resumeSchedule(key) {
      return (await this.#existing(SA.RESUME, key)).infos[0];
    }

    /** Fire an additional occurrence at once. `nominal`: its nominal time, a Date. Return its
     * ticket. A repeated call with the same time fires nothing. */
    async triggerSchedule(key, nominal = new Date()) {
      const fields = { from: pg.wallNs("nominal", nominal) };
      return (await this.#existing(SA.TRIGGER, key, fields)).ticket;
    }

    /** Fire the occurrences with nominal times from `first` to `last`, Dates, that have not fired;
     * `repeat`: also those that have, except armed ones. `last` must not be in the future. Return
     * `armed`, the number of those that it fires, and `nominalNs`, the nominal times of all. */
    async backfillSchedule(key, first, last, { repeat = false } = {}) {
      const found = { armed: 0, nominalNs: [] };
      const until = pg.wallNs("last", last);
      for (let from = pg.wallNs("first", first); from !== PG_NOMINAL_NONE;) {
        const range = { from, until, repeat: repeat ? 1 : 0 };
        const { ticket, next, times } = await this.#existing(SA.BACKFILL, key, range);
        found.armed += Number(ticket); // a BACKFILL reports a number in this field
        found.nominalNs.push(...times);
        from = next;
      }
      return found;
    }

    /** Return the next `count` nominal times of a schedule after the Date `after`. */
    async previewSchedule(key, count, after = new Date()) {
      const fields = { from: pg.wallNs("after", after), ...countOf(count), until: PG_NOMINAL_NONE };
      return (await this.#existing(SA.NEXT, key, fields)).times;
    }

    /** Return the next `count` nominal times of settings: `everyMs`, or `cron` and `tz`; `until`. */
    async preview(count, { after = new Date(), until, ...spec }) {
      const times = { from: pg.wallNs("after", after), until: untilOf(until) };
      return (await this.#schedule(SA.NEXT, "", { ...times, ...countOf(count) }, encodeSpec(spec)))
        .times;
    }

    async #existing(action, key, fields) {
      const reply = await this.#schedule(action, key, fields);
      if (reply.status === ST.UNKNOWN) throw new ScheduleRefused(key, ST.UNKNOWN);
      return reply;
    }

    /** Ask about a schedule. `bytes`: its topic, spec, zone, tag and payload; every_ns. */
    async #schedule(action, key, fields = {}, { every_ns = 0n, ...bytes } = {}) {
      const least = action === SA.LIST || action === SA.NEXT ? 0 : 1;
      const named = { key: pg.encodeText("key", key, least, pg.PG_SCHEDULE_KEY_MAX), ...bytes };
      const ask = encodeAsk(Buffer.from(this.namespace), { ...fields, action, every_ns }, named);
      try {
        const { frame, body } = await this.session.ask(M.SCHEDULE, ask, {
          flags: this.session.flags,
        });
        return readReply(action, frame.count, new pg.Reader(body));
      } catch (error) {
        const refused = error instanceof MessageRefused && error.number === ERR.SCHEDULE;
        throw refused ? new ScheduleRefused(key, Number(error.detail[0])) : error;
      }
    }
  };

function encodeSpec({ everyMs, cron, tz, ...others }) {
  const one = (everyMs === undefined) !== (cron === undefined);
  if (!one || (tz !== undefined && cron === undefined) || Object.keys(others).length > 0) {
    throw new TypeError(`give everyMs, or cron and tz; unknown options: ${Object.keys(others)}`);
  }
  if (cron === undefined) return { every_ns: pg.nanoseconds("everyMs", everyMs, EVERY_LEAST_MS) };
  const zone = tz === undefined ? Buffer.alloc(0) : pg.encodeText("tz", tz, 1, pg.PG_ZONE_MAX);
  return { spec: pg.encodeText("cron", cron, 1, pg.PG_SPEC_MAX), zone };
}

function untilOf(until) {
  return until === undefined ? PG_NOMINAL_NONE : pg.wallNs("until", until);
}

function countOf(count) {
  return { count: pg.whole("count", count, 1n, BigInt(pg.PG_NOMINAL_MAX)) };
}

function encodeAsk(namespace, fields, bytes) {
  const order = ["topic", "key", "spec", "zone", "tag", "payload"];
  const parts = [namespace, ...order.map((name) => bytes[name] ?? Buffer.alloc(0))];
  const lengths = { namespace_len: namespace.length };
  order.forEach((name, n) => (lengths[`${name}_len`] = parts[n + 1].length));
  return Buffer.concat([SCHEDULE_ASK.pack({ ...fields, ...lengths }), ...parts]);
}

function readReply(action, count, reader) {
  const reply = reader.struct(SCHEDULE_REPLY);
  const timed = action === SA.NEXT || action === SA.BACKFILL;
  const items = Array.from({ length: count }, () => {
    return timed ? reader.take(8).readBigInt64LE() : readSchedule(reader);
  });
  return { ...reply, infos: timed ? [] : items, times: timed ? items : [] };
}

function readSchedule(reader) {
  const info = reader.struct(SCHEDULE_INFO);
  const topic = reader.text(info.topic_len);
  const [key, cron, tz, tag] = ["key", "spec", "zone", "tag"].map((name) => {
    return reader.text(info[`${name}_len`]);
  });
  const payload = Buffer.from(reader.take(info.payload_len));
  const time = (ns) => (ns === PG_NOMINAL_NONE || ns === pg.PG_NOMINAL_UNKNOWN ? null : ns);
  return {
    key,
    topic,
    payload,
    tag: tag || null,
    priority: info.has_priority ? info.priority : null,
    everyMs: info.every_ns === 0n ? null : Number(info.every_ns) / 1e6,
    cron: cron || null,
    tz: cron ? tz || "UTC" : null,
    count: info.count === 0n ? null : Number(info.count),
    untilNs: time(info.until_ns),
    jitterMs: Number(info.jitter_ns) / 1e6,
    overlap: nameOf(OVERLAP, info.overlap).toLowerCase(),
    revision: Number(info.revision),
    occurrences: Number(info.armed),
    openJobs: info.open,
    paused: info.state === SCHEDULE.PAUSED,
    nextNs: time(info.next_ns),
    deadlineNs: time(info.deadline_ns), // of the armed occurrence, on the wall clock
    previousNs: info.last_ns,
    putNs: info.put_ns,
    ticket: info.ticket,
    uid: info.uid,
  };
}
