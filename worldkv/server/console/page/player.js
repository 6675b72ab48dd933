// The panel of one world: its canvas, its words, its marks, its future.

import { ask, call, count, el, fetchFile, save, sessionLink, sessionPath, text, toast } from "./dom.js";
import { during } from "./commands.js";
import { World } from "./world.js";

const STATES = {
  opening: "opening", playing: "playing", paused: "paused", lost: "not connected", ended: "ended", waiting: "waiting for pictures",
};

export class Player {
  // `studio`: forks go there. `label`: which of several futures this is.
  constructor(studio, label, start) {
    this.studio = studio;
    this.label = label;
    this.began = start;
    this.marks = [];
    this.pending = []; // words that were sent and are not in force yet: {id, prompt}
    this.ids = 0;
    this.build();
    this.world = new World(this.canvas, (message) => this.hear(message));
    this.world.open(start);
    this.update();
  }

  get id() {
    return this.world.id ?? this.began.session_id;
  }

  build() {
    this.canvas = el("canvas", { class: "video", role: "img", "aria-label": "video" });
    this.title = el("h2", {}, this.label);
    this.chip = el("span", { class: "chip" });
    this.facts = el("p", { class: "muted numbers" });
    this.prompt = el("p", { class: "words" });
    this.problem = el("p", { class: "bad", role: "alert", hidden: true });
    this.buttons = new Map([
      this.button("play", "Play", "space", () => this.playOrPause(), "primary"),
      this.button("mark", "Mark", "m: remember this moment", () => this.mark()),
      this.button("two", "Two futures", "f: fork at this moment, twice", () => this.fork(2)),
      this.button("four", "Four futures", "g: fork at this moment, four times", () => this.fork(4)),
      this.button("download", "Download", "d: what was shown, as mp4", () => this.download()),
      this.button("close", "Close", "x: end this world", () => this.close(), "danger"),
    ]);
    this.words = el("input", { type: "text", placeholder: "other words, from the next block on", "aria-label": "other words", maxlength: "20000" });
    this.mode = el("select", { "aria-label": "what becomes of its past", title: "what becomes of its past under other words" },
      this.studio.switches.map((name) => el("option", { value: name }, MODES[name] ?? name)));
    this.change = el("button", {}, "Change");
    this.form = el("form", { class: "change", onsubmit: (event) => this.submit(event) }, this.words, this.mode, this.change);
    this.list = el("ul", { class: "plain marks" });
    this.link = el("a", { class: "muted", title: "its ticks, forks and snapshots" }, "its session");
    this.element = el("article", { class: "card player", tabindex: "-1" },
      el("div", { class: "head" }, this.title, this.chip, this.link), this.canvas, this.prompt, this.facts, this.problem,
      el("fieldset", { class: "toolbar" }, [...this.buttons.values()]), this.form, this.list);
    for (const event of ["pointerdown", "focusin"]) this.element.addEventListener(event, () => this.studio.focus(this));
  }

  button(name, words, title, run, kind = "") {
    const made = el("button", { title, class: kind, onclick: () => during(made, run) }, words);
    return [name, made];
  }

  hear(message) {
    const { type } = message ?? {};
    if (type === "started") this.element.dataset.id = message.session_id;
    if (type === "block") this.pending = this.pending.filter(({ id }) => !message.applied.includes(id));
    if (type === "marked") this.marks.push(message);
    if (type === "sought") toast(`back at ${nameOf(message)}; the film goes on`);
    if (type === "forked") this.studio.show(message, this);
    if (type === "error") this.pending = this.pending.filter(({ id }) => id !== message.id);
    if (type === "error") this.trouble(message.message);
    if (type === "stopped") this.trouble(`It is not shown here any more: ${message.why}.`);
    if (["started", "playing", "marked", "forked", "sought"].includes(type)) this.trouble(""); // what was asked for after it went well
    if (type === "marked") this.showMarks();
    this.update();
  }

  trouble(words) {
    this.problem.hidden = !words;
    text(this.problem, words);
  }

  get state() {
    const { world } = this;
    const dry = world.state === "playing" && !world.queue.length && !world.nextAt;
    return dry ? "waiting" : world.state;
  }

