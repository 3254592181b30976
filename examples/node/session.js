// A session on the command socket: batches that count once, and questions that may be repeated. The
// numbers in brackets are the rules of "Sessions" in docs/protocol.md.

import { randomBytes } from "node:crypto";
import { EventEmitter } from "node:events";
import { Dealer } from "zeromq";

import { Closed, InDoubt, MessageRefused } from "./errors.js";
import * as pg from "./protocol.js";
import { ERR, FRAME, HELLO, M, OP, RECORD, RESULT, ROWS, ST, W, WELCOME } from "./protocol.js";

const RESEND_FIRST_MS = 100;
const RESEND_MOST_MS = 2000;
const OUT_OF_ORDER_MS = 10;
const BUSY_FIRST_MS = 1;
const BUSY_MOST_MS = 100;
const BYE_MS = 1000;
const PING_MS = 15_000;
const NOTHING = Buffer.alloc(0);
const BODY_GOAL = 1 << 20; // a batch of this size is sent; a message may have 8 MiB

/** Return the message of a batch or query: frame, rows of a bulk load, names, records, then keys,
 * payloads and extensions. */
function encodeRecords(message, items, fields) {
  const index = new Map();
  const rows = items.map((item) => {
    const name = item.names.toString("latin1");
    if (!index.has(name)) index.set(name, [index.size, item.names]);
    return RECORD.pack({ ...item.record, name: index.get(name)[0] });
  });
  const names = Buffer.concat([...index.values()].map(([, entry]) => entry));
  const table = Buffer.concat([names, Buffer.alloc(-names.length & 7)]);
  const counts = { count: items.length, names: index.size, names_bytes: table.length };
  const frame = encodeFrame(message, { ...counts, ...fields });
  const numbers = items[0].row === undefined ? NOTHING : ROWS.pack(items[0].row);
  return Buffer.concat([frame, numbers, table, ...rows, ...items.map((item) => item.bytes)]);
}

/** Return whether a record may follow others in their batch: outside of bulk loads, or as the next
 * row of the same run. `count`: number of the others. */
function follows(first, count, item) {
  if (first.row === undefined || item.row === undefined) return first.row === item.row;
  return (
    first.row.bulk_load.equals(item.row.bulk_load) &&
    first.row.fencing_token === item.row.fencing_token &&
    first.row.first_row + BigInt(count) === item.row.first_row
  );
}

/** Return the keys of the operations that each CANCEL_FOR_KEY ended, by the number of its record. */
function decodeEnded(bytes) {
  const ended = new Map();
  const reader = new pg.Reader(bytes);
  while (reader.at < bytes.length) {
    const [record, size] = [reader.take(4).readUInt32LE(), reader.take(4).readUInt32LE()];
    const keys = [];
    for (const end = reader.at + size; reader.at < end;) {
      const [type, length] = reader.take(2);
      keys.push(pg.decodeKey(type, reader.take(length)));
    }
    ended.set(record, keys);
  }
  return ended;
}

/** Return a frame. */
export function encodeFrame(message, fields = {}) {
  return FRAME.pack({ magic: pg.WIRE_MAGIC, version: pg.VERSION, message, ...fields });
}

/** Return the item of a record, for put(). For a row of a bulk load, set its `row` to the fields of
 * a pg_rows. */
export function makeItem(op, namespace, topic, key, fields = {}, payload = NOTHING, ext = NOTHING) {
  const [type, bytes] = key instanceof Lease ? [pg.KEY.BYTES, key.bytes] : pg.encodeKey(key);
  const names = [
    pg.encodeText("namespace", namespace, 1, pg.PG_NAMESPACE_MAX),
    pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX),
  ];
  const lengths = Buffer.from(names.map((name) => name.length));
  const sizes = {
    key_type: type,
    key_len: bytes.length,
    payload_len: payload.length,
    ext_len: ext.length,
  };
  const record = { op, ...sizes, ...fields };
  RECORD.pack(record); // a field that does not fit fails this call, not the batches that follow
  return {
    key: key instanceof Lease ? key.key : key,
    names: Buffer.concat([lengths, ...names]),
    record,
    bytes: Buffer.concat([bytes, payload, ext]),
  };
}

