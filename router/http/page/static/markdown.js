// Renderer of streamed Markdown: paragraphs, headings, lists, quotes, tables, code. It creates elements, never markup.
//
// Lines are grouped into blocks, and each block becomes one element. Only the last block can still change, so only its
// element is created again when more text arrives.

import { element, fill } from "./dom.js";
import { inline } from "./inline.js";

const LEAST_MS = 40; // minimum time between two renderings
const PAUSES = 4; // minimum pause, in durations of the last rendering: rendering takes at most a fifth of the time
const DEEPEST = 6; // maximum depth of nested lists and quotes
const COLUMNS = 64;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const FENCE = /^( *)(`{3,}|~{3,})([^`]*)$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;

/** Renders a text, which may arrive in pieces, into an element. */
export class Markdown {
  #place;
  #rest = ""; // end of the text, whose rendering may still change
  #settled = 0; // number of blocks before #rest, which are final
  #timer = 0;
  #tookMs = 0;

  constructor(place) {
    this.#place = place;
  }

  /** Append text, and render it soon. `shown` is called after the rendering. */
  push(text, shown = () => {}) {
    this.#rest += text;
    this.#timer ||= setTimeout(() => {
      this.#render();
      shown();
    }, Math.max(LEAST_MS, PAUSES * this.#tookMs));
  }

