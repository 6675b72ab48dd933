// All sessions, the block pool, rows per forward, memory, refusals.

import { ago, bytes, clock, dot, el, milliseconds, sessionLink, text } from "./dom.js";
import { blockMap, colour, memoryBar, series, sessionColour, sparkline } from "./draw.js";

const COLUMNS = ["session", "state", "latency", "", "to spare", "frames", "blocks", "ticks", "sockets", "idle"];

export class Overview {
  constructor(root, told) {
    this.told = told;
    this.rows = new Map();
    this.body = el("tbody");
    this.none = el("p", { class: "empty" }, "No session is open. A robot opens one with its first request; `worldkv demo` brings one.");
    this.count = el("small");
    this.ended = el("ul", { class: "plain log" });
    this.endedBox = el("details", {}, el("summary", { class: "muted" }, "ended"), this.ended);
    this.map = el("canvas", { role: "img", "aria-label": "blocks of the pool" });
    this.mapCount = el("small");
    this.mapLegend = el("div", { class: "legend" });
    this.rate = el("canvas", { role: "img", "aria-label": "rows per forward" });
    this.rateCount = el("small");
    this.memory = el("canvas", { role: "img", "aria-label": "memory by kind" });
    this.memoryLegend = el("div", { class: "legend" });
    this.errors = el("ul", { class: "plain" });
    const head = el("tr", {}, COLUMNS.map((name) => el("th", {}, name)));
    const table = el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), this.body));
    root.append(el("div", { class: "grid" },
      card("wide", "Sessions", this.count, table, this.none, this.endedBox),
      card("eight", "Block pool", this.mapCount, this.map, this.mapLegend),
      card("third", "Rows per forward", this.rateCount, this.rate),
      card("eight", "Memory", el("small"), this.memory, this.memoryLegend),
      card("third", "Refused and failed", el("small"), this.errors)));
  }

  update() {
    const { overview, hello } = this.told;
    if (!overview) return;
    this.updateSessions(overview, hello);
    this.updateBlocks(overview);
    series(this.rate, this.told.rows, "the last two minutes");
    text(this.rateCount, `${overview.in_flight} ticks in flight`);
    this.updateMemory(overview, hello);
    this.updateErrors(overview);
  }

  updateSessions({ sessions, num_other_sessions: others, num_parked: parked, more_sessions: more, ended }, hello) {
    const notes = [`${sessions.length} open`, parked ? `${parked} parked` : "", others ? `${others} of other keys` : "", `${more} more fit`];
    text(this.count, notes.filter(Boolean).join(", "));
    this.none.hidden = sessions.length > 0;
    const present = new Set(sessions.map((session) => session.id));
    for (const [id, row] of this.rows) {
      if (!present.has(id)) {
        row.element.remove();
        this.rows.delete(id);
      }
    }
    sessions.forEach((session, index) => {
      if (!this.rows.has(session.id)) this.rows.set(session.id, makeRow(session.id, this.body));
      fillRow(this.rows.get(session.id), session, index, hello);
    });
    this.endedBox.hidden = ended.length === 0;
    const lines = ended.toReversed().map((end) => `${clock(end.at)}  ${end.id}: ${end.why}, after ${end.ticks} ticks`);
    if (this.ended.dataset.lines !== lines.join()) {
      this.ended.dataset.lines = lines.join();
      this.ended.replaceChildren(...lines.map((words) => el("li", {}, words)));
    }
  }

  updateBlocks({ blocks, memory, sessions }) {
    blockMap(this.map, blocks);
    const shared = blocks.shared.reduce((sum, mark) => sum + mark, 0);
    text(this.mapCount, `${memory.used} of ${blocks.num} used, ${shared} shared, ${memory.charged} promised`);
    const marks = [[colour("grey"), "free"], [colour("orange"), "text and image"], [colour("muted"), "snapshots"]];
    const mine = sessions.slice(0, 8).map(({ id }, index) => [sessionColour(index), id]);
    legend(this.mapLegend, [...marks, ...mine, [colour("ink"), "a dot: shared"]]);
  }

  updateMemory({ memory }, hello) {
    const block = memory.bytes_per_block;
    const promised = Math.max(0, memory.charged - memory.used);
    const parts = [
      { name: "weights", bytes: hello.weight_bytes, colour: colour("muted") },
      { name: "K/V in use", bytes: memory.used * block, colour: colour("blue") },
      { name: "promised to sessions", bytes: promised * block, colour: colour("green") },
      { name: "free blocks", bytes: Math.max(0, memory.total - memory.used - promised) * block, colour: colour("grey") },
      { name: "parked, on the host", bytes: memory.parked_bytes, colour: colour("orange") },
    ];
    memoryBar(this.memory, parts);
    legend(this.memoryLegend, parts.map((part) => [part.colour, `${part.name} ${bytes(part.bytes)}`]));
  }

  updateErrors({ errors }) {
    const lines = Object.entries(errors).map(([code, count]) => `${code.replaceAll("_", " ")}: ${count}`);
    this.errors.replaceChildren(...(lines.length ? lines : ["nothing so far"]).map((words) => el("li", {}, words)));
  }
}

function card(span, title, note, ...content) {
  return el("section", { class: `card ${span}` }, el("h2", {}, title, note), content);
}

function legend(box, marks) {
  const wanted = marks.map(([, name]) => name).join("|");
  if (box.dataset.names === wanted) return;
  box.dataset.names = wanted;
  box.replaceChildren(...marks.map(([shade, name]) => el("span", {}, dot(shade), name)));
}

function makeRow(id, body) {
  const cells = COLUMNS.map((name) => el("td", { class: name === "session" ? "id" : "" }));
  const mark = dot("transparent");
  const link = el("a", { href: sessionLink(id), title: id }, id);
  const chip = el("span", { class: "chip" });
  const line = el("canvas", { "aria-hidden": "true" });
  cells[0].append(mark, link);
  cells[1].append(chip);
  cells[3].append(line);
  const element = el("tr", { "data-id": id }, cells);
  body.append(element);
  return { element, cells, mark, chip, line };
}

function fillRow({ cells, mark, chip, line }, session, index, hello) {
  mark.style.background = sessionColour(index);
  text(chip, session.busy ? "busy" : session.state);
  chip.className = `chip ${session.state}`;
  const last = session.latency_ms.at(-1);
  text(cells[2], last === undefined ? "" : milliseconds(last));
  sparkline(line, session.latency_ms);
  const spare = session.margin_s;
  text(cells[4], spare === null ? "" : `${spare.toFixed(2)} s`);
  cells[4].className = spare !== null && spare < 0 ? "bad" : "";
  text(cells[5], `${session.frames_seen} of ${hello.window_frames}`);
  text(cells[6], session.state === "parked" ? bytes(session.bytes_parked) : session.blocks);
  text(cells[7], session.ticks);
  text(cells[8], session.connections);
  text(cells[9], ago(session.idle_s));
}
