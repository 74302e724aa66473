// The page from top to bottom.

function header(data) {
  const runs = data.runs;
  const columns = ["run", "algorithm", "model", "engine", "ranks", "steps", "time", "tokens/s", "reward", "evaluation"];
  const change = (run) => {
    const found = run.summary.first_and_last;
    const one = (name, percent) => found[name] ? `${percent(found[name][0])} \u2192 ${percent(found[name][1])}${run.summary.best[name] > found[name][1] ? ` (best ${percent(run.summary.best[name])})` : ""}` : null;
    const percent = (value) => `${(100 * value).toFixed(1)}%`;
    const sets = Object.keys(found).filter((name) => /^eval\/.+\/accuracy$/.test(name)).map((name) => `${name.split("/")[1]}: ${one(name, percent)}`);
    return one("eval/accuracy", percent) ?? (sets.join("; ") || one("eval/reward", shownNumber) || "");
  };
  const row = (run, place) => {
    const facts = run.summary, reward = facts.first_and_last.reward;
    const cells = [[element("span", { class: "dot", style: `background:${runColor(place)}` }), run.name], facts.algorithm ?? "", facts.model ?? "", facts.engine ?? "", facts.ranks ?? "",
      `${facts.steps}${facts.max_steps ? ` of ${facts.max_steps}` : ""}`, shownSeconds(facts.seconds), facts.tokens_per_second ? shownNumber(Math.round(facts.tokens_per_second)) : "",
      reward ? `${shownNumber(reward[0])} \u2192 ${shownNumber(reward[1])}` : "", change(run)];
    return element("tr", {}, cells.map((cell) => element("td", {}, cell)));
  };
  const notes = runs.flatMap((run) => run.notes.map((note) => (runs.length > 1 ? `${run.name}: ${note}` : note)));
  return [
    element("h1", {}, runs.length === 1 ? runs[0].name : `${runs.length} runs`),
    element("p", { class: "soft small", style: "margin:0 0 12px" }, `hybrid_rl report, made ${data.made}`),
    element("div", { class: "scroll" }, element("table", {}, [element("thead", {}, element("tr", {}, columns.map((name) => element("th", {}, name)))), element("tbody", {}, runs.map(row))])),
    notes.length ? element("div", { class: "notes small" }, notes.map((note) => element("p", {}, note))) : null,
  ];
}

function navigation(data, sections) {
  const smoothing = element("input", { type: "range", id: "smoothing", min: 0, max: 0.98, step: 0.02, value: 0, oninput: (event) => { view.smoothing = Number(event.target.value); redrawAll(); } });
  const axis = element("select", { id: "axis", onchange: (event) => { view.axis = event.target.value; redrawAll(); } }, Object.entries(AXES).map(([name, label]) => element("option", { value: name }, label)));
  const runs = data.runs.length > 1 ? data.runs.map((run, place) => element("label", {}, [element("input", { type: "checkbox", checked: true, onchange: (event) => {
    if (event.target.checked) view.hidden.delete(place); else view.hidden.add(place);
    redrawAll();
  } }), element("span", { class: "dot", style: `margin:0;background:${runColor(place)}` }), run.name])) : [];
  return element("nav", {}, [...sections.map(([id, title]) => element("a", { href: `#${id}` }, title)),
    element("span", { class: "right" }, [...runs, element("label", {}, ["smoothing ", smoothing]), element("label", {}, ["over ", axis])])]);
}