  /** Render all text now. */
  finish() {
    clearTimeout(this.#timer);
    this.#render();
  }

  #render() {
    this.#timer = 0;
    const began = performance.now();
    const lines = linesOf(this.#rest);
    while (this.#place.children.length > this.#settled) this.#place.lastElementChild.remove();
    fill(this.#place, rendered(lines, 0));
    const whole = scan(lines.slice(0, -1), 0); // the last line may be incomplete
    if (whole.length > 1) {
      this.#settled += whole.length - 1;
      this.#rest = lines.slice(whole.at(-1).from).join("\n");
    }
    this.#tookMs = performance.now() - began;
  }
}

const linesOf = (text) => text.replaceAll("\r", "").replaceAll("\t", "    ").split("\n");
const rendered = (lines, depth) => scan(lines, depth).map(({ make, from, to }) => make(lines.slice(from, to), depth));
const isBlank = (line) => !/\S/.test(line);
const indent = (line) => line.length - line.trimStart().length;
const isNumbered = (line) => /^ *\d/.test(line);

/** Group lines into blocks {make, from, to}: from line `from` to before line `to`. */
function scan(lines, depth) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { make, end } = begins(lines, at, depth) ?? PARAGRAPH;
    const to = end(lines, at, depth);
    blocks.push({ make, from: at, to });
    at = to;
  }
  return blocks;
}

// Kinds of blocks. `make` creates the element; `end` returns the index of the first line after the block.
const PARAGRAPH = { make: paragraph, end: paragraphEnd };
const FENCED = { make: code, end: fenceEnd };
const TITLE = { make: heading, end: (lines, from) => from + 1 };
const RULE = { make: () => element("hr"), end: (lines, from) => from + 1 };
const TABLE = { make: table, end: (lines, from) => endWhere(lines, from + 2, (line) => !line.includes("|")) };
const QUOTED = { make: quote, end: (lines, from) => endWhere(lines, from, (line) => !QUOTE.test(line)) };
const LIST = { make: list, end: listEnd };

/** Return the kind of block that begins at line `at`; null for a paragraph. */
function begins(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return FENCED;
  if (HEADING.test(line)) return TITLE;
  if (/^(-{3,}|\*{3,}|_{3,})$/.test(line.replaceAll(" ", ""))) return RULE;
  if (isTable(lines, at)) return TABLE;
  if (depth === DEEPEST) return null;
  if (QUOTE.test(line)) return QUOTED;
  return ITEM.test(line) ? LIST : null;
}

function endWhere(lines, from, ends) {
  for (let at = from; at < lines.length; at += 1) if (ends(lines[at])) return at;
  return lines.length;
}

function paragraph(lines) {
  return fill(element("p"), inline(lines.map((line) => line.trim()).join("\n")));
}

function paragraphEnd(lines, from, depth) {
  for (let at = from + 1; at < lines.length; at += 1) {
    if (isBlank(lines[at]) || interrupts(lines, at, depth)) return at;
  }
  return lines.length;
}

/** Return whether a line ends the paragraph before it. A year at its beginning, or a lone dash, begins no list. */
function interrupts(lines, at, depth) {
  const found = begins(lines, at, depth);
  if (found !== LIST) return found !== null;
  const [begin, , marker] = ITEM.exec(lines[at]);
  return lines[at].length > begin.length && (!isNumbered(lines[at]) || Number.parseInt(marker) === 1);
}

function heading([line]) {
  const [, marks, text] = HEADING.exec(line);
  return fill(element(`h${Math.min(6, marks.length + 2)}`), inline(text.trim())); // the page itself uses h1 and h2
}

function closesFence(line, fence) {
  return line.trim().length >= fence.length && line.trim().replaceAll(fence[0], "") === "";
}

function fenceEnd(lines, from) {
  const [, , fence] = FENCE.exec(lines[from]);
  return Math.min(lines.length, 1 + endWhere(lines, from + 1, (line) => closesFence(line, fence)));
}

function code([first, ...inside]) {
  const [, space, fence] = FENCE.exec(first);
  if (inside.length && closesFence(inside.at(-1), fence)) inside.pop();
  const text = inside.map((line) => line.slice(Math.min(space.length, indent(line)))).join("\n");
  return element("pre", { tabindex: "0" }, element("code", {}, text));
}

function quote(lines, depth) {
  return fill(element("blockquote"), rendered(lines.map((line) => line.replace(QUOTE, "")), depth + 1));
}

/** Return the end of a list. An item continues with indented lines, empty lines before those, and paragraph text. */
function listEnd(lines, from, depth) {
  const inner = indent(lines[from]) + 2;
  const goesOn = (line) => indent(line) >= inner || (ITEM.test(line) && isNumbered(line) === isNumbered(lines[from]));
  let at = from + 1;
  while (at < lines.length) {
    const next = endWhere(lines, at, (line) => !isBlank(line));
    if (next === lines.length) break;
    const lazy = next === at && !ITEM.test(lines[at]) && !interrupts(lines, at, depth);
    if (!lazy && !goesOn(lines[next])) break;
    at = next + 1;
  }
  return at;
}

function list(lines, depth) {
  const outer = indent(lines[0]);
  const numbered = isNumbered(lines[0]);
  const made = numbered ? element("ol", { start: Number.parseInt(lines[0]) }) : element("ul");
  const begin = (line) => indent(line) < outer + 2 && ITEM.test(line);
  for (let at = 0; at < lines.length; ) {
    const to = endWhere(lines, at + 1, begin);
    made.append(item(lines.slice(at, to), depth));
    at = to;
  }
  return made;
}

function item([first, ...further], depth) {
  const [marker] = ITEM.exec(first);
  const inner = further.map((line) => line.slice(Math.min(marker.length, indent(line))));
  const nodes = rendered([first.slice(marker.length), ...inner], depth + 1);
  const made = element("li");
  if (nodes[0]?.localName === "p") fill(made, [...nodes.shift().childNodes]);
  return fill(made, nodes);
}

const cells = (row) => row.trim().replace(/^\|/, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function columns(row) {
  const found = cells(row);
  return found.at(-1) === "" ? found.slice(0, -1) : found; // a row may end with a bar
}

function isTable(lines, at) {
  if (!lines[at].includes("|") || !lines[at + 1]?.includes("-") || !/^[-:| ]+$/.test(lines[at + 1])) return false;
  const [head, under] = [columns(lines[at]), columns(lines[at + 1])];
  return head.length === under.length && head.length <= COLUMNS && under.every((cell) => /^:?-+:?$/.test(cell));
}

function table(lines) {
  const [head, under] = [columns(lines[0]), columns(lines[1])];
  const kinds = under.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "right") : ""));
  const row = (texts, tag) =>
    fill(element("tr"), kinds.map((kind, at) =>
      fill(element(tag, kind ? { class: kind } : {}), inline((texts[at] ?? "").replaceAll("\\|", "|")))));
  const body = fill(element("tbody"), lines.slice(2).map((line) => row(columns(line), "td")));
  const whole = element("table", {}, element("thead", {}, row(head, "th")), body);
  return element("div", { class: "scrolls", tabindex: "0" }, whole);
}
