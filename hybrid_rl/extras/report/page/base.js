// What all parts of the page use. Text of users and models enters the page through `element` only, as text.

const COLORS = ["#3b7dd8", "#e0742b", "#2e9e5b", "#b3459a", "#8a63d2", "#c9a227", "#1f9aa8", "#d1495b", "#7a7f87", "#6b8e23"];

async function unpacked(id) {
  const text = document.getElementById(id).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// Makes an element. content: text, elements, or a list of these; attributes: on* are listeners.
function element(tag, attributes = {}, content = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  for (const part of Array.isArray(content) ? content : [content]) {
    if (part !== null && part !== undefined) made.append(part instanceof Node ? part : String(part));
  }
  return made;
}

function shownNumber(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
}

function shownSeconds(seconds) {
  if (seconds < 120) return `${shownNumber(Number(seconds.toPrecision(3)))} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function asText(value) {
  return typeof value === "string" ? value : value === null || value === undefined ? "" : JSON.stringify(value);
}

function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function runColor(place) { return COLORS[place % COLORS.length]; }
