// Operations: conditions on watch keys with a deadline, whose outcome the owner receives once.

import { Closed, InDoubt, SessionExpired } from "./errors.js";
import * as pg from "./protocol.js";
import { ACK, C, CAUSE, M, MODE, OP, OUTCOME, T, WATCH_KEY, WK, nameOf } from "./protocol.js";
import { makeItem } from "./session.js";

const AT_ARMING = (1n << 64n) - 1n; // as the base of a SUM: the watermark at the time of arming
const CODE_MAX = 2n ** 32n - 1n;

// ---- conditions ----------------------------------------------------------------------------------

/** The condition of an operation. `keys`: rows of [key, target, cap]. */
class Condition {
  constructor(kind, threshold, keys, test = null) {
    if (keys.length < 1 || keys.length > pg.PG_WATCH_KEYS_MAX) {
      throw new RangeError(`a condition has 1 to ${pg.PG_WATCH_KEYS_MAX} watch keys`);
    }
    this.kind = kind;
    this.threshold = threshold;
    this.keys = keys;
    this.test = test;
  }

  /** Return the extension of the WATCH. `own`: keys that are forgotten when the operation ends. */
  encode(own) {
    const owned = new Set(own.map(nameOfKey));
    const parts = this.keys.flatMap(([key, target, cap]) => {
      const [key_type, bytes] = pg.encodeKey(key);
      const flags = owned.delete(nameOfKey(key)) ? WK.OWN : 0;
      return [WATCH_KEY.pack({ target, cap, key_len: bytes.length, key_type, flags }), bytes];
    });
    if (owned.size > 0) throw new RangeError("an own key is no watch key of the condition");
    return Buffer.concat(parts);
  }
}

function nameOfKey(key) {
  return pg.encodeKey(key).toString();
}

/** Holds once the watermark of each key has its target. `targets`: an object or a Map of keys with
 * their targets, or an array of keys with the target 1. */
export function allOf(targets) {
  return new Condition(C.ALL, 0n, targetsOf(targets));
}

/** Holds once the watermark of one key has its target. */
export function anyOf(targets) {
  return new Condition(C.ANY, 0n, targetsOf(targets));
}

/** Holds once the watermarks of `need` keys have their targets. */
export function quorum(targets, need) {
  const keys = targetsOf(targets);
  return new Condition(C.QUORUM, pg.whole("need", need, 1n, BigInt(keys.length)), keys);
}

/** Holds once the gains of the keys over their bases, each at most `cap`, add up to `atLeast`.
 * `bases`: an object or a Map; null = the watermark at the time of arming. */
export function sumOf(bases, { atLeast, cap = pg.PG_WATERMARK_MAX }) {
  const most = pg.whole("cap", cap, 0n, pg.PG_WATERMARK_MAX);
  const keys = entries(bases).map(([key, base]) => {
    return [key, base === null ? AT_ARMING : watermarkOf("base", base), most];
  });
  return new Condition(C.SUM, watermarkOf("atLeast", atLeast), keys);
}

/** Holds once `test()` returns true. It runs in this process: when the operation is armed, and each
 * time one of the keys has risen. It may be async. An exception counts as false. */
export function when(test, keys) {
  if (typeof test !== "function") throw new TypeError("when() takes a function");
  return new Condition(
    C.CLIENT,
    0n,
    keys.map((key) => [key, 0n, 0n]),
    test,
  );
}

function entries(map) {
  return map instanceof Map ? [...map] : Object.entries(map);
}

function targetsOf(targets) {
  const rows = Array.isArray(targets) ? targets.map((key) => [key, 1n]) : entries(targets);
  return rows.map(([key, target]) => [key, pg.whole("target", target, 0n, pg.PG_TARGET_MAX), 0n]);
}

function watermarkOf(what, value) {
  return pg.whole(what, value, 0n, pg.PG_WATERMARK_MAX);
}

// ---- the operation -------------------------------------------------------------------------------

/** An armed operation. `ended` is its outcome; null until then. */
export class Operation {
  #client;
  #condition;
  #settle;
  #result;

