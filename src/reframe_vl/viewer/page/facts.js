// What is known of a rollout in numbers: how it ended, what it called, what it earned.

function head(rollouts, i, detail) {
  const get = (name) => rollouts.get(name, i);
  const sample = rollouts.sample(i);
  const facts = [
    rollouts.runs.length > 1
      ? `${runLetter(get("run"))}: ${rollouts.runs[get("run")].name}` : null,
    `step ${get("step")}`, `rollout ${get("index")}`, words(rollouts.terminations[get("termination")]),
    plural(get("turns"), "turn"), plural(get("tokens"), "sampled token"),
    `policy of update ${detail.version}`, `temperature ${shown(numberOf(detail.temperature))}`,
  ];
  return make("header", {cls: "head"},
    make("h2", {}, make("bdi", {}, oneLine(sample.id))),
    make("p", {cls: "quiet"}, facts.filter(Boolean).join(" · ")),
    make("p", {cls: "chips"}, chips(rollouts, i).slice(get("calls") ? 1 : 0),
      sample.applicability
        ? make("span", {cls: "chip"}, `tool ${words(sample.applicability)}`) : null,
      [sample.domain, sample.source, sample.split].filter(Boolean)
        .map((text) => make("span", {cls: "chip"}, make("bdi", {}, oneLine(text))))));
}

function question(rollouts, i, detail) {
  const sample = rollouts.sample(i);
  const {value, aliases, kind} = sample.answer;
  const right = rollouts.get("right", i);
  return make("section", {cls: "card"},
    make("h3", {}, "Question"),
    written("p", sample.question, "written question"),
    sample.options.length ? make("ol", {cls: "options"}, sample.options.map((option, place) =>
      make("li", {cls: kind === "mcq" && value === String.fromCharCode(65 + place) ? "key" : ""},
        make("b", {}, String.fromCharCode(65 + place)), written("span", option, "")))) : null,
    make("dl", {cls: "answers"},
      make("dt", {}, "Answered"),
      make("dd", {cls: right === null ? "" : right > 0 ? "right" : "wrong"}, detail.answers.length
        ? detail.answers.map((answer) => written("q", answer.slice(0, 2000), ""))
        : make("span", {cls: "quiet"}, "nothing")),
      make("dt", {}, "Reference"),
      make("dd", {}, [value, ...aliases].map((answer) => written("q", answer, "")))),
    detail.error ? make("p", {cls: "error"}, "Error: ", written("span", detail.error, "")) : null);
}

function rewards(rollouts, i, detail) {
  const get = (name) => rollouts.get(name, i);
  const parts = Object.entries(detail.rewards).map(([name, value]) => [name, numberOf(value)]);
  const total = get("reward");
  const factors = rollouts.factors(i);
  const share = (name, value) => (value === null ? 0 : value * (factors?.[name] ?? NaN));
  const sum = parts.reduce((all, [name, value]) => all + share(name, value), 0);
  // Shares are shown where they explain the total: a run may have rewards of its own.
  const explained = total !== null && Math.abs(sum - total) < 1e-4;
  const most = Math.max(1e-9, ...parts.map(([name, value]) =>
    Math.abs(explained ? share(name, value) : value ?? 0)).filter(Number.isFinite));
  const rows = parts.map(([name, value]) => make("tr", {},
    make("th", {scope: "row"}, make("bdi", {}, oneLine(name))),
    make("td", {}, shown(value)),
    explained ? make("td", {cls: "quiet"}, `× ${shown(factors[name])}`) : null,
    explained ? make("td", {}, value === null ? "–" : signed(share(name, value))) : null,
    make("td", {cls: "bar-cell"}, value === null ? null
      : rewardBar(explained ? share(name, value) : value, most))));
  return make("section", {cls: "card"},
    make("h3", {}, "Reward"),
    make("table", {cls: "rewards"},
      make("tbody", {}, rows),
      make("tfoot", {},
        make("tr", {}, make("th", {scope: "row"}, "total"), explained ? make("td") : null,
          explained ? make("td") : null, make("td", {}, make("b", {}, shown(total))), make("td")),
        make("tr", {}, make("th", {scope: "row"}, "advantage"), explained ? make("td") : null,
          explained ? make("td") : null,
          make("td", {}, get("advantage") === null ? "–" : signed(get("advantage"))), make("td")))));
}

function callTable(rollouts, i, detail) {
  if (!detail.calls.length) return null;
  const evidence = rollouts.sample(i).evidence;
  const rows = detail.calls.map((call, place) => {
    const overlap = bestOverlap(call, evidence);
    const got = call.boxes.map((box) => `[${box.map((edge) => shown(numberOf(edge), 4)).join(", ")}]`)
      .concat(call.frames.length ? [`frames ${call.frames.join(", ")}`] : []).join(" ");
    return make("tr", {},
      make("th", {scope: "row"}, String(place + 1)),
      make("td", {}, make("span", {cls: `status ${call.status}`}, call.status),
        call.by_gate ? make("span", {cls: "chip gate"}, "by the gate") : null,
        call.reason ? make("span", {cls: "quiet"}, ` ${words(call.reason)}`) : null),
      make("td", {cls: "arguments"},
        written("span", `${call.name || "no tool"} ${argumentsText(call.arguments)}`),
        call.proposal ? make("details", {}, make("summary", {}, "what it had proposed"),
          written("div", call.proposal)) : null),
      make("td", {}, got || "–"),
      make("td", {cls: "number"}, overlap === null ? "–" : shown(overlap, 2)));
  });
  return make("section", {cls: "card"},
    make("h3", {}, "Calls"),
    make("table", {cls: "calls"},
      make("thead", {}, make("tr", {}, ["", "", "as written", "returned", "best IoU"].map((name) =>
        make("th", {scope: "col"}, name)))),
      make("tbody", {}, rows)));
}

function argumentsText(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 2000 ? `${text.slice(0, 2000)} …` : text;
}
