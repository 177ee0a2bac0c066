/**
 * Commands. Output comes by server-sent events, which work everywhere and hold the command up while nobody reads; only a
 * terminal, or a stdin that is written to while the command runs, needs a WebSocket.
 */

import { at, base64Of, bytesOf, call, concat, type Schemas } from "./api.js";
import { errorOf, ProtocolError, ServerUnreachable, SpecError } from "./errors.js";
import type { Transport } from "./http.js";
import { Result, type Ending } from "./results.js";
import { Socket } from "./socket.js";
import { events } from "./sse.js";

/** A string goes to /bin/sh, a list is the argument vector. */
export type Command = string | readonly string[];

export interface ExecOptions {
  cwd?: string;
  env?: Record<string, string>;
  user?: string;
  /** Seconds, or as "90s", "5m": it is ended then, with everything it started. */
  timeout?: number | string;
  /** Bytes of output that are kept; what is beyond is counted and dropped. Callbacks and loops get all of it. */
  max_output?: number;
  /** Aborting ends the command. */
  signal?: AbortSignal;
}

export interface RunOptions extends ExecOptions {
  /** What its stdin reads. */
  input?: string | Uint8Array;
  /** Throw CommandFailed if it does not end with 0. */
  check?: boolean;
  onStdout?: (text: string) => unknown;
  onStderr?: (text: string) => unknown;
}

export interface SpawnOptions extends ExecOptions {
  /** A terminal; needs a WebSocket. */
  pty?: boolean | { rows: number; cols: number };
  /** A pipe to write to; needs a WebSocket. */
  stdin?: boolean;
  /** It goes on when nobody follows it, until the sandbox ends; needs a WebSocket. */
  detached?: boolean;
  tag?: string;
}

/** A piece of output. */
export interface Output {
  stream: "stdout" | "stderr";
  text: string;
  bytes: Uint8Array;
}

type Told =
  | { type: "started"; pid: number }
  | { type: "data"; channel: 1 | 2; data: Uint8Array }
  | { type: "exit"; ending: Ending };

/** What brings a process's output here. */
interface Carrier {
  /** What comes next; undefined if the stream ends. Throws the error that the server tells. */
  next(): Promise<Told | undefined>;
  send(data: Uint8Array): Promise<void>;
  control(message: Record<string, unknown>): Promise<void>;
  close(): void;
}

/** Output that `wait` and `run` keep at most, where nothing was said. */
const DEFAULT_MAX_OUTPUT = 4 * 2 ** 20;

/** A command in a sandbox: made by `spawn` and `attach`. Read its output by `for await`, or wait for all of it. */
export class Process implements AsyncIterable<Output> {
  private readonly kept: Record<1 | 2, Uint8Array[]> = { 1: [], 2: [] };
  private readonly decoders = { 1: new TextDecoder(), 2: new TextDecoder() };
  private size = 0;
  private ending: Ending | undefined;

  constructor(
    /** For `attach` and `signal`. */
    readonly pid: number,
    private readonly carrier: Carrier,
    private readonly most: number = DEFAULT_MAX_OUTPUT,
  ) {}

  /** Output as it comes, until it has ended. */
  async *[Symbol.asyncIterator](): AsyncGenerator<Output, void, undefined> {
    while (this.ending === undefined) {
      const told = await this.carrier.next();
      if (told === undefined) throw new ServerUnreachable("the connection was lost before the command had ended");
      if (told.type === "exit") this.ending = told.ending;
      if (told.type !== "data") continue;
      const room = this.most - this.size;
      if (room > 0) this.kept[told.channel].push(told.data.subarray(0, room));
      this.size += told.data.length;
      const text = this.decoders[told.channel].decode(told.data, { stream: true });
      yield { stream: told.channel === 1 ? "stdout" : "stderr", text, bytes: told.data };
    }
  }

  /** Wait until it has ended; the result holds the output that was read so far, or by this call. */
  async wait(options: { check?: boolean } = {}): Promise<Result> {
    for await (const _ of this);
    const truncated = this.size > this.most || this.ending!.truncated;
    const result = new Result({ ...this.ending!, truncated }, concat(this.kept[1]), concat(this.kept[2]));
    return options.check ? result.check() : result;
  }

