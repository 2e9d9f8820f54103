// A client of BullMQ: node bullmq_client.cjs MODULES NAME publish|pace|consume URL QUEUE COUNT KEYS PAUSE_MS.
// It speaks as bench/peers/client.py does, with the load and the checks of bench/peers/load.py.
// process.hrtime and Python's time.monotonic_ns read one clock on Linux.
"use strict";

const { createRequire } = require("node:module");

const [modules, , role, url, queueName, ...numbers] = process.argv.slice(2);
const [count, keys, pauseMs] = numbers.map(Number);
const load = createRequire(`${modules}/`);
const { Queue, Worker } = load("bullmq");
const Redis = load("ioredis");

const BODY_BYTES = 256;
const BATCH = 500;
const HANDLERS = 8;
const RATE_PER_S = 500;
const PACERS = 4;
const PARTS = 5;
const WARM_UP_SHARE = 0.1;
const KEEP_NONE = { removeOnComplete: true };

const now = () => process.hrtime.bigint();
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const connect = () => new Redis(url, { maxRetriesPerRequest: null });
const usedCpuS = () => {
  const used = process.cpuUsage();
  return (used.user + used.system) / 1e6;
};

function job(number, at) {
  const padded = [number % keys, Math.floor(number / keys), at].map((part, index) =>
    String(part).padStart([6, 8, 20][index], "0"),
  );
  return { name: "m", data: { b: `${padded.join(" ")} `.padEnd(BODY_BYTES, "x") }, opts: KEEP_NONE };
}

async function publish(queue) {
  const [cpuS, began] = [usedCpuS(), now()];
  for (let first = 0; first < count; first += BATCH) {
    const at = now();
    const size = Math.min(BATCH, count - first);
    await queue.addBulk(Array.from({ length: size }, (_, index) => job(first + index, at)));
  }
  return { per_s: count / (Number(now() - began) / 1e9), cpu_s: usedCpuS() - cpuS };
}

// Node's timers tick by the millisecond, so that a message may leave a little late: that counts as latency.
async function pace(queue) {
  const startsAt = now() + 100_000_000n;
  async function sendShare(lane) {
    for (let number = lane; number < count; number += PACERS) {
      const due = startsAt + BigInt(number) * BigInt(1e9 / RATE_PER_S);
      const leftMs = Number(due - now()) / 1e6;
      if (leftMs > 0) await pause(leftMs);
      const { name, data, opts } = job(number, due);
      await queue.add(name, data, opts);
    }
  }
  await Promise.all(Array.from({ length: PACERS }, (_, lane) => sendShare(lane)));
  return {};
}

function quantileMs(latencies, share) {
  const ordered = latencies.slice().sort((left, right) => left - right);
  return ordered[Math.min(ordered.length - 1, Math.floor(ordered.length * share))] / 1e6;
}

function usualMs(latencies, share) {
  const size = Math.max(1, Math.ceil(latencies.length / PARTS));
  const parts = [];
  for (let first = 0; first < latencies.length; first += size) {
    parts.push(quantileMs(latencies.slice(first, first + size), share));
  }
  return parts.sort((left, right) => left - right)[Math.floor(parts.length / 2)];
}

function consume() {
  const [seen, ended, latencies, cpuS] = [new Set(), new Map(), [], usedCpuS()];
  let [first, last, early, repeated] = [0n, 0n, 0, 0];

  function report() {
    const counted = latencies.slice(Math.floor(count * WARM_UP_SHARE));
    const figures = {
      per_s: (seen.size - 1) / (Number(last - first) / 1e9),
      cpu_s: usedCpuS() - cpuS,
      p50_ms: usualMs(counted, 0.5),
      p99_ms: usualMs(counted, 0.99),
      worst_ms: quantileMs(counted, 1),
      out_of_order: early,
      repeated,
      handled: latencies.length,
    };
    console.log(JSON.stringify(figures));
  }

  async function handle(taken) {
    const [key, seq] = taken.data.b.split(" ", 2).map(Number);
    const sentNs = BigInt(taken.data.b.split(" ", 3)[2]);
    last = now();
    if (!first) {
      first = last;
      console.log("began");
    }
    const mark = `${key} ${seq}`;
    if (seen.has(mark)) repeated += 1;
    else {
      seen.add(mark);
      latencies.push(Number(last - sentNs));
      if ((ended.get(key) ?? -1) !== seq - 1) early += 1;
    }
    if (pauseMs) await pause(Math.random() * pauseMs);
    ended.set(key, Math.max(seq, ended.get(key) ?? -1));
    if (seen.size >= count) done();
  }

  let done;
  const handled = new Promise((resolve) => (done = resolve));
  const worker = new Worker(queueName, handle, { connection: connect(), concurrency: HANDLERS });
  return handled.then(() => worker.close()).then(report);
}

async function main() {
  if (role === "consume") await consume();
  else {
    const queue = new Queue(queueName, { connection: connect() });
    await queue.waitUntilReady();
    console.log(JSON.stringify(await (role === "publish" ? publish : pace)(queue)));
  }
  process.exit(0);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
