// Notices of a topic, or of all topics of a namespace. The numbers in brackets are the rules of
// "Notices" in docs/protocol.md.

import { Subscriber as Socket } from "zeromq";

import * as pg from "./protocol.js";
import { NOTICE, NOTICES } from "./protocol.js";

/** An async iterator of events, each with `namespace` and `topic`:
 *
 * {type: "notice", sequence, key, payload, ticket, deadlineNs, firedNs, cause, missed}
 * {type: "lost", first, last}   the notices of these sequences were lost
 * {type: "restarted"}           the sequence starts again, and the loss is unknown
 *
 * A subscription takes effect a moment after the constructor. `daemon` is DIR/NAME. */
export class Subscriber {
  #socket = new Socket({ reconnectInterval: 10, linger: 0 });
  #topics = new Map(); // by the first frame

  constructor(daemon, { namespace, topic }) {
    const first = pg.encodeText("namespace", namespace, 1, pg.PG_NAMESPACE_MAX);
    const zero = Buffer.alloc(1); // each name ends with a zero byte
    const second = topic === undefined ? [] : [pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX), zero];
    this.#socket.subscribe(Buffer.concat([first, zero, ...second]));
    this.#socket.connect(`ipc://${daemon}.pub`);
  }

  close() {
    this.#socket.close();
  }

  async *[Symbol.asyncIterator]() {
    for await (const [subject, body] of this.#socket) yield* this.#read(subject.toString(), body);
  }

  *#read(subject, body) {
    const [namespace, topic] = subject.split("\0");
    const head = NOTICES.unpack(body);
    if (head.magic !== pg.NOTICE_MAGIC || head.version !== pg.VERSION) {
      throw new Error("this is no message of purgatoryd, or of another version");
    }
    for (const event of this.#begin(subject, head)) yield { namespace, topic, ...event };
    for (const notice of notices(head, body)) {
      const state = this.#topics.get(subject);
      if (notice.sequence < state.expected) continue; // [2] repeated, as after a crash
      state.expected = notice.sequence + 1n;
      yield { namespace, topic, ...notice };
    }
  }

  /** Return what a message reveals before its first record. */
  *#begin(subject, { stream_id, incarnation, first, tail, count }) {
    const next = count === 0 ? tail + 1n : first; // [3] a heartbeat: all up to `tail` should be here
    const state = this.#topics.get(subject);
    if (state?.stream_id !== stream_id || state?.incarnation !== incarnation) {
      this.#topics.set(subject, { stream_id, incarnation, expected: next });
      if (state !== undefined) yield { type: "restarted" }; // [6]
    } else if (next > state.expected) {
      yield { type: "lost", first: state.expected, last: next - 1n }; // [2]
      state.expected = next;
    }
  }
}

function* notices({ first, count }, body) {
  const bytes = new pg.Reader(body);
  bytes.take(NOTICES.size + count * NOTICE.size);
  for (let n = 0; n < count; n++) {
    const { ticket, deadline_ns, fired_ns, payload_len, key_len, key_type, cause, missed } =
      NOTICE.unpack(body, NOTICES.size + n * NOTICE.size);
    const key = pg.decodeKey(key_type, bytes.take(key_len));
    const payload = Buffer.from(bytes.take(payload_len));
    const times = { deadlineNs: deadline_ns, firedNs: fired_ns };
    const sequence = first + BigInt(n);
    const why = pg.nameOf(pg.CAUSE, cause);
    yield { type: "notice", sequence, key, payload, ticket, ...times, cause: why, missed };
  }
}
