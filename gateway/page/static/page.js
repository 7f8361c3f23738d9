// The page: asks each second how things are, and hands the parts their share.

import { call, useKey } from "./api.js";
import { startChat } from "./chat.js";
import { byId, element, say } from "./dom.js";
import { showRequests } from "./requests.js";
import { showWorkers } from "./workers.js";

const EVERY_MS = 1000;
const SLOWER_MS = 3000; // where the service does not answer

const [model, ready, keys] = ["model", "ready", "keys"].map(byId);

let models = [];
let timer = 0;

startChat(() => models.find((each) => each.name === model.value) ?? models[0]);
keys.addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("key").value = "";
  look();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) look();
});
look();

/** Looks now, and again while the page is seen and the service wants no key. */
async function look() {
  clearTimeout(timer);
  let again = EVERY_MS;
  try {
    const state = await (await call("page/state")).json();
    keys.hidden = true;
    say(byId("key-problem"), "");
    showState(state);
  } catch (error) {
    if (error.status === 401) {
      askForKey(error.message);
      return;
    }
    say(ready, error.status === 429 ? "asked too often" : "no answer");
    ready.className = "pill lost";
    again = SLOWER_MS;
  }
  clearTimeout(timer); // another look may have begun meanwhile
  if (!document.hidden) timer = setTimeout(look, again);
}

function showState(state) {
  say(ready, state.ready ? (state.detail ? "degraded" : "ready") : "not ready");
  ready.className = `pill ${state.ready && !state.detail ? "connected" : "draining"}`;
  ready.title = state.detail;
  showModels(state.models);
  showWorkers(state.cluster);
  showRequests(state.requests);
}

function showModels(found) {
  const names = (list) => JSON.stringify(list.map((each) => each.name));
  if (found.length && names(found) !== names(models)) {
    const chosen = model.value;
    model.replaceChildren(...found.map(({ name }) => element("option", { value: name }, name)));
    if (found.some(({ name }) => name === chosen)) model.value = chosen;
    model.hidden = false;
  }
  models = found.length ? found : models;
}

function askForKey(message) {
  const first = keys.hidden;
  keys.hidden = false;
  say(ready, "locked");
  ready.className = "pill draining";
  say(byId("key-problem"), first ? "" : message);
  byId("key").focus();
}
