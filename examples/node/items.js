// Extension items of a timer: tag, priority, order key, late policy, unique key.

import { createHash } from "node:crypto";

import * as pg from "./protocol.js";
import { EXT, ITEM, LATE } from "./protocol.js";

/** Return the extension items of a PUT, in the order of their kinds. */
export function encodeItems({ tag, priority, orderKey, late, uniqueForMs }) {
  const items = [];
  const item = (kind, extra, value) => items.push(ITEM.pack({ kind, extra, value }));
  if (tag !== undefined) {
    const text = encodeTag(tag);
    item(EXT.TAG, text.length, 0n);
    items.push(text, Buffer.alloc(-text.length & 15));
  }
  if (priority !== undefined) item(EXT.PRIORITY, checkPriority(priority), 0n);
  if (orderKey !== undefined) {
    const hash = createHash("sha256").update(pg.encodeKey(orderKey)[1]).digest();
    item(EXT.ORDER, 0, hash.readBigInt64LE());
  }
  if (late !== undefined) item(EXT.LATE, ...lateOf(late));
  if (uniqueForMs !== undefined) {
    item(EXT.UNIQUE, 0, pg.nanoseconds("uniqueForMs", uniqueForMs, 0.001));
  }
  return Buffer.concat(items);
}

/** Return the bytes of a tag. */
export function encodeTag(tag) {
  return pg.encodeText("tag", tag, 1, pg.PG_TAG_MAX);
}

/** Return a priority from 0 to 9. */
export function checkPriority(priority) {
  if (!Number.isInteger(priority) || priority < 0 || priority > pg.PG_PRIORITY_MAX) {
    throw new RangeError("a priority is a whole number from 0 to 9");
  }
  return priority;
}

function lateOf(late) {
  if (late === "fire") return [LATE.FIRE, 0n];
  const [policy, graceMs] = Array.isArray(late) ? late : [];
  if (policy !== "skip" && policy !== "coalesce") {
    throw new RangeError('late is "fire", ["skip", ms] or ["coalesce", ms]');
  }
  return [LATE[policy.toUpperCase()], pg.nanoseconds("the grace", graceMs, 0.001)];
}

/** Return the options in the items of a timer. An occurrence of a schedule has `nominalNs`. */
export function decodeItems(bytes) {
  const reader = new pg.Reader(bytes);
  const found = {};
  while (reader.at < bytes.length) {
    const { kind, extra, value } = reader.struct(ITEM);
    const hasText = kind === EXT.TAG || kind === EXT.UNIQUE;
    const text = hasText ? reader.text(extra) : "";
    if (hasText) reader.take(-extra & 15);
    if (kind === EXT.TAG) found.tag = text;
    else if (kind === EXT.SCHEDULE) found.nominalNs = value;
    else if (kind === EXT.PRIORITY) found.priority = extra;
    else if (kind === EXT.ORDER) found.orderHash = value;
    else if (kind === EXT.LATE) found.late = lateFrom(extra, value);
    else if (kind === EXT.UNIQUE) found.uniqueUntilNs = value;
  }
  return found;
}

function lateFrom(policy, graceNs) {
  return policy === LATE.FIRE
    ? "fire"
    : [pg.nameOf(LATE, policy).toLowerCase(), Number(graceNs) / 1e6];
}
