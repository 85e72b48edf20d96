// The package's types against those of the `openai` package, by the compiler: see `types/openai.ts`.

import assert from 'node:assert/strict';
import { test } from 'node:test';

import { tsc } from './packed.mjs';

test('its types fit those of the `openai` package', async () => {
  await tsc(['-p', 'test/types']).catch(({ stdout }) => assert.fail(stdout));
});
