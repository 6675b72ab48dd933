// The page: which view shows what the feed told, and what keys do.

import { COMMANDS } from "./commands.js";
import { el, places, text } from "./dom.js";
import { Feed } from "./feed.js";
import { Overview } from "./overview.js";
import { MAX_PANELS, Sessions } from "./session.js";
import { Studio, STUDIO_KEYS } from "./studio.js";

const main = document.getElementById("view");
let view = null;
let studio = null; // its worlds outlive a look elsewhere
let drawing = false;
const feed = new Feed({ hello: greet, changed: draw });

// Once a frame, however many messages came.
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (feed.hello) view?.update();
  });
}

function greet() {
  const { model, device, dtype, attention, name } = feed.hello;
  const words = `${name} · ${model} · ${device}, ${dtype}, ${attention}`;
  const box = document.getElementById("model");
  text(box, words);
  box.title = words;
  document.getElementById("random").hidden = !feed.hello.random_weights;
  const shows = feed.hello.app === "videos";
  places.all = shows ? "#/sessions" : "#/";
  document.getElementById("places").hidden = !shows;
  document.body.dataset.app = feed.hello.app;
  document.getElementById("beside").replaceChildren(...(feed.hello.beside ?? []).map(({ serves, port }) =>
    el("a", { href: `${location.protocol}//${location.hostname}:${port}/`, title: "served beside, on the same device" }, serves)));
  if (shows) studio ??= new Studio(feed);
  route();
}

// #/sessions, #/ or #/s/ID,ID; null: none of them.
function sessionsOf(hash) {
  if (["", "#", "#/", "#/sessions"].includes(hash)) return [];
  const names = hash.match(/^#\/s\/(.+)$/)?.[1];
  try {
    const ids = [...new Set(names.split(",").map(decodeURIComponent))].filter(Boolean);
    return ids.length ? ids : null;
  } catch {
    return null; // no match, or a % that encodes nothing
  }
}

function route() {
  if (!feed.hello) return;
  const ids = sessionsOf(location.hash);
  const shown = (ids ?? []).slice(0, MAX_PANELS);
  const notes = [];
  if (ids === null) notes.push(`This address names nothing here: ${location.hash}. These are all sessions.`);
  if (ids?.length > MAX_PANELS) notes.push(`${MAX_PANELS} sessions fit side by side; ${ids.slice(MAX_PANELS).join(", ")} are not shown.`);
  const films = studio && ["", "#", "#/"].includes(location.hash);
  if (!films || view !== studio) view?.leave?.(); // a console's socket that comes back stops no world
  main.replaceChildren(...notes.map((words) => el("p", { class: "note", role: "alert" }, words)));
  if (films) view = studio;
  else view = shown.length ? new Sessions(main, feed, shown) : new Overview(main, feed);
  if (films) studio.enter(main);
  for (const link of document.querySelectorAll("#places a")) {
    const here = link.getAttribute("href") === (films ? "#/" : "#/sessions");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  feed.watch(shown);
  document.title = shown.length ? `${shown.join(", ")} · worldkv` : "worldkv";
  view.update();
}

const KEYS = [
  ["?", "this list"],
  ["Esc", "all sessions"],
  ["/", "search the sessions"],
  [`1 to ${MAX_PANELS}`, "of several sessions side by side, the one that the keys act on"],
  ...COMMANDS.filter(({ hint }) => hint).map(({ letter, hint }) => [letter, hint]),
];

function showKeys() {
  const list = document.getElementById("keylist");
  const keys = view === studio && studio ? [KEYS[0], ...STUDIO_KEYS, ["1 to 6", "of several worlds, the one that the keys act on"]] : KEYS;
  list.replaceChildren(...keys.flatMap(([name, what]) => [el("dt", {}, el("kbd", {}, name)), el("dd", {}, what)]));
  const dialog = document.getElementById("keys");
  if (!dialog.open) dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, select, textarea, dialog") || (event.key === " " && event.target.closest?.("button, a, summary"));
  if (typing || event.repeat || event.metaKey || event.ctrlKey || event.altKey) return;
  if (event.key === "?") showKeys();
  else if (event.key === "Escape" && location.hash.startsWith("#/s/")) location.hash = places.all;
  else if (view?.press?.(event.key.toLowerCase())) event.preventDefault();
});
document.getElementById("help").addEventListener("click", showKeys);
window.addEventListener("hashchange", () => {
  route();
  main.focus();
});
window.addEventListener("resize", draw);
// Canvases hold colours, which a change of theme does not reach.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
main.append(el("p", { class: "empty" }, "Waiting for the server."));
