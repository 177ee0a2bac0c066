/** Requests against a server that is made to fail: what is tried again, and what never is. */

import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { afterEach, test } from "node:test";

import * as sloplet from "../src/index.js";

type Handler = (request: IncomingMessage, response: ServerResponse, count: number) => void;
const open: (() => void)[] = [];
afterEach(() => {
  for (const close of open.splice(0)) close();
});

interface Fake {
  client: sloplet.Client;
  seen: { method: string; url: string; headers: IncomingMessage["headers"]; body: string }[];
}

async function fake(handler: Handler, options: sloplet.ConnectOptions = {}): Promise<Fake> {
  const seen: Fake["seen"] = [];
  const server = createServer((request, response) => {
    let body = "";
    request.on("data", (piece: Buffer) => (body += piece.toString()));
    request.on("end", () => {
      seen.push({ method: request.method!, url: request.url!, headers: request.headers, body });
      handler(request, response, seen.length);
    });
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  open.push(() => {
    server.closeAllConnections();
    server.close();
  });
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  return { client: new sloplet.Client({ url, key: "slp_test", ...options }), seen };
}

function problem(response: ServerResponse, status: number, error: string, headers: Record<string, string> = {}): void {
  response.writeHead(status, { "Content-Type": "application/problem+json", ...headers });
  response.end(JSON.stringify({ status, error, title: error, detail: "because", hint: "do this", request_id: "r1" }));
}

function answer(response: ServerResponse, document: unknown, status = 200): void {
  response.writeHead(status, { "Content-Type": "application/json" });
  response.end(JSON.stringify(document));
}

const INFO = { id: "abc", name: null, state: "running" };
const BUSY = { "Retry-After": "0" };

test("errors are classes of the tree, with their hint", async () => {
  const { client } = await fake((_, response) => problem(response, 404, "SandboxNotFound"));
  await assert.rejects(client.connect("x"), (error: unknown) => {
    assert.ok(error instanceof sloplet.SandboxNotFound && error instanceof sloplet.SandboxError);
    assert.equal(error.name, "SandboxNotFound");
    assert.equal(error.message, "because (do this)");
    assert.deepEqual([error.hint, error.status, error.requestId], ["do this", 404, "r1"]);
    return true;
  });
});

test("an error that is not of the tree is none of its classes", async () => {
  for (const name of ["constructor", "__proto__", "Nonsense"]) {
    const { client } = await fake((_, response) => problem(response, 418, name));
    await assert.rejects(client.me(), (error: unknown) => error instanceof sloplet.SlopletError);
  }
  const { client } = await fake((_, response) => response.writeHead(500).end("<html>"));
  await assert.rejects(client.me(), sloplet.ServerError);
});

test("the key, the client and the tenant are told", async () => {
  const { client, seen } = await fake((_, response) => answer(response, {}), { tenant: "other" });
  await client.me();
  await client.me();
  assert.equal(seen[0]!.headers.authorization, "Bearer slp_test");
  assert.equal(seen[0]!.headers["sloplet-tenant"], "other");
  assert.match(String(seen[0]!.headers["sloplet-client"]), /^js-[0-9a-f-]+$/);
  assert.equal(seen[0]!.headers["sloplet-client"], seen[1]!.headers["sloplet-client"]);
});

test("create is tried again with the same Idempotency-Key", async () => {
  const { client, seen } = await fake((request, response, count) => {
    if (count === 1) request.socket.destroy();
    else if (count === 2) problem(response, 503, "KeeperError");
    else answer(response, INFO, 201);
  });
  const box = await client.create({ engine: "fake" });
  assert.equal(box.id, "abc");
  assert.equal(seen.length, 3);
  assert.equal(new Set(seen.map((one) => one.headers["idempotency-key"])).size, 1);
  assert.ok(seen[0]!.headers["idempotency-key"]);
  assert.equal(new Set(seen.map((one) => one.body)).size, 1);
});

test("a command is never sent twice", async () => {
  for (const fail of [
    (request: IncomingMessage): unknown => request.socket.destroy(),
    (_: IncomingMessage, response: ServerResponse): unknown => problem(response, 503, "KeeperError", BUSY),
    (_: IncomingMessage, response: ServerResponse): unknown => problem(response, 502, "ServerUnreachable"),
    (_: IncomingMessage, response: ServerResponse): unknown => problem(response, 429, "QuotaExceeded", BUSY),
  ]) {
    const { client, seen } = await fake((request, response) => {
      if (request.url!.includes("exec")) fail(request, response);
      else answer(response, INFO);
    });
    const box = await client.connect("abc");
    await assert.rejects(box.run("true"), sloplet.SlopletError);
    assert.equal(seen.filter((one) => one.url.includes("exec")).length, 1);
  }
});

test("but what the server says it has not begun is", async () => {
  const exit = { exit_code: 0, timed_out: false };
  const { client, seen } = await fake((request, response, count) => {
    if (!request.url!.includes("exec")) return answer(response, INFO);
    if (count < 4) return problem(response, count === 2 ? 429 : 503, "ServerBusy", BUSY);
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    response.write('event: started\ndata: {"pid": 1}\n\nevent: stdout\ndata: {"data": "aGk="}\n\n');
    return response.end(`event: exit\ndata: ${JSON.stringify(exit)}\n\n`);
  });
  const result = await (await client.connect("abc")).run("true");
  assert.equal(result.stdout, "hi");
  assert.equal(seen.length, 4);
});

test("a stream that breaks off before the end is an error, not a result", async () => {
  const { client, seen } = await fake((request, response) => {
    if (!request.url!.includes("exec")) return answer(response, INFO);
    response.writeHead(200, { "Content-Type": "text/event-stream" });
    return response.end('event: started\ndata: {"pid": 1}\n\nevent: stdout\ndata: {"data": "aGk="}\n\n');
  });
  await assert.rejects((await client.connect("abc")).run("true"), sloplet.ServerUnreachable);
  assert.equal(seen.length, 2);
});

test("nothing is tried for ever", async () => {
  const { client, seen } = await fake((_, response) => problem(response, 503, "ServerBusy", BUSY), { retries: 2 });
  await assert.rejects(client.me(), sloplet.ServerBusy);
  assert.equal(seen.length, 3);
});

test("a quota is not waited for", async () => {
  const { client, seen } = await fake((_, response) => problem(response, 429, "QuotaExceeded"));
  await assert.rejects(client.create(), sloplet.QuotaExceeded);
  assert.equal(seen.length, 1);
});

test("an aborted wait ends at once", async () => {
  const { client, seen } = await fake((_, response) => problem(response, 503, "ServerBusy", { "Retry-After": "600" }));
  const stop = new AbortController();
  const asked = client.me({ signal: stop.signal });
  while (seen.length === 0) await new Promise((resolve) => setImmediate(resolve));
  stop.abort();
  await assert.rejects(asked, { name: "AbortError" });
  assert.equal(seen.length, 1);
});

test("a redirect is not followed: the key is for this server", async () => {
  const { client, seen } = await fake((_, response) => response.writeHead(302, { Location: "/elsewhere" }).end(), {
    retries: 0,
  });
  await assert.rejects(client.me(), sloplet.ServerUnreachable);
  assert.equal(seen.length, 1);
});

test("ids and paths are one segment, whatever they hold", async () => {
  const { client, seen } = await fake((_, response) => problem(response, 404, "SandboxNotFound"));
  await assert.rejects(client.connect("../../v1/keys?x#y"));
  assert.equal(seen[0]!.url, "/v1/sandboxes/..%2F..%2Fv1%2Fkeys%3Fx%23y");
});

test("a server that is not there is told", async () => {
  const client = new sloplet.Client({ url: "http://127.0.0.1:9", retries: 0 });
  await assert.rejects(client.me(), sloplet.ServerUnreachable);
  assert.throws(() => new sloplet.Client({ url: "ftp://x" }), sloplet.SpecError);
});

test("without a WebSocket a terminal is refused, and the hint says what to do", async () => {
  const { client, seen } = await fake((_, response) => answer(response, INFO), { WebSocket: "none" });
  const box = await client.connect("abc");
  await assert.rejects(box.spawn("sh", { pty: true }), (error: unknown) => {
    return error instanceof sloplet.SpecError && /ws/.test(error.hint!);
  });
  assert.equal(seen.length, 1);
});

test("close ends an unnamed sandbox and lets a named one go", async () => {
  for (const name of [null, "dev"]) {
    const { client, seen } = await fake((request, response) => {
      if (request.method === "GET") answer(response, { ...INFO, name });
      else response.writeHead(204).end();
    });
    const box = await client.connect("abc");
    await box.close();
    await box.close();
    await assert.rejects(box.run("true"), sloplet.SandboxClosed);
    assert.deepEqual(seen.slice(1).map((one) => `${one.method} ${one.url}`), [
      name === null ? "DELETE /v1/sandboxes/abc" : "POST /v1/sandboxes/abc/release",
    ]);
  }
});
