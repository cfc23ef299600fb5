// The reader of rollouts: a list by groups, and one response token by token.
"use strict";

const Reader = (() => {
  const SURPRISE = [0.01, 0.1, 0.3, 0.7, 1.2, 2, 3.5, 6];
  const LOG_RATIO = [0.02, 0.1, 0.2, 0.4, 0.7];
  const ADVANTAGE = [0, 0.5, 1, 1.5, 2];
  const LEVELS = ["trained", "masked out of the loss", "written by the environment"];
  const EXITS = {
    stop: "ended by itself", length: "cut at the limit of tokens", turns: "reached the limit of turns",
    environment: "ended by a failure of the environment", abort: "stopped by the engine",
  };
  const COLORINGS = [
    ["logprob", "log-prob"], ["ratio", "ratio"], ["advantage", "advantage"],
    ["version", "weights version"], ["level", "loss mask"],
  ];
  const MAX_ROWS = 300;
  // There the response stands below the list (page.css).
  const NARROW = matchMedia("(max-width: 900px)");
  let runs = [], run = 0, chosen = null, coloring = "logprob", cursor = -1, rows = [];

  const current = () => runs[run];
  const groupOf = (sample) => current().groups[sample.group];
  const textOf = (sample) => sample.text ??= sample.pieces.map((n) => current().pieces[n][1]).join("");

  function matches(sample, words) {
    const group = groupOf(sample);
    const all = [group.prompt, group.answer, group.prompt_id, textOf(sample)].join("\n").toLowerCase();
    return words.every((word) => all.includes(word));
  }

  function powerOfTwo(tokens) {
    const low = 2 ** Math.floor(Math.log2(Math.max(1, tokens)));
    return [low, `${low.toLocaleString()} to ${(2 * low - 1).toLocaleString()} tokens`];
  }

  // Order and heading of a sample's group, by what the list is grouped by.
  const GROUPINGS = {
    step: (s) => [groupOf(s).step, `Step ${groupOf(s).step}`],
    problem: (s) => [s.group, `${groupOf(s).prompt_id || "problem"} · step ${groupOf(s).step}`],
    reward: (s) => [s.reward, `Reward ${number(s.reward)}`],
    length: (s) => powerOfTwo(s.tokens),
    age: (s) => [s.age, `Oldest token ${s.age} updates old`],
    exit: (s) => [s.exit, EXITS[s.exit] || s.exit],
    source: (s) => [groupOf(s).source, `Set ${groupOf(s).source || "without a name"}`],
  };
  const SORTS = {
    order: () => 0, low: (a, b) => a.reward - b.reward, high: (a, b) => b.reward - a.reward,
    long: (a, b) => b.tokens - a.tokens, old: (a, b) => b.age - a.age,
  };

  function number(value, digits = 3) {
    return value === null ? "?" : Number(value.toPrecision(digits)).toString().replace("-", "−");
  }

  function signed(value) {
    return (value > 0 ? "+" : "") + number(value);
  }

  function list() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = current().samples.filter((sample) => matches(sample, words));
    found.sort(SORTS[byId("pick-sort").value]);
    byId("num-found").textContent = `${found.length.toLocaleString()} of ${current().samples.length.toLocaleString()}`;
    const sections = new Map();
    for (const sample of found) {
      const [order, heading] = GROUPINGS[byId("pick-group").value](sample);
      if (!sections.has(heading)) sections.set(heading, { order, heading, samples: [] });
      sections.get(heading).samples.push(sample);
    }
    const sorted = [...sections.values()].sort((a, b) => (a.order < b.order ? -1 : a.order > b.order ? 1 : 0));
    rows = [];
    const isOpen = (section, at) => (chosen ? section.samples.includes(chosen) : at === 0) || found.length <= 40;
    byId("list").replaceChildren(...sorted.map((section, at) => sectionElement(section, isOpen(section, at))));
    if (!sorted.length) {
      byId("list").replaceChildren(el("p", { class: "note" }, words.length ? "No response has these words." : "No rollouts are kept."));
    }
  }

  function sectionElement(section, isOpen) {
    const mean = section.samples.reduce((sum, sample) => sum + sample.reward, 0) / section.samples.length;
    const details = el("details", {}, el(
      "summary", {}, section.heading,
      el("small", {}, `${section.samples.length} · mean reward ${number(mean)}`)
    ));
    const fill = () => {
      if (!details.open || details.childElementCount > 1) return;
      details.append(...section.samples.slice(0, MAX_ROWS).map(rowElement));
      if (section.samples.length > MAX_ROWS) {
        details.append(el("p", { class: "note" }, `and ${section.samples.length - MAX_ROWS} more: search, or group otherwise`));
      }
    };
    details.addEventListener("toggle", fill);
    details.open = isOpen;
    fill();
    return details;
  }

  function rowElement(sample) {
    const row = el(
      "button", { type: "button", class: "row", title: "Read this response" }, badge(sample),
      el("span", { class: "what" }, textOf(sample).trim().replace(/\s+/g, " ").slice(0, 120) || "(empty)"),
      el("span", { class: "facts" }, `${verdict(sample)}${sample.tokens} tok · age ${sample.age}${sample.exit === "stop" ? "" : ` · ${sample.exit}`}`)
    );
    row.sample = sample;
    if (sample === chosen) row.setAttribute("aria-current", "true");
    row.addEventListener("click", () => {
      open(sample);
      if (NARROW.matches) byId("rollout").scrollIntoView();
    });
    rows.push(row);
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
      const button = el("button", { type: "button", class: "sibling", title: `Response ${other.index} of this group` }, badge(other));
      if (other === sample) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => open(other));
      return button;
    });
    byId("rollout").replaceChildren(
      el("h3", {}, `Step ${group.step} · group ${group.id} · response ${sample.index}`),
      el("p", { class: "facts" }, [
        group.source && `set ${group.source}`, group.prompt_id, `${sample.tokens.toLocaleString()} tokens`,
        `oldest ${sample.age} updates`, EXITS[sample.exit] || sample.exit,
      ].filter(Boolean).join(" · ")),
      el("div", { class: "siblings", role: "group", "aria-label": "Responses of this group" }, "Group ", ...buttons),
      why(sample, group),
      el("details", {}, el("summary", {}, "Prompt"), el("pre", {}, group.prompt ?? "This run kept no texts.")),
      response(sample)
    );
  }

  function why(sample, group) {
    const facts = [];
    facts.push(["extracted answer", sample.extracted || (sample.found ? "not recorded" : "none was found")]);
    if (sample.reason) facts.push(["the grader says", sample.reason.replaceAll("_", " ")]);
    if (group.answer !== null) facts.push(["reference", group.answer]);
    for (const [name, value] of Object.entries(sample.components)) facts.push([name, number(value)]);
    facts.push(["reward", number(sample.reward)], ["mean of the group", number(group.mean)]);
    facts.push(["advantage", sample.advantage === null ? "not known: the estimator is the run's own" : signed(sample.advantage)]);
    return el("section", { class: "why" }, el("h4", {}, "Why this reward"), el("dl", {}, ...facts.map(
      ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))
    )));
  }

  function expanded(pairs) {
    return pairs.flatMap(([value, count]) => Array(count).fill(value));
  }

  function response(sample) {
    const has = { ratio: sample.ratios !== null, advantage: sample.advantage !== null };
    if (has[coloring] === false) coloring = "logprob";
    const buttons = COLORINGS.map(([name, label]) => {
      const button = el("button", { type: "button", "aria-pressed": String(name === coloring) }, label);
      button.disabled = has[name] === false;
      if (button.disabled) button.title = name === "ratio" ? `This response has no ratios. ${current().ratios}` : "The run's own estimator is not called, so advantages are not known.";
      button.addEventListener("click", () => { coloring = name; paint(); });
      button.dataset.coloring = name;
      return button;
    });
    const versions = expanded(sample.versions), levels = expanded(sample.levels);
    const tokens = el("div", { class: "tokens", tabindex: "0", role: "document", "aria-label": "Response; arrow keys move from token to token" });
    const spans = sample.pieces.map((piece, at) => {
      const span = el("span", {}, current().pieces[piece][1]);
      span.at = at;
      return span;
    });
    spans.forEach((span, at) => {
      if (at === sample.cut_at) {
        const left = sample.tokens - sample.pieces.length;
        tokens.append(el("em", { class: "cut" }, ` … ${left.toLocaleString()} tokens are not on this page … `));
      }
      tokens.append(span);
    });
    const readout = el("p", { class: "readout", role: "status" }, "Point at a token, or use the arrow keys.");
    const scale = el("div", { class: "scale" });

    function paint() {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.coloring === coloring));
      const known = [...new Set(versions)].filter((version) => version >= 0);
      spans.forEach((span, at) => { span.className = shade(sample, at, versions, levels, known); });
      scale.replaceChildren(...legend(sample, versions, levels, known));
    }

    function point(at) {
      if (cursor >= 0) spans[cursor]?.removeAttribute("id");
      cursor = Math.max(0, Math.min(spans.length - 1, at));
      spans[cursor].id = "cursor";
      const [id, text] = current().pieces[sample.pieces[cursor]];
      const position = sample.cut_at !== undefined && cursor >= sample.cut_at
        ? cursor + sample.tokens - sample.pieces.length : cursor;
      const logprob = sample.logprobs[cursor], ratio = sample.ratios?.[cursor] ?? null;
      readout.textContent = [
        `token ${(position + 1).toLocaleString()}`, `${JSON.stringify(text)} (id ${id})`, LEVELS[levels[cursor]],
        logprob === null ? "" : `log-prob ${number(logprob)} (p ${number(100 * Math.exp(logprob))} %)`,
        ratio === null ? "" : `ratio ${number(ratio, 4)}`,
        versions[cursor] < 0 ? "" : `version ${versions[cursor]}, ${groupOf(sample).version - versions[cursor]} updates old`,
      ].filter(Boolean).join(" · ");
    }

    tokens.addEventListener("mouseover", (event) => { if (event.target.at !== undefined) point(event.target.at); });
    tokens.addEventListener("keydown", (event) => {
      const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!move || !spans.length) return;
      event.preventDefault();
      point(cursor + move);
      spans[cursor].scrollIntoView({ block: "nearest" });
    });
    paint();
    const heading = el("div", { class: "bar" }, el("h4", {}, "Response"), el("div", { class: "segments", role: "group", "aria-label": "Colour of tokens" }, ...buttons));
    const plain = current().has_texts ? [] : [
      el("p", { class: "note" }, "Tokens are shown by their ids: the run's tokenizer was not found (--tokenizer names it)."),
      ...(sample.text ? [el("pre", {}, sample.text)] : []),
    ];
    return el("section", {}, heading, scale, ...plain, tokens, readout);
  }

  const quantum = (value, limits) => limits.filter((limit) => value > limit).length;

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
    if (coloring === "ratio") {
      return [5, 3, 1].map((at) => item(`n${at}`, `< ${number(Math.exp(-LOG_RATIO[at - 1]), 2)}`))
        .concat(item("", "1"), [1, 3, 5].map((at) => item(`p${at}`, `> ${number(Math.exp(LOG_RATIO[at - 1]), 3)}`)));
    }
    if (coloring === "advantage") return [item(signClass(sample.advantage, quantum(Math.abs(sample.advantage), ADVANTAGE)), `${signed(sample.advantage)} for every trained token`)];
    if (coloring === "version") {
      return known.map((version, at) => {
        const count = versions.filter((each) => each === version).length;
        return item(`v${at % 8}`, `version ${version}: ${count} tokens, ${groupOf(sample).version - version} updates old`);
      });
    }
    return LEVELS.map((label, level) => [label, level, levels.filter((each) => each === level).length])
      .filter(([, , count]) => count).map(([label, level, count]) => item(`m${level}`, `${label} (${count})`));
  }

  function step(by) {
    const shown = [...document.querySelectorAll("#list details[open] .row")];
    const next = shown[shown.findIndex((row) => row.sample === chosen) + by];
    if (!next) return;
    open(next.sample);
    next.scrollIntoView({ block: "nearest" });
  }

  function keys(event) {
    const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
  }

  function notes() {
    byId("rollout-note").textContent = [
      current().note, current().samples.length ? current().ratios : "", "Keys: j and k read the next and the previous response, / searches.",
    ].filter(Boolean).join(" ");
  }

  function listen() {
    let timer;
    byId("search").addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(list, 120); });
    byId("filters").addEventListener("submit", (event) => event.preventDefault());
    for (const id of ["pick-group", "pick-sort"]) byId(id).addEventListener("change", list);
    byId("pick-run").addEventListener("change", (event) => { pick(Number(event.target.value)); });
    document.addEventListener("keydown", keys);
  }

  function pick(given) {
    run = given;
    byId("pick-run").value = String(run);
    chosen = null;
    notes();
    list();
    byId("rollout").replaceChildren(el("p", { class: "note" }, current().samples.length ? "Choose a response to read it." : "This run has nothing to read."));
  }

  function show(given) {
    const isFirst = !runs.length;
    const key = (sample) => [groupOf(sample).step, groupOf(sample).id, sample.index].join();
    const before = chosen && key(chosen);
    runs = given;
    byId("pick-run").replaceChildren(...runs.map((each, at) => el("option", { value: at }, `${each.run} (${each.samples.length})`)));
    if (isFirst) listen();
    const wanted = /^#rollout=(\d+)\.(\d+)$/.exec(location.hash);
    const first = runs.findIndex((each) => each.samples.length);
    pick(isFirst ? (wanted && runs[wanted[1]] ? Number(wanted[1]) : Math.max(0, first)) : Math.min(run, runs.length - 1));
    const again = isFirst ? current().samples[wanted?.[2]] : current().samples.find((sample) => key(sample) === before);
    if (!again) return;
    chosen = again;
    list();
    open(again);
    const row = rows.find((each) => each.sample === again);
    if (row) byId("list").scrollTop = row.offsetTop - byId("list").clientHeight / 2;
  }

  return { show };
})();
