// One session, or several side by side: what it sees, imagines and does.

import { ask, call, clock, dot, el, fetchFile, sessionLink, sessionPath, text, toast } from "./dom.js";
import { STAGES, actionCurves, picture, stageBars, stageColour } from "./draw.js";

const IMAGINED_HZ = 5;

export class Sessions {
  constructor(root, told, ids) {
    this.told = told;
    this.ids = ids;
    this.panels = ids.map((id) => new Panel(told, id));
    if (ids.length === 1) this.panels[0].element.classList.add("alone");
    root.append(el("p", {}, el("a", { href: "#/" }, "← all sessions"), el("span", { class: "muted" }, "  Esc")));
    root.append(el("div", { class: "columns" }, this.panels.map((panel) => panel.element)));
    this.timer = setInterval(() => this.panels.forEach((panel) => panel.play()), 1000 / IMAGINED_HZ);
  }

  update() {
    this.panels.forEach((panel) => panel.update(this.ids));
  }

  press(letter) {
    if (this.panels.length === 1) this.panels[0].press(letter);
  }

  leave() {
    clearInterval(this.timer);
  }
}

class Panel {
  constructor(told, id) {
    this.told = told;
    this.id = id;
    this.frame = 0;
    this.chips = el("p", { class: "muted" });
    this.buttons = this.makeButtons();
    this.cameras = el("div", { class: "cameras" });
    this.prompt = el("p", { class: "muted" });
    this.imagined = el("canvas", { role: "img", "aria-label": "imagined video" });
    this.imaginedNote = el("figcaption");
    this.curves = el("canvas", { role: "img", "aria-label": "actions of the chunk" });
    this.state = el("dl", { class: "values" });
    this.bars = el("canvas", { role: "img", "aria-label": "time by stage" });
    this.log = el("ul", { class: "plain log" });
    this.tree = el("div");
    const stages = el("div", { class: "legend" }, STAGES.map((stage) => el("span", {}, dot(stageColour(stage)), stage)));
    this.element = el("article", { class: "session", "data-id": id },
      el("h1", {}, id), this.chips, el("div", { class: "toolbar" }, Object.values(this.buttons)),
      card("Seen", this.prompt, this.cameras),
      card("Imagined", el("figure", {}, this.imagined, this.imaginedNote)),
      card("Actions of the newest chunk", el("p", { class: "muted" }, "bold: executed by now; faint: the chunk before"), this.curves),
      card("State", this.state),
      card("The last ticks by stage", this.bars, stages),
      card("Forks and snapshots", this.tree),
      card("What happened", this.log));
  }

  makeButtons() {
    const path = sessionPath(this.id);
    const make = (name, hint, run, kind = "") => el("button", { class: kind, title: hint, onclick: run }, name);
    return {
      f: make("Fork", "f: a second session that goes on from here", () => this.fork()),
      s: make("Snapshot", "s: freeze it as it is now", () => this.act("POST", `${path}/snapshot`, {}, "frozen as a snapshot")),
      i: make("Imagine", "i: a tick without a robot", () => this.imagine()),
      p: make("Park", "p: to host memory until its next tick", () => this.act("POST", `${path}/park`, undefined, "parked")),
      d: make("Recording", "d: download what is recorded of it", () => this.download()),
      r: make("Reset", "r: forget all frames", () => this.sure("reset", "Its history is forgotten; the robot's next tick begins a new window."), "danger"),
      c: make("Close", "c: end the session", () => this.sure("close", "Its robot is told once, and its history is gone."), "danger"),
    };
  }

  press(letter) {
    const button = this.buttons[letter];
    if (button && !button.disabled) button.click();
  }

  async act(method, path, body, done) {
    try {
      const answer = await call(method, path, body);
      toast(`${this.id}: ${done}`);
      return answer;
    } catch (error) {
      toast(error.message);
      return null;
    }
  }

  async sure(what, consequence) {
    if (!(await ask(`${what === "close" ? "Close" : "Reset"} ${this.id}? ${consequence}`, what === "close" ? "Close it" : "Reset it"))) return;
    const closing = what === "close";
    const answer = await this.act(closing ? "DELETE" : "POST", sessionPath(this.id) + (closing ? "" : "/reset"), undefined, closing ? "closed" : "was reset");
    if (closing && answer) location.hash = "#/";
  }

