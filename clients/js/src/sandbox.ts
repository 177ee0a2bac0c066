/** What users hold: a sandbox of a server. */

import { at, call, type Schemas } from "./api.js";
import { Client } from "./client.js";
import { code, Contexts, type CodeOptions, type CodeResult } from "./code.js";
import { SandboxClosed } from "./errors.js";
import { bodyOf, Files, type Content } from "./files.js";
import type { ConnectOptions, Transport } from "./http.js";
import {
  attach, output, run, spawn, start, type Command, type Output, type Process, type RunOptions, type SpawnOptions,
} from "./process.js";
import type { Result } from "./results.js";

/** What a sandbox is to be: as the HTTP API has it, which is as Python's `Sandbox(...)` has it. */
export type SandboxSpec = Schemas["SandboxCreate"];
export type SandboxInfo = Schemas["SandboxInfo"];
export type Snapshot = Schemas["Snapshot"];
export type ProcessInfo = Schemas["Process"];
export type NetworkPolicy = Schemas["NetworkDocument"];
/** Something that happened to a sandbox: docs/api.md lists the types. */
export interface Event {
  time: number;
  sandbox: string;
  type: string;
  data: Record<string, unknown>;
}

export interface CallOptions {
  signal?: AbortSignal;
}

export interface Memory {
  /** false: only the files are saved, which every engine can; nothing runs when it starts from them. */
  memory?: boolean;
}

export interface CreateOptions extends ConnectOptions, CallOptions {
  /** One that is there already; else one is made of the other options. */
  client?: Client;
  /** Asked again with the same key and settings, the answer is the same sandbox. Default: one of our own, for retries. */
  idempotencyKey?: string;
}

export class Sandbox implements AsyncDisposable {
  readonly files: Files;
  readonly contexts: Contexts;
  readonly network: Network;
  private closed = false;
  private known: SandboxInfo;

  /** Use `Sandbox.create` and `Sandbox.connect`. */
  constructor(
    readonly client: Client,
    info: SandboxInfo,
  ) {
    this.known = info;
    this.files = new Files(client.transport, info.id);
    this.contexts = new Contexts(client.transport, info.id);
    this.network = new Network(client.transport, info.id);
  }

  /** Make a sandbox and start it. With a `name` and `reuse: true`: that one, if it is there with these settings. */
  static async create(spec: SandboxSpec = {}, options: CreateOptions = {}): Promise<Sandbox> {
    return (options.client ?? new Client(options)).create(spec, options);
  }

  /** The sandbox of that name or id, as it is. */
  static async connect(ref: string, options: CreateOptions = {}): Promise<Sandbox> {
    return (options.client ?? new Client(options)).connect(ref, options);
  }

  /** All there are, as pages are read. */
  static list(
    filter: Parameters<Client["list"]>[0] = {},
    options: CreateOptions = {},
  ): AsyncGenerator<SandboxInfo, void, undefined> {
    return (options.client ?? new Client(options)).list(filter, options);
  }

  /** Start what `export` gave, as a new sandbox. */
  static async load(archive: Content, options: CreateOptions & { name?: string } = {}): Promise<Sandbox> {
    const client = options.client ?? new Client(options);
    const { name, signal } = options;
    const where = at("/v1/sandboxes/import", {});
    const query = { name };
    return new Sandbox(client, await client.transport.json("POST", where, { query, body: bodyOf(archive), signal }));
  }

  get id(): string {
    return this.known.id;
  }

  get name(): string | null {
    return this.known.name;
  }

  /** What was last heard of it; `refresh()` asks. */
  get info(): SandboxInfo {
    return this.known;
  }

  async refresh(options: CallOptions = {}): Promise<SandboxInfo> {
    return (this.known = await call(this.transport, "get", "/v1/sandboxes/{box}", this.of(options)));
  }

  // -- commands and code -------------------------------------------------------

  /** Run a command to its end. A string goes to /bin/sh, a list is the argument vector. Never sent twice. */
  async run(command: Command, options: RunOptions = {}): Promise<Result> {
    return run(this.transport, this.open(), command, options);
  }

  /** Start a command and follow it. Terminals and stdin need a WebSocket: see `ConnectOptions.WebSocket`. */
  async spawn(command: Command, options: SpawnOptions = {}): Promise<Process> {
    return spawn(this.transport, this.open(), command, options);
  }

  /** Start a command that goes on without anybody, until it or the sandbox ends. */
  async start(command: Command, options: Parameters<typeof start>[3] = {}): Promise<ProcessInfo> {
    return start(this.transport, this.open(), command, options);
  }

  /** What a process writes, from what is kept of it on; `follow: false`: only what is there. It is never held up. */
  output(pid: number, options: Parameters<typeof output>[3] = {}): AsyncGenerator<Output, void, undefined> {
    return output(this.transport, this.open(), pid, options);
  }

