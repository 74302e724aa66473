// Curves of metrics, with the ranges that they are read by.

const view = { smoothing: 0, axis: "steps", hidden: new Set() };
const redraws = [];

function redrawAll() { for (const draw of redraws) draw(); }

// An exponential moving average that begins at the first value instead of 0.
function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0;
  return values.map((value) => { sum = weight * sum + (1 - weight) * value; norm = weight * norm + (1 - weight); return sum / norm; });
}

// Places of steps on the chosen axis.
function onAxis(run, steps) {
  if (view.axis === "steps") return steps;
  const clock = run.clock, places = clock[view.axis];
  let at = 0;
  return steps.map((step) => {
    while (at + 1 < clock.steps.length && clock.steps[at] < step) at += 1;
    return places[at] ?? step;
  });
}

function baseLayout(extra = {}) {
  const text = css("--text"), line = css("--line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { size: 11 }, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    margin: { l: 46, r: 12, t: 6, b: 34 }, showlegend: true, hovermode: "x unified", hoverlabel: { bgcolor: css("--card"), font: { color: text, size: 11 } },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
    ...extra, xaxis: { ...axis, ...(extra.xaxis || {}) }, yaxis: { ...axis, ...(extra.yaxis || {}) },
  };
}

const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };
// Plotly would put a tick between two steps where there are few.
function xAxis(traces) {
  const ends = traces.filter((trace) => trace.x.length).flatMap((trace) => [trace.x[0], trace.x[trace.x.length - 1]]);
  const span = ends.length ? Math.max(...ends) - Math.min(...ends) : 0;
  return { title: { text: AXES[view.axis], font: { size: 11 } }, ...(view.axis === "steps" && span < 8 ? { tick0: 0, dtick: 1 } : {}) };
}

const AXES = { steps: "training step", hours: "hours of training", tokens: "tokens" };

function withAlpha(color, alpha) {
  const number = parseInt(color.slice(1), 16);
  return `rgba(${number >> 16}, ${(number >> 8) & 255}, ${number & 255}, ${alpha})`;
}

// The curves of a chart: one colour per run, or, with a single run, per metric.
function tracesOf(chart, runs) {
  const traces = [];
  runs.forEach((run, place) => {
    if (view.hidden.has(place)) return;
    chart.metrics.forEach((metric, number) => {
      const found = run.curves.metrics[metric];
      if (!found) return;
      const steps = run.curves.axes[found[0]];
      // A log axis cannot show 0: exact agreement is left out.
      const kept = chart.log ? found[1].map((value, index) => [index, value]).filter((pair) => pair[1] > 0) : found[1].map((value, index) => [index, value]);
      const x = onAxis(run, kept.map((pair) => steps[pair[0]])), y = kept.map((pair) => pair[1]);
      const color = runs.length > 1 ? runColor(place) : COLORS[number % COLORS.length];
      const name = runs.length > 1 ? (chart.metrics.length > 1 ? `${run.name}: ${metric}` : run.name) : metric;
      const dash = runs.length > 1 ? ["solid", "dot", "dash", "dashdot"][number % 4] : "solid";
      const few = y.length < 25, isSmoothed = view.smoothing > 0 && !few;
      const low = run.curves.metrics[`${metric}_low`], high = run.curves.metrics[`${metric}_high`];
      if (low && high && !chart.log && !isSmoothed) {  // a band for its interval
        const band = { type: "scatter", mode: "lines", line: { width: 0 }, showlegend: false, hoverinfo: "skip", name };
        traces.push({ ...band, x: onAxis(run, run.curves.axes[high[0]]), y: high[1] },
          { ...band, x: onAxis(run, run.curves.axes[low[0]]), y: low[1], fill: "tonexty", fillcolor: withAlpha(color, 0.13) });
      }
      if (isSmoothed) traces.push({ x, y, name, type: "scatter", mode: "lines", line: { color: withAlpha(color, 0.25), width: 1 }, showlegend: false, hoverinfo: "skip" });
      traces.push({ x, y: isSmoothed ? smoothed(y, view.smoothing) : y, name, type: "scatter", mode: few ? "lines+markers" : "lines",
        line: { color, width: 1.8, dash }, marker: { size: 5, color }, hovertemplate: "%{y:.4~g}" });
    });
  });
  return traces;
}

