// A client of purgatoryd for Node, written from docs/protocol.md. README.md shows how to use it.

export { Client } from "./client.js";
export { Consumer } from "./consumer.js";
export { Operation, allOf, anyOf, quorum, sumOf, when } from "./operations.js";
export { PastNotices } from "./past.js";
export { Subscriber } from "./subscriber.js";
export * from "./errors.js";
