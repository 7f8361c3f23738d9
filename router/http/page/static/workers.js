// Cards of the workers, updated in place: queue, batch, KV blocks by state, hit rate, time between tokens.

import { arrange, bar, byId, drawn, element, legend, milliseconds, say } from "./dom.js";
import { scaleEnd } from "./scale.js";

const BLOCKS = [
  ["held_by_sequences", "block-computing", "computing"],
  ["held_by_transfers", "block-transfer", "in transfer"],
  ["cached", "block-cached", "cached"],
  ["free", "block-free", "free"],
];
const SAMPLES = 60; // number of points of a curve, one per second

const cards = new Map(); // key: endpoint of the worker
const order = (one, other) => other.role.localeCompare(one.role) || one.name.localeCompare(other.name, "en", { numeric: true });

legend(byId("block-legend"), BLOCKS.map(([, kind, text]) => [kind, `blocks ${text}`]));

/** Show the workers. `cluster`: null if the key may not see them. `routers`: number of routers that share the address.
 * `isOther`: another router process than before. */
export function showWorkers(cluster, routers, isOther) {
  const place = byId("workers");
  if (isOther || !cluster) cards.clear();
  if (!cluster) {
    say(byId("cluster"), "");
    place.replaceChildren(element("p", { class: "faint" }, "Workers are shown to the key of an administrator."));
    return;
  }
  say(byId("cluster"), `${cluster.active} active, ${cluster.queued} waiting in ${routers > 1 ? "the routers" : "the router"}`);
  const there = new Set(cluster.workers.map((worker) => worker.endpoint));
  for (const endpoint of cards.keys()) if (!there.has(endpoint)) cards.delete(endpoint);
  const workers = [...cluster.workers].sort(order); // prefill workers first
  for (const worker of workers) {
    if (!cards.has(worker.endpoint)) cards.set(worker.endpoint, makeCard());
    renew(cards.get(worker.endpoint), worker);
  }
  arrange(place, workers.map((worker) => cards.get(worker.endpoint).root));
}

/** Mark the state of all workers as unknown. */
export function forgetWorkers() {
  for (const card of cards.values()) showState(card, "unknown");
}

function makeCard() {
  const [name, role, state, facts, blocks, owners] = ["b", "span", "span", "dl", "div", "p"].map((tag) => element(tag));
  const line = drawn("polyline", { points: "" });
  const curve = drawn("svg", { viewBox: `0 0 ${SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  const head = element("header", {}, name, role, state);
  const root = element("article", { class: "worker" }, head, facts, curve, blocks, owners);
  owners.className = "owners faint";
  blocks.setAttribute("role", "img");
  return { root, name, role, state, facts, blocks, owners, line, samples: [] };
}

function renew(card, worker) {
  const load = worker.load;
  card.root.dataset.worker = worker.name;
  card.root.setAttribute("aria-label", `${worker.role} worker ${worker.name}`);
  card.root.title = details(worker).join("\n");
  say(card.name, worker.name);
  say(card.role, worker.role);
  card.role.className = `pill ${worker.role}`;
  showState(card, worker.state);
  renewFacts(card, facts(worker, load));
  card.samples = [...card.samples, worker.role === "decode" ? load?.batch ?? 0 : load?.pending_tokens ?? 0].slice(-SAMPLES);
  draw(card);
  const held = load?.pages;
  card.blocks.replaceChildren(bar(BLOCKS.map(([field, kind]) => [kind, held ? held[field] / held.total : 0])));
  const counted = held ? BLOCKS.filter(([field]) => held[field]).map(([field, , text]) => `${held[field]} ${text}`) : [];
  say(card.owners, counted.join(" · "));
  card.blocks.setAttribute("aria-label", `blocks: ${counted.join(", ")}`);
}

function showState(card, state) {
  say(card.state, state);
  card.state.className = `pill ${state}`;
}

/** Return [name, value] of each cell of a card. */
function facts(worker, load) {
  if (!load) return [["requests", `${worker.requests}`]];
  const common = [
    ["queue", `${load.queue}`],
    ["batch", load.slots ? `${load.batch} / ${load.slots}` : `${load.batch}`],
    ["pending", `${load.pending_tokens}`],
    ["hit rate", load.cache_query_tokens ? `${Math.round(hitRate(load))} %` : "–"],
  ];
  if (worker.role !== "decode") return common;
  const { p50_ms: p50, p99_ms: p99 } = worker.tbt ?? {};
  return [...common, ["TBT p50", p50 ? milliseconds(p50) : "–"], ["TBT p99", p99 ? milliseconds(p99) : "–"]];
}

const hitRate = (load) => (100 * load.cache_hit_tokens) / load.cache_query_tokens;

/** Return the lines of a card's title: figures that have no cell on the card. */
function details({ role, endpoint, requests, load }) {
  const lines = [`${role} worker at ${endpoint}`, `${requests} requests of this router`];
  if (!load) return lines;
  lines.push(
    `prefix cache: ${load.cache_hit_tokens} of ${load.cache_query_tokens} prompt tokens hit`,
    `${load.preemptions} preemptions, ${load.steps} steps, ${load.pages.total} blocks`,
  );
  return lines;
}

function renewFacts(card, wanted) {
  if (card.facts.children.length !== wanted.length) {
    const cells = wanted.map(([name]) => element("div", {}, element("dt", {}, name), element("dd", { "data-fact": name })));
    card.facts.replaceChildren(...cells);
  }
  wanted.forEach(([name, value], at) => {
    const [term, shown] = card.facts.children[at].children;
    say(term, name);
    shown.dataset.fact = name;
    say(shown, value);
  });
}

/** Draw a card's curve: the batch of a decode worker or the pending tokens of a prefill worker; outliers are cut. */
function draw(card) {
  const end = Math.max(1, scaleEnd(card.samples));
  const from = SAMPLES - card.samples.length;
  const points = card.samples.map((value, at) => `${from + at},${(19 - 18 * Math.min(1, value / end)).toFixed(2)}`);
  card.line.setAttribute("points", points.join(" "));
}
