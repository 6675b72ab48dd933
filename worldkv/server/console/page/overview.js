// All sessions, the block pool, rows per forward, memory, failures.

import { bytes, clock, count, dot, el, text } from "./dom.js";
import { blockMap, memoryBar, sessionColour } from "./draw.js";
import { series } from "./charts.js";
import { SessionTable } from "./table.js";

const ROWS_S = 120;
const MAX_MARKS = 8;
// Of errors by their code. Who was asked to come again came again; who asked for something wrong was told so.
const TO_COME_AGAIN = { session_busy: "session busy", admission_refused: "no room" };
const WRONG = [
  "bad_request", "unauthorised", "not_found", "session_not_found", "snapshot_not_found", "session_ended", "message_too_large",
];

export class Overview {
  constructor(root, feed) {
    this.feed = feed;
    this.table = new SessionTable();
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
    this.failed = el("ul", { class: "plain" });
    this.told = el("ul", { class: "plain muted" });
    root.append(el("div", { class: "grid" },
      card("wide", "Sessions", this.count, this.table.element, this.endedBox),
      card("eight", "Block pool", this.mapCount, this.map, this.mapLegend),
      card("third", "Rows per forward", this.rateCount, this.rate),
      card("eight", "Memory", el("small"), this.memory, this.memoryLegend),
      card("third", "Failures", el("small"), this.failed, this.told)));
  }

  press(letter) {
    return this.table.press(letter);
  }

  update() {
    const { overview, hello, stale } = this.feed;
    if (!overview) return;
    this.updateSessions(overview, hello, stale);
    this.updateBlocks(overview);
    series(this.rate, this.feed.rows, ROWS_S, this.feed.serverNow());
    text(this.rateCount, `while this page is open; ${count(overview.in_flight, "tick")} in flight`);
    this.updateMemory(overview, hello);
    this.updateErrors(overview);
  }

  updateSessions({ sessions, num_other_sessions: others, num_parked: parked, more_sessions: more, ended }, hello, stale) {
    const notes = [`${sessions.length} open`, parked ? `${parked} parked` : "", others ? `${others} of other keys` : "", `${more} more fit`];
    text(this.count, notes.filter(Boolean).join(", "));
    this.table.update(sessions, hello, stale);
    this.endedBox.hidden = ended.length === 0;
    const lines = ended.toReversed().map((end) => `${clock(end.at)}  ${end.id}: ${end.why}, after ${count(end.ticks, "tick")}`);
    list(this.ended, lines);
  }

  updateBlocks({ blocks, memory, sessions }) {
    blockMap(this.map, blocks);
    const shared = blocks.shared.reduce((sum, mark) => sum + mark, 0);
    text(this.mapCount, `${memory.used} of ${blocks.num} used, ${shared} shared, ${memory.charged} promised`);
    const others = blocks.owner.includes(3) ? [["var(--others)", "of other keys"]] : [];
    const marks = [["var(--grey)", "free"], ["var(--orange)", "text and image"], ["var(--muted)", "snapshots"], ...others];
    const mine = sessions.slice(0, MAX_MARKS).map(({ id }, index) => [sessionColour(index), id]);
    const more = sessions.length > MAX_MARKS ? [["transparent", `and ${sessions.length - MAX_MARKS} more, as marked above`]] : [];
    legend(this.mapLegend, [...marks, ...mine, ...more, ["var(--ink)", "a dot: shared"]]);
  }

  updateMemory({ memory }, hello) {
    const block = memory.bytes_per_block;
    const promised = Math.max(0, memory.charged - memory.used);
    const parts = [
      { name: "weights", bytes: hello.weight_bytes, colour: "muted" },
      { name: "K/V in use", bytes: memory.used * block, colour: "blue" },
      { name: "promised to sessions", bytes: promised * block, colour: "green" },
      { name: "free blocks", bytes: Math.max(0, memory.total - memory.used - promised) * block, colour: "grey" },
      { name: "parked, on the host", bytes: memory.parked_bytes, colour: "orange" },
    ];
    memoryBar(this.memory, parts);
    legend(this.memoryLegend, parts.map((part) => [`var(--${part.colour})`, `${part.name} ${bytes(part.bytes)}`]));
  }

  updateErrors({ errors }) {
    const codes = Object.keys(errors).filter((code) => errors[code]);
    const failed = codes.filter((code) => !(code in TO_COME_AGAIN) && !WRONG.includes(code));
    const wrong = codes.filter((code) => WRONG.includes(code));
    const again = codes.filter((code) => code in TO_COME_AGAIN);
    const words = (code) => `${TO_COME_AGAIN[code] ?? code.replaceAll("_", " ")}: ${errors[code]}`;
    list(this.failed, failed.length ? failed.map(words) : ["nothing has failed"]);
    list(this.told, [
      ...(wrong.length ? [`told what was wrong with a request: ${wrong.map(words).join(", ")}`] : []),
      ...(again.length ? [`asked to come again: ${again.map(words).join(", ")}`] : []),
    ]);
  }
}

function card(span, title, note, ...content) {
  return el("section", { class: `card ${span}` }, el("h2", {}, title, note), content);
}

function list(box, lines) {
  const wanted = lines.join("\n");
  if (box.dataset.shown === wanted) return;
  box.dataset.shown = wanted;
  box.replaceChildren(...lines.map((words) => el("li", {}, words)));
}

function legend(box, marks) {
  const wanted = marks.flat().join("|");
  if (box.dataset.shown === wanted) return;
  box.dataset.shown = wanted;
  box.replaceChildren(...marks.map(([shade, name]) => el("span", {}, dot(shade), name)));
}
