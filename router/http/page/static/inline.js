// Parser of inline Markdown: code, links, bold, italic, strikethrough. It creates nodes and texts, never markup.
//
// It takes linear time: one pass, with sticky expressions of bounded length and a bounded number of open marks.

import { element, fill } from "./dom.js";

const PLAIN = /[^\\`*_~[<h]+/y;
const ESCAPED = /\\([!-/:-@[-`{-~])/y;
const TICKS = /`+/y;
const MARKS = /\*+|_+|~+/y;
const LABELLED = /\[([^[\]\n]{1,400})\]\(((?:[^()\s<>]|\([^()\s<>]{0,400}\)){1,2000})(?: +"[^"\n]{0,400}")?\)/y;
const ANGLED = /<(https?:\/\/[^\s<>]{1,2000})>/iy;
const BARE = /https?:\/\/[^\s<>"'`*|]{1,2000}/iy;
const ELEMENTS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "s" };
const DEEPEST = 8;

/** Parse a text and return its nodes and texts. */
export function inline(text) {
  return new Inline(text).nodes();
}

class Inline {
  #text;
  #at = 0;
  #open = [{ mark: "", nodes: [] }];
  #unclosed = new Set(); // lengths of runs of backticks for which no closing run follows

  constructor(text) {
    this.#text = text;
  }

  nodes() {
    while (this.#at < this.#text.length) {
      const plain = this.#match(PLAIN);
      if (plain) this.#add(plain[0]);
      else this.#special();
    }
    this.#closeTo(0);
    return this.#open[0].nodes;
  }

  /** Match the expression at the current position, and advance past the match. */
  #match(expression) {
    expression.lastIndex = this.#at;
    const found = expression.exec(this.#text);
    if (found) this.#at += found[0].length;
    return found;
  }

  #add(node) {
    const { nodes } = this.#open.at(-1);
    if (typeof node === "string" && typeof nodes.at(-1) === "string") nodes.push(nodes.pop() + node);
    else nodes.push(node);
  }

  #special() {
    let found;
    switch (this.#text[this.#at]) {
      case "\\":
        found = this.#match(ESCAPED);
        if (found) this.#add(found[1]);
        break;
      case "`":
        found = this.#match(TICKS);
        this.#code(found[0]);
        break;
      case "[":
        found = this.#match(LABELLED);
        if (found) this.#add(link(found[2], found[1]) ?? found[0]);
        break;
      case "<":
        found = this.#match(ANGLED);
        if (found) this.#add(link(found[1], found[1]) ?? found[0]);
        break;
      case "h":
        found = isWord(this.#text[this.#at - 1]) ? null : this.#match(BARE);
        if (found) this.#bare(found[0]);
        break;
      default:
        found = this.#match(MARKS);
        this.#marks(found[0], this.#text[this.#at - found[0].length - 1], this.#text[this.#at]);
    }
    if (!found) this.#add(this.#text[this.#at++]);
  }

  #bare(found) {
    let end = found.length;
    const closes = found.includes("(") ? "" : ")";
    while (`.,;:!?]_~${closes}`.includes(found[end - 1])) end -= 1;
    this.#at -= found.length - end;
    const address = found.slice(0, end);
    this.#add(link(address, address) ?? address);
  }

  #code(ticks) {
    const from = this.#at;
    if (!this.#unclosed.has(ticks.length)) {
      for (const run of this.#text.slice(from).matchAll(/`+/g)) {
        if (run[0].length !== ticks.length) continue;
        const inside = this.#text.slice(from, from + run.index);
        this.#at = from + run.index + ticks.length;
        const padded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
        this.#add(element("code", {}, padded ? inside.slice(1, -1) : inside));
        return;
      }
      this.#unclosed.add(ticks.length);
    }
    this.#add(ticks);
  }

  /** Handle a run of one mark character: close open marks, then open new marks with the rest, or add it as text. */
  #marks(run, before, after) {
    const kind = run[0];
    const opens = isSeen(after) && (kind !== "_" || !isWord(before));
    const closes = isSeen(before) && (kind !== "_" || !isWord(after));
    let left = run.length;
    const usual = kind === "~" ? left === 2 : left <= 3;
    while (usual && closes && left) {
      const at = this.#open.findLastIndex(({ mark }) => mark[0] === kind && mark.length <= left);
      if (at < 1) break;
      left -= this.#open[at].mark.length;
      this.#closeTo(at);
      const { mark, nodes } = this.#open.pop();
      this.#add(fill(element(ELEMENTS[mark]), nodes));
    }
    if (usual && opens && left && this.#open.length < DEEPEST) {
      const marks = left === 3 ? [kind + kind, kind] : [kind.repeat(left)];
      for (const mark of marks) this.#open.push({ mark, nodes: [] });
    } else if (left) this.#add(kind.repeat(left));
  }

  /** Turn open marks deeper than `depth` into text, since they were never closed. */
  #closeTo(depth) {
    while (this.#open.length > depth + 1) {
      const { mark, nodes } = this.#open.pop();
      this.#add(mark);
      for (const node of nodes) this.#add(node);
    }
  }
}

const isWord = (character) => character !== undefined && /[\p{L}\p{N}]/u.test(character);
const isSeen = (character) => character !== undefined && /\S/.test(character);

/** Create a link to an absolute http or https address; null for any other address. */
function link(address, text) {
  if (!/^https?:\/\//i.test(address) || !URL.canParse(address)) return null;
  const to = new URL(address).href;
  return element("a", { href: to, title: to, target: "_blank", rel: "noopener noreferrer nofollow" }, text);
}
