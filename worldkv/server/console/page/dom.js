// Small helpers: elements, numbers for people, the key, calls of /v1.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function dot(colour) {
  const mark = el("span", { class: "dot" });
  mark.style.background = colour;
  return mark;
}

export function text(element, value) {
  const wanted = String(value);
  if (element.textContent !== wanted) element.textContent = wanted;
}

export function bytes(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return `${count < 10 && unit !== "B" ? count.toFixed(1) : Math.round(count)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(1)} GiB`;
}

export function milliseconds(value) {
  return value < 10 ? `${value.toFixed(1)} ms` : value < 10000 ? `${Math.round(value)} ms` : `${(value / 1000).toFixed(1)} s`;
}

export function ago(seconds) {
  if (seconds === null || seconds === undefined) return "";
  if (seconds < 60) return `${Math.round(seconds)} s`;
  return seconds < 3600 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

// The value that `share` of them do not exceed (nearest rank); undefined for none.
export function percentile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];
}

export const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export function clock(at) {
  return new Date(at * 1000).toLocaleTimeString([], { hour12: false });
}

export const key = {
  get: () => sessionStorage.getItem("worldkv-key"),
  set: (value) => sessionStorage.setItem("worldkv-key", value),
};

let toastTimer;
export function toast(message) {
  const box = document.getElementById("toast");
  box.textContent = message;
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(() => { box.hidden = true; }, 4000);
}

// What may not be lost by a slip is asked about first.
export function ask(question, yes) {
  const dialog = document.getElementById("ask");
  text(document.getElementById("question"), question);
  text(document.getElementById("yes"), yes);
  if (dialog.open) dialog.close("no");
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

export async function call(method, path, body) {
  const headers = { "content-type": "application/json" };
  if (key.get()) headers.authorization = `Api-Key ${key.get()}`;
  const response = await reach(`/v1/${path}`, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.message ?? `${response.status}`);
  return answer;
}

async function reach(address, request) {
  try {
    return await fetch(address, request);
  } catch {
    throw new Error("The server does not answer; nothing was done.");
  }
}

export async function fetchFile(path) {
  const response = await reach(`/v1/${path}`, { headers: key.get() ? { authorization: `Api-Key ${key.get()}` } : {} });
  if (!response.ok) throw new Error((await response.json()).message);
  const name = /filename="([^"]+)"/.exec(response.headers.get("content-disposition") ?? "")?.[1] ?? "recording.tar";
  return { blob: await response.blob(), name, headers: response.headers };
}

// As a file of the browser's.
export function save(blob, name) {
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// In one segment, or a browser would resolve the dots of "a/../b" and ask for another session.
export const sessionPath = (id) => `sessions/${encodeURIComponent(id)}`;
export const places = { all: "#/" }; // where all sessions are
export const sessionLink = (...ids) => `#/s/${ids.map(encodeURIComponent).join(",")}`;
