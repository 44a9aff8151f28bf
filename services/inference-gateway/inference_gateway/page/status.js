"use strict";
// Asks the gateway once a second how everything is, and shows it.

const LOOK_MS = 1000, ANSWER_MS_MAX = 5000, STALE_SECONDS = 10;

class Status {
  constructor(access) {
    this.access = access;
    this.before = new Map(); // worker name -> what it told last, and the rates since the look before
    const parent = document.getElementById("charts");
    this.tokens = new Chart(parent, "Tokens", "/s");
    this.slack = new Chart(parent, "Slack of row lookups", "ms");
    this.inTime = new Chart(parent, "Tickets in time", "%");
    this.bytes = new Chart(parent, "Bytes of rows by transport", "B/s");
    this.queue = new Chart(parent, "Requests", "");
    this.step = new Chart(parent, "Time of a step", "ms");
  }

  async run() {
    for (;;) {
      if (!document.hidden && !this.access.refused) await this.look();
      await new Promise((done) => setTimeout(done, LOOK_MS));
    }
  }

  async look() {
    try {
      const answer = await this.access.fetch("/v1/treadle/status", { signal: AbortSignal.timeout(ANSWER_MS_MAX) });
      if (!answer.ok) return this.say(await errorOf(answer), false);
      this.show(await answer.json());
    } catch (error) {
      this.say("the gateway does not answer", false);
    }
  }

  say(text, good) {
    const state = document.getElementById("state");
    if (state.textContent !== text) state.textContent = text; // a screen reader tells it only when it changes
    state.className = good ? "good" : "bad";
  }

  show(status) {
    const gateway = status.gateway;
    const ready = status.workers.filter((worker) => worker.ready).length;
    this.say(gateway.ready ? `ready · ${ready} of ${status.workers.length} workers · version ${gateway.version}` : `not ready: ${gateway.reason}`, gateway.ready);
    const known = status.workers.filter((worker) => worker.engram_layers);
    this.draw(known.map((worker) => this.compared(worker)), gateway);
    this.table("workers", status.workers.map((worker) => workerCells(worker)));
    this.table("memories", known.flatMap((worker) => worker.memories.map((memory) => memoryCells(worker, memory))));
    const prefixes = known.flatMap((worker) => worker.prefixes.map((prefix) => ({ worker, prefix })));
    this.table("prefixes", prefixes.map((each) => prefixCells(each.worker, each.prefix)));
    this.offer(prefixes.filter(({ prefix }) => prefix.name && prefix.version && !prefix.refusal).map(({ prefix }) => prefix.name));
    this.table("layers", known.flatMap((worker) => worker.engram_layers.map((layer) => layerCells(worker, layer))));
    this.table("pools", status.pools.flatMap((pool) => poolRows(pool)));
    document.dispatchEvent(new CustomEvent("seen", { detail: known.flatMap((worker) => worker.memories.map((memory) => `${memory.model}@${memory.version}`)).join() }));
  }

  offer(prefixes) {
    const names = ["none", ...new Set(prefixes)], select = document.getElementById("prefix");
    if (names.join() !== [...select.options].map((option) => option.value).join()) choose(select, names); // else an open list would close
  }

  compared(worker) {
    const now = { worker, at: performance.now() / 1000 - worker.age_seconds, rates: null };
    const before = this.before.get(worker.name);
    now.rates = (before && rates(before, now)) || (before && before.rates) || null;
    if (before && now.at - before.at < 0.05) now.at = before.at;
    this.before.set(worker.name, now);
    return now;
  }

