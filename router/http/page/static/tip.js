// One tooltip for the whole page: shown where the pointer is or the keyboard's focus goes, Escape closes it.

import { byId } from "./dom.js";

const HIDE_MS = 120; // time for the pointer to go from the target to the tooltip
const EDGE = 8;

const box = byId("tip");
const known = new WeakMap(); // {lines, anchor} by target

let shown = null;
let hiding = 0;
let pointer = ""; // where it last was

/** `lines` gives the texts when they are shown; the tooltip stands beside `anchor`. */
export function tip(target, lines, anchor = target) {
  known.set(target, { lines, anchor });
}

/** The figures may be others now. */
export function renewTip() {
  if (shown) show(shown);
}

document.addEventListener("pointerover", (event) => {
  const before = pointer;
  pointer = `${event.clientX} ${event.clientY}`;
  if (pointer === before) return; // the page has scrolled under it, perhaps to show the focus
  if (box.contains(event.target)) {
    clearTimeout(hiding);
    return;
  }
  const target = targetOf(event.target);
  if (target) show(target);
  else hideSoon();
});
document.documentElement.addEventListener("pointerleave", hideSoon);
document.addEventListener("focusin", (event) => {
  const target = targetOf(event.target);
  if (target && event.target.matches(":focus-visible")) show(target);
  else hide();
});
document.addEventListener("focusout", hideSoon);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") hide();
});
document.addEventListener("scroll", renewTip, { capture: true, passive: true });
addEventListener("resize", renewTip);

function targetOf(from) {
  for (let at = from; at; at = at.parentElement) if (known.has(at)) return at;
  return null;
}

function show(target) {
  clearTimeout(hiding);
  if (!target.isConnected) {
    hide();
    return;
  }
  if (shown !== target) {
    shown?.removeAttribute("aria-describedby");
    target.setAttribute("aria-describedby", box.id);
    shown = target;
  }
  const { lines, anchor } = known.get(target);
  box.textContent = lines().join("\n");
  box.hidden = false;
  place(anchor.getBoundingClientRect());
}

function place(by) {
  const { width, height } = box.getBoundingClientRect();
  const below = by.bottom + EDGE;
  const fits = below + height <= innerHeight - EDGE;
  const left = Math.min(by.left, innerWidth - width - EDGE);
  box.style.left = `${Math.max(EDGE, left)}px`;
  box.style.top = `${Math.max(EDGE, fits ? below : by.top - height - EDGE)}px`;
}

function hideSoon() {
  clearTimeout(hiding);
  hiding = setTimeout(hide, HIDE_MS);
}

function hide() {
  shown?.removeAttribute("aria-describedby");
  shown = null;
  box.hidden = true;
}
