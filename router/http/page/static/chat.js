// The chat box. Every question is sent with the tab's complete conversation, and its answer is streamed.
//
// A question stays in its box until the server has accepted it. After a reload, the conversation is restored from the
// tab's session storage.

import { events, Unreachable } from "./api.js";
import { byId, element, say } from "./dom.js";
import { examplesOf, TABLE } from "./examples.js";
import { fitting } from "./fit.js";
import { Markdown } from "./markdown.js";
import { Turn } from "./turn.js";

const USUAL_TOKENS = 256;
const STORED = "conversation"; // key in the session storage; value: {system, turns: [{question, text}]}

const [log, greeting, question, system, problem, stop, send] = [
  "log", "greeting", "question", "system", "ask-problem", "stop", "send",
].map(byId);

let chosenModel = () => null;
let turns = [];
let running = null; // {own: AbortController, heardMs: time of the last bytes} while a question is being answered

/** Start the chat. `chosen` returns the chosen model {name, chat, max_context}; undefined while no model is ready. */
export function startChat(chosen) {
  chosenModel = chosen;
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) ask(question.value.trim());
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("ask").requestSubmit();
  });
  stop.addEventListener("click", () => running?.own.abort(new Stopped()));
  byId("clear").addEventListener("click", () => {
    running?.own.abort(new Stopped());
    turns = [];
    store();
    log.replaceChildren(greeting);
    question.focus();
  });
  restore();
}

/** Show example questions for the chosen model. */
export function showExamples() {
  const model = chosenModel();
  if (model) byId("examples").replaceChildren(...examplesOf(model).map(exampleButton));
}

function store() {
  const kept = turns.filter(({ text }) => text).map(({ question: asked, text }) => ({ question: asked, text }));
  try {
    if (kept.length) sessionStorage.setItem(STORED, JSON.stringify({ system: system.value, turns: kept }));
    else sessionStorage.removeItem(STORED);
  } catch {
    // Session storage is disabled or full: a reload loses the conversation.
  }
}

function restore() {
  let stored = null;
  try {
    stored = JSON.parse(sessionStorage.getItem(STORED));
  } catch {
    return; // session storage is disabled, or its content is invalid
  }
  if (!stored || turns.length) return;
  system.value = stored.system;
  for (const { question: asked, text } of stored.turns) {
    const turn = new Turn(asked);
    turns.push(turn);
    show(turn);
    turn.restore(text, () => retry(turn));
  }
}

/** Abort the running answer if none of its bytes arrived after `sinceMs`, when the server became unreachable. */
export function giveUp(sinceMs) {
  if (running && running.heardMs < sinceMs) running.own.abort(new Unreachable("The server is not reachable."));
}

class Stopped extends Error {}

function exampleButton(example) {
  const button = element("button", { type: "button", class: "example" }, example.question);
  if (example.table) button.append(element("span", { class: "faint" }, "with a table"));
  button.addEventListener("click", () => {
    system.value = example.table ? TABLE : "";
    question.value = example.question;
    log.focus(); // the focused button will be removed
    ask(example.question);
  });
  return button;
}

async function ask(text) {
  const model = chosenModel();
  say(problem, model ? "" : "No model is ready yet.");
  if (running || !model) return;
  if (turns.length && !turns.at(-1).accepted) turns.pop().remove(); // this question replaces the one that was not accepted
  const earlier = turns;
  const turn = new Turn(text);
  turns = [...earlier, turn];
  show(turn);
  running = { own: new AbortController(), heardMs: performance.now() };
  busy(true);
  try {
    await answer(model, turn, earlier);
  } catch (error) {
    turn.fail(error instanceof Stopped ? "stopped" : error.message, !(error instanceof Stopped), () => retry(turn));
  } finally {
    running = null;
    store();
    busy(false);
    follow();
  }
}

function retry(turn) {
  if (running || turns.at(-1) !== turn) return;
  turns.pop().remove();
  ask(turn.question);
}

function show(turn) {
  greeting.remove();
  log.querySelector(".system")?.remove();
  log.prepend(...systemCard());
  log.append(turn.asked, turn.answer);
  follow();
}

function systemCard() {
  if (!system.value.trim()) return [];
  const body = element("div", { class: "markdown" });
  const shown = new Markdown(body);
  shown.push(system.value);
  shown.finish();
  return [element("article", { class: "message system" }, element("p", { class: "faint" }, "System message"), body)];
}

async function answer(model, turn, earlier) {
  const { own } = running;
  const accept = () => {
    running.heardMs = performance.now();
    if (turn.accepted) return;
    turn.accepted = true;
    question.readOnly = false;
    if (question.value.trim() === turn.question) question.value = "";
  };
  const [path, prompt] = request(model, turn, earlier);
  const { most, note } = await fitting(model, prompt, byId("max-tokens").valueAsNumber || USUAL_TOKENS, own.signal);
  const headers = { "x-request-id": `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}` };
  let [usage, reason] = [null, null];
  turn.begin();
  for await (const event of events(path, body(model, prompt, most), { signal: own.signal, headers, heard: accept })) {
    usage = event.usage ?? usage;
    const choice = event.choices?.[0];
    reason = choice?.finish_reason ?? reason;
    const followed = isAtEnd();
    if (choice?.delta?.reasoning_content) turn.think(choice.delta.reasoning_content);
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    if (piece) turn.add(piece, () => followed && follow());
    else if (followed) follow();
  }
  turn.end(usage, reason, note, () => retry(turn));
}

/** Return path and prompt fields of a request. A model without a chat template gets a text to continue. */
function request(model, turn, earlier) {
  const said = system.value.trim() ? system.value : "";
  if (!model.chat) return ["v1/completions", { prompt: [said, turn.question].filter(Boolean).join("\n") }];
  const messages = said ? [{ role: "system", content: said }] : [];
  for (const { question: asked, text } of earlier) {
    if (text) messages.push({ role: "user", content: asked }, { role: "assistant", content: text });
  }
  return ["v1/chat/completions", { messages: [...messages, { role: "user", content: turn.question }] }];
}

function body(model, prompt, most) {
  const sent = { model: model.name, ...prompt, max_tokens: most, stream: true, stream_options: { include_usage: true } };
  const temperature = byId("temperature").valueAsNumber;
  return Number.isNaN(temperature) ? sent : { ...sent, temperature };
}

function busy(is) {
  stop.hidden = !is;
  send.hidden = is;
  question.readOnly = is && question.value.trim() === turns.at(-1)?.question;
}

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;
const follow = () => log.scrollTo({ top: log.scrollHeight });
