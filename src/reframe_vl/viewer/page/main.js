// The page's state, its keys, and what is kept in the address.

const state = {current: -1, pinned: -1, coloring: "provenance", filters: {}};

async function start() {
  const rollouts = await Rollouts.open();
  const list = new List(byId("list"), byId("rows"), rollouts, (i) => choose(i));
  const filters = new Filters(byId("filters"), rollouts, (found, values) => {
    state.filters = values;
    list.show(found);
    const all = rollouts.count.toLocaleString("en");
    byId("count").textContent = found.length === rollouts.count
      ? plural(rollouts.count, "rollout") : `${found.length.toLocaleString("en")} of ${all} rollouts`;
    if (found.includes(state.current)) list.select(state.current);
    else if (found.length) choose(found[0], false);
    remember();
  });

  async function show(section, i) {
    const detail = await rollouts.detail(i);
    // Another one was chosen while this one was unpacked.
    if (i !== (section.id === "pinned" ? state.pinned : state.current)) return;
    const advantage = rollouts.get("advantage", i);
    const pinned = section.id === "pinned";
    section.replaceChildren(
      make("div", {cls: "tools"},
        make("button", {type: "button", title: "key c", on: {click: () => pin(pinned ? -1 : i)}},
          pinned ? "Take away" : state.pinned === i ? "Unpin" : "Pin to compare")),
      head(rollouts, i, detail),
      make("div", {cls: "cards"},
        make("div", {cls: "stack"},
          make("section", {cls: "card"}, make("h3", {}, "Where it looked"),
            looked(rollouts, i, detail), boxLegend(rollouts.sample(i))),
          callTable(rollouts, i, detail)),
        make("div", {cls: "stack"}, question(rollouts, i, detail), rewards(rollouts, i, detail),
          pinned ? null : compare(rollouts, i, choose))),
      make("div", {cls: "turns"}, make("h3", {}, "Turns"), legend(state.coloring),
        state.coloring === "gap" && !detail.contexts.flat().some((span) => span.teacher)
          ? make("p", {cls: "quiet"}, "No teacher was asked about this rollout.") : null,
        conversation(rollouts, detail, advantage, state.coloring)));
  }

  async function choose(i, scroll = true) {
    if (i === undefined) return;
    const moved = i !== state.current;
    state.current = i;
    list.select(i, scroll);
    remember();
    await show(byId("detail"), i);
    if (moved) byId("detail").scrollTop = 0;
    document.documentElement.dataset.rollout = i;
  }

  async function pin(i) {
    state.pinned = i === state.pinned ? -1 : i;
    const section = byId("pinned");
    section.hidden = state.pinned < 0;
    if (state.pinned >= 0) await show(section, state.pinned);
    await choose(state.current, false);
  }

  async function color(name) {
    state.coloring = name;
    for (const button of byId("coloring").querySelectorAll("button")) {
      button.setAttribute("aria-checked", String(button.dataset.color === name));
    }
    if (state.current >= 0) await choose(state.current, false);
    if (state.pinned >= 0) await show(byId("pinned"), state.pinned);
  }

  function nextAlike(distance) {
    const alike = rollouts.alike(state.current);
    return alike[(alike.indexOf(state.current) + distance + alike.length) % alike.length];
  }

  const keys = {
    j: () => choose(list.neighbour(1)), ArrowDown: () => choose(list.neighbour(1)),
    k: () => choose(list.neighbour(-1)), ArrowUp: () => choose(list.neighbour(-1)),
    PageDown: () => choose(list.neighbour(10)), PageUp: () => choose(list.neighbour(-10)),
    Home: () => choose(list.shown[0]), End: () => choose(list.shown.at(-1)),
    n: () => choose(nextAlike(1)), p: () => choose(nextAlike(-1)),
    c: () => pin(state.current),
    t: turnTheme,
    "/": () => byId("filters").text.focus(),
    "?": () => byId("keys").showModal(),
  };
  Object.keys(COLORINGS).forEach((name, at) => { keys[at + 1] = () => color(name); });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || byId("keys").open) return;
    if (event.target.closest?.("input, select")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    // Keys that scroll do so in the rollout, where the focus is there.
    if (event.key.length > 1 && event.target.closest?.("#detail, #pinned")) return;
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });
  byId("coloring").addEventListener("click", (event) => {
    if (event.target.dataset.color) color(event.target.dataset.color);
  });
  byId("theme").addEventListener("click", turnTheme);
  byId("help").addEventListener("click", keys["?"]);

  const kept = new URLSearchParams(location.hash.slice(1));
  filters.values = Object.fromEntries(kept);
  const wanted = Number(kept.get("rollout") ?? NaN);
  if (wanted >= 0 && wanted < rollouts.count) state.current = wanted;
  await color(Object.hasOwn(COLORINGS, kept.get("color")) ? kept.get("color") : "provenance");
  await filters.apply();
  document.documentElement.dataset.openedMs = Math.round(performance.now());
}

function boxLegend(sample) {
  return make("p", {cls: "legend"},
    make("span", {}, make("i", {cls: "box evidence"}), "evidence"),
    make("span", {}, make("i", {cls: "box asked"}), sample.modality === "video"
      ? "asked for, with the call's number" : "asked for"));
}

function remember() {
  const kept = new URLSearchParams(state.filters);
  if (state.current >= 0) kept.set("rollout", state.current);
  if (state.coloring !== "provenance") kept.set("color", state.coloring);
  history.replaceState(null, "", `#${kept}`);
}

function turnTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme
    ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
}

start().catch((error) => {
  byId("detail").replaceChildren(make("p", {cls: "error"},
    `This page cannot be read: ${error.message}. Make it anew, or take a current browser.`));
  throw error;
});
