// All sessions of this key as a table that can be sorted and searched; on a narrow screen, as a list.

import { ago, bytes, dot, el, milliseconds, percentile, sessionLink, text } from "./dom.js";
import { sparkline } from "./charts.js";
import { sessionColour } from "./draw.js";

// `value`: what is sorted by, where it is not what is shown. Numbers and texts.
const COLUMNS = [
  { name: "session", value: ({ id }) => id },
  { name: "state", value: (session) => stateOf(session) },
  { name: "latency", hint: "of its newest tick", value: ({ latency_ms: ms }) => ms.at(-1), show: ifAny(milliseconds) },
  { name: "p50", hint: "half of its last 40 ticks took no longer", value: ({ latency_ms: ms }) => percentile(ms, 0.5), show: ifAny(milliseconds) },
  { name: "p99", hint: "99 of 100 of its last 40 ticks took no longer: the slowest", value: ({ latency_ms: ms }) => percentile(ms, 0.99), show: ifAny(milliseconds) },
  { name: "last ticks" },
  { name: "to spare", hint: "of the time that a chunk of actions lasts", value: ({ margin_s: spare }) => spare ?? undefined, show: ifAny((spare) => `${spare.toFixed(2)} s`) },
  { name: "frames", value: ({ frames_seen: frames }) => frames, show: (frames, _, hello) => `${frames} of ${hello.window_frames}` },
  { name: "blocks", value: ({ blocks }) => blocks, show: (blocks, { state, bytes_parked: parked }) => (state === "parked" ? `${bytes(parked)} parked` : blocks) },
  { name: "ticks", value: ({ ticks }) => ticks },
  { name: "sockets", value: ({ connections }) => connections },
  { name: "age", hint: "since it was opened", value: ({ age_s: age }) => age, show: ifAny(ago) },
  { name: "idle", hint: "since its last tick", value: ({ idle_s: idle }) => idle ?? undefined, show: ifAny(ago) },
];

// How it was sorted and searched outlives the view.
const chosen = { column: null, descending: false, query: "" };

export function stateOf(session) {
  if (session.state === "parked") return "parked";
  if (session.busy) return "busy";
  return session.connections ? "live" : "open, nobody connected";
}

export function fillState(chip, session, stale) {
  const state = stateOf(session);
  text(chip, stale ? `was ${state}` : state);
  chip.className = `chip ${stale ? "" : state.split(",")[0]}`;
}

export class SessionTable {
  constructor() {
    this.rows = new Map();
    this.body = el("tbody");
    this.none = el("p", { class: "empty" });
    this.found = el("span", { class: "muted", role: "status" });
    this.search = el("input", {
      type: "search", placeholder: "search by name or state", "aria-label": "search sessions", value: chosen.query, oninput: () => this.type(),
    });
    this.heads = new Map(COLUMNS.map(({ name, hint }) => [name, el("th", { scope: "col", title: hint })]));
    for (const { name, value } of COLUMNS) {
      this.heads.get(name).append(value ? el("button", { class: "sort", onclick: () => this.sortBy(name) }, name) : name);
    }
    const head = el("tr", {}, [...this.heads.values()]);
    this.tools = el("div", { class: "tools" }, this.search, this.found);
    this.element = el("div", {}, this.tools,
      el("div", { class: "scroll" }, el("table", { class: "sessions" }, el("thead", {}, head), this.body)), this.none);
  }

  press(letter) {
    if (letter !== "/" || this.tools.hidden) return false;
    this.search.focus();
    return true;
  }

  type() {
    chosen.query = this.search.value;
    this.arrange();
  }

  // Up, down, then as they were opened.
  sortBy(name) {
    if (chosen.column !== name) Object.assign(chosen, { column: name, descending: false });
    else if (!chosen.descending) chosen.descending = true;
    else Object.assign(chosen, { column: null, descending: false });
    this.arrange();
  }

