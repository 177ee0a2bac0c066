/** `box.files`: everything is done inside the sandbox, as its user. Paths are the sandbox's. Both ways are streams. */

import { at, call, concat, type Schemas } from "./api.js";
import { errorOf, FileError, FileMissing, FileNotDirectory, SlopletError } from "./errors.js";
import type { Query, RequestOptions, Transport } from "./http.js";
import { events } from "./sse.js";

export type FileInfo = Schemas["FileInfo"];
export type Content = string | Uint8Array | ReadableStream<Uint8Array> | AsyncIterable<Uint8Array> | Blob;

/** Something that `watch` saw; the first is always of kind "ready": what happens after it is not missed. */
export interface FileChange {
  kind: string;
  name: string;
  new_name?: string | null;
}

export interface FileOptions {
  /** Who does it; default: the sandbox's user. */
  user?: string;
  signal?: AbortSignal;
}

export interface ReadOptions extends FileOptions {
  offset?: number;
  length?: number;
}

export interface WriteOptions extends FileOptions {
  mode?: number;
  append?: boolean;
  exclusive?: boolean;
  /** Make the folders above it; default: true. */
  parents?: boolean;
  /** The file itself is emptied and written; a broken upload leaves a part. */
  in_place?: boolean;
}

export interface LookOptions extends FileOptions {
  /** With the names of user and group. */
  owners?: boolean;
  /** With what links lead to. */
  targets?: boolean;
  /** With the extended attributes that begin so, say `user.`. */
  attributes?: string;
}

/** `read` refuses more than this: use `stream`. */
const MAX_READ = 256 * 2 ** 20;
const MAX_LISTED = 100_000;

export class Files {
  constructor(
    private readonly transport: Transport,
    private readonly box: string,
  ) {}

  /** A file's bytes, as they come. */
  async stream(path: string, options: ReadOptions = {}): Promise<ReadableStream<Uint8Array>> {
    const { offset = 0, length, signal, user } = options;
    if (length === 0) return new Blob([]).stream();
    const headers: Record<string, string> = {};
    if (offset !== 0 || length !== undefined) {
      headers["Range"] = `bytes=${offset}-${length === undefined ? "" : offset + length - 1}`;
    }
    const where = at("/v1/sandboxes/{box}/files", { box: this.box });
    try {
      return await this.transport.stream("GET", where, { query: { path, user }, headers, signal });
    } catch (error) {
      if (error instanceof SlopletError && error.status === 416) return new Blob([]).stream(); // beyond its end
      throw error;
    }
  }

  /** A file's bytes. */
  async read(path: string, options: ReadOptions = {}): Promise<Uint8Array> {
    const pieces: Uint8Array[] = [];
    let size = 0;
    for await (const piece of await this.stream(path, options)) {
      size += piece.length;
      if (size > MAX_READ) {
        throw new FileError(`${path} is larger than ${MAX_READ} bytes`, { hint: "use files.stream()" });
      }
      pieces.push(piece);
    }
    return concat(pieces);
  }

  /** A file's text; bytes that are not UTF-8 become U+FFFD. */
  async readText(path: string, options: ReadOptions = {}): Promise<string> {
    return new TextDecoder().decode(await this.read(path, options));
  }

  /** Write a file. Without `append` it is replaced at once when all has arrived; a broken upload leaves the old one. */
  async write(path: string, content: Content, options: WriteOptions = {}): Promise<FileInfo> {
    const { signal, mode, ...rest } = options;
    const query: Query = { path, ...rest, mode: mode === undefined ? undefined : mode.toString(8).padStart(4, "0") };
    const where = at("/v1/sandboxes/{box}/files", { box: this.box });
    const body = bodyOf(content);
    // The same bytes written again are the same file: but not at its end, and not where there must be none.
    const again = body instanceof Uint8Array && !options.append && !options.exclusive;
    return this.transport.json("PUT", where, { query, body, signal, again });
  }

  /** What a folder holds, sorted by name; `recursive`: everything below it. */
  async list(path = ".", options: LookOptions & { recursive?: boolean; depth?: number } = {}): Promise<FileInfo[]> {
    const { signal, ...query } = options;
    const found = await call(this.transport, "get", "/v1/sandboxes/{box}/files/list", {
      path: { box: this.box }, query: { path, limit: MAX_LISTED, ...query }, signal,
    });
    if (found.truncated) {
      throw new FileError(`${path} holds more than can be listed at once`, { hint: "list its folders one by one" });
    }
    return found.items;
  }

