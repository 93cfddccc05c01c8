// What tokens are coloured by: provenance, log-prob, advantage or teacher gap.

const STEPS = 8;
const LEVELS = {logprob: 5, advantage: 2, gap: 3};

const COLORINGS = {
  provenance: {
    legend: [["sampled", "by-sampled"], ["injected", "by-injected"], ["external", "by-external"],
      ["observed", "by-observed"], ["prompt", "by-prompt"]],
    of: (token) => `by-${token.by}`,
  },
  logprob: {
    legend: [["likely", "heat s1"], ["", "heat s3"], ["", "heat s5"],
      [`log-prob ≤ −${LEVELS.logprob}`, "heat s8"]],
    of: (token) => (token.logprob === null ? "" : heat(-token.logprob / LEVELS.logprob)),
  },
  advantage: {
    legend: diverging("advantage", LEVELS.advantage),
    of: (token) => signedHeat(token.advantage, LEVELS.advantage),
  },
  gap: {
    legend: diverging("log π_teacher − log π_student", LEVELS.gap),
    of: (token) => signedHeat(token.gap, LEVELS.gap),
  },
};

function diverging(name, most) {
  return [[`≤ −${most}`, "less s8"], ["", "less s4"], [`0  ${name}`, "none"], ["", "more s4"],
    [`≥ ${most}`, "more s8"]];
}

// Not-a-number is coloured as the extreme: it must be seen.
function level(share) {
  return Number.isNaN(share) ? STEPS : Math.min(STEPS, Math.round(Math.max(0, share) * STEPS));
}

function heat(share) {
  const step = level(share);
  return step ? `heat s${step}` : "";
}

function signedHeat(value, most) {
  if (value === null) return "";
  const step = level(Math.abs(value) / most);
  return step ? `${value < 0 ? "less" : "more"} s${step}` : "";
}

function tokensOf(span, advantage) {
  const pieces = span.pieces ?? [span.text];
  const whole = !span.pieces;
  const at = (values, i) => {
    if (!values) return null;
    if (!whole) return numberOf(values[i]);
    const known = values.filter((value) => value !== null).map(Number);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  };
  return pieces.map((text, i) => {
    const logprob = at(span.logprobs, i);
    const teacher = at(span.teacher, i);
    return {
      text, logprob, teacher, whole,
      id: span.ids?.[i],
      by: span.by,
      advantage: span.by === "injected" ? null : advantage,
      gap: logprob === null || teacher === null ? null : teacher - logprob,
    };
  });
}

function tokenTitle(token) {
  const lines = [];
  if (token.id !== undefined) lines.push(`token ${token.id} · ${token.by}`);
  if (token.whole) lines.push("means over the turn: no tokenizer was at hand");
  if (token.logprob !== null) {
    lines.push(`log-prob ${shown(token.logprob)} (p = ${shown(Math.exp(token.logprob))})`);
  }
  if (token.teacher !== null) lines.push(`teacher's log-prob ${shown(token.teacher)}`);
  if (token.gap !== null) lines.push(`gap ${signed(token.gap)}`);
  if (token.advantage !== null) lines.push(`advantage ${signed(token.advantage)}`);
  return lines.join("\n");
}

function legend(name) {
  return make("p", {cls: "legend", "aria-hidden": "true"}, COLORINGS[name].legend.map(
    ([text, cls]) => make("span", {}, make("i", {cls}), text)));
}
