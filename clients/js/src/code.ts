/** `box.code`: cells of code in a process of the sandbox that keeps their variables. */

import { at, bytesOf, call, type Schemas } from "./api.js";
import { errorOf, ProtocolError, ServerUnreachable } from "./errors.js";
import type { Transport } from "./http.js";
import { events } from "./sse.js";

export type CodeResult = Schemas["CodeResult"];
/** A value by its representations; text as text, images as base64. It was made by code that nobody has read. */
export type RichResult = CodeResult["results"][number];
export type CodeContext = Schemas["CodeContext"];

export interface CodeOptions {
  /** "python" (the default), "node", "typescript", "shell", "r", "java" or "deno". */
  language?: string;
  /** Another than the language's own. */
  context?: string;
  /** Seconds, or as "90s": it is interrupted then. */
  timeout?: number | string;
  max_output?: number | string;
  /** Start a context anew that has ended. */
  restart?: boolean;
  /** Variables of the environment for this cell alone. */
  env?: Record<string, string>;
  onStdout?: (text: string) => unknown;
  onStderr?: (text: string) => unknown;
  onResult?: (result: RichResult) => unknown;
  signal?: AbortSignal;
}

/** Run a cell. Code that raises is a result with `error`. */
export async function code(
  transport: Transport,
  box: string,
  source: string,
  options: CodeOptions,
): Promise<CodeResult> {
  const { onStdout, onStderr, onResult, signal, ...asked } = options;
  const where = at("/v1/sandboxes/{box}/code/stream", { box });
  const body = await transport.stream("POST", where, { json: { code: source, ...asked }, signal });
  for await (const { event, data } of events(body)) {
    const told: unknown = JSON.parse(data);
    if (event === "stdout") await onStdout?.((told as { data: string }).data);
    else if (event === "stderr") await onStderr?.((told as { data: string }).data);
    else if (event === "result") await onResult?.(told as RichResult);
    else if (event === "error") throw errorOf(told, 500);
    else if (event === "done") return told as CodeResult;
    else if (event !== "started") throw new ProtocolError(`the server told of ${JSON.stringify(event)}`);
  }
  throw new ServerUnreachable("the connection was lost before the cell had ended");
}

/** An image of a result, decoded: `image(result, "image/png")`. */
export function image(result: RichResult, mime = "image/png"): Uint8Array | undefined {
  const text = result.data[mime];
  return text === undefined ? undefined : bytesOf(text);
}

/** `box.contexts`. */
export class Contexts {
  constructor(
    private readonly transport: Transport,
    private readonly box: string,
  ) {}

  async list(options: { signal?: AbortSignal } = {}): Promise<CodeContext[]> {
    const path = { box: this.box };
    return (await call(this.transport, "get", "/v1/sandboxes/{box}/contexts", { path, ...options })).items;
  }

  async create(asked: Schemas["ContextCreate"], options: { signal?: AbortSignal } = {}): Promise<CodeContext> {
    const path = { box: this.box };
    return call(this.transport, "post", "/v1/sandboxes/{box}/contexts", { path, json: asked, ...options });
  }

  async remove(name: string, options: { signal?: AbortSignal } = {}): Promise<void> {
    const path = { box: this.box, name };
    await call(this.transport, "delete", "/v1/sandboxes/{box}/contexts/{name}", { path, ...options });
  }

  /** Without its variables. */
  async restart(name: string, options: { signal?: AbortSignal } = {}): Promise<void> {
    const path = { box: this.box, name };
    await call(this.transport, "post", "/v1/sandboxes/{box}/contexts/{name}/restart", { path, ...options });
  }

  /** Stop the cell that runs. */
  async interrupt(name: string, options: { signal?: AbortSignal } = {}): Promise<void> {
    const path = { box: this.box, name };
    await call(this.transport, "post", "/v1/sandboxes/{box}/contexts/{name}/interrupt", { path, ...options });
  }
}
