// Waterfall chart of one request: a row per stage, marks for stalls, and a list of the stalls with their causes.

import { element, milliseconds } from "./dom.js";

/** Create a waterfall. `stages`: {name, text, begin, ms}, with `begin` in milliseconds since the request's arrival. */
export function waterfall(request, stages) {
  const whole = Math.max(request.stages.total_ms, Number.MIN_VALUE);
  const rows = stages.map((stage) => row(stage, whole, stage.name === "decode" ? request.stalls : []));
  return element("div", { class: "waterfall" }, element("ol", { "aria-label": "Stages" }, ...rows), ...inWords(request));
}

function row({ name, text, begin, ms }, whole, stalls) {
  const stage = placed(element("span", { class: `stage-${name}` }), begin, ms, whole);
  const marks = stalls.map((stall) => mark(stall, whole));
  return element(
    "li",
    {},
    element("span", { class: "stage" }, element("i", { class: `stage-${name}` }), text),
    element("span", { class: "lane" }, stage, ...marks),
    element("span", { class: "took" }, milliseconds(ms)),
  );
}

function placed(part, begin, ms, whole) {
  const left = Math.min(100, Math.max(0, (100 * begin) / whole));
  part.style.left = `${left}%`;
  part.style.width = `${Math.min(100 - left, (100 * ms) / whole)}%`;
  return part;
}

function mark(stall, whole) {
  const said = sentence(stall);
  const attributes = { class: "stall", role: "img", "aria-label": said, title: said };
  return placed(element("span", attributes), stall.at_ms - stall.gap_ms, stall.gap_ms, whole);
}

/** Yield token times, drafts and stalls as text: touch screens and screen readers cannot use the chart's titles. */
function* inWords({ tbt, drafts, stalls, stall_count: count }) {
  if (tbt) {
    const times = `p50 ${milliseconds(tbt.p50_ms)}, p99 ${milliseconds(tbt.p99_ms)}, longest ${milliseconds(tbt.max_ms)}`;
    yield element("p", { class: "faint" }, `Time between tokens: ${times}`);
  }
  if (drafts) yield element("p", { class: "faint" }, `Drafts: ${drafted(drafts)}`);
  if (!stalls.length) return;
  const many = stalls.length < count ? `The longest ${stalls.length} of ${count} stalls:` : "Stalls:";
  yield element("p", { class: "faint" }, many);
  const longest = [...stalls].sort((one, other) => other.gap_ms - one.gap_ms);
  yield element("ul", { "aria-label": "Stalls" }, ...longest.map((stall) => element("li", {}, sentence(stall))));
}

function drafted({ drafted_tokens: tokens, accepted_tokens: drawn, saved_ms: saved }) {
  const which = tokens ? `${drawn} of ${tokens} tokens were drawn` : "only of other answers";
  return `${which}, about ${milliseconds(Math.abs(saved))} ${saved >= 0 ? "sooner" : "later"}`;
}

function sentence(stall) {
  const causes = stall.causes.map((part) => `${cause(part)} ${milliseconds(part.ms)}${blame(part)}`);
  const parts = [...causes, `usual ${milliseconds(stall.usual_ms)}`].join(" + ");
  return `${milliseconds(stall.gap_ms)} after ${milliseconds(stall.at_ms)} = ${parts}`;
}

const cause = (part) => part.cause.replaceAll("_", " ");

function blame({ culprit, by_another: byAnother, detail }) {
  const request = culprit ? ` by ${culprit}` : byAnother ? " by a request of another key" : "";
  return request + (detail ? ` (${detail})` : "");
}
