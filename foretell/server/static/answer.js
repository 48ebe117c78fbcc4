// An answer in the conversation: steps, each with its tokens, which can be pointed at.

import { element, plural } from "./elements.js";

const ORIGINS = ["draft", "correction", "bonus", "plain"];
const REASONS = {
  stop: "",
  length: "Cut off: that was the most tokens allowed. Settings can allow more.",
  context: "Cut off: the model’s context is full. A new chat has room again.",
};

/** What each step's element stands for: {step, pieces, draft, before}. */
export const steps = new WeakMap();

/** Grows as chunks come in. `element` belongs into the page, `text` and `tokens` are what came. */
export class Answer {
  constructor(name) {
    this.element = element("div", "answer");
    this.element.setAttribute("role", "group");
    this.element.setAttribute("aria-label", `${name}; arrow keys move between its steps`);
    this.note = element("p", "note");
    this.text = "";
    this.tokens = [];
    this.stats = null;
    this.about = null;
    this.lastText = "";
  }

  /** Take one chunk of a stream; returns whether it has news. */
  take(chunk) {
    const choice = chunk.choices[0];
    if (!choice) return false;
    this.text += choice.delta.content ?? "";
    const foretell = chunk.foretell;
    if (foretell?.pieces) this.#addStep(foretell);
    else if (choice.delta.content) this.element.append(choice.delta.content);
    if (foretell?.stats) this.stats = foretell.stats;
    if (choice.finish_reason) this.#finish(foretell);
    return true;
  }

  #addStep({ step, pieces, draft }) {
    const made = element("span", "step");
    for (const { text, origin } of pieces) {
      // Half a character has no text yet, and an end mark never gets any.
      const kind = ORIGINS.includes(origin) ? origin : "plain";
      made.append(element("span", `token ${kind}${/^\n+$/.test(text) ? " line-end" : ""}`, text));
      this.tokens.push(pieces[made.childNodes.length - 1].token_id);
    }
    made.setAttribute("role", "button");
    made.setAttribute("aria-describedby", "summary");
    made.tabIndex = this.element.querySelector(".step") ? -1 : 0; // one stop; arrows do the rest
    steps.set(made, { step, pieces, draft: draft ?? [], before: this.lastText });
    this.lastText = pieces.at(-1)?.text ?? this.lastText;
    this.element.append(made);
  }

  #finish(about) {
    this.about = about;
    this.stats = about.stats;
    this.note.textContent = REASONS[about.finish_reason] ?? about.finish_reason;
    const last = this.element.querySelector(".step:last-of-type .token:last-child");
    if (about.finish_reason === "stop" && last?.textContent === "") last.classList.add("end");
  }

  /** The step that shows most of what speculation does: the longest accepted draft. */
  get best() {
    let best = null;
    let most = -1;
    for (const one of this.element.querySelectorAll(".step")) {
      const { draft } = steps.get(one);
      const kept = draft.filter((node) => node.kept).length;
      const worth = draft.length ? kept + (kept < draft.length ? 0.5 : 0) : -1;
      if (worth > most) [best, most] = [one, worth];
    }
    return best;
  }

  get outcome() {
    const { num_steps: passes } = this.stats ?? { num_steps: 0 };
    return `${plural(this.tokens.length, "token")} in ${plural(passes, "step")}`;
  }
}

/** Arrow keys, Home and End between the steps of an answer. Returns whether the key was one. */
export function moveBetweenSteps(from, key) {
  const all = [...from.closest(".answer").querySelectorAll(".step")];
  const at = all.indexOf(from);
  const to = {
    ArrowRight: at + 1,
    ArrowDown: at + 1,
    ArrowLeft: at - 1,
    ArrowUp: at - 1,
    Home: 0,
    End: all.length - 1,
  }[key];
  if (to === undefined) return false;
  const target = all[Math.min(Math.max(to, 0), all.length - 1)];
  for (const one of all) one.tabIndex = one === target ? 0 : -1;
  target.focus();
  return true;
}
