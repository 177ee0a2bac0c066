/** The client against a real server: SLOPLET_URL and SLOPLET_KEY say which, SLOPLET_TEST_ENGINE on which engine. */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { request } from "node:http";
import { after, before, test } from "node:test";
import OfWs from "ws";

import * as sloplet from "../src/index.js";
import { Client, Sandbox } from "../src/index.js";

const engine = process.env["SLOPLET_TEST_ENGINE"] ?? "auto";
const live = process.env["SLOPLET_TEST_LIVE_ENGINE"]; // one that saves memory and processes
const there = process.env["SLOPLET_URL"] !== undefined;
const skip = there ? false : "no server: SLOPLET_URL is not set";
// Node's own is there from 22 on, and behind a flag before.
const WebSocket: unknown = process.env["SLOPLET_TEST_WEBSOCKET"] === "global" ? globalThis.WebSocket : OfWs;
const client = new Client({ WebSocket });
let box: Sandbox;

before(async () => {
  if (there) box = await client.create({ engine, labels: { from: "js" } });
});
after(async () => {
  await box?.close();
});

async function sha256(stream: AsyncIterable<Uint8Array>): Promise<string> {
  const hash = createHash("sha256");
  for await (const piece of stream) hash.update(piece);
  return hash.digest("hex");
}

// -- sandboxes -------------------------------------------------------------------

test("a block's sandbox is gone after it", { skip }, async () => {
  let id: string;
  {
    await using made = await Sandbox.create({ engine });
    id = made.id;
    assert.equal(made.info.state, "running");
    assert.equal((await Sandbox.connect(id)).id, id);
  }
  await assert.rejects(Sandbox.connect(id), sloplet.SandboxNotFound);
});

test("the same Idempotency-Key is the same sandbox", { skip }, async () => {
  const idempotencyKey = crypto.randomUUID();
  await using one = await client.create({ engine }, { idempotencyKey });
  const two = await client.create({ engine }, { idempotencyKey });
  assert.equal(one.id, two.id);
  await assert.rejects(client.create({ engine, pids: 99 }, { idempotencyKey }), sloplet.SlopletError);
});

test("sandboxes are listed by label, name and page", { skip }, async () => {
  const name = `js-${crypto.randomUUID().slice(0, 8)}`;
  const named = await client.create({ engine, name, labels: { run: name } });
  try {
    const ids = async (filter: sloplet.Filter): Promise<string[]> => {
      const found: string[] = [];
      for await (const info of Sandbox.list(filter)) found.push(info.id);
      return found;
    };
    assert.deepEqual(await ids({ labels: { run: name } }), [named.id]);
    assert.deepEqual(await ids({ name }), [named.id]);
    assert.ok((await ids({ labels: { from: "js" } })).includes(box.id));
    await assert.rejects(client.create({ engine, name }), sloplet.SandboxExists);
    assert.equal((await client.create({ engine, name, labels: { run: name }, reuse: true })).id, named.id);
    await assert.rejects(client.create({ engine, name, pids: 77, reuse: true }), sloplet.SandboxMismatch);
  } finally {
    await named.kill();
  }
  await named.kill(); // again: no error
});

test("a wrong key is refused", { skip }, async () => {
  const wrong = new Client({ key: `slp_${"a".repeat(12)}_${"b".repeat(43)}`, WebSocket });
  await assert.rejects(wrong.me(), (error: unknown) => error instanceof sloplet.KeyRefused && error.status === 401);
  await assert.rejects(new Client({ key: "" }).create(), sloplet.KeyRefused);
  const held = new Sandbox(wrong, box.info);
  await assert.rejects(held.spawn("sh", { pty: true }), sloplet.KeyRefused); // a WebSocket tells why, too
});

test("guarantees, metrics and who we are", { skip }, async () => {
  assert.ok((await box.guarantees()).length > 0);
  assert.ok((await box.metrics()).pids_limit > 0);
  assert.equal((await client.me()).admin, false);
  assert.ok(Array.isArray((await client.call("get", "/v1/volumes", {})).items));
});

// -- commands --------------------------------------------------------------------

