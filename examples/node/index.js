// A client of purgatoryd for Node, written from docs/protocol.md. README.md shows how to use it.

export { Client } from "./client.js";
export { Consumer } from "./consumer.js";
export { Subscriber } from "./subscriber.js";
export * from "./errors.js";
