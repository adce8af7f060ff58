// The status page: reads /v1/kv once a second and shows it. Whatever the server says goes into
// the page as text, never as markup.

const KEY = "kvkeep-api-key";
const EVERY = 1000, HIDDEN = 15000, LONGEST = 30000, PATIENCE = 10000; // milliseconds
const KINDS = [
  ["flight-exact", "In flight, exact", (now) => now.in_flight.exact],
  ["flight-compact", "In flight, compact", (now) => now.in_flight.compact],
  ["stored-exact", "Prompt cache, exact", (now) => now.prompt_cache.exact.bytes],
  ["stored-compact", "Prompt cache, compact", (now) => now.prompt_cache.compact.bytes],
];
const STATES = [["queued", "Waiting"], ["prefill", "Reading"], ["decode", "Answering"]];

const byId = (id) => document.getElementById(id);
const NONE = "–";

// -- numbers -----------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

function count(value) {
  return value === null || value === undefined ? NONE : whole.format(value);
}

function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${short.format(value)} ${units[unit]}`;
}

function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${short.format(Math.round(1000 * value))} ms`;
  if (value < 100) return `${short.format(value)} s`;
  const [days, hours, minutes] = [value / 86400, (value / 3600) % 24, (value / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(value % 60)} s`;
}

// -- pieces of the page ------------------------------------------------------------------

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// The children of a place, as many as there are things, each made once.
function sync(place, things, make, fill) {
  while (place.children.length > things.length) place.lastElementChild.remove();
  things.forEach((thing, i) => {
    if (i === place.children.length) place.append(make(thing));
    fill(place.children[i], thing);
  });
}

function pairs(place, list) {
  const make = () => {
    const row = document.createElement("div");
    row.append(document.createElement("dt"), document.createElement("dd"));
    return row;
  };
  sync(place, list, make, (row, [name, value]) => {
    put(row.children[0], name);
    put(row.children[1], value);
  });
}

function legend(place, now) {
  const make = ([kind, name]) => {
    const row = document.createElement("div");
    const [term, swatch] = [document.createElement("dt"), document.createElement("i")];
    swatch.dataset.kind = kind;
    term.append(swatch, name);
    row.append(term, document.createElement("dd"));
    return row;
  };
  sync(place, KINDS, make, (row, [, , size]) => put(row.lastElementChild, bytes(size(now))));
}

function meter(cell, share) {
  if (share === null) {
    cell.replaceChildren(NONE);
    return;
  }
  if (!cell.firstElementChild) {
    const bar = document.createElement("span");
    bar.className = "meter";
    bar.setAttribute("role", "meter");
    bar.setAttribute("aria-label", "share of the prompt's rows that is kept");
    bar.setAttribute("aria-valuemin", "0");
    bar.setAttribute("aria-valuemax", "100");
    bar.append(document.createElement("span"));
    cell.replaceChildren(bar, document.createElement("span"));
  }
  const percent = Math.round(100 * share);
  const [bar, text] = cell.children;
  bar.setAttribute("aria-valuenow", String(percent));
  bar.firstElementChild.style.width = `${percent}%`;
  put(text, `${percent} %`);
}

// -- tables ------------------------------------------------------------------------------

const kept = (r) => (r.retained_tokens === null || !r.prompt_tokens ? null : r.retained_tokens / r.prompt_tokens);
const policy = (r) => (r.budget === null ? r.policy : `${r.policy} ${r.budget}`);
const reused = (r) => (r.reused_tokens ? `${count(r.reused_tokens)} ${r.reuse}` : NONE);
const size = (r) => (r.compact_bytes === r.exact_bytes ? bytes(r.exact_bytes) : `${bytes(r.compact_bytes)} of ${bytes(r.exact_bytes)}`);
const ended = (r) => (r.status === 200 ? r.reason : `${r.status} ${r.reason.replaceAll("_", " ")}`);
const state = (r) => {
  if (r.state === "prefill" && r.prompt_tokens) {
    return `prefill ${Math.floor((100 * r.prefilled_tokens) / r.prompt_tokens)} %`;
  }
  return r.state;
};

const COMMON = [
  { name: "Policy", text: policy, wraps: true },
  { name: "Prompt", text: (r) => count(r.prompt_tokens), number: true },
  { name: "Reused", text: reused, number: true },
  { name: "Kept", share: kept },
  { name: "KV bytes", text: size, number: true, broad: true },
  { name: "Answered", text: (r) => count(r.generated), number: true },
  { name: "Tokens/s", text: (r) => (r.tokens_per_s === null ? NONE : short.format(r.tokens_per_s)), number: true },
];
const LIVE = [
  { name: "State", text: state },
  ...COMMON,
  { name: "Age", text: (r) => seconds(r.age_s), number: true },
];
const RECENT = [
  { name: "Ended", text: ended, bad: (r) => r.status >= 400, broad: true, wraps: true },
  ...COMMON,
  { name: "First token", text: (r) => seconds(r.first_token_s), number: true },
  { name: "Took", text: (r) => seconds(r.age_s), number: true },
];

function cell(tag, role, column) {
  const made = document.createElement(tag);
  made.setAttribute("role", role);
  made.classList.toggle("number", Boolean(column?.number));
  made.classList.toggle("broad", Boolean(column?.broad));
  made.classList.toggle("wraps", Boolean(column?.wraps));
  if (column && tag === "td") made.dataset.label = column.name;
  return made;
}

function head(table, columns) {
  if (table.tHead) return;
  const row = table.createTHead().insertRow();
  row.setAttribute("role", "row");
  for (const column of [{ name: "Request" }, ...columns]) {
    const th = cell("th", "columnheader", column);
    th.scope = "col";
    put(th, column.name);
    row.append(th);
  }
  table.tHead.setAttribute("role", "rowgroup");
  table.createTBody().setAttribute("role", "rowgroup");
}

function fill(table, none, columns, requests) {
  head(table, columns);
  table.hidden = requests.length === 0;
  none.hidden = !table.hidden;
  const make = () => {
    const row = document.createElement("tr");
    row.setAttribute("role", "row");
    const name = cell("th", "rowheader");
    name.scope = "row";
    row.append(name, ...columns.map((column) => cell("td", "cell", column)));
    return row;
  };
  sync(table.tBodies[0], requests, make, (row, request) => {
    put(row.cells[0], request.id);
    row.cells[0].title = `${request.endpoint} ${request.id}`;
    columns.forEach((column, i) => {
      const td = row.cells[i + 1];
      if (column.share) meter(td, column.share(request));
      else put(td, column.text(request));
      if (column.bad) td.classList.toggle("bad", column.bad(request));
    });
  });
}

// -- the whole page ----------------------------------------------------------------------

let most = 0; // bytes seen since the page was opened: what the bar is measured by without a limit

function show(now) {
  const total = KINDS.reduce((sum, [, , size]) => sum + size(now), 0);
  const limit = now.limits.kv_memory ?? null;
  most = Math.max(most, total);
  put(byId("memory-total"), bytes(total));
  put(byId("memory-limit"), limit === null ? `no limit; peak on this page ${bytes(most)}` : `of ${bytes(limit)}`);
  const full = Math.max(limit ?? most, total, 1);
  const make = ([kind]) => {
    const part = document.createElement("span");
    part.dataset.kind = kind;
    return part;
  };
  const bar = byId("memory");
  sync(bar, KINDS, make, (part, [, , size]) => {
    part.style.width = `${(100 * size(now)) / full}%`;
    part.hidden = size(now) === 0;
  });
  bar.setAttribute("aria-label", KINDS.map(([, name, size]) => `${name}: ${bytes(size(now))}`).join("; "));
  legend(byId("memory-kinds"), now);
  pairs(byId("states"), STATES.map(([state, name]) => [name, count(now.requests.states[state])]));
  const sums = now.totals;
  const rows = sums.rows_kept + sums.rows_evicted;
  const { exact, compact } = now.prompt_cache;
  pairs(byId("totals"), [
    ["Ended", count(sums.requests)],
    ["Prompt tokens", count(sums.prompt_tokens)],
    ["Reused tokens", count(Object.values(sums.reused_tokens).reduce((a, b) => a + b, 0))],
    ["Tokens answered", count(sums.generated_tokens)],
    ["Rows kept", rows ? `${Math.round((100 * sums.rows_kept) / rows)} % of ${count(rows)}` : NONE],
    ["Cached prompts", count(exact.entries + compact.entries)],
  ]);
  fill(byId("live"), byId("live-none"), LIVE, now.requests.live);
  fill(byId("recent"), byId("recent-none"), RECENT, now.requests.recent);
  put(byId("uptime"), `version ${now.version}, up for ${seconds(now.uptime_s)}`);
}

function connection(state, text) {
  const place = byId("connection");
  place.dataset.state = state; // read out only when the text changes
  put(place, text);
}

// -- polling -----------------------------------------------------------------------------

let failures = 0, timer = 0, asking = false, last = null;

async function ask() {
  const key = sessionStorage.getItem(KEY);
  const headers = key === null ? {} : { Authorization: `Bearer ${key}` };
  const response = await fetch("v1/kv", { headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (response.status === 401) return null;
  if (!response.ok) throw new Error(`status ${response.status}`);
  return response.json();
}

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  try {
    const now = await ask();
    if (now === null) return refused();
    failures = 0;
    last = new Date();
    byId("main").hidden = false;
    show(now);
    connection("live", "Live");
  } catch {
    failures += 1;
    const since = last === null ? "" : `; numbers of ${last.toLocaleTimeString()}`;
    connection("lost", `No connection${since}`);
  } finally {
    asking = false;
  }
  timer = setTimeout(poll, document.hidden ? HIDDEN : Math.min(EVERY * 2 ** failures, LONGEST));
}

function refused() {
  put(byId("key-fault"), sessionStorage.getItem(KEY) === null ? "" : "The server does not take this key.");
  sessionStorage.removeItem(KEY);
  byId("main").hidden = true;
  byId("key").hidden = false;
  connection("locked", "Key needed");
  byId("key-field").focus();
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key-field");
  if (/[^\x21-\x7e]/.test(field.value)) { // no header can carry it
    put(byId("key-fault"), "A key is printable ASCII without spaces.");
    return;
  }
  sessionStorage.setItem(KEY, field.value);
  field.value = "";
  byId("key").hidden = true;
  connection("connecting", "Connecting");
  poll();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("key").hidden) poll();
});
poll();