function configTable(data) {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))];
  const value = (run, name) => (name in run.config ? (run.config[name] === null ? "null" : String(run.config[name])) : "\u2013");
  const differs = (name) => new Set(data.runs.map((run) => value(run, name))).size > 1;
  const isSet = (name) => data.runs.some((run) => (run.environment.given || []).includes?.(name));
  const rank = (name) => (differs(name) ? 0 : isSet(name) ? 1 : 2);
  const search = element("input", { type: "search", id: "config-search", placeholder: "search keys" });
  const all = element("input", { type: "checkbox", id: "config-all" });
  const body = element("tbody", { id: "config" });
  const isMany = names.filter((name) => rank(name) < 2).length > 0;
  all.checked = !isMany;
  const show = () => body.replaceChildren(...names.filter((name) => (all.checked || search.value || rank(name) < 2) && name.includes(search.value.trim())).sort((a, b) => rank(a) - rank(b))
    .map((name) => element("tr", { class: differs(name) ? "differs" : null }, [element("td", { class: isSet(name) ? "set" : null }, name), ...data.runs.map((run) => element("td", {}, value(run, name)))])));
  search.addEventListener("input", show);
  all.addEventListener("change", show);
  show();
  const says = data.runs.length > 1 ? "Keys that differ come first, then, in bold, those that were set." : "Keys that were set come first, in bold.";
  return [element("div", { class: "controls" }, [search, element("label", {}, [all, " all keys"]), element("span", { class: "soft small" }, says)]),
    element("div", { class: "scroll" }, element("table", {}, [element("thead", {}, element("tr", {}, ["key", ...data.runs.map((run) => run.name)].map((name) => element("th", {}, name)))), body]))];
}

function environmentTable(data) {
  const flat = (value, prefix = "") => value && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([name, inner]) => flat(inner, prefix ? `${prefix} \u203a ${name}` : name))
    : [[prefix, Array.isArray(value) ? (prefix === "command" ? value.join(" ") : value.join(", ")) : /bytes$/.test(prefix) && value ? `${(value / 1e9).toFixed(1)} GB` : asText(value) || String(value)]];
  const tables = data.runs.map((run) => new Map(flat(Object.fromEntries(Object.entries(run.environment).filter(([name]) => name !== "given")))));
  const names = [...new Set(tables.flatMap((one) => [...one.keys()]))].filter(Boolean);
  const rows = [["folder", ...data.runs.map((run) => run.folder)], ...names.map((name) => [name, ...tables.map((one) => one.get(name) ?? "\u2013")])];
  return [element("div", { class: "scroll" }, element("table", { id: "environment" }, element("tbody", {}, rows.map((cells) => element("tr", { class: new Set(cells.slice(1)).size > 1 && cells[0] !== "folder" ? "differs" : null }, cells.map((cell) => element("td", {}, cell)))))))];
}

async function start() {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser is too old to unpack the page (it lacks DecompressionStream); use one from 2023 or later");
  const [library, text] = await Promise.all([unpacked("plotly"), unpacked("data")]);
  document.body.append(element("script", {}, library));
  document.getElementById("plotly").remove();
  const data = JSON.parse(text);
  const main = document.getElementById("main"), parts = [];
  for (const section of data.sections) parts.push([section.title, [element("div", { class: "grid" }, section.charts.map((chart) => chartCard(chart, data.runs)))]]);
  const time = timeCards(data.runs), memory = memoryCards(data.runs), any = anyMetricCard(data.runs);
  if (time.length) parts.push(["Time", [element("div", { class: "grid" }, time)]]);
  if (memory.length) parts.push(["Memory", [element("div", { class: "grid" }, memory)]]);
  if (any) parts.push(["All metrics", [element("div", { class: "grid" }, any)]]);
  parts.push(["Samples", data.samples.length ? samplesSection(data) : [element("p", { class: "soft" }, "No samples are recorded.")]]);
  parts.push(["Configuration", configTable(data)], ["Environment", environmentTable(data)]);
  const ids = parts.map(([title]) => [title.toLowerCase().replaceAll(" ", "-") + "-section", title]);
  document.getElementById("head").append(...header(data).filter(Boolean));
  main.before(navigation(data, ids));
  main.replaceChildren(...parts.map(([title, content], place) => element("section", { id: ids[place][0] }, [element("h2", {}, title), ...content.filter(Boolean)])),
    element("footer", { class: "small" }, "Made by hybrid_rl; charts by plotly.js. This page makes no request to any network."));
  redrawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  document.documentElement.dataset.ready = "true";
}

start().catch((error) => {
  document.documentElement.dataset.ready = "failed";
  document.getElementById("main").replaceChildren(element("p", { class: "error" }, `The report cannot be shown: ${error.message}`));
  console.error(error);
});
