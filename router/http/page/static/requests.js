// List of the newest requests. Each shows a bar of its stages and why it failed, and opens into a waterfall.

import { ago, arrange, bar, byId, element, legend, milliseconds, say } from "./dom.js";
import { scaleEnd } from "./scale.js";
import { waterfall } from "./waterfall.js";

// Stages in order. The first six add up to TTFT, the next four to the gap between the first and second token.
const STAGES = [
  ["router_queue", "router queue"],
  ["route", "route"],
  ["prefill_fetch", "prefill fetch"],
  ["prefill_queue", "prefill queue"],
  ["prefill", "prefill"],
  ["return", "return"],
  ["recovery", "recovery"],
  ["transfer_exposed", "transfer"],
  ["decode_admission", "admission"],
  ["first_step", "first step"],
  ["decode", "later tokens"],
  ["unfinished", "unfinished"],
];
const TO_FIRST_TOKEN = 6;
const TO_SECOND_TOKEN = 10;

const scale = byId("scale");
const rows = new Map(); // key: number of the request

let last = [];

legend(byId("stage-legend"), STAGES.map(([name, text]) => [`stage-${name}`, text]));
scale.addEventListener("change", () => draw());

export function showRequests(requests) {
  last = requests;
  draw();
}

function draw() {
  const there = new Set(last.map((request) => request.number));
  for (const id of rows.keys()) if (!there.has(id)) rows.delete(id);
  const end = scaleEnd(last.map(shownMs));
  say(byId("scale-end"), last.length ? `end at ${milliseconds(end)}` : "");
  const wanted = last.map((request) => {
    const row = rows.get(request.number) ?? makeRow(request);
    rows.set(request.number, row);
    say(row.age, [ago(request.age_s), ...remarks(request)].join(", "));
    if (row.end !== end || row.scale !== scale.value) {
      Object.assign(row, { end, scale: scale.value });
      row.track.replaceChildren(scaled(request, end));
    }
    return row.root;
  });
  arrange(byId("requests"), wanted.length ? wanted : [element("p", { class: "faint" }, "None yet.")]);
}

function makeRow(request) {
  const [track, age] = [element("div", { class: "track" }), element("span", { class: "age faint" })];
  const head = element(
    "summary",
    {},
    element("span", { class: "what" }, ...outcome(request), sizes(request)),
    age,
    track,
    element("span", { class: "total" }, `${ttft(request.stages)} · ${milliseconds(request.stages.total_ms)}`),
  );
  if (request.reason) head.append(element("span", { class: "why" }, request.reason));
  const attributes = { class: "request", "data-request": request.request_id, "data-status": request.status };
  return { root: element("details", attributes, head, numbers(request)), track, age };
}

/** Return a pill with the outcome of a request that was not answered; nothing for an answered one. */
function outcome({ status, decode }) {
  if (status === "OK") return [];
  if (status === "CANCELLED") return [element("span", { class: "pill draining" }, "cancelled"), " "];
  return [element("span", { class: "pill lost" }, decode ? "failed" : "refused"), " "];
}

/** Describe the numbers of tokens of prompt and answer. They are null if the prompt was not tokenised. */
function sizes({ prompt_tokens: prompt, completion_tokens: answer, status }) {
  return prompt === null ? words(status) : `${prompt} + ${answer ?? "?"} tokens`;
}

const words = (status) => status.toLowerCase().replaceAll("_", " ");

const ttft = ({ ttft_ms: ms }) => (ms ? `TTFT ${milliseconds(ms)}` : "no token");

function* remarks(request) {
  if (request.cached_tokens) yield `${request.cached_tokens} cached`;
  if (request.drafts?.drafted_tokens) yield `${request.drafts.accepted_tokens} of ${request.drafts.drafted_tokens} drafts`;
  if (request.attempts > 1) yield `${request.attempts} attempts`;
  if (request.stall_count) yield `${request.stall_count} ${request.stall_count > 1 ? "stalls" : "stall"}`;
}

function numbers(request) {
  const { request_id: id, model, prefill, decode, status, reason } = request;
  const way = decode ? (prefill ? `${prefill} → ${decode}` : `${decode} alone`) : "no worker";
  const failure = status === "OK" ? [] : [element("p", { class: "problem" }, [words(status), reason].filter(Boolean).join(": "))];
  return element(
    "div",
    { class: "numbers" },
    element("p", { class: "faint" }, [id, model, way].filter(Boolean).join(" · ")),
    ...failure,
    waterfall(request, [...spans(request)]),
  );
}

/** Return [name, text, milliseconds] of every stage. The last two stages get the time that no other stage has. */
function durations(request) {
  const { stages } = request;
  const later = stages.total_ms - stages.ttft_ms - sum(request, TO_FIRST_TOKEN, TO_SECOND_TOKEN);
  const rest = { decode: stages.ttft_ms ? Math.max(0, later) : 0, unfinished: unfinishedMs(request) };
  return STAGES.map(([name, text]) => [name, text, rest[name] ?? stages[`${name}_ms`]]);
}

/** Yield the stages that took time, one after the other. Stages after the sixth begin at the first token. */
function* spans(request) {
  let begin = 0;
  for (const [at, [name, text, ms]] of durations(request).entries()) {
    if (at === TO_FIRST_TOKEN) begin = request.stages.ttft_ms || begin;
    if (ms > 0) yield { name, text, begin, ms };
    begin += ms;
  }
}

const sum = (request, from, to) => STAGES.slice(from, to).reduce((total, [name]) => total + request.stages[`${name}_ms`], 0);

/** Return the time that a request without a token spent in a stage that did not finish. */
const unfinishedMs = (request) =>
  request.stages.ttft_ms ? 0 : Math.max(0, request.stages.total_ms - sum(request, 0, TO_SECOND_TOKEN));

const shownMs = (request) =>
  scale.value === "whole" ? request.stages.total_ms : sum(request, 0, TO_SECOND_TOKEN) + unfinishedMs(request);

/** Create the bar of a request. If it exceeds the scale, it is cut: it fills the scale with its own proportions. */
function scaled(request, end) {
  const own = shownMs(request);
  const shown = durations(request).filter(([name]) => name !== "decode" || scale.value === "whole");
  const made = bar(shown.map(([name, , ms]) => [`stage-${name}`, ms / Math.max(own, end)]));
  if (own > end) {
    made.classList.add("cut");
    made.title = `longer than the scale: ${milliseconds(own)}`;
  }
  return made;
}