  /** Write to its stdin; waits while it does not read. */
  async send(data: string | Uint8Array): Promise<void> {
    await this.carrier.send(typeof data === "string" ? new TextEncoder().encode(data) : data);
  }

  /** Its stdin sees the end of the file. */
  async closeStdin(): Promise<void> {
    await this.carrier.control({ type: "eof" });
  }

  /** Tell its terminal the new size. */
  async resize(rows: number, cols: number): Promise<void> {
    await this.carrier.control({ type: "resize", rows, cols });
  }

  /** Send a signal to it and to everything it started; `tree: false`: to itself only. */
  async signal(signal: string | number = "TERM", options: { tree?: boolean } = {}): Promise<void> {
    await this.carrier.control({ type: "signal", signal, tree: options.tree ?? true });
  }

  /** End it and everything it started, now. */
  async kill(): Promise<void> {
    await this.signal("KILL");
  }

  /** Follow it no more. It goes on if it was spawned `detached`, else it ends. */
  detach(): void {
    this.carrier.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.detach();
  }
}

/** Run a command to its end. */
export async function run(transport: Transport, box: string, command: Command, options: RunOptions): Promise<Result> {
  const { onStdout, onStderr, input, max_output = DEFAULT_MAX_OUTPUT } = options;
  // Without callbacks nobody needs what is beyond: it is not sent at all.
  const sent = onStdout === undefined && onStderr === undefined ? max_output : undefined;
  const process = await overEvents(transport, box, command, options, { input, sent });
  for await (const { stream, text } of process) {
    if (text !== "") await (stream === "stdout" ? onStdout : onStderr)?.(text);
  }
  return process.wait({ check: options.check ?? false });
}

/** Start a command and follow it. */
export async function spawn(
  transport: Transport,
  box: string,
  command: Command,
  options: SpawnOptions,
): Promise<Process> {
  const { pty, stdin, detached, tag, signal, ...rest } = options;
  if (!pty && !stdin && !detached && tag === undefined) return overEvents(transport, box, command, options);
  const first = { ...rest, command: list(command), pty: pty ?? false, stdin: stdin ?? false, detached, tag };
  return overSocket(transport, box, `/v1/sandboxes/${encodeURIComponent(box)}/exec/ws`, first, options, signal);
}

/** Start a command that goes on without anybody, until it or the sandbox ends. */
export async function start(
  transport: Transport,
  box: string,
  command: Command,
  options: Omit<SpawnOptions, "detached" | "max_output">,
): Promise<Schemas["Process"]> {
  const { signal, ...rest } = options;
  const json = { ...rest, command: list(command) };
  return call(transport, "post", "/v1/sandboxes/{box}/processes", { path: { box }, json, signal });
}

/** What a process writes, and what is kept of what it wrote. Looking on never holds it up: see `attach` for that. */
export async function* output(
  transport: Transport,
  box: string,
  pid: number,
  options: { replay?: boolean; follow?: boolean; signal?: AbortSignal },
): AsyncGenerator<Output, void, undefined> {
  const { signal, ...rest } = options;
  const where = at("/v1/sandboxes/{box}/processes/{pid}/output", { box, pid });
  const query = { ...rest, encoding: "base64" };
  const decoders = { stdout: new TextDecoder(), stderr: new TextDecoder() };
  for await (const { event, data } of events(await transport.stream("GET", where, { query, signal }))) {
    if (event === "error") throw errorOf(JSON.parse(data), 500);
    if (event !== "stdout" && event !== "stderr") continue;
    const bytes = bytesOf((JSON.parse(data) as { data: string }).data);
    yield { stream: event, text: decoders[event].decode(bytes, { stream: true }), bytes };
  }
}

/** Follow a process by its pid: what is kept of its output, then what comes. */
export async function attach(
  transport: Transport,
  box: string,
  pid: number,
  options: { replay?: boolean; max_output?: number; signal?: AbortSignal },
): Promise<Process> {
  const path = `/v1/sandboxes/${encodeURIComponent(box)}/processes/${pid}/attach`;
  return overSocket(transport, box, path, undefined, options, options.signal, { replay: options.replay ?? true });
}

