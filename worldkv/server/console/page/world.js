// One world as it comes over a socket of its own: blocks of JPEGs in, pictures at their pace out. Knows no panel.

import { key } from "./dom.js";

const FPS_OVER_S = 2;

export class World {
  // `canvas`: drawn into. `changed(what)`: something is to be shown; what: the message that said so, or null.
  constructor(canvas, changed) {
    this.canvas = canvas;
    this.changed = changed;
    this.id = null; // the session's, once it has started
    this.state = "opening"; // playing, paused, lost, ended
    this.about = null; // what `started` told: size and rate
    this.header = null; // of the block that is shown
    this.frame = 0; // of it
    this.queue = []; // {header, bitmap, index}: decoded, not shown yet
    this.blocks = 0; // shown so far
    this.late = 0; // of which
    this.worst = 0; // milliseconds
    this.waits = 0; // times that nothing was there to be shown
    this.drawn = []; // when, for the rate
    this.nextAt = null;
    this.decoding = Promise.resolve();
    this.epoch = 0; // rises when what is still on its way is not to be shown
    this.draw = this.draw.bind(this);
  }

  // `start`: the message that begins a world or attaches to one.
  open(start) {
    this.close();
    this.state = "opening";
    const socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/v1/video`);
    socket.binaryType = "arraybuffer";
    socket.onopen = () => {
      socket.send(JSON.stringify({ key: key.get() }));
      socket.send(JSON.stringify({ type: "start", format: "jpeg", pace: "live", ...start }));
    };
    socket.onmessage = ({ data }) => this.socket === socket && (typeof data === "string" ? this.hear(JSON.parse(data)) : this.see(data));
    socket.onclose = () => this.socket === socket && this.lost();
    this.socket = socket;
  }

  say(message) {
    if (this.socket?.readyState !== WebSocket.OPEN) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  // The session stays on the server.
  close() {
    const { socket } = this;
    this.socket = null;
    socket?.close();
    this.flush();
  }

  lost() {
    this.socket = null;
    if (this.state !== "ended") this.state = "lost";
    this.changed(null);
  }

  flush() {
    this.epoch++;
    for (const { bitmap } of this.queue) bitmap.close();
    this.queue = [];
    this.nextAt = null;
  }

  hear(message) {
    const { type } = message;
    if (type === "block") {
      this.coming = message;
      return;
    }
    if (type === "started") {
      this.id = message.session_id;
      this.about = message;
      this.state = "playing";
      Object.assign(this.canvas, { width: message.width, height: message.height });
      this.canvas.style.aspectRatio = `${message.width} / ${message.height}`;
    }
    if (type === "playing" || type === "paused") this.state = type;
    if (type === "stopped") this.state = "lost";
    if (type === "sought") this.flush();
    if (type === "error" && !message.playing && this.state === "playing") this.state = "paused";
    if (type === "error" && message.code === "session_not_found") this.state = "ended";
    this.changed(message);
  }

  // Blocks are decoded one after the other; a length before each picture.
  see(buffer) {
    const { coming: header, epoch } = this;
    const view = new DataView(buffer);
    const pictures = [];
    for (let at = 0; at < buffer.byteLength; ) {
      const length = view.getUint32(at, true);
      pictures.push(new Blob([new Uint8Array(buffer, at + 4, length)], { type: "image/jpeg" }));
      at += 4 + length;
    }
    this.decoding = this.decoding.then(() => Promise.all(pictures.map((blob) => createImageBitmap(blob)))).then((bitmaps) => {
      if (epoch !== this.epoch) return bitmaps.forEach((bitmap) => bitmap.close());
      bitmaps.forEach((bitmap, index) => this.queue.push({ header, bitmap, index }));
      this.changed(header);
      this.wake();
    });
  }

  wake() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(this.draw);
  }

  // Once a picture of the screen: the next of ours where its time has come. A page that nobody sees is not drawn, shows
  // nothing, and so gets no more.
  draw(at) {
    this.asked = null;
    const step = 1000 / (this.about?.frames_per_second ?? 16);
    if (!this.queue.length) {
      if (this.nextAt !== null && this.state === "playing" && at > this.nextAt + step) {
        this.waits++;
        this.nextAt = null;
        this.changed(null);
      }
      if (this.nextAt !== null) this.wake();
      return;
    }
    if (this.nextAt === null || at > this.nextAt + 4 * step) this.nextAt = at;
    if (at >= this.nextAt) this.show(this.queue.shift(), at, step);
    this.wake();
  }

  show({ header, bitmap, index }, at, step) {
    this.canvas.getContext("2d").drawImage(bitmap, 0, 0);
    bitmap.close();
    this.nextAt += step;
    this.drawn.push(at);
    while (this.drawn[0] < at - 1000 * FPS_OVER_S) this.drawn.shift();
    this.frame = index;
    if (index) return;
    this.header = header;
    this.blocks++;
    if (header.late) this.late++;
    this.worst = Math.max(this.worst, header.late_ms);
    this.say({ type: "shown", block: header.block });
    this.changed(null);
  }

  get fps() {
    const since = performance.now() - 1000 * FPS_OVER_S;
    const recent = this.drawn.filter((at) => at > since);
    return recent.length > 1 ? (1000 * (recent.length - 1)) / (recent.at(-1) - recent[0]) : 0;
  }

  get bufferedSeconds() {
    return this.queue.length / (this.about?.frames_per_second ?? 16);
  }
}