  update() {
    const { world, state } = this;
    const live = ["playing", "waiting", "paused"].includes(state);
    text(this.chip, STATES[state]);
    this.chip.className = `chip ${state === "playing" ? "live" : state === "ended" || state === "lost" ? "warn" : ""}`;
    text(this.buttons.get("play"), state === "playing" || state === "waiting" ? "Pause" : state === "lost" ? "Connect" : "Play");
    this.buttons.get("play").disabled = ["ended", "opening"].includes(state);
    for (const name of ["mark", "two", "four"]) this.buttons.get(name).disabled = !live || !world.header;
    this.buttons.get("download").disabled = state === "ended" || !world.header;
    this.change.disabled = !live;
    this.link.hidden = !this.id;
    if (this.id) this.link.href = sessionLink(this.id);
    this.title.title = this.id ?? "";
    const pending = this.pending.at(-1);
    const inForce = world.header?.prompt ?? this.began.prompt ?? "";
    text(this.prompt, inForce ? `“${inForce}”` : "");
    if (pending) this.prompt.append(el("span", { class: "muted" }, ` next: “${pending.prompt}”`));
    text(this.facts, describe(world));
    if (state === "lost" && this.problem.hidden) this.trouble("The server does not answer; Connect goes on with this world where it is.");
  }

  playOrPause() {
    const { world } = this;
    if (world.state === "lost") world.open({ session_id: this.id });
    else world.say({ type: world.state === "playing" ? "pause" : "play" });
    this.update();
  }

  pause() {
    if (this.world.state === "playing") this.world.say({ type: "pause" });
  }

  submit(event) {
    event.preventDefault();
    const prompt = this.words.value.trim();
    if (!prompt) return;
    const id = ++this.ids;
    if (!this.world.say({ type: "prompt", prompt, switch: this.mode.value, id })) return;
    this.pending.push({ id, prompt });
    this.words.value = "";
    this.update();
  }

  mark() {
    const { header } = this.world;
    this.world.say({ type: "mark", name: (header?.prompt ?? "").slice(0, 40) });
  }

  fork(times) {
    this.world.say({ type: "fork", count: times });
  }

  showMarks() {
    this.list.replaceChildren(...this.marks.map((mark) => {
      const back = el("button", { class: "small", onclick: () => this.goBack(mark) }, "go back");
      return el("li", { "data-mark": mark.mark }, back, " ", nameOf(mark));
    }));
  }

  goBack({ mark }) {
    this.world.say({ type: "seek", mark });
    if (this.world.state === "paused") this.world.say({ type: "play" });
  }

  async download() {
    try {
      const { blob, name, headers } = await fetchFile(`videos/${encodeURIComponent(this.id)}.mp4`);
      save(blob, name);
      const dropped = headers.get("x-worldkv-beginning-dropped") === "yes";
      toast(`${name}: ${count(Number(headers.get("x-worldkv-frames")), "frame")}${dropped ? "; its beginning was too long ago to be kept" : ""}`);
    } catch (error) {
      this.trouble(error.message);
    }
  }

  async close() {
    const { world } = this;
    if (world.state !== "ended" && !(await ask(`Close ${this.label}? The world is gone, and its film with it.`, "Close it"))) return;
    world.close();
    if (this.id && world.state !== "ended") await call("DELETE", sessionPath(this.id)).catch((error) => toast(error.message));
    this.studio.remove(this);
  }
}

const MODES = { recache: "its past is seen anew", keep: "its past stays as it is", blend: "words blend over", "embed-blend": "words blend over" };
const nameOf = ({ name, block }) => `block ${block}${name ? `, “${name}”` : ""}`;

function describe(world) {
  const { header, frame } = world;
  if (!header) return "";
  const at = header.first_frame + frame;
  const { fps } = world;
  const parts = [`block ${header.block}`, `frame ${at}`, ...(fps ? [`${fps.toFixed(1)} fps`] : [])];
  parts.push(world.late ? `${world.late} of ${world.blocks} blocks late, by ${Math.round(world.worst)} ms at most` : "no block late");
  if (world.waits) parts.push(`waited ${count(world.waits, "time")}`);
  if (header.frames_skipped) parts.push(`${count(header.frames_skipped, "frame")} not seen`);
  parts.push(`made in ${Math.round(header.timings.total)} ms`);
  return parts.join(" · ");
}