/** A pg_lease as the key of a record, with the key of its job for error messages. */
export class Lease {
  constructor(bytes, key) {
    this.bytes = bytes;
    this.key = key;
  }
}

/** Events: "open" after each welcome and reconnect, "expired", "jobs" and "outcomes" (body, count),
 * "failed" (error). */
export class Session extends EventEmitter {
  #socket = new Dealer({ reconnectInterval: 10, linger: 0, sendTimeout: 0 });
  #connected = false;
  #closing = null; // the function that takes the answer to BYE
  #error = null; // the error of all later calls
  #worker;
  #graceNs;
  #pingTimer = null;
  #nonce = randomBytes(16);
  #nonces = 0n; // number of this nonce, so that a late welcome is recognized
  #session = 0n; // 0 = not open
  #sequence = 1n; // of the next batch
  #window = 1;
  #unanswered = []; // batches, in the order of their sequences
  #waiting = []; // records that are in no batch
  #busy = []; // records with the answer BUSY; they go before those that wait
  #questions = new Map(); // by sequence
  #asked = 0n;
  #resendMs = RESEND_FIRST_MS;
  #resendTimer = null;
  #busyMs = BUSY_FIRST_MS;
  #busyTimer = null;
  #pumping = false;
  #maxRecords = pg.PG_BATCH_RECORDS;

  constructor(endpoint, { worker = "node", graceMs = 0, durable = false } = {}) {
    super();
    this.#worker = pg.encodeText("worker", worker, 0, pg.PG_WORKER_MAX);
    this.#graceNs = pg.nanoseconds("graceMs", graceMs);
    this.flags = durable ? W.DURABLE : 0; // of each batch
    this.#socket.events.on("handshake", () => this.#reconnected());
    this.#socket.events.on("disconnect", () => (this.#connected = false));
    this.#socket.connect(endpoint);
    this.clock = null; // of CLOCK; null until the first welcome
    this.epoch = null; // number of daemon starts
    this.#receive();
    this.#later();
  }

  // ---- calls -------------------------------------------------------------------------------------

