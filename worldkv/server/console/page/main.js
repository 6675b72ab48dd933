// The page: a socket that comes back, what it told last, and which view shows it.

import { el, key, text } from "./dom.js";
import { Overview } from "./overview.js";
import { Sessions } from "./session.js";

const told = { hello: null, overview: null, details: new Map(), before: new Map(), observed: new Map(), imagined: new Map(), rows: [] };
const statusBox = document.getElementById("status");
const banner = document.getElementById("banner");
let socket = null;
let view = null;
let backoff = 500;
let lastCounts = null;
let refused = null; // why, if the server said so before it closed

function setStatus(state, words) {
  statusBox.dataset.state = state;
  text(statusBox, words);
}

function connect() {
  socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/console`);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => socket.send(JSON.stringify({ key: key.get() }));
  socket.onmessage = ({ data }) => (typeof data === "string" ? hear(JSON.parse(data)) : see(data));
  socket.onclose = lost;
}

function lost() {
  socket = null;
  if (document.getElementById("login").open) return;
  setStatus("away", "away");
  const trouble = refused ? `The server refuses this page: ${refused}.` : "The server does not answer. What you see is old;";
  text(banner, `${trouble} the page tries again by itself.`);
  refused = null;
  banner.hidden = false;
  setTimeout(connect, backoff);
  backoff = Math.min(2 * backoff, 5000);
}

function hear(message) {
  if (message.type === "refused") return message.code === "unauthorised" ? login(message.why) : refuse(message.why);
  if (message.type === "hello") {
    told.hello = message;
    backoff = 500;
    banner.hidden = true;
    setStatus("live", "live");
    const { model, device, dtype, attention, name } = message;
    text(document.getElementById("model"), `${name} · ${model} · ${device}, ${dtype}, ${attention}`);
    document.getElementById("random").hidden = !message.random_weights;
    told.details.clear();
    route();
    return;
  }
  if (message.type === "overview") {
    told.overview = message;
    for (const [name, value] of Object.entries(message.blocks)) {
      if (name !== "num") message.blocks[name] = Uint8Array.from(atob(value), (letter) => letter.charCodeAt(0));
    }
    countRows(message);
  }
  if (message.type === "detail") {
    const old = told.details.get(message.id);
    if (old?.actions && old.tick !== message.tick) told.before.set(message.id, old.actions);
    told.details.set(message.id, message);
  }
  requestAnimationFrame(() => view?.update());
}

// Rows per forward since the last overview, two a second; null where nothing ran.
function countRows({ forwards, rows }) {
  if (lastCounts && forwards >= lastCounts.forwards) {
    const count = forwards - lastCounts.forwards;
    told.rows.push(count ? (rows - lastCounts.rows) / count : null);
    if (told.rows.length > 240) told.rows.shift();
  }
  lastCounts = { forwards, rows };
}

// Binary: header length, header, pixels.
function see(buffer) {
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
    told.observed.set(header.id, images);
  } else {
    told.imagined.set(header.id, { tick: header.tick, shape: header.shape, pixels: take(header.shape) });
  }
  requestAnimationFrame(() => view?.update());
}

function refuse(why) {
  refused = why;
}

function login(why) {
  const dialog = document.getElementById("login");
  const refusal = document.getElementById("refusal");
  const input = document.getElementById("key");
  refusal.hidden = !key.get();
  text(refusal, `That key is not one of this server's. ${why}`);
  input.value = "";
  if (!dialog.open) dialog.showModal();
  dialog.addEventListener("close", () => {
    key.set(input.value);
    connect();
  }, { once: true });
}

function watch(ids) {
  if (socket?.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ watch: ids }));
}

function route() {
  if (!told.hello) return;
  const [, kind, names] = location.hash.match(/^#\/(s)\/(.+)$/) ?? [];
  const ids = kind ? names.split(",").map(decodeURIComponent) : [];
  const main = document.getElementById("view");
  main.replaceChildren();
  view?.leave?.();
  view = kind ? new Sessions(main, told, ids) : new Overview(main, told);
  watch(ids);
  document.title = kind ? `${ids.join(", ")} · worldkv` : "worldkv";
  view.update();
}

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, dialog") || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "Escape" && location.hash.startsWith("#/s/")) location.hash = "#/";
  else view?.press?.(event.key);
});
window.addEventListener("hashchange", () => {
  route();
  document.getElementById("view").focus();
});
window.addEventListener("resize", () => view?.update());
document.getElementById("view").append(el("p", { class: "empty" }, "Waiting for the server."));
connect();
