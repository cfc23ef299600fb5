// The reader of rollouts: a list by groups, and one response token by token.
"use strict";

const Reader = (() => {
  const SURPRISE = [0.01, 0.1, 0.3, 0.7, 1.2, 2, 3.5, 6];
  const LOG_RATIO = [0.02, 0.1, 0.2, 0.4, 0.7];
  const DIFFERENCE = [0.1, 0.3, 0.7, 1.5, 3];
  const ADVANTAGE = [0, 0.5, 1, 1.5, 2];
  const LEVELS = ["trained", "masked", "written by the environment", "no gradient, A = 0"];
  const EXITS = {
    stop: "stopped by itself", length: "truncated at the token limit", turns: "reached the turn limit",
    environment: "ended by an environment failure", abort: "aborted by the engine",
  };
  const COLORINGS = [
    ["logprob", "log-prob"], ["ratio", "ratio"], ["advantage", "advantage"],
    ["version", "weights version"], ["level", "loss mask"],
  ];
  const MAX_ROWS = 300;
  // On narrow screens the response is below the list (page.css).
  const NARROW = matchMedia("(max-width: 900px)");
  let runs = [], run = 0, chosen = null, coloring = "logprob", cursor = -1, sections = [], moveCursor = () => {};

  const current = () => runs[run];
  const groupOf = (sample) => current().groups[sample.group];
  const textOf = (sample) => sample.text ??= sample.pieces.map((n) => current().pieces[n][1]).join("");

  const KINDS = {
    all: () => true, right: (s) => s.right, wrong: (s) => !s.right, truncated: (s) => s.exit === "length",
  };

  function matches(sample, words) {
    const group = groupOf(sample), source = byId("pick-source").value;
    if (!KINDS[byId("pick-kind").value](sample) || (source && group.source !== source)) return false;
    const all = [group.prompt, group.answer, group.prompt_id, textOf(sample)].join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  }

  function powerOfTwo(tokens) {
    const low = 2 ** Math.floor(Math.log2(Math.max(1, tokens)));
    return [low, `${whole(low)} to ${whole(2 * low - 1)} tokens`];
  }

  // Order and heading of a sample's section, by grouping of the list.
  const GROUPINGS = {
    step: (s) => [groupOf(s).step, `Step ${whole(groupOf(s).step)}`],
    problem: (s) => [s.group, `${groupOf(s).prompt_id || "problem"} · step ${whole(groupOf(s).step)}`],
    reward: (s) => [s.reward, `Reward ${number(s.reward)}`],
    length: (s) => powerOfTwo(s.tokens),
    age: (s) => [s.age, `Oldest token ${whole(s.age)} updates old`],
    exit: (s) => [s.exit, EXITS[s.exit] || s.exit],
    source: (s) => [groupOf(s).source, `Data set ${groupOf(s).source || "without a name"}`],
  };
  const SORTS = {
    order: () => 0, low: (a, b) => a.reward - b.reward, high: (a, b) => b.reward - a.reward,
    long: (a, b) => b.tokens - a.tokens, old: (a, b) => b.age - a.age,
  };

  function signed(value) {
    return (value > 0 ? "+" : "") + number(value);
  }

  function list() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const fitting = current().samples.filter((sample) => matches(sample, words));
    fitting.sort(SORTS[byId("pick-sort").value]);
    byId("num-found").textContent = `${whole(fitting.length)} of ${whole(current().samples.length)}`;
    const byHeading = new Map();
    for (const sample of fitting) {
      const [order, heading] = GROUPINGS[byId("pick-group").value](sample);
      if (!byHeading.has(heading)) byHeading.set(heading, { order, heading, samples: [], rows: [] });
      byHeading.get(heading).samples.push(sample);
    }
    sections = [...byHeading.values()].sort((a, b) => (a.order < b.order ? -1 : a.order > b.order ? 1 : 0));
    const holder = sections.findIndex((section) => section.samples.includes(chosen));
    byId("list").replaceChildren(...sections.map((section, at) => sectionElement(section, at === Math.max(0, holder) || fitting.length <= 40)));
    if (!sections.length) {
      byId("list").replaceChildren(el("p", { class: "note" }, current().samples.length ? "No response matches." : "No rollouts."));
    }
  }

  function sectionElement(section, isOpen) {
    const total = section.samples.length;
    const mean = section.samples.reduce((sum, sample) => sum + sample.reward, 0) / total;
    const count = el("small"), more = button("", () => section.fill(section.rows.length + 1), { class: "link more" });
    const details = el("details", {}, el("summary", {}, section.heading, count), more);
    // Add pages of rows, up to the row with this number.
    section.fill = (wanted) => {
      const added = section.samples.slice(section.rows.length, Math.ceil(wanted / MAX_ROWS) * MAX_ROWS).map(rowElement);
      section.rows.push(...added);
      more.before(...added);
      const shown = section.rows.length;
      more.hidden = shown === total;
      more.textContent = `Show ${whole(Math.min(MAX_ROWS, total - shown))} more`;
      count.textContent = `${whole(total)}${0 < shown && shown < total ? `, ${whole(shown)} shown` : ""} · mean reward ${number(mean)}`;
    };
    section.details = details;
    section.fill(isOpen ? 1 : 0);
    details.open = isOpen;
    details.addEventListener("toggle", () => { if (!section.rows.length) section.fill(1); });
    return details;
  }

  // The part of a prompt that the run's other prompts do not share, as template and instructions.
  function ownPart(prompt) {
    const prompts = current().groups.map((group) => group.prompt ?? "");
    const reversed = (text) => [...text].reverse().join("");
    const shared = (texts) => texts.reduce((start, text) => {
      let length = 0;
      while (length < start.length && start[length] === text[length]) length += 1;
      return start.slice(0, length);
    }).replace(/[\p{L}\p{N}]+$/u, "").length;
    current().shared ??= [shared(prompts), shared(prompts.map(reversed))];
    const [start, end] = current().shared;
    return prompt.slice(start, prompt.length - end).trim() || prompt;
  }

  function rowElement(sample) {
    const line = (text) => text.trim().replace(/\s+/g, " ").slice(0, 120);
    const { prompt } = groupOf(sample);
    const row = button("", () => {
      open(sample);
      if (NARROW.matches) byId("rollout").scrollIntoView();
    }, { class: "row", title: "Read this response" });
    row.append(
      badge(sample), ...(prompt ? [el("span", { class: "what" }, line(ownPart(prompt)))] : []),
      el("span", { class: "what said" }, line(textOf(sample)) || "(empty)"),
      el("span", { class: "facts" }, `${verdict(sample)}${whole(sample.tokens)} tok · age ${whole(sample.age)}${sample.exit === "stop" ? "" : ` · ${sample.exit}`}`)
    );
    row.sample = sample;
    if (sample === chosen) row.setAttribute("aria-current", "true");
    return row;
  }

  // The extracted answer against the reference; graders may take other spellings for equal.
  function verdict(sample) {
    const reference = groupOf(sample).answer;
    if (!sample.extracted || !reference) return "";
    const short = (text) => (text.length > 24 ? `${text.slice(0, 23)}…` : text);
    if (sample.extracted === reference) return `${short(reference)} · `;
    return `${short(sample.extracted)} ${sample.reason.startsWith("equal") ? "=" : "≠"} ${short(reference)} · `;
  }

  function badge(sample) {
    const { mean } = groupOf(sample);
    const kind = sample.reward > mean ? "good" : sample.reward < mean ? "bad" : "even";
    return el("span", { class: `badge ${kind}` }, number(sample.reward));
  }

  function open(sample) {
    chosen = sample;
    cursor = -1;
    for (const row of document.querySelectorAll("#list .row")) {
      if (row.sample === sample) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
    history.replaceState(null, "", `#rollout=${run}.${current().samples.indexOf(sample)}`);
    const group = groupOf(sample);
    const siblings = current().samples.filter((other) => other.group === sample.group);
    const buttons = siblings.map((other) => {
      const sibling = button(badge(other), () => { open(other); reveal(other); }, { class: "sibling", title: `Response ${other.index} of this group` });
      if (other === sample) sibling.setAttribute("aria-current", "true");
      return sibling;
    });
    byId("rollout").replaceChildren(
      el("h3", {}, `Step ${whole(group.step)} · group ${whole(group.id)} · response ${sample.index}`),
      el("p", { class: "facts" }, [
        group.source && `set ${group.source}`, group.prompt_id, `${whole(sample.tokens)} tokens`,
        `oldest ${whole(sample.age)} updates`, EXITS[sample.exit] || sample.exit,
      ].filter(Boolean).join(" · ")),
      el("div", { class: "siblings", role: "group", "aria-label": "Responses of this group" }, "Group ", ...buttons),
      why(sample, group),
      el("details", {}, el("summary", {}, "Prompt"), el("pre", {}, group.prompt ?? "This run kept no text.")),
      response(sample)
    );
  }

  function why(sample, group) {
    const facts = [];
    const answer = sample.extracted === null && sample.answered ? "not recorded"
      : sample.extracted || (sample.answered ? "not extracted by the reward" : "none");
    facts.push(["extracted answer", answer]);
    if (sample.reason) facts.push(["grader", sample.reason.replaceAll("_", " ")]);
    if (group.answer !== null) facts.push(["reference", group.answer]);
    for (const [name, value] of Object.entries(sample.components)) facts.push([name, number(value)]);
    facts.push(["reward", number(sample.reward)], ["group mean", number(group.mean)]);
    facts.push(["advantage", sample.advantage === null ? "unknown: custom estimator" : signed(sample.advantage)]);
    return el("section", { class: "why" }, el("h4", {}, "Why this reward"), el("dl", {}, ...facts.map(
      ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))
    )));
  }

  function expanded(pairs) {
    return pairs.flatMap(([value, count]) => Array(count).fill(value));
  }

  function response(sample) {
    const { compared } = current();
    const has = { ratio: sample.ratios !== null, advantage: sample.advantage !== null, difference: compared !== null && compared[0] in sample.columns };
    const missing = {
      ratio: `This response has no ratios. ${current().ratios}`,
      advantage: "Custom estimators are not run, so advantages are unknown.",
      difference: "This response was not scored.",
    };
    if (has[coloring] === false) coloring = "logprob";
    const colorings = compared ? [...COLORINGS, ["difference", `${compared[1]} − policy`]] : COLORINGS;
    const buttons = colorings.map(([name, label]) => {
      const pick = button(label, () => { coloring = name; paint(); }, { "aria-pressed": String(name === coloring) });
      pick.disabled = has[name] === false;
      if (pick.disabled) pick.title = missing[name];
      pick.dataset.coloring = name;
      return pick;
    });
    const versions = expanded(sample.versions), levels = expanded(sample.levels);
    const tokens = el("div", { class: "tokens", tabindex: "0", role: "document", "aria-label": "Response; arrow keys move from token to token" });
    const spans = sample.pieces.map((piece, at) => {
      const span = el("span", {}, current().pieces[piece][1]);
      span.at = at;
      return span;
    });
    const parts = partsOf(spans.map((span) => span.textContent), levels);
    const left = sample.tokens - sample.pieces.length;
    const positionOf = (at) => at + (at >= sample.cut_at ? left : 0);
    spans.forEach((span, at) => {
      if (at === sample.cut_at) tokens.append(el("em", { class: "cut" }, ` … ${whole(left)} tokens omitted … `));
      const begun = sample.starts?.indexOf(positionOf(at)) ?? -1;
      if (begun >= 0) tokens.append(el("em", { class: "cut" }, ` sequence ${begun + 2} `));
      const part = parts.find(({ start, end }) => start <= at && at < end);
      if (part?.start === at) tokens.append(el("span", { class: part.kind }));
      (part ? tokens.querySelector(":scope > span:last-of-type") : tokens).append(span);
      if (part?.code && part.end === at + 1) tokens.append(el("pre", { class: "code" }, part.code));
    });
    const readout = el("p", { class: "readout", role: "status" }, "Point at a token, or use the arrow keys.");
    const scale = el("div", { class: "scale" });

    function paint() {
      for (const pick of buttons) pick.setAttribute("aria-pressed", String(pick.dataset.coloring === coloring));
      const known = [...new Set(versions)].filter((version) => version >= 0);
      spans.forEach((span, at) => { span.className = shade(sample, at, versions, levels, known); });
      scale.replaceChildren(...legend(sample, versions, levels, known));
    }

    function point(at) {
      if (cursor >= 0) spans[cursor]?.removeAttribute("id");
      cursor = Math.max(0, Math.min(spans.length - 1, at));
      spans[cursor].id = "cursor";
      const [id, text] = current().pieces[sample.pieces[cursor]];
      const logprob = sample.logprobs[cursor], ratio = sample.ratios?.[cursor] ?? null;
      const columns = Object.entries(current().columns).map(([name, label]) => [label, sample.columns[name]?.[cursor] ?? null]);
      readout.textContent = [
        `token ${whole(positionOf(cursor) + 1)}`, `${JSON.stringify(text)} (id ${id})`, LEVELS[levels[cursor]],
        logprob === null ? "" : `log-prob ${number(logprob)} (p ${number(100 * Math.exp(logprob))}%)`,
        ...columns.map(([label, value]) => (value === null ? "" : `${label} ${number(value)}`)),
        ratio === null ? "" : `ratio ${number(ratio, 4)}`,
        versions[cursor] < 0 ? "" : `version ${versions[cursor]}, ${groupOf(sample).version - versions[cursor]} updates old`,
      ].filter(Boolean).join(" · ");
    }

    tokens.addEventListener("mouseover", (event) => { if (event.target.at !== undefined) point(event.target.at); });
    moveCursor = (by) => {
      if (!spans.length) return;
      point(cursor + by);
      spans[cursor].scrollIntoView({ block: "nearest", behavior: "instant" });
    };
    paint();
    const heading = el("div", { class: "bar" }, el("h4", {}, "Response"), el("div", { class: "segments", role: "group", "aria-label": "Colour of tokens" }, ...buttons));
    const plain = current().has_texts ? [] : [
      el("p", { class: "note" }, "Tokens are shown as ids: the run's tokenizer was not found; give --tokenizer."),
      ...(sample.text ? [el("pre", {}, sample.text)] : []),
    ];
    return el("section", {}, heading, scale, ...plain, tokens, readout);
  }

  const quantum = (value, limits) => limits.filter((limit) => value > limit).length;

  /* Tokens that stand apart: outputs that an environment wrote, and tool calls of the policy with
     their code. */
  function partsOf(texts, levels) {
    const parts = [];
    for (let start = 0, end; start < texts.length; start = end) {
      const isWritten = levels[start] === 2;
      for (end = start; end < texts.length && (levels[end] === 2) === isWritten; end += 1);
      if (isWritten) parts.push({ kind: "output", start, end });
      else parts.push(...callsIn(texts.slice(start, end)).map((call) => ({ ...call, start: start + call.start, end: start + call.end })));
    }
    return parts;
  }

  function callsIn(texts) {
    const ends = [];
    texts.reduce((length, text) => ends[ends.push(length + text.length) - 1], 0);
    const at = (place) => ends.findIndex((end) => end > place);
    const calls = /<tool_call>([^]*?)(?:<\/tool_call>|$)|<\|python_tag\|>([^]*)$/g;
    return [...texts.join("").matchAll(calls)].map((match) => ({
      kind: "call", start: at(match.index), end: at(match.index + match[0].length - 1) + 1,
      code: codeOf(match[1] ?? match[2]),
    }));
  }

  function codeOf(call) {
    try {
      const { arguments: given, parameters } = JSON.parse(call.replace(/<\|\w+\|>\s*$/, ""));
      const code = (given ?? parameters).code;
      return typeof code === "string" ? code : "";
    } catch {
      return "";  // the policy reads what is wrong with it
    }
  }

  function shade(sample, at, versions, levels, known) {
    const level = levels[at];
    if (coloring === "level") return `m${level}`;
    if (level === 2) return "m2";
    if (coloring === "version") return `v${known.indexOf(versions[at]) % 8}`;
    if (coloring === "advantage") {
      if (level !== 0) return "m1";
      return signClass(sample.advantage, quantum(Math.abs(sample.advantage), ADVANTAGE));
    }
    if (coloring === "ratio") {
      const ratio = sample.ratios[at];
      return ratio === null ? "" : signClass(Math.log(ratio), quantum(Math.abs(Math.log(ratio)), LOG_RATIO));
    }
    if (coloring === "difference") {
      const [scored, logprob] = [sample.columns[current().compared[0]][at], sample.logprobs[at]];
      return scored === null || logprob === null ? "" : signClass(scored - logprob, quantum(Math.abs(scored - logprob), DIFFERENCE));
    }
    return sample.logprobs[at] === null ? "" : `s${quantum(-sample.logprobs[at], SURPRISE)}`;
  }

  function signClass(value, strength) {
    return strength === 0 ? "" : `${value > 0 ? "p" : "n"}${strength}`;
  }

  function legend(sample, versions, levels, known) {
    const item = (kind, label) => el("span", {}, el("i", { class: kind }), label);
    if (coloring === "logprob") {
      const shown = [0, 2, 4, 6, 8];
      return [el("span", {}, "probability"), ...shown.map((at) => item(`s${at}`, at === 0 ? "≈ 1" : `< ${number(Math.exp(-SURPRISE[at - 1]), 2)}`))];
    }
    if (coloring === "difference") {
      return [el("span", {}, "difference of log-probs, nats")].concat(
        [5, 3, 1].map((at) => item(`n${at}`, `< −${DIFFERENCE[at - 1]}`)),
        item("", "0"), [1, 3, 5].map((at) => item(`p${at}`, `> ${DIFFERENCE[at - 1]}`))
      );
    }
    if (coloring === "ratio") {
      return [5, 3, 1].map((at) => item(`n${at}`, `< ${number(Math.exp(-LOG_RATIO[at - 1]), 2)}`))
        .concat(item("", "1"), [1, 3, 5].map((at) => item(`p${at}`, `> ${number(Math.exp(LOG_RATIO[at - 1]), 3)}`)));
    }
    if (coloring === "advantage") return [item(signClass(sample.advantage, quantum(Math.abs(sample.advantage), ADVANTAGE)), `${signed(sample.advantage)} for every trained token`)];
    if (coloring === "version") {
      return known.map((version, at) => {
        const count = versions.filter((other) => other === version).length;
        return item(`v${at % 8}`, `version ${version}: ${whole(count)} tokens, ${groupOf(sample).version - version} updates old`);
      });
    }
    return LEVELS.map((label, level) => [label, level, levels.filter((other) => other === level).length])
      .filter(([, , count]) => count).map(([label, level, count]) => item(`m${level}`, `${label} (${whole(count)})`));
  }

  // Focus the row of a response, wherever in the list it is.
  function reveal(sample) {
    const section = sections.find((other) => other.samples.includes(sample));
    if (!section) return;
    const at = section.samples.indexOf(sample), frame = byId("list");
    section.details.open = true;
    if (at >= section.rows.length) section.fill(at + 1);
    section.rows[at].focus({ preventScroll: true });
    const [row, box] = [section.rows[at], frame].map((other) => other.getBoundingClientRect());
    const heading = section.details.firstChild.offsetHeight;
    if (row.top < box.top + heading) frame.scrollTop += row.top - box.top - heading;
    const bottom = Math.min(box.bottom, innerHeight);
    if (row.bottom > bottom) frame.scrollTop += row.bottom - bottom;
  }

  function isInView(element) {
    const { top } = element.getBoundingClientRect();
    return top >= 0 && top < innerHeight / 2;
  }

  function step(by) {
    const order = sections.flatMap((section) => section.samples);
    const next = order[order.indexOf(chosen) + by];
    if (!next) return;
    open(next);
    if (!isInView(byId("rollout"))) (NARROW.matches ? byId("rollout") : byId("list").parentElement).scrollIntoView({ behavior: "instant" });
    reveal(next);
  }

  function keys(event) {
    if (event.target.id === "search" && event.key === "Escape") { event.preventDefault(); event.target.blur(); }
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const isReading = chosen && (event.target.closest("#rollouts") || (event.target === document.body && isInView(byId("rollout"))));
    if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
    else if (move && isReading) { event.preventDefault(); moveCursor(move); }
  }

  function notes() {
    byId("rollout-note").textContent = [
      current().note, current().samples.length ? current().ratios : "", "Keys: j and k open the next and the previous response, ← and → move through its tokens, / searches, Esc leaves the search.",
    ].filter(Boolean).join(" ");
  }

  function listen() {
    let timer;
    byId("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(list, 120); });
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    for (const id of ["pick-group", "pick-sort", "pick-kind", "pick-source"]) byId(id).addEventListener("change", list);
    byId("pick-run").addEventListener("change", (event) => { pick(Number(event.target.value)); });
    document.addEventListener("keydown", keys);
  }

  function pick(index) {
    run = index;
    byId("pick-run").value = String(run);
    chosen = null;
    const sources = [...new Set(current().groups.map((group) => group.source))].sort();
    const source = byId("pick-source").value;
    byId("pick-source").replaceChildren(el("option", { value: "" }, "all"), ...sources.filter(Boolean).map((name) => el("option", {}, name)));
    byId("pick-source").value = sources.includes(source) ? source : "";
    byId("pick-source").parentElement.hidden = sources.length < 2;
    notes();
    list();
    byId("rollout").replaceChildren(el("p", { class: "note" }, current().samples.length ? "Choose a response to read it." : "This run has no rollouts."));
  }

  function show(all) {
    runs = all;
    byId("pick-run").replaceChildren(...runs.map((other, at) => el("option", { value: at }, `${other.run} (${whole(other.samples.length)})`)));
    byId("pick-run").parentElement.hidden = runs.length < 2;
    listen();
    const wanted = /^#rollout=(\d+)\.(\d+)$/.exec(location.hash);
    pick(wanted && runs[wanted[1]] ? Number(wanted[1]) : Math.max(0, runs.findIndex((other) => other.samples.length)));
    chosen = current().samples[wanted?.[2]] ?? null;
    if (!chosen) return;
    list();
    open(chosen);
    reveal(chosen);
  }

  const has = (name) => runs.some((other) => other.run === name && other.samples.length);

  function group(name, grouping) {
    byId("filters").reset();
    byId("pick-group").value = grouping;
    pick(runs.findIndex((other) => other.run === name));
    byId("rollouts").scrollIntoView();
  }

  return { show, has, group };
})();
