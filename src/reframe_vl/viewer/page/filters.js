// Which rollouts are listed, and in which order.

class Filters {
  constructor(form, rollouts, changed) {
    Object.assign(this, {form, rollouts, changed, texts: null});
    this.fillChoices();
    form.addEventListener("input", () => this.apply());
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(() => this.apply()));
  }

  fillChoices() {
    const {rollouts, form} = this;
    const runs = rollouts.runs.map((run, i) => make("option", {value: i}, `${runLetter(i)}: ${run.name}`));
    form.run.append(make("option", {value: ""}, "All runs"), ...runs);
    form.run.hidden = rollouts.runs.length < 2;
    const counts = new Map();
    for (const end of rollouts.columns.termination ?? []) {
      counts.set(end, (counts.get(end) ?? 0) + 1);
    }
    form.termination.append(make("option", {value: ""}, "Any end"),
      ...[...counts].sort(([a], [b]) => a - b).map(([end, count]) => make("option", {value: end},
        `${words(rollouts.terminations[end])} (${count.toLocaleString("en")})`)));
  }

  get values() {
    return Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value !== ""));
  }

  set values(values) {
    for (const [name, value] of Object.entries(values)) {
      if (this.form.elements[name]) this.form.elements[name].value = value;
    }
  }

  async apply() {
    const wanted = this.values;
    this.latest = wanted;
    let found = this.matching(wanted);
    if (wanted.text) {
      await this.readTexts(found.length);
      // Something else was asked for in the meantime.
      if (this.latest !== wanted) return;
      const text = wanted.text.toLowerCase();
      found = found.filter((i) => this.texts[i].includes(text));
    }
    this.changed(this.sorted(found, wanted.sort), wanted);
  }

  matching(wanted) {
    const {rollouts} = this;
    const column = rollouts.columns;
    const within = (name, from, to) => {
      const [least, most] = [from, to].map((text) => (text === undefined ? NaN : Number(text)));
      if (Number.isNaN(least) && Number.isNaN(most)) return null;
      return (i) => column[name][i] !== null && !(column[name][i] < least) &&
        !(column[name][i] > most);
    };
    const sample = wanted.sample?.toLowerCase();
    const tests = [
      wanted.run && ((i) => column.run[i] === Number(wanted.run)),
      wanted.termination && ((i) => column.termination[i] === Number(wanted.termination)),
      sample && ((i) => rollouts.sample(i).id.toLowerCase().includes(sample)),
      within("step", wanted.stepFrom, wanted.stepTo),
      within("reward", wanted.rewardFrom, wanted.rewardTo),
      wanted.drop && {
        dropped: (i) => column.dropped[i],
        spared: (i) => column.assigned[i] && !column.dropped[i],
        kept: (i) => !column.dropped[i],
      }[wanted.drop],
      wanted.gate && ((i) => (column.gated[i] > 0) === (wanted.gate === "yes")),
      wanted.right && {
        yes: (i) => column.right[i] > 0,
        no: (i) => column.right[i] !== null && !(column.right[i] > 0),
        none: (i) => column.right[i] === null,
      }[wanted.right],
    ].filter(Boolean);
    const found = [];
    for (let i = 0; i < rollouts.count; i++) {
      if (tests.every((test) => test(i))) found.push(i);
    }
    return found;
  }

  sorted(found, order) {
    if (!order) return found;
    const down = !order.startsWith("-");
    const values = this.rollouts.columns[order.replace("-", "")];
    const rank = (i) => (values[i] === null || Number.isNaN(values[i]) ? null : values[i]);
    return found.sort((a, b) => {
      const [x, y] = [rank(a), rank(b)];
      if (x === null || y === null) return (x === null) - (y === null) || a - b;
      return (down ? y - x : x - y) || a - b;
    });
  }

  // The first search reads the text of all rollouts.
  async readTexts() {
    this.reading ??= (async () => {
      const {rollouts} = this;
      const texts = [];
      for (let number = 0; number < rollouts.firsts.length; number++) {
        byId("count").textContent = `Reading ${Math.round(100 * number / rollouts.firsts.length)} %`;
        for (const detail of await unpack(`details-${number}`)) {
          const sample = rollouts.sample(texts.length);
          const spans = [...detail.contexts, ...detail.branches].flat();
          texts.push([
            sample.question, ...sample.options, ...detail.answers, detail.error,
            ...spans.filter((span) => !span.carried && span.by !== "prompt")
              .map((span) => span.text),
          ].join("\n").toLowerCase());
        }
      }
      this.texts = texts;
    })();
    await this.reading;
  }
}
