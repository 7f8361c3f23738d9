// States of the routers that share the page's address: each poll reaches any one of them.

const SHOWN_REQUESTS = 24;

const states = new Map(); // key: id of the router process, the last polled one at the end

/** Return the state with the requests of all routers that share the address, as far as earlier polls reached them. */
export function ofAllRouters(state) {
  const now = performance.now();
  states.delete(state.instance);
  states.set(state.instance, { state, ms: now });
  for (const instance of [...states.keys()].slice(0, -state.routers)) states.delete(instance); // of ended processes
  const all = [...states.values()];
  const requests = all.flatMap(({ state: { instance, requests }, ms }) =>
    requests.map((each) => ({ ...each, number: `${instance} ${each.number}`, age_s: each.age_s + (now - ms) / 1000 })),
  );
  requests.sort((one, other) => one.age_s - other.age_s);
  const sum = (name) => all.reduce((total, each) => total + (each.state.cluster?.[name] ?? 0), 0);
  const cluster = state.cluster && { ...state.cluster, active: sum("active"), queued: sum("queued") };
  return { ...state, cluster, requests: requests.slice(0, SHOWN_REQUESTS) };
}
