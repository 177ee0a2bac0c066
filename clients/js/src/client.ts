/** A server, and what one key of it sees. */

import { at, call, type Answer, type CallOptions as Checked, type Method, type PathOf, type Schemas } from "./api.js";
import { errorOf } from "./errors.js";
import { SSE } from "./files.js";
import { Transport, type ConnectOptions } from "./http.js";
import type { paths } from "./schema.js";
import { Sandbox, type CallOptions, type CreateOptions, type Event, type SandboxInfo, type SandboxSpec, type Snapshot } from "./sandbox.js";
import { events } from "./sse.js";

export interface Filter {
  state?: "starting" | "running" | "paused" | "dead" | "ended";
  engine?: string;
  /** How its name begins. */
  name?: string;
  labels?: Record<string, string>;
}

export class Client {
  readonly transport: Transport;

  constructor(options: ConnectOptions = {}) {
    this.transport = new Transport(options);
  }

  /** Any route of the OpenAPI document, checked against it when compiled. */
  async call<M extends Method, P extends PathOf<M>>(
    method: M,
    path: P,
    options: Checked<NonNullable<paths[P][M]>>,
  ): Promise<Answer<NonNullable<paths[P][M]>>> {
    return call(this.transport, method, path, options);
  }

  /** Who the key is, and what it may. */
  async me(options: CallOptions = {}): Promise<Schemas["Me"]> {
    return call(this.transport, "get", "/v1/me", options);
  }

  /** See `Sandbox.create`. */
  async create(spec: SandboxSpec = {}, options: Pick<CreateOptions, "idempotencyKey" | "signal"> = {}): Promise<Sandbox> {
    const headers = { "Idempotency-Key": options.idempotencyKey ?? crypto.randomUUID() };
    const info = await call(this.transport, "post", "/v1/sandboxes", {
      json: spec, headers, again: true, signal: options.signal,
    });
    return new Sandbox(this, info);
  }

  /** The sandbox of that name or id. */
  async connect(ref: string, options: CallOptions = {}): Promise<Sandbox> {
    const { signal } = options;
    return new Sandbox(this, await call(this.transport, "get", "/v1/sandboxes/{box}", { path: { box: ref }, signal }));
  }

  /** All sandboxes that fit, oldest first; pages are read as they are needed. */
  async *list(filter: Filter = {}, options: CallOptions = {}): AsyncGenerator<SandboxInfo, void, undefined> {
    const { labels, ...plain } = filter;
    const label = Object.entries(labels ?? {}).map(([name, value]) => `${name}=${value}`);
    let cursor: string | null | undefined;
    do {
      const query = { ...plain, label, ...(cursor && { cursor }) };
      const page = await call(this.transport, "get", "/v1/sandboxes", { query, signal: options.signal });
      yield* page.items;
      cursor = page.next;
    } while (cursor);
  }

  async templates(options: CallOptions = {}): Promise<Snapshot[]> {
    return (await call(this.transport, "get", "/v1/templates", options)).items;
  }

  async deleteTemplate(name: string, options: CallOptions = {}): Promise<void> {
    await call(this.transport, "delete", "/v1/templates/{name}", { path: { name }, ...options });
  }

  /** What happens to all sandboxes, or to one, from now on. */
  async *events(options: CallOptions & { sandbox?: string } = {}): AsyncGenerator<Event, void, undefined> {
    const box = options.sandbox;
    const where = box === undefined ? at("/v1/events", {}) : at("/v1/sandboxes/{box}/events", { box });
    const body = await this.transport.stream("GET", where, { signal: options.signal, headers: SSE });
    for await (const { event, data } of events(body)) {
      const told: unknown = JSON.parse(data);
      if (event === "error") throw errorOf(told, 500);
      yield told as Event;
    }
  }
}