  /** What a path is. */
  async stat(path: string, options: LookOptions & { follow?: boolean } = {}): Promise<FileInfo> {
    const { signal, ...query } = options;
    return call(this.transport, "get", "/v1/sandboxes/{box}/files/stat", {
      path: { box: this.box }, query: { path, ...query }, signal,
    });
  }

  /** Whether there is something at that path. */
  async exists(path: string, options: FileOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, { ...options, follow: false });
      return true;
    } catch (error) {
      if (error instanceof FileMissing || error instanceof FileNotDirectory) return false;
      throw error;
    }
  }

  /** Make a folder; with `parents` (the default) also those above it, and it may be there already. */
  async mkdir(path: string, options: FileOptions & { parents?: boolean; mode?: number } = {}): Promise<void> {
    await this.post("/v1/sandboxes/{box}/files/mkdir", { path }, options);
  }

  /** Remove a file or an empty folder; `recursive`: a folder and all below it. */
  async remove(
    path: string,
    options: FileOptions & { recursive?: boolean; missing_ok?: boolean } = {},
  ): Promise<void> {
    const { signal, ...query } = options;
    await call(this.transport, "delete", "/v1/sandboxes/{box}/files", {
      path: { box: this.box }, query: { path, ...query }, signal,
    });
  }

  /** Rename. That the target exists is an error, unless `replace`. */
  async move(path: string, target: string, options: FileOptions & { replace?: boolean } = {}): Promise<void> {
    await this.post("/v1/sandboxes/{box}/files/move", { path, target }, options);
  }

  async chmod(path: string, mode: number, options: FileOptions = {}): Promise<void> {
    await this.post("/v1/sandboxes/{box}/files/chmod", { path, mode }, options);
  }

  /** Make `path` a symbolic link that says `target`. */
  async symlink(path: string, target: string, options: FileOptions = {}): Promise<void> {
    await this.post("/v1/sandboxes/{box}/files/symlink", { path, target }, options);
  }

  /** A folder with all below it, as a tar. */
  async archive(path: string, options: FileOptions = {}): Promise<ReadableStream<Uint8Array>> {
    const where = at("/v1/sandboxes/{box}/files/archive", { box: this.box });
    return this.transport.stream("GET", where, { query: { path, user: options.user }, signal: options.signal });
  }

  /** Unpack a tar below a folder. */
  async extract(path: string, tar: Content, options: FileOptions = {}): Promise<Schemas["Unpacked"]> {
    const where = at("/v1/sandboxes/{box}/files/archive", { box: this.box });
    const headers = { "Content-Type": "application/x-tar" };
    const request: RequestOptions = { query: { path, user: options.user }, body: bodyOf(tar), headers };
    return this.transport.json("PUT", where, { ...request, signal: options.signal });
  }

  /** Changes below a path as they happen, until you leave the loop. */
  async *watch(
    path = ".",
    options: FileOptions & { recursive?: boolean } = {},
  ): AsyncGenerator<FileChange, void, undefined> {
    const { signal, ...query } = options;
    const where = at("/v1/sandboxes/{box}/files/watch", { box: this.box });
    const body = await this.transport.stream("GET", where, { query: { path, ...query }, signal, headers: SSE });
    for await (const { event, data } of events(body)) {
      const told = JSON.parse(data) as FileChange;
      if (event === "error") throw errorOf(told, 500);
      yield told;
    }
  }

  private async post(
    path: Parameters<typeof at>[0],
    values: Record<string, unknown>,
    options: FileOptions,
  ): Promise<void> {
    const { signal, ...rest } = options;
    await this.transport.json("POST", at(path, { box: this.box }), { json: { ...values, ...rest }, signal });
  }
}

/** Said where the same path is a WebSocket, too. */
export const SSE = { Accept: "text/event-stream" };

/** Content as a body. */
export function bodyOf(content: Content): Uint8Array | ReadableStream<Uint8Array> {
  if (typeof content === "string") return new TextEncoder().encode(content);
  if (content instanceof Uint8Array || content instanceof ReadableStream) return content;
  if (content instanceof Blob) return content.stream();
  const iterator = content[Symbol.asyncIterator]();
  return new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        const { done, value } = await iterator.next();
        if (done) controller.close();
        else controller.enqueue(value);
      },
      async cancel() {
        await iterator.return?.();
      },
    },
    { highWaterMark: 0 },
  );
}
