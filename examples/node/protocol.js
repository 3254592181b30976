// Structs and constants of docs/protocol.md. tests/test_node_client.py compares this file with the
// layout of the daemon.

const KINDS = {
  u8: [1, (b, at) => b.readUInt8(at), (b, at, v) => b.writeUInt8(v, at)],
  u16: [2, (b, at) => b.readUInt16LE(at), (b, at, v) => b.writeUInt16LE(v, at)],
  u32: [4, (b, at) => b.readUInt32LE(at), (b, at, v) => b.writeUInt32LE(v, at)],
  u64: [8, (b, at) => b.readBigUInt64LE(at), (b, at, v) => b.writeBigUInt64LE(BigInt(v), at)],
  i64: [8, (b, at) => b.readBigInt64LE(at), (b, at, v) => b.writeBigInt64LE(BigInt(v), at)],
};

/** A struct: its name in the protocol, its size in bytes, and [kind, offset] of each field. */
class Struct {
  constructor(name, size, fields) {
    this.name = name;
    this.size = size;
    this.fields = Object.entries(fields);
  }

  /** Return the bytes of a struct. Fields that are not given are 0. */
  pack(values = {}) {
    const bytes = Buffer.alloc(this.size);
    for (const [name, [kind, offset]] of this.fields) {
      if (values[name] !== undefined) KINDS[kind][2](bytes, offset, values[name]);
    }
    return bytes;
  }

  /** Return the fields of the struct at offset `at`. Throws RangeError if it is cut off. */
  unpack(bytes, at = 0) {
    const values = {};
    for (const [name, [kind, offset]] of this.fields) {
      values[name] = KINDS[kind][1](bytes, at + offset);
    }
    return values;
  }
}

export const FRAME = new Struct("pg_frame", 64, {
  magic: ["u32", 0],
  version: ["u16", 4],
  message: ["u16", 6],
  session: ["u64", 8],
  sequence: ["u64", 16],
  count: ["u32", 24],
  names: ["u16", 28],
  error: ["u16", 30],
  names_bytes: ["u32", 32],
  flags: ["u32", 36],
  at_ns: ["i64", 40],
  detail: ["u64", 48], // the first of two
});
export const DETAIL_1 = 56; // offset of the second figure of `detail`

