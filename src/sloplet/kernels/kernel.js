// The Node kernel: runs code cells, one after another, in one global scope. The protocol is kernel.py's. With the language
// "typescript" cells lose their types first, by the compiler that is installed; with "deno" it is Deno that runs all of it.
//
// Runs INSIDE a sandbox, under whatever Node (14 or newer) or Deno is there, without packages. Cells are evaluated as V8's REPL
// mode does it, through the inspector of this process: top-level await works, and let and const may be declared again.
(function (require, key, load, language, requests) {
  'use strict';
  const fs = require('fs');
  const net = require('net');
  const path = require('path');
  const util = require('util');
  const vm = require('vm');
  const inspector = require('inspector');

  const PIECE = 2880, MOST = 16 * 1024 * 1024, MOST_TEXT = 1024 * 1024, MOST_TRACE = 64 * 1024;
  const HIDDEN = Symbol('sloplet'); // a global that is there only while something calls back through it
  const CALLBACK = 'globalThis[Object.getOwnPropertySymbols(globalThis).find((s) => s.description === "sloplet")]';
  let cell = '', count = 0, busy = false, rest = '';
  let interrupt = null; // ends the cell that awaits something
  const waiting = [];
  const session = new inspector.Session();
  session.connect();

  function write(fd, text) {
    let data = Buffer.from(text);
    while (data.length) {
      try {
        data = data.subarray(fs.writeSync(fd, data));
      } catch (error) {
        if (error.code !== 'EAGAIN') return;
        Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 5); // somebody made the pipe non-blocking
      }
    }
  }
  const say = (what, fd) => write(fd || 1, `\x1e${key} ${cell} ${what}\n`);

  function send(name, raw) {
    for (let at = 0; at < raw.length; at += PIECE) {
      say(`data ${name} ${raw.subarray(at, at + PIECE).toString('base64')}`);
    }
  }

  // -- what a value looks like

  function bundle(value) {
    const found = {};
    const put = (mime, data) => {
      if (data === null || data === undefined || !/^[a-z0-9.+-]+\/[A-Za-z0-9.+-]+$/.test(mime)) return;
      if (Buffer.isBuffer(data) || data instanceof Uint8Array) found[mime] = Buffer.from(data);
      else if (mime === 'image/png' || mime === 'image/jpeg') found[mime] = Buffer.from(String(data), 'base64');
      else if (typeof data === 'string') found[mime] = Buffer.from(data);
      else found[mime] = Buffer.from(JSON.stringify(data));
    };
    try {
      const display = value && value[Symbol.for('Jupyter.display')];
      if (typeof display === 'function') {
        for (const [mime, data] of Object.entries(display.call(value))) put(mime, data);
      }
    } catch (error) { /* a representation that fails is left out */ }
    const methods = { html: 'text/html', markdown: 'text/markdown', svg: 'image/svg+xml', png: 'image/png',
      jpeg: 'image/jpeg', latex: 'text/latex', json: 'application/json', javascript: 'application/javascript' };
    for (const [name, mime] of Object.entries(methods)) {
      try {
        const method = value && value[`_repr_${name}_`];
        if (typeof method === 'function' && !found[mime]) put(mime, method.call(value));
      } catch (error) { /* likewise */ }
    }
    if (!found['text/plain']) put('text/plain', util.inspect(value, { depth: 4, maxArrayLength: 200, maxStringLength: MOST_TEXT }));
    return found;
  }

  function publish(parts, kind) {
    for (let [mime, raw] of Object.entries(parts)) {
      if (mime === 'text/plain' && raw.length > MOST_TEXT) { raw = raw.subarray(0, MOST_TEXT); say('cut'); }
      if (raw.length > MOST) say('cut'); else send(mime, raw);
    }
    say(kind);
  }

  function fail(error) {
    let name = 'Error', message = '', trace = '';
    try {
      if (error instanceof Error || (error && typeof error === 'object' && 'stack' in error)) {
        name = String(error.name || 'Error');
        message = String(error.message);
        const lines = String(error.stack || '').split('\n');
        const ours = lines.findIndex((line) => /evalmachine\.<anonymous>|sloplet kernel|Session\.post/.test(line));
        trace = (ours < 0 ? lines : lines.slice(0, ours)).join('\n');
      } else {
        name = 'Thrown';
        message = util.inspect(error);
        trace = `Thrown: ${message}`;
      }
    } catch (problem) { message = '(its message could not be made)'; }
    send('name', Buffer.from(name));
    send('message', Buffer.from(message.slice(0, MOST_TRACE)));
    send('traceback', Buffer.from(trace.slice(0, MOST_TRACE)));
    say('error');
  }

  // -- running

  function interrupted() {
    const error = new Error('the cell was interrupted');
    error.name = 'KeyboardInterrupt';
    error.stack = 'KeyboardInterrupt: the cell was interrupted';
    return error;
  }

  // The inspector answers with handles of its own; the value itself is fetched through a global that is gone at once.
  function fetch(remote) {
    if (remote.unserializableValue) return vm.runInThisContext(`(${remote.unserializableValue})`); // NaN, 10n
    if (!remote.objectId) return remote.value;
    let value;
    globalThis[HIDDEN] = (given) => { value = given; };
    try {
      const { objectId } = remote;
      const functionDeclaration = `function (given) { ${CALLBACK}(given); }`;
      session.post('Runtime.callFunctionOn', { objectId, silent: true, arguments: [{ objectId }], functionDeclaration });
      session.post('Runtime.releaseObject', { objectId });
    } finally {
      delete globalThis[HIDDEN];
    }
    return value;
  }

  // import() does not work in what the inspector evaluates: it becomes a call, outside of strings and comments.
  function withImports(source) {
    const other = /("(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\/\/[^\n]*|\/\*[^]*?\*\/|`(?:\\[^]|[^`\\])*`)|(?<![.\w$])import(?=\s*\()/g;
    return source.replace(other, (all, kept) => kept || 'globalThis[Symbol.for("sloplet.import")]');
  }

  // Static imports are for modules, which cells are not: tried where a cell fails to compile for them.
  function withoutStaticImports(source) {
    const bare = /^([ \t]*)import\s*(["'][^"'\n]+["'])/gm;
    const names = new RegExp(
      String.raw`^([ \t]*)import\s+(?:([\w$]+)\s*,?\s*)?(?:\*\s*as\s+([\w$]+)\s*|\{([^}]*)\}\s*)?from\s*(["'][^"'\n]+["'])`, 'gm');
    return source.replace(bare, '$1await import($2)').replace(names, (all, indent, one, whole, some, from) => {
      const parts = (some || '').split(',').map((part) => part.trim().replace(/\s+as\s+/, ': ')).filter(Boolean);
      if (one) parts.unshift(`default: ${one}`);
      const star = whole ? `const ${whole} = await import(${from}); ` : '';
      return indent + star + (parts.length ? `const {${parts.join(', ')}} = await import(${from})` : '');
    });
  }

  const GUARDED = new vm.Script(`${CALLBACK}()`);

  function evaluate(source, name) {
    return new Promise((resolve, reject) => {
      interrupt = () => reject(interrupted());
      const answered = (error, answer) => {
        if (error) reject(new Error(error.message));
        else if (answer.exceptionDetails) {
          const details = answer.exceptionDetails;
          reject(details.exception ? fetch(details.exception) : new Error(details.text));
        } else resolve(fetch(answer.result));
      };
      const expression = `${withImports(source)}\n//# sourceURL=${name}`;
      globalThis[HIDDEN] = () => {
        delete globalThis[HIDDEN];
        session.post('Runtime.evaluate', { expression, replMode: true, awaitPromise: true, silent: true }, answered);
      };
      try {
        GUARDED.runInThisContext({ breakOnSigint: true }); // ends whatever runs within it
      } catch (error) {
        reject(error.code === 'ERR_SCRIPT_EXECUTION_INTERRUPTED' ? interrupted() : error);
      }
    });
  }

  // -- TypeScript

  let strip = null; // source -> JavaScript; throws a SyntaxError

  function broken(name, message) {
    const error = new SyntaxError(message);
    error.name = name;
    error.stack = `${name}: ${message}`;
    return error;
  }

  function byCompiler(ts) {
    const [major] = ts.version.split('.').map(Number);
    // An import that this cell does not use may be the next one's.
    const kept = major >= 5 ? { verbatimModuleSyntax: true } : { preserveValueImports: true, importsNotUsedAsValues: 2 };
    const compilerOptions = { ...kept, target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.ESNext, isolatedModules: true,
      strict: false, alwaysStrict: false };
    return (source) => {
      const made = ts.transpileModule(source, { compilerOptions, reportDiagnostics: true, fileName: 'cell.ts' });
      const wrong = made.diagnostics.find((one) => one.category === ts.DiagnosticCategory.Error && one.file);
      if (!wrong) return made.outputText;
      const at = wrong.file.getLineAndCharacterOfPosition(wrong.start);
      const told = ts.flattenDiagnosticMessageText(wrong.messageText, '\n');
      throw broken('SyntaxError', `line ${at.line + 1}, column ${at.character + 1}: ${told}`);
    };
  }

  // Deno's own: what is only stripped keeps its imports; what must be written anew (an enum) would lose those not used.
  function byDeno(source) {
    const { stripTypeScriptTypes } = require('module');
    try {
      return stripTypeScriptTypes(source);
    } catch (error) {
      try {
        return stripTypeScriptTypes(withoutStaticImports(source), { mode: 'transform' });
      } catch (problem) {
        throw broken('SyntaxError', String(problem.message).replace(/^SyntaxError: /, ''));
      }
    }
  }

  function withoutTypes(source) {
    if (strip) return strip(source);
    if (language === 'deno') { strip = byDeno; return strip(source); }
    const homes = [process.cwd(), '/usr/local/lib', '/usr/lib', path.join(path.dirname(process.execPath), '../lib')];
    for (const name of ['typescript', '/usr/share/nodejs/typescript']) {
      try {
        const found = require(require.resolve(name, { paths: homes }));
        if (typeof found.transpileModule === 'function') { strip = byCompiler(found); return strip(source); }
      } catch (error) { if (error instanceof SyntaxError) throw error; }
    }
    const own = require('module').stripTypeScriptTypes; // Node 22.13 and newer
    if (typeof own !== 'function') {
      throw broken('TypeScriptError', 'there is no TypeScript compiler in this sandbox: npm install -g typescript@5');
    }
    strip = (text) => own(text, { mode: 'transform' });
    return strip(source);
  }

  // { a: 1 } is meant as an object, not as a block with a label.
  function prepared(source) {
    const typed = language !== 'node';
    if (/^\s*\{[^]*\}\s*$/.test(source)) {
      try {
        const whole = typed ? withoutTypes(`(${source}\n)`) : `(${source}\n)`;
        new vm.Script(whole);
        return whole;
      } catch (error) { if (error.name !== 'SyntaxError') throw error; }
    }
    return typed ? withoutTypes(source) : source;
  }

  async function run(given, name) {
    const source = prepared(given);
    try {
      return await evaluate(source, name);
    } catch (error) {
      if (!(error instanceof SyntaxError) || !/import statement/.test(error.message)) throw error;
      return evaluate(withoutStaticImports(source), name);
    }
  }

  // A fork's random numbers must not be its sister's, and V8's cannot be seeded again.
  let generation = -1, seen = '';
  function lookAtGeneration() {
    if (generation < 0) return;
    const line = Buffer.alloc(128);
    const now = line.toString('latin1', 0, fs.readSync(generation, line, 0, 128, 0));
    if (seen && now !== seen) {
      const source = fs.openSync('/dev/urandom', 'r'), pool = Buffer.alloc(4096);
      let at = pool.length;
      Math.random = () => {
        if (at + 8 > pool.length) { fs.readSync(source, pool, 0, pool.length, null); at = 0; }
        at += 8;
        return Number(pool.readBigUInt64LE(at - 8) >> 11n) / 2 ** 53;
      };
    }
    seen = now;
  }
  try {
    generation = fs.openSync(process.env.SLOPLET_GENERATION_FILE || '', 'r');
    lookAtGeneration();
  } catch (error) { /* this rung makes no copies */ }

  // The cell's source, and variables of the environment that are there for it alone.
  function asked(request) {
    if (!('file' in request)) return request;
    const text = fs.readFileSync(request.file, 'utf8');
    try { fs.unlinkSync(request.file); } catch (error) { /* the host removes it, too */ }
    return request.whole ? JSON.parse(text) : { code: text };
  }

  async function serve(request) {
    cell = request.id;
    count += 1;
    say(`begin ${count}`);
    say('begin', 2);
    const before = new Map();
    try {
      lookAtGeneration();
      const { code, env } = asked(request);
      for (const [name, value] of Object.entries(env || {})) {
        before.set(name, process.env[name]);
        process.env[name] = value;
      }
      const value = await run(code, `cell-${count}`);
      interrupt = null;
      if (value !== undefined) { globalThis._ = value; publish(bundle(value), 'value'); }
    } catch (error) {
      fail(error);
    }
    interrupt = null;
    for (const [name, value] of before) {
      if (value === undefined) delete process.env[name]; else process.env[name] = value;
    }
    say('end 0');
    say('end', 2);
  }

  async function work() {
    if (busy) return;
    busy = true;
    while (waiting.length) await serve(waiting.shift());
    busy = false;
  }

  function take(data) {
    const lines = (rest + data).split('\n');
    rest = lines.pop();
    for (const line of lines) {
      let request;
      try { request = JSON.parse(line); } catch (error) { continue; }
      if (!request || request.key !== key) continue;
      if ('cancel' in request) {
        const at = waiting.findIndex((one) => one.id === request.cancel);
        if (at >= 0) waiting.splice(at, 1);
      } else waiting.push(request);
    }
    setImmediate(work); // after all that is there was read: cancellations, too
  }

  globalThis.display = (...values) => { for (const value of values) publish(bundle(value), 'shown'); };
  globalThis.require = require('module').createRequire(process.cwd() + '/');
  globalThis.module = { exports: {} };
  const named = language === 'deno' ? String : (name) => String(name).replace(/^npm:/, '');
  globalThis[Symbol.for('sloplet.import')] = (name) => load(named(name));
  const exits = (called) => (code) => {
    const error = new Error(`${called}(${code === undefined ? '' : code}) was called`);
    error.name = 'SystemExit';
    throw error;
  };
  process.exit = exits('process.exit');
  let leave = process.reallyExit;
  if (language === 'deno') { leave = globalThis.Deno.exit; globalThis.Deno.exit = exits('Deno.exit'); }
  process.on('SIGINT', () => { if (interrupt) interrupt(); });
  const later = (what) => (error) => write(2, `${what} ${(error && error.stack) || util.inspect(error)}\n`);
  process.on('uncaughtException', later('Uncaught'));
  process.on('unhandledRejection', later('Unhandled rejection:'));
  const input = requests === undefined ? new net.Socket({ fd: 3, readable: true, writable: false })
    : fs.createReadStream('', { fd: requests, autoClose: false }); // Deno's descriptors are its own
  input.setEncoding('utf8');
  input.on('data', take);
  input.on('end', () => leave(0));
})
