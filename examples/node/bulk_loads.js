// Bulk loads: numbered rows, each of which counts once in all runs. addMany() adds the rows.

import * as pg from "./protocol.js";
import { BULK_LOAD, BULK_LOAD_ASK, BULK_LOAD_INFO, BULK_LOAD_PART, LA, M } from "./protocol.js";

const BLOCK_ROWS = 4096n;
const NO_MORE = (1n << 64n) - 1n;

export const bulkLoads = (Base) =>
  class extends Base {
    /** Begin a bulk load, or this run of it. Rows of runs with a lower fencing token are refused
     * from here on. Return its status. */
    async openBulkLoad(id, fencingToken = 0n) {
      return (await this.#askBulkLoad(LA.OPEN, id, fencingToken)).status;
    }

    /** Close a bulk load: it accepts no more rows. Return its status. */
    async closeBulkLoad(id, fencingToken = 0n) {
      return (await this.#askBulkLoad(LA.CLOSE, id, fencingToken)).status;
    }

    /** Forget a bulk load and its rows. Rows that are sent again count again. */
    async forgetBulkLoad(id) {
      await this.#askBulkLoad(LA.FORGET, id);
    }

    /** Return the status of a bulk load: state NONE, OPEN or CLOSED; rows, the number of done rows;
     * upto, 1 + the highest done row; fencingToken; uid; missing(first, upto), which returns the
     * ranges [first, upto) without the done rows. */
    async bulkLoadStatus(id) {
      const blocks = new Map();
      let page;
      for (let from = 0n; from !== NO_MORE; from = page.next) {
        page = await this.#askBulkLoad(LA.STATUS, id, 0n, from);
        for (const [number, bits] of page.blocks) blocks.set(number, bits);
      }
      return {
        ...page.status,
        missing: (first, upto) => missing(blocks, BigInt(first), BigInt(upto)),
      };
    }

    async #askBulkLoad(action, id, fencingToken = 0n, from = 0n) {
      const named = action === LA.OPEN || action === LA.CLOSE;
      const name = Buffer.from(named ? this.namespace : "");
      const ask = BULK_LOAD_ASK.pack({
        bulk_load: pg.checkId("the id of a bulk load", id),
        fencing_token: pg.whole("fencingToken", fencingToken, 0n, NO_MORE),
        from,
        action,
        name_len: name.length,
      });
      const { frame, body } = await this.session.ask(M.BULK_LOAD, Buffer.concat([ask, name]));
      return readPage(new pg.Reader(body), frame.count);
    }
  };

function readPage(reader, count) {
  const info = reader.struct(BULK_LOAD_INFO);
  const blocks = Array.from({ length: count }, () => {
    const bytes = reader.take(BULK_LOAD_PART.size);
    return [BULK_LOAD_PART.unpack(bytes).number, Buffer.from(bytes.subarray(8))];
  });
  const { rows, upto, next, uid, fencing_token: fencingToken } = info;
  const state = pg.nameOf(BULK_LOAD, info.state);
  return { status: { state, rows: Number(rows), upto, fencingToken, uid }, next, blocks };
}

/** Return the ranges of rows from `first` up to `upto` that are not done. */
function missing(blocks, first, upto) {
  const ranges = [];
  for (let row = first; row < upto;) {
    const bits = blocks.get(row / BLOCK_ROWS);
    const blockEnd = (row / BLOCK_ROWS + 1n) * BLOCK_ROWS;
    const end = bits !== undefined ? row + 1n : blockEnd < upto ? blockEnd : upto;
    const last = ranges.at(-1);
    if (bits !== undefined && isSet(bits, Number(row % BLOCK_ROWS))) row = end;
    else if (last?.upto === row) last.upto = row = end;
    else ranges.push({ first: row, upto: (row = end) });
  }
  return ranges;
}

function isSet(bits, bit) {
  return ((bits[bit >> 3] >> (bit & 7)) & 1) === 1;
}