function list(command: Command): string | string[] {
  return typeof command === "string" ? command : [...command];
}

async function overEvents(
  transport: Transport,
  box: string,
  command: Command,
  options: ExecOptions,
  more: { input?: string | Uint8Array | undefined; sent?: number | undefined } = {},
): Promise<Process> {
  const { cwd, env, user, timeout, signal } = options;
  const { input, sent } = more;
  const asked = { command: list(command), cwd, env, user, timeout, max_output: sent, encoding: "base64" as const };
  const given = input === undefined ? {} : typeof input === "string" ? { stdin: input } : { stdin_base64: base64Of(input) };
  const body: Schemas["ExecAsked"] = defined({ ...asked, ...given });
  const stop = new AbortController();
  const path = at("/v1/sandboxes/{box}/exec/stream", { box });
  const whole = signal === undefined ? stop.signal : AbortSignal.any([signal, stop.signal]);
  const told = events(await transport.stream("POST", path, { json: body, signal: whole }));
  let pid = 0;
  const carrier: Carrier = {
    async next() {
      const { done, value } = await told.next();
      if (done) return undefined;
      const data = JSON.parse(value.data) as { pid: number; data: string };
      if (value.event === "started") return { type: "started", pid: data.pid };
      if (value.event === "stdout") return { type: "data", channel: 1, data: bytesOf(data.data) };
      if (value.event === "stderr") return { type: "data", channel: 2, data: bytesOf(data.data) };
      if (value.event === "error") throw errorOf(data, 500);
      if (value.event !== "exit") throw new ProtocolError(`the server told of ${JSON.stringify(value.event)}`);
      await told.next(); // to the end of the answer: the connection serves again
      return { type: "exit", ending: data as unknown as Ending };
    },
    send: () => Promise.reject(new SpecError("this command has no stdin", { hint: "spawn it with stdin: true" })),
    async control(message) {
      if (message["type"] !== "signal") throw new SpecError("this command has no stdin and no terminal");
      const json = { signal: message["signal"] as string, tree: message["tree"] as boolean };
      await call(transport, "post", "/v1/sandboxes/{box}/processes/{pid}/signal", { path: { box, pid }, json });
    },
    close: () => stop.abort(),
  };
  pid = await begun(carrier);
  return new Process(pid, carrier, options.max_output);
}

async function overSocket(
  transport: Transport,
  box: string,
  path: string,
  first: object | undefined,
  options: { max_output?: number },
  signal: AbortSignal | undefined,
  query?: Record<string, boolean>,
): Promise<Process> {
  const probe = (): Promise<unknown> => call(transport, "get", "/v1/sandboxes/{box}", { path: { box } });
  const socket = await Socket.open(transport, path, query, signal, probe);
  const carrier: Carrier = {
    async next() {
      const message = await socket.next();
      if (message === undefined) return undefined;
      if (typeof message !== "string") {
        return { type: "data", channel: message[0] === 2 ? 2 : 1, data: message.subarray(1) };
      }
      const { type, ...rest } = JSON.parse(message) as { type: string; pid: number };
      if (type === "started") return { type, pid: rest.pid };
      if (type === "error") throw errorOf(rest, 500);
      if (type !== "exit") throw new ProtocolError(`the server told of ${JSON.stringify(type)}`);
      socket.close();
      return { type, ending: rest as unknown as Ending };
    },
    send: (data) => socket.send(data),
    control: (message) => socket.send(JSON.stringify(message)),
    close: () => socket.close(),
  };
  try {
    if (first !== undefined) await socket.send(JSON.stringify(first));
    return new Process(await begun(carrier), carrier, options.max_output);
  } catch (thrown) {
    socket.close();
    throw thrown;
  }
}

/** Its pid, once it has begun. Throws why it could not. */
async function begun(carrier: Carrier): Promise<number> {
  const told = await carrier.next();
  if (told?.type === "started") return told.pid;
  throw new ServerUnreachable("the connection was lost before the command had begun");
}

function defined<T extends object>(values: T): { [K in keyof T]: Exclude<T[K], undefined> } {
  return Object.fromEntries(Object.entries(values).filter(([, value]) => value !== undefined)) as never;
}
