// A card for each worker, renewed in place: queue, batch, pages by owner, hit rate, time between tokens.

import { bar, byId, drawn, element, legend, milliseconds, say } from "./dom.js";

const PAGES = [
  ["held_by_sequences", "page-computing", "computing"],
  ["held_by_transfers", "page-transfer", "in transfer"],
  ["cached", "page-cached", "cached"],
  ["free", "page-free", "free"],
];
const SAMPLES = 60; // of the small curve: a minute

const cards = new Map(); // by endpoint
const order = (one, other) => other.role.localeCompare(one.role) || one.name.localeCompare(other.name, "en", { numeric: true });

legend(byId("page-legend"), PAGES.map(([, kind, text]) => [kind, `pages ${text}`]));

/** `cluster` is null where the key may not see it. */
export function showWorkers(cluster) {
  const place = byId("workers");
  if (!cluster) {
    cards.clear();
    say(byId("cluster"), "");
    place.replaceChildren(element("p", { class: "faint" }, "Workers are shown to the key of an administrator."));
    return;
  }
  say(byId("cluster"), `${cluster.active} active, ${cluster.queued} waiting in the router`);
  const there = new Set(cluster.workers.map((worker) => worker.endpoint));
  for (const endpoint of cards.keys()) if (!there.has(endpoint)) cards.delete(endpoint);
  const workers = [...cluster.workers].sort(order); // prefill first, as a request goes
  for (const worker of workers) {
    if (!cards.has(worker.endpoint)) cards.set(worker.endpoint, makeCard());
    renew(cards.get(worker.endpoint), worker);
  }
  const wanted = workers.map((worker) => cards.get(worker.endpoint).root);
  const same = wanted.length === place.children.length && wanted.every((root, at) => root === place.children[at]);
  if (!same) place.replaceChildren(...wanted);
}

function makeCard() {
  const [name, role, state, facts, pages, owners] = ["b", "span", "span", "dl", "div", "p"].map((tag) => element(tag));
  const line = drawn("polyline", { points: "" });
  const curve = drawn("svg", { viewBox: `0 0 ${SAMPLES - 1} 20`, preserveAspectRatio: "none", "aria-hidden": "true" }, line);
  const root = element("article", { class: "worker" }, element("header", {}, name, role, state), facts, curve, pages, owners);
  owners.className = "owners faint";
  return { root, name, role, state, facts, pages, owners, line, samples: [] };
}

function renew(card, worker) {
  const load = worker.load;
  card.root.dataset.worker = worker.name;
  say(card.name, worker.name);
  say(card.role, worker.role);
  card.role.className = `pill ${worker.role}`;
  say(card.state, worker.state);
  card.state.className = `pill ${worker.state}`;
  card.root.title = worker.endpoint;
  renewFacts(card, facts(worker, load));
  card.samples = [...card.samples, worker.role === "decode" ? load?.batch ?? 0 : load?.pending_tokens ?? 0].slice(-SAMPLES);
  draw(card);
  const pages = load?.pages;
  const shares = PAGES.map(([field, kind, text]) => [kind, pages ? pages[field] / pages.total : 0, text]);
  card.pages.replaceChildren(bar(shares));
  const counted = PAGES.map(([field, , text]) => `${pages?.[field]} ${text}`);
  say(card.owners, pages ? counted.filter((text) => !text.startsWith("0 ")).join(" · ") : "");
}

/** [what, value] of each cell. */
function facts(worker, load) {
  if (!load) return [["requests", `${worker.requests}`]];
  const found = load.cache_query_tokens ? `${Math.round((100 * load.cache_hit_tokens) / load.cache_query_tokens)} %` : "–";
  const common = [
    ["queue", `${load.queue}`],
    ["batch", load.slots ? `${load.batch} / ${load.slots}` : `${load.batch}`],
    ["to prefill", `${load.pending_tokens}`],
    ["hit rate", found],
  ];
  if (worker.role !== "decode") return common;
  const { p50_ms: p50, p99_ms: p99 } = worker.tbt ?? {};
  return [...common, ["TBT p50", p50 ? milliseconds(p50) : "–"], ["TBT p99", p99 ? milliseconds(p99) : "–"]];
}

function renewFacts(card, wanted) {
  if (card.facts.children.length !== wanted.length) {
    const cells = wanted.map(([what]) => element("div", {}, element("dt", {}, what), element("dd", { "data-fact": what })));
    card.facts.replaceChildren(...cells);
  }
  wanted.forEach(([what, value], at) => {
    const [term, told] = card.facts.children[at].children;
    say(term, what);
    told.dataset.fact = what;
    say(told, value);
  });
}

/** The batch of a decode worker, tokens to prefill of the others, over the last minute. */
function draw(card) {
  const most = Math.max(1, ...card.samples);
  const from = SAMPLES - card.samples.length;
  const points = card.samples.map((value, at) => `${from + at},${(19 - (18 * value) / most).toFixed(2)}`);
  card.line.setAttribute("points", points.join(" "));
}