test("a command's output and end", { skip }, async () => {
  const result = await box.run("echo out; echo err >&2; exit 3", { env: { A_B: "x" } });
  assert.deepEqual([result.stdout, result.stderr, result.exit_code, result.ok], ["out\n", "err\n", 3, false]);
  assert.match(result.describe(), /exit code 3/);
  assert.equal((await box.run(["printf", "%s|", "a b", "$X"])).stdout, "a b|$X|");
  assert.equal((await box.run('echo "$A_B"; pwd', { env: { A_B: "ä" }, cwd: "/tmp" })).stdout, "ä\n/tmp\n");
  assert.equal((await box.run("cat", { input: "läuft" })).stdout, "läuft");
});

test("bytes are exact, both ways", { skip }, async () => {
  const bytes = Uint8Array.from({ length: 1024 }, (_, index) => index % 256);
  const result = await box.run("cat", { input: bytes });
  assert.deepEqual(result.stdoutBytes, bytes);
  assert.ok(result.stdout.includes("\ufffd"));
});

test("output comes while the command runs", { skip }, async () => {
  const seen: string[] = [];
  const result = await box.run("echo first; while [ ! -e go ]; do sleep 0.02; done; echo second; rm go", {
    timeout: "30s",
    onStdout: async (text) => {
      seen.push(text);
      if (text.includes("first")) await box.files.write("go", ""); // without it the command would not go on
    },
  });
  assert.ok(result.ok, result.describe());
  assert.equal(seen.join(""), "first\nsecond\n");
  assert.equal(result.stdout, "first\nsecond\n");
});

test("a time limit and check", { skip }, async () => {
  const result = await box.run("sleep 60", { timeout: 0.2 });
  assert.ok(result.timed_out && !result.ok);
  await assert.rejects(box.run("sleep 60", { timeout: 0.2, check: true }), sloplet.CommandTimeout);
  await assert.rejects(box.run("echo no >&2; false", { check: true }), (error: unknown) => {
    return error instanceof sloplet.CommandFailed && error.result?.exit_code === 1 && /no/.test(error.message);
  });
  await assert.rejects(box.run(["no-such-program"]), sloplet.CommandNotFound);
  await assert.rejects(box.run("true", { cwd: "/nowhere" }), sloplet.WorkdirInvalid);
});

test("more output than is kept is counted, not sent", { skip }, async () => {
  const result = await box.run("head -c 3000000 /dev/zero", { max_output: 1000 });
  assert.deepEqual([result.stdoutBytes.length, result.stdout_size, result.truncated], [1000, 3000000, true]);
  let seen = 0;
  const all = await box.run("head -c 3000000 /dev/zero", { max_output: 1000, onStdout: (text) => (seen += text.length) });
  assert.deepEqual([seen, all.stdoutBytes.length, all.truncated], [3000000, 1000, true]);
});

test("aborting ends the command", { skip }, async () => {
  const stop = new AbortController();
  const asked = box.run("echo here; exec sleep 61.5", { signal: stop.signal, onStdout: () => stop.abort() });
  await assert.rejects(asked, { name: "AbortError" });
  await ended("sleep 61.5");
});

