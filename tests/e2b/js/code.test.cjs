// The code interpreter's JavaScript client.
'use strict'
const { test, describe, before, after } = require('node:test')
const assert = require('node:assert/strict')
const { Sandbox } = require('@e2b/code-interpreter')

describe('code', () => {
  let box
  before(async () => { box = await Sandbox.create({ timeoutMs: 300_000, envs: { OF: 'sandbox' } }) })
  after(async () => { await box.kill() })

  test('keeps its variables', async () => {
    await box.runCode('x = 20')
    assert.equal((await box.runCode('x + 1')).text, '21')
    const failed = await box.runCode('missing')
    assert.deepEqual([failed.error.name, failed.error.value], ['NameError', "name 'missing' is not defined"])
  })

  test('tells as it prints', async () => {
    const lines = []
    const done = await box.runCode('print(1)', { onStdout: (message) => lines.push(message.line) })
    assert.deepEqual(lines, ['1\n'])
    assert.deepEqual(done.logs.stdout, ['1\n'])
  })

  test('draws', async () => {
    const done = await box.runCode("import matplotlib.pyplot as plt\nplt.pie([9, 1], labels=['a', 'b'])\nplt.show()")
    assert.ok(done.results[0].png)
    assert.equal(done.results[0].chart.type, 'pie')
    assert.deepEqual(done.results[0].chart.elements.map((each) => [each.label, each.angle]), [['a', 324], ['b', 36]])
  })

  test('speaks languages', async () => {
    assert.equal((await box.runCode('process.env.OF', { language: 'javascript' })).text, 'sandbox')
    assert.deepEqual((await box.runCode('echo $OF', { language: 'bash' })).logs.stdout, ['sandbox\n'])
  })

  test('has contexts', async () => {
    const context = await box.createCodeContext({ cwd: '/tmp' })
    assert.equal((await box.runCode('import os; os.getcwd()', { context })).text, '/tmp')
    assert.ok((await box.listCodeContexts()).some((each) => each.id === context.id))
    await box.removeCodeContext(context)
  })
})
