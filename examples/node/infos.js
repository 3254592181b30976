// Decode looked-up timers and operations.

import { refusal } from "./errors.js";
import { decodeItems } from "./items.js";
import * as pg from "./protocol.js";
import { C, INFO, INFO_WATCH, ST } from "./protocol.js";

const NO_TIME = -(1n << 63n);
const REACHED = (1n << 64n) - 1n;
const REFUSED = 16; // statuses from here on are refusals

/** Read a pg_info with its bytes. Return the timer or the operation; null if there is none. */
export function readInfo(reader) {
  const info = reader.struct(INFO);
  reader.take(info.namespace_len);
  const topic = reader.text(info.topic_len);
  const key = pg.decodeKey(info.key_type, reader.take(info.key_len));
  const payload = Buffer.from(reader.take(info.payload_len));
  const extension = reader.take(info.ext_bytes);
  const status = Number(info.ticket & 255n);
  if (status === ST.UNKNOWN) return null;
  if (status >= REFUSED) throw refusal(key, status, 0n, 0n);
  const found = { key, topic, payload, ticket: info.ticket >> 8n, deadlineNs: info.deadline_ns };
  found.wallNs = info.wall_ns === NO_TIME ? null : info.wall_ns;
  found.status = pg.nameOf(ST, status);
  if (info.keys > 0) return { ...found, operation: readOperation(info, extension) };
  if (info.slack_log2 > 0) found.slackNs = 1n << BigInt(info.slack_log2);
  return { ...found, ...decodeItems(extension) };
}

function readOperation(info, bytes) {
  const reader = new pg.Reader(bytes);
  return {
    condition: pg.nameOf(C, info.condition),
    threshold: info.threshold,
    owner: info.owner,
    ownerUid: info.owner_uid === pg.PG_NIL ? null : info.owner_uid,
    keys: Array.from({ length: info.keys }, () => readWatchKey(reader)),
  };
}

function readWatchKey(reader) {
  const { target, cap, watermark, error, own, ...head } = reader.struct(INFO_WATCH);
  const key = pg.decodeKey(head.key_type, reader.take(head.key_len));
  const reached = target === REACHED;
  return { key, target: reached ? null : target, reached, cap, watermark, error, own: own === 1 };
}
