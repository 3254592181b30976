// Selections of pending timers: list and count them, cancel or move them all.

import { randomBytes } from "node:crypto";

import { readInfo } from "./infos.js";
import { encodeTag } from "./items.js";
import * as pg from "./protocol.js";
import { LISTED, LIST_ASK, M, SA, SC, SEL, SELECT, SW, SWEEP_ASK, SWEEP_INFO } from "./protocol.js";
import { timeOf } from "./timers.js";

const NO_END = (1n << 63n) - 1n;
const FIRST = { after_ns: -(1n << 63n), after_ticket: 0n };
const LAST = { before_ns: NO_END, before_ticket: (1n << 64n) - 1n };
const POLL_FIRST_MS = 5;
const POLL_MOST_MS = 500;
const NO_ID = Buffer.alloc(16);

/** A selection has any of `prefix` (of string keys, or of Buffer keys), `topic`, `tag`, `dueFrom`
 * and `dueBefore`, each a Date, or a BigInt in ns on the daemon's clock. Operations are never
 * selected. */
export const pending = (Base) =>
  class extends Base {
    /** Return the first `limit` timers of a selection by deadline, and a cursor for the next page,
     * null at the end. `payloads`: with payloads. */
    async listTimers({ limit = 100, cursor = null, payloads = false, ...selection } = {}) {
      const most = Number(pg.whole("limit", limit, 1n, 1_000_000n)) + 1;
      const part = { ...FIRST, ...LAST, ...cursor?.after, payloads: payloads ? 1 : 0 };
      const select = await this.#select(selection, cursor?.tickets ?? 0n);
      let best = [];
      const keep = (found) => {
        best = [...best, ...found].sort(byDeadline).slice(0, most);
        if (best.length === most) Object.assign(part, before(best[most - 1]));
      };
      const tickets = await this.#walk(part, select, Math.min(most, 4096), (_, found) =>
        keep(found),
      );
      const page = best.slice(0, limit);
      const more = best.length > page.length;
      return { timers: page, cursor: more ? { after: after(page[limit - 1]), tickets } : null };
    }

    /** Return the number of timers of a selection. */
    async countTimers(selection = {}) {
      let count = 0n;
      const select = await this.#select(selection, 0n);
      await this.#walk({ ...FIRST, ...LAST }, select, 0, (matched) => (count += matched));
      return Number(count);
    }

    /** Cancel all timers of a selection. Return the status of the sweep when it has ended, or, with
     * `wait: false`, at once. The daemon goes on without this client. `id`: 16 bytes; the same id
     * never begins a second sweep. */
    cancelWhere(selection, options) {
      return this.#sweep(selection, { change: SC.CANCEL }, options);
    }

    /** Move all timers of a selection: by `shiftMs`, or to delayMs, at or deadlineNs, as in add().
     * Options and return value are those of cancelWhere(). */
    async rescheduleWhere(selection, { shiftMs, wait, id, ...time }) {
      const change =
        shiftMs === undefined
          ? { change: SC.MOVE, ...timeOf(time) }
          : { change: SC.SHIFT, time_ns: shiftOf(shiftMs, time) };
      return this.#sweep(selection, change, { wait, id });
    }

    /** Return the status of a sweep: id, state (RUNNING, DONE, STOPPED, CUT; NONE: the daemon does
     * not remember it), done (number of changed timers), fraction (of the work), uid. */
    async sweepStatus(id) {
      return this.#askSweep(SA.STATUS, pg.checkId("the id of a sweep", id));
    }

    /** Stop a sweep, and return its status. */
    async stopSweep(id) {
      return this.#askSweep(SA.STOP, pg.checkId("the id of a sweep", id));
    }

    /** Return all sweeps that the daemon remembers. */
    async sweeps() {
      const { frame, body } = await this.session.ask(M.SWEEP, SWEEP_ASK.pack({ id: NO_ID }));
      return readSweeps(body, frame.count);
    }

    async #sweep(selection, change, { wait = true, id = randomBytes(16) } = {}) {
      const begun = pg.checkId("the id of a sweep", id);
      const select = encodeSelect(await this.#select(selection, 0n));
      let status = await this.#askSweep(SA.BEGIN, begun, change, select);
      for (let ms = POLL_FIRST_MS; wait && status.state === "RUNNING";) {
        await new Promise((resolve) => setTimeout(resolve, ms));
        ms = Math.min(2 * ms, POLL_MOST_MS);
        const after = await this.sweepStatus(begun);
        status = after.state === "NONE" ? { ...status, state: "CUT" } : after;
      }
      return status;
    }

    async #askSweep(action, id, change = {}, select = NO_ID.subarray(0, 0)) {
      const ask = SWEEP_ASK.pack({ id, action, ...change });
      const { frame, body } = await this.session.ask(M.SWEEP, Buffer.concat([ask, select]));
      const none = { id, state: "NONE", done: 0, fraction: 1, uid: null };
      return readSweeps(body, frame.count)[0] ?? none;
    }

    /** Return the fields and texts of a selection, with times on the daemon's clock. */
    async #select({ prefix, topic, tag, dueFrom, dueBefore, ...others }, tickets) {
      const unknown = Object.keys(others);
      if (unknown.length > 0) throw new TypeError(`unknown fields of a selection: ${unknown}`);
      const namespace = Buffer.from(this.namespace);
      const select = { namespace, tickets, fields: 0, from_ns: 0n, upto_ns: NO_END };
      if (prefix !== undefined) [select.key_type, select.prefix] = pg.encodeKey(prefix);
      if (topic !== undefined) select.topic = pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX);
      if (tag !== undefined) select.tag = encodeTag(tag);
      const offsetNs = await this.#offsetNs(namespace, dueFrom, dueBefore);
      if (dueFrom !== undefined) select.from_ns = arenaNs("dueFrom", dueFrom, offsetNs);
      if (dueBefore !== undefined) select.upto_ns = arenaNs("dueBefore", dueBefore, offsetNs);
      return select;
    }

    /** Return the wall time minus the daemon's clock. A LIST with slot PG_NIL reads no timers. */
    async #offsetNs(namespace, ...times) {
      if (!times.some((time) => time instanceof Date)) return 0n;
      const select = { namespace, upto_ns: NO_END };
      return (await this.#list({ ...FIRST, ...LAST, slot: pg.PG_NIL }, select)).wall_offset_ns;
    }

    /** Look at all timers of a selection, message by message. Return the bound on tickets. */
    async #walk(part, select, max, take) {
      for (let slot = 0; slot !== pg.PG_NIL;) {
        const found = await this.#list({ ...part, slot, max }, select);
        take(found.matched, found.timers);
        select.tickets = found.tickets;
        slot = found.slot;
      }
      return select.tickets;
    }

    async #list(part, select) {
      const ask = Buffer.concat([LIST_ASK.pack(part), encodeSelect(select)]);
      const { frame, body } = await this.session.ask(M.LIST, ask);
      const reader = new pg.Reader(body);
      const head = reader.struct(LISTED);
      return { ...head, timers: Array.from({ length: frame.count }, () => readInfo(reader)) };
    }
  };

