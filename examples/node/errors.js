// Errors of the client. Wrong arguments throw TypeError or RangeError before anything is sent.

import { ERR, GR, ST, nameOf } from "./protocol.js";

/** The base of all errors here. */
export class PurgatorydError extends Error {
  constructor(message) {
    super(message);
    this.name = this.constructor.name;
  }
}

/** The daemon refused a record, and changed nothing. `status` is its name, such as "FULL". */
export class Refused extends PurgatorydError {
  constructor(key, number, ticket, deadlineNs) {
    super(`the daemon refused ${describe(key)}: ${nameOf(ST, number)}`);
    this.key = key;
    this.status = nameOf(ST, number);
    this.number = number;
    this.ticket = ticket; // these two are the figures that docs/protocol.md lists for the status
    this.deadlineNs = deadlineNs;
  }
}

/** The key is armed. `ticket` and `deadlineNs` are those of its timer. */
export class Exists extends Refused {}

/** The budget of a consumer group of the topic is used up. */
export class FullGroup extends Refused {}

/** The lease of a job has ended: another member may have the job. Nothing was changed. */
export class LeaseLost extends PurgatorydError {
  constructor(key, ticket, attempt) {
    super(`the lease of job ${describe(key)}, ticket ${ticket}, attempt ${attempt}, has ended`);
    this.key = key;
    this.ticket = ticket;
    this.attempt = attempt;
  }
}

/** The session expired: the daemon applied the record once, or not at all. */
export class InDoubt extends PurgatorydError {
  constructor(key) {
    super(`the session expired, so it is unknown whether the record of ${describe(key)} counts`);
    this.key = key;
  }
}

/** The daemon refused a whole message. `error` is its name, `detail` has its two figures. */
export class MessageRefused extends PurgatorydError {
  constructor(number, detail) {
    super(`the daemon refused a message: ${nameOf(ERR, number)}, detail ${detail.join(", ")}`);
    this.error = nameOf(ERR, number);
    this.number = number;
    this.detail = detail;
  }
}

/** The daemon refused a request about a schedule, for example with status BAD_SPEC. UNKNOWN: there
 * is no such schedule. */
export class ScheduleRefused extends PurgatorydError {
  constructor(key, number) {
    super(`schedule ${describe(key)}: ${nameOf(ST, number)}`);
    this.key = key;
    this.status = nameOf(ST, number);
  }
}

/** The session of an operation expired, so its outcome is unknown. */
export class SessionExpired extends PurgatorydError {
  constructor() {
    super("the session expired, so the outcome of its operations is unknown");
  }
}

/** The daemon refused a request about a consumer group. `reason` is a name, such as "PENDING". */
export class GroupRefused extends PurgatorydError {
  constructor(group, detail) {
    const reason = nameOf(GR, Number(detail[0]));
    super(`consumer group ${describe(group)}: ${reason}, detail ${detail[1]}`);
    this.group = group;
    this.reason = reason;
    this.detail = detail[1];
  }
}

/** There is no such consumer group. */
export class GroupMissing extends GroupRefused {}

/** The consumer group exists with other settings or topics. */
export class GroupMismatch extends GroupRefused {}

/** The client is closed, or closed before the answer came. */
export class Closed extends PurgatorydError {}

/** Return the error of a record's status. */
export function refusal(key, number, ticket, deadlineNs) {
  const kinds = { [ST.EXISTS]: Exists, [ST.FULL_GROUP]: FullGroup };
  return new (kinds[number] ?? Refused)(key, number, ticket, deadlineNs);
}

/** Return the error of a refused request about a consumer group. */
export function groupRefusal(group, detail) {
  const kinds = { [GR.MISSING]: GroupMissing, [GR.MISMATCH]: GroupMismatch };
  return new (kinds[Number(detail[0])] ?? GroupRefused)(group, detail);
}

function describe(key) {
  return typeof key === "string" ? `"${key}"` : Buffer.from(key).toString("hex");
}
