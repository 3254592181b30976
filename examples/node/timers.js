// Add, cancel and look up timers.

import { refusal } from "./errors.js";
import { readInfo } from "./infos.js";
import { encodeItems } from "./items.js";
import * as pg from "./protocol.js";
import { MODE, OP, ST, T, nameOf } from "./protocol.js";
import { makeItem } from "./session.js";

const QUERY_RECORDS = 100; // number of timers whose payloads fit in one reply
const REFUSED = 16; // statuses from here on are refusals

export const timers = (Base) =>
  class extends Base {
    /** Arm a timer that fires after `delayMs`, at the Date `at`, or at `deadlineNs` on
     * CLOCK_BOOTTIME. Return ticket, deadlineNs and status: ADDED, or by the mode REPLACED, KEPT,
     * EXTENDED or PARKED. Throws Exists, FullGroup, Refused.
     *
     * `tag`: a text for selections. `priority`, 0 to 9, and `orderKey` order the jobs of consumer
     * groups. `late`: "fire", or ["skip" | "coalesce", grace in ms], in place of the policy of the
     * topic. `uniqueForMs`: no other timer gets the key for that time. `slackMs`: time by which the
     * firing may be late, rounded down to a power of two ns, in place of the slack of the topic. */
    async add(key, options) {
      return this.putItem(this.#addItem(key, options));
    }

    #addItem(key, { topic = "", payload, mode = "error", ...options }) {
      const modeNumber = MODE[mode.toUpperCase()];
      if (modeNumber === undefined) throw new RangeError(`mode ${mode} is unknown`);
      const { tag, priority, orderKey, late, uniqueForMs, slackMs, ...time } = options;
      const fields = { mode: modeNumber, ...timeOf(time), flags: slackOf(slackMs) };
      const items = encodeItems({ tag, priority, orderKey, late, uniqueForMs });
      const bytes = pg.encodePayload(payload);
      return makeItem(OP.PUT, this.namespace, topic, key, fields, bytes, items);
    }

    /** Add timers in batches: rows of [key, options of add()]. Return for each what add() returns,
     * or its error. `bulkLoad`: { id, firstRow = 0, fencingToken = 0 }: the rows count once in all
     * runs of this bulk load; a row that is done has status BULK_LOADED. */
    async addMany(rows, { bulkLoad } = {}) {
      const items = await settled(rows.map(async ([key, options]) => this.#addItem(key, options)));
      return this.#putRows(items, bulkLoad);
    }

    /** Cancel a timer. Return status CANCELLED, FIRED (too late), LEASED (a consumer has the job) or
     * UNKNOWN, and the ticket. `delivered`: end the jobs of a timer that has fired as well, unless a
     * consumer has one. An operation with this key ends as well. */
    async cancel(key, { ticket = 0n, delivered = false } = {}) {
      const fields = { value: ticket, flags: delivered ? 1 : 0 };
      return this.putItem(makeItem(OP.CANCEL, this.namespace, "", key, fields));
    }

    /** Cancel timers in batches. Return for each key what cancel() returns, or its error. With
     * `bulkLoad`, as for addMany(), the rows of the timers become done. */
    async cancelMany(keys, { delivered = false, bulkLoad } = {}) {
      const fields = { flags: delivered ? 1 : 0 };
      const make = async (key) => makeItem(OP.CANCEL, this.namespace, "", key, fields);
      return this.#putRows(await settled(keys.map(make)), bulkLoad);
    }

    /** Arm a parked timer, with the payload that it was added with. Return status UNPARKED, or
     * UNKNOWN if no parked timer of the key has this ticket. */
    async unpark(key, ticket, payload) {
      const bytes = pg.encodePayload(payload);
      return this.putItem(makeItem(OP.UNPARK, this.namespace, "", key, { value: ticket }, bytes));
    }

    /** Return an armed timer or operation, or null. A parked timer has status PARKED. */
    async get(key) {
      return (await this.getMany([key]))[0];
    }

    /** Return the armed timers and operations of keys; null for a key without one. */
    async getMany(keys) {
      const items = keys.map((key) => makeItem(OP.GET, this.namespace, "", key));
      const found = [];
      for (let at = 0; at < items.length; at += QUERY_RECORDS) {
        const part = items.slice(at, at + QUERY_RECORDS);
        const reader = new pg.Reader((await this.session.query(part)).body);
        for (let n = 0; n < part.length; n++) found.push(readInfo(reader));
      }
      return found;
    }

    #putRows(items, bulkLoad) {
      const run = bulkLoad === undefined ? undefined : runOf(bulkLoad, items.length);
      const puts = items.map((item, n) => {
        if (item instanceof Error) return Promise.reject(item);
        if (run !== undefined) item.row = { ...run, first_row: run.first_row + BigInt(n) };
        return this.putItem(item);
      });
      return settled(puts);
    }

    /** Put a record. Return its status, ticket and deadlineNs. Throws a refusal. */
    async putItem(item) {
      const { status, ticket, deadlineNs, ended } = await this.session.put(item);
      if (status >= REFUSED || status === ST.EXISTS) {
        throw refusal(item.key, status, ticket, deadlineNs);
      }
      const answer = { status: nameOf(ST, status), ticket, deadlineNs };
      return ended === undefined ? answer : { ...answer, ended };
    }
  };

async function settled(promises) {
  return (await Promise.allSettled(promises)).map((one) =>
    one.status === "fulfilled" ? one.value : one.reason,
  );
}

/** Return the fields of pg_rows for the first of `count` rows. */
function runOf({ id, firstRow = 0n, fencingToken = 0n }, count) {
  return {
    bulk_load: pg.checkId("the id of a bulk load", id),
    first_row: pg.whole("firstRow", firstRow, 0n, pg.PG_BULK_LOAD_ROW_MAX - BigInt(count)),
    fencing_token: pg.whole("fencingToken", fencingToken, 0n, (1n << 64n) - 1n),
  };
}

/** Return kind and time of the options for the time of a record. A delay begins when the daemon
 * applies the record, because Node cannot read CLOCK_BOOTTIME. */
export function timeOf({ delayMs, at, deadlineNs, ...others }) {
  const given = [delayMs, at, deadlineNs].filter((time) => time !== undefined);
  if (given.length !== 1 || Object.keys(others).length > 0) {
    const unknown = Object.keys(others).join(", ") || "none";
    throw new TypeError(`give one of delayMs, at, deadlineNs; unknown options: ${unknown}`);
  }
  if (delayMs !== undefined) {
    return { time_kind: T.DELAY, time_ns: pg.nanoseconds("delayMs", delayMs) };
  }
  if (at === undefined) {
    const time_ns = pg.whole("deadlineNs", deadlineNs, 0n, pg.PG_NOMINAL_NONE);
    return { time_kind: T.BOOT, time_ns };
  }
  if (!(at instanceof Date)) throw new TypeError("at must be a Date");
  return { time_kind: T.WALL, time_ns: pg.nanoseconds("at", at.getTime()) };
}

/** Return the flags of a PUT: 1 + log2 of the slack in ns; 0 = the slack of the topic. */
function slackOf(slackMs) {
  if (slackMs === undefined) return 0;
  const slackNs = pg.nanoseconds("slackMs", slackMs);
  if (slackNs > pg.PG_SLACK_MAX_NS) throw new RangeError("a slack has at most 2^46 ns");
  return (slackNs || 1n).toString(2).length;
}
