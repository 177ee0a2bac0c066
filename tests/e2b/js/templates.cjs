// Templates by the JavaScript client. Builds take their time: tests/e2e/test_e2b_templates.py runs this by itself.
'use strict'
const { test, after } = require('node:test')
const assert = require('node:assert/strict')
const fs = require('node:fs')
const os = require('node:os')
const path = require('node:path')
const { Sandbox, Template } = require('e2b')

const name = 'e2b-js-' + Math.random().toString(36).slice(2)
const context = fs.mkdtempSync(path.join(os.tmpdir(), 'context-'))
fs.mkdirSync(path.join(context, 'folder'))
fs.writeFileSync(path.join(context, 'folder', 'test.txt'), 'hello')
fs.symlinkSync('test.txt', path.join(context, 'folder', 'link'))

after(async () => {
  await Sandbox.deleteSnapshot(name)
  fs.rmSync(context, { recursive: true })
})

test('are built, tagged and used', async () => {
  const lines = []
  const template = Template({ fileContextPath: context })
    .fromBaseImage()
    .copy('folder/*', 'copied')
    .setEnvs({ A: 'b c' })
    .runCmd('cat copied/link > made; echo "$A" >> made')
    .setWorkdir('/work')
    .setStartCmd('exec sleep 100000', 'true')
  const info = await Template.build(template, `${name}:v1`, { tags: ['v2'], onBuildLogs: (entry) => lines.push(entry.message) })
  assert.deepEqual([...info.tags].sort(), ['v1', 'v2'])
  assert.ok(lines.some((line) => line.includes('[builder 1/4] COPY folder/* copied')), lines.join('\n'))
  await Template.assignTags(`${name}:v1`, ['default'])
  assert.deepEqual((await Template.getTags(name)).map((each) => each.tag).sort(), ['default', 'v1', 'v2'])
  assert.equal(await Template.exists(name), true)
  const box = await Sandbox.create(name, { timeoutMs: 100_000 })
  try {
    assert.equal(await box.files.read('/home/user/made'), 'hellob c\n')
    assert.equal((await box.commands.run('pwd')).stdout, '/work\n')
    assert.ok((await box.commands.list()).some((each) => each.args.join(' ').includes('sleep 100000')))
  } finally {
    await box.kill()
  }
})

test('say which step failed', async () => {
  await assert.rejects(Template.build(Template().fromTemplate('base').runCmd('exit 3'), name), (error) => {
    assert.equal(error.name, 'BuildError')
    assert.equal(error.message, "failed to run command 'exit 3': exit status 3")
    return true
  })
})