export const HELLO = new Struct("pg_hello", 32, {
  name_len: ["u32", 16], // after a nonce of 16 bytes
  grace_ns: ["i64", 24],
});
export const WELCOME = new Struct("pg_welcome", 136, {
  session: ["u64", 0],
  stream_id: ["u64", 8],
  epoch: ["u64", 40],
  last: ["u64", 64],
  clock_kind: ["u32", 80],
  window: ["u32", 84],
  batch_records: ["u32", 88],
  message_bytes: ["u32", 92],
});
export const RECORD = new Struct("pg_record", 32, {
  op: ["u8", 0],
  mode: ["u8", 1],
  key_type: ["u8", 2],
  key_len: ["u8", 3],
  name: ["u16", 4],
  time_kind: ["u8", 6],
  flags: ["u8", 7],
  payload_len: ["u32", 8],
  ext_len: ["u32", 12],
  time_ns: ["i64", 16],
  value: ["u64", 24],
});
export const ITEM = new Struct("pg_ext", 16, {
  kind: ["u32", 0],
  extra: ["u32", 4],
  value: ["i64", 8],
});
export const RESULT = new Struct("pg_result", 16, { ticket: ["u64", 0], deadline_ns: ["i64", 8] });
export const INFO = new Struct("pg_info", 64, {
  ticket: ["u64", 0],
  deadline_ns: ["i64", 8],
  wall_ns: ["i64", 16],
  payload_len: ["u32", 24],
  key_len: ["u8", 28],
  key_type: ["u8", 29],
  namespace_len: ["u8", 30],
  topic_len: ["u8", 31],
  ext_bytes: ["u32", 48],
});
export const NOTICES = new Struct("pg_notices", 64, {
  magic: ["u32", 0],
  version: ["u16", 4],
  stream_id: ["u64", 8],
  incarnation: ["u64", 16],
  first: ["u64", 24],
  tail: ["u64", 32],
  wall_offset_ns: ["i64", 48],
  count: ["u32", 56],
});
export const NOTICE = new Struct("pg_notice", 40, {
  ticket: ["u64", 0],
  deadline_ns: ["i64", 8],
  fired_ns: ["i64", 16],
  payload_len: ["u32", 24],
  key_len: ["u8", 28],
  key_type: ["u8", 29],
  cause: ["u8", 30],
  flags: ["u8", 31],
  missed: ["u32", 32],
});
export const LEASE = new Struct("pg_lease", 16, {
  ticket: ["u64", 0],
  row: ["u32", 8],
  lease: ["u32", 12],
});
export const JOB_INFO = new Struct("pg_job_info", 80, {
  ticket: ["u64", 0],
  deadline_ns: ["i64", 8],
  fired_ns: ["i64", 16],
  lease_ends_ns: ["i64", 24],
  now_ns: ["i64", 32],
  wall_offset_ns: ["i64", 40],
  row: ["u32", 48],
  lease: ["u32", 52],
  attempt: ["u32", 56],
  group: ["u32", 60],
  payload_len: ["u32", 64],
  key_len: ["u8", 68],
  key_type: ["u8", 69],
  flags: ["u8", 70],
  topic_len: ["u8", 71],
  priority: ["u8", 72],
  missed: ["u32", 76],
});
const SETTINGS = {
  max_jobs: ["u64", 0],
  max_bytes: ["u64", 8],
  retention_ns: ["i64", 16],
  max_lease_ns: ["i64", 24],
  backoff_base_ns: ["i64", 32],
  backoff_cap_ns: ["i64", 40],
  rate: ["u64", 48],
  max_attempts: ["u32", 56],
  max_dead: ["u32", 60],
  flags: ["u32", 64],
};
export const GROUP_SETTINGS = new Struct("pg_group_settings", 72, SETTINGS);
export const GROUP_ASK = new Struct("pg_group_ask", 88, {
  ...SETTINGS, // a pg_group_settings at offset 0
  action: ["u32", 72],
  topics: ["u32", 76],
  earliest: ["u8", 80],
  namespace_len: ["u8", 81],
  name_len: ["u8", 82],
});
export const GROUP_INFO = new Struct("pg_group_info", 176, {
  ...SETTINGS,
  pending: ["u64", 72],
  waiting: ["u64", 80],
  leased: ["u64", 88],
  delayed: ["u64", 96],
  dead: ["u64", 104],
  bytes: ["u64", 112],
  acked: ["u64", 120],
  retried: ["u64", 128],
  dropped: ["u64", 136],
  oldest_ns: ["i64", 144],
  created_ns: ["i64", 152],
  row: ["u32", 160],
  members: ["u32", 164],
  topics: ["u32", 168],
  namespace_len: ["u8", 172],
  name_len: ["u8", 173],
});
export const DEAD_ASK = new Struct("pg_dead_ask", 32, {
  ticket: ["u64", 0],
  after: ["u64", 8],
  action: ["u32", 16],
  most: ["u32", 20],
  namespace_len: ["u8", 24],
  name_len: ["u8", 25],
});
export const DEAD_INFO = new Struct("pg_dead_info", 80, {
  ticket: ["u64", 0],
  deadline_ns: ["i64", 8],
  fired_ns: ["i64", 16],
  first_failed_ns: ["i64", 24],
  last_failed_ns: ["i64", 32],
  wall_offset_ns: ["i64", 40],
  attempts: ["u32", 48],
  reason: ["u32", 52],
  payload_len: ["u32", 56],
  error_len: ["u32", 60],
  key_len: ["u8", 64],
  key_type: ["u8", 65],
  flags: ["u8", 66],
  topic_len: ["u8", 67],
  priority: ["u8", 68],
});

export const WIRE_MAGIC = 0x51434750;
export const NOTICE_MAGIC = 0x4e434750;
export const VERSION = 1;
export const PG_BATCH_RECORDS = 1024;
export const PG_BATCH_NAMES = 256;
export const PG_MESSAGE_MAX = 8388608;
export const PG_KEY_MAX = 255;
export const PG_PAYLOAD_MAX = 65536;
export const PG_NAMESPACE_MAX = 63;
export const PG_TOPIC_MAX = 127;
export const PG_TAG_MAX = 63;
export const PG_PRIORITY_MAX = 9;
export const PG_WORKER_MAX = 63;
export const PG_GROUP_NAME_MAX = 63;
export const PG_GROUP_TOPICS_MAX = 64;
export const PG_CREDITS_MAX = 16384;
export const PG_JOB_ERROR_MAX = 1024;

