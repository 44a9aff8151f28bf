"use strict";
// Numbers: how they are told, how two looks at a counter make a rate, and what is remembered of a series.

const POINTS_MAX = 120; // of a chart: two minutes, one a second

function told(value, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const [divisor, prefix] = unit === "ms" || unit === "%" ? [1, ""] : size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  const scaled = value / divisor;
  const digits = Number.isInteger(scaled) || Math.abs(scaled) >= 100 ? 0 : Math.abs(scaled) >= 10 ? 1 : 2;
  return `${scaled.toFixed(digits)}${prefix || unit ? " " : ""}${prefix}${unit}`;
}

// What changed at one worker between two looks. Its figures are some seconds old: the time is between the two times they are of.
function rates(before, now) {
  const seconds = now.at - before.at;
  if (seconds < 0.05) return null; // the same figures again
  const sum = (worker, name) => worker.engram_layers.reduce((total, layer) => total + layer[name], 0);
  const change = (value) => Math.max(0, value(now.worker) - value(before.worker)); // it restarts from 0
  const tickets = change((worker) => sum(worker, "tickets"));
  return {
    answer: change((worker) => worker.completion_tokens) / seconds,
    prompt: change((worker) => worker.prompt_tokens) / seconds,
    cached: change((worker) => worker.cached_tokens) / seconds,
    bytes: change((worker) => sum(worker, "row_bytes")) / seconds,
    tickets: tickets,
    inTime: change((worker) => sum(worker, "tickets_in_time")),
    stepMs: 1000 * change((worker) => worker.step_seconds) / (change((worker) => worker.steps) || Infinity),
  };
}

// How rows come at a worker: of its default memory, else of any that is open.
function transportOf(worker) {
  return worker.engram_transport || (worker.memories.find((memory) => memory.transport) || {}).transport || "";
}

// The tightest of several, and the middle one; null for none.
function least(values) { return values.length ? Math.min(...values) : null; }
function median(values) { return values.length ? [...values].sort((a, b) => a - b)[values.length >> 1] : null; }
