// Decode the records of notices, and what notices, jobs and dead letters have in common.

import * as pg from "./protocol.js";
import { CAUSE, E, NOTICE, NOTICES, VERDICT, nameOf } from "./protocol.js";

/** Return cause, payload, verdict and occurrence. `verdict`: how an operation ended, with the
 * numbers of the watch keys below their targets; null for a timer. `occurrence`: schedule and
 * nominalNs of an occurrence, together an idempotency key; else null. */
export function decodeEnd(cause, flags, key, bytes) {
  const reader = new pg.Reader(bytes);
  const verdict = flags & E.OPERATION ? readVerdict(reader) : null;
  const payload = Buffer.from(bytes.subarray(reader.at));
  const occurrence = flags & E.SCHEDULE ? occurrenceOf(key) : null;
  return { cause: nameOf(CAUSE, cause), payload, verdict, occurrence };
}

function readVerdict(reader) {
  const { elapsed_ns, error, keys, bitmap_bytes } = reader.struct(VERDICT);
  const missing = pg.decodeBitmap(reader.take(bitmap_bytes));
  return { elapsedNs: elapsed_ns, error, keys, missing };
}

function occurrenceOf(key) {
  const at = key.lastIndexOf("@");
  return { schedule: key.slice(0, at), nominalNs: BigInt(key.slice(at + 1)) };
}

/** Return the head of a notice message. Throws Error if another program or version sent it. */
export function readHead(body) {
  const head = NOTICES.unpack(body);
  if (head.magic !== pg.NOTICE_MAGIC || head.version !== pg.VERSION) {
    throw new Error("this is not a message of purgatoryd in this version");
  }
  return head;
}

/** Return the notices in the second frame of a notice message. */
export function* readNotices({ first, count }, body) {
  const bytes = new pg.Reader(body);
  bytes.take(NOTICES.size + count * NOTICE.size);
  for (let n = 0; n < count; n++) {
    const info = NOTICE.unpack(body, NOTICES.size + n * NOTICE.size);
    const key = pg.decodeKey(info.key_type, bytes.take(info.key_len));
    const end = decodeEnd(info.cause, info.flags, key, bytes.take(info.payload_len));
    const times = { deadlineNs: info.deadline_ns, firedNs: info.fired_ns };
    const sequence = first + BigInt(n);
    const { ticket, missed } = info;
    yield { type: "notice", sequence, key, ticket, ...times, ...end, missed };
  }
}
