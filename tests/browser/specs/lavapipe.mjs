// The package in a Chromium whose GPU has what is optional in WebGPU. Its adapter is Mesa's lavapipe, see
// `xtask/src/lavapipe.rs`.

import assert from 'node:assert/strict';
import { after, before, describe, test } from 'node:test';

import { PATIENCE } from '../harness.mjs';
import { EXPERTS, REPLIES, answersAsRecorded, load, openChromium, servePackage } from '../package.mjs';

const executable = process.env.OUTRIDER_CHROMIUM_LAVAPIPE;
const open = openChromium('', executable);
const quick = process.argv.includes('--quick') && '--quick';
/** Software rendering is slow: some of the prompts. */
const SOME = REPLIES.slice(0, process.argv.includes('--full') ? 10 : 3);

/** Computes with f16 and across a subgroup, and writes the last word of the largest binding that every GPU has. */
const KERNEL = `
  enable f16;
  enable subgroups;

  @group(0) @binding(0) var<storage, read_write> words: array<u32>;

  @compute @workgroup_size(32)
  fn main(@builtin(subgroup_invocation_id) lane: u32, @builtin(subgroup_size) size: u32) {
    // 2049 is no f16.
    let rounded = f16(f32(size - size + 2049u));
    let next = subgroupShuffleXor(lane + 100u, 1u);
    if (lane == 1u) {
      words[0] = size;
      words[1] = u32(rounded);
      words[2] = next;
      words[arrayLength(&words) - 1u] = 12345u;
    }
  }`;

const BINDING = 128 * 2 ** 20;

/** Runs the kernel in the page. */
async function compute({ code, binding }) {
  const adapter = await navigator.gpu.requestAdapter();
  const device = await adapter.requestDevice({ requiredFeatures: ['shader-f16', 'subgroups'] });
  const errors = [];
  device.onuncapturederror = ({ error }) => errors.push(error.message);
  const words = device.createBuffer({ size: binding, usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC });
  const read = device.createBuffer({ size: 16, usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST });
  const module = device.createShaderModule({ code });
  const pipeline = await device.createComputePipelineAsync({ layout: 'auto', compute: { module } });
  const group = device.createBindGroup({ layout: pipeline.getBindGroupLayout(0), entries: [{ binding: 0, resource: { buffer: words } }] });
  const encoder = device.createCommandEncoder();
  const pass = encoder.beginComputePass();
  pass.setPipeline(pipeline);
  pass.setBindGroup(0, group);
  pass.dispatchWorkgroups(1);
  pass.end();
  encoder.copyBufferToBuffer(words, 0, read, 0, 12);
  encoder.copyBufferToBuffer(words, binding - 4, read, 12, 4);
  device.queue.submit([encoder.finish()]);
  await read.mapAsync(GPUMapMode.READ);
  const [size, rounded, next, last] = new Uint32Array(read.getMappedRange());
  const { subgroupMinSize, subgroupMaxSize } = adapter.info;
  const { maxStorageBufferBindingSize } = adapter.limits;
  device.destroy();
  return { errors, rounded, next, last, size, subgroupMinSize, subgroupMaxSize, maxStorageBufferBindingSize };
}

const skip = quick || (!executable && 'there is no Chromium with lavapipe');

describe('Chromium with lavapipe', { timeout: 8 * PATIENCE, skip }, () => {
  let server;

  before(async () => {
    server = await servePackage();
  });
  after(() => server.close());

  test('computes in f16, across subgroups, and in a binding of 128 MiB', async (context) => {
    await open(server, async (page) => {
      const { errors, rounded, next, last, ...gpu } = await page.evaluate(compute, { code: KERNEL, binding: BINDING });
      context.diagnostic(JSON.stringify(gpu));
      assert.deepEqual(errors, []);
      assert.deepEqual({ rounded, next, last }, { rounded: 2048, next: 100, last: 12345 });
      assert.ok(gpu.size >= gpu.subgroupMinSize && gpu.size <= gpu.subgroupMaxSize);
      assert.ok(gpu.maxStorageBufferBindingSize >= BINDING);
    });
  });

  for (const f16 of [false, true]) {
    test(`${f16 ? 'f16' : 'f32'}: the native CPU's tokens, with every expert resident and with some`, async (context) => {
      await open(server, async (page) => {
        const { error, stats } = await load(page, { backend: 'gpu', f16 });
        assert.ifError(error && new Error(error.message));
        context.diagnostic(`runs on ${JSON.stringify(stats.backend)}`);
        assert.equal(stats.backend.detail.endsWith(', f16'), f16);
        assert.equal(stats.pool.slots, EXPERTS);
        await answersAsRecorded(page, SOME);

        const { stats: part } = await load(page, { backend: 'gpu', f16, memoryBudget: '16MiB' });
        assert.ok(part.pool.slots < EXPERTS / 2, `${part.pool.slots} slots`);
        await answersAsRecorded(page, SOME);
        const after = await page.call('stats');
        assert.ok(after.pool.hits > 0 && after.pool.misses > 0);
      });
    });
  }
});
