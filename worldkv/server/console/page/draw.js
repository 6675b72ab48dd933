// Canvases, sized to the screen's own pixels: colours, the block map, memory, pictures. Charts are in charts.js.

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
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "left";
  return { context, width, height: tall };
}

export function line(context, points, style, thickness) {
  if (!points.length) return;
  context.strokeStyle = style;
  context.lineWidth = thickness;
  context.lineJoin = "round";
  context.beginPath();
  points.forEach(([x, y], index) => (index ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.stroke();
}

export function blockMap(canvas, cells) {
  const wide = Math.max(1, canvas.clientWidth);
  const cell = Math.max(3, Math.min(16, Math.floor(Math.sqrt((wide * 170) / Math.max(1, cells.num)))));
  const perRow = Math.max(1, Math.floor(wide / cell));
  const { context } = surface(canvas, Math.ceil(cells.num / perRow) * cell);
  const [free, conditioning, snapshot, others, shared] = ["grey", "orange", "muted", "others", "ink"].map(colour);
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

// `parts`: each with its bytes and the name of its colour.
export function memoryBar(canvas, parts) {
  const { context, width, height } = surface(canvas, 26);
  const total = parts.reduce((sum, part) => sum + part.bytes, 0) || 1;
  let x = 0;
  for (const part of parts) {
    const share = (part.bytes / total) * width;
    context.fillStyle = colour(part.colour);
    context.fillRect(x, 0, Math.max(share - 1, share > 0 ? 0.5 : 0), height);
    x += share;
  }
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
