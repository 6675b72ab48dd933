// One session, or several side by side: what it sees, imagines and does.

import { ago, clock, count, dot, el, milliseconds, percentile, places, sessionLink, text } from "./dom.js";
import { Commands, during } from "./commands.js";
import { picture } from "./draw.js";
import { MAX_BARS, actionCurves, stageBars, stageColour, stagesOf } from "./charts.js";
import { actionNumbers, axisOf, camerasOf, chunkSeconds, rateOf } from "./robot.js";
import { fillState } from "./table.js";

export const MAX_PANELS = 4; // the server tells of no more at a time
const IMAGINED_HZ = 5;
const WINDOW_FULL = "window full"; // of the reasons to begin a window, the one that goes on with the same scene
const NOTHING_YET = "nothing yet: its next tick shows it";

export class Sessions {
  constructor(root, feed, ids) {
    this.feed = feed;
    this.panels = ids.map((id, number) => new Panel(feed, id, ids, number + 1));
    root.append(el("p", {}, el("a", { href: places.all }, "← all sessions"), " ", el("kbd", {}, "Esc")));
    root.append(el("div", { class: "columns" }, this.panels.map(({ element }) => element)));
    for (const panel of this.panels) {
      for (const event of ["pointerdown", "focusin"]) panel.element.addEventListener(event, () => this.focus(panel));
    }
    this.focus(this.panels.find(({ id }) => id === feed.focused) ?? this.panels[0]);
    this.timer = setInterval(() => this.panels.forEach((panel) => panel.play()), 1000 / IMAGINED_HZ);
  }

  // Keys act on this one.
  focus(focused) {
    this.focused = focused;
    this.feed.focused = focused.id;
    for (const panel of this.panels) panel.element.classList.toggle("focused", panel === focused);
  }

  update() {
    this.panels.forEach((panel) => panel.update());
  }

  press(letter) {
    const chosen = /^\d$/.test(letter) ? this.panels[Number(letter) - 1] : null;
    if (chosen) {
      this.focus(chosen);
      return true;
    }
    return this.focused.commands.press(letter);
  }

  leave() {
    clearInterval(this.timer);
  }
}

class Panel {
  constructor(feed, id, ids, number) {
    this.feed = feed;
    this.id = id;
    this.ids = ids;
    this.frame = 0;
    this.commands = new Commands(feed, id, ids);
    this.chip = el("span", { class: "chip" });
    this.facts = el("span", { class: "muted" });
    this.cameras = el("div", { class: "cameras" });
    this.prompt = el("p", { class: "muted" });
    this.imagined = el("canvas", { role: "img", "aria-label": "imagined video", hidden: true });
    this.imaginedNote = el("figcaption", {}, NOTHING_YET);
    this.expected = el("canvas", { role: "img", "aria-label": "what it had expected" });
    this.expectedNote = el("figcaption");
    this.expectedBox = el("figure", { hidden: true }, this.expected, this.expectedNote);
    this.seenNote = el("small");
    this.actionNote = el("small");
    this.curves = el("canvas", { role: "img", "aria-label": "actions of the chunk", hidden: true });
    this.stateNote = el("small");
    this.state = el("dl", { class: "values" });
    this.bars = el("canvas", { role: "img", "aria-label": "time by stage", hidden: true });
    this.barNote = el("small");
    this.stages = el("div", { class: "legend" });
    this.log = el("ul", { class: "plain log" });
    this.tree = el("fieldset", { class: "plain" });
    const several = ids.length > 1;
    const name = several ? [el("kbd", { title: `${number}: keys act on this one` }, String(number)), " ", id] : id;
    this.element = el("article", { class: several ? "session" : "session alone", "data-id": id },
      el("h1", {}, name, several && " ", several && el("span", { class: "keyed" }, "keys act here")),
      el("p", {}, this.chip, " ", this.facts), this.commands.element,
      card("of-robots", "Seen", this.seenNote, this.prompt, this.cameras),
      card("", "Imagined", null, el("figure", {}, this.imagined, this.imaginedNote), this.expectedBox),
      card("all of-robots", "Actions of the newest chunk", this.actionNote, this.curves),
      card("of-robots", "State", this.stateNote, this.state),
      card("", "The last ticks by stage", this.barNote, this.bars, this.stages),
      card("", "Forks and snapshots", null, this.tree),
      card("", "What happened", null, this.log));
  }

