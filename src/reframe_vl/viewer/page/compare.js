// The same sample over steps and runs: a column a step, a dot a rollout, high where it earned much.

const DOT = {left: 44, right: 14, top: 12, bottom: 24, height: 132, step: 34};

function compare(rollouts, i, choose) {
  const alike = rollouts.alike(i);
  if (alike.length < 2) return null;
  const columns = new Map();
  for (const other of alike) {
    const name = `${rollouts.get("run", other)}/${rollouts.get("step", other)}`;
    if (!columns.has(name)) columns.set(name, []);
    columns.get(name).push(other);
  }
  const rewards = alike.map((other) => rollouts.get("reward", other)).filter(Number.isFinite);
  const [least, most] = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const y = (reward) => DOT.top + (DOT.height - DOT.top - DOT.bottom) *
    (Number.isFinite(reward) ? 1 - (reward - least) / (most - least) : 1);
  const step = Math.max(DOT.step, Math.min(90, 520 / columns.size));
  const width = DOT.left + DOT.right + step * columns.size;
  const svg = svgElement("svg", {width, height: DOT.height, viewBox: `0 0 ${width} ${DOT.height}`,
    class: "dots", role: "group", "aria-label": "rollouts of this sample"});
  for (const value of [least, 0, most].filter((v, at, all) => all.indexOf(v) === at)) {
    svg.append(svgElement("line", {x1: DOT.left - 6, x2: width, y1: y(value), y2: y(value),
      class: value === 0 ? "axis" : "grid"}));
    svg.append(svgText(shown(value, 2), DOT.left - 10, y(value) + 4, "end"));
  }
  const means = [];
  let place = 0;
  for (const members of columns.values()) {
    const middle = DOT.left + step * (place + 0.5);
    const run = rollouts.get("run", members[0]);
    const label = rollouts.runs.length > 1
      ? `${runLetter(run)}${rollouts.get("step", members[0])}`
      : String(rollouts.get("step", members[0]));
    svg.append(svgText(label, middle, DOT.height - 6, "middle"));
    const known = members.map((other) => rollouts.get("reward", other)).filter(Number.isFinite);
    if (known.length) {
      const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
      means.push([middle, y(mean), run]);
    }
    members.forEach((other, at) => svg.append(dot(rollouts, other, i, choose,
      middle + (members.length > 1 ? (at / (members.length - 1) - 0.5) * (step - 14) : 0),
      y(rollouts.get("reward", other)))));
    place++;
  }
  for (let at = 1; at < means.length; at++) {
    const [[x1, y1, before], [x2, y2, run]] = [means[at - 1], means[at]];
    if (before === run) svg.prepend(svgElement("line", {x1, y1, x2, y2, class: "mean"}));
  }
  return make("section", {cls: "card"},
    make("h3", {}, "The same sample ", make("span", {cls: "quiet"},
      `${plural(alike.length, "rollout")} by step and reward; filled: right, line: mean`)),
    make("div", {cls: "scroll"}, svg));
}

function dot(rollouts, other, i, choose, x, y) {
  const right = rollouts.get("right", other) > 0;
  const scored = Number.isFinite(rollouts.get("reward", other));
  const element = svgElement("circle", {cx: x, cy: y, r: other === i ? 6 : 4.5,
    class: ["dot", right && "right", other === i && "current", !scored && "unscored"]
      .filter(Boolean).join(" ")});
  const title = svgElement("title", {});
  title.textContent = `step ${rollouts.get("step", other)}, rollout ${rollouts.get("index", other)}: ` +
    `reward ${shown(rollouts.get("reward", other))}`;
  element.append(title);
  element.addEventListener("click", () => choose(other));
  return element;
}

function svgText(text, x, y, anchor) {
  const element = svgElement("text", {x, y, "text-anchor": anchor});
  element.textContent = text;
  return element;
}
