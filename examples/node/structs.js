// Structs of docs/protocol.md. tests/test_node_client.py compares them with those of the daemon.

const KINDS = {
  u8: [1, (b, at) => b.readUInt8(at), (b, at, v) => b.writeUInt8(whole(v), at)],
  u16: [2, (b, at) => b.readUInt16LE(at), (b, at, v) => b.writeUInt16LE(whole(v), at)],
  u32: [4, (b, at) => b.readUInt32LE(at), (b, at, v) => b.writeUInt32LE(whole(v), at)],
  u64: [8, (b, at) => b.readBigUInt64LE(at), (b, at, v) => b.writeBigUInt64LE(big(v), at)],
  i64: [8, (b, at) => b.readBigInt64LE(at), (b, at, v) => b.writeBigInt64LE(big(v), at)],
  id: [16, (b, at) => Buffer.from(b.subarray(at, at + 16)), (b, at, v) => b.set(v, at)],
};

/** Return a whole number; Buffer checks its range. */
function whole(value) {
  if (!Number.isSafeInteger(value)) throw new RangeError(`${String(value)} is no whole number`);
  return value;
}

function big(value) {
  return typeof value === "bigint" ? value : BigInt(whole(value));
}

/** A struct: its name in the protocol, its size in bytes, and [kind, offset] of each field. */
class Struct {
  constructor(name, size, fields) {
    this.name = name;
    this.size = size;
    this.fields = Object.entries(fields);
  }

  /** Return the bytes of a struct. Fields that are not given are 0. Throws RangeError for a value
   * that does not fit. */
  pack(values = {}) {
    const bytes = Buffer.alloc(this.size);
    for (const [name, [kind, offset]] of this.fields) {
      if (values[name] !== undefined) KINDS[kind][2](bytes, offset, values[name]);
    }
    return bytes;
  }

