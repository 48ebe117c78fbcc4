// The page: what the buttons do, and who is told what came of it.

import { Answer, moveBetweenSteps, steps } from "./answer.js";
import { get, Problem, stream } from "./api.js";
import { byId, decimal, element, percent, plural } from "./elements.js";
import { closeStep, showPlainCost, showStats, showStep } from "./panel.js";

const EXAMPLES = [
  ["Write code", "Write a Python class Point with x and y, and methods add, subtract, scale and length."],
  [
    "Correct a text",
    "Correct the grammar of this text:\n\nThe ferry leave the harbour at nine. It arrive at the " +
      "island at ten, and the passengers goes ashore. The last ferry leave the island at five, " +
      "and the people who stays watches it go.",
  ],
  ["Explain", "Why is the sky blue?"],
];
const DRAFTERS = {
  suffix: "what followed the same words, here or in earlier answers",
  recycling: "the model’s own second choices",
  prompt_lookup: "what followed the same words in this conversation",
  ngram: "counts of words that follow one another",
  early_exit: "the model’s own first layers",
  draft_model: "a smaller model",
};
const LONGEST_DRAFT = 16;
const narrow = matchMedia("(max-width: 60rem)");

const page = {
  model: null,
  plainSeconds: null,
  messages: [],
  asked: new Set(), // what was answered before: memories of it make the next time faster
  running: null, // the AbortController of what is being answered
  pinned: null, // the step that stays shown
};

// --- The model and the settings ----------------------------------------------------------

async function learnModel() {
  const { data } = await get("v1/models", byId("key").value);
  const about = data[0].foretell;
  page.model = data[0].id;
  byId("model").textContent = page.model;
  learnPlainCost(about.plain_seconds_per_token);
  offerDrafters(about.drafters, about.default_drafters);
  offerLengths(Math.min(LONGEST_DRAFT, about.max_num_draft_tokens));
}

function learnPlainCost(seconds) {
  if (seconds) page.plainSeconds = seconds;
  showPlainCost(page.plainSeconds);
}

function offerDrafters(names, own) {
  byId("drafters").replaceChildren(
    ...names.map((name) => {
      const box = element("input");
      Object.assign(box, { type: "checkbox", value: name, checked: own.includes(name) });
      box.defaultChecked = box.checked;
      box.autocomplete = "off";
      const about = DRAFTERS[name] ? element("span", "hint", ` ${DRAFTERS[name]}`) : null;
      return element("label", "choice", box, element("span", "", name, about));
    }),
  );
}

function offerLengths(longest) {
  const offered = [["auto", "automatic"], ["0", "0: plain decoding"]];
  for (let n = 1; n <= longest; n++) offered.push([`${n}`, `at most ${n}`]);
  byId("length").replaceChildren(...offered.map(([value, text]) => new Option(text, value)));
}

/** The request's object `foretell`; `plain` for plain decoding whatever the settings say. */
function speculation({ plain = false, always = false } = {}) {
  const boxes = [...byId("drafters").querySelectorAll("input")];
  const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
  const length = byId("length").value;
  const own = boxes.every((box) => box.checked === box.defaultChecked);
  if (plain) return { num_draft_tokens: 0, steps: true };
  if (!chosen.length) return { num_draft_tokens: always ? "auto" : 0, steps: true };
  const number = length === "auto" || (always && length === "0") ? "auto" : Number(length);
  return { num_draft_tokens: number, steps: true, ...(own ? {} : { drafters: chosen }) };
}

/** A field's number; undefined where it is empty. */
const number = (id) => (byId(id).value === "" ? undefined : Number(byId(id).value));

function request(messages, foretell, seed = number("seed")) {
  return {
    model: page.model,
    messages,
    stream: true,
    temperature: number("temperature") ?? 0,
    max_tokens: number("most"),
    seed,
    foretell,
  };
}

// --- Answers ------------------------------------------------------------------------------

/** One completion into `answer`. Returns whether it came to its end; stopped, it is false. */
async function complete(body, answer, onNews = () => {}) {
  let due = 0; // the frame for which news is due
  try {
    for await (const chunk of stream("v1/chat/completions", body, {
      key: byId("key").value,
      signal: page.running.signal,
    })) {
      const following = endIsSeen();
      answer.take(chunk);
      if (following) showEnd();
      if (answer.about) learnPlainCost(answer.about.plain_seconds_per_token);
      due ||= requestAnimationFrame(() => {
        due = 0;
        onNews();
      });
    }
  } catch (error) {
    if (error.name === "AbortError") return false;
    throw error;
  } finally {
    cancelAnimationFrame(due);
    onNews();
  }
  return true;
}

/** The panel about `answer`, at every news of it. */
const inPanel = (answer) => () => {
  if (answer.stats) showStats(answer.stats, page.plainSeconds);
};

/** What the composer asks; null, with a word about it, if there is nothing. */
function prompt({ again = false } = {}) {
  const text = byId("prompt").value;
  if (text.trim()) return [...page.messages, { role: "user", content: text }];
  const last = page.messages.findLastIndex((message) => message.role === "user");
  if (again && last >= 0) return page.messages.slice(0, last + 1);
  say("Write a message first.");
  byId("prompt").focus();
  return null;
}

