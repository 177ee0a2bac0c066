// Programs of E2B's JavaScript client, as its users write them.
'use strict'
const { test, describe, before, after } = require('node:test')
const assert = require('node:assert/strict')
const e2b = require('e2b')
const { Sandbox, CommandExitError, TimeoutError, NotFoundError, InvalidArgumentError, FilesystemEventType } = e2b

const live = process.env.SLOPLET_TEST_LIVE === '1'

async function until(what, seconds = 20) {
  const deadline = Date.now() + seconds * 1000
  while (!(await what())) {
    assert.ok(Date.now() < deadline, 'it did not come about in time')
    await new Promise((resolve) => setTimeout(resolve, 50))
  }
}

describe('a sandbox', () => {
  test('is made, found, listed and killed', async () => {
    const word = 'w' + Math.random().toString(36).slice(2)
    const box = await Sandbox.create({ timeoutMs: 100_000, metadata: { user: word, odd: 'a b&c=%d' } })
    assert.equal(await box.isRunning(), true)
    const info = await box.getInfo()
    assert.equal(info.sandboxId, box.sandboxId)
    assert.deepEqual(info.metadata, { user: word, odd: 'a b&c=%d' })
    const found = await Sandbox.list({ query: { metadata: { user: word, odd: 'a b&c=%d' } } }).nextItems()
    assert.deepEqual(found.map((each) => each.sandboxId), [box.sandboxId])
    const other = await Sandbox.connect(box.sandboxId)
    assert.equal((await other.commands.run('echo there')).stdout, 'there\n')
    await box.setTimeout(50_000)
    assert.equal(await box.kill(), true)
    assert.equal(await box.isRunning(), false)
    await assert.rejects(Sandbox.connect(box.sandboxId), NotFoundError)
    assert.equal(await Sandbox.kill(box.sandboxId), false)
  })

  test('ends while a command runs', async () => {
    const box = await Sandbox.create({ timeoutMs: 60_000 })
    const handle = await box.commands.run('sleep 1000', { background: true })
    await box.kill()
    await assert.rejects(handle.wait(), /killed or reached its end of life/)
  })
})

