// The page at /: polls the state of the service every second and shows it.

import { call, Refused, useKey } from "./api.js";
import { giveUp, showExamples, startChat } from "./chat.js";
import { byId, element, say } from "./dom.js";
import { showRequests } from "./requests.js";
import { ofAllRouters } from "./routers.js";
import { forgetWorkers, showWorkers } from "./workers.js";

const EVERY_MS = 1_000;
const AGAIN_MS = 2_000; // pause after a failed poll

const [model, ready, keys, outage, detail] = ["model", "ready", "keys", "outage", "detail"].map(byId);

let models = [];
let instance = null; // id of the router process
let timer = 0;
let polls = 0;
let lost = null; // {date, ms}: start of the first failed poll

startChat(() => models.find((each) => each.name === model.value) ?? models[0]);
model.addEventListener("change", showExamples);
keys.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
poll();

/** Poll now, and again and again until the page is hidden or requires a key. */
async function poll() {
  clearTimeout(timer);
  const own = ++polls;
  const began = { date: new Date(), ms: performance.now() };
  const [state, error] = await call("page/state").then((found) => [found, null], (failed) => [null, failed]);
  if (own !== polls) return; // a newer poll has started
  if (error?.status === 401) {
    askForKey(error.message);
    return;
  }
  if (!document.hidden) timer = setTimeout(poll, error ? AGAIN_MS : EVERY_MS);
  if (error) showOutage(error, began);
  else showState(state);
}

function showState(state) {
  lost = null;
  keys.hidden = true;
  outage.hidden = true;
  say(byId("key-problem"), "");
  document.body.classList.remove("stale");
  say(ready, state.ready ? (state.detail ? "degraded" : "ready") : "not ready");
  ready.className = `pill ${state.ready && !state.detail ? "connected" : "draining"}`;
  say(detail, state.detail);
  detail.hidden = !state.detail;
  const isOther = instance !== state.instance && state.routers === 1;
  instance = state.instance;
  showModels(state.models);
  const { cluster, requests } = ofAllRouters(state);
  showWorkers(cluster, state.routers, isOther);
  showRequests(requests);
}

/** Show that polls fail, and mark all figures as outdated. `began`: start of this poll. */
function showOutage(error, began) {
  const isThere = error instanceof Refused;
  if (lost && !isThere) giveUp(lost.ms); // second unanswered poll in a row
  lost ??= began;
  const fault = isThere ? `Server answers with an error (${error.message})` : "Server not reachable";
  say(outage, `${fault} since ${lost.date.toLocaleTimeString("en-GB")}, retrying. The figures below are outdated.`);
  outage.hidden = false;
  document.body.classList.add("stale");
  say(ready, isThere ? "error" : "not reachable");
  ready.className = "pill lost";
  detail.hidden = true;
  forgetWorkers();
}

function showModels(found) {
  const names = (list) => JSON.stringify(list.map((each) => each.name));
  if (found.length && names(found) !== names(models)) {
    const chosen = model.value;
    model.replaceChildren(...found.map(({ name }) => element("option", { value: name }, name)));
    if (found.some(({ name }) => name === chosen)) model.value = chosen;
    model.hidden = false;
    models = found;
    showExamples();
  }
  models = found.length ? found : models;
}

function askForKey(message) {
  const first = keys.hidden;
  keys.hidden = false;
  outage.hidden = true;
  say(ready, "locked");
  ready.className = "pill draining";
  say(byId("key-problem"), first ? "" : message);
  byId("key").focus();
}