// The names of the protocol without their prefix, such as PG_M_HELLO.
export const M = { HELLO: 1, BATCH: 2, QUERY: 3, BYE: 4, PING: 5, GROUP: 12, JOBS: 13, DEAD: 14 };
export const OP = {
  PUT: 1,
  CANCEL: 2,
  GET: 3,
  JOIN: 13,
  JOB_ACK: 14,
  JOB_NACK: 15,
  JOB_EXTEND: 16,
  JOB_RELEASE: 17,
  JOB_REJECT: 18,
};
export const W = { DURABLE: 2 };
export const MODE = { ERROR: 0, REPLACE: 1, KEEP: 2, EXTEND: 3 };
export const T = { BOOT: 0, DELAY: 1, WALL: 2 };
export const EXT = { TAG: 2, PRIORITY: 4, ORDER: 5, LATE: 6, UNIQUE: 7 };
export const LATE = { FIRE: 0, SKIP: 1, COALESCE: 2 };
export const KEY = { STR: 0, BYTES: 1, UUID: 2 };
export const CLOCK = { BOOT: 0, VIRTUAL: 1 };
export const CAUSE = { EXPIRED: 1, SATISFIED: 2, FAILED: 3, CANCELLED: 4, PUBLISHED: 5 };
export const ST = {
  ADDED: 1,
  REPLACED: 2,
  KEPT: 3,
  EXTENDED: 4,
  EXISTS: 5,
  CANCELLED: 6,
  FIRED: 7,
  UNKNOWN: 8,
  FOUND: 9,
  DONE: 10,
  PARKED: 13,
  LEASED: 15,
  FULL: 16,
  FULL_PAYLOAD: 17,
  FULL_NAMESPACES: 18,
  FULL_TOPICS: 19,
  FULL_TICKETS: 20,
  FULL_ACCOUNTS: 23,
  TOO_FAR: 24,
  DENIED: 25,
  BUSY: 26,
  QUOTA: 27,
  WAL: 31,
  STOPPING: 32,
  ARENA: 36,
  FULL_GROUP: 37,
  LEASE_LOST: 38,
  NO_GROUP: 39,
  FULL_MEMBERS: 40,
};
export const ERR = {
  MALFORMED: 1,
  VERSION: 2,
  UNKNOWN_MESSAGE: 3,
  TOO_LARGE: 4,
  SESSION_EXPIRED: 5,
  OUT_OF_ORDER: 6,
  STALE: 7,
  CHANGED: 8,
  SESSIONS_FULL: 9,
  DENIED: 10,
  STOPPING: 11,
  CLOCK: 12,
  INTERNAL: 13,
  NO_WAL: 14,
  NOT_DURABLE: 16,
  BUSY: 17,
  WRONG_SHARD: 20,
  QUOTA: 22,
  GROUP: 23,
};
export const GA = { CREATE: 0, DESCRIBE: 1, CHANGE: 2, DELETE: 3, PAUSE: 4, RESUME: 5 };
export const G = { ORDERED: 1, BLOCK: 2, DROP_OLDEST: 4, PAUSED: 8 };
export const GR = { MISSING: 1, MISMATCH: 2, ROWS: 3, JOBS: 4, PENDING: 5, SETTINGS: 6 };
export const DA = { LIST: 0, REQUEUE: 1, DROP: 2 };
export const JR = { NONE: 0, MAX_ATTEMPTS: 1, REJECTED: 2, TOO_OLD: 3 };

/** Return the name of a number, or the number if it has no name here. */
export function nameOf(numbers, number) {
  return Object.keys(numbers).find((name) => numbers[name] === number) ?? String(number);
}

/** Return key type and bytes of a key: a string, or a Buffer. */
export function encodeKey(key) {
  if (typeof key === "string") return [KEY.STR, encodeText("key", key, 1, PG_KEY_MAX)];
  if (!(key instanceof Uint8Array)) throw new TypeError("a key is a string or a Buffer");
  if (key.length < 1 || key.length > PG_KEY_MAX) throw new RangeError(`a key has 1 to 255 bytes`);
  return [KEY.BYTES, Buffer.from(key)];
}

/** Return a received key: a string, or a Buffer of the types BYTES and UUID. */
export function decodeKey(type, bytes) {
  return type === KEY.STR ? bytes.toString() : Buffer.from(bytes);
}

/** Return the UTF-8 bytes of a name. Throws RangeError unless it has `least` to `most` bytes. */
export function encodeText(what, text, least, most) {
  if (typeof text !== "string") throw new TypeError(`the ${what} is not a string`);
  const bytes = Buffer.from(text);
  if (bytes.length < least || bytes.length > most || text.includes("\0") || !isWellFormed(text)) {
    throw new RangeError(`the ${what} must have ${least} to ${most} bytes of UTF-8 without NUL`);
  }
  return bytes;
}

function isWellFormed(text) {
  return !/[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/.test(text);
}

/** Return the bytes of a payload: a string, a Buffer, or nothing. */
export function encodePayload(payload, most = PG_PAYLOAD_MAX) {
  const bytes = typeof payload === "string" ? Buffer.from(payload) : Buffer.from(payload ?? []);
  if (bytes.length > most) throw new RangeError(`a payload has at most ${most} bytes`);
  return bytes;
}

/** Return milliseconds in whole nanoseconds. */
export function nanoseconds(what, ms, least = 0) {
  if (typeof ms !== "number" || !Number.isFinite(ms) || ms < least) {
    throw new RangeError(`${what} must be a number of milliseconds, at least ${least}`);
  }
  return BigInt(Math.round(ms * 1000)) * 1000n;
}

/** Cuts a received body into its parts. Throws RangeError if a part is missing. */
export class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  struct(kind) {
    return kind.unpack(this.take(kind.size));
  }

  take(length) {
    const end = this.at + length;
    if (end > this.bytes.length) throw new RangeError("a message of the daemon is cut off");
    const part = this.bytes.subarray(this.at, end);
    this.at = end;
    return part;
  }

  text(length) {
    return this.take(length).toString();
  }
}