  async download() {
    try {
      const { blob, name } = await fetchFile(`${sessionPath(this.id)}/recording`);
      const link = el("a", { href: URL.createObjectURL(blob), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      toast(`${name}: for worldkv replay --recording`);
    } catch (error) {
      toast(error.message);
    }
  }

  async fork(snapshot) {
    const taken = new Set(this.told.overview.sessions.map((session) => session.id));
    let number = 1;
    while (taken.has(`${this.id}-fork${number}`)) number++;
    const body = { session_id: `${this.id}-fork${number}`, ...(snapshot ? { snapshot_id: snapshot } : {}) };
    if (await this.act("POST", `${sessionPath(this.id)}/fork`, body, `forked to ${body.session_id}`)) {
      location.hash = sessionLink(this.id, body.session_id);
    }
  }

  async imagine() {
    const known = this.told.overview.sessions.find((session) => session.id === this.id);
    const warning = `${this.id} has a robot: what it imagines becomes part of its history. Fork it first to leave the robot alone.`;
    if (known?.connections && !(await ask(warning, "Imagine here"))) return;
    const seed = Math.floor(Math.random() * 2 ** 31);
    await this.act("POST", `${sessionPath(this.id)}/imagine`, { noise_seed: seed }, `imagined with seed ${seed}`);
  }

  update(ids) {
    const { overview, hello } = this.told;
    const known = overview?.sessions.find((session) => session.id === this.id);
    const detail = this.told.details.get(this.id);
    for (const button of Object.values(this.buttons)) button.disabled = !known;
    this.buttons.d.hidden = !hello.records;
    text(this.chips, known ? describe(known, hello) : overview ? "This session is not open." : "");
    this.showCameras(hello);
    if (!detail) return;
    const imagined = detail.ticks.at(-1)?.imagined ? "Nothing: its last tick was imagined." : "";
    text(this.prompt, detail.prompt ? `“${detail.prompt}”` : imagined || "It is shown from its next tick on.");
    this.showActions(detail, hello);
    showState(this.state, detail.state);
    stageBars(this.bars, detail.ticks, hello.about.chunk_s);
    showLog(this.log, detail.events);
    this.showTree(ids, overview);
  }

  showCameras(hello) {
    const images = this.told.observed.get(this.id);
    if (!images) return;
    for (const { name, place } of hello.about.cameras) {
      let figure = this.cameras.querySelector(`[data-name="${name}"]`);
      if (!figure) {
        const wide = place.startsWith("top, twice") || place.startsWith("the whole");
        figure = el("figure", { "data-name": name, class: wide ? "first" : "" }, el("canvas", { role: "img", "aria-label": name }), el("figcaption", {}, `${name}, ${place}`));
        this.cameras.append(figure);
      }
      const image = images.get(name);
      if (image) picture(figure.firstChild, image.pixels, image.shape[0], image.shape[1]);
    }
  }

  showActions(detail, hello) {
    if (!detail.actions) return;
    const names = hello.about.actions.flatMap(({ key, dim }) => Array.from({ length: dim }, (_, n) => (dim > 1 ? `${key} ${n + 1}` : key)));
    const since = Date.now() / 1000 - detail.ticks.at(-1).at;
    const executed = Math.min(detail.actions.length - 1, Math.max(0, Math.floor(since * hello.about.rate_hz)));
    actionCurves(this.curves, names, detail.actions, this.told.before.get(this.id), executed);
  }

  // Called five times a second: the imagined video in a loop.
  play() {
    const video = this.told.imagined.get(this.id);
    if (!video) return;
    const [count, height, width] = video.shape;
    this.frame = (this.frame + 1) % count;
    const size = height * width * 3;
    picture(this.imagined, video.pixels.subarray(this.frame * size, (this.frame + 1) * size), height, width);
    text(this.imaginedNote, `tick ${video.tick}, frame ${this.frame + 1} of ${count}: what it expects to see next`);
  }

  showTree(ids, overview) {
    const family = familyOf(this.id, overview.sessions);
    const wanted = JSON.stringify([family, overview.snapshots, ids]);
    if (this.tree.dataset.shown === wanted) return;
    this.tree.dataset.shown = wanted;
    this.tree.replaceChildren(el("ul", { class: "plain tree" }, this.branch(family, ids, overview)));
  }

  branch(node, ids, overview) {
    const snapshots = overview.snapshots.filter(({ session }) => session === node.id);
    const beside = ids.includes(node.id) ? null : el("a", { href: sessionLink(...ids, node.id) }, " beside this one");
    const name = node.id === this.id ? el("strong", {}, node.id) : el("a", { href: sessionLink(node.id) }, node.id);
    return el("li", {}, name, beside,
      el("ul", {},
        snapshots.map((snapshot) => this.snapshotLine(snapshot)),
        node.children.map((child) => this.branch(child, ids, overview))));
  }

  snapshotLine({ id, frames }) {
    const restore = async () => {
      const lost = `Go back to this snapshot? What ${this.id} has seen since is forgotten.`;
      if (await ask(lost, "Go back")) await this.act("POST", `${sessionPath(this.id)}/restore`, { snapshot_id: id }, "went back");
    };
    const release = async () => {
      if (await ask("Release this snapshot? It cannot be gone back to afterwards.", "Release it")) {
        await this.act("DELETE", `snapshots/${id}`, undefined, "snapshot released");
      }
    };
    const button = (words, run) => el("button", { class: "small", onclick: run }, words);
    return el("li", {}, el("span", { class: "muted" }, `snapshot ${id.slice(0, 6)}, ${frames} frames `),
      button("fork", () => this.fork(id)), " ", button("restore", restore), " ", button("release", release));
  }
}

function card(title, ...content) {
  return el("section", { class: title.startsWith("Actions") ? "card all" : "card" }, el("h2", {}, title), content);
}

function describe(session, hello) {
  const parts = [session.busy ? "busy" : session.state, `${session.frames_seen} of ${hello.window_frames} frames`, count(session.ticks, "tick")];
  if (session.margin_s !== null) parts.push(`${session.margin_s.toFixed(2)} s to spare of ${hello.about.chunk_s.toFixed(2)}`);
  parts.push(session.connections ? count(session.connections, "socket") : "no socket");
  return parts.join(" · ");
}

const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

function showState(box, state) {
  if (!state) return;
  box.replaceChildren(...Object.entries(state).flatMap(([name, values]) => [
    el("dt", {}, name), el("dd", {}, values.map((value) => value.toFixed(3)).join("  ")),
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
  const grow = (name) => ({ id: name, children: sessions.filter(({ parent }) => parent === name).map((child) => grow(child.id)) });
  return grow(root);
}
