// What the time of a step goes to, and what is in memory when.

const PARTS = { generation: "#3b7dd8", rewards: "#c9a227", collecting: "#7fb2ef", logprobs: "#1f9aa8", advantages: "#8a63d2", update: "#e0742b",
  handoff: "#2e9e5b", evaluation: "#b3459a", "samples written": "#9aa0a8", checkpoint: "#d1495b", pictures: "#6b8e23", other: "#c3c8ce" };
// Phases of ranks, in the colour of the part that they belong to.
const PHASES = { generate: PARTS.generation, reward: PARTS.rewards, score_actor: PARTS.logprobs, score_reference: "#5cc0cb", score_teacher: "#0f6f79", score_critic: "#4aa59b",
  update: PARTS.update, update_critic: "#f0a56f", publish: PARTS.handoff, check: "#83c79d", save: PARTS.checkpoint, rollout: PARTS.generation };

function selected(runs) { return runs.map((run, place) => [run, place]).filter(([, place]) => !view.hidden.has(place)); }

function runPicker(runs, changed) {
  if (runs.length === 1) return null;
  return element("select", { "aria-label": "run", onchange: (event) => changed(Number(event.target.value)) }, runs.map((run, place) => element("option", { value: place }, run.name)));
}

function timeCards(runs) {
  const cards = [];
  const withParts = runs.filter((run) => run.phases.steps.length);
  if (!withParts.length) return cards;
  const bars = element("div", { class: "plot tall", id: "phase-bars" });
  let chosen = withParts[0], isShare = false;
  const share = element("button", { onclick: () => { isShare = !isShare; share.classList.toggle("on", isShare); draw(); } }, "share of the step");
  const draw = () => {
    const sums = chosen.phases.steps.map((_, index) => Object.values(chosen.phases.parts).reduce((sum, values) => sum + values[index], 0) || 1);
    const traces = Object.entries(PARTS).filter(([name]) => chosen.phases.parts[name]).map(([name, color]) => ({
      x: chosen.phases.steps, y: isShare ? chosen.phases.parts[name].map((value, index) => value / sums[index]) : chosen.phases.parts[name], name, type: "bar",
      marker: { color, line: { width: 0 } }, hovertemplate: isShare ? "%{y:.1%}" : "%{y:.3~g} s" }));
    Plotly.react(bars, traces, baseLayout({ barmode: "stack", bargap: 0.05, yaxis: { title: { text: isShare ? "share" : "seconds", font: { size: 11 } }, tickformat: isShare ? ".0%" : "" },
      xaxis: { title: { text: "training step", font: { size: 11 } } } }), CONFIG);
  };
  redraws.push(draw);
  cards.push(element("div", { class: "card wide" }, [
    element("div", { class: "controls" }, [element("h3", {}, "seconds of each training step, by what the driver waited for"), runPicker(withParts, (place) => { chosen = withParts[place]; draw(); }), share]), bars,
    element("p", { class: "soft small" }, "generation and rewards as the slowest rank measured them; collecting: the rest of the wait for samples. other: what nothing accounts for, such as callbacks."),
  ]));
  const withStrips = runs.filter((run) => run.strips.length);
  if (withStrips.length) cards.push(stripCard(withStrips));
  return cards;
}

// One step over time: a lane for the driver, and one for each rank.
function stripCard(runs) {
  let run = runs[0];
  const plot = element("div", { class: "plot", id: "strip" });
  const steps = element("select", { id: "strip-step", "aria-label": "step", onchange: () => draw() });
  const fill = () => { steps.replaceChildren(...run.strips.map((strip, place) => element("option", { value: place }, `step ${strip.step}`))); steps.value = String(Math.min(run.strips.length - 1, Math.floor(run.strips.length / 2))); };
  const draw = () => {
    const strip = run.strips[Number(steps.value)];
    const lanes = [["driver", strip.driver], ...strip.ranks.map((spans, rank) => [`rank ${rank}`, spans])];
    const byName = new Map();
    for (const [lane, spans] of lanes) for (const [name, start, length] of spans) {
      if (!byName.has(name)) byName.set(name, { base: [], x: [], y: [] });
      const found = byName.get(name);
      found.base.push(start); found.x.push(Math.max(length, strip.seconds / 2000)); found.y.push(lane);
    }
    const traces = [...byName].map(([name, found]) => ({ ...found, name: escaped(name), type: "bar", orientation: "h", width: 0.72, marker: { color: PHASES[name] || PARTS[name] || "#9aa0a8", line: { width: 0 } },
      customdata: found.x, hovertemplate: "%{customdata:.4~g} s from %{base:.4~g} s" }));
    plot.style.height = `${150 + 30 * lanes.length}px`;
    Plotly.react(plot, traces, baseLayout({ barmode: "overlay", hovermode: "closest", yaxis: { autorange: "reversed", type: "category", categoryorder: "array", categoryarray: lanes.map((lane) => lane[0]) },
      xaxis: { title: { text: "seconds since the start of the step", font: { size: 11 } }, range: [0, strip.seconds] } }), CONFIG);
  };
  fill();
  redraws.push(draw);
  return element("div", { class: "card wide" }, [
    element("div", { class: "controls" }, [element("h3", {}, "one step"), runPicker(runs, (place) => { run = runs[place]; fill(); draw(); }), steps]), plot,
    element("p", { class: "soft small" }, "Ranks by the clocks of their hosts. A lane is empty where a rank waits."),
  ]);
}

