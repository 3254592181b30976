// The protocol of docs/protocol.md.

export * from "./constants.js";
export * from "./encoding.js";
export * from "./structs.js";
