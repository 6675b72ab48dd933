// The socket that comes back by itself, what it told last, and how old that is.

import { ago, clock, key, text } from "./dom.js";

const SILENT_AFTER_S = 4; // overviews come twice a second
const RECONNECT_AFTER_S = 20; // a network that is gone closes no socket
const ROWS_S = 120;

const now = () => performance.now() / 1000;

export class Feed {
  // `hello`, `changed`: called when a server has greeted, and when there is something to show.
  constructor({ hello, changed }) {
    this.onhello = hello;
    this.onchanged = changed;
    this.hello = null;
    this.overview = null;
    this.details = new Map(); // of watched sessions, by id, as are the next four
    this.before = new Map();
    this.observed = new Map();
    this.imagined = new Map();
    this.imaginedBefore = new Map(); // the one before that
    this.kept = [this.details, this.before, this.observed, this.imagined, this.imaginedBefore];
    this.rows = []; // {at, value}: rows per forward
    this.stale = false; // what is shown is not what is
    this.heardAt = null; // of the last overview, this computer's clock
    this.greetedAt = null;
    this.trouble = ""; // why nothing is heard
    this.refusal = null; // why, if the server said so before it closed
    this.wanted = [];
    this.backoff = 500;
    setInterval(() => this.look(), 500);
    this.connect();
  }

  connect() {
    const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/console`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => socket.send(JSON.stringify({ key: key.get() }));
    socket.onmessage = ({ data }) => (typeof data === "string" ? this.hear(JSON.parse(data)) : this.see(data));
    socket.onclose = () => this.socket === socket && this.lost("The server does not answer.");
    this.socket = socket;
    this.greetedAt = null;
  }

  watch(ids) {
    this.wanted = ids;
    if (this.socket?.readyState === WebSocket.OPEN && this.greetedAt !== null) this.socket.send(JSON.stringify({ watch: ids }));
  }

  // The server's own clock, in seconds since 1970: this computer's may be wrong.
  serverNow() {
    return this.overview.now + (this.stale ? 0 : now() - this.heardAt);
  }

  lost(trouble) {
    const socket = this.socket;
    this.socket = this.greetedAt = null;
    socket.onmessage = socket.onopen = null;
    socket.close();
    if (document.getElementById("login").open) return;
    this.trouble = this.refusal ? `The server refuses this page: ${this.refusal}.` : trouble;
    this.refusal = null;
    this.look();
    setTimeout(() => this.connect(), this.backoff);
    this.backoff = Math.min(2 * this.backoff, 5000);
  }

  // Twice a second, and whenever something has changed: is what is shown still true?
  look() {
    const silentFor = this.heardAt === null ? 0 : now() - this.heardAt;
    const connected = this.greetedAt !== null;
    const heard = connected && this.heardAt !== null && this.heardAt >= this.greetedAt;
    const silent = heard ? silentFor > SILENT_AFTER_S : connected && now() - this.greetedAt > SILENT_AFTER_S;
    if (heard && silentFor > RECONNECT_AFTER_S) {
      this.lost("The server says nothing.");
      return;
    }
    if (heard && !silent) this.trouble = "";
    if (connected && silent) this.trouble = heard ? "The server says nothing." : "The server is warming up.";
    const wasStale = this.stale;
    this.stale = Boolean(this.trouble) && this.overview !== null;
    if (heard && !silent) this.show("live", "live", silentFor);
    else if (this.stale) this.show("away", `${ago(silentFor)} old`, silentFor);
    else if (connected) this.show("waiting", silent ? "warming up" : "connecting", silentFor);
    else this.show(this.trouble ? "away" : "waiting", this.trouble ? "away" : "connecting", silentFor);
    if (wasStale !== this.stale) this.onchanged();
  }

  show(state, words, silentFor) {
    const { trouble } = this;
    const status = document.getElementById("status");
    status.dataset.state = state;
    text(status, words);
    document.body.dataset.feed = this.stale ? "stale" : state;
    document.getElementById("banner").hidden = !trouble;
    text(document.getElementById("trouble"), trouble);
    const age = this.stale ? `What you see is ${ago(silentFor)} old, of ${clock(this.overview.now)}. ` : "";
    text(document.getElementById("age"), trouble ? `${age}The page goes on by itself once the server does.` : "");
  }

  hear(message) {
    if (message.type === "refused") {
      const ofPage = message.code !== "unauthorised" || /^(origin|host)\b/i.test(message.why);
      if (ofPage) this.refusal = message.why;
      else this.login(message.why);
    } else if (message.type === "hello") {
      this.greet(message);
    } else if (message.type === "overview") {
      this.survey(message);
    } else if (message.type === "detail") {
      const old = this.details.get(message.id);
      if (old?.actions && old.tick !== message.tick) this.before.set(message.id, old.actions);
      this.details.set(message.id, message);
      this.onchanged();
    }
  }

  greet(message) {
    this.hello = message;
    this.greetedAt = now();
    this.backoff = 500;
    for (const kept of this.kept) kept.clear();
    this.counts = null;
    this.onhello();
    this.watch(this.wanted);
    this.look();
  }

  survey(message) {
    for (const [name, value] of Object.entries(message.blocks)) {
      if (name !== "num") message.blocks[name] = Uint8Array.from(atob(value), (letter) => letter.charCodeAt(0));
    }
    const open = new Set(message.sessions.map(({ id }) => id));
    for (const kept of this.kept) {
      for (const id of kept.keys()) if (!open.has(id)) kept.delete(id);
    }
    this.overview = message;
    this.heardAt = now();
    this.countRows(message);
    this.look();
    this.onchanged();
  }

  // Rows per forward since the overview before; null where nothing ran.
  countRows({ forwards, rows, now: at }) {
    const ran = this.counts ? forwards - this.counts.forwards : -1;
    if (ran >= 0) this.rows.push({ at, value: ran ? (rows - this.counts.rows) / ran : null });
    while (this.rows.length && this.rows[0].at < at - ROWS_S) this.rows.shift();
    this.counts = { forwards, rows };
  }

  // Binary: header length, header, pixels.
  see(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    let at = 4 + length;
    const take = (shape) => {
      const size = shape.reduce((product, side) => product * side, 1);
      at += size;
      return new Uint8Array(buffer, at - size, size);
    };
    if (header.type === "observed") {
      const images = new Map(header.images.map(({ name, shape }) => [name, { shape, pixels: take(shape) }]));
      this.observed.set(header.id, images);
    } else {
      const old = this.imagined.get(header.id);
      if (old && old.tick !== header.tick) this.imaginedBefore.set(header.id, old);
      this.imagined.set(header.id, { tick: header.tick, shape: header.shape, pixels: take(header.shape) });
    }
    this.onchanged();
  }

  login(why) {
    const dialog = document.getElementById("login");
    const refusal = document.getElementById("refusal");
    const input = document.getElementById("key");
    refusal.hidden = !key.get();
    text(refusal, `That key is not one of this server's. ${why}`);
    input.value = "";
    if (!dialog.open) dialog.showModal();
    dialog.addEventListener("close", () => {
      key.set(input.value);
      this.connect();
    }, { once: true });
  }
}