function encodeSelect({ namespace, prefix, topic, tag, ...select }) {
  const texts = [namespace, prefix, topic, tag].map((text) => text ?? Buffer.alloc(0));
  const [namespace_len, prefix_len, topic_len, tag_len] = texts.map((text) => text.length);
  const fields =
    (prefix === undefined ? 0 : SEL.PREFIX) +
    (topic === undefined ? 0 : SEL.TOPIC) +
    (tag === undefined ? 0 : SEL.TAG);
  const lengths = { namespace_len, prefix_len, topic_len, tag_len };
  return Buffer.concat([SELECT.pack({ ...select, ...lengths, fields }), ...texts]);
}

function readSweeps(body, count) {
  const reader = new pg.Reader(body);
  return Array.from({ length: count }, () => {
    const { id, done, slot, slots, uid, state, change } = reader.struct(SWEEP_INFO);
    const select = reader.struct(SELECT);
    const text = (name) => reader.text(select[`${name}_len`]);
    const names = { namespace: text("namespace"), prefix: text("prefix") };
    Object.assign(names, { topic: text("topic"), tag: text("tag") });
    const progress = { done: Number(done), fraction: slots === 0 ? 1 : slot / slots };
    const kind = { state: pg.nameOf(SW, state), change: pg.nameOf(SC, change) };
    return { id, ...kind, ...progress, uid, ...names };
  });
}

function arenaNs(what, time, offsetNs) {
  if (!(time instanceof Date)) return pg.whole(what, time, 0n, NO_END);
  const ns = pg.wallNs(what, time) - offsetNs;
  return ns < 0n ? 0n : ns;
}

function shiftOf(shiftMs, time) {
  if (Object.values(time).some((value) => value !== undefined)) {
    throw new TypeError("give shiftMs, or one of delayMs, at, deadlineNs");
  }
  const ns = pg.nanoseconds("the amount of shiftMs", Math.abs(shiftMs), 0.001);
  return shiftMs < 0 ? -ns : ns;
}

function byDeadline(one, other) {
  const [a, b] = [one, other].map((timer) => [timer.deadlineNs, timer.ticket]);
  const at = a[0] === b[0] ? 1 : 0;
  return a[at] < b[at] ? -1 : a[at] > b[at] ? 1 : 0;
}

function after({ deadlineNs, ticket }) {
  return { after_ns: deadlineNs, after_ticket: ticket };
}

function before({ deadlineNs, ticket }) {
  return { before_ns: deadlineNs, before_ticket: ticket + 1n };
}
