// Making elements. Text becomes text nodes and nothing else: a model's words are never HTML.

/** `element("li", "cut", "text", child)`: tag, classes, and what is in it. */
export function element(tag, classes = "", ...inside) {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  made.append(...inside.filter((part) => part !== null));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** A token's text where spaces and line ends must be seen. */
export function visible(text) {
  return text === "" ? "(no text)" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
export const percent = (share) => `${Math.round(100 * share)}%`;
export const decimal = (value, digits = 1) => value.toFixed(digits);
