/** The parser of server-sent events: however the bytes are cut. */

import assert from "node:assert/strict";
import { test } from "node:test";

import { events, type ServerEvent } from "../src/sse.js";

const TEXT = ': ping\n\nevent: stdout\ndata: {"data": "é\u{1f600}"}\n\nevent:exit\r\ndata: a\r\ndata: b\r\n\r\ndata: lost';
const WANTED = [
  { event: "stdout", data: '{"data": "é\u{1f600}"}' },
  { event: "exit", data: "a\nb" },
];

function body(pieces: Uint8Array[], onCancel?: () => void): ReadableStream<Uint8Array> {
  return new ReadableStream({
    pull(controller) {
      const piece = pieces.shift();
      if (piece === undefined) controller.close();
      else controller.enqueue(piece);
    },
    cancel: onCancel ?? (() => undefined),
  }, { highWaterMark: 0 });
}

async function all(stream: ReadableStream<Uint8Array>): Promise<ServerEvent[]> {
  const found = [];
  for await (const event of events(stream)) found.push(event);
  return found;
}

test("events are the same wherever the bytes are cut", async () => {
  const bytes = new TextEncoder().encode(TEXT);
  for (let cut = 0; cut <= bytes.length; cut++) {
    assert.deepEqual(await all(body([bytes.slice(0, cut), bytes.slice(cut)])), WANTED, `cut at ${cut}`);
  }
  assert.deepEqual(await all(body([...bytes].map((byte) => Uint8Array.of(byte)))), WANTED);
});

test("leaving the loop cancels the request", async () => {
  let cancelled = false;
  const line = new TextEncoder().encode("data: x\n\n");
  for await (const _ of events(body([line, line, line], () => (cancelled = true)))) break;
  assert.ok(cancelled);
});

test("an event without an end is not kept", { timeout: 30_000 }, async () => {
  const piece = new TextEncoder().encode("x".repeat(2 ** 20));
  let sent = 0;
  const endless = new ReadableStream<Uint8Array>({
    pull(controller) {
      sent += piece.length;
      controller.enqueue(piece);
    },
  });
  await assert.rejects(all(endless), { name: "ProtocolError" });
  assert.ok(sent < 80 * 2 ** 20);
});
