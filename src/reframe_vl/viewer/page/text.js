// Elements and text. What a model or the world wrote gets into the page here alone, as text nodes.

function make(tag, options = {}, ...children) {
  const {title, cls, on, ...attributes} = options;
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  if (title) element.title = title;
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  for (const [name, listener] of Object.entries(on ?? {})) element.addEventListener(name, listener);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

// Characters that are not seen, or that turn the order of others; joiners are part of scripts.
const HIDDEN = "(?![\\n\\t\\u200c\\u200d])[\\p{Cc}\\p{Cf}\\p{Cs}\\p{Zl}\\p{Zp}]";
const HIDDEN_ONLY = new RegExp(HIDDEN, "gu");
const MARKED = new RegExp(`${HIDDEN}|<\\|[a-z_]+\\|>`, "gu");

const codeOf = (character) =>
  `U+${character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;

const oneLine = (text) => String(text).replace(/\n/g, "↵").replace(HIDDEN_ONLY, codeOf);

// Appends a text in which hidden characters are shown by their codes, control tokens dimmed.
function appendText(parent, text) {
  let end = 0;
  for (const found of text.matchAll(MARKED)) {
    if (found.index > end) parent.append(text.slice(end, found.index));
    const control = found[0].length > 2;
    parent.append(control
      ? make("span", {cls: "control"}, found[0])
      : make("span", {cls: "hidden-character", title: "not shown as itself"}, codeOf(found[0])));
    end = found.index + found[0].length;
  }
  if (end < text.length) parent.append(text.slice(end));
  return parent;
}

const written = (tag, text, cls = "written") =>
  appendText(make(tag, {cls, dir: "auto"}), String(text));

function shown(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  const text = Math.abs(value) >= 1000 ? value.toFixed(0) : value.toPrecision(digits);
  return String(Number(text)).replace("-", "−");
}

const signed = (value, digits = 3) =>
  (value > 0 ? "+" : "") + shown(value, digits);

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// The end of a name: identifiers differ there.
const ending = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);

const runLetter = (run) => (run < 26 ? String.fromCharCode(65 + run) : `R${run + 1} `);

const words = (name) => name.replaceAll("_", " ");
