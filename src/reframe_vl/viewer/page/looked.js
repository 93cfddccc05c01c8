// Where a rollout looked: the original with the regions asked for and the evidence, or a video's
// frames, and what the tools returned.

const ASKED = {ok: "asked", repeated: "repeated"};

function picture(rollouts, number, width, options = {}) {
  const image = rollouts.image(number);
  if (image.reason) {
    return make("span", {cls: "missing", title: image.reason}, "image ", image.reason);
  }
  const element = make("img", {
    src: image.src, width, height: Math.max(1, Math.round(width * image.height / image.width)),
    alt: options.alt ?? "", loading: "lazy", decoding: "async",
    cls: width > image.width ? "enlarged" : undefined,
    on: {error: () => element.replaceWith(make("span", {cls: "missing"}, "image damaged"))},
  });
  return element;
}

function viewsOf(detail, by) {
  const contexts = by === "prompt" ? detail.contexts.slice(0, 1) : detail.contexts;
  return contexts.flat().filter((span) => span.by === by && !span.carried && span.views)
    .flatMap((span) => span.views);
}

function looked(rollouts, i, detail) {
  const sample = rollouts.sample(i);
  const calls = detail.calls.map((call, place) => ({...call, number: place + 1}));
  const asked = calls.filter((call) => call.status in ASKED);
  const given = viewsOf(detail, "prompt").flat();
  const returned = returnedTiles(rollouts, detail, asked);
  const original = sample.modality === "video"
    ? strip(rollouts, sample, given, asked)
    : stillImage(rollouts, sample, given, asked);
  return make("div", {cls: `looked ${sample.modality}`}, original,
    returned.length ? make("div", {cls: "returned"}, returned) : null);
}

function stillImage(rollouts, sample, given, asked) {
  if (!given.length) return make("p", {cls: "quiet"}, "The policy was shown no image.");
  const [width, height] = sample.media?.size ?? [1, 1];
  const boxes = [
    ...(sample.evidence?.boxes ?? []).map((box) => ({box, cls: "evidence", name: "evidence"})),
    ...asked.flatMap((call) => call.boxes.map((box) => ({
      box, cls: ASKED[call.status], name: String(call.number),
    }))),
  ];
  const long = 300;
  const side = width >= height ? long : Math.max(80, Math.round(long * width / height));
  const frame = make("figure", {cls: "original"}, picture(rollouts, given[0], side, {
    alt: "what the policy was given",
  }));
  frame.append(overlay(boxes, width, height, width / side));
  return frame;
}

// Boxes in original pixels over the image; `unit` pixels of the original are one of the screen.
function overlay(boxes, width, height, unit) {
  const svg = svgElement("svg", {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none"});
  for (const {box, cls, name} of boxes) {
    // Evidence is drawn outside of its edge, so that both are seen where they are the same.
    const out = cls === "evidence" ? 3 * unit : 0;
    const [x0, y0] = box.slice(0, 2).map((edge) => edge - out);
    const [w, h] = [box[2] - box[0], box[3] - box[1]].map((side) => Math.max(side, unit) + 2 * out);
    const place = {x: x0, y: y0, width: w, height: h};
    svg.append(svgElement("rect", {...place, class: "halo"}),
      svgElement("rect", {...place, class: cls}));
    if (cls === "evidence") continue;
    const label = svgElement("text", {x: x0 + 4 * unit, y: y0 + 12 * unit, class: "label",
      "font-size": 12 * unit});
    label.textContent = name;
    svg.append(svgElement("rect", {x: x0, y: y0, width: (7 * name.length + 8) * unit,
      height: 15 * unit, class: `label ${cls}`}), label);
  }
  return svg;
}

function svgElement(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function strip(rollouts, sample, given, asked) {
  const times = sample.media?.timestamps_s ?? [];
  const evidence = new Set((sample.evidence?.segments ?? []).flat());
  // Native videos may repeat a last frame to fill a patch.
  const images = given.length >= times.length ? given : [];
  return make("ol", {cls: "strip", "aria-label": "frames"}, times.map((time, frame) => {
    const by = asked.filter((call) => call.frames.includes(frame));
    return make("li", {
      cls: `frame${evidence.has(frame) ? " evidence" : ""}${by.length ? " asked" : ""}`,
      title: [`frame ${frame}, ${shown(numberOf(time))} s`,
        evidence.has(frame) ? "evidence" : "", ...by.map((call) => `call ${call.number}`)]
        .filter(Boolean).join(", "),
    },
    images.length ? picture(rollouts, images[frame], 72) : make("span", {cls: "unseen"}),
    make("span", {cls: "time"}, `${frame}`,
      by.length ? make("b", {}, ` ${by.map((call) => call.number).join(",")}`) : null));
  }));
}

function returnedTiles(rollouts, detail, asked) {
  const owners = asked.flatMap((call) => (call.frames.length
    ? call.frames.map((frame) => `${call.number}: frame ${frame}`)
    : call.boxes.map(() => `${call.number}`)));
  const images = viewsOf(detail, "observed").flat();
  // The last call's images are not there where they would not have fitted into the context.
  return images.map((number, place) => make("figure", {cls: "tile"},
    picture(rollouts, number, 104, {alt: "what a tool returned"}),
    make("figcaption", {}, owners[place] ? `call ${owners[place]}` : "returned")));
}

function iou([a0, b0, a1, b1], [c0, d0, c1, d1]) {
  const width = Math.max(0, Math.min(a1, c1) - Math.max(a0, c0));
  const height = Math.max(0, Math.min(b1, d1) - Math.max(b0, d0));
  const common = width * height;
  return common / ((a1 - a0) * (b1 - b0) + (c1 - c0) * (d1 - d0) - common);
}

// How well a call meets the evidence item that it meets best; null where there is nothing to meet.
function bestOverlap(call, evidence) {
  const overlaps = [
    ...call.boxes.flatMap((box) => (evidence?.boxes ?? []).map((other) => iou(box, other))),
    ...(call.frames.length ? (evidence?.segments ?? []).map((segment) => {
      const common = segment.filter((frame) => call.frames.includes(frame)).length;
      return common / new Set([...segment, ...call.frames]).size;
    }) : []),
  ];
  return overlaps.length ? Math.max(...overlaps) : null;
}
