// The table of samples: searched, filtered, sorted, and opened one at a time.

const PAGE = 25;
const table = { rows: [], found: [], page: 0, sort: null, isDown: true, open: null };

function promptText(prompt) {
  if (!Array.isArray(prompt)) return asText(prompt);
  return prompt.map((message) => asText(message && typeof message === "object" ? message.content : message)).join("\n");
}

function sampleColumns(data) {
  const functions = [...new Set(data.samples.flatMap((row) => Object.keys(row.rewards || {})))].slice(0, 5);
  const sets = data.samples.some((row) => row.kind === "eval");
  return [
    data.runs.length > 1 ? { title: "run", text: (row) => data.runs[row.run].name } : null,
    sets ? { title: "set", text: (row) => (row.kind === "eval" ? asText(row.set || "eval") : "training") } : null,
    { title: "step", number: (row) => row.step }, { title: "group", number: (row) => row.group },
    { title: "prompt", text: (row) => promptText(row.prompt), long: true },
    { title: "completion", text: (row) => asText(row.completion), long: true },
    { title: "reward", number: (row) => row.reward },
    ...(functions.length > 1 ? functions.map((name) => ({ title: name, number: (row) => row.rewards?.[name] })) : []),
    data.samples.some((row) => Number.isFinite(row.advantage)) ? { title: "advantage", number: (row) => row.advantage } : null,
    { title: "end", text: (row) => asText(row.finish_reason) },
    data.samples.some((row) => row.token_values) ? { title: "tokens", text: (row) => (row.token_values ? "coloured" : "") } : null,
  ].filter(Boolean);
}

function samplesSection(data) {
  const columns = sampleColumns(data);
  table.rows = data.samples.map((row) => ({ row, search: `${promptText(row.prompt)}\n${asText(row.completion)}\n${asText(row.row)}\n${asText(row.extra)}`.toLowerCase() }));
  const search = element("input", { type: "search", id: "search", placeholder: "search prompts, completions, answers" });
  const options = (label, id, values) => element("select", { id, "aria-label": label }, [element("option", { value: "" }, label), ...values.map((value) => element("option", { value: String(value) }, String(value)))]);
  const steps = [...new Set(data.samples.map((row) => row.step))].sort((a, b) => a - b);
  const step = options("every step", "step", steps);
  const run = data.runs.length > 1 ? element("select", { id: "run" }, [element("option", { value: "" }, "every run"), ...data.runs.map((one, place) => element("option", { value: place }, one.name))]) : null;
  const setOf = (row) => (row.kind === "eval" ? asText(row.set || "eval") : "training");
  const sets = [...new Set(data.samples.map(setOf))];
  const set = sets.length > 1 ? options("training and evaluation", "set", sets) : null;
  const end = options("every end", "end", [...new Set(data.samples.map((row) => asText(row.finish_reason)))].sort());
  const low = element("input", { type: "number", id: "reward-from", step: "any", placeholder: "from" });
  const high = element("input", { type: "number", id: "reward-to", step: "any", placeholder: "to" });
  const colored = element("input", { type: "checkbox", id: "coloured" });
  const count = element("span", { id: "count", class: "soft" });
  const head = element("tr"), body = element("tbody"), detail = element("div", { class: "detail", id: "detail" });
  const before = element("button", { onclick: () => turn(-1) }, "previous"), after = element("button", { onclick: () => turn(1) }, "next");

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const [least, most] = [low.value === "" ? -Infinity : Number(low.value), high.value === "" ? Infinity : Number(high.value)];
    const isBounded = low.value !== "" || high.value !== "";
    table.found = table.rows.filter(({ row, search: text }) =>
      words.every((word) => text.includes(word)) && (step.value === "" || String(row.step) === step.value) && (!run || run.value === "" || row.run === Number(run.value)) &&
      (!set || set.value === "" || setOf(row) === set.value) && (end.value === "" || asText(row.finish_reason) === end.value) && (!colored.checked || row.token_values) &&
      (!isBounded || (Number.isFinite(row.reward) && row.reward >= least && row.reward <= most)));
    const column = table.sort;
    if (column) {
      const value = ({ row }) => (column.number ? column.number(row) : column.text(row));
      const isMissing = (one) => one === null || one === undefined || one === "" || Number.isNaN(one);
      table.found.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);  // what has no value comes last
        return (column.number ? x - y : x.localeCompare(y)) * (table.isDown ? -1 : 1);
      });
    }
    table.page = 0;
    show();
  };
  const turn = (by) => { table.page += by; show(); };
  const show = () => {
    const pages = Math.max(Math.ceil(table.found.length / PAGE), 1);
    count.textContent = `${table.found.length.toLocaleString("en-US")} of ${table.rows.length.toLocaleString("en-US")} samples, page ${table.page + 1} of ${pages}`;
    before.disabled = table.page === 0;
    after.disabled = table.page + 1 >= pages;
    head.replaceChildren(...columns.map((column) => element("th", { class: column.number ? "number" : null, "data-column": column.title, onclick: () => {
      table.isDown = table.sort === column ? !table.isDown : Boolean(column.number);
      table.sort = column;
      filter();
    } }, `${column.title}${table.sort === column ? (table.isDown ? " \u25be" : " \u25b4") : ""}`)));
    body.replaceChildren(...table.found.slice(table.page * PAGE, (table.page + 1) * PAGE).map(({ row }) =>
      element("tr", { class: row === table.open ? "open" : null, onclick: () => open(row) }, columns.map((column) =>
        element("td", { class: column.number ? "number" : column.long ? "text" : null }, column.number ? shownNumber(column.number(row)) : column.text(row).slice(0, 160))))));
  };
  const open = (row) => { table.open = row; show(); detail.replaceChildren(sampleDetail(row, data, open)); };
  for (const control of [search, low, high]) control.addEventListener("input", filter);
  for (const control of [step, run, set, end, colored]) control?.addEventListener("change", filter);
  filter();
  const first = data.samples.find((row) => row.token_values && row.token_values.advantage?.some((value) => value)) || data.samples.find((row) => row.token_values) || data.samples[0];
  if (first) open(first);
  return [
    data.notes.length ? element("div", { class: "notes small" }, data.notes.map((note) => element("p", {}, note))) : null,
    element("div", { class: "controls" }, [search, run, set, step, end, element("label", {}, ["reward ", low, " ", high]), element("label", {}, [colored, " with token values"])]),
    element("div", { class: "scroll" }, element("table", { id: "samples" }, [element("thead", {}, head), body])),
    element("div", { class: "controls", style: "margin-top:8px" }, [before, after, count]), detail,
  ];
}

