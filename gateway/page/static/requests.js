// The waterfall: a bar of stages for each of the last requests, newest first; opened, it says each of them in numbers.

import { ago, bar, byId, element, legend, milliseconds, say } from "./dom.js";

// In their order. What comes before the first token adds up to TTFT, the next four to the gap from token 1 to 2.
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
];

const scale = byId("scale");
const rows = new Map(); // by the router's number of the request

let last = [];

legend(byId("stage-legend"), STAGES.map(([name, text]) => [`stage-${name}`, text]));
scale.addEventListener("change", () => draw());

export function showRequests(requests) {
  last = requests;
  draw();
}

function draw() {
  const place = byId("requests");
  const there = new Set(last.map((request) => request.number));
  for (const id of rows.keys()) if (!there.has(id)) rows.delete(id);
  const most = Math.max(1, ...last.map(shownMs));
  const wanted = last.map((request) => {
    const row = rows.get(request.number) ?? makeRow(request);
    rows.set(request.number, row);
    say(row.age, [ago(request.age_s), ...remarks(request)].join(", "));
    if (row.most !== most || row.scale !== scale.value) {
      Object.assign(row, { most, scale: scale.value });
      row.track.replaceChildren(bar(parts(request, most)));
    }
    return row.root;
  });
  const same = wanted.length === place.children.length && wanted.every((root, at) => root === place.children[at]);
  if (!same) place.replaceChildren(...(wanted.length ? wanted : [element("p", { class: "faint" }, "None yet.")]));
}

function makeRow(request) {
  const [track, age] = [element("div", { class: "track" }), element("span", { class: "age faint" })];
  const failed = request.status !== "OK";
  const sizes = `${request.prompt_tokens} + ${request.completion_tokens} tokens`;
  const head = element(
    "summary",
    {},
    element("span", { class: failed ? "problem what" : "what" }, failed ? request.status : sizes),
    age,
    track,
    element("span", { class: "total" }, `TTFT ${milliseconds(request.stages.ttft_ms)} · ${milliseconds(request.stages.total_ms)}`),
  );
  return { root: element("details", { class: "request", "data-request": request.request_id }, head, numbers(request)), track, age };
}

function* remarks(request) {
  if (request.cached_tokens) yield `${request.cached_tokens} cached`;
  if (request.attempts > 1) yield `${request.attempts} attempts`;
}

function numbers(request) {
  const way = request.prefill ? `${request.prefill} → ${request.decode}` : `${request.decode} alone`;
  const told = durations(request).filter(([, , ms]) => ms > 0);
  return element(
    "div",
    { class: "numbers" },
    element("p", { class: "faint" }, `${request.request_id} · ${request.model} · ${way}`),
    element("dl", {}, ...told.map(([name, text, ms]) => element(
      "div", {}, element("dt", {}, element("i", { class: `stage-${name}` }), text), element("dd", {}, milliseconds(ms)),
    ))),
  );
}

/** [name, text, milliseconds] of every stage; what is left after token 2 is the last of them. */
function durations(request) {
  const { stages } = request;
  const later = Math.max(0, stages.total_ms - stages.ttft_ms - startMs(request, 6));
  return STAGES.map(([name, text]) => [name, text, name === "decode" ? later : stages[`${name}_ms`] ?? 0]);
}

const startMs = (request, from) =>
  STAGES.slice(from, -1).reduce((sum, [name]) => sum + (request.stages[`${name}_ms`] ?? 0), 0);

const shownMs = (request) => (scale.value === "whole" ? request.stages.total_ms : startMs(request, 0));

function parts(request, most) {
  const shown = scale.value === "whole" ? durations(request) : durations(request).slice(0, -1);
  return shown.map(([name, text, ms]) => [`stage-${name}`, ms / most, `${text}: ${milliseconds(ms)}`]);
}