  draw(looks, gateway) {
    const total = (name) => looks.reduce((sum, look) => sum + (look.rates ? look.rates[name] : 0), 0);
    const layers = looks.flatMap((look) => look.worker.engram_layers.filter((layer) => layer.tickets));
    const bytes = {};
    for (const look of looks) {
      const transport = transportOf(look.worker);
      if (transport) bytes[transport] = (bytes[transport] || 0) + (look.rates ? look.rates.bytes : 0);
    }
    this.tokens.add({ answers: total("answer"), prompts: total("prompt"), cached: total("cached") });
    this.slack.add({ p50: median(layers.map((layer) => layer.slack_ms_p50)), p01: least(layers.map((layer) => layer.slack_ms_p01)) });
    this.inTime.add({ "in time": total("tickets") ? 100 * total("inTime") / total("tickets") : null });
    this.bytes.add(bytes);
    const count = (name) => looks.reduce((sum, look) => sum + look.worker[name], 0);
    this.queue.add({ "in progress": gateway.in_progress, running: count("requests_running"), waiting: gateway.waiting + count("requests_waiting") });
    this.step.add({ step: least(looks.filter((look) => look.rates && look.rates.stepMs).map((look) => look.rates.stepMs)) });
  }

  table(id, rows) {
    const table = document.getElementById(id);
    table.parentElement.hidden = !rows.length;
    table.tBodies[0].replaceChildren(...rows.map((cells) => element("tr", {}, ...cells.map((cell) => (cell instanceof Node ? cell : element("td", {}, cell))))));
  }
}

function state(good, text) { return element("td", { class: good ? "good" : "bad" }, text); }

function workerCells(worker) {
  const stale = worker.age_seconds > STALE_SECONDS ? ` (told ${Math.round(worker.age_seconds)} s ago)` : "";
  const cells = [worker.name, state(worker.ready, (worker.ready ? "ready" : worker.reason || "not ready") + stale)];
  if (!worker.engram_layers) return cells;
  const most = (number, limit) => (limit ? `${number} of ${limit}` : `${number}`);
  return [
    ...cells, worker.model, [worker.engine, worker.engine_version, worker.dtype].filter(Boolean).join(" ") || "–",
    most(worker.requests_running, worker.requests_running_max), most(worker.requests_waiting, worker.requests_waiting_max),
    told(worker.completion_tokens), told(worker.cached_tokens), told(1000 * worker.step_seconds / worker.steps),
  ];
}

function memoryCells(worker, memory) {
  const mode = memory.refusal || (memory.open ? (memory.fused ? "open" : "open, shadowed") : "opened when chosen") + (memory.default ? ", default" : "");
  return [memory.model || "–", memory.version.slice(0, 12), worker.name, state(!memory.refusal, mode), memory.transport || "–", told(memory.requests), told(memory.tokens)];
}

function prefixCells(worker, prefix) {
  const good = !prefix.refusal && Boolean(prefix.version);
  const mode = prefix.refusal || (!prefix.version ? "no current version" : prefix.open ? "open" : "opened when chosen");
  return [prefix.name || "–", prefix.version.slice(0, 12), worker.name, state(good, mode), `${told(prefix.tokens)} tokens`, told(prefix.requests), told(prefix.mapped_bytes, "B"), told(prefix.fallbacks)];
}

function layerCells(worker, layer) {
  return [
    worker.name, `${layer.layer}`, state(layer.tickets_in_time === layer.tickets, `${told(layer.tickets_in_time)} of ${told(layer.tickets)}`),
    `${told(layer.gather_ms_p50)} / ${told(layer.gather_ms_p99, "ms")}`, `${told(layer.slack_ms_p50)} / ${told(layer.slack_ms_p01, "ms")}`,
    told(layer.stall_ms, "ms"), told(layer.row_bytes, "B"), state(!layer.rows_missing, told(layer.rows_missing)),
  ];
}

function poolRows(pool) {
  const room = pool.bytes_max ? ` of ${told(pool.bytes_max, "B")}` : "";
  const whole = [pool.address, state(pool.ready, pool.ready ? "ready" : pool.reason), told(pool.bytes, "B") + room, "", `${told(pool.page_bytes, "B")} each`];
  return [whole, ...pool.tables.map((table) => [table.model, table.version.slice(0, 12) + (table.current ? "" : " (not current)"), told(table.bytes, "B"), told(table.readers), table.warm])];
}
