// A completion token by token, coloured by what engine and trainer said of it, or by what it taught.

const COLORINGS = {
  gap: { says: "|ln p engine - ln p trainer|", color: "--bad", of: (values, index) => difference(values.logprob, values.trainer_logprob, index, true), least: 1e-3 },
  advantage: { says: "advantage", color: null, of: (values, index) => values.advantage?.[index], least: 1e-6 },
  surprise: { says: "-ln p of the engine", color: "--warm", of: (values, index) => negative(values.logprob?.[index]), least: 1 },
  entropy: { says: "entropy, in nats", color: "--cool", of: (values, index) => values.entropy?.[index], least: 0.5 },
  reference: { says: "ln p trainer - ln p reference", color: null, of: (values, index) => difference(values.trainer_logprob, values.ref_logprob, index, false), least: 0.1 },
  value: { says: "value of the critic", color: null, of: (values, index) => values.value?.[index], least: 1e-6 },
};

function negative(value) { return value === null || value === undefined ? value : -value; }

function difference(ours, theirs, index, isSize) {
  const a = ours?.[index], b = theirs?.[index];
  if (a === null || b === null || a === undefined || b === undefined) return null;
  return isSize ? Math.abs(a - b) : a - b;
}

function colorings(values) {
  return Object.keys(COLORINGS).filter((name) => values.text.some((_, index) => Number.isFinite(COLORINGS[name].of(values, index))));
}

function background(coloring, value, scale) {
  if (!Number.isFinite(value)) return "";
  const strength = Math.min(Math.abs(value) / scale, 1) * 0.75;
  const color = coloring.color ? css(coloring.color) : css(value >= 0 ? "--good" : "--bad");
  return `background: rgba(${color}, ${strength.toFixed(3)})`;
}

const TOLD = [["logprob", "ln p engine"], ["trainer_logprob", "ln p trainer"], ["advantage", "advantage"], ["entropy", "entropy"], ["ref_logprob", "ln p reference"], ["value", "value"], ["reward", "reward"]];

function tokenView(values) {
  const names = colorings(values);
  const box = element("div", { class: "tokens" });
  const legend = element("div", { class: "legend small soft" });
  const buttons = names.map((name) => element("button", { "data-coloring": name, onclick: () => draw(name) }, name));
  const draw = (name) => {
    const coloring = COLORINGS[name];
    buttons.forEach((button) => button.classList.toggle("on", button.dataset.coloring === name));
    const numbers = coloring ? values.text.map((_, index) => coloring.of(values, index)) : [];
    const scale = coloring ? Math.max(coloring.least, ...numbers.filter(Number.isFinite).map(Math.abs)) : 1;
    box.replaceChildren(...values.text.map((text, index) => {
      const isPolicy = !values.policy || values.policy[index] === 1;
      const told = TOLD.filter(([key]) => Number.isFinite(values[key]?.[index])).map(([key, label]) => `${label} ${shownNumber(values[key][index])}`);
      const gap = difference(values.logprob, values.trainer_logprob, index, true);
      if (Number.isFinite(gap)) told.push(`gap ${shownNumber(gap)}`);
      const title = isPolicy ? `token ${index + 1}\n${told.join("\n")}` : `token ${index + 1}, not made by the policy`;
      return element("span", { class: isPolicy ? null : "other", title, style: isPolicy && coloring ? background(coloring, numbers[index], scale) : "" }, text.replaceAll("\n", "\u21b5\n") || "\u200b");
    }));
    if (!coloring) { legend.replaceChildren(); return; }
    const [from, to] = coloring.color ? ["transparent", `rgba(${css(coloring.color)}, .75)`] : [`rgba(${css("--bad")}, .75)`, `rgba(${css("--good")}, .75)`];
    const middle = coloring.color ? "" : "transparent, ";
    legend.replaceChildren(element("span", {}, `${coloring.says}:`), element("span", {}, coloring.color ? "0" : `-${shownNumber(scale)}`),
      element("i", { style: `background: linear-gradient(to right, ${from}, ${middle}${to}); border: 1px solid var(--line)` }), element("span", {}, shownNumber(scale)));
  };
  draw(names.includes("advantage") && values.advantage.some((value) => value) ? "advantage" : names.includes("surprise") ? "surprise" : names[0]);
  const shown = values.text.length;
  return [element("div", { class: "controls" }, [element("h3", {}, "tokens, coloured by"), ...buttons]), box, legend,
    values.num_tokens > shown ? element("p", { class: "soft small" }, `the first ${shown} of ${values.num_tokens} tokens`) : null];
}
