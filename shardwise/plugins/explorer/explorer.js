// The explorer: choices of controls lead to predicted points. All figures are in the page's JSON; nothing is computed
// but rates, hours and cost. A served page polls for points, and asks for those that are not there.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const data = JSON.parse(document.querySelector("script.data").textContent);
  const {controls, points, texts} = data, live = document.body.dataset.live !== undefined;
  const GiB = 2 ** 30, MiB = 2 ** 20;
  const prices = new Map();
  let known = new Map(), shown = null, kept = null, awaited = null, asked = [];

  // -- numbers and words --------------------------------------------------------------------------

  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const tight = (text) => text.replace(/(\d) (?=[%A-Za-z])/g, "$1\u00a0");
  const digits = (v) => v.toFixed(v < 99.995 ? 2 : v < 999.95 ? 1 : 0);
  const size = (bytes) => (bytes >= GiB ? `${digits(bytes / GiB)} GiB` : `${digits(bytes / MiB)} MiB`);
  const change = (ratio) => `${ratio > 1 ? "+" : "−"}${Math.abs(100 * (ratio - 1)).toFixed(Math.abs(ratio - 1) < 0.0995 ? 1 : 0)} %`;

  function count(v) {
    for (const unit of ["", "K", "M", "B", "T"]) { if (v < 999.95) return unit ? digits(v) + unit : String(v); v /= 1000; }
    return `${digits(v)}Q`;
  }

  function span(seconds) {
    if (seconds < 59.995) {
      const [unit, factor] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, f]) => seconds >= f) || ["ns", 1e-9];
      return `${digits(seconds / factor)} ${unit}`;
    }
    for (const [small, ratio, high, low] of [[1, 60, "min", "s"], [60, 60, "h", "min"], [3600, 24, "d", "h"]]) {
      const whole = Math.round(seconds / small);
      if (high === "d" || whole / ratio < {min: 60, h: 24}[high])
        return `${Math.floor(whole / ratio)} ${high} ${String(whole % ratio).padStart(2, "0")} ${low}`;
    }
  }

  function rate(v) {
    let prefix = "";
    for (const larger of ["k ", "M ", "G "]) { if (v < 999.5) break; v /= 1000; prefix = larger; }
    return `${v.toFixed(v < 9.995 ? 2 : v < 99.95 ? 1 : 0)} ${prefix}${data.unit}/s`;
  }

  const money = (v) => (v >= 99.5 ? Math.round(v).toLocaleString("en") : v.toFixed(2));
  const fits = (p) => p.v === "fits" || p.v === "tight";
  const runs = (p) => p.s !== undefined;
  const key = (choice) => choice.join("-");
  const value = (i, choice) => controls[i].values[choice[i]];
  const index = (name) => controls.findIndex((c) => c.key === name);
  const device = index("device"), number = index("devices"), precision = index("strategy.precision");
  const ofWorkload = controls.map((c, i) => c.workload || i === precision);
  const sameWorkload = (a, b) => ofWorkload.every((own, i) => !own || a.c[i] === b.c[i]);
  const hours = (p) => ((data.goal / p.k) * p.s) / 3600;
  const devices = (p) => Number(value(number, p.c).replace(/,/g, ""));
  const price = (p) => prices.get(p.c[device]);
  const cost = (p) => (price(p) === undefined ? null : hours(p) * devices(p) * price(p));
  const verdict = (p) => p.v + (p.w === undefined ? "" : `: ${texts[p.w]}`);

  function differences(from, to) {
    return controls.flatMap((c, i) => (from.c[i] === to.c[i] ? [] : [`${c.title} ${value(i, to.c)}`])).join(" · ");
  }

  // -- choosing -----------------------------------------------------------------------------------

  function add(news) {
    texts.push(...news.texts);
    for (const point of news.points) points.push(point);
    for (const point of news.points) known.set(key(point.c), point);
  }

  // The predicted point with a value that changes least else, workload last; of equals the fastest that fits.
  function nearest(choice, i) {
    let best = null, least = Infinity;
    for (const p of points) {
      if (!runs(p) || p.c[i] !== choice[i]) continue;
      let far = fits(p) ? 0 : 0.5;
      for (let j = 0; j < choice.length && far <= least; j++) if (p.c[j] !== choice[j]) far += ofWorkload[j] ? 8 : 1;
      if (far < least || (far === least && p.s < best.s)) { best = p; least = far; }
    }
    return best;
  }

  function choose(i, to) {
    const choice = shown.c.map((v, j) => (j === i ? to : v)), exact = known.get(key(choice));
    awaited = null;
    if (exact && exact.v !== "refused" && exact.x) { say(""); show(exact); return; }
    if (!exact && live) {
      awaited = {choice, i};
      asked.push(key(choice));
      say(`predicting ${controls[i].title} ${value(i, choice)} …`);
      draw();
      poll();
      return;
    }
    snap(choice, i, exact);
  }

  function snap(choice, i, exact) {
    const near = nearest(choice, i), name = `${controls[i].title} ${value(i, choice)}`;
    const why = exact ? `${name}: ${verdict(exact)}. ` : "";
    if (!near) { say(`${why || `${name}: `}No point with it is predicted.`); draw(); return; }
    const moved = controls.flatMap((c, j) => (j === i || near.c[j] === shown.c[j] ? [] : [`${c.title} ${value(j, shown.c)} → ${value(j, near.c)}`]));
    say(`${why}${moved.length ? `The nearest predicted point with ${name} also has ${moved.join(", ")}.` : ""}`);
    show(near);
  }

  function say(text) { at("said").hidden = !text; at("said").textContent = text; }

  function show(point) {
    shown = point;
    kept = kept || point;
    try { history.replaceState(null, "", `#${key(point.c)}`); } catch { /* the page of another origin */ }
    draw();
  }

  // -- drawing ------------------------------------------------------------------------------------

  const boxes = controls.map((control, i) => {
    const box = document.createElement("fieldset");
    box.innerHTML = `<legend>${escaped(control.title)}</legend><div class="values">${control.values.map((v) => `<button type="button">${escaped(v)}</button>`).join("")}</div>`;
    at(control.workload ? "workload" : "strategy").append(box);
    [...box.querySelectorAll("button")].forEach((button, v) => { button.onclick = () => choose(i, v); });
    return box;
  });

  function drawControls() {
    const listed = controls.map((c) => new Set());
    for (const p of points) p.c.forEach((v, i) => listed[i].add(v));
    controls.forEach((control, i) => {
      const buttons = boxes[i].querySelectorAll("button");
      boxes[i].hidden = !live && listed[i].size < 2;
      buttons.forEach((button, v) => {
        const choice = shown.c.map((own, j) => (j === i ? v : own)), exact = known.get(key(choice));
        const near = exact || nearest(choice, i);
        const state = !near || !near.x ? "refused" : `${fits(near) ? "fits" : "over"}${exact ? "" : " snaps"}`;
        const waits = awaited && awaited.i === i && awaited.choice[i] === v;
        button.hidden = !live && !listed[i].has(v);
        button.className = waits ? "asked" : state;
        button.setAttribute("aria-pressed", String(shown.c[i] === v));
        button.title = exact ? verdict(exact) : near ? `${differences(shown, near)}: ${verdict(near)}` : "";
      });
    });
  }

  function drawCards() {
    const p = shown, capacity = p.m[0], memory = data.spread.memory, seconds = data.spread.seconds;
    at("line").textContent = texts[p.n];
    at("peak").textContent = runs(p) ? tight(size(p.p)) : "–";
    at("peak-of").className = fits(p) ? "of" : "of over";
    at("peak-of").textContent = tight(`of ${size(capacity)}: ${verdict(p)}` + (runs(p) ? `\nworst rank: ${p.r}` : "") + (runs(p) && memory ? `\nP50 ${size(memory[0] * p.p)}\nP95 ${size(memory[1] * p.p)}` : ""));
    at("step").textContent = runs(p) ? tight(span(p.s)) : "–";
    at("step-of").textContent = !runs(p) ? "" : tight(seconds ? `P50 ${span(seconds[0] * p.s)}\nP95 ${span(seconds[1] * p.s)}` : "no interval: compared with no run");
    at("rate").textContent = runs(p) ? rate(p.k / p.s).replace(` ${data.unit}/s`, "").replace(`${data.unit}/s`, "") : "–";
    at("rate-of").textContent = runs(p) ? tight(`${data.unit} per second\nMFU ${(100 * p.u).toFixed(0)} %\n${count(p.k)} ${data.unit} per step`) : "";
    at("hours").textContent = runs(p) ? tight(span(3600 * hours(p))) : "–";
    at("hours-of").textContent = tight(`to ${count(data.goal)} ${data.unit}` + (runs(p) && seconds ? `\nP95 ${span(3600 * seconds[1] * hours(p))}` : ""));
    const source = (what, of) => (of ? `${what} as in ${of[2]} ${of[3]}` : "");
    at("spread").textContent = [source("P50 and P95 of time", seconds), source("of memory", memory)].filter(Boolean).join("; ");
    drawCost();
  }

  function drawCost() {
    const spent = runs(shown) ? cost(shown) : null;
    at("cost").textContent = spent === null ? "–" : money(spent);
    if (document.activeElement !== at("price")) at("price").value = price(shown) ?? "";
  }

  at("price").oninput = (event) => {
    const typed = Number(event.target.value.replace(",", "."));
    if (event.target.value.trim() && typed >= 0) prices.set(shown.c[device], typed); else prices.delete(shown.c[device]);
    drawCost();
    drawPair();
  };

  function drawPair() {
    const rows = controls.flatMap((c, i) => (kept.c[i] === shown.c[i] ? [] : [[c.title, value(i, kept.c), value(i, shown.c), ""]]));
    const figure = (name, of, words) => {
      const [a, b] = [kept, shown].map((p) => (runs(p) ? of(p) : null));
      rows.push([name, ...[a, b].map((v) => (v === null ? "–" : words(v))), a === null || b === null || a === b ? "" : change(b / a)]);
    };
    rows.push(["verdict", kept.v, shown.v, ""]);
    figure("peak", (p) => p.p, size);
    figure("step", (p) => p.s, span);
    figure("throughput", (p) => p.k / p.s, rate);
    figure("run", hours, (v) => span(3600 * v));
    figure("cost", cost, money);
    figure("MFU", (p) => p.u, (v) => `${(100 * v).toFixed(0)} %`);
    at("pair").innerHTML = rows.map(([name, a, b, by]) => `<tr><th scope="row">${escaped(name)}</th><td class="n">${escaped(tight(a))}</td><td class="n${a === b ? "" : " differs"}">${escaped(tight(b))}</td><td class="n change">${by}</td></tr>`).join("");
    at("moment").textContent = runs(shown) ? `Of rank ${shown.r}, ${texts[shown.a]}. The lower bar is the kept point.` : "Not predicted: weights and optimizer state alone do not fit.";
    const most = Math.max(...[kept, shown].flatMap((p) => p.b || []), 1);
    const cell = (p, i) => (p.b ? size(p.b[i] * 1024) : "–");
    at("ledger").innerHTML = data.ledger.map(([row, colour], i) => {
      if (![kept, shown].some((p) => p.b && p.b[i])) return "";
      const bars = [shown, kept].map((p) => `<i style="width:${((100 * (p.b ? p.b[i] : 0)) / most).toFixed(2)}%;background:${colour}"></i>`);
      return `<tr><th scope="row">${row}</th><td class="bar two">${bars.join("")}</td><td class="n quiet">${tight(cell(kept, i))}</td><td class="n">${tight(cell(shown, i))}</td></tr>`;
    }).join("");
  }

  function recipe(point) {
    const sections = [...data.own];
    for (const [i, text] of point.x) sections[i] = texts[text];
    return sections.join("");
  }

  function drawWhy() {
    const not = points.filter((p) => p !== shown && !fits(p) && sameWorkload(p, shown));
    at("why-of").textContent = not.length ? `${not.length} points with these devices, this data, training and precision do not fit, or are refused.` : "All predicted points with these devices, this data, training and precision fit.";
    at("why").innerHTML = not.map((p) => `<tr class="${p.v === "does not fit" ? "does-not-fit" : ""}"><td class="line">${escaped(differences(shown, p))}</td><td class="verdict">${escaped(p.v)}</td><td class="why">${escaped(p.w === undefined ? "" : texts[p.w])}</td></tr>`).join("");
    [...at("why").querySelectorAll(".line")].forEach((cell, i) => { if (not[i].x) cell.onclick = () => { say(""); show(not[i]); }; });
  }

  function drawRun() {
    const run = data.run, rows = [];
    if (!run) return;
    at("run").hidden = false;
    const own = run.choice && known.get(key(run.choice));
    at("run-of").textContent = `The run ${run.name}` + (run.peak ? `; the peak is of rank ${run.rank}.` : ", which has not ended.");
    if (run.peak) rows.push(["peak", size(run.expected), size(run.peak), change(run.expected / run.peak)]);
    if (run.seconds) rows.push(["step", span(run.planned), span(run.seconds), change(run.planned / run.seconds)]);
    if (run.seconds && own && runs(own)) rows.push(["throughput", rate(own.k / run.planned), rate(own.k / run.seconds), change(run.seconds / run.planned)]);
    at("run-rows").innerHTML = rows.map(([name, ...cells]) => `<tr><th scope="row">${name}</th>${cells.map((c) => `<td class="n">${tight(c)}</td>`).join("")}</tr>`).join("");
  }

  // -- memory against time ------------------------------------------------------------------------

  function ticks(low, high, most) {
    const raw = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((m) => m * power >= raw * 0.999) * power, found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(+v.toPrecision(12));
    return found;
  }

  function front(all) {
    const found = [];
    for (const p of [...all].sort((a, b) => a.p - b.p || a.s - b.s)) if (!found.length || p.s < found.at(-1).s) found.push(p);
    return found;
  }

  function drawFront() {
    const all = points.filter((p) => runs(p) && sameWorkload(p, shown));
    const room = shown.m[0] - shown.m[1], far = runs(shown) ? [shown.s, shown.p] : [Math.min(...all.map((p) => p.s)), room];
    const near = all.filter((p) => p === shown || p === kept || (p.s <= 3 * far[0] && p.p <= 1.75 * Math.max(room, far[1])));
    const width = Math.max(280, at("front").clientWidth), height = width < 600 ? 330 : 360, pad = {left: 44, right: 14, top: 10, bottom: 34};
    if (!near.length) { at("front").innerHTML = ""; return; }
    const run = data.run && data.run.seconds && data.run.peak && data.run.choice ? data.run : null;
    const own = run && known.get(key(run.choice)), dot = own && near.includes(own) ? [run.seconds, run.peak] : null;
    const xs = near.map((p) => p.s).concat(dot ? [dot[0]] : []), ys = near.map((p) => p.p).concat(dot ? [dot[1]] : []);
    const wide = Math.max(...xs) - Math.min(...xs) || Math.max(...xs), x0 = Math.max(0, Math.min(...xs) - 0.08 * wide), x1 = Math.max(...xs) + 0.08 * wide;
    const above = room > 2.5 * Math.max(...ys), y1 = Math.max(...ys, above ? 0 : room) * (above ? 1.18 : 1.08);
    const X = (s) => pad.left + ((s - x0) / (x1 - x0)) * (width - pad.left - pad.right);
    const Y = (b) => height - pad.bottom - (b / y1) * (height - pad.top - pad.bottom);
    const parts = [], unit = y1 < GiB ? MiB : GiB;
    at("front-unit").textContent = `peak of a device, ${unit === GiB ? "GiB" : "MiB"}`;
    for (const t of ticks(0, y1 / unit, 6)) parts.push(`<path class="grid" d="M${pad.left} ${Y(t * unit)}H${width - pad.right}"/><text class="y" x="${pad.left - 6}" y="${Y(t * unit) + 4}">${t}</text>`);
    for (const t of ticks(x0, x1, width < 600 ? 4 : 8)) parts.push(`<text class="x" x="${X(t)}" y="${height - pad.bottom + 16}">${t}</text>`);
    parts.push(`<text class="x" x="${(width + pad.left) / 2}" y="${height - 3}">seconds of a step</text>`);
    if (!above) parts.push(`<path class="level" d="M${pad.left} ${Y(room)}H${width - pad.right}"/>`);
    const best = front(near);
    parts.push(`<path class="line" d="${best.map((p, i) => `${i ? "L" : "M"}${X(p.s).toFixed(1)} ${Y(p.p).toFixed(1)}`).join("")}"/>`);
    near.forEach((p, i) => parts.push(`<circle data-i="${i}" tabindex="0" role="button" aria-label="${escaped(differences(shown, p) || "shown")}" class="${fits(p) ? "" : "over"}${best.includes(p) ? " on" : ""}" cx="${X(p.s).toFixed(1)}" cy="${Y(p.p).toFixed(1)}" r="4.5"/>`));
    if (runs(shown)) parts.push(`<circle class="halo" cx="${X(shown.s)}" cy="${Y(shown.p)}" r="8"/>`);
    if (kept !== shown && near.includes(kept)) parts.push(`<circle class="halo kept" cx="${X(kept.s)}" cy="${Y(kept.p)}" r="8"/>`);
    if (dot) parts.push(`<path class="drift" d="M${X(own.s)} ${Y(own.p)}L${X(dot[0])} ${Y(dot[1])}"/><path class="measured" d="M${X(dot[0])} ${Y(dot[1]) - 6}l6 6l-6 6l-6 -6z"/>`);
    at("front").innerHTML = `<svg viewBox="0 0 ${width} ${height}" role="group" aria-label="peak memory against seconds of a step">${parts.join("")}</svg>`;
    const svg = at("front").firstChild, taken = near.map((p) => [X(p.s) - 5, Y(p.p) - 5, X(p.s) + 5, Y(p.p) + 5]);
    const edge = [pad.left, 0, width - 2, height - pad.bottom];
    for (let i = 1; i < best.length; i++)
      for (let f = 0; f <= 1; f += 0.02) {
        const x = X(best[i - 1].s + f * (best[i].s - best[i - 1].s)), y = Y(best[i - 1].p + f * (best[i].p - best[i - 1].p));
        taken.push([x - 1, y - 1, x + 1, y + 1]);
      }
    const budget = `budget ${digits(room / GiB)} GiB`;
    const ends = [X(x0) + 2, width - pad.right - 120, (width - 100) / 2];
    if (above) label(svg, taken, edge, ends[0], pad.top + 8, `${budget}, far above`, "strong", 0);
    else ends.some((x) => label(svg, taken, edge, x, Y(room), budget, "strong", 0));
    if (!above) taken.push([pad.left, Y(room) - 1, width - pad.right, Y(room) + 1]);
    if (runs(shown)) label(svg, taken, edge, X(shown.s), Y(shown.p), "shown", "strong");
    if (kept !== shown && near.includes(kept)) label(svg, taken, edge, X(kept.s), Y(kept.p), "kept", "strong");
    if (dot) label(svg, taken, edge, X(dot[0]), Y(dot[1]), "measured", "strong");
    const common = controls.map((c, i) => [...new Set(near.map((p) => p.c[i]))].find((v) => v !== shown.c[i] && near.filter((p) => p.c[i] === v).length > near.length / 2));
    const others = controls.flatMap((c, i) => (common[i] === undefined ? [] : [`${c.title} ${c.values[common[i]]}`]));
    at("front-of").textContent = others.length ? `Names say how points differ from the shown one; where they do not say otherwise, they have ${others.join(", ")}.` : "Names say how points differ from the shown one.";
    for (const p of best) {
      const name = controls.flatMap((c, i) => (p.c[i] === shown.c[i] || p.c[i] === common[i] ? [] : [`${c.title} ${value(i, p.c)}`])).join(" · ");
      if (p !== shown && p !== kept) label(svg, taken, edge, X(p.s), Y(p.p), name || others.join(" · "), "");
    }
    const say = (p) => { at("front-said").textContent = p ? tight(`${differences(shown, p) || "shown"}: ${size(p.p)}, ${span(p.s)}, ${p.v}`) : ""; };
    svg.querySelectorAll("[data-i]").forEach((circle) => {
      const p = near[circle.dataset.i];
      circle.onpointerenter = circle.onfocus = () => say(p);
      circle.onpointerleave = circle.onblur = () => say(null);
      circle.onclick = () => show(p);
      circle.onkeydown = (event) => { if (event.key === "Enter") show(p); };
    });
  }

  // A text next to a point on the first side where it covers nothing; none where every side is taken.
  function label(svg, taken, edge, x, y, text, kind, gap = 10) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", "text");
    node.setAttribute("class", kind);
    node.textContent = text;
    svg.append(node);
    const wide = node.getComputedTextLength(), high = 13;
    for (const [left, low] of [[x + gap, y - 4], [x + gap, y + high], [x + gap, y + 4], [x - gap - wide, y - 4], [x - gap - wide, y + high], [x - gap - wide, y + 4], [x - wide / 2, y - 12], [x - wide / 2, y + 21]]) {
      const box = [left, low - high + 3, left + wide, low + 3];
      const inside = box[0] >= edge[0] && box[1] >= edge[1] && box[2] <= edge[2] && box[3] <= edge[3];
      if (!inside || taken.some((o) => box[0] < o[2] && o[0] < box[2] && box[1] < o[3] && o[1] < box[3])) continue;
      node.setAttribute("x", left);
      node.setAttribute("y", low);
      taken.push(box);
      return true;
    }
    node.remove();
    return false;
  }

  function draw() {
    drawControls();
    drawCards();
    drawFront();
    drawPair();
    drawWhy();
    drawRun();
    at("recipe").textContent = recipe(shown);
    const refused = points.filter((p) => p.v === "refused").length;
    at("count").textContent = `${points.length - refused} points are predicted, ${refused} are refused${data.done ? "" : live ? "; more follow" : ""}.`;
  }

  // -- the page's own buttons, and the server -----------------------------------------------------

  at("keep").onclick = () => { kept = shown; draw(); };
  at("swap").onclick = () => { const other = kept; kept = shown; show(other); };
  at("copy").onclick = async () => {
    const text = recipe(shown);
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      getSelection().selectAllChildren(at("recipe"));
      if (!document.execCommand("copy")) { at("copied").textContent = "selected: press Ctrl-C"; return; }
      getSelection().removeAllRanges();
    }
    at("copied").textContent = "copied";
    setTimeout(() => { at("copied").textContent = ""; }, 2000);
  };
  new ResizeObserver(() => { if (shown) drawFront(); }).observe(at("front"));

  let timer = 0, polling = false;
  async function poll() {
    if (polling) return;
    polling = true;
    clearTimeout(timer);
    let wait = data.done && !awaited ? 15000 : 1000;
    try {
      const ask = asked.shift(), had = points.length;
      const answer = await fetch(`now?${points.length}.${texts.length}${ask ? `&${ask}` : ""}`);
      if (answer.status === 200) {
        const news = await answer.json();
        add(news);
        data.done = news.done;
        const exact = awaited && known.get(key(awaited.choice));
        if (exact) {
          const {choice, i} = awaited;
          awaited = null;
          if (exact.v !== "refused" && exact.x) { say(""); show(exact); } else snap(choice, i, exact);
        } else if (points.length > had) draw();
      }
      document.body.classList.remove("lost");
    } catch {
      document.body.classList.add("lost");
      wait = 5000;
    }
    polling = false;
    timer = setTimeout(poll, asked.length ? 0 : wait);
  }

  known = new Map(points.map((p) => [key(p.c), p]));
  if (data.price !== null) prices.set(data.start[device], data.price);
  const start = known.get(location.hash.slice(1)) || known.get(key(data.start)) || points.find((p) => p.x);
  kept = known.get(key(data.start)) || start;
  if (start && start.x) show(start);
  if (live) poll();
})();