async function ended(command: string): Promise<void> {
  for (const from = Date.now(); Date.now() - from < 20_000; ) {
    const found = await box.run("cat /proc/[0-9]*/cmdline");
    if (!found.stdout.includes(command.replace(" ", "\0"))) return;
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  assert.fail(`${command} still runs`);
}

test("spawn without a WebSocket: followed, signalled", { skip }, async () => {
  const plain = new Sandbox(new Client({ WebSocket: false }), box.info);
  const started = await plain.spawn("trap 'echo bye; exit 7' TERM; echo up; while :; do sleep 0.02; done");
  let text = "";
  for await (const piece of started) {
    text += piece.text;
    if (piece.text.includes("up")) await started.signal("TERM", { tree: false });
  }
  assert.equal(text, "up\nbye\n");
  assert.equal((await started.wait()).exit_code, 7);
  await assert.rejects(started.send("x"), sloplet.SpecError);
});

test("a background process, its output, its end", { skip }, async () => {
  const plain = new Sandbox(new Client({ WebSocket: false }), box.info);
  const info = await plain.start("echo one; echo two >&2; exec sleep 62.5", { tag: "job" });
  let text = "";
  for await (const piece of plain.output(info.pid)) {
    text += piece.text;
    if (text.length === 8) await plain.signal(info.pid, "KILL");
  }
  assert.deepEqual(text.split("\n").sort(), ["", "one", "two"]);
  const found = (await box.processes()).find((one) => one.pid === info.pid);
  assert.deepEqual([found?.running, found?.tag, found?.exit_code], [false, "job", 137]);
});

test("stdin while it runs", { skip }, async () => {
  const started = await box.spawn("while read line; do echo got $line; done; echo end", { stdin: true });
  const pieces = started[Symbol.asyncIterator]();
  for (const word of ["a", "b"]) {
    await started.send(`${word}\n`);
    assert.equal((await pieces.next()).value?.text, `got ${word}\n`);
  }
  await started.closeStdin();
  const result = await started.wait({ check: true });
  assert.equal(result.stdout, "got a\ngot b\nend\n");
});

test("much stdin is held up by whoever does not read", { skip }, async () => {
  const started = await box.spawn("sha256sum", { stdin: true });
  const piece = new Uint8Array(2 ** 20).fill(7);
  const hash = createHash("sha256");
  for (let count = 0; count < 16; count++) {
    hash.update(piece);
    await started.send(piece);
  }
  await started.closeStdin();
  assert.equal((await started.wait()).stdout.split(" ")[0], hash.digest("hex"));
});

test("a terminal: its size, a resize, ^C", { skip }, async () => {
  await using shell = await box.spawn(["/bin/sh"], { pty: { rows: 30, cols: 100 }, env: { PS1: "$ " } });
  let text = "";
  const pieces = shell[Symbol.asyncIterator]();
  const until = async (wanted: RegExp): Promise<void> => {
    while (!wanted.test(text)) {
      const next = await pieces.next();
      assert.ok(!next.done, `it ended; seen: ${text}`);
      text += next.value.text;
    }
  };
  await shell.send("stty size\n");
  await until(/30 100/);
  await shell.resize(41, 123);
  await shell.send("stty size\n");
  await until(/41 123/);
  await shell.send("sleep 63.5\n");
  await until(/sleep 63.5/);
  await shell.send("\x03");
  await shell.send("echo $((6 * 7))\n");
  await until(/42/);
  await shell.send("exit 5\n");
  assert.equal((await shell.wait()).exit_code, 5);
});

test("detached: it goes on, and another one joins", { skip }, async () => {
  const first = await box.spawn("read line; echo heard $line", { stdin: true, detached: true });
  first.detach();
  const second = await box.attach(first.pid);
  await second.send("you\n");
  assert.equal((await second.wait()).stdout, "heard you\n");
  await assert.rejects(box.attach(999_999), sloplet.ProcessNotFound);
});

// -- files -----------------------------------------------------------------------

test("files: written, read, listed, moved, removed", { skip }, async () => {
  const { files } = box;
  const info = await files.write("dir/sub/ä.txt", "grüße", { mode: 0o640 });
  assert.equal(info.size, 7);
  assert.equal(await files.readText("dir/sub/ä.txt"), "grüße");
  assert.equal((await files.stat("dir/sub/ä.txt")).mode & 0o777, 0o640);
  assert.deepEqual((await files.list("dir", { recursive: true })).map((one) => one.name), ["sub", "sub/ä.txt"]);
  await files.write("dir/sub/ä.txt", "!", { append: true });
  await files.move("dir/sub/ä.txt", "dir/b");
  assert.equal(await files.readText("dir/b", { offset: 4, length: 3 }), "ße"); // by bytes: the rest of "grüße!"
  await files.symlink("dir/link", "b");
  assert.equal((await files.stat("dir/link", { follow: false })).target, "b");
  await files.chmod("dir/b", 0o600);
  await files.mkdir("dir/x/y");
  assert.ok(await files.exists("dir/x/y"));
  await assert.rejects(files.remove("dir"), sloplet.FileError);
  await files.remove("dir", { recursive: true });
  assert.ok(!(await files.exists("dir")));
  await files.remove("dir", { missing_ok: true });
  await assert.rejects(files.remove("dir"), sloplet.FileMissing);
  await assert.rejects(files.readText("nowhere"), (error: unknown) => {
    return error instanceof sloplet.FileMissing && error.errno === 2 && error.status === 404;
  });
  await files.write("once", "1", { exclusive: true });
  await assert.rejects(files.write("once", "2", { exclusive: true }), sloplet.FileExists);
});

test("a file streams in and out", { skip }, async () => {
  const piece = new Uint8Array(2 ** 20).map((_, index) => index * 7);
  async function* pieces(): AsyncGenerator<Uint8Array> {
    for (let count = 0; count < 32; count++) yield piece;
  }
  const info = await box.files.write("big", pieces());
  assert.equal(info.size, 32 * 2 ** 20);
  const wanted = await sha256(pieces());
  assert.equal((await box.run("sha256sum big")).stdout.split(" ")[0], wanted);
  assert.equal(await sha256(await box.files.stream("big")), wanted);
  const part = await box.files.read("big", { offset: 1_000_001, length: 5 });
  assert.deepEqual([...part], [...piece.subarray(1_000_001, 1_000_006)]);
  await box.files.remove("big");
});

test("an upload that breaks off leaves the old file", { skip }, async () => {
  await box.files.write("kept", "old");
  async function* broken(): AsyncGenerator<Uint8Array> {
    yield new Uint8Array(100_000);
    throw new Error("no more");
  }
  await assert.rejects(box.files.write("kept", broken()));
  assert.equal(await box.files.readText("kept"), "old");
});

test("a folder goes out and in as a tar", { skip }, async () => {
  await box.files.write("tree/a/b", "deep");
  const tar = await box.files.archive("tree");
  await box.files.extract("copy", tar);
  assert.equal(await box.files.readText("copy/a/b"), "deep");
});

test("changes are watched", { skip }, async () => {
  await box.files.mkdir("watched");
  const seen: string[] = [];
  for await (const change of box.files.watch("watched")) {
    seen.push(change.kind);
    if (change.kind === "ready") await box.files.write("watched/new", "x");
    if (change.name === "new") break;
  }
  assert.equal(seen[0], "ready");
});

// -- code, history, events, ports --------------------------------------------------

test("cells of code keep their variables", { skip }, async () => {
  await box.code("x = 20");
  let printed = "";
  const result = await box.code("print('hi'); x + 22", { onStdout: (text) => (printed += text) });
  assert.deepEqual([result.text, printed, result.stdout, result.ok], ["42", "hi\n", "hi\n", true]);
  const failed = await box.code("1 / 0");
  assert.equal(failed.error?.name, "ZeroDivisionError");
  assert.ok((await box.contexts.list()).some((one) => one.language === "python"));
});

test("snapshot, rollback, diff, template", { skip }, async () => {
  await using made = await client.create({ engine });
  await made.files.write("state", "one");
  const saved = await made.snapshot("works");
  await made.files.write("state", "two");
  await made.files.write("more", "x");
  const paths = (await made.diff(saved)).changes.map((change) => [change.path, change.kind]);
  assert.deepEqual(paths, [["/workspace/more", "added"], ["/workspace/state", "changed"]]);
  await made.rollback("works");
  assert.equal(await made.files.readText("state"), "one");
  assert.deepEqual((await made.snapshots()).map((one) => one.name), ["works"]);
  const name = `js-${crypto.randomUUID().slice(0, 8)}`;
  await made.template(name);
  assert.ok((await client.templates()).some((one) => one.name === name));
  await using other = await client.create({ engine, template: name });
  assert.equal(await other.files.readText("state"), "one");
  await other.kill();
  await client.deleteTemplate(name);
});

test("pause, resume and fork keep what runs", { skip: skip || (live === undefined && "no engine that saves processes") }, async () => {
  await using made = await client.create({ engine: live! });
  await made.code("x = 41");
  assert.equal((await made.pause()).state, "paused");
  assert.equal((await made.resume()).state, "running");
  const children = await made.fork(2);
  assert.equal(children.length, 2);
  for (const child of children) {
    assert.notEqual(child.id, made.id);
    assert.equal((await child.code("x + 1")).text, "42");
    await child.close();
  }
});

test("its time to live, and a sleep with its files only", { skip }, async () => {
  await using made = await client.create({ engine, ttl: "1h", on_ttl: "pause-disk" });
  await made.files.write("state", "kept");
  const until = (await made.setTtl("2h")).expires_at ?? 0;
  assert.ok(until > Date.now() / 1000 + 7000);
  assert.equal((await made.setTtl(null)).expires_at, null);
  assert.equal((await made.snapshot("files", { memory: false })).kind, "disk");
  assert.equal((await made.pause({ memory: false })).state, "paused");
  assert.equal(await made.files.readText("state"), "kept");
  const [child] = await made.fork(1, { snapshot: "files", ttl: 60 });
  assert.ok((child!.info.expires_at ?? 0) > 0);
  await child!.kill();
  assert.equal((await made.setTtl(0)).state, "paused");
});

test("an archive goes out and comes in as another sandbox", { skip }, async () => {
  await using made = await client.create({ engine });
  await made.files.write("state", "carried");
  await using other = await Sandbox.load(await made.export({ image: false }), { client });
  assert.notEqual(other.id, made.id);
  assert.equal(await other.files.readText("state"), "carried");
});

test("events are told", { skip }, async () => {
  const stop = new AbortController();
  const types: string[] = [];
  const told = box.events({ signal: stop.signal });
  const first = told.next(); // listening begins with it
  const from = Date.now();
  let event: sloplet.Event | undefined;
  void first.then((next) => (event = next.value ?? undefined));
  while (event === undefined && Date.now() - from < 20_000) await box.run("true");
  for (types.push(event!.type); !types.includes("command.exited"); ) types.push((await told.next()).value!.type);
  assert.ok(types.some((type) => type.startsWith("command.")));
  stop.abort();
  await assert.rejects(async () => {
    while (!(await told.next()).done);
  }, { name: "AbortError" });
});

test("a port inside has an address", { skip }, async () => {
  await box.files.write("index.html", "from inside");
  await using server = await box.spawn(["python3", "-u", "-m", "http.server", "8000"]);
  for await (const piece of server) if (piece.text.includes("Serving")) break;
  const { url, token } = await box.publish(8000);
  assert.match(new URL(url).hostname, new RegExp(`^8000-${box.id}\\.`));
  assert.equal((await get(url)).status, 404); // as if there were none
  assert.deepEqual(await get(url, { "Sloplet-Token": token! }), { status: 200, text: "from inside" });
  assert.equal(new URL(await box.url(8000)).searchParams.get("sloplet_token"), token);
  const open = await box.url(8000, { public: true });
  assert.deepEqual(await get(open), { status: 200, text: "from inside" });
  await box.unpublish(8000);
  assert.notEqual((await get(open)).status, 200);
  await server.kill();
});

/** Not every machine resolves *.localhost: the name goes into Host. */
async function get(address: string, headers: Record<string, string> = {}): Promise<{ status: number; text: string }> {
  const url = new URL(address);
  return new Promise((resolve, reject) => {
    const options = { host: "127.0.0.1", port: url.port, path: "/index.html", headers: { ...headers, Host: url.host } };
    request(options, (answer) => {
      let text = "";
      answer.on("data", (piece: Buffer) => (text += piece.toString()));
      answer.on("end", () => resolve({ status: answer.statusCode!, text }));
    }).on("error", reject).end();
  });
}

test("the network policy is read and set", { skip }, async () => {
  await using made = await client.create({ engine, network: { allow: ["example.com"] } });
  assert.deepEqual((await made.network.get()).allow, ["example.com"]);
  const set = await made.network.set({ allow: ["example.com", "example.org"] });
  assert.deepEqual(set.allow, ["example.com", "example.org"]);
  assert.deepEqual(await made.network.log(), []);
});