function memoryCards(runs) {
  const cards = [];
  const tagsOf = (run) => Object.keys(run.curves.metrics).filter((name) => /^memory\/.*_bytes$/.test(name));
  const withMemory = runs.filter((run) => tagsOf(run).length);
  if (withMemory.length) {
    let run = withMemory[0];
    const plot = element("div", { class: "plot" });
    const draw = () => {
      const whole = ["memory/process_bytes", "memory/available_bytes", "memory/device_bytes", "memory/arena_bytes"];
      const tags = tagsOf(run).filter((name) => !whole.includes(name) && run.curves.metrics[name][1].some((value) => value > 0));
      const traces = tags.map((name, number) => ({ x: run.curves.axes[run.curves.metrics[name][0]], y: run.curves.metrics[name][1], name: escaped(name.slice(7, -6)), stackgroup: "bytes", type: "scatter",
        mode: "lines", line: { width: 0.5, color: COLORS[number % COLORS.length] }, hovertemplate: "%{y:.4~s}B" }));
      Plotly.react(plot, traces, baseLayout({ yaxis: { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" }, xaxis: { title: { text: "training step", font: { size: 11 } } } }), CONFIG);
    };
    redraws.push(draw);
    cards.push(element("div", { class: "card" }, [element("div", { class: "controls" }, [element("h3", {}, "in memory after each step, by resident"), runPicker(withMemory, (place) => { run = withMemory[place]; draw(); })]),
      element("p", { class: "soft small", style: "margin:0" }, "Of the rank with the most; what sleeps in host memory counts as 0."), plot]));
  }
  const withPhases = runs.filter((run) => run.memory.moments);
  if (withPhases.length) {
    let run = withPhases[0];
    const plot = element("div", { class: "plot", id: "memory-phases" });
    const title = element("h3");
    const draw = () => {
      const memory = run.memory;
      title.textContent = `over step ${memory.step}, rank 0, by resident and phase`;
      const traces = Object.entries(memory.bytes).map(([name, y], number) => ({ x: memory.moments, y, name: escaped(name), stackgroup: "bytes", type: "scatter", mode: "lines",
        line: { width: 0.5, shape: "hv", color: COLORS[number % COLORS.length] }, hovertemplate: "%{y:.4~s}B" }));
      for (const [label, points] of Object.entries(memory.lines || {})) traces.push({ x: points.map((point) => point[0]), y: points.map((point) => point[1]), name: escaped(label), type: "scatter",
        mode: "lines", line: { width: 1.4, dash: "dash", color: css("--text") }, hovertemplate: "%{y:.4~s}B" });
      const shapes = memory.phases.map(([name, start, end]) => ({ type: "rect", yref: "paper", y0: 0, y1: 0.04, x0: start, x1: end, fillcolor: PHASES[name] || "#9aa0a8", line: { width: 0 } }));
      const last = memory.moments[memory.moments.length - 1] || 1;
      const annotations = memory.phases.filter(([, start, end]) => end - start > 0.06 * last).map(([name, start, end]) => ({ x: (start + end) / 2, yref: "paper", y: 0.05, yanchor: "bottom", text: escaped(name), showarrow: false, font: { size: 10 } }));
      Plotly.react(plot, traces, baseLayout({ shapes, annotations, yaxis: { tickformat: "~s", ticksuffix: "B", rangemode: "tozero" }, xaxis: { title: { text: "seconds", font: { size: 11 } } } }), CONFIG);
    };
    redraws.push(draw);
    cards.push(element("div", { class: "card" }, [element("div", { class: "controls" }, [title, runPicker(withPhases, (place) => { run = withPhases[place]; draw(); })]),
      element("p", { class: "soft small", style: "margin:0" }, "The bar at the bottom tells the phase."), plot]));
  }
  return cards;
}
