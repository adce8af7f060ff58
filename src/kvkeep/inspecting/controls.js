// The controls, and what the pointer and the keys say.
function option(select, value, text) {
  const entry = document.createElement("option");
  entry.value = value;
  entry.textContent = text;
  select.append(entry);
}

function buildControls() {
  option(element("layer"), -1, "all layers");
  layers.forEach((layer, at) => option(element("layer"), at, `layer ${layer.index}`));
  option(element("head"), -1, "all heads");
  const most = Math.max(...layers.map((layer) => layer.heads));
  for (let head = 0; head < most; head++) option(element("head"), head, `head ${head}`);
  const slider = element("budget");
  slider.max = data.rungs.length - 1;
  slider.value = state.rung;
  const asked = data.rungs[data.asked].label;
  element("asked").textContent = `Asked: ${asked}`;

  element("layer").addEventListener("change", (event) => {
    state.layer = Number(event.target.value);
    if (state.layer >= 0) state.row = state.layer;
    update("layer");
  });
  element("head").addEventListener("change", (event) => {
    state.head = Number(event.target.value);
    update("head");
  });
  for (const radio of document.querySelectorAll('input[name="shade"]')) {
    radio.addEventListener("change", () => {
      state.shade = radio.value;
      update("shade");
    });
  }
  let waiting = false;
  slider.addEventListener("input", () => {
    if (waiting) return; // several moves before a frame are drawn once
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      setRung(Number(slider.value));
    });
  });
  element("asked").addEventListener("click", () => setRung(data.asked));
}

function setRung(rung) {
  state.rung = rung;
  element("budget").value = rung;
  update("budget");
}

function update(what) {
  if (what === "head" || what === "shade" || what === "all") computeShades();
  if (what === "head" || what === "budget" || what === "all") computeShares();
  computeText();
  paintText();
  if (what === "layer") drawMap();
  else renderMap();
  if (what === "budget" || what === "all") sayBudget();
  if (state.unit >= 0) read(Math.min(units[state.unit].start, length), state.row);
}

function sayBudget() {
  const rung = data.rungs[state.rung];
  const words = `${rung.label}: rows kept ${rung.rows}; KV cache ${rung.bytes}`;
  element("budget-words").textContent = words;
  element("budget").setAttribute("aria-valuetext", words);
  element("asked").disabled = state.rung === data.asked;
  element("rows-kept").textContent = rung.rows;
  element("bytes-kept").textContent = rung.bytes;
  const table = element("counts");
  if (table.closest("details").open) fillCounts();
}

function fillCounts() {
  const table = element("counts");
  const rows = data.rungs[state.rung].counts;
  const most = Math.max(...rows.map((row) => row.length));
  const head = document.createElement("tr");
  const cell = (row, kind, text) => {
    const node = document.createElement(kind);
    if (kind === "th") node.scope = row === head ? "col" : "row";
    node.textContent = text;
    row.append(node);
  };
  cell(head, "th", "layer");
  for (let set = 0; set < most; set++) cell(head, "th", most === 1 ? "all heads" : `head ${set}`);
  const body = rows.map((counts, at) => {
    const row = document.createElement("tr");
    cell(row, "th", layers[at].index);
    for (let set = 0; set < most; set++) cell(row, "td", set in counts ? counted(counts[set]) : "");
    return row;
  });
  table.replaceChildren(head, ...body);
}

