// Everything that is drawn. Canvases are sized to the screen's own pixels.

export const STAGES = ["read", "queue", "preprocess", "encode", "commit", "denoise", "postprocess"];
const STAGE_COLOURS = {
  read: "#d3d9df", queue: "#c9a227", preprocess: "#9aa6b2", encode: "#79aede", commit: "#2f9e75", denoise: "#2563a8",
  postprocess: "#e8833a",
};
export const stageColour = (stage) => STAGE_COLOURS[stage];
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// Neighbours differ: the hue goes on by the golden angle.
export function sessionColour(index, branch = 0) {
  return `hsl(${(210 + index * 137.5) % 360} 58% ${branch ? 66 : 46}%)`;
}

export function surface(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(1, canvas.clientWidth);
  const tall = height ?? canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.height = `${tall}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

export function sparkline(canvas, values, limit) {
  const { context, width, height } = surface(canvas);
  if (!values.length) return;
  const top = Math.max(...values, limit ?? 0) * 1.05 || 1;
  const x = (index) => (values.length === 1 ? width / 2 : 2 + (index * (width - 4)) / (values.length - 1));
  const y = (value) => height - 2 - (value / top) * (height - 4);
  line(context, values.map((value, index) => [x(index), y(value)]), colour("blue"), 1.5);
  context.fillStyle = colour("blue");
  context.beginPath();
  context.arc(x(values.length - 1), y(values.at(-1)), 2.2, 0, 7);
  context.fill();
}

export function series(canvas, points, unit) {
  const { context, width, height } = surface(canvas, 110);
  context.font = "11px system-ui, sans-serif";
  const top = Math.max(1, ...points.map((point) => point ?? 0)) * 1.15;
  const left = 30;
  for (const share of [0, 0.5, 1]) {
    const y = height - 14 - share * (height - 26);
    context.fillStyle = colour("line");
    context.fillRect(left, y, width - left, 1);
    context.fillStyle = colour("muted");
    context.fillText((top * share).toFixed(top < 10 ? 1 : 0), 0, y + 4);
  }
  const step = (width - left - 4) / Math.max(1, points.length - 1);
  const drawn = points.map((value, index) => [left + index * step, height - 14 - ((value ?? 0) / top) * (height - 26)]);
  line(context, drawn, colour("blue"), 1.6);
  context.fillStyle = colour("muted");
  context.fillText(unit, left, height - 2);
}

export function blockMap(canvas, cells) {
  const wide = Math.max(1, canvas.clientWidth);
  const cell = Math.max(3, Math.min(16, Math.floor(Math.sqrt((wide * 170) / Math.max(1, cells.num)))));
  const perRow = Math.max(1, Math.floor(wide / cell));
  const { context } = surface(canvas, Math.ceil(cells.num / perRow) * cell);
  const [free, conditioning, snapshot, others, shared] = ["grey", "orange", "muted", "line", "ink"].map(colour);
  for (let block = 0; block < cells.num; block++) {
    const owner = cells.owner[block];
    context.fillStyle = [free, conditioning, snapshot, others][owner] ?? sessionColour(owner - 4, cells.branch[block]);
    context.globalAlpha = owner === 0 ? 0.45 : 1;
    const x = (block % perRow) * cell;
    const y = Math.floor(block / perRow) * cell;
    context.fillRect(x, y, cell - 1, cell - 1);
    if (cells.shared[block] && owner !== 1) {
      context.globalAlpha = 1;
      context.fillStyle = shared;
      const mark = Math.max(1, Math.floor(cell / 3));
      context.fillRect(x + (cell - 1 - mark) / 2, y + (cell - 1 - mark) / 2, mark, mark);
    }
  }
  context.globalAlpha = 1;
}

export function memoryBar(canvas, parts) {
  const { context, width, height } = surface(canvas, 26);
  const total = parts.reduce((sum, part) => sum + part.bytes, 0) || 1;
  let x = 0;
  for (const part of parts) {
    const share = (part.bytes / total) * width;
    context.fillStyle = part.colour;
    context.fillRect(x, 0, Math.max(share - 1, share > 0 ? 0.5 : 0), height);
    x += share;
  }
}

export function stageBars(canvas, ticks, chunkSeconds) {
  const { context, width, height } = surface(canvas, 120);
  const shown = ticks.slice(-40);
  if (!shown.length) return;
  const top = Math.max(...shown.map((tick) => tick.timings.total ?? 0)) * 1.1 || 1;
  const bar = Math.min(26, (width - 44) / shown.length);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("muted");
  context.fillText(`${Math.round(top)} ms`, 0, 10);
  shown.forEach((tick, index) => {
    let y = height - 2;
    for (const stage of STAGES) {
      const tall = ((tick.timings[stage] ?? 0) / top) * (height - 16);
      context.fillStyle = STAGE_COLOURS[stage];
      context.fillRect(44 + index * bar, y - tall, Math.max(1, bar - 2), tall);
      y -= tall;
    }
    if (tick.facts.restart_reason) {
      context.fillStyle = colour("orange");
      context.fillRect(44 + index * bar, height - 2, Math.max(1, bar - 2), 2);
    }
  });
  const limit = height - 2 - ((chunkSeconds * 1000) / top) * (height - 16);
  if (limit > 0) {
    context.fillStyle = colour("red");
    context.fillRect(44, limit, width - 44, 1);
  }
}

// One small panel for each number of an action: the chunk, its executed part bold, the chunk before it faint.
export function actionCurves(canvas, names, chunk, before, executed) {
  const columns = canvas.clientWidth < 380 ? 2 : 4;
  const rows = Math.ceil(names.length / columns);
  const { context, width } = surface(canvas, rows * 74);
  const wide = width / columns;
  context.font = "11px system-ui, sans-serif";
  names.forEach((name, number) => {
    const left = (number % columns) * wide;
    const top = Math.floor(number / columns) * 74;
    const values = chunk.map((action) => action[number]);
    const old = before?.map((action) => action[number]) ?? [];
    const low = Math.min(...values, ...old);
    const span = Math.max(...values, ...old) - low || 1;
    const steps = Math.max(1, values.length - 1);
    const place = (list) => list.map((value, step) => [
      left + 4 + (step / steps) * (wide - 16), top + 62 - ((value - low) / span) * 42,
    ]);
    context.fillStyle = colour("muted");
    context.fillText(name, left + 4, top + 12, wide - 12);
    context.globalAlpha = 0.35;
    line(context, place(old), colour("muted"), 1.2);
    context.globalAlpha = 0.55;
    line(context, place(values), colour("blue"), 1.2);
    context.globalAlpha = 1;
    line(context, place(values).slice(0, executed + 1), colour("blue"), 2.2);
  });
}

export function picture(canvas, pixels, height, width) {
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const rgba = new Uint8ClampedArray(4 * width * height);
  for (let from = 0, to = 0; from < pixels.length; from += 3, to += 4) {
    rgba[to] = pixels[from];
    rgba[to + 1] = pixels[from + 1];
    rgba[to + 2] = pixels[from + 2];
    rgba[to + 3] = 255;
  }
  canvas.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
}

function line(context, points, style, thickness) {
  if (!points.length) return;
  context.strokeStyle = style;
  context.lineWidth = thickness;
  context.lineJoin = "round";
  context.beginPath();
  points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}
