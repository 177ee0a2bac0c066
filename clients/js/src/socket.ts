/** WebSockets: the global one of Node 22, Deno and Bun, or that of the package `ws`. Messages are read by iteration. */

import { ProtocolError, SpecError } from "./errors.js";
import { unreachable, type Query, type Transport } from "./http.js";

/** What both kinds of WebSocket have in common, as far as it is used here. */
interface SocketLike {
  binaryType: string;
  readonly readyState: number;
  readonly bufferedAmount: number;
  send(data: string | Uint8Array): void;
  close(code?: number): void;
  addEventListener(type: string, listener: (event: never) => void): void;
  /** Of `ws`: stop reading, so that the server waits. */
  pause?(): void;
  resume?(): void;
}
type SocketConstructor = new (url: string, options: { headers: Record<string, string> }) => SocketLike;

export type Message = string | Uint8Array;

const HIGH = 2 ** 20; // bytes that wait to be sent or read, before anybody has to wait
const LOOK = 5; // milliseconds between looks at what waits to be sent: a WebSocket tells nobody that it was

export class Socket {
  private readonly queue: Message[] = [];
  private waiting = 0;
  private held = false;
  private wake: (() => void) | undefined;
  private ended = false;
  private failure: Error | undefined;

  private constructor(private readonly socket: SocketLike) {}

  /** Connect. Where that fails, `probe` finds out why: a WebSocket is not told. */
  static async open(
    transport: Transport,
    path: string,
    query: Query | undefined,
    signal: AbortSignal | undefined,
    probe: () => Promise<unknown>,
  ): Promise<Socket> {
    if (typeof transport.WebSocket !== "function") {
      throw new SpecError("this needs a WebSocket, and there is none here", {
        hint: "use Node 22 or newer, or give one: `import WebSocket from 'ws'` and the option `WebSocket`",
      });
    }
    signal?.throwIfAborted();
    const address = transport.address(path, query).replace(/^http/, "ws");
    const socket = new (transport.WebSocket as SocketConstructor)(address, { headers: { ...transport.headers } });
    socket.binaryType = "arraybuffer";
    const self = new Socket(socket);
    let opened = false;
    try {
      await new Promise<void>((resolve, reject) => {
        socket.addEventListener("open", () => {
          opened = true;
          resolve();
        });
        socket.addEventListener("message", (event: { data: unknown }) => self.take(event.data));
        socket.addEventListener("error", (event: { error?: Error; message?: string }) => {
          const cause = event.error ?? new Error(event.message ?? "the WebSocket failed");
          self.failure = unreachable(transport.url, cause);
          reject(self.failure);
        });
        socket.addEventListener("close", (event: { code?: number }) => {
          if (event.code !== 1000) {
            self.failure ??= unreachable(transport.url, new Error(`the WebSocket was closed (${event.code ?? 0})`));
          }
          self.end();
          reject(self.failure ?? new ProtocolError("the WebSocket was closed before it was open"));
        });
        signal?.addEventListener("abort", () => {
          self.failure = signal.reason as Error;
          reject(self.failure);
          self.close();
        }, { once: true });
      });
    } catch (thrown) {
      if (!opened && !signal?.aborted) await probe();
      throw thrown;
    }
    return self;
  }

  /** The next message; undefined after the last. Throws what broke the connection. */
  async next(): Promise<Message | undefined> {
    while (true) {
      const message = this.queue.shift();
      if (message !== undefined) {
        this.waiting -= message.length;
        if (this.held && this.waiting < HIGH / 2) {
          this.held = false;
          this.socket.resume?.();
        }
        return message;
      }
      if (this.failure !== undefined) throw this.failure;
      if (this.ended) return undefined;
      await new Promise<void>((resolve) => (this.wake = resolve));
    }
  }

  /** Send, and wait while much waits to be sent. */
  async send(message: Message): Promise<void> {
    if (this.ended) return; // as with a pipe whose reader has gone: what it told is read by next()
    this.socket.send(message);
    while (this.socket.bufferedAmount > HIGH && !this.ended) {
      await new Promise((resolve) => setTimeout(resolve, LOOK));
    }
  }

  close(): void {
    this.end();
    this.socket.close(1000);
  }

  private take(data: unknown): void {
    const message = typeof data === "string" ? data : new Uint8Array(data as ArrayBuffer);
    this.queue.push(message);
    this.waiting += message.length;
    if (this.waiting > HIGH && !this.held && this.socket.pause !== undefined) {
      this.held = true;
      this.socket.pause();
    }
    this.wake?.();
  }

  private end(): void {
    this.ended = true;
    this.wake?.();
  }
}
