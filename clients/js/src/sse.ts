/** Server-sent events, read from a fetch body as they come. Reading is what lets the server send on: back-pressure. */

import { ProtocolError } from "./errors.js";

export interface ServerEvent {
  event: string;
  data: string;
}

/** More than any event of the server; a longer one is not kept in memory. */
const MAX_EVENT = 64 * 2 ** 20;

/** The events of a body. Leaving the loop cancels the request. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent, void, undefined> {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest: string[] = []; // of a line that has not ended: joined once, when it has
  let kept = 0;
  let event = "message";
  let data: string[] = [];
  let size = 0;
  let ended = false;
  try {
    while (true) {
      const { done, value } = await reader.read();
      if (done) {
        ended = true;
        return; // what has no blank line after it is not an event
      }
      let text = decoder.decode(value, { stream: true });
      if (text.includes("\n")) {
        text = rest.join("") + text;
        rest = [];
        kept = 0;
      }
      let from = 0;
      for (let end = text.indexOf("\n"); end >= 0; end = text.indexOf("\n", from)) {
        const line = text.slice(from, text[end - 1] === "\r" ? end - 1 : end);
        from = end + 1;
        if (line === "") {
          if (data.length > 0) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
          size = 0;
        } else if (!line.startsWith(":")) {
          const colon = line.indexOf(":");
          const name = colon < 0 ? line : line.slice(0, colon);
          const value = colon < 0 ? "" : line.slice(line[colon + 1] === " " ? colon + 2 : colon + 1);
          if (name === "event") event = value;
          else if (name === "data") data.push(value);
          size += value.length;
        }
      }
      rest.push(text.slice(from));
      kept += text.length - from;
      if (size + kept > MAX_EVENT) throw new ProtocolError("the server sends an event that has no end");
    }
  } finally {
    if (!ended) await reader.cancel().catch(() => undefined);
    reader.releaseLock();
  }
}
