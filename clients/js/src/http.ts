/**
 * Requests to a server: the key, errors as classes, and what may be tried again.
 *
 * Tried again is only what cannot happen twice by it: what the server says it has not begun (ServerBusy), what changes
 * nothing (GET, HEAD), what ends the same however often it is done (DELETE of a sandbox), and what carries an
 * Idempotency-Key. A command is never sent twice.
 */

import { errorOf, ServerBusy, ServerUnreachable, SlopletError, SpecError } from "./errors.js";

export const DEFAULT_URL = "http://127.0.0.1:7667";

export interface ConnectOptions {
  /** Where the server is; default: `SLOPLET_URL`, else this machine's. */
  url?: string;
  /** The key; default: `SLOPLET_KEY`. */
  key?: string;
  /** Act in another tenant: for keys of admins. */
  tenant?: string;
  /** How often to try again, at most; 0: never. */
  retries?: number;
  /** Instead of the global one. */
  fetch?: typeof globalThis.fetch;
  /** Instead of the global one (Node has one from 22 on), for terminals and stdin: that of the package `ws`, say. */
  WebSocket?: unknown;
}

export type Query = Record<string, string | number | boolean | readonly string[] | null | undefined>;

export interface RequestOptions {
  query?: Query | undefined;
  /** A body as JSON. */
  json?: unknown;
  /** A body as bytes; a stream is sent as it comes. */
  body?: Uint8Array | ReadableStream<Uint8Array> | undefined;
  headers?: Record<string, string> | undefined;
  signal?: AbortSignal | undefined;
  /** It may be done twice without harm. Default: GET and HEAD only. */
  again?: boolean | undefined;
}

export class Transport {
  readonly url: string;
  readonly key: string;
  readonly fetch: typeof globalThis.fetch;
  readonly WebSocket: unknown;
  readonly retries: number;
  readonly headers: Readonly<Record<string, string>>;

  constructor(options: ConnectOptions = {}) {
    this.url = (options.url ?? environment("SLOPLET_URL") ?? DEFAULT_URL).replace(/\/+$/, "");
    if (!/^https?:\/\//.test(this.url)) {
      throw new SpecError(`${JSON.stringify(this.url)} is not the address of a server`, {
        hint: `for example ${DEFAULT_URL}`,
      });
    }
    this.key = options.key ?? environment("SLOPLET_KEY") ?? "";
    this.fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
    this.WebSocket = options.WebSocket ?? (globalThis as { WebSocket?: unknown }).WebSocket;
    this.retries = options.retries ?? 3;
    const headers: Record<string, string> = { "Sloplet-Client": `js-${crypto.randomUUID().slice(0, 18)}` };
    if (this.key !== "") headers["Authorization"] = `Bearer ${this.key}`;
    if (options.tenant !== undefined) headers["Sloplet-Tenant"] = options.tenant;
    this.headers = headers;
  }

  /** The whole address of a path. */
  address(path: string, query?: Query): string {
    const url = new URL(this.url + path);
    for (const [name, value] of Object.entries(query ?? {})) {
      if (value === undefined || value === null) continue;
      for (const each of Array.isArray(value) ? value : [value]) url.searchParams.append(name, String(each));
    }
    return url.href;
  }

  /** The answer, if it is a good one; else its error is thrown. */
  async send(method: string, path: string, options: RequestOptions = {}): Promise<Response> {
    const headers: Record<string, string> = { ...this.headers, ...options.headers };
    let body: NonNullable<RequestInit["body"]> | undefined;
    if (options.json !== undefined) {
      body = JSON.stringify(options.json);
      headers["Content-Type"] = "application/json";
    } else if (options.body !== undefined) {
      body = options.body as NonNullable<RequestInit["body"]>;
      headers["Content-Type"] ??= "application/octet-stream";
    }
    const streamed = options.body instanceof ReadableStream;
    const again = options.again ?? (method === "GET" || method === "HEAD");
    const request: RequestInit = { method, headers, redirect: "error" };
    if (body !== undefined) request.body = body;
    if (options.signal !== undefined) request.signal = options.signal;
    if (streamed) Object.assign(request, { duplex: "half" });
    for (let attempt = 0; ; attempt++) {
      let error: SlopletError;
      let pause = Math.min(2 ** attempt * 0.1, 5);
      try {
        const answer = await this.fetch(this.address(path, options.query), request);
        if (answer.ok) return answer;
        error = await problemOf(answer);
        const told = Number(answer.headers.get("Retry-After") ?? NaN);
        const refused = error instanceof ServerBusy && Number.isFinite(told);
        if (!refused && !(again && (answer.status === 502 || answer.status === 503))) throw error;
        if (refused) pause = Math.max(told, pause);
      } catch (thrown) {
        if (thrown instanceof SlopletError || options.signal?.aborted) throw thrown;
        error = unreachable(this.url, thrown);
        if (!again) throw error;
      }
      if (streamed || attempt >= this.retries) throw error;
      await sleep(pause, options.signal);
    }
  }

  /** The answer's JSON. */
  async json<T>(method: string, path: string, options: RequestOptions = {}): Promise<T> {
    const answer = await this.send(method, path, options);
    try {
      return (answer.status === 204 ? undefined : await answer.json()) as T;
    } catch (thrown) {
      if (options.signal?.aborted) throw thrown;
      throw unreachable(this.url, thrown);
    }
  }

  /** The answer's body, as it comes. */
  async stream(method: string, path: string, options: RequestOptions = {}): Promise<ReadableStream<Uint8Array>> {
    const answer = await this.send(method, path, options);
    return answer.body ?? new ReadableStream({ start: (controller) => controller.close() });
  }
}

/** The connection was lost, or never was. */
export function unreachable(url: string, cause: unknown): ServerUnreachable {
  const inner = cause instanceof Error && cause.cause instanceof Error ? cause.cause : cause;
  const why = inner instanceof Error ? inner.message || inner.name : String(inner);
  return new ServerUnreachable(`the server ${url} cannot be reached, or the connection to it was lost: ${why}`, {
    hint: "is it running? see SLOPLET_URL",
    cause,
  });
}

/** The error that an answer tells of. */
export async function problemOf(answer: Response): Promise<SlopletError> {
  let document: unknown;
  try {
    document = await answer.json();
  } catch {
    document = undefined; // not a problem document: a proxy's own page, say
  }
  return errorOf(document, answer.status);
}

function sleep(seconds: number, signal: AbortSignal | undefined): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer);
      reject(signal?.reason as Error);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, seconds * 1000);
    if (signal?.aborted) stop();
    else signal?.addEventListener("abort", stop, { once: true });
  });
}

function environment(name: string): string | undefined {
  const value = typeof process === "undefined" ? undefined : process.env[name];
  return value === "" ? undefined : value;
}
