// A question in the log with its answer, which is streaming, complete, stopped, failed or restored.

import { copied, element, milliseconds, say } from "./dom.js";
import { Markdown } from "./markdown.js";

export class Turn {
  text = ""; // received text of the answer
  accepted = false; // whether the server has accepted the question
  #thoughts = null; // paragraph with the reasoning; null without reasoning
  #note = element("footer", { class: "faint" });
  #body = element("div", { class: "markdown" });
  #markdown = new Markdown(this.#body);
  #began = performance.now();
  #firstMs = null; // time to the first token; null before it

  constructor(question) {
    this.question = question;
    this.asked = element("article", { class: "message user" }, question);
    this.answer = element("article", { class: "message assistant waiting", "aria-busy": "true" }, this.#body, this.#note);
  }

  /** Start to measure the time to the first token. */
  begin() {
    this.#began = performance.now();
  }

  /** Append reasoning, which is shown as plain text in a closed details element. */
  think(piece) {
    this.#firstMs ??= performance.now() - this.#began;
    if (!this.#thoughts) {
      this.#thoughts = element("p", { class: "faint" });
      this.#body.before(element("details", { class: "thoughts" }, element("summary", {}, "Thoughts"), this.#thoughts));
      this.answer.classList.remove("waiting");
    }
    this.#thoughts.append(piece);
  }

  /** Append text of the answer. `shown` is called after the text was rendered. */
  add(piece, shown) {
    this.#firstMs ??= performance.now() - this.#began;
    this.answer.classList.remove("waiting");
    this.text += piece;
    this.#markdown.push(piece, shown);
  }

  /** Complete the answer. `fit`: note on a reduced max_tokens. `again`: function that asks the question again. */
  end(usage, reason, fit, again) {
    this.#finish([this.#figures(usage), reason === "length" ? "stopped at max_tokens" : "", fit]);
    this.#offer(again);
  }

  /** Show an answer from before a reload of the page. */
  restore(text, again) {
    this.accepted = true;
    this.add(text);
    this.#finish([]);
    this.#offer(again);
  }

  /** End an incomplete answer. `why`: reason, for people. `retry`: function that asks the question again. */
  fail(why, isProblem, retry) {
    this.#finish([why]);
    this.#note.className = isProblem ? "problem" : "faint";
    this.#button("Retry", "retry", retry);
  }

  remove() {
    this.asked.remove();
    this.answer.remove();
  }

  #finish(notes) {
    this.#markdown.finish();
    this.answer.classList.remove("waiting");
    this.answer.removeAttribute("aria-busy");
    this.#note.textContent = notes.filter(Boolean).join(" · ");
  }

  /** Add buttons below a complete answer. CSS hides "Regenerate" if another question follows. */
  #offer(again) {
    if (this.text) {
      const copy = this.#button("Copy", "copy", async () => say(copy, (await copied(this.text)) ? "Copied" : "Not copied"));
    }
    this.#button("Regenerate", "again", again);
  }

  #button(label, kind, action) {
    const button = element("button", { type: "button", class: `small ${kind}` }, label);
    button.addEventListener("click", action);
    this.#note.append(" ", button);
    return button;
  }

  #figures(usage) {
    if (!usage || this.#firstMs === null) return "an empty answer";
    const seconds = (performance.now() - this.#began - this.#firstMs) / 1000;
    const parts = [`${usage.completion_tokens} tokens`, `first after ${milliseconds(this.#firstMs)}`];
    if (usage.completion_tokens > 1) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${usage.prompt_tokens} prompt tokens from the cache`);
    return parts.join(" · ");
  }
}