// Ranges and limits as shapes and notes. A limit far from all curves is told in words only, so that it does not flatten them.
function guidesOf(chart, traces) {
  const values = traces.flatMap((trace) => trace.y).filter((value) => Number.isFinite(value));
  const highest = Math.max(...values), lowest = Math.min(...values);
  const shapes = [], annotations = [], told = [];
  let range = null;
  for (const guide of chart.guides) {
    const far = !chart.log && ((guide.high !== null && guide.high > 4 * Math.max(highest, 0)) || (guide.low !== null && guide.low < lowest - 4 * (highest - lowest + 1)));
    if (far) { told.push(guide.says); continue; }
    const good = guide.kind === "healthy";
    const color = good ? `rgb(${css("--good")})` : guide.kind === "limit" ? `rgb(${css("--bad")})` : css("--soft");
    if (good) {
      const low = guide.low ?? (chart.log ? Math.min(lowest, guide.high / 10) / 2 : Math.min(lowest, 0));
      shapes.push({ type: "rect", xref: "paper", x0: 0, x1: 1, y0: low, y1: guide.high, fillcolor: `rgba(${css("--good")}, 0.10)`, line: { width: 0 }, layer: "below" });
    } else {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: guide.high, y1: guide.high, line: { color, width: 1.3, dash: "dash" } });
    }
    annotations.push({ xref: "paper", x: 1, xanchor: "right", y: chart.log ? Math.log10(guide.high) : guide.high, yanchor: good ? "top" : "bottom",
      text: escaped(guide.says), showarrow: false, font: { size: 10, color }, bgcolor: css("--card"), borderpad: 1 });  // readable over a curve
    range = [Math.min(range ? range[0] : lowest, guide.low ?? guide.high), Math.max(range ? range[1] : highest, guide.high)];
  }
  return { shapes, annotations, told, range: range && [Math.min(range[0], lowest), Math.max(range[1], highest)] };
}

// Plotly reads some HTML in its texts.
function escaped(text) { return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); }

function chartCard(chart, runs) {
  const plot = element("div", { class: "plot" });
  const far = element("p", { class: "soft small" });
  const card = element("div", { class: "card", "data-chart": chart.title }, [
    element("h3", {}, chart.title), chart.about ? element("p", { class: "soft small", style: "margin:0" }, chart.about) : null, plot, far,
  ]);
  redraws.push(() => {
    const traces = tracesOf(chart, runs);
    for (const trace of traces) trace.name = escaped(trace.name);
    const guides = guidesOf(chart, traces);
    far.textContent = guides.told.length ? `Not drawn, because it is far from these values: ${guides.told.join("; ")}.` : "";
    const yaxis = chart.log ? { type: "log", exponentformat: "e" } : {};
    if (chart.unit) yaxis.title = { text: chart.unit, font: { size: 11 } };
    if (guides.range && traces.length) {
      const [low, high] = guides.range;
      yaxis.range = chart.log ? [Math.log10(low) - 0.4, Math.log10(high) + 0.6] : [low - 0.06 * (high - low), high + 0.12 * (high - low)];
    }
    const values = traces.flatMap((trace) => trace.y);
    if (!chart.log && !yaxis.range && values.length && values.every((value) => value === 0)) yaxis.range = [-0.05, 1];
    Plotly.react(plot, traces, baseLayout({ shapes: guides.shapes, annotations: guides.annotations, yaxis,
      xaxis: xAxis(traces), showlegend: traces.length > 1 || runs.length > 1 }), CONFIG);
  });
  return card;
}

// Any metric by its name.
function anyMetricCard(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.metrics)))].sort();
  if (!names.length) return null;
  const select = element("select", { id: "any-metric", "aria-label": "metric" }, names.map((name) => element("option", { value: name }, name)));
  const log = element("input", { type: "checkbox" });
  const plot = element("div", { class: "plot" });
  const draw = () => {
    const traces = tracesOf({ metrics: [select.value], log: log.checked }, runs);
    for (const trace of traces) trace.name = escaped(trace.name);
    Plotly.react(plot, traces, baseLayout({ yaxis: { type: log.checked ? "log" : "linear" }, xaxis: xAxis(traces) }), CONFIG);
  };
  select.addEventListener("change", draw);
  log.addEventListener("change", draw);
  redraws.push(draw);
  return element("div", { class: "card wide" }, [
    element("div", { class: "controls" }, [element("h3", {}, `any of ${names.length} metrics`), select, element("label", {}, [log, " log axis"])]), plot,
  ]);
}