/** Do `work` with the buttons as they are while something runs, and show what goes wrong. */
async function run(messages, work) {
  const text = byId("prompt").value;
  page.running = new AbortController();
  byId("problems").replaceChildren();
  byId("welcome").hidden = true;
  setBusy(true);
  unpin();
  const turn = element("article", "turn");
  if (text.trim()) turn.append(element("p", "asked", element("span", "unseen", "You: "), text));
  try {
    if (page.model === null) await learnModel();
    byId("transcript").append(turn);
    byId("prompt").value = "";
    showEnd();
    await work(turn, messages);
  } catch (error) {
    showProblem(error);
    say("");
    if (!turn.querySelector(".step")) turn.remove();
    if (!byId("prompt").value) byId("prompt").value = text;
  } finally {
    page.running = null;
    setBusy(false);
    fitPrompt();
  }
}

async function send() {
  const messages = prompt();
  if (!messages) return;
  await run(messages, async (turn) => {
    const answer = new Answer("Answer");
    turn.append(answer.element, answer.note);
    say("Answering …");
    const whole = await complete(request(messages, speculation()), answer, inPanel(answer));
    if (!whole) answer.note.textContent = "Stopped.";
    say(`${whole ? "Done" : "Stopped"}: ${answer.outcome}.`);
    remember(messages, answer.text);
    read(answer);
    suggest(answer);
  });
}

async function compare() {
  const messages = prompt({ again: true });
  if (!messages) return;
  await run(messages, async (turn) => {
    const before = page.asked.has(JSON.stringify(messages));
    const [quick, plain] = [new Answer("Speculative answer"), new Answer("Plain answer")];
    const card = element("section", "comparison");
    turn.append(card, quick.element, quick.note);
    // Speculation goes first: it must not draft from the other's answer.
    const seed = number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
    say("1 of 2: with speculation …");
    const body = request(messages, speculation({ always: true }), seed);
    if (!(await complete(body, quick, inPanel(quick)))) {
      remember(messages, quick.text);
      quick.note.textContent = "Stopped, so nothing was compared.";
      say("Stopped.");
      return;
    }
    remember(messages, quick.text);
    const progress = () => say(`2 of 2: plain … ${plural(plain.tokens.length, "token")}`, true);
    const whole = await complete({ ...body, foretell: speculation({ plain: true }) }, plain, progress);
    showComparison(card, quick, plain, { whole, before });
    if (differs(quick, plain, whole) >= 0) {
      turn.append(element("h3", "", "The plain answer"), plain.element, plain.note);
    }
    suggest(quick);
  });
}

/** The first place where two answers differ; -1 where they are the same. */
function differs(quick, plain, whole) {
  const [one, other] = whole
    ? [quick.about.token_ids, plain.about.token_ids]
    : [quick.tokens.slice(0, plain.tokens.length), plain.tokens];
  const length = Math.max(one.length, other.length);
  for (let at = 0; at < length; at++) if (one[at] !== other[at]) return at;
  return -1;
}

function showComparison(card, quick, plain, { whole, before }) {
  const at = differs(quick, plain, whole);
  const equal = at < 0;
  const count = plural(plain.tokens.length, "token");
  const title = !equal
    ? `Not the same: the answers differ from token ${at + 1} on`
    : whole
      ? `The same ${count}, every one`
      : `Stopped: the same up to there, ${count}`;
  const mark = element("span", "mark", equal ? "=" : "≠");
  mark.setAttribute("aria-hidden", "true");
  card.className = `comparison ${equal ? "equal" : "unequal"}`;
  card.append(element("h3", "", mark, title));
  const rates = [quick, plain].map((one) => one.stats?.tokens_per_second || 0);
  const list = element("dl", "speeds");
  for (const [name, one, rate] of [["speculative", quick, rates[0]], ["plain", plain, rates[1]]]) {
    const fill = element("span", `fill ${name}`);
    fill.style.width = percent(rate / Math.max(...rates, 1e-9));
    const track = element("span", "track", fill);
    track.setAttribute("aria-hidden", "true");
    const told = `${decimal(rate)} tokens/s, ${plural(one.stats?.num_steps ?? 0, "step")}`;
    list.append(element("div", "", element("dt", "", name), element("dd", "", track, told)));
  }
  card.append(list);
  const ratio = rates[1] ? `${decimal(rates[0] / rates[1], 2)} times the speed of plain decoding` : "";
  const help = before
    ? "This was asked before, and what is remembered of that answer helps to draft it again."
    : "What the server remembers of earlier answers may have helped.";
  card.append(element("p", "hint", `${ratio}, the reading of the prompt left out. ${help}`));
  say(`${title}. ${ratio}.`);
  card.scrollIntoView({ block: "nearest" });
}

function remember(messages, text) {
  if (!text) return;
  page.messages = [...messages, { role: "assistant", content: text }];
  page.asked.add(JSON.stringify(messages));
}