  /** Send a signal to a process and everything it started. */
  async signal(pid: number, signal: string | number = "TERM", options: CallOptions & { tree?: boolean } = {}): Promise<void> {
    const { tree = true, ...rest } = options;
    const path = { box: this.open(), pid };
    const json = { signal, tree };
    await call(this.transport, "post", "/v1/sandboxes/{box}/processes/{pid}/signal", { path, json, ...rest });
  }

  /** Follow a process by its pid: what is kept of its output, then what comes. Needs a WebSocket. */
  async attach(pid: number, options: Parameters<typeof attach>[3] = {}): Promise<Process> {
    return attach(this.transport, this.open(), pid, options);
  }

  /** Every process started through the API, running or ended lately. */
  async processes(options: CallOptions = {}): Promise<ProcessInfo[]> {
    return (await call(this.transport, "get", "/v1/sandboxes/{box}/processes", this.of(options))).items;
  }

  /** Run a cell of code where variables stay. */
  async code(source: string, options: CodeOptions = {}): Promise<CodeResult> {
    return code(this.transport, this.open(), source, options);
  }

  // -- its state ---------------------------------------------------------------

  /**
   * From now on it has that long to live (seconds, or "10m"); null: for ever; 0: not any more. Then it ends, or sleeps
   * where `on_ttl` says so.
   */
  async setTtl(ttl: number | string | null, options: CallOptions = {}): Promise<SandboxInfo> {
    const json = { ttl };
    return (this.known = await call(this.transport, "put", "/v1/sandboxes/{box}/ttl", { ...this.of(options), json }));
  }

  /** Write memory and disk, and free everything else. It wakes when it is used. `memory: false`: only its files. */
  async pause(options: CallOptions & Memory = {}): Promise<SandboxInfo> {
    const { memory, ...rest } = options;
    const json = { memory: memory ?? true };
    return (this.known = await call(this.transport, "post", "/v1/sandboxes/{box}/pause", { ...this.of(rest), json }));
  }

  async resume(options: CallOptions = {}): Promise<SandboxInfo> {
    return (this.known = await call(this.transport, "post", "/v1/sandboxes/{box}/resume", this.of(options)));
  }

  /** Save its state now, and run on. `memory: false`: only its files. */
  async snapshot(name?: string, options: CallOptions & Memory = {}): Promise<Snapshot> {
    const { memory, ...rest } = options;
    const json = { memory: memory ?? true, ...(name !== undefined && { name }) };
    return call(this.transport, "post", "/v1/sandboxes/{box}/snapshots", { ...this.of(rest), json });
  }

  /** Save its state as a template, which stays when this one is gone. */
  async template(name: string, options: CallOptions & Memory = {}): Promise<Snapshot> {
    const { memory, ...rest } = options;
    const json = { sandbox: this.open(), name, memory: memory ?? true };
    return call(this.transport, "post", "/v1/templates", { json, ...rest });
  }

  /** Its snapshots, oldest first. */
  async snapshots(options: CallOptions = {}): Promise<Snapshot[]> {
    return (await call(this.transport, "get", "/v1/sandboxes/{box}/snapshots", this.of(options))).items;
  }

  /** Be as it was at one of its snapshots: same id, same name. */
  async rollback(snapshot: string | Snapshot, options: CallOptions = {}): Promise<SandboxInfo> {
    const json = { snapshot: idOf(snapshot) };
    return (this.known = await call(this.transport, "post", "/v1/sandboxes/{box}/rollback", {
      ...this.of(options), json,
    }));
  }

  /** Be as before the last command, or the `steps`-th last. Needs `undo` in its settings. */
  async undo(steps = 1, options: CallOptions = {}): Promise<Snapshot> {
    return call(this.transport, "post", "/v1/sandboxes/{box}/undo", { ...this.of(options), json: { steps } });
  }

  /** Running copies, of how it is now or was at a snapshot. */
  async fork(
    count = 1,
    options: CallOptions & { names?: string[]; snapshot?: string | Snapshot; ttl?: number | string } = {},
  ): Promise<Sandbox[]> {
    const { names, snapshot, ttl, signal } = options;
    const json = {
      count, ...(names && { names }), ...(snapshot !== undefined && { snapshot: idOf(snapshot) }),
      ...(ttl !== undefined && { ttl }),
    };
    const headers = { "Idempotency-Key": crypto.randomUUID() };
    const made = await call(this.transport, "post", "/v1/sandboxes/{box}/fork", {
      ...this.of({}), json, headers, again: true, signal,
    });
    return made.items.map((info) => new Sandbox(this.client, info));
  }

