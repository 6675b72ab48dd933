// Charts with axes: numbers and their unit at the left, time below.

import { clock, milliseconds } from "./dom.js";
import { colour, line, surface } from "./draw.js";

const STAGE_COLOURS = {
  read: "#a9b3bd", queue: "#c9a227", preprocess: "#8d72b8", encode: "#79aede", recache: "#5b8c5a", commit: "#2f9e75",
  denoise: "#2563a8", decode: "#b5739d", postprocess: "#e8833a",
};
export const stageColour = (stage) => STAGE_COLOURS[stage] ?? "#8a7f6d";
export const MAX_BARS = 40;
const PERIOD_S = 0.5; // between two overviews

// In their usual order, those of other models after them.
export function stagesOf(ticks) {
  const present = new Set(ticks.flatMap(({ timings }) => Object.keys(timings)));
  present.delete("total");
  const known = Object.keys(STAGE_COLOURS);
  return [...known.filter((stage) => present.has(stage)), ...[...present].filter((stage) => !known.includes(stage)).sort()];
}

export function sparkline(canvas, values) {
  const { context, width, height } = surface(canvas, 22);
  if (!values.length) return;
  const top = Math.max(...values) * 1.05 || 1;
  const x = (index) => (values.length === 1 ? width / 2 : 2 + (index * (width - 4)) / (values.length - 1));
  const y = (value) => height - 2 - (value / top) * (height - 4);
  line(context, values.map((value, index) => [x(index), y(value)]), colour("blue"), 1.5);
  context.fillStyle = colour("blue");
  context.beginPath();
  context.arc(x(values.length - 1), y(values.at(-1)), 2.2, 0, 7);
  context.fill();
}

// The marks of an axis from 0: round numbers, two to five of them above it, the last one no less than `most`.
export function marks(most, whole = false) {
  const rough = most / 3 || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((times) => times * power).find((size) => size >= rough * 0.99);
  if (whole) step = Math.max(1, Math.ceil(step));
  const above = Math.max(1, Math.ceil((most / step) * 0.999));
  return Array.from({ length: above + 1 }, (_, index) => index * step);
}

function axis(context, values, { left, right, y, words }) {
  for (const value of values) {
    context.fillStyle = colour("line");
    context.fillRect(left, y(value), right - left, 1);
    label(context, value ? words(value) : "0", left - 5, y(value) + 4, "right");
  }
}

// A bar a point: {at, value}, in seconds; value null: nothing then. The axis is `seconds` long, filled or not.
export function series(canvas, points, seconds, now) {
  const { context, width, height } = surface(canvas, 124);
  const [left, right, base] = [30, width - 6, height - 18];
  const values = marks(Math.max(1, ...points.map(({ value }) => value ?? 0)), true);
  const top = values.at(-1);
  const x = (at) => right - ((now - at) / seconds) * (right - left);
  const y = (value) => base - (value / top) * (base - 12);
  axis(context, values, { left, right, y, words: String });
  label(context, `${seconds / 60} min ago`, left, height - 4, "left");
  label(context, `${seconds / 120} min ago`, (left + right) / 2, height - 4, "center");
  label(context, "now", right, height - 4, "right");
  context.fillStyle = colour("blue");
  const wide = Math.max(1, ((right - left) * PERIOD_S) / seconds - 0.3);
  for (const { at, value } of points) {
    if (value !== null && x(at) >= left) context.fillRect(x(at) - wide, y(value), wide, base - y(value));
  }
  if (!points.some(({ value }) => value !== null)) label(context, "none yet", (left + right) / 2, base / 2, "center");
}

