// Notices of a topic, or of all topics of a namespace. The numbers in brackets are the rules of
// "Notices" in docs/protocol.md.

import { randomBytes } from "node:crypto";
import { Subscriber as Socket } from "zeromq";

import { readHead, readNotices } from "./notices.js";
import * as pg from "./protocol.js";

const ZERO = Buffer.alloc(1); // each name ends with a zero byte

/** An async iterator of events, each with `namespace` and `topic`:
 *
 * {type: "notice", sequence, key, payload, ticket, deadlineNs, firedNs, cause, verdict, occurrence,
 *  missed}
 * {type: "lost", first, last, streamId, incarnation}
 *                               the notices of these sequences were lost; PastNotices may have them
 * {type: "restarted"}           the sequence starts again, and the loss is unknown
 *
 * A subscription takes effect a moment after the constructor; see live(). `daemon` is DIR/NAME. */
export class Subscriber {
  #socket = new Socket({ reconnectInterval: 10, linger: 0 });
  #topics = new Map(); // by the first frame
  #waiting = []; // messages that came before the iteration

  constructor(daemon, { namespace, topic }) {
    const first = pg.encodeText("namespace", namespace, 1, pg.PG_NAMESPACE_MAX);
    const second =
      topic === undefined ? [] : [pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX), ZERO];
    this.#socket.subscribe(Buffer.concat([first, ZERO, ...second]));
    this.#socket.connect(`ipc://${daemon}.pub`);
  }

  /** Return once the subscription is live: notices of timers that fire from here on come, or are
   * reported as lost. Call it before the iteration. */
  async live() {
    const probe = Buffer.concat([ZERO, randomBytes(16)]);
    this.#socket.subscribe(probe);
    for (;;) {
      const message = await this.#socket.receive();
      if (message[0].equals(probe)) break;
      this.#waiting.push(message);
    }
    this.#socket.unsubscribe(probe);
  }

  close() {
    this.#socket.close();
  }

  async *[Symbol.asyncIterator]() {
    while (this.#waiting.length > 0) yield* this.#read(this.#waiting.shift());
    for await (const message of this.#socket) yield* this.#read(message);
  }

  *#read([name, body]) {
    const subject = name.toString();
    const [namespace, topic] = subject.split("\0");
    if (namespace === "") return; // the probe, repeated after a reconnect
    const head = readHead(body);
    for (const event of this.#begin(subject, head)) yield { namespace, topic, ...event };
    for (const notice of readNotices(head, body)) {
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
      const stream = { streamId: stream_id, incarnation };
      yield { type: "lost", first: state.expected, last: next - 1n, ...stream }; // [2]
      state.expected = next;
    }
  }
}
