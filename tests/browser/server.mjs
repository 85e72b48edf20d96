// A static file server for the demo and the browser tests: ranges, entity tags, cross-origin isolation, a content
// security policy, a log of requests, and faults on demand. Node only, no packages.
//
//   node server.mjs [--port N] [--query TEXT] [--isolated] /=www/dist /models=models

import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { readFile, stat } from 'node:fs/promises';
import { createServer } from 'node:http';
import path from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { pathToFileURL } from 'node:url';
import { parseArgs } from 'node:util';

const TYPES = {
  '.css': 'text/css; charset=utf-8',
  '.html': 'text/html; charset=utf-8',
  '.ico': 'image/x-icon',
  '.js': 'text/javascript; charset=utf-8',
  '.json': 'application/json',
  '.map': 'application/json',
  '.mjs': 'text/javascript; charset=utf-8',
  '.png': 'image/png',
  '.svg': 'image/svg+xml',
  '.txt': 'text/plain; charset=utf-8',
  '.wasm': 'application/wasm',
  '.webmanifest': 'application/manifest+json',
};

/**
 * Starts a server. A file is looked for in the mount with the longest prefix that fits its path.
 *
 * @param {object} options
 * @param {Record<string, string>} options.mounts URL prefix → directory
 * @param {number} [options.port] 0, the default, takes a free one
 * @param {boolean} [options.isolated] send the headers that make pages cross-origin isolated
 * @param {string} [options.csp] a content security policy for every response
 * @param {boolean} [options.cors] let pages of other origins read everything
 */
export async function startServer({ mounts, port = 0, isolated = false, csp, cors = false }) {
  /** URL prefix → (request, response) => void, for what is not files. */
  const routes = new Map();
  const prefixes = Object.keys(mounts).sort((a, b) => b.length - a.length);
  const faults = new Set();
  const log = [];

  const headers = { 'Cache-Control': 'no-cache', 'X-Content-Type-Options': 'nosniff' };
  if (isolated) {
    headers['Cross-Origin-Opener-Policy'] = 'same-origin';
    headers['Cross-Origin-Embedder-Policy'] = 'require-corp';
  }
  headers['Cross-Origin-Resource-Policy'] = cors ? 'cross-origin' : 'same-origin';
  if (csp) headers['Content-Security-Policy'] = csp;
  if (cors) {
    headers['Access-Control-Allow-Origin'] = '*';
    headers['Access-Control-Allow-Headers'] = 'Range';
    headers['Access-Control-Expose-Headers'] = 'Accept-Ranges, Content-Length, Content-Range, ETag';
  }

  const server = createServer((request, response) => {
    const url = new URL(request.url, 'http://localhost');
    const route = [...routes].find(([prefix]) => url.pathname.startsWith(prefix));
    if (route) return route[1](request, response);
    const entry = { method: request.method, path: url.pathname, range: request.headers.range, status: 0, bytes: 0 };
    log.push(entry);
    for (const [name, value] of Object.entries(headers)) response.setHeader(name, value);
    const fault = takeFault(faults, url.pathname);
    respond(request, response, locate(mounts, prefixes, url.pathname), fault, entry).catch((error) => {
      // The client went away, or the file did while it was being sent: the rest of the answer cannot be sent.
      entry.error = String(error);
      response.destroy();
    });
  });
  await new Promise((done, failed) => {
    server.once('error', failed);
    server.listen(port, 'localhost', done);
  });

  return {
    origin: `http://localhost:${server.address().port}`,
    /** Every request so far: {method, path, range, status, bytes}. */
    log,
    routes,
    /**
     * Makes requests misbehave whose path matches `pattern` (a string it contains, or a regular expression); returns a
     * function that ends it. Of several that match, the latest counts. `fault` may hold: `status` (an answer without the
     * file), `gone` (no answer, as if there were no network), `cutAfter` (break the connection after that many bytes),
     * `truncate` (pretend that the file is that long), `flip` (flip a bit of the byte at that offset), `body` (a function
     * that makes other content from the file's), `ignoreRange`, `hang` (never answer), `delay` (milliseconds before the
     * answer), `rate` (bytes per second), `times` (how many requests it applies to).
     */
    fault(pattern, fault) {
      const item = { pattern, times: Infinity, ...fault };
      faults.add(item);
      return () => faults.delete(item);
    },
    close() {
      server.closeAllConnections();
      return new Promise((done) => server.close(done));
    },
  };
}

function takeFault(faults, pathname) {
  for (const fault of [...faults].reverse()) {
    const hit = typeof fault.pattern === 'string' ? pathname.includes(fault.pattern) : fault.pattern.test(pathname);
    if (hit && fault.times > 0) {
      fault.times -= 1;
      return fault;
    }
  }
  return {};
}

/** The file that a URL path names, or undefined if it names none that may be served. */
function locate(mounts, prefixes, pathname) {
  let decoded;
  try {
    decoded = decodeURIComponent(pathname);
  } catch {
    return undefined;
  }
  if (decoded.includes('\0') || decoded.includes('\\') || decoded.split('/').includes('..')) return undefined;
  const prefix = prefixes.find((p) => p === '/' || decoded === p || decoded.startsWith(`${p}/`));
  if (prefix === undefined) return undefined;
  const rest = prefix === '/' ? decoded : decoded.slice(prefix.length);
  return path.join(mounts[prefix], rest.endsWith('/') || rest === '' ? `${rest}/index.html` : rest);
}

