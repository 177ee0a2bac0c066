/** Calls that are checked against the OpenAPI document when they are compiled: path, parameters, body, answer. */

import type { Query, RequestOptions, Transport } from "./http.js";
import type { components, paths } from "./schema.js";

export type Schemas = components["schemas"];
export type Method = "get" | "put" | "post" | "patch" | "delete";

/** The paths that have a method. */
export type PathOf<M extends Method> = {
  [P in keyof paths]: paths[P][M] extends { responses: unknown } ? P : never;
}[keyof paths];

type Operation<M extends Method, P extends keyof paths> = NonNullable<paths[P][M]>;
/** A part of an operation; undefined where it has none (the document's `never`). */
type Part<T> = [NonNullable<T>] extends [never] ? undefined : NonNullable<T>;
type Values<O, K extends "path" | "query"> = O extends { parameters: { [Key in K]?: infer V } } ? Part<V> : undefined;
type Body<O> = O extends { requestBody?: infer B }
  ? Part<B> extends { content: { "application/json": infer J } }
    ? J
    : undefined
  : undefined;
type Content<R> = R extends { content: { "application/json": infer J } } ? J : never;
/** What a good answer holds; undefined where it has no content. */
export type Answer<O> = O extends { responses: infer R }
  ? { [S in keyof R]: S extends 200 | 201 ? Content<R[S]> : S extends 204 ? undefined : never }[keyof R]
  : never;

type Given<K extends string, V> = V extends undefined ? { [Key in K]?: undefined } : { [Key in K]: V };
export type CallOptions<O> = Omit<RequestOptions, "query" | "json" | "body"> & {
  query?: Exclude<Values<O, "query">, undefined>;
} & Given<"path", Values<O, "path">> &
  Given<"json", Body<O>>;

/** One request, by the document's own words: `call(transport, "get", "/v1/sandboxes/{box}", {path: {box: "dev"}})`. */
export async function call<M extends Method, P extends PathOf<M>>(
  transport: Transport,
  method: M,
  path: P,
  options: CallOptions<Operation<M, P>>,
): Promise<Answer<Operation<M, P>>> {
  const { path: values, ...rest } = options;
  const where = at(path, (values ?? {}) as Record<string, string | number>);
  return transport.json(method.toUpperCase(), where, { ...rest, query: rest.query as Query | undefined });
}

/** A path of the document with its parameters filled in. */
export function at(path: keyof paths, values: Record<string, string | number>): string {
  return path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(String(values[name])));
}

/** Bytes of base64. */
export function bytesOf(base64: string): Uint8Array {
  if (typeof Buffer !== "undefined") return new Uint8Array(Buffer.from(base64, "base64"));
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** Bytes as base64. */
export function base64Of(bytes: Uint8Array): string {
  if (typeof Buffer !== "undefined") {
    return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("base64");
  }
  let text = "";
  for (let from = 0; from < bytes.length; from += 8192) {
    text += String.fromCharCode(...bytes.subarray(from, from + 8192));
  }
  return btoa(text);
}

export function concat(pieces: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let from = 0;
  for (const piece of pieces) {
    whole.set(piece, from);
    from += piece.length;
  }
  return whole;
}