  update() {
    const { overview, hello, stale } = this.feed;
    const known = overview?.sessions.find((session) => session.id === this.id);
    const detail = this.feed.details.get(this.id);
    this.commands.update();
    this.element.classList.toggle("gone", Boolean(overview) && !known);
    this.chip.hidden = !known;
    if (known) fillState(this.chip, known, stale);
    text(this.facts, known ? describe(known, hello) : this.whyGone(overview));
    if (overview) this.showTree(overview, Boolean(known), stale);
    if (!detail) return;
    this.showCameras(hello);
    const newest = detail.ticks.at(-1);
    text(this.seenNote, newest ? `tick ${newest.tick}, ${ago(Math.max(0, this.feed.serverNow() - newest.at))} ago` : "no ticks yet");
    const imagined = newest?.imagined ? "Nothing: its last tick was imagined." : "";
    text(this.prompt, detail.prompt ? `“${detail.prompt}”` : imagined || "It is shown from its next tick on.");
    this.showExpected(newest);
    this.showActions(detail, hello);
    text(this.stateNote, detail.state ? "" : "none yet");
    showState(this.state, detail.state, hello);
    this.showStages(detail, hello);
    showLog(this.log, detail.events);
  }

  whyGone(overview) {
    const end = overview?.ended.findLast(({ id }) => id === this.id);
    return !overview ? "" : end ? `This session is not open: ${end.why}, at ${clock(end.at)}.` : "This session is not open.";
  }

  showCameras(hello) {
    const images = this.feed.observed.get(this.id);
    if (!images) return;
    for (const { name, place } of camerasOf(hello)) {
      let figure = this.cameras.querySelector(`[data-name="${CSS.escape(name)}"]`);
      if (!figure) {
        const wide = place.startsWith("top, twice") || place.startsWith("the whole");
        figure = el("figure", { "data-name": name, class: wide ? "first" : "" }, el("canvas", { role: "img", "aria-label": name }), el("figcaption", {}, `${name}, ${place}`));
        this.cameras.append(figure);
      }
      const image = images.get(name);
      if (image) picture(figure.firstChild, image.pixels, image.shape[0], image.shape[1]);
    }
  }

  // To be compared with what is seen: the end of what the tick before had imagined.
  showExpected(newest) {
    const videos = [this.feed.imagined.get(this.id), this.feed.imaginedBefore.get(this.id)];
    const goesOn = newest && !newest.imagined && [undefined, null, WINDOW_FULL].includes(newest.facts.restart_reason);
    const video = goesOn && videos.find((other) => other?.tick === newest.tick - 1);
    this.expectedBox.hidden = !video;
    if (!video) return;
    const [frames, height, width] = video.shape;
    picture(this.expected, video.pixels.subarray((frames - 1) * height * width * 3), height, width);
    text(this.expectedNote, `what tick ${video.tick} had expected to see by now, to be compared with what is seen`);
  }

  showActions(detail, hello) {
    this.curves.hidden = !detail.actions;
    if (!detail.actions) return text(this.actionNote, "none yet");
    const since = this.feed.serverNow() - detail.ticks.at(-1).at;
    const executed = Math.min(detail.actions.length, Math.max(0, Math.floor(since * rateOf(hello))));
    const seconds = detail.actions.length / (rateOf(hello) || 1);
    text(this.actionNote, `over its ${seconds.toFixed(2)} s; bold: executed by now; faint: the chunk before`);
    actionCurves(this.curves, actionNumbers(hello), detail.actions, this.feed.before.get(this.id), executed, seconds);
  }

  showStages({ ticks }, hello) {
    this.bars.hidden = ticks.length === 0;
    stageBars(this.bars, ticks, chunkSeconds(hello));
    const totals = ticks.map(({ timings }) => timings.total);
    const few = ticks.slice(-MAX_BARS);
    const over = few.length > 1 ? ` over ${ago(few.at(-1).at - few[0].at)}` : "";
    const [half, most] = [0.5, 0.99].map((share) => percentile(totals, share));
    const all = totals.length > few.length ? `, of the last ${totals.length}` : "";
    text(this.barNote, totals.length ? `${count(few.length, "tick")}${over}; p50 ${milliseconds(half)}, p99 ${milliseconds(most)}${all}` : "none yet");
    const marks = stagesOf(few).map((stage) => [stageColour(stage), stage]);
    if (few.some(({ facts }) => facts.restart_reason)) marks.push(["var(--ink)", "under a bar: its window restarted"]);
    if (this.stages.dataset.shown === marks.join()) return;
    this.stages.dataset.shown = marks.join();
    this.stages.replaceChildren(...marks.map(([shade, name]) => el("span", {}, dot(shade), name)));
  }

