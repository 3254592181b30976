// The client of a namespace. Each kind of calls has a file of its own.

import { bulkLoads } from "./bulk_loads.js";
import { groups } from "./groups.js";
import { operations } from "./operations.js";
import { pending } from "./pending.js";
import * as pg from "./protocol.js";
import { schedules } from "./schedules.js";
import { Session } from "./session.js";
import { timers } from "./timers.js";

class Base {
  constructor(daemon, { namespace, worker = "node", graceMs = 0, durable = false }) {
    pg.encodeText("namespace", namespace, 1, pg.PG_NAMESPACE_MAX);
    this.namespace = namespace;
    this.session = new Session(`ipc://${daemon}.cmd`, { worker, graceMs, durable });
  }

  /** End the session. Calls without an answer fail with Closed, and so do the results of operations
   * that have not ended. */
  close() {
    return this.session.close();
  }
}

const calls = [timers, groups, operations, schedules, pending, bulkLoads];

/** The client of a namespace. `daemon` is DIR/NAME, such as "/run/purgatoryd/demo". `worker` names
 * this client in the WAL. The session outlives its process by `graceMs`. `durable`: calls that
 * change something return once the WAL has the change on disk. */
export class Client extends calls.reduce((base, more) => more(base), Base) {}