// What is known about a position, seen from a layer of the map.
function read(position, row) {
  const last = position >= length;
  const unit = units[unitAt[position]];
  document.querySelector(".reading").classList.add("told");
  const token = element("r-token");
  token.replaceChildren();
  fill(token, data.texts[unit.index]);
  const more = unit.stop - unit.start > 1 ? `, one of ${unit.stop - unit.start} tokens` : "";
  element("r-position").textContent = `${counted(position)} (id ${data.tokens[position]}${more})`;
  if (last) {
    element("r-where").textContent = "Last token";
    element("r-score").textContent = "read after the eviction, always there";
    element("r-kept").textContent = "–";
    return `Position ${position}, the last token: read after the eviction, always there.`;
  }
  const layer = layers[row];
  const sets = setsOf(layer, state.head);
  const who = state.head < 0 || layer.sets.length === 1 ? "all heads" : `head ${state.head}`;
  element("r-where").textContent = `Layer ${layer.index}, ${who}`;
  const level = (set) => layer.sets[set].levels[position];
  const score = mean(sets, (set) => layer.sets[set].values[level(set)]);
  const rank = mean(sets, (set) => layer.sets[set].rank[level(set)]);
  const above = `${Math.floor(100 * rank)}%`;
  const [own, heads] = keepers([row], state.head, position);
  const fate = own === heads ? "kept" : own ? `kept by ${own} of ${heads}` : "evicted";
  const from = sets.length === 1 ? stays(layer, sets[0], position) : "";
  const words = sets.length
    ? `${fate}; score ≈ ${score.toPrecision(3)}, above ${above} of the positions${from}`
    : "no such head";
  element("r-score").textContent = words;
  const [kept, all] = keepers([...layers.keys()], -1, position);
  const everywhere = `${counted(kept)} of ${counted(all)} heads at ${data.rungs[state.rung].label}`;
  element("r-kept").textContent = everywhere;
  return `Position ${position}, layer ${layer.index}, ${who}: ${words}. Kept by ${everywhere}.`;
}

function stays(layer, set, position) {
  if (layer.first === null) return "";
  const rung = data.rungs[layer.first[set * length + position]];
  return rung ? `; stays from ${rung.label} on` : "; stays at none of these budgets";
}

function mean(sets, value) {
  return sets.reduce((sum, set) => sum + value(set), 0) / Math.max(sets.length, 1);
}

// For ears: moves by keys and clicks, not every move of a pointer.
function tell(position, row) {
  const words = read(position, row);
  const text = data.texts[unitAt[position]];
  element("said").textContent = `Token ${text}. ${words}`;
}

function go(position, row, { scroll }) {
  state.row = row;
  moveTo(unitAt[position], { scroll });
  tell(position, row);
  drawMap();
}

function listen() {
  canvas.addEventListener("pointermove", (event) => {
    const found = under(event);
    if (found) read(found.position, found.at);
  });
  canvas.addEventListener("click", (event) => {
    const found = under(event);
    if (found) go(found.position, found.at, { scroll: true });
  });
  canvas.addEventListener("focus", drawMap);
  canvas.addEventListener("blur", drawMap);
  canvas.addEventListener("keydown", onMapKey);
  const text = element("text");
  text.addEventListener("pointerover", (event) => {
    const node = event.target.closest(".u");
    if (node) read(node.unit.start, rowOfText());
  });
  text.addEventListener("click", (event) => {
    const node = event.target.closest(".u");
    if (node) go(node.unit.start, rowOfText(), { scroll: false });
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const next = Math.min(units.length - 1, Math.max(0, state.unit + step));
    go(units[next].start, rowOfText(), { scroll: true });
  });
  element("counts").closest("details").addEventListener("toggle", fillCounts);
  window.addEventListener("resize", () => requestAnimationFrame(renderMap));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", renderMap);
}

const rowOfText = () => (state.layer >= 0 ? state.layer : state.row);

function onMapKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const far = Math.max(1, Math.round(length / 20));
  const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: far, PageUp: -far };
  const rows = { ArrowDown: 1, ArrowUp: -1 };
  const from = state.unit < 0 ? 0 : Math.min(units[state.unit].start, length - 1);
  let position = from;
  if (event.key in steps) {
    const wanted = Math.min(length - 1, Math.max(0, from + steps[event.key]));
    const by = Math.sign(steps[event.key]);
    const same = unitAt[wanted] === unitAt[from] && state.unit >= 0;
    const next = Math.min(units.length - 1, Math.max(0, unitAt[from] + by));
    position = state.unit < 0 ? 0 : same ? Math.min(units[next].start, length - 1) : wanted;
  } else if (event.key === "Home") position = 0;
  else if (event.key === "End") position = length - 1;
  else if (event.key in rows) {
    state.row = Math.min(layers.length - 1, Math.max(0, state.row + rows[event.key]));
  } else if (event.key !== "Enter") return;
  event.preventDefault();
  go(position, state.row, { scroll: event.key === "Enter" });
}

buildText();
buildControls();
listen();
update("all");