/** Show the answer's most telling step, where there is room beside the text. */
function suggest(answer) {
  if (!narrow.matches && !page.pinned && answer.best) {
    show(answer.best, { inSight: false }); // the numbers are what is looked at now
  }
}

// --- Steps that are pointed at --------------------------------------------------------------

function show(step, { inSight = true } = {}) {
  document.querySelector(".step.shown")?.classList.remove("shown");
  step.classList.add("shown");
  showStep(steps.get(step), inSight);
}

function unpin() {
  page.pinned = null;
  document.querySelector(".step.shown")?.classList.remove("shown");
  closeStep();
}

function watchSteps() {
  const transcript = byId("transcript");
  const stepOf = (event) => event.target.closest?.(".step");
  // Moves, not pointerover: text that grows under a mouse at rest is not pointed at.
  transcript.addEventListener("pointermove", (event) => {
    const step = stepOf(event);
    if (step && event.pointerType === "mouse" && !step.matches(".shown")) show(step);
  });
  transcript.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "mouse") return;
    if (page.pinned) show(page.pinned);
    else if (narrow.matches) unpin();
  });
  transcript.addEventListener("focusin", (event) => {
    const step = stepOf(event);
    if (step?.matches(":focus-visible")) show((page.pinned = step));
  });
  transcript.addEventListener("click", (event) => {
    const step = stepOf(event);
    if (step) show((page.pinned = step));
  });
  transcript.addEventListener("keydown", (event) => {
    const step = stepOf(event);
    if (!step) return;
    if (moveBetweenSteps(step, event.key)) event.preventDefault();
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      show((page.pinned = step));
    }
  });
  byId("close-inspector").addEventListener("click", () => {
    const step = page.pinned;
    step?.focus({ preventScroll: true });
    unpin();
  });
}

// --- Telling ----------------------------------------------------------------------------------

/** In the line beside the buttons, read out politely; `quiet` for counts that run on. */
function say(text, quiet = false) {
  const status = byId("status");
  status.setAttribute("aria-live", quiet ? "off" : "polite");
  status.textContent = text;
}

/** Read a whole answer out, once it is there: token by token nobody could follow. */
function read(answer) {
  byId("spoken").textContent = answer.text;
  setTimeout(() => byId("spoken").replaceChildren(), 5000); // nobody should find it there twice
}

function showProblem(error) {
  const known = error instanceof Problem;
  if (!known) console.error(error);
  const box = element("div", "problem", element("strong", "", known ? error.message : "The page failed."));
  const advice = known ? error.advice : `${error}`;
  if (advice) box.append(" ", element("span", "", advice));
  byId("problems").replaceChildren(box);
  box.scrollIntoView({ block: "nearest" });
  if (error.status === 401) byId("key").focus();
}

function setBusy(busy) {
  const [send, stop] = [byId("send"), byId("stop")];
  const focused = document.activeElement;
  send.hidden = busy;
  stop.hidden = !busy;
  byId("compare").disabled = byId("fresh").disabled = busy;
  if (busy && focused === send) stop.focus();
  if (!busy && [stop, document.body].includes(focused)) byId("prompt").focus({ preventScroll: true });
}

function fitPrompt() {
  const box = byId("prompt");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

/** Whether the reader is at the end of the conversation, so that it should stay in sight. */
function endIsSeen() {
  const end = byId("transcript").getBoundingClientRect().bottom;
  return end <= byId("composer").getBoundingClientRect().top + 60;
}

function showEnd() {
  const hidden =
    byId("transcript").getBoundingClientRect().bottom - byId("composer").getBoundingClientRect().top;
  if (hidden > 0) scrollBy({ top: hidden + 8, behavior: "instant" });
}

// --- Wiring -----------------------------------------------------------------------------------

function startAgain() {
  page.messages = [];
  byId("transcript").replaceChildren();
  byId("problems").replaceChildren();
  byId("welcome").hidden = false;
  say("");
  unpin();
  byId("prompt").focus();
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!page.running) send();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!page.running) send();
  });
  byId("prompt").addEventListener("input", fitPrompt);
  byId("stop").addEventListener("click", () => page.running?.abort());
  byId("compare").addEventListener("click", compare);
  byId("fresh").addEventListener("click", startAgain);
  byId("key").addEventListener("change", begin);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    if (byId("inspector").classList.contains("open") && narrow.matches) unpin();
    else page.running?.abort();
  });
  watchSteps();
  for (const [name, text] of EXAMPLES) {
    const button = element("button", "", name);
    button.type = "button";
    button.addEventListener("click", () => {
      byId("prompt").value = text;
      fitPrompt();
      byId("prompt").focus();
    });
    byId("examples").append(element("li", "", button));
  }
}

let begun = 0;

async function begin() {
  const number = ++begun;
  let found = null;
  try {
    await learnModel();
  } catch (error) {
    found = error;
  }
  if (number !== begun) return; // another key was entered meanwhile
  byId("problems").replaceChildren();
  if (found) showProblem(found);
}

listen();
if (!narrow.matches) byId("prompt").focus({ preventScroll: true });
await begin();
