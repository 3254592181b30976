// Read notices that a subscriber has missed, from the replay buffer and the write-ahead log. A
// process of the daemon serves them at a socket of its own. The first request starts this process.

import { Dealer } from "zeromq";

import { Closed, MessageRefused } from "./errors.js";
import { readHead, readNotices } from "./notices.js";
import * as pg from "./protocol.js";
import { ERR, FRAME, M, REPLAY_ASK, REPLAY_INFO } from "./protocol.js";
import { encodeFrame } from "./session.js";

const START_MS = 500; // time between two requests to start the process
const ASK_AGAIN_MS = 5000;

/** Past notices of a namespace. `daemon` is DIR/NAME. Calls are answered one after another. */
export class PastNotices {
  #commands = new Dealer({ reconnectInterval: 10, linger: 0, sendTimeout: 0 });
  #socket = new Dealer({ reconnectInterval: 10, linger: 0, sendTimeout: 0 });
  #connected = false;
  #closed = false;
  #last = Promise.resolve(); // settled when the newest call has ended
  #sequence = 0n;
  #question = null; // { bytes, sequence, resolve, reject, timer }

  constructor(daemon, { namespace }) {
    this.namespace = namespace;
    this.name = pg.encodeText("namespace", namespace, 1, pg.PG_NAMESPACE_MAX);
    this.#socket.events.on("handshake", () => this.#reconnected());
    this.#socket.events.on("disconnect", () => (this.#connected = false));
    this.#commands.connect(`ipc://${daemon}.cmd`);
    this.#socket.connect(`ipc://${daemon}.back`);
    this.#receive(this.#socket, (frame, body) => this.#onReply(frame, body));
    this.#receive(this.#commands, () => {});
  }

  /** Iterate over the notices `first` to `last` of a topic that have fired. Events are those of
   * Subscriber: notices and lost ranges. `streamId` and `incarnation` are those of a lost range;
   * without them, the current ones. */
  async *read({ topic, first, last, streamId = 0n, incarnation = 0n }) {
    const name = pg.encodeText("topic", topic, 0, pg.PG_TOPIC_MAX);
    const lengths = { namespace_len: this.name.length, topic_len: name.length };
    const stream = { stream_id: streamId, incarnation };
    const names = { namespace: this.namespace, topic };
    for (let next = pg.whole("first", first, 1n, (1n << 64n) - 1n), tail = last; next <= tail;) {
      const ask = REPLAY_ASK.pack({ ...stream, first: next, last, ...lengths });
      const page = await this.#ask(M.REPLAY, Buffer.concat([ask, this.name, name]));
      const head = readHead(page.subarray(REPLAY_INFO.size));
      for (const event of readPage(next, head, page)) yield { ...names, ...event };
      next = REPLAY_INFO.unpack(page).next;
      tail = head.tail < last ? head.tail : last;
    }
  }

  /** Return the figures of `purgatoryd stats --json`, without namespaces and uids. */
  async stats() {
    return JSON.parse((await this.#ask(M.STATS, Buffer.alloc(0))).toString());
  }

  /** Close the sockets. A call without an answer fails with Closed. */
  close() {
    this.#closed = true;
    this.#finish()?.reject(closed());
    this.#commands.close();
    this.#socket.close();
  }

  /** Ask a question once all earlier ones are answered. Return the body of the reply. */
  #ask(message, body) {
    const asked = this.#last.then(() => this.#askNow(message, body));
    this.#last = asked.catch(() => {});
    return asked;
  }

  #askNow(message, body) {
    return new Promise((resolve, reject) => {
      if (this.#closed) throw closed();
      const sequence = ++this.#sequence;
      const bytes = Buffer.concat([encodeFrame(message, { sequence }), body]);
      this.#question = { bytes, sequence, resolve, reject, timer: null };
      this.#send();
    });
  }

  /** Send the question, or without a connection the request to start the process. Repeat later. */
  #send() {
    if (this.#question === null) return;
    clearTimeout(this.#question.timer);
    const again = this.#connected ? ASK_AGAIN_MS : START_MS;
    this.#question.timer = setTimeout(() => this.#send(), again);
    const [socket, bytes] = this.#connected
      ? [this.#socket, this.#question.bytes]
      : [this.#commands, encodeFrame(M.REPLAY)];
    socket.send(bytes).catch(() => {}); // it is sent again
  }

  #reconnected() {
    this.#connected = true;
    this.#send();
  }

  async #receive(socket, take) {
    try {
      for await (const [bytes] of socket) {
        if (bytes.length >= FRAME.size) take(FRAME.unpack(bytes), bytes);
      }
    } catch (error) {
      this.#finish()?.reject(error);
    }
  }

  /** Take a reply. After STOPPING, which means that the process cannot answer, ask again. */
  #onReply(frame, bytes) {
    if (frame.sequence !== this.#question?.sequence) return;
    if (frame.error === ERR.STOPPING) {
      clearTimeout(this.#question.timer);
      this.#question.timer = setTimeout(() => this.#send(), START_MS);
    } else if (frame.error !== 0) {
      const detail = [frame.detail, bytes.readBigUInt64LE(pg.DETAIL_1)];
      this.#finish().reject(new MessageRefused(frame.error, detail));
    } else {
      this.#finish().resolve(bytes.subarray(FRAME.size));
    }
  }

  #finish() {
    const question = this.#question;
    clearTimeout(question?.timer);
    this.#question = null;
    return question;
  }
}

function closed() {
  return new Closed("the reader of past notices is closed");
}

function* readPage(first, head, page) {
  const { lost_until } = REPLAY_INFO.unpack(page);
  if (lost_until >= first) yield { type: "lost", first, last: lost_until };
  yield* readNotices(head, page.subarray(REPLAY_INFO.size));
}
