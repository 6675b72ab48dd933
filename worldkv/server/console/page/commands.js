// What can be done to a session, by button or key. What loses something, or meddles with a robot, is asked about first.

import { ask, call, el, fetchFile, places, save, sessionLink, sessionPath, toast } from "./dom.js";

// One button each; of two with the same letter only one is displayed.
export const COMMANDS = [
  { letter: "f", name: "Fork", hint: "fork: a second session that goes on from here", run: (session) => session.fork() },
  { letter: "s", name: "Snapshot", hint: "snapshot: freeze it as it is now", run: (session) => session.snapshot() },
  { letter: "i", name: "Imagine", hint: "imagine: a tick without a robot", run: (session) => session.imagine() },
  { letter: "p", name: "Park", hint: "park: to host memory until its next tick; or resume it", run: (session) => session.park(), shown: ({ state }) => state !== "parked" },
  { letter: "p", name: "Resume", run: (session) => session.resume(), shown: ({ state }) => state === "parked" },
  { letter: "d", name: "Recording", hint: "download what is recorded of it", run: (session) => session.download(), shown: (_, hello) => hello.records },
  { letter: "r", name: "Reset", hint: "reset: forget all frames", run: (session) => session.reset(), danger: true },
  { letter: "c", name: "Close", hint: "close: end the session", run: (session) => session.close(), danger: true },
];

export class Commands {
  // `neighbours`: the sessions that are shown beside this one, it included.
  constructor(feed, id, neighbours) {
    this.feed = feed;
    this.id = id;
    this.neighbours = neighbours;
    this.path = sessionPath(id);
    this.buttons = COMMANDS.map((command) => ({ command, button: this.makeButton(command) }));
    this.element = el("fieldset", { class: "toolbar", "aria-label": `what can be done to ${id}` }, this.buttons.map(({ button }) => button));
  }

  get session() {
    return this.feed.overview?.sessions.find(({ id }) => id === this.id);
  }

  makeButton({ letter, name, hint, run, danger }) {
    const title = `${letter}: ${hint ?? name.toLowerCase()}`;
    const button = el("button", { title, class: danger ? "danger" : "", onclick: () => during(button, () => run(this)) }, name);
    return button;
  }

  update() {
    const { session } = this;
    this.element.disabled = !session || this.feed.stale;
    for (const { command, button } of this.buttons) {
      button.hidden = !(command.shown?.(session ?? {}, this.feed.hello) ?? true);
    }
  }

  press(letter) {
    const pressed = this.buttons.find(({ command, button }) => command.letter === letter && !button.hidden);
    pressed?.button.click(); // one that is disabled does nothing
    return Boolean(pressed);
  }

  async act(method, path, body, done) {
    try {
      const answer = await call(method, path, body);
      toast(`${this.id}: ${done}`);
      return answer;
    } catch (error) {
      toast(`${this.id}: ${error.message}`);
      return null;
    }
  }

  // The question, with a warning first where a robot is connected.
  sure(question, yes, connected = this.session?.connections) {
    return ask(`${question}${connected ? ` A ${clientOf(this.feed.hello)} is connected to ${this.id}.` : ""}`, yes);
  }

  snapshot() {
    return this.act("POST", `${this.path}/snapshot`, {}, "frozen as a snapshot");
  }

  park() {
    return this.act("POST", `${this.path}/park`, undefined, "parked");
  }

  resume() {
    return this.act("POST", `${this.path}/resume`, undefined, "back from the host");
  }

  async reset() {
    if (!(await this.sure(`Reset ${this.id}? Its history is forgotten; its next tick begins a new window.`, "Reset it"))) return;
    await this.act("POST", `${this.path}/reset`, undefined, "was reset");
  }

  async close() {
    if (!(await this.sure(`Close ${this.id}? Its history is gone, and who asks for it is told once.`, "Close it"))) return;
    if (!(await this.act("DELETE", this.path, undefined, "closed"))) return;
    const others = this.neighbours.filter((id) => id !== this.id);
    location.hash = others.length ? sessionLink(...others) : places.all;
  }

  async imagine() {
    const warning = `Imagine a tick of ${this.id}? It becomes part of its history; fork it first to leave the robot alone.`;
    if (this.session?.connections && !(await this.sure(warning, "Imagine here"))) return;
    const seed = Math.floor(Math.random() * 2 ** 31);
    await this.act("POST", `${this.path}/imagine`, { noise_seed: seed }, `imagined with seed ${seed}`);
  }

  async download() {
    try {
      const { blob, name } = await fetchFile(`${this.path}/recording`);
      save(blob, name);
      toast(`${name}: for worldkv replay --recording`);
    } catch (error) {
      toast(`${this.id}: ${error.message}`);
    }
  }

  // Of the session as it is, or of a snapshot, which may be another session's: then the fork is that one's.
  async fork(snapshot) {
    const sessions = this.feed.overview.sessions;
    const taken = new Set(sessions.map(({ id }) => id));
    const parent = taken.has(snapshot?.session) ? snapshot.session : this.id;
    let number = 1;
    while (taken.has(`${parent}-fork${number}`)) number++;
    const body = { session_id: `${parent}-fork${number}`, ...(snapshot ? { snapshot_id: snapshot.id } : {}) };
    if (!(await this.act("POST", `${sessionPath(parent)}/fork`, body, `forked to ${body.session_id}`))) return;
    this.feed.focused = body.session_id;
    location.hash = sessionLink(this.id, body.session_id);
  }

  // The session that is looked at goes to the snapshot, whosever that is.
  async restore({ id, session, frames }) {
    const whose = session === this.id ? "its" : `${session}'s`;
    const question = `Put ${this.id} back to ${whose} snapshot ${id.slice(0, 6)} (${frames} frames)? What ${this.id} has seen since is forgotten.`;
    if (!(await this.sure(question, `Put ${this.id} back`))) return;
    await this.act("POST", `${this.path}/restore`, { snapshot_id: id }, `went back to ${whose} snapshot`);
  }

  async release({ id, session }) {
    const question = `Release snapshot ${id.slice(0, 6)} of ${session}? It cannot be gone back to afterwards.`;
    if (await ask(question, "Release it")) await this.act("DELETE", `snapshots/${id}`, undefined, "snapshot released");
  }
}

// Who is at the other end of a session.
const clientOf = ({ app }) => (app === "videos" ? "viewer" : "robot");

// A second click does not do it twice.
export async function during(button, run) {
  button.disabled = true;
  try {
    await run();
  } finally {
    button.disabled = false;
  }
}
