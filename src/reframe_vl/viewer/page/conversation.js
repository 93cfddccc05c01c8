// What stood in the contexts, span by span.

const MOST_TOKENS = 6000;
const MOST_CHARACTERS = 20000;

function conversation(rollouts, detail, advantage, coloring) {
  const {contexts, branches} = detail;
  const titled = contexts.map((spans, i) => [contexts.length === 1 ? "" : i === 0
    ? "Context 1: with the original" : `Context ${i + 1}: after the original was dropped`, spans]);
  titled.push(...branches.map((spans, i) => [`Branch ${i + 1}: the canonical call`, spans]));
  return titled.map(([title, spans]) => make("section", {cls: "context"},
    title ? make("h3", {}, title) : null,
    spans.map((span) => spanBlock(rollouts, span, advantage, coloring))));
}

function spanBlock(rollouts, span, advantage, coloring) {
  const name = span.carried ? `${span.by}, carried over` : span.by;
  const facts = [plural(span.tokens, "token")];
  if (span.visual) facts.push(`${span.visual} visual`);
  const known = (span.logprobs ?? []).filter((value) => value !== null).map(Number);
  if (known.length) facts.push(`log-prob ${shown(known.reduce((sum, v) => sum + v, 0))}`);
  const head = [make("b", {}, name), make("span", {cls: "quiet"}, facts.join(" · "))];
  const cls = `span edge-${span.by}${span.carried ? " carried" : ""}`;
  if (span.carried) {
    return make("details", {cls}, make("summary", {}, head), textBlock(rollouts, span));
  }
  const trained = span.logprobs || span.teacher || span.pieces;
  return make("article", {cls}, make("header", {}, head),
    trained ? tokenBlock(span, advantage, coloring) : textBlock(rollouts, span));
}

// A prompt or an observation, its images where their placeholders stand.
function textBlock(rollouts, span) {
  const block = make("div", {cls: "written", dir: "auto"});
  const views = span.views ?? [];
  const images = (view) => view.map((number) => picture(rollouts, number, 48));
  const parts = span.text.split(/<\|(?:image|video)_pad\|>/);
  // A question may spell a placeholder as plain text: then which is which is not known.
  if (parts.length - 1 !== views.length) {
    appendLong(block, span.text, MOST_CHARACTERS, (part) => appendText(block, part));
    block.append(...views.flatMap(images));
    return block;
  }
  parts.forEach((part, i) => {
    appendLong(block, part, MOST_CHARACTERS, (shownPart) => appendText(block, shownPart));
    if (views[i]) block.append(make("span", {cls: "inline-images"}, images(views[i])));
  });
  return block;
}

function tokenBlock(span, advantage, coloring) {
  const block = make("div", {cls: "written tokens", dir: "auto"});
  const tokens = tokensOf(span, advantage);
  const append = (token) => {
    if (!token.text) return;
    if (token.whole) {
      appendLong(block, token.text, MOST_CHARACTERS, (part) => block.append(
        appendText(tokenElement(token, coloring), part)));
    } else {
      block.append(appendText(tokenElement(token, coloring), token.text));
    }
  };
  appendLong(block, tokens, MOST_TOKENS, (some) => some.forEach(append));
  return block;
}

function tokenElement(token, coloring) {
  return make("span", {
    cls: `token ${COLORINGS[coloring].of(token)}`, title: tokenTitle(token),
  });
}

// Shows the beginning of something long, and the rest when it is asked for.
function appendLong(block, items, most, append) {
  append(items.slice(0, most));
  if (items.length <= most) return;
  const rest = items.length - most;
  const button = make("button", {type: "button", cls: "more-text", on: {click: () => {
    button.remove();
    append(items.slice(most));
  }}}, `… ${rest.toLocaleString("en")} more ${typeof items === "string" ? "characters" : "tokens"}`);
  block.append(button);
}
