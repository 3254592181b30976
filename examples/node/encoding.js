// Encode keys, names and times, and decode received bytes.

import { KEY, PG_KEY_MAX, PG_NOMINAL_NONE, PG_PAYLOAD_MAX } from "./constants.js";

const MS_MOST = Number(PG_NOMINAL_NONE / 1_000_000n); // the times of the daemon end at 2^63 - 1 ns

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
  if (typeof ms !== "number" || !(ms >= least && ms <= MS_MOST)) {
    throw new RangeError(`${what} must be a number of milliseconds from ${least} to ${MS_MOST}`);
  }
  return BigInt(Math.round(ms * 1000)) * 1000n;
}

/** Return a wall time, given as a Date or in nanoseconds, in nanoseconds since 1970. */
export function wallNs(what, time) {
  const ns = time instanceof Date ? BigInt(Math.round(time.getTime())) * 1_000_000n : time;
  return whole(what, ns, 0n, PG_NOMINAL_NONE);
}

/** Return a number as a BigInt. Throws RangeError unless it is whole, from `least` to `most`. */
export function whole(what, value, least, most) {
  const exact = typeof value === "bigint" || Number.isSafeInteger(value);
  if (!exact || BigInt(value) < least || BigInt(value) > most) {
    throw new RangeError(`${what} must be a whole number from ${least} to ${most}`);
  }
  return BigInt(value);
}

/** Return a copy of an id. Throws RangeError unless it has 16 bytes that are not all 0. */
export function checkId(what, id) {
  if (!(id instanceof Uint8Array) || id.length !== 16 || id.every((byte) => byte === 0)) {
    throw new RangeError(`${what} must be a Buffer of 16 bytes that are not all 0`);
  }
  return Buffer.from(id);
}

/** Return the numbers of the bits that are set, the lowest bit first. */
export function decodeBitmap(bytes) {
  const numbers = [];
  bytes.forEach((byte, at) => {
    for (let bit = 0; bit < 8; bit++) if ((byte >> bit) & 1) numbers.push(8 * at + bit);
  });
  return numbers;
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
    if (end > this.bytes.length) throw new RangeError("a message of the daemon is truncated");
    const part = this.bytes.subarray(this.at, end);
    this.at = end;
    return part;
  }

  text(length) {
    return this.take(length).toString();
  }
}
