"use strict";
// A chat: streams an answer, can stop it, and says which memory it was made with.

class Chat {
  constructor(access) {
    this.access = access;
    this.messages = [];
    this.stopping = null; // of the answer in progress
    this.models = new Map(); // model -> its memories
    this.log = document.getElementById("log");
    document.getElementById("ask").addEventListener("submit", (event) => { event.preventDefault(); this.ask(); });
    document.getElementById("stop").addEventListener("click", () => this.stop());
    document.getElementById("clear").addEventListener("click", () => this.clear());
    document.getElementById("model").addEventListener("change", () => this.listMemories());
    document.getElementById("question").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.ask(); }
    });
    document.addEventListener("keydown", (event) => { if (event.key === "Escape") this.stop(); });
  }

  async listModels() {
    const answer = await this.access.fetch("/v1/models");
    if (!answer.ok) return;
    const ids = (await answer.json()).data.map((model) => model.id);
    this.models = new Map(ids.filter((id) => !ids.some((other) => id.startsWith(`${other}+`))).map((id) => [id, []]));
    for (const [model, memories] of this.models) memories.push(...ids.filter((id) => id.startsWith(`${model}+`)).map((id) => id.slice(model.length + 1)));
    choose(document.getElementById("model"), [...this.models.keys()]);
    this.listMemories();
  }

  listMemories() {
    const memories = this.models.get(document.getElementById("model").value) || [];
    choose(document.getElementById("memory"), ["default", "none", ...memories]);
  }

  async ask() {
    const field = document.getElementById("question"), text = field.value.trim();
    if (!text || this.stopping) return;
    field.value = "";
    const messages = this.messages; // of this chat, also when a new one is begun meanwhile
    messages.push({ role: "user", content: text });
    this.turn("user", "You", text);
    const turn = this.turn("assistant", document.getElementById("model").value, "");
    turn.setAttribute("aria-busy", "true"); // read aloud once it is whole
    this.stopping = new AbortController();
    this.enable();
    const answer = { text: "", begun: performance.now(), first: null, last: null, usage: null, treadle: null, finish: "" };
    try {
      await this.stream(answer, turn, messages);
    } catch (error) {
      answer.error = this.stopping.signal.aborted ? "" : String(error.message || error);
      answer.stopped = this.stopping.signal.aborted;
    }
    this.stopping = null;
    this.enable();
    this.end(answer, turn, messages);
    field.focus();
  }

  async stream(answer, turn, messages) {
    const memory = document.getElementById("memory").value, prefix = document.getElementById("prefix").value;
    const treadle = { ...(memory === "default" ? {} : { engram: memory }), ...(prefix === "none" ? {} : { prefix }) };
    const body = {
      model: document.getElementById("model").value, messages, stream: true, stream_options: { include_usage: true },
      max_tokens: Number(document.getElementById("tokens").value) || 200, ...(Object.keys(treadle).length ? { treadle } : {}),
    };
    const reply = await this.access.fetch("/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: this.stopping.signal,
    });
    if (!reply.ok) throw new Error(await errorOf(reply));
    answer.worker = reply.headers.get("x-treadle-worker");
    for await (const event of eventsOf(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      this.take(event, answer, turn);
    }
  }

  take(event, answer, turn) {
    const choice = (event.choices || [])[0], text = choice && choice.delta && choice.delta.content;
    if (text) {
      answer.last = performance.now();
      answer.first = answer.first || answer.last;
      answer.text += text;
      turn.querySelector("p").textContent = answer.text;
      this.log.scrollTop = this.log.scrollHeight;
    }
    if (choice && choice.finish_reason) answer.finish = choice.finish_reason;
    answer.usage = event.usage || answer.usage;
    answer.treadle = event.treadle || answer.treadle;
  }

  end(answer, turn, messages) {
    turn.removeAttribute("aria-busy");
    if (answer.text) messages.push({ role: "assistant", content: answer.text });
    else messages.pop(); // a question without an answer is asked anew
    turn.append(element("ul", { "aria-label": "About this answer" }, ...notes(answer).map(([text, kind]) => element("li", kind ? { class: kind } : {}, text))));
    this.log.scrollTop = this.log.scrollHeight;
  }

  turn(kind, who, text) {
    const turn = element("div", { class: `turn ${kind}` }, element("h3", {}, who), element("p", {}, text));
    this.log.append(turn);
    this.log.scrollTop = this.log.scrollHeight;
    return turn;
  }

  stop() { if (this.stopping) this.stopping.abort(); }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
  }

  enable() {
    document.getElementById("send").disabled = Boolean(this.stopping);
    document.getElementById("stop").disabled = !this.stopping;
  }
}

// What to say of an answer, each with `good` or `bad` where it is that.
function notes(answer) {
  const told_ = [];
  if (answer.error) told_.push([answer.error, "bad"]);
  if (answer.stopped) told_.push(["stopped", ""]);
  if (answer.finish === "length") told_.push(["cut at its length", ""]);
  if (answer.treadle) {
    for (const memory of answer.treadle.memory) {
      if (memory.kind === "prefix") { told_.push(...prefixNotes(memory)); continue; }
      told_.push([`memory ${memory.name}@${memory.version.slice(0, 8)} (${memory.transport}${memory.shadowed ? ", shadowed" : ""})`, ""]);
      told_.push([`${memory.tickets_in_time} of ${memory.tickets} tickets in time`, memory.tickets_in_time === memory.tickets ? "good" : "bad"]);
      if (memory.rows_missing) told_.push([`${memory.rows_missing} rows missing${memory.missing_because ? `: ${memory.missing_because}` : ""}`, "bad"]);
    }
    if (!answer.treadle.memory.length) told_.push(["no memory", ""]);
    told_.push(answer.treadle.degraded ? ["degraded", "bad"] : ["not degraded", "good"]);
  }
  if (answer.first) told_.push([`first token after ${told(answer.first - answer.begun, "ms")}`, ""]);
  if (answer.usage) {
    const details = answer.usage.prompt_tokens_details || {};
    told_.push([`${answer.usage.prompt_tokens} prompt tokens, ${details.cached_tokens || 0} cached`, ""]);
    const seconds = (answer.last - answer.first) / 1000;
    if (answer.usage.completion_tokens > 1 && seconds > 0) told_.push([`${told((answer.usage.completion_tokens - 1) / seconds)} tokens/s`, ""]);
  }
  if (answer.worker) told_.push([`worker ${answer.worker}`, ""]);
  return told_;
}

function prefixNotes(prefix) {
  if (!prefix.prefix_tokens) return [[`without the prefix ${prefix.name}: ${prefix.missing_because}`, "bad"]];
  const made = [[`prefix ${prefix.name}@${prefix.version.slice(0, 8)}, for ${told(prefix.prefix_tokens)} tokens`, ""]];
  if (prefix.lookups) made.push([`${told(prefix.lookups_outside)} of ${told(prefix.lookups)} lookups outside`, prefix.missing_because || prefix.fell_back ? "bad" : "good"]);
  if (prefix.fell_back) made.push(["off its task: answered from its exact KV", ""]);
  if (prefix.missing_because) made.push([`off its task: ${prefix.missing_because}`, "bad"]);
  return made;
}

async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function choose(select, names) {
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}