  /** Apply a record of makeItem(). Return its status, ticket and deadlineNs, also of a refusal.
   * All records that are put in one run of the event loop go in one batch. */
  put(item) {
    return new Promise((resolve, reject) => {
      if (this.#error !== null) throw this.#error;
      this.#waiting.push({ ...item, resolve, reject });
      this.#soon();
    });
  }

  /** Ask a question that may be repeated. Return the frame of the reply, and its body. */
  ask(message, body, fields = {}) {
    return this.#question(() => Buffer.concat([encodeFrame(message, fields), body]));
  }

  /** Look up the records of makeItem(GET). Return the body of the reply. */
  query(items) {
    return this.#question(() => encodeRecords(M.QUERY, items));
  }

  #question(build) {
    return new Promise((resolve, reject) => {
      if (this.#error !== null) throw this.#error;
      const sequence = ++this.#asked;
      const question = { sequence, bytes: build(), resolve, reject };
      this.#questions.set(sequence, question);
      if (this.#session !== 0n && this.#connected) this.#sendQuestion(question);
      this.#later();
    });
  }

  /** Send a message that has no answer. Drop it if there is no session or connection. */
  post(message, body = NOTHING, fields = {}) {
    if (this.#session === 0n || !this.#connected || this.#error !== null) return;
    const frame = encodeFrame(message, { session: this.#session, ...fields });
    this.#send(Buffer.concat([frame, body]));
  }

  /** From here on, send a PING after each reconnect and every 15 s: outcomes and jobs come to the
   * connection on which the session sent last, and the daemon ends silent sessions. */
  keepAlive() {
    if (this.#pingTimer !== null || this.#error !== null) return;
    this.#pingTimer = setInterval(() => this.post(M.PING), PING_MS);
  }

  /** End the session. Calls without an answer fail with Closed. */
  async close() {
    if (this.#error instanceof Closed) return;
    this.#fail(new Closed("the client is closed"));
    if (this.#session !== 0n && this.#connected) {
      await new Promise((resolve) => {
        const timer = setTimeout(resolve, BYE_MS); // a lost BYE: the end of the process counts
        this.#closing = () => {
          clearTimeout(timer);
          resolve();
        };
        this.#send(encodeFrame(M.BYE, { session: this.#session }));
      });
    }
    this.#socket.close();
  }

  // ---- sending -----------------------------------------------------------------------------------

  /** Send a message. A message that the socket cannot take is lost, and sent again later. */
  #send(bytes) {
    this.#socket.send(bytes).catch(() => {});
  }

  #sendQuestion(question) {
    question.bytes.writeBigUInt64LE(this.#session, 8);
    question.bytes.writeBigUInt64LE(question.sequence, 16);
    this.#send(Buffer.from(question.bytes)); // a copy, because the session may change later
  }

  #sendHello() {
    const hello = HELLO.pack({ name_len: this.#worker.length, grace_ns: this.#graceNs });
    this.#nonce.copy(hello);
    const frame = encodeFrame(M.HELLO, { sequence: this.#nonces });
    this.#send(Buffer.concat([frame, hello, this.#worker]));
  }

  /** [3] Send all that has no answer, in order. Without a session, that is the HELLO. */
  #sendAgain() {
    if (!this.#connected || this.#error !== null) return;
    if (this.#session === 0n) {
      this.#sendHello();
      return;
    }
    for (const batch of this.#unanswered) {
      batch.sends++;
      this.#send(batch.bytes);
    }
    for (const question of this.#questions.values()) this.#sendQuestion(question);
  }

  get #silent() {
    return this.#session === 0n || this.#unanswered.length > 0 || this.#questions.size > 0;
  }

  /** Send again after a silence. */
  #later(ms = this.#resendMs) {
    if (this.#resendTimer !== null || this.#error !== null) return;
    this.#resendTimer = setTimeout(() => {
      this.#resendTimer = null;
      if (!this.#silent) return;
      this.#resendMs = Math.min(2 * this.#resendMs, RESEND_MOST_MS);
      this.#sendAgain();
      this.#later();
    }, ms);
  }

  /** An answer came: wait for the next one from here on. */
  #answered() {
    clearTimeout(this.#resendTimer);
    this.#resendTimer = null;
    this.#resendMs = RESEND_FIRST_MS;
    if (this.#silent) this.#later();
  }

  #reconnected() {
    this.#connected = true;
    this.#answered();
    this.#sendAgain();
    if (this.#pingTimer !== null) this.post(M.PING);
    if (this.#session !== 0n) this.emit("open");
    this.#soon();
  }

  // ---- batches -----------------------------------------------------------------------------------

  #soon() {
    if (this.#pumping) return;
    this.#pumping = true;
    queueMicrotask(() => {
      this.#pumping = false;
      this.#pump();
    });
  }

  /** [2] Send the records that wait, with at most `window` batches without an answer. */
  #pump() {
    if (this.#session === 0n || this.#error !== null) return;
    if (this.#busy.length > 0) {
      this.#retryBusy();
      return;
    }
    while (this.#waiting.length > 0 && this.#unanswered.length < this.#window) this.#sendBatch();
  }

  /** [9] Put BUSY records before all others, after a pause, once all batches are answered. */
  #retryBusy() {
    if (this.#unanswered.length > 0 || this.#busyTimer !== null) return;
    this.#busyTimer = setTimeout(() => {
      this.#busyTimer = null;
      this.#waiting = [...this.#busy, ...this.#waiting];
      this.#busy = [];
      this.#pump();
    }, this.#busyMs);
    this.#busyMs = Math.min(2 * this.#busyMs, BUSY_MOST_MS);
  }

  /** Make a batch of the records that wait, as many as it may have, and send it. */
  #sendBatch() {
    const names = new Set();
    let count = 0;
    for (let size = 0; count < this.#waiting.length && count < this.#maxRecords; count++) {
      const item = this.#waiting[count];
      if (!follows(this.#waiting[0], count, item)) break;
      names.add(item.names.toString("latin1"));
      size += RECORD.size + item.bytes.length;
      if (count > 0 && (size > BODY_GOAL || names.size > pg.PG_BATCH_NAMES)) break;
    }
    const items = this.#waiting.splice(0, count);
    const flags = this.flags + (items[0].row === undefined ? 0 : W.BULK_LOAD);
    const bytes = encodeRecords(M.BATCH, items, { flags });
    const batch = { items, bytes, sends: 0, sequence: 0n };
    this.#number(batch, this.#unanswered[0]?.sequence);
    this.#unanswered.push(batch);
    if (this.#connected) {
      batch.sends++;
      this.#send(batch.bytes);
    }
    this.#later();
  }

  /** Give a batch the next number of the session. The bytes are copied, because libzmq may still
   * have those of an earlier number. */
  #number(batch, oldest) {
    batch.sequence = this.#sequence++;
    batch.bytes = Buffer.from(batch.bytes);
    batch.bytes.writeBigUInt64LE(this.#session, 8);
    batch.bytes.writeBigUInt64LE(batch.sequence, 16);
    batch.bytes.writeBigUInt64LE(oldest === undefined ? 0n : batch.sequence - oldest, pg.DETAIL_1);
  }

  // ---- receiving ---------------------------------------------------------------------------------

  async #receive() {
    try {
      for await (const [bytes] of this.#socket) this.#onMessage(bytes);
    } catch (error) {
      this.#fail(error);
    }
  }

  #onMessage(bytes) {
    if (bytes.length < FRAME.size) return;
    const frame = FRAME.unpack(bytes);
    if (frame.magic !== pg.WIRE_MAGIC || !this.#isMine(frame)) return;
    frame.details = [frame.detail, bytes.readBigUInt64LE(pg.DETAIL_1)];
    const body = bytes.subarray(FRAME.size);
    if (frame.message === M.BYE) this.#closing?.();
    else if (frame.message === M.JOBS) this.emit("jobs", body, frame.count);
    else if (frame.message === M.OUTCOMES) this.emit("outcomes", body, frame.count);
    else if (frame.error !== 0) this.#onError(frame);
    else this.#onAnswer(frame, body);
  }

  #isMine(frame) {
    if (frame.message !== M.HELLO) return this.#session !== 0n && frame.session === this.#session;
    return this.#session === 0n && frame.sequence === this.#nonces;
  }

  #onAnswer(frame, body) {
    this.#answered();
    if (frame.message === M.HELLO) this.#onWelcome(WELCOME.unpack(body));
    else if (frame.message === M.BATCH) this.#onResults(frame.sequence, body);
    else this.#take(frame.sequence)?.resolve({ frame, body });
  }

  /** Remove a question, and return it. */
  #take(sequence) {
    const question = this.#questions.get(sequence);
    this.#questions.delete(sequence);
    return question;
  }

  #onWelcome(welcome) {
    this.#session = welcome.session;
    this.#sequence = welcome.last + 1n;
    this.#window = welcome.window;
    this.#maxRecords = Math.min(welcome.batch_records, pg.PG_BATCH_RECORDS);
    this.clock = welcome.clock_kind;
    this.epoch = welcome.epoch;
    for (const batch of this.#unanswered) {
      this.#number(batch, batch === this.#unanswered[0] ? undefined : this.#unanswered[0].sequence);
    }
    this.#sendAgain();
    this.emit("open");
    this.#soon();
  }

  #onResults(sequence, body) {
    const place = this.#unanswered.findIndex((batch) => batch.sequence === sequence);
    if (place < 0) return; // a second answer
    const [batch] = this.#unanswered.splice(place, 1);
    const busyBefore = this.#busy.length;
    const ended = decodeEnded(body.subarray(batch.items.length * RESULT.size));
    batch.items.forEach((item, n) => {
      this.#settle(item, RESULT.unpack(body, n * RESULT.size), ended.get(n));
    });
    if (this.#busy.length === busyBefore) this.#busyMs = BUSY_FIRST_MS;
    this.#soon();
  }

  /** Take the result of a record. A BUSY record is sent again, but not a WATCH that is refused
   * because the session owns as many operations as it may. */
  #settle(item, result, ended) {
    const status = Number(result.ticket & 255n);
    const [ticket, deadlineNs] = [result.ticket >> 8n, result.deadline_ns];
    const full = item.record.op === OP.WATCH && deadlineNs !== 0n;
    if (status === ST.BUSY && !full) this.#busy.push(item);
    else item.resolve({ status, ticket, deadlineNs, ended });
  }

  // ---- errors ------------------------------------------------------------------------------------

  #onError(frame) {
    const stopped = frame.error === ERR.BUSY && Number(frame.detail) === ST.WAL;
    const later = [ERR.SESSIONS_FULL, ERR.STOPPING, ERR.BUSY].includes(frame.error) && !stopped;
    if (frame.error === ERR.SESSION_EXPIRED)
      this.#renew(); // [5]
    else if (frame.error === ERR.OUT_OF_ORDER)
      this.#sendSoon(); // [4]
    else if (!later) this.#refused(frame, new MessageRefused(frame.error, frame.details)); // [6], [7]
  }

  #sendSoon() {
    clearTimeout(this.#resendTimer);
    this.#resendTimer = null;
    this.#later(OUT_OF_ORDER_MS);
  }

  #refused(frame, error) {
    if (frame.message === M.HELLO) {
      this.#fail(error);
    } else if (frame.message === M.BATCH) {
      const place = this.#unanswered.findIndex((batch) => batch.sequence === frame.sequence);
      if (place < 0) return;
      const [batch] = this.#unanswered.splice(place, 1);
      batch.items.forEach((item) => item.reject(error));
      if (frame.error !== ERR.NOT_DURABLE) this.#renew(true);
      this.#soon();
    } else {
      this.#answered();
      this.#take(frame.sequence)?.reject(error);
    }
  }

  /** [5] Open another session. A batch that was sent only once was not applied, so it is sent
   * there. `nothing`: no batch without an answer was applied. */
  #renew(nothing = false) {
    const doubtful = nothing ? [] : this.#unanswered.filter((batch) => batch.sends > 1);
    this.#unanswered = this.#unanswered.filter((batch) => !doubtful.includes(batch));
    for (const batch of this.#unanswered) batch.sends = 0;
    this.#session = 0n;
    this.#nonces++;
    this.#nonce = randomBytes(16);
    for (const batch of doubtful) {
      for (const item of batch.items) item.reject(new InDoubt(item.key));
    }
    this.emit("expired");
    this.#sendAgain();
    this.#later();
  }

  /** Let all calls fail, those that wait and all later ones. */
  #fail(error) {
    if (this.#error !== null) return;
    this.#error = error;
    clearTimeout(this.#resendTimer);
    clearTimeout(this.#busyTimer);
    clearInterval(this.#pingTimer);
    const items = [...this.#unanswered.flatMap((batch) => batch.items), ...this.#busy];
    for (const item of [...items, ...this.#waiting]) item.reject(error);
    for (const question of this.#questions.values()) question.reject(error);
    this.#unanswered = [];
    this.#busy = [];
    this.#waiting = [];
    this.#questions.clear();
    this.emit("failed", error);
  }
}
