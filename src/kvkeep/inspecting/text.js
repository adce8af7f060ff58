// The prompt: a span per piece of text, painted by classes, those in view first.
const CHUNK = 128;
const SHADES = 8;
const classes = [];
for (let s = 0; s < SHADES; s++) classes.push([0, 1, 2, 3, 4].map((k) => `u s${s} k${k}`));

const units = [];
const unitAt = new Uint32Array(data.tokens.length);
const chunks = [];
let painting = 0;

// What needs a sign: what cannot be seen, or would turn the text around it.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u115f\u1160\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\u3164\ufeff\ufff9-\ufffb]|[\ud800-\udfff](?![\udc00-\udfff])/u;

// Its code: fonts have no picture of most of them.
function signFor(character) {
  const code = character.codePointAt(0).toString(16).toUpperCase();
  return `\u27e8${code.padStart(code.length > 2 ? 4 : 2, "0")}\u27e9`;
}

// A unit's text into a node; never as HTML.
function fill(node, text) {
  if (text !== "" && !/\n/.test(text) && !HIDDEN.test(text)) {
    node.textContent = text;
    return;
  }
  const say = (sign) => {
    const mark = document.createElement("span");
    mark.className = "sign";
    mark.textContent = sign;
    node.append(mark);
  };
  if (text === "") say("\u2205");
  for (const character of text) {
    if (character === "\n") {
      say("\u21b5");
      node.append("\n");
    } else if (HIDDEN.test(character)) {
      say(signFor(character));
    } else {
      node.append(character);
    }
  }
  node.normalize();
}

function buildText() {
  const root = element("text");
  let position = 0;
  let chunk = null;
  data.texts.forEach((text, index) => {
    if (index % CHUNK === 0) {
      chunk = { node: document.createElement("span"), units: [], seen: false, painted: 0 };
      chunk.node.chunk = chunk;
      chunks.push(chunk);
    }
    const node = document.createElement("span");
    const width = data.widths[index];
    const unit = { node, index, start: position, stop: position + width, shown: "u" };
    node.className = "u";
    node.unit = unit;
    fill(node, text);
    unitAt.fill(index, position, position + width);
    position += width;
    units.push(unit);
    chunk.units.push(unit);
    chunk.node.append(node);
  });
  root.append(...chunks.map((each) => each.node));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const each = entry.target.chunk;
      each.seen = entry.isIntersecting;
      if (each.seen) paint(each);
    }
    drawMap();
  }, { rootMargin: "200px 0px" });
  for (const each of chunks) watch.observe(each.node);
  window.addEventListener("beforeprint", () => chunks.forEach(paint));
}

function paint(chunk) {
  if (chunk.painted === painting) return;
  chunk.painted = painting;
  for (const unit of chunk.units) {
    const name = look(unit);
    if (name !== unit.shown) {
      unit.shown = name;
      unit.node.className = name;
    }
  }
}

// The strongest of a unit's tokens, and how much of it stays.
function look(unit) {
  const at = unit.index === state.unit ? " at" : "";
  const stop = Math.min(unit.stop, length);
  if (unit.start >= length) return `u last${at}`; // the last token: read later, always there
  let shade = 0;
  let share = 0;
  for (let t = unit.start; t < stop; t++) {
    shade = Math.max(shade, textShade[t]);
    share += textShare[t];
  }
  share /= stop - unit.start;
  const strong = Math.min(SHADES - 1, Math.floor(shade * SHADES));
  const kept = share <= 1e-6 ? 0 : share >= 1 - 1e-6 ? 4 : 1 + Math.min(2, Math.floor(share * 3));
  return classes[strong][kept] + at;
}

function paintText() {
  painting++;
  for (const chunk of chunks) if (chunk.seen) paint(chunk);
}

function moveTo(index, { scroll = false } = {}) {
  const before = state.unit;
  state.unit = index;
  for (const i of [before, index]) {
    if (i < 0) continue;
    const unit = units[i];
    unit.node.classList.toggle("at", i === index);
    unit.shown = unit.node.className;
  }
  if (scroll && index >= 0) units[index].node.scrollIntoView({ block: "center" });
}