// A bar a tick, one after the other whenever they came; below, when they were answered.
export function stageBars(canvas, ticks, chunkSeconds) {
  const { context, width, height } = surface(canvas, 150);
  const shown = ticks.slice(-MAX_BARS);
  if (!shown.length) return;
  const [left, base] = [54, height - 20];
  const values = marks(Math.max(...shown.map(({ timings }) => timings.total ?? 0)));
  const top = values.at(-1);
  const y = (value) => base - (value / top) * (base - 16);
  const bar = Math.min(26, (width - left) / shown.length);
  const stages = stagesOf(shown);
  axis(context, values, { left, right: width, y, words: milliseconds });
  shown.forEach((tick, index) => {
    let bottom = base;
    for (const stage of stages) {
      const tall = base - y(tick.timings[stage] ?? 0);
      context.fillStyle = stageColour(stage);
      context.fillRect(left + index * bar, bottom - tall, Math.max(1, bar - 2), tall);
      bottom -= tall;
    }
    if (tick.facts.restart_reason) {
      context.fillStyle = colour("ink");
      context.fillRect(left + index * bar, base + 1, Math.max(1, bar - 2), 3);
    }
  });
  const end = left + shown.length * bar;
  label(context, clock(shown[0].at), left, height - 4, "left");
  if (end - left > 130) label(context, clock(shown.at(-1).at), end, height - 4, "right");
  const limit = y(chunkSeconds * 1000);
  if (limit > 10) {
    context.fillStyle = colour("red");
    context.fillRect(left, limit, width - left, 1);
    context.fillText(`a chunk lasts ${chunkSeconds.toFixed(1)} s`, left + 4, limit - 3);
  }
}

// One small panel for each number of an action: the chunk, its executed part bold, the chunk before it faint. Each of
// `numbers` has a name, a unit, and a range where one is known; `seconds` is how long the chunk lasts.
export function actionCurves(canvas, numbers, chunk, before, executed, seconds) {
  const columns = Math.max(1, Math.min(4, Math.floor(canvas.clientWidth / 160)));
  const tall = 96;
  const { context, width } = surface(canvas, Math.ceil(numbers.length / columns) * tall);
  numbers.forEach(({ name, unit, range }, number) => {
    const left = (number % columns) * (width / columns) + 40;
    const top = Math.floor(number / columns) * tall;
    const right = left + width / columns - 54;
    const values = chunk.map((action) => action[number]);
    const old = before?.map((action) => action[number]) ?? [];
    const low = Math.min(...values, ...old, ...(range ?? []));
    const high = Math.max(...values, ...old, ...(range ?? []));
    const y = (value) => top + 72 - ((value - low) / (high - low || 1)) * 48;
    const place = (list) => list.map((value, step) => [left + (step / Math.max(1, list.length)) * (right - left), y(value)]);
    context.fillStyle = colour("line");
    context.fillRect(left, top + 74, right - left, 1);
    context.fillRect(left - 3, top + 22, 1, 52);
    context.fillStyle = colour("ink");
    context.fillText(unit ? `${name}, ${unit}` : name, left - 38, top + 13, width / columns - 12);
    label(context, short(high, high - low), left - 6, top + 28, "right");
    if (high > low) label(context, short(low, high - low), left - 6, top + 75, "right");
    label(context, "0", left, top + 87, "left");
    label(context, `${seconds.toFixed(1)} s`, right, top + 87, "right");
    context.setLineDash([3, 3]);
    for (const end of range ?? []) line(context, [[left, y(end)], [right, y(end)]], colour("grey"), 1);
    context.setLineDash([]);
    context.globalAlpha = 0.35;
    line(context, place(old), colour("muted"), 1.2);
    context.globalAlpha = 0.55;
    line(context, place(values), colour("blue"), 1.2);
    context.globalAlpha = 1;
    line(context, place(values).slice(0, executed + 1), colour("blue"), 2.2);
  });
}

function label(context, words, x, y, align) {
  context.fillStyle = colour("muted");
  context.textAlign = align;
  context.fillText(words, x, y);
  context.textAlign = "left";
}

const short = (value, span) => value.toFixed(span >= 20 ? 0 : span >= 2 ? 1 : span >= 0.02 ? 2 : 3);
