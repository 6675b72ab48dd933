// The page of a server of videos: words begin a world, and worlds go on side by side.

import { count, el, places, text } from "./dom.js";
import { Player } from "./player.js";

const MAX_PLAYERS = 6;
const EXAMPLES = ["a quiet lake at dawn, mist over the water", "a red sports car on a winding coast road", "a paper boat on a river in the rain"];

export const STUDIO_KEYS = [
  ["space", "play, pause"],
  ["n", "other words"],
  ["m", "mark this moment"],
  ["b", "go back to the last mark"],
  ["f, g", "fork into two or four futures"],
  ["d", "download what was shown"],
  ["x", "close this world; asks first"],
];

export class Studio {
  constructor(feed) {
    this.feed = feed;
    this.players = [];
    this.number = 0;
    this.prompt = el("textarea", { rows: "2", placeholder: "a world in words", "aria-label": "a world in words", required: true, maxlength: "20000" });
    this.seed = el("input", { type: "number", min: "0", step: "1", placeholder: "any", "aria-label": "seed", title: "the same words and seed are the same world" });
    this.image = el("input", { type: "file", accept: "image/png,image/jpeg,image/webp", "aria-label": "start image" });
    this.begin = el("button", { class: "primary" }, "Begin");
    const decoder = this.feed.hello?.about.decoder ?? "";
    this.decoder = decoder.startsWith("tiny") ? el("p", { class: "muted decoder" }, `Decoder: ${decoder}.`) : "";
    this.note = el("p", { class: "muted" });
    this.form = el("form", { class: "begin", onsubmit: (event) => this.submit(event) }, this.prompt,
      el("div", { class: "side" }, el("label", {}, "Seed", this.seed),
        this.feed.hello?.about.begins_with_an_image ? el("label", { title: "the world's first picture" }, "Image", this.image) : "", this.begin));
    this.examples = el("p", { class: "muted examples" }, "for instance ", EXAMPLES.map((words, number) => [
      number ? " · " : "", el("button", { class: "link", type: "button", onclick: () => { this.prompt.value = words; this.prompt.focus(); } }, words)]).flat());
    this.others = el("p", { class: "muted" });
    this.grid = el("div", { class: "players" });
    this.element = el("div", { class: "studio" },
      el("section", { class: "card" }, el("h2", {}, "A world in words", el("small")), this.form, this.examples, this.decoder, this.note, this.others), this.grid);
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey) this.submit(event);
    });
  }

  get switches() {
    return this.feed.hello.about.switches;
  }

  // Into the page; what played before goes on when it is asked to.
  enter(root) {
    root.append(this.element);
    clearInterval(this.timer);
    this.timer = setInterval(() => this.tick(), 500);
    if (!this.players.length) this.prompt.focus();
  }

  leave() {
    clearInterval(this.timer);
    for (const player of this.players) player.pause();
  }

  async submit(event) {
    event.preventDefault();
    const prompt = this.prompt.value.trim();
    if (!prompt || this.isFull(1)) return;
    const seed = this.seed.value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(this.seed.value);
    for (const player of this.players) player.pause();
    const file = this.image.files[0];
    try {
      const image = file ? { image: await this.smaller(file) } : {};
      this.add(`World ${++this.number}`, { prompt, seed, ...image }, null);
      this.note.textContent = "";
    } catch {
      this.note.textContent = `${file.name} cannot be read as a picture.`;
    }
  }

  // As large as the model sees it, as base64 of a JPEG: it is resized to that in any case.
  async smaller(file) {
    const { width, height } = this.feed.hello.about;
    const canvas = el("canvas", { width, height });
    canvas.getContext("2d").drawImage(await createImageBitmap(file), 0, 0, width, height);
    return canvas.toDataURL("image/jpeg", 0.95).split(",")[1];
  }

  isFull(more) {
    const full = this.players.length + more > MAX_PLAYERS;
    text(this.note, full ? `${MAX_PLAYERS} worlds fit side by side; close one first.` : "");
    return full;
  }

  add(label, start, after) {
    const player = new Player(this, label, start);
    const at = after ? this.players.indexOf(after) + 1 : 0;
    this.players.splice(at, 0, player);
    this.grid.insertBefore(player.element, this.grid.children[at] ?? null);
    this.arrange();
    this.focus(player);
    return player;
  }

  // The futures that were asked for. The first goes on as its parent would, the others with other noise.
  show({ sessions }, parent) {
    parent.pause();
    let after = parent;
    sessions.forEach((session_id, number) => {
      if (this.isFull(1)) return;
      const seed = number ? { seed: Math.floor(Math.random() * 2 ** 31) } : {};
      const label = `${parent.label}, future ${number + 1}`;
      after = this.add(label, { session_id, ...seed }, after);
    });
  }

  remove(player) {
    this.players = this.players.filter((other) => other !== player);
    player.element.remove();
    this.isFull(0);
    this.arrange();
    if (this.players.length) this.focus(this.players[0]);
    else this.prompt.focus();
  }

  arrange() {
    this.grid.dataset.count = this.players.length;
    this.examples.hidden = this.players.length > 0;
  }

  focus(player) {
    this.focused = player;
    for (const other of this.players) other.element.classList.toggle("focused", this.players.length > 1 && other === player);
  }

  tick() {
    for (const player of this.players) player.update();
  }

  update() {
    const shown = new Set(this.players.map(({ id }) => id));
    const others = (this.feed.overview?.sessions ?? []).filter(({ id }) => !shown.has(id));
    const wanted = others.map(({ id }) => id).join("\n");
    if (this.others.dataset.shown === wanted) return;
    this.others.dataset.shown = wanted;
    const some = others.slice(0, 4).map(({ id }) => [" ", el("button", { class: "small", title: "show it here", onclick: () => this.attach(id) }, id)]);
    const more = others.length > 4 ? [" ", el("a", { href: places.all }, `and ${count(others.length - 4, "more")}`)] : [];
    this.others.replaceChildren(...(others.length ? ["open, not shown here:", ...some.flat(), ...more] : []));
  }

  attach(session_id) {
    if (!this.isFull(1)) this.add(session_id, { session_id }, null);
  }

  press(letter) {
    const player = this.focused;
    const chosen = /^\d$/.test(letter) ? this.players[Number(letter) - 1] : null;
    if (chosen) {
      this.focus(chosen);
      chosen.element.focus();
      return true;
    }
    if (!player) return false;
    const named = { " ": "play", m: "mark", f: "two", g: "four", d: "download", x: "close" }[letter];
    if (named) player.buttons.get(named).click(); // one that is disabled does nothing
    else if (letter === "n") player.words.focus();
    else if (letter === "b" && player.marks.length) player.goBack(player.marks.at(-1));
    else return false;
    return true;
  }
}
