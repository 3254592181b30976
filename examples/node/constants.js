// Limits and numbers of docs/protocol.md. tests/test_node_client.py compares them with the daemon.

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
export const PG_UNIQUE_MAX_NS = 31536000000000000n;
export const PG_SLACK_MAX_NS = 70368744177664n;
export const PG_WORKER_MAX = 63;
export const PG_WATCH_KEYS_MAX = 1024;
export const PG_WATERMARK_MAX = 9223372036854775807n;
export const PG_TARGET_MAX = 9223372036854775806n;
export const PG_SCHEDULE_KEY_MAX = 234;
export const PG_SPEC_MAX = 255;
export const PG_ZONE_MAX = 63;
export const PG_NOMINAL_MAX = 256;
export const PG_NOMINAL_NONE = 9223372036854775807n;
export const PG_NOMINAL_UNKNOWN = -9223372036854775807n;
export const PG_BULK_LOAD_ROW_MAX = 9223372036854775807n;
export const PG_NIL = 4294967295;
export const PG_GROUP_NAME_MAX = 63;
export const PG_GROUP_TOPICS_MAX = 64;
export const PG_CREDITS_MAX = 16384;
export const PG_JOB_ERROR_MAX = 1024;

// The names of the protocol without their prefix, such as PG_M_HELLO.
export const M = {
  HELLO: 1,
  BATCH: 2,
  QUERY: 3,
  BYE: 4,
  PING: 5,
  OUTCOMES: 6,
  ACK: 7,
  BULK_LOAD: 8,
  LIST: 10,
  SWEEP: 11,
  GROUP: 12,
  JOBS: 13,
  DEAD: 14,
  SCHEDULE: 15,
  REPLAY: 17,
  STATS: 18,
};
export const OP = {
  PUT: 1,
  CANCEL: 2,
  GET: 3,
  WATCH: 4,
  ADVANCE_KEY: 5,
  BUMP: 6,
  FAIL: 7,
  CLEAR: 8,
  FORGET: 9,
  CANCEL_FOR_KEY: 10,
  COMPLETE: 11,
  UNPARK: 12,
  JOIN: 13,
  JOB_ACK: 14,
  JOB_NACK: 15,
  JOB_EXTEND: 16,
  JOB_RELEASE: 17,
  JOB_REJECT: 18,
};
export const W = { DURABLE: 2, BULK_LOAD: 16 };
export const MODE = { ERROR: 0, REPLACE: 1, KEEP: 2, EXTEND: 3 };
export const T = { BOOT: 0, DELAY: 1, WALL: 2 };
export const EXT = { TAG: 2, SCHEDULE: 3, PRIORITY: 4, ORDER: 5, LATE: 6, UNIQUE: 7 };
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
  MORE: 11,
  BULK_LOADED: 12,
  PARKED: 13,
  UNPARKED: 14,
  LEASED: 15,
  FULL: 16,
  FULL_PAYLOAD: 17,
  FULL_NAMESPACES: 18,
  FULL_TOPICS: 19,
  FULL_TICKETS: 20,
  FULL_KEYS: 21,
  FULL_WATCHES: 22,
  FULL_ACCOUNTS: 23,
  TOO_FAR: 24,
  DENIED: 25,
  BUSY: 26,
  QUOTA: 27,
  DUPLICATE: 29,
  OVERFLOW: 30,
  WAL: 31,
  STOPPING: 32,
  FULL_BULK_LOADS: 33,
  FENCED: 34,
  CLOSED: 35,
  ARENA: 36,
  FULL_GROUP: 37,
  LEASE_LOST: 38,
  NO_GROUP: 39,
  FULL_MEMBERS: 40,
  FULL_SCHEDULES: 45,
  BAD_SPEC: 46,
  NO_OCCURRENCE: 47,
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
  NAMESPACES_FULL: 15,
  NOT_DURABLE: 16,
  BUSY: 17,
  BULK_LOADS_FULL: 18,
  FENCED: 19,
  WRONG_SHARD: 20,
  QUOTA: 22,
  GROUP: 23,
  SCHEDULE: 25,
  CURSOR: 26,
};
export const E = { SUPERSEDED: 1, LATE: 2, OPERATION: 4, SCHEDULE: 8 };
export const C = { ALL: 0, ANY: 1, SUM: 2, CLIENT: 3, QUORUM: 4 };
export const WK = { OWN: 1 };
export const SEL = { PREFIX: 1, TOPIC: 2, TAG: 4 };
export const SW = { NONE: 0, RUNNING: 1, DONE: 2, STOPPED: 3, CUT: 4 };
export const SC = { CANCEL: 0, SHIFT: 1, MOVE: 2 };
// Actions of SCHEDULE, then those of SWEEP.
export const SA = {
  PUT: 0,
  GET: 1,
  LIST: 2,
  DELETE: 3,
  PAUSE: 4,
  RESUME: 5,
  TRIGGER: 6,
  BACKFILL: 7,
  NEXT: 8,
  STATUS: 0,
  BEGIN: 1,
  STOP: 2,
};
export const SCHEDULE = { NONE: 0, ACTIVE: 1, PAUSED: 2 };
export const OVERLAP = { ALLOW: 0, SKIP: 1, QUEUE: 2, DELAY: 3 };
export const LA = { STATUS: 0, OPEN: 1, CLOSE: 2, FORGET: 3 };
export const BULK_LOAD = { NONE: 0, OPEN: 1, CLOSED: 2 };
export const GA = { CREATE: 0, DESCRIBE: 1, CHANGE: 2, DELETE: 3, PAUSE: 4, RESUME: 5 };
export const G = { ORDERED: 1, BLOCK: 2, DROP_OLDEST: 4, PAUSED: 8 };
export const GR = { MISSING: 1, MISMATCH: 2, ROWS: 3, JOBS: 4, PENDING: 5, SETTINGS: 6 };
export const DA = { LIST: 0, REQUEUE: 1, DROP: 2 };
export const JR = { NONE: 0, MAX_ATTEMPTS: 1, REJECTED: 2, TOO_OLD: 3 };