function messageBox(role, text, note = "") {
  return element("div", { class: `message ${["assistant", "policy"].includes(role) ? role : ""}` }, [
    element("div", { class: "role" }, [element("span", {}, role), element("span", {}, note)]), element("div", { class: "said" }, text)]);
}

function messageBoxes(messages) {
  return messages.map((message) => {
    if (!message || typeof message !== "object") return messageBox("", asText(message));
    const calls = (message.tool_calls || []).map((call) => { const made = call?.function || call || {}; return `\n\u2192 ${asText(made.name)}(${asText(made.arguments)})`; });
    const content = Array.isArray(message.content) ? message.content.map((block) => asText(block?.text ?? block)).join("") : asText(message.content);
    return messageBox(asText(message.role), content + (Array.isArray(calls) ? calls.join("") : ""));
  });
}

function sampleDetail(row, data, open) {
  const conversation = [...(Array.isArray(row.prompt) ? messageBoxes(row.prompt) : [messageBox("prompt", asText(row.prompt))])];
  if (Array.isArray(row.messages)) conversation.push(...messageBoxes(row.messages));
  else if (Array.isArray(row.tokens) && row.tokens.length > 1) conversation.push(...row.tokens.map((span) => messageBox(asText(span.origin), asText(span.text), Number.isFinite(span.reward) ? `reward ${shownNumber(span.reward)}` : "")));
  else conversation.push(messageBox("assistant", asText(row.completion), Number.isFinite(row.reward) ? `reward ${shownNumber(row.reward)}` : "no reward"));
  if (row.error) conversation.push(element("p", { class: "error" }, `ended by an error: ${asText(row.error)}`));
  const facts = [["step", row.step], ["group", row.group], ["trajectory", row.trajectory], row.turn ? ["turn", row.turn] : null, ["reward", row.reward ?? "none"],
    ...Object.entries(row.rewards || {}).map(([name, value]) => [name, value ?? "none"]), Number.isFinite(row.advantage) ? ["advantage", row.advantage] : null, ["end", row.finish_reason],
    ...Object.entries(row.row || {}), ...Object.entries(row.extra || {})].filter(Boolean);
  const side = [element("h3", {}, "facts"), element("dl", {}, facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, typeof value === "number" ? shownNumber(value) : asText(value))]))];
  const mates = table.rows.map((one) => one.row).filter((one) => one.run === row.run && one.kind === row.kind && one.set === row.set && one.step === row.step && one.group === row.group);
  if (mates.length > 1) side.push(element("h3", { style: "margin-top:12px" }, "its group"), element("div", { class: "controls" }, mates.map((mate, place) =>
    element("button", { class: mate === row ? "on" : null, onclick: () => open(mate) }, `${place + 1}: ${mate.reward === null ? "none" : shownNumber(mate.reward)}`))));
  const tokens = row.token_values && Array.isArray(row.token_values.text) ? tokenView(row.token_values) : [element("p", { class: "soft small" }, "Values of single tokens are recorded for a few samples of each step; filter by \u201cwith token values\u201d.")];
  return element("div", { class: "card" }, element("div", { class: "columns" }, [element("div", {}, [...conversation, ...tokens]), element("div", {}, side)]));
}