describe('in a sandbox', () => {
  let box
  before(async () => { box = await Sandbox.create({ timeoutMs: 300_000, envs: { OF: 'sandbox' } }) })
  after(async () => { await box.kill() })

  test('commands', async () => {
    const result = await box.commands.run('echo out $OF; echo err >&2; id -un; pwd')
    assert.equal(result.stdout, 'out sandbox\nuser\n/home/user\n')
    assert.equal(result.stderr, 'err\n')
    await assert.rejects(box.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
    await assert.rejects(box.commands.run('sleep 1000', { timeoutMs: 1000 }), TimeoutError)
    await assert.rejects(box.commands.run('pwd', { cwd: '/no/where' }), InvalidArgumentError)
    assert.equal((await box.commands.run('id -un; pwd', { user: 'root' })).stdout, 'root\n/root\n')
    let out = ''
    await box.commands.run('for n in 1 2 3; do echo $n; done', { onStdout: (data) => { out += data } })
    assert.equal(out, '1\n2\n3\n')
  })

  test('commands behind', async () => {
    let out = ''
    const handle = await box.commands.run('cat', { background: true, stdin: true, onStdout: (data) => { out += data } })
    await box.commands.sendStdin(handle.pid, 'hello')
    await until(() => out === 'hello')
    assert.ok((await box.commands.list()).some((each) => each.pid === handle.pid))
    const again = await box.commands.connect(handle.pid)
    assert.equal(again.pid, handle.pid)
    assert.equal(await box.commands.kill(handle.pid), true)
    await assert.rejects(handle.wait(), CommandExitError)
    assert.equal(await box.commands.kill(999_999), false)
    await assert.rejects(box.commands.connect(999_999), NotFoundError)
  })

  test('a terminal', async () => {
    let said = ''
    const terminal = await box.pty.create({
      cols: 80, rows: 24, envs: { ABC: '123' }, cwd: '/', onData: (data) => { said += Buffer.from(data).toString() },
    })
    await box.pty.resize(terminal.pid, { cols: 117, rows: 30 })
    await box.pty.sendInput(terminal.pid, new TextEncoder().encode('echo $ABC; tput cols; exit\n'))
    assert.equal((await terminal.wait()).exitCode, 0)
    assert.match(said, /123/)
    assert.match(said, /117/)
  })

  test('files', async () => {
    const info = await box.files.write('folder/file.txt', 'text ä')
    assert.equal(info.path, '/home/user/folder/file.txt')
    assert.equal(await box.files.read('folder/file.txt'), 'text ä')
    assert.equal((await box.files.read('folder/file.txt', { format: 'bytes' })).length, 7)
    assert.equal(await (await box.files.read('folder/file.txt', { format: 'blob' })).text(), 'text ä')
    await box.files.write([{ path: '/0/one', data: '1' }, { path: 'two', data: '2' }])
    assert.equal(await box.files.read('/0/one'), '1')
    assert.equal(await box.files.exists('nothing'), false)
    await assert.rejects(box.files.read('nothing'), NotFoundError)
    assert.equal(await box.files.makeDir('folder/deep'), true)
    assert.equal(await box.files.makeDir('folder/deep'), false)
    const entries = await box.files.list('folder')
    assert.deepEqual(entries.map((each) => [each.name, each.type]), [['deep', 'dir'], ['file.txt', 'file']])
    const found = await box.files.getInfo('folder/file.txt')
    assert.deepEqual([found.size, found.mode, found.owner], [7, 0o644, 'user'])
    assert.equal((await box.files.rename('two', 'three')).path, '/home/user/three')
    await box.files.remove('folder')
    assert.equal(await box.files.exists('folder'), false)
    const big = 'x'.repeat(20_000_000)
    await box.files.write('big', big)
    assert.equal((await box.files.read('big')).length, big.length)
  })

  test('files with metadata, packed, and by signed URLs', async () => {
    const made = await box.files.write('tagged', 'x', { metadata: { author: 'mish' } })
    assert.deepEqual(made.metadata, { author: 'mish' })
    assert.deepEqual((await box.files.getInfo('tagged')).metadata, { author: 'mish' })
    await box.files.write('packed', 'again '.repeat(10_000), { gzip: true })
    assert.equal((await box.files.read('packed', { gzip: true })).length, 60_000)
    const answer = await fetch(await box.downloadUrl('tagged'))
    assert.equal(await answer.text(), 'x')
    const form = new FormData()
    form.append('file', 'sent')
    const sent = await fetch(await box.uploadUrl('sent.txt'), { method: 'POST', body: form })
    assert.deepEqual(await sent.json(), [{ name: 'sent.txt', path: '/home/user/sent.txt', type: 'file' }])
    const late = await fetch(await box.downloadUrl('tagged', { useSignatureExpiration: -10_000 }))
    assert.deepEqual([late.status, await late.json()], [401, { code: 401, message: 'signature is already expired' }])
  })

  test('watching', async () => {
    await box.files.makeDir('watched')
    const events = []
    const handle = await box.files.watchDir('watched', (event) => { events.push([event.name, event.type]) }, { recursive: true })
    await box.files.write('watched/new', 'x')
    await until(() => events.length >= 3)
    assert.deepEqual(events, [
      ['new', FilesystemEventType.CREATE], ['new', FilesystemEventType.CHMOD], ['new', FilesystemEventType.WRITE],
    ])
    await box.files.makeDir('watched/nested')
    await until(() => events.some(([name]) => name === 'nested'))
    await box.files.write('watched/nested/file', 'x')
    await until(() => events.some(([name, type]) => name === 'nested/file' && type === FilesystemEventType.WRITE))
    await handle.stop()
    await assert.rejects(box.files.watchDir('nothing', () => {}), NotFoundError)
  })

  test('git', async () => {
    await box.git.init('/tmp/work', { initialBranch: 'main' })
    await box.git.configureUser('A Name', 'name@example.com')
    await box.files.write('/tmp/work/README.md', 'hello\n')
    await box.git.add('/tmp/work')
    await box.git.commit('/tmp/work', 'first')
    assert.match((await box.commands.run('git -C /tmp/work log --oneline')).stdout, /first/)
  })

  test('metrics', async () => {
    await until(async () => (await box.getMetrics()).length > 0)
    const [one] = await box.getMetrics()
    assert.ok(one.cpuCount >= 1 && one.memTotal > 0 && one.diskTotal > 0)
  })
})

describe('live state', () => {
  test('memory sleeps, wakes and is copied', { skip: !live && 'the engine cannot save memory' }, async () => {
    const box = await Sandbox.create({ timeoutMs: 120_000 })
    try {
      const handle = await box.commands.run('sleep 1000', { background: true })
      assert.equal(await box.pause(), true)
      assert.equal(await box.isRunning(), false)
      const again = await Sandbox.connect(box.sandboxId)
      assert.ok((await again.commands.list()).some((each) => each.pid === handle.pid))
      const snapshot = await again.createSnapshot()
      const copy = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 60_000 })
      assert.ok((await copy.commands.list()).some((each) => each.pid === handle.pid))
      await copy.kill()
      assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
    } finally {
      await box.kill()
    }
  })

  test('files alone sleep and wake', async () => {
    const box = await Sandbox.create({ timeoutMs: 120_000 })
    try {
      await box.files.write('kept', 'yes')
      assert.equal(await box.pause({ keepMemory: false }), true)
      const again = await Sandbox.connect(box.sandboxId)
      assert.equal(await again.files.read('kept'), 'yes')
    } finally {
      await box.kill()
    }
  })
})
