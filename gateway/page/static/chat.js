// The chat box: a conversation in memory, sent whole with every question; the answer streams in.

import { events } from "./api.js";
import { byId, element, milliseconds } from "./dom.js";

const [log, question, stop, send] = ["log", "question", "stop", "send"].map(byId);

let conversation = [];
let running = null; // an AbortController while an answer streams

/** `chosenModel` gives {name, chat}, or nothing while there is none. */
export function startChat(chosenModel) {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = question.value.trim();
    const model = chosenModel();
    if (!text || running || !model) return;
    question.value = "";
    answer(model, text);
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  stop.addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    running?.abort();
    conversation = [];
    log.replaceChildren();
    question.focus();
  });
}

async function answer(model, text) {
  byId("greeting")?.remove();
  log.append(element("article", { class: "message user" }, text));
  const spoken = document.createTextNode("");
  const note = element("footer", { class: "faint" });
  const message = element("article", { class: "message assistant waiting" }, spoken, note);
  log.append(message);
  follow();
  const asked = { role: "user", content: text };
  const own = new AbortController();
  const clock = { began: performance.now(), first: 0 };
  busy(own);
  let usage = null;
  try {
    const [path, body] = request(model, [...conversation, asked]);
    const headers = { "x-request-id": `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}` };
    for await (const event of events(path, body, { signal: own.signal, headers })) {
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      const piece = choice?.delta?.content ?? choice?.text ?? "";
      if (!piece) continue;
      clock.first ||= performance.now();
      message.classList.remove("waiting");
      const followed = isAtEnd();
      spoken.appendData(piece);
      if (followed) follow();
    }
    note.textContent = summary(usage, clock);
  } catch (error) {
    note.className = own.signal.aborted ? "faint" : "problem";
    note.textContent = own.signal.aborted ? "stopped" : error.message;
  } finally {
    // After "New" the conversation is another one.
    if (message.isConnected && spoken.data) conversation.push(asked, { role: "assistant", content: spoken.data });
    message.classList.remove("waiting");
    busy(null);
    follow();
  }
}

function request(model, messages) {
  const body = {
    model: model.name,
    max_tokens: byId("max-tokens").valueAsNumber || 256,
    stream: true,
    stream_options: { include_usage: true },
  };
  const temperature = byId("temperature").valueAsNumber;
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  if (model.chat) return ["v1/chat/completions", { ...body, messages }];
  return ["v1/completions", { ...body, prompt: messages.at(-1).content }]; // it only continues texts
}

function summary(usage, clock) {
  if (!usage || !clock.first) return "an empty answer";
  const seconds = (performance.now() - clock.first) / 1000;
  const parts = [`${usage.completion_tokens} tokens`, `first after ${milliseconds(clock.first - clock.began)}`];
  if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
  return parts.join(" · ");
}

function busy(controller) {
  running = controller;
  stop.hidden = !controller;
  send.hidden = Boolean(controller);
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
const follow = () => log.scrollTo({ top: log.scrollHeight });
