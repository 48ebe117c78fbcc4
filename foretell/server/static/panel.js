// Beside the conversation: speed, acceptance, and the draft of one step.

import { byId, decimal, element, percent, plural, visible } from "./elements.js";

/** What a step of plain decoding takes here, in seconds; null where nobody has measured it. */
export function showPlainCost(seconds) {
  byId("plain-cost").textContent = seconds
    ? `${decimal(1 / seconds)} tokens/s, ${decimal(1000 * seconds)} ms for each`
    : "not measured yet";
}

/** The numbers of an answer, while it is made and after. */
export function showStats(stats, plainSeconds) {
  const rate = stats.tokens_per_second || 0;
  const drafted = stats.num_draft_tokens;
  byId("rate").textContent = rate ? decimal(rate) : "–";
  byId("per-step").textContent = stats.num_steps ? decimal(stats.tokens_per_step, 2) : "–";
  byId("ratio").textContent =
    rate && plainSeconds ? `${decimal(rate * plainSeconds, 2)} times the speed of plain` : "–";
  byId("accepted").textContent = drafted
    ? `${stats.num_accepted_tokens} of ${plural(drafted, "token")} (${percent(stats.draft_acceptance_rate)})`
    : "none drafted";
  byId("steps").textContent =
    `${stats.num_steps}, ${stats.num_drafts} with a draft${reasons(stats)}`;
  showPositions(stats);
}

/** Why the other steps had none, which the server says at the end. */
function reasons(stats) {
  const list = stats.policy?.plain_steps ?? [];
  return list.length
    ? `; without: ${list.map((one) => `${one.num_steps} ${one.reason}`).join(", ")}`
    : "";
}

function showPositions(stats) {
  const counts = stats.num_drafts ? stats.num_accepted_tokens_per_pos : [];
  byId("no-positions").hidden = counts.length > 0;
  byId("positions").replaceChildren(
    ...counts.map((count, index) => {
      const share = count / stats.num_drafts;
      const fill = element("span", "fill");
      fill.style.width = `${100 * share}%`;
      const track = element("span", "track", fill);
      track.setAttribute("aria-hidden", "true");
      const name = element("span", "position", element("span", "unseen", "position "), `${index + 1}`);
      return element("li", "", name, track, element("span", "share", percent(share)));
    }),
  );
}

/** The draft tree of a step, and what became of it; `inSight` scrolls there. */
export function showStep({ step, pieces, draft, before }, inSight) {
  byId("inspector").classList.add("open");
  byId("inspector-title").textContent = `Draft of step ${step}`;
  byId("summary").textContent = summary(step, pieces, draft);
  byId("tree").replaceChildren(draft.length ? tree(pieces, draft, before) : "");
  if (inSight) intoSight(byId("inspector"));
}

/** Scroll the panel, and nothing else, as far as `part` of it needs. */
function intoSight(part) {
  const panel = part.parentElement;
  const [inner, outer] = [part.getBoundingClientRect(), panel.getBoundingClientRect()];
  const above = inner.top - outer.top;
  const below = inner.bottom - outer.bottom;
  if (above < 0) panel.scrollTop += above;
  else if (below > 0) panel.scrollTop += Math.min(above, below);
}

export function closeStep() {
  byId("inspector").classList.remove("open");
}

function summary(step, pieces, draft) {
  const tokens = plural(pieces.length, "token");
  if (step === 0) return `The end of the prompt: ${tokens}, without a draft.`;
  if (!draft.length) return `No draft: ${tokens} from one pass.`;
  const kept = draft.filter((node) => node.kept).length;
  return (
    `${draft.length} drafted, ${kept} accepted, ${draft.length - kept} cut: ` +
    `${tokens} from one pass.`
  );
}

function tree(pieces, draft, before) {
  const children = new Map();
  draft.forEach((node, index) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(index);
  });
  // The model's own token stands where its walk through the draft ended.
  const own = pieces.find((piece) => piece.origin !== "draft");
  const end = draft.reduce((last, node, index) => (node.kept ? index : last), -1);

  function branches(parent) {
    const list = element("ul");
    const below = children.get(parent) ?? [];
    // What was kept comes first, so that the answer reads down the left edge.
    for (const index of below.toSorted((a, b) => draft[b].kept - draft[a].kept)) {
      list.append(node(draft[index], index));
    }
    if (own && parent === end) list.prepend(leaf(own.text, own.origin, own.origin));
    return list.childNodes.length ? list : null;
  }

  function node({ text, probability, kept }, index) {
    const item = leaf(text, kept ? "draft" : "cut", kept ? "accepted" : "cut", probability);
    const inside = branches(index);
    if (inside) item.append(inside);
    return item;
  }

  const root = element("div", "tree");
  const first = element("p", "node root", element("code", "", visible(before)));
  first.append(element("span", "fate", "the token before"));
  root.append(first, branches(-1) ?? "");
  return root;
}

function leaf(text, kind, fate, probability = null) {
  const shown = element(kind === "cut" ? "s" : "span", `token ${kind}`, element("code", "", visible(text)));
  const line = element("div", "node", shown, element("span", "fate", fate));
  if (probability !== null) {
    line.append(element("span", "chance", percent(probability)));
    line.lastChild.title = "how likely the drafter took it to be, after the token before it";
  }
  return element("li", "", line);
}
