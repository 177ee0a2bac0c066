/** Client of a Sloplet server. See README.md; the fields of requests and answers are those of the HTTP API. */

export { Client, type Filter } from "./client.js";
export { image, type CodeContext, type CodeOptions, type CodeResult, type RichResult } from "./code.js";
export * from "./errors.js";
export type { Content, FileChange, FileInfo, FileOptions, LookOptions, ReadOptions, WriteOptions } from "./files.js";
export type { ConnectOptions } from "./http.js";
export type { Command, ExecOptions, Output, Process, RunOptions, SpawnOptions } from "./process.js";
export { Result } from "./results.js";
export { Sandbox } from "./sandbox.js";
export type {
  CreateOptions, Event, Memory, NetworkPolicy, ProcessInfo, SandboxInfo, SandboxSpec, Snapshot,
} from "./sandbox.js";
export type { Schemas } from "./api.js";
