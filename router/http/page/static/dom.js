// Creation of elements and formatting of numbers. Text from outside becomes text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. `children`: elements or texts. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return fill(made, children);
}

/** Append nodes or texts one by one: a call with all of them as arguments would limit their number. */
export function fill(parent, children) {
  for (const child of children) parent.append(child);
  return parent;
}

export const byId = (id) => document.getElementById(id);

/** Set an element's text. If it is unchanged, do nothing, so that a selection in it stays. */
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

/** Set an element's children. If they are unchanged, do nothing, so that focus and open details stay. */
export function arrange(place, wanted) {
  const same = wanted.length === place.children.length && wanted.every((root, at) => root === place.children[at]);
  if (!same) place.replaceChildren(...wanted);
}

export function milliseconds(value) {
  if (value >= 10_000) return `${(value / 1000).toFixed(1)} s`;
  if (value >= 1_000) return `${(value / 1000).toFixed(2)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

/** Create a bar. `parts`: [class, fraction of the bar's length]; parts that are too small to see are omitted. */
export function bar(parts) {
  const track = element("div", { class: "bar" });
  for (const [kind, share] of parts) {
    if (!(share > 0.001)) continue;
    const part = element("span", { class: kind });
    part.style.width = `${Math.min(100, share * 100)}%`;
    track.append(part);
  }
  return track;
}

/** Fill a legend. `kinds`: [class, text] of each entry. */
export function legend(target, kinds) {
  target.replaceChildren(...kinds.map(([kind, text]) => element("span", {}, element("i", { class: kind }), text)));
}

/** Copy a text, and return whether it was copied. The clipboard API exists only on localhost or with HTTPS. */
export async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const box = document.body.appendChild(element("textarea", {}, text));
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  return done;
}
