// What the page was given, unpacked, and what follows from it for one choice of layer and head.
const data = JSON.parse(document.getElementById("data").textContent);
const length = data.positions;
const LEVELS = 256;
const element = (id) => document.getElementById(id);

function unpacked(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

// What each level of one set means: its share of lower scores, its height between the extremes.
function scales(levels, values) {
  const counts = new Uint32Array(LEVELS);
  for (const level of levels) counts[level]++;
  const there = [...counts.keys()].filter((level) => counts[level]);
  const low = values[there[0]];
  const width = values[there[there.length - 1]] - low;
  const rank = new Float32Array(LEVELS);
  const score = new Float32Array(LEVELS);
  let below = 0;
  for (const level of there) {
    rank[level] = (below + counts[level] / 2) / levels.length;
    score[level] = width > 0 ? (values[level] - low) / width : 0;
    below += counts[level];
  }
  return { rank, score };
}

const layers = data.layers.map((packed) => {
  const levels = unpacked(packed.levels);
  const values = new Float32Array(unpacked(packed.values).buffer);
  const sets = [];
  for (let at = 0; at < packed.sets; at++) {
    const own = levels.subarray(at * length, (at + 1) * length);
    const mean = values.subarray(at * LEVELS, (at + 1) * LEVELS);
    sets.push({ levels: own, values: mean, ...scales(own, mean) });
  }
  return {
    index: packed.index,
    heads: packed.heads,
    sets,
    first: packed.first === null ? null : unpacked(packed.first),
    bits: packed.bits === null ? null : unpacked(packed.bits),
    stride: Math.ceil(length / 8),
  };
});

// Whether a set keeps a position at a budget of the ladder.
function isKept(layer, set, position, rung) {
  if (layer.first !== null) return layer.first[set * length + position] <= rung;
  const byte = (rung * layer.sets.length + set) * layer.stride + (position >> 3);
  return ((layer.bits[byte] >> (position & 7)) & 1) === 1;
}

// The sets of a layer that a head stands for; -1 is all heads.
function setsOf(layer, head) {
  if (layer.sets.length === 1) return head < layer.heads ? [0] : [];
  if (head < 0) return [...layer.sets.keys()];
  return head < layer.sets.length ? [head] : [];
}

const state = { layer: -1, head: -1, shade: "rank", rung: data.asked, unit: -1, row: 0 };

// Per layer: the mean shade and the share of heads that keep each position.
const shades = layers.map(() => new Float32Array(length));
const shares = layers.map(() => new Float32Array(length));
const textShade = new Float32Array(length);
const textShare = new Float32Array(length);

function computeShades() {
  layers.forEach((layer, at) => {
    const out = shades[at].fill(0);
    const sets = setsOf(layer, state.head);
    for (const set of sets) {
      const own = layer.sets[set];
      const scale = own[state.shade];
      for (let t = 0; t < length; t++) out[t] += scale[own.levels[t]] / sets.length;
    }
  });
}

function computeShares() {
  layers.forEach((layer, at) => {
    const out = shares[at].fill(0);
    const sets = setsOf(layer, state.head);
    for (const set of sets) {
      for (let t = 0; t < length; t++) {
        if (isKept(layer, set, t, state.rung)) out[t] += 1;
      }
    }
    if (sets.length > 1) for (let t = 0; t < length; t++) out[t] /= sets.length;
  });
}

// The layers that the text shows: one, or all that have the head.
function layersShown() {
  const one = state.layer >= 0 ? [state.layer] : [...layers.keys()];
  return one.filter((at) => setsOf(layers[at], state.head).length);
}

function computeText() {
  const shown = layersShown();
  for (const [of, out] of [[shades, textShade], [shares, textShare]]) {
    out.fill(0);
    for (const at of shown) for (let t = 0; t < length; t++) out[t] += of[at][t] / shown.length;
  }
}

// How many heads of some layers keep a position, and of how many: exact, for words.
function keepers(at, head, position) {
  let kept = 0;
  let all = 0;
  for (const i of at) {
    const layer = layers[i];
    const sets = setsOf(layer, head);
    const heads = head < 0 ? layer.heads / sets.length : 1;
    for (const set of sets) {
      all += heads;
      if (isKept(layer, set, position, state.rung)) kept += heads;
    }
  }
  return [kept, all];
}

const counted = (number) => number.toLocaleString("en-US");