  constructor(client, key, condition) {
    this.#client = client;
    this.#condition = condition;
    this.key = key;
    this.ticket = 0n; // until the daemon has armed it
    this.ended = null;
    this.#result = new Promise((resolve, reject) => (this.#settle = { resolve, reject }));
    this.#result.catch(() => {}); // nobody has to wait for the result
  }

  /** Return the outcome: cause SATISFIED, EXPIRED, FAILED or CANCELLED; `missing` and `failed`, the
   * watch keys below their targets and those that failed; `watermarks`, an array in the order of the
   * keys; `error`, the code of the first failed key; `elapsedNs`. Throws SessionExpired, Closed. */
  result() {
    return this.#result;
  }

  /** Move the deadline to `ms` from the call, if that is later. Return false if the operation has
   * ended. */
  async extend(ms) {
    const time = { time_kind: T.DELAY, time_ns: pg.nanoseconds("ms", ms) };
    const fields = { mode: MODE.EXTEND, value: this.ticket, ...time };
    const item = makeItem(OP.PUT, this.#client.namespace, "", this.key, fields);
    return (await this.#client.putItem(item)).status !== "UNKNOWN";
  }

  /** Cancel the operation. Return false if it has ended. */
  async cancel() {
    return (await this.#client.cancel(this.key, { ticket: this.ticket })).status === "CANCELLED";
  }

  /** Return whether the condition of when() holds. */
  async holds() {
    try {
      return (await this.#condition.test()) === true;
    } catch (error) {
      console.error(`the condition of operation ${this.key} failed:`, error);
      return false;
    }
  }

  end(raw) {
    const named = (numbers) => numbers.map((n) => this.#condition.keys[n][0]);
    const { missing, failed, armedNs, endedNs, ...others } = raw;
    const times = { armedNs, endedNs, elapsedNs: endedNs - armedNs };
    this.ended = {
      key: this.key,
      ...others,
      missing: named(missing),
      failed: named(failed),
      ...times,
    };
    this.#settle.resolve(this.ended);
  }

  lose(error) {
    this.#settle.reject(error);
  }
}

// ---- calls ---------------------------------------------------------------------------------------

export const operations = (Base) =>
  class extends Base {
    #armed = new Map(); // operations, by ticket
    #early = new Map(); // messages that came before the answer to their WATCH, by ticket
    #watching = 0; // WATCH records without an answer

    constructor(...args) {
      super(...args);
      this.session.on("outcomes", (body, count) => this.#receive(body, count));
      this.session.on("expired", () => this.#loseAll(new SessionExpired()));
      this.session.on("failed", (error) => this.#loseAll(error));
    }

    /** Arm an operation that ends once its condition holds, at the latest after `timeoutMs`. Return
     * the Operation. `topic`: publish its end there as well, with the payload. `own`: watch keys
     * that are forgotten when the operation ends. Throws Exists, Refused. */
    async watch(key, condition, { timeoutMs, payload, topic, own = [] }) {
      const operation = new Operation(this, key, condition);
      const fields = {
        mode: condition.kind,
        time_kind: T.DELAY,
        time_ns: pg.nanoseconds("timeoutMs", timeoutMs),
        value: condition.threshold,
        flags: topic === undefined ? 0 : 1,
      };
      const [bytes, keys] = [pg.encodePayload(payload), condition.encode(own)];
      const item = makeItem(OP.WATCH, this.namespace, topic ?? "", key, fields, bytes, keys);
      this.session.keepAlive();
      this.#watching++;
      try {
        operation.ticket = (await this.putItem(item)).ticket;
        this.#arm(operation);
      } finally {
        if (--this.#watching === 0) this.#early.clear();
      }
      return operation;
    }

    /** Raise the watermark of a key, never to a lower value. Return how many operations ended. */
    advance(key, watermark) {
      return this.#trigger(OP.ADVANCE_KEY, key, watermarkOf("watermark", watermark));
    }

    /** Add to the watermark of a key. Return how many operations ended. */
    bump(key, n = 1) {
      return this.#trigger(OP.BUMP, key, watermarkOf("n", n));
    }

    /** Fail a key with a code from 1 to 2^32 - 1. Return how many operations ended. */
    fail(key, code) {
      return this.#trigger(OP.FAIL, key, pg.whole("code", code, 1n, CODE_MAX));
    }

    /** End the failure of a key. Return whether the daemon had the key. */
    async clear(key) {
      return (await this.#trigger(OP.CLEAR, key)) !== null;
    }

    /** Remove a key, at once or after the last operation that watches it. Return whether the daemon
     * had it. */
    async forget(key) {
      return (await this.#trigger(OP.FORGET, key)) !== null;
    }

    /** Cancel all operations that watch a key. Return their keys. */
    async cancelForKey(key) {
      const keys = [];
      let answer;
      do {
        answer = await this.putItem(makeItem(OP.CANCEL_FOR_KEY, this.namespace, "", key));
        keys.push(...(answer.ended ?? []));
      } while (answer.status === "MORE");
      return keys;
    }

    async #trigger(op, key, value = 0n) {
      const item = makeItem(op, this.namespace, "", key, { value });
      const { status, deadlineNs } = await this.putItem(item);
      return status === "UNKNOWN" ? null : Number(deadlineNs);
    }

    #arm(operation) {
      this.#armed.set(operation.ticket, operation);
      for (const raw of this.#early.get(operation.ticket) ?? []) this.#deliver(operation, raw);
    }

    /** Take outcomes and CHECKs. An outcome is acknowledged even if its ticket is unknown. */
    #receive(body, count) {
      const found = readOutcomes(body, count);
      const outcomes = found.filter((raw) => raw.version === 0n);
      if (outcomes.length > 0) this.#acknowledge(outcomes);
      for (const raw of found) {
        const operation = this.#armed.get(raw.ticket);
        if (operation !== undefined) this.#deliver(operation, raw);
        else if (this.#watching > 0) this.#keepEarly(raw);
      }
    }

    #keepEarly(raw) {
      this.#early.set(raw.ticket, [...(this.#early.get(raw.ticket) ?? []), raw]);
    }

    #acknowledge(raws) {
      const acks = raws.map(({ ticket, version, slot }) => ACK.pack({ ticket, version, slot }));
      this.session.post(M.ACK, Buffer.concat(acks), { count: acks.length });
    }

    #deliver(operation, { slot, version, ...raw }) {
      if (version !== 0n) {
        this.#check(operation, { ticket: raw.ticket, version, slot });
      } else if (this.#armed.delete(raw.ticket)) {
        operation.end(raw);
      }
    }

    /** Answer a CHECK: COMPLETE if the condition holds, else an ACK of its version. */
    async #check(operation, question) {
      if (!(await operation.holds())) {
        this.#acknowledge([question]);
        return;
      }
      const fields = { value: question.version };
      const put = this.putItem(makeItem(OP.COMPLETE, this.namespace, "", operation.key, fields));
      await put.catch((error) => {
        if (!(error instanceof Closed || error instanceof InDoubt)) console.error(error);
      });
    }

    #loseAll(error) {
      for (const operation of this.#armed.values()) operation.lose(error);
      this.#armed.clear();
      this.#early.clear();
    }
  };

function readOutcomes(body, count) {
  const reader = new pg.Reader(body);
  const heads = Array.from({ length: count }, () => reader.struct(OUTCOME));
  return heads.map((head) => readOutcome(head, reader));
}

function readOutcome(head, reader) {
  reader.take(head.key_len);
  const payload = Buffer.from(reader.take(head.payload_len));
  const keys = head.bitmap_bytes > 0 ? head.keys : 0; // 0 in a CHECK
  const watermarks = Array.from({ length: keys }, () => reader.take(8).readBigUInt64LE());
  const missing = pg.decodeBitmap(reader.take(head.bitmap_bytes));
  const failed = pg.decodeBitmap(reader.take(head.bitmap_bytes));
  return {
    cause: nameOf(CAUSE, Number(head.ticket & 255n)),
    ticket: head.ticket >> 8n,
    payload,
    error: head.error,
    watermarks,
    missing,
    failed,
    deadlineNs: head.deadline_ns,
    armedNs: head.armed_ns,
    endedNs: head.ended_ns,
    version: head.version,
    slot: head.slot,
  };
}