  /** Files added, changed and removed since its image, or since one of its snapshots. */
  async diff(
    against?: string | Snapshot,
    options: CallOptions & { text?: boolean } = {},
  ): Promise<Schemas["Diff"]> {
    const { signal, text } = options;
    const query = { ...(against !== undefined && { against: idOf(against) }), ...(text !== undefined && { text }) };
    return call(this.transport, "get", "/v1/sandboxes/{box}/diff", { ...this.of({}), query, signal });
  }

  /** The sandbox as one archive, for `Sandbox.load`; `image`: with its image inside (the default). */
  async export(options: CallOptions & { image?: boolean } = {}): Promise<ReadableStream<Uint8Array>> {
    const where = at("/v1/sandboxes/{box}/export", { box: this.open() });
    return this.transport.stream("GET", where, { query: { image: options.image }, signal: options.signal });
  }

  // -- what is going on --------------------------------------------------------

  /** The address of a port inside. Private, by a token that is in it, unless `public`. */
  async url(port: number, options: CallOptions & { public?: boolean } = {}): Promise<string> {
    const { url, token } = await this.publish(port, options);
    if (token === null) return url;
    const whole = new URL(url);
    whole.searchParams.set("sloplet_token", token);
    return whole.href;
  }

  /** The same in parts: the URL, and the token that `Sloplet-Token` takes. */
  async publish(port: number, options: CallOptions & { public?: boolean } = {}): Promise<Schemas["PortPublished"]> {
    const { signal, ...json } = options;
    const path = { box: this.open(), port };
    return call(this.transport, "put", "/v1/sandboxes/{box}/ports/{port}", { path, json, signal });
  }

  /** Take the address of a port back. */
  async unpublish(port: number, options: CallOptions = {}): Promise<void> {
    const path = { box: this.open(), port };
    await call(this.transport, "delete", "/v1/sandboxes/{box}/ports/{port}", { path, ...options });
  }

  async guarantees(options: CallOptions = {}): Promise<Schemas["Guarantee"][]> {
    return (await call(this.transport, "get", "/v1/sandboxes/{box}/guarantees", this.of(options))).items;
  }

  async metrics(options: CallOptions = {}): Promise<Schemas["Metrics"]> {
    return call(this.transport, "get", "/v1/sandboxes/{box}/metrics", this.of(options));
  }

  /** What happens to it from now on. */
  events(options: CallOptions = {}): AsyncGenerator<Event, void, undefined> {
    return this.client.events({ ...options, sandbox: this.open() });
  }

  /** Where the values of its secrets come from; never read back. null: forget it. */
  async setSecrets(values: Record<string, string | null>, options: CallOptions = {}): Promise<void> {
    await call(this.transport, "put", "/v1/sandboxes/{box}/secrets", { ...this.of(options), json: { values } });
  }

  // -- its end -----------------------------------------------------------------

  /** End it and remove all it had. Idempotent. */
  async kill(options: CallOptions = {}): Promise<void> {
    this.closed = true;
    const path = { box: this.known.id };
    await call(this.transport, "delete", "/v1/sandboxes/{box}", { path, again: true, ...options });
  }

  /** Let go: one without a name ends, a named one is paused where its engine can. `await using` does it. Idempotent. */
  async close(options: CallOptions = {}): Promise<void> {
    if (this.closed) return;
    if (this.name === null) return this.kill(options);
    this.closed = true;
    await call(this.transport, "post", "/v1/sandboxes/{box}/release", { path: { box: this.known.id }, ...options });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  private get transport(): Transport {
    return this.client.transport;
  }

  private open(): string {
    if (this.closed) throw new SandboxClosed("this sandbox object was closed", { hint: "make a new one, or connect" });
    return this.known.id;
  }

  private of(options: CallOptions): CallOptions & { path: { box: string } } {
    return { path: { box: this.open() }, ...options };
  }
}

/** `box.network`: what it may reach. */
export class Network {
  constructor(
    private readonly transport: Transport,
    private readonly box: string,
  ) {}

  async get(options: CallOptions = {}): Promise<NetworkPolicy> {
    return call(this.transport, "get", "/v1/sandboxes/{box}/network", { path: { box: this.box }, ...options });
  }

  /** Another policy, at once; open connections that it does not allow are cut. */
  async set(policy: Schemas["NetworkAsked"], options: CallOptions = {}): Promise<NetworkPolicy> {
    return call(this.transport, "put", "/v1/sandboxes/{box}/network", { path: { box: this.box }, json: policy, ...options });
  }

  /** What was asked for and how it was decided, oldest first. */
  async log(options: CallOptions & { after?: number; limit?: number } = {}): Promise<Schemas["Decision"][]> {
    const { signal, ...query } = options;
    const path = { box: this.box };
    return (await call(this.transport, "get", "/v1/sandboxes/{box}/network/log", { path, query, signal })).items;
  }
}

function idOf(snapshot: string | Snapshot): string {
  return typeof snapshot === "string" ? snapshot : snapshot.id;
}