  update(sessions, hello, stale) {
    this.sessions = sessions;
    this.hello = hello;
    const present = new Set(sessions.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (!present.has(id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    }
    sessions.forEach((session, index) => {
      if (!this.rows.has(session.id)) this.rows.set(session.id, makeRow(session.id));
      fillRow(this.rows.get(session.id), session, index, hello, stale);
    });
    this.tools.hidden = sessions.length < 2 && !chosen.query;
    const aimsAt = matchMedia("(hover: hover)").matches && this.body.matches(":hover");
    if (!aimsAt || this.body.children.length !== sessions.length) this.arrange(); // no row goes away under the pointer
  }

  arrange() {
    if (!this.sessions) return;
    const { hello } = this;
    const query = chosen.query.trim().toLowerCase();
    const fits = (session) => `${session.id} ${stateOf(session)}`.toLowerCase().includes(query);
    const sorted = inOrder(this.sessions);
    sorted.forEach(({ id }, place) => {
      const { element } = this.rows.get(id);
      if (this.body.children[place] !== element) this.body.insertBefore(element, this.body.children[place] ?? null);
    });
    let shown = 0;
    for (const session of sorted) {
      this.rows.get(session.id).element.hidden = !fits(session);
      shown += fits(session);
    }
    text(this.found, query ? `${shown} of ${sorted.length} shown` : "");
    this.none.hidden = shown > 0;
    const opens = hello?.app === "videos" ? "Words on the page of videos open one." : "A robot opens one with its first request; `worldkv demo` brings one.";
    text(this.none, sorted.length ? `No session matches “${chosen.query}”.` : `No session is open. ${opens}`);
    for (const [name, head] of this.heads) {
      const way = chosen.descending ? "descending" : "ascending";
      if (chosen.column === name) head.setAttribute("aria-sort", way);
      else head.removeAttribute("aria-sort");
    }
  }
}

function ifAny(show) {
  return (value) => (value === undefined || value === null ? "" : show(value));
}

const byName = new Intl.Collator(undefined, { numeric: true });

// What has no value comes last, either way.
function inOrder(sessions) {
  const column = COLUMNS.find(({ name }) => name === chosen.column);
  if (!column) return sessions;
  const way = chosen.descending ? -1 : 1;
  const keyed = sessions.map((session) => ({ session, key: column.value(session) }));
  return keyed.sort(({ key: a }, { key: b }) => {
    if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
    return way * (typeof a === "string" ? byName.compare(a, b) : a - b);
  }).map(({ session }) => session);
}

function makeRow(id) {
  const cells = new Map(COLUMNS.map(({ name }) => [name, el("td", { "data-column": name, class: name === "session" ? "id" : "" })]));
  const mark = dot("transparent");
  const chip = el("span", { class: "chip" });
  const chart = el("canvas", { role: "img" });
  cells.get("session").append(mark, el("a", { href: sessionLink(id), title: id }, id));
  cells.get("state").append(chip);
  cells.get("last ticks").append(chart);
  return { element: el("tr", { "data-id": id }, [...cells.values()]), cells, mark, chip, chart };
}

function fillRow({ element, cells, mark, chip, chart }, session, index, hello, stale) {
  mark.style.background = sessionColour(index);
  fillState(chip, session, stale);
  for (const { name, value, show = String } of COLUMNS) {
    if (value && !["session", "state"].includes(name)) text(cells.get(name), show(value(session), session, hello));
    cells.get(name).classList.toggle("none", name === "last ticks" ? !session.ticks : !cells.get(name).textContent);
  }
  const { margin_s: spare, latency_ms: latencies, latency_span_s: span } = session;
  cells.get("to spare").classList.toggle("bad", spare !== null && spare < 0);
  const words = latencies.length ? `the last ${latencies.length} ticks, over ${ago(span)}` : "no ticks yet";
  chart.setAttribute("aria-label", words);
  chart.title = words;
  if (!element.hidden) sparkline(chart, latencies);
}