  /** Return the fields of the struct at offset `at`. Throws RangeError if it is truncated. */
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
  owner: ["u64", 32],
  threshold: ["u64", 40],
  ext_bytes: ["u32", 48],
  keys: ["u16", 52],
  condition: ["u8", 54],
  slack_log2: ["u8", 55],
  owner_uid: ["u32", 56],
});
export const INFO_WATCH = new Struct("pg_info_watch", 32, {
  target: ["u64", 0],
  cap: ["u64", 8],
  watermark: ["u64", 16],
  error: ["u32", 24],
  key_len: ["u8", 28],
  key_type: ["u8", 29],
  own: ["u8", 30],
});
export const WATCH_KEY = new Struct("pg_watch_key", 24, {
  target: ["u64", 0],
  cap: ["u64", 8],
  key_len: ["u8", 16],
  key_type: ["u8", 17],
  flags: ["u8", 18],
});
export const OUTCOME = new Struct("pg_outcome", 64, {
  ticket: ["u64", 0],
  deadline_ns: ["i64", 8],
  armed_ns: ["i64", 16],
  ended_ns: ["i64", 24],
  version: ["u64", 32],
  error: ["u32", 40],
  payload_len: ["u32", 44],
  keys: ["u16", 48],
  bitmap_bytes: ["u16", 50],
  key_len: ["u8", 52],
  key_type: ["u8", 53],
  slot: ["u32", 56],
});
export const ACK = new Struct("pg_ack", 24, {
  ticket: ["u64", 0],
  version: ["u64", 8],
  slot: ["u32", 16],
});
export const VERDICT = new Struct("pg_verdict", 16, {
  elapsed_ns: ["i64", 0],
  error: ["u32", 8],
  keys: ["u16", 12],
  bitmap_bytes: ["u16", 14],
});
export const SCHEDULE_ASK = new Struct("pg_schedule_ask", 56, {
  action: ["u8", 0],
  namespace_len: ["u8", 1],
  topic_len: ["u8", 2],
  key_len: ["u8", 3],
  spec_len: ["u8", 4],
  zone_len: ["u8", 5],
  overlap: ["u8", 6],
  tag_len: ["u8", 7],
  payload_len: ["u32", 8],
  has_priority: ["u8", 12],
  priority: ["u8", 13],
  repeat: ["u8", 14],
  every_ns: ["i64", 16],
  from: ["i64", 24],
  until: ["i64", 32],
  jitter_ns: ["i64", 40],
  count: ["u64", 48],
});
export const SCHEDULE_REPLY = new Struct("pg_schedule_reply", 24, {
  status: ["u32", 0],
  ticket: ["u64", 8],
  next: ["i64", 16],
});
export const SCHEDULE_INFO = new Struct("pg_schedule_info", 120, {
  revision: ["u64", 0],
  count: ["u64", 8],
  every_ns: ["i64", 16],
  until_ns: ["i64", 24],
  jitter_ns: ["i64", 32],
  armed: ["u64", 40],
  last_ns: ["i64", 48],
  next_ns: ["i64", 56],
  deadline_ns: ["i64", 64],
  put_ns: ["i64", 72],
  ticket: ["u64", 80],
  uid: ["u32", 96],
  payload_len: ["u32", 100],
  state: ["u8", 104],
  topic_len: ["u8", 105],
  key_len: ["u8", 106],
  spec_len: ["u8", 107],
  zone_len: ["u8", 108],
  overlap: ["u8", 109],
  tag_len: ["u8", 110],
  has_priority: ["u8", 111],
  open: ["u32", 112],
  priority: ["u8", 116],
});
export const SELECT = new Struct("pg_select", 32, {
  from_ns: ["i64", 0],
  upto_ns: ["i64", 8],
  tickets: ["u64", 16],
  fields: ["u8", 24],
  key_type: ["u8", 25],
  namespace_len: ["u8", 26],
  prefix_len: ["u8", 27],
  topic_len: ["u8", 28],
  tag_len: ["u8", 29],
});
export const LIST_ASK = new Struct("pg_list_ask", 48, {
  after_ns: ["i64", 0],
  after_ticket: ["u64", 8],
  before_ns: ["i64", 16],
  before_ticket: ["u64", 24],
  slot: ["u32", 32],
  max: ["u32", 36],
  payloads: ["u32", 40],
});
export const LISTED = new Struct("pg_listed", 40, {
  tickets: ["u64", 0],
  matched: ["u64", 8],
  wall_offset_ns: ["i64", 24],
  slot: ["u32", 32],
});
export const SWEEP_ASK = new Struct("pg_sweep_ask", 32, {
  id: ["id", 0],
  time_ns: ["i64", 16],
  action: ["u8", 24],
  change: ["u8", 25],
  time_kind: ["u8", 26],
});
export const SWEEP_INFO = new Struct("pg_sweep_info", 56, {
  id: ["id", 0],
  done: ["u64", 16],
  slot: ["u32", 40],
  slots: ["u32", 44],
  uid: ["u32", 48],
  state: ["u8", 52],
  change: ["u8", 53],
});
export const ROWS = new Struct("pg_rows", 32, {
  bulk_load: ["id", 0],
  first_row: ["u64", 16],
  fencing_token: ["u64", 24],
});
export const BULK_LOAD_ASK = new Struct("pg_bulk_load_ask", 40, {
  bulk_load: ["id", 0],
  fencing_token: ["u64", 16],
  from: ["u64", 24],
  action: ["u32", 32],
  name_len: ["u32", 36],
});
export const BULK_LOAD_INFO = new Struct("pg_bulk_load_info", 56, {
  bulk_load: ["id", 0],
  fencing_token: ["u64", 16],
  rows: ["u64", 24],
  upto: ["u64", 32],
  next: ["u64", 40],
  uid: ["u32", 48],
  state: ["u32", 52],
});
export const BULK_LOAD_PART = new Struct("pg_bulk_load_part", 520, {
  number: ["u64", 0], // the bits of its rows follow
});
export const REPLAY_ASK = new Struct("pg_replay_ask", 40, {
  stream_id: ["u64", 0],
  incarnation: ["u64", 8],
  first: ["u64", 16],
  last: ["u64", 24],
  namespace_len: ["u8", 32],
  topic_len: ["u8", 33],
});
export const REPLAY_INFO = new Struct("pg_replay_info", 16, {
  lost_until: ["u64", 0],
  next: ["u64", 8],
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