  // Called five times a second: the imagined video in a loop.
  play() {
    const video = this.feed.imagined.get(this.id);
    if (!video) return;
    const [frames, height, width] = video.shape;
    this.imagined.hidden = false;
    this.frame = (this.frame + 1) % frames;
    const size = height * width * 3;
    picture(this.imagined, video.pixels.subarray(this.frame * size, (this.frame + 1) * size), height, width);
    text(this.imaginedNote, `tick ${video.tick}, frame ${this.frame + 1} of ${frames}: what it expects to see next`);
  }

  showTree(overview, open, stale) {
    this.tree.disabled = stale;
    const family = familyOf(this.id, overview.sessions);
    const wanted = JSON.stringify([family, overview.snapshots, open]);
    if (this.tree.dataset.shown === wanted) return;
    this.tree.dataset.shown = wanted;
    this.tree.replaceChildren(el("ul", { class: "plain tree" }, this.branch(family, overview, open)));
  }

  branch(node, overview, open) {
    const snapshots = overview.snapshots.filter(({ session }) => session === node.id);
    const beside = this.ids.includes(node.id) ? null : el("a", { href: sessionLink(...this.ids, node.id) }, " beside this one");
    const name = node.id === this.id ? el("strong", {}, node.id) : el("a", { href: sessionLink(node.id) }, node.id);
    return el("li", {}, name, beside,
      el("ul", {},
        snapshots.map((snapshot) => this.snapshotLine(snapshot, open)),
        node.children.map((child) => this.branch(child, overview, open))));
  }

  snapshotLine(snapshot, open) {
    const { id, session, frames } = snapshot;
    const button = (words, title, run, needsSession) => {
      const made = el("button", { class: "small", title, disabled: needsSession && !open, onclick: () => during(made, run) }, words);
      return made;
    };
    const back = session === this.id ? "go back" : `put ${this.id} here`;
    return el("li", { "data-snapshot": id }, el("span", { class: "muted" }, `snapshot ${id.slice(0, 6)}, ${count(frames, "frame")} `),
      button("fork", "a new session that goes on from this snapshot", () => this.commands.fork(snapshot), true), " ",
      button(back, `${this.id} goes on from this snapshot; asks first`, () => this.commands.restore(snapshot), true), " ",
      button("release", "give its blocks back; asks first", () => this.commands.release(snapshot), false));
  }
}

function card(kind, title, note, ...content) {
  return el("section", { class: `card ${kind}` }, el("h2", {}, title, note), content);
}

function describe(session, hello) {
  const parts = [`${session.frames_seen} of ${hello.window_frames} frames`, count(session.ticks, "tick")];
  const { margin_s: spare, connections } = session;
  if (spare !== null) parts.push(`${spare.toFixed(2)} s to spare of ${chunkSeconds(hello).toFixed(2)}`);
  parts.push(connections ? count(connections, "socket") : "no socket");
  return parts.join(" · ");
}

function showState(box, state, hello) {
  if (!state) return;
  const unitOf = (name) => axisOf(hello, name).unit;
  const wanted = JSON.stringify(state);
  if (box.dataset.shown === wanted) return;
  box.dataset.shown = wanted;
  box.replaceChildren(...Object.entries(state).flatMap(([name, values]) => [
    el("dt", {}, name, unitOf(name) && el("small", {}, unitOf(name))),
    el("dd", {}, values.map((value, number) => el("span", {}, values.length > 1 && el("small", {}, `${number + 1}`), value.toFixed(3)))),
  ]));
}

function showLog(box, events) {
  const wanted = String(events.at(-1)?.at ?? "") + events.length;
  if (box.dataset.shown === wanted) return;
  box.dataset.shown = wanted;
  const lines = events.toReversed().map(({ at, text: words }) => el("li", {}, el("time", {}, clock(at)), words));
  box.replaceChildren(...(lines.length ? lines : [el("li", { class: "muted" }, "nothing worth telling")]));
}

// The session's whole tree of forks, from the oldest one that is still open.
function familyOf(id, sessions) {
  const byId = new Map(sessions.map((session) => [session.id, session]));
  let root = id;
  for (let step = 0; step < 100 && byId.has(byId.get(root)?.parent); step++) root = byId.get(root).parent;
  const seen = new Set(); // a name that was used again may make its own fork its parent
  const grow = (name) => {
    seen.add(name);
    return { id: name, children: sessions.filter((child) => child.parent === name && !seen.has(child.id)).map(({ id: child }) => grow(child)) };
  };
  return grow(root);
}
