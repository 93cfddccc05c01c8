// A list of any length: only the rows that are seen are in the page.

const ROW_HEIGHT = 50;
const SPARE_ROWS = 6;

class List {
  constructor(frame, rows, rollouts, chosen) {
    Object.assign(this, {frame, rows, rollouts, chosen, shown: [], current: -1});
    const rewards = (rollouts.columns.reward ?? []).filter(Number.isFinite);
    this.most = rewards.reduce((most, value) => Math.max(most, Math.abs(value)), 1e-9);
    frame.addEventListener("scroll", () => this.draw(), {passive: true});
    new ResizeObserver(() => this.draw()).observe(frame);
    rows.addEventListener("click", (event) => {
      const row = event.target.closest("[data-rollout]");
      if (row) chosen(Number(row.dataset.rollout));
    });
  }

  show(shownRollouts) {
    this.shown = shownRollouts;
    this.rows.style.height = `${shownRollouts.length * ROW_HEIGHT}px`;
    this.first = this.last = -1;
    this.draw(true);
  }

  select(i, scroll = true) {
    this.current = i;
    const place = this.shown.indexOf(i);
    const top = place * ROW_HEIGHT;
    const {scrollTop, clientHeight} = this.frame;
    if (scroll && place >= 0 && top < scrollTop) this.frame.scrollTop = top;
    if (scroll && place >= 0 && top + ROW_HEIGHT > scrollTop + clientHeight) {
      this.frame.scrollTop = top + ROW_HEIGHT - clientHeight;
    }
    this.draw(true);
  }

  // The rollout so many rows from the current one; the first where that is not listed.
  neighbour(distance) {
    const place = this.shown.indexOf(this.current);
    const next = place < 0 ? 0 : place + distance;
    return this.shown[Math.min(Math.max(next, 0), this.shown.length - 1)];
  }

  draw(always = false) {
    const first = Math.max(0, Math.floor(this.frame.scrollTop / ROW_HEIGHT) - SPARE_ROWS);
    const count = Math.ceil(this.frame.clientHeight / ROW_HEIGHT) + 2 * SPARE_ROWS;
    const last = Math.min(this.shown.length, first + count);
    if (!always && first === this.first && last === this.last) return;
    [this.first, this.last] = [first, last];
    this.rows.replaceChildren(...this.shown.slice(first, last).map(
      (i, place) => this.row(i, first + place)));
    this.frame.setAttribute("aria-activedescendant", `row-${this.current}`);
  }

  row(i, place) {
    const {rollouts} = this;
    const get = (name) => rollouts.get(name, i);
    const sample = rollouts.sample(i);
    const right = get("right");
    const row = make("div", {
      cls: "row", role: "option", id: `row-${i}`, "data-rollout": i,
      "aria-selected": String(i === this.current), "aria-posinset": place + 1,
      "aria-setsize": this.shown.length,
    },
    rewardBar(get("reward"), this.most),
    make("div", {cls: "first"},
      make("span", {cls: `verdict ${right === null ? "none" : right > 0 ? "right" : "wrong"}`,
        title: right === null ? "not scored" : right > 0 ? "right" : "wrong"},
      right === null ? "·" : right > 0 ? "✓" : "✗"),
      make("b", {}, shown(get("reward"))),
      make("span", {cls: "answer"}, make("bdi", {}, get("answer") === null
        ? words(rollouts.terminations[get("termination")])
        : oneLine(get("answer")))),
      ...chips(rollouts, i)),
    make("div", {cls: "second"},
      make("span", {cls: "where"}, rollouts.runs.length > 1
        ? make("b", {title: rollouts.runs[get("run")].name}, `${runLetter(get("run"))} `) : null,
      `step ${get("step")} · #${get("index")}`),
      make("bdi", {cls: "id", title: oneLine(sample.id)}, ending(oneLine(sample.id), 26))));
    row.style.top = `${place * ROW_HEIGHT}px`;
    return row;
  }
}

function rewardBar(reward, most) {
  const bar = make("i", {cls: reward < 0 ? "bar less" : "bar"});
  const share = Number.isFinite(reward) ? Math.abs(reward) / most : 0;
  bar.style.width = `${Math.min(100, 100 * share)}%`;
  return make("span", {cls: "bar-frame"}, bar);
}

function chips(rollouts, i) {
  const get = (name) => rollouts.get(name, i);
  const made = [];
  if (get("calls")) {
    made.push(make("span", {cls: "chip", title: "calls"}, `${get("calls")}×`));
  }
  if (get("dropped")) {
    made.push(make("span", {cls: "chip drop", title: "the original was dropped"}, "drop"));
  } else if (get("assigned")) {
    made.push(make("span", {cls: "chip", title: "drop assigned, but no call succeeded"}, "(drop)"));
  }
  if (get("gated")) {
    made.push(make("span", {cls: "chip gate", title: "the gate stepped in"}, "gate"));
  }
  return made;
}