async function respond(request, response, file, fault, entry) {
  const finish = (status, text = '') => {
    entry.status = status;
    response.statusCode = status;
    response.setHeader('Content-Type', 'text/plain; charset=utf-8');
    response.end(text);
  };
  if (fault.hang) return;
  if (fault.gone) return response.socket.destroy();
  if (fault.delay) await sleep(fault.delay);
  if (fault.status) return finish(fault.status, `status ${fault.status}, as asked`);
  if (request.method === 'OPTIONS') return finish(204);
  if (request.method !== 'GET' && request.method !== 'HEAD') return finish(405, 'only GET and HEAD are answered');
  const source = file && (await open(file, fault));
  if (!source) return finish(404, 'there is no such file');

  response.setHeader('Content-Type', TYPES[path.extname(file).toLowerCase()] ?? 'application/octet-stream');
  response.setHeader('ETag', source.etag);
  if (!fault.ignoreRange) response.setHeader('Accept-Ranges', 'bytes');
  if (request.headers['if-none-match'] === source.etag) {
    entry.status = response.statusCode = 304;
    return response.end();
  }
  const unchanged = (request.headers['if-range'] ?? source.etag) === source.etag;
  const range = !fault.ignoreRange && unchanged ? parseRange(request.headers.range, source.size) : undefined;
  if (range === 'unsatisfiable') {
    response.setHeader('Content-Range', `bytes */${source.size}`);
    return finish(416, 'the range lies outside the file');
  }
  const { start, end } = range ?? { start: 0, end: source.size };
  entry.status = response.statusCode = range ? 206 : 200;
  if (range) response.setHeader('Content-Range', `bytes ${start}-${end - 1}/${source.size}`);
  response.setHeader('Content-Length', end - start);
  if (request.method === 'HEAD' || start === end) return response.end();

  let position = start;
  for await (let chunk of source.read(start, end)) {
    if (fault.flip >= position && fault.flip < position + chunk.length) {
      chunk = Buffer.from(chunk);
      chunk[fault.flip - position] ^= 1;
    }
    const left = (fault.cutAfter ?? Infinity) - entry.bytes;
    if (chunk.length > left) {
      if (left > 0) await write(response, chunk.subarray(0, left));
      entry.bytes += left;
      response.socket?.destroy();
      return;
    }
    await write(response, chunk);
    position += chunk.length;
    entry.bytes += chunk.length;
    if (fault.rate) await sleep((1000 * chunk.length) / fault.rate);
  }
  response.end();
}

/** What is to be served: size, entity tag, and `read(start, end)`, an iterator over its bytes. */
async function open(file, fault) {
  const info = await stat(file).catch(() => undefined);
  if (!info?.isFile()) return undefined;
  if (fault.body) {
    const bytes = Buffer.from(fault.body(await readFile(file)));
    const etag = `"${createHash('sha1').update(bytes).digest('hex')}"`;
    return { size: bytes.length, etag, read: (start, end) => [bytes.subarray(start, end)] };
  }
  return {
    size: Math.min(fault.truncate ?? info.size, info.size),
    etag: `"${info.size.toString(16)}-${Math.trunc(info.mtimeMs).toString(16)}"`,
    // Small pieces where the rate is limited, so that it is even.
    read: (start, end) => createReadStream(file, { start, end: end - 1, highWaterMark: fault.rate ? 16384 : 1 << 18 }),
  };
}

/** One range of a Range header as {start, end} (end exclusive), 'unsatisfiable', or undefined to send the whole. */
function parseRange(header, size) {
  const match = /^bytes=(\d*)-(\d*)$/.exec(header ?? '');
  if (!match || (match[1] === '' && match[2] === '')) return undefined;
  if (match[1] === '') {
    const length = Math.min(Number(match[2]), size);
    return length === 0 ? 'unsatisfiable' : { start: size - length, end: size };
  }
  const start = Number(match[1]);
  const end = match[2] === '' ? size : Math.min(Number(match[2]) + 1, size);
  if (match[2] !== '' && Number(match[2]) < start) return undefined;
  return start >= size ? 'unsatisfiable' : { start, end };
}

/** Resolves when the bytes are on their way; rejects when the client has gone. */
function write(response, chunk) {
  return new Promise((done, failed) => {
    const gone = () => failed(new Error('the client closed the connection'));
    if (response.destroyed) return gone();
    response.once('close', gone);
    response.write(chunk, (error) => {
      response.off('close', gone);
      error ? failed(error) : done();
    });
  });
}

/** Mounts from the command line: `/models=some/dir`. */
export function parseMounts(positionals) {
  return Object.fromEntries(positionals.map((text) => text.split(/=(.*)/s, 2)));
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) {
  const { values, positionals } = parseArgs({
    options: { port: { type: 'string', default: '0' }, query: { type: 'string' }, isolated: { type: 'boolean' } },
    allowPositionals: true,
  });
  const options = { mounts: parseMounts(positionals), isolated: values.isolated };
  const server = await startServer({ ...options, port: Number(values.port) }).catch((error) => {
    if (error.code !== 'EADDRINUSE') throw error;
    console.error(`port ${values.port} is taken, using another`);
    return startServer(options);
  });
  console.log(`${server.origin}/${values.query ? `?${values.query}` : ''}`);
}
