// Charts of the page: hover, zoom, log scale, smoothing. With `shardwise watch`, also the polling for new steps.
// Charts are drawn from the JSON in <script class="data">. Without this script the static pictures stay visible.
"use strict";
(() => {
  const root = document.documentElement;
  const PAD = {left: 56, right: 14, top: 6, bottom: 20};
  const groups = new Map();
  let serial = 0;

  const escaped = (text) => String(text).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`);
  const known = (v) => v !== null && Number.isFinite(v);
  const clamp = (v, low, high) => Math.min(high, Math.max(low, v));

  function short(v) {
    if (!known(v)) return "–";
    const size = Math.abs(v);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return v.toExponential(2).replace(/\.?0*e\+?/, "e").replace(/-/g, "−");
    return (size >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4))).replace("-", "−");
  }

  function nice(low, high, count) {
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((m) => m * power >= raw * 0.999) * power, ticks = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(+v.toPrecision(12));
    return ticks;
  }

  function decades(low, high) {
    const ticks = [], wide = high / low > 1e4;
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++)
      for (const m of wide ? [1] : [1, 2, 5]) if (m * 10 ** p >= low && m * 10 ** p <= high) ticks.push(m * 10 ** p);
    return ticks.length > 7 ? ticks.filter((_, i) => i % Math.ceil(ticks.length / 7) === 0) : ticks;
  }

  // The index of the point nearest to x in ascending numbers.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= x) low = mid; else high = mid; }
    return high >= 0 && xs[high] - x < x - xs[low] ? high : low;
  }

  // The mean over a window of neighbours, without points that have no value.
  function smoothed(ys, window) {
    const half = window >> 1;
    return ys.map((y, i) => {
      const near = ys.slice(Math.max(0, i - half), i + half + 1).filter(known);
      return known(y) && near.length ? near.reduce((a, b) => a + b) / near.length : null;
    });
  }

  class Chart {
    constructor(group, data) {
      Object.assign(this, {group, log: data.log, id: `c${serial++}`});
      this.box = document.createElement("div");
      this.box.className = "chart";
      this.box.tabIndex = 0;
      this.box.innerHTML = `<div class="bar-of"><b></b><span class="said"></span><button type="button">log</button></div><div class="plot"></div>`;
      [this.title, this.said, this.button] = this.box.firstChild.children;
      this.plot = this.box.lastChild;
      this.button.onclick = () => { this.log = !this.log; this.draw(); };
      this.listen();
      this.set(data);
    }

    set(data) {
      this.data = data;
      this.lines = data.lines;
      this.totals = null;
      if (data.stack) {
        const sums = data.lines[0].y.map(() => 0);
        this.lines = data.lines.map((line) => ({...line, low: [...sums], y: line.y.map((y, i) => (sums[i] += y))}));
        this.totals = sums;
      }
      const values = this.lines.flatMap((line) => line.y).filter(known);
      this.positive = !data.stack && values.length > 0 && values.some((v) => v > 0);
      this.button.hidden = !this.positive;
      this.title.textContent = data.level && !known(data.level.value) ? `${data.title} · ${data.level.words}` : data.title;
      this.box.setAttribute("aria-label", `${data.title}: arrow keys read values`);
    }

    listen() {
      const at = (event) => this.group.value(event.clientX - this.plot.getBoundingClientRect().left - PAD.left, this.inner());
      this.plot.onpointermove = (event) => {
        if (this.from !== undefined) this.group.select(this.from, at(event));
        this.group.point(at(event));
      };
      this.plot.onpointerleave = () => { if (this.from === undefined) this.group.point(null); };
      this.plot.onpointerdown = (event) => {
        if (event.button !== 0) return;
        this.from = at(event);
        try { this.plot.setPointerCapture(event.pointerId); } catch { /* the pointer has gone */ }
      };
      this.plot.onpointerup = (event) => {
        const from = this.from, to = at(event);
        this.from = undefined;
        this.group.select(null);
        if (from === undefined || Math.abs(this.group.pixels(from, to, this.inner())) < 6) return;
        this.group.zoom(Math.min(from, to), Math.max(from, to));
      };
      this.plot.onpointercancel = () => { this.from = undefined; this.group.select(null); };
      this.plot.ondblclick = () => this.group.zoom();
      this.box.onkeydown = (event) => {
        const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
        if (step) { this.group.move(step, this.lines[0].x); event.preventDefault(); }
        if (event.key === "Escape") this.group.zoom();
      };
    }

    inner() { return Math.max(10, this.plot.clientWidth - PAD.left - PAD.right); }

    // The range of values between the visible steps, with a margin.
    range(from, to) {
      const seen = [], log = this.log && this.positive;
      for (const line of this.lines)
        line.x.forEach((x, i) => { if (x >= from && x <= to && known(line.y[i]) && !(log && line.y[i] <= 0)) seen.push(line.y[i]); });
      if (this.data.level && known(this.data.level.value)) seen.push(this.data.level.value);
      if (!seen.length) return [0, 1];
      let low = seen.reduce((a, b) => Math.min(a, b)), high = seen.reduce((a, b) => Math.max(a, b));
      if (log) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
      if (this.data.stack) low = 0;
      const margin = (high - low || Math.abs(high) || 1) * 0.06;
      return [low - (low === 0 || (low > 0 && low - margin < 0) ? low : margin), high + margin];
    }

    draw() {
      const {from, to} = this.group.range(), width = this.plot.clientWidth, height = this.data.tall ? 250 : 112;
      if (width < 40) return;
      const inner = this.inner(), bottom = height - PAD.bottom, log = this.log && this.positive;
      const top = PAD.top + (this.data.bands ? 14 : 0);
      const [low, high] = this.range(from, to);
      const X = (x) => PAD.left + ((x - from) / (to - from || 1)) * inner;
      const Y = log
        ? (y) => bottom - (Math.log(y / low) / Math.log(high / low)) * (bottom - top)
        : (y) => bottom - ((y - low) / (high - low)) * (bottom - top);
      Object.assign(this, {X, Y, top, bottom});
      this.button.setAttribute("aria-pressed", String(log));
      const parts = [`<clipPath id="${this.id}"><rect x="${PAD.left - 4}" y="0" width="${inner + 8}" height="${bottom + 1}"/></clipPath>`];
      for (const [i, band] of (this.data.bands || []).entries()) {
        const left = Math.max(PAD.left, X(band.from)), right = Math.min(PAD.left + inner, X(band.to));
        if (right <= left) continue;
        if (i % 2 === 0) parts.push(`<rect class="band" x="${left}" y="${top}" width="${right - left}" height="${bottom - top}"/>`);
        if (right - left > 7 * band.name.length) parts.push(`<text x="${(left + right) / 2}" y="${top - 5}" class="x">${escaped(band.name)}</text>`);
      }
      for (const y of log ? decades(low, high) : nice(low, high, height > 200 ? 5 : 4))
        parts.push(`<path class="grid" d="M${PAD.left} ${Y(y).toFixed(1)}h${inner}"/><text x="${PAD.left - 7}" y="${(Y(y) + 3.5).toFixed(1)}" class="y">${short(y)}</text>`);
      if (this.data.ticks !== false)
        for (const x of nice(from, to, Math.max(3, inner / 90))) if (x % 1 === 0) parts.push(`<text x="${X(x).toFixed(1)}" y="${height - 5}" class="x">${x.toLocaleString("en")}</text>`);
      parts.push(`<g clip-path="url(#${this.id})">`);
      for (const line of this.lines) parts.push(this.path(line, X, Y, log, from, to));
      for (const mark of this.group.data.marks) parts.push(`<path class="mark" d="M${X(mark.step).toFixed(1)} ${PAD.top}V${bottom}"/>`);
      const {level, peak} = this.data;
      if (level && known(level.value)) parts.push(`<path class="level" d="M${PAD.left} ${Y(level.value).toFixed(1)}h${inner}"/>`);
      parts.push("</g>");
      if (level && known(level.value)) parts.push(`<text x="${PAD.left + 6}" y="${Y(level.value) - 5}">${escaped(level.words)}</text>`);
      if (peak && peak.at >= from && peak.at <= to) {
        const left = X(peak.at) > PAD.left + inner / 2;
        parts.push(`<circle class="peak" cx="${X(peak.at).toFixed(1)}" cy="${Y(peak.value).toFixed(1)}" r="3.5"/>`);
        parts.push(`<text class="strong" x="${X(peak.at) + (left ? -9 : 9)}" y="${Y(peak.value) + 1}" text-anchor="${left ? "end" : "start"}">${escaped(peak.words)}</text>`);
      }
      parts.push(`<g class="cursor"></g>`);
      this.plot.innerHTML = `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true">${parts.join("")}</svg>`;
      this.cursor = this.plot.querySelector(".cursor");
      this.point();
    }

    path(line, X, Y, log, from, to) {
      const shown = (i) => known(line.y[i]) && !(log && line.y[i] <= 0);
      // One point beyond each edge, so that lines reach it.
      const first = Math.max(0, nearest(line.x, from) - 1), last = Math.min(line.x.length - 1, nearest(line.x, to) + 1);
      const traced = (ys) => {
        let d = "", pen = "M";
        for (let i = first; i <= last; i++) {
          if (!shown(i) || !known(ys[i])) { pen = "M"; continue; }
          d += `${pen}${X(line.x[i]).toFixed(1)} ${Y(ys[i]).toFixed(1)}`;
          pen = "L";
        }
        return d;
      };
      if (line.low) {
        let d = traced(line.y);
        for (let i = last; i >= first; i--) d += `L${X(line.x[i]).toFixed(1)} ${Y(line.low[i]).toFixed(1)}`;
        return `<path class="area" style="fill:${line.colour}" d="${d}Z"/>`;
      }
      const style = `style="stroke:${line.colour}"`;
      if (line.dots || last - first < 2) {
        const dots = line.x.map((x, i) => (shown(i) && i >= first && i <= last ? `<circle cx="${X(x).toFixed(1)}" cy="${Y(line.y[i]).toFixed(1)}" r="3" ${style}/>` : "")).join("");
        return `<path class="line" ${style} d="${traced(line.y)}"/>${dots}`;
      }
      const window = Math.floor((last - first) / 40);
      if (!this.group.smooth || window < 2) return `<path class="line" ${style} d="${traced(line.y)}"/>`;
      return `<path class="line faint" ${style} d="${traced(line.y)}"/><path class="line" ${style} d="${traced(smoothed(line.y, window))}"/>`;
    }

    // The cursor and the values at the group's step; without one, the names of the lines.
    point() {
      const step = this.group.step, named = (line, text) => `<span><i style="background:${line.colour}"></i>${text}</span>`;
      if (this.cursor) this.cursor.innerHTML = this.group.selection(this) + (step === null ? "" : this.dots(step));
      if (step === null) {
        const names = this.lines.filter((line) => line.name);
        this.said.innerHTML = (names.length > 1 ? names : []).map((line) => named(line, escaped(line.name))).join(" ");
        return;
      }
      const said = [`${escaped(this.group.data.step)} ${step.toLocaleString("en")}`];
      const band = (this.data.bands || []).find((each) => step >= each.from && step < each.to);
      if (band) said[0] = escaped(band.name);
      for (const [i, line] of this.data.lines.entries()) {
        const at = nearest(line.x, step), value = line.y[at];
        if (line.x.length && known(value) && (this.totals === null || value > 0))
          said.push(named(this.lines[i], `${escaped(line.name)} ${line.x[at] === step ? "" : `(${line.x[at].toLocaleString("en")}) `}<b>${short(value)}</b>`));
      }
      if (this.totals) said.push(`total <b>${short(this.totals[nearest(this.lines[0].x, step)])}</b>`);
      for (const mark of this.group.data.marks) if (mark.step === step) said.push(`<em>${escaped(mark.event)}: ${escaped(mark.words)}</em>`);
      this.said.innerHTML = said.join(" ");
    }

    dots(step) {
      const found = this.lines.map((line) => {
        const at = nearest(line.x, step);
        if (!line.x.length || !known(line.y[at]) || (this.log && this.positive && line.y[at] <= 0)) return "";
        return `<circle cx="${this.X(line.x[at]).toFixed(1)}" cy="${this.Y(line.y[at]).toFixed(1)}" r="3.5" style="fill:${line.colour}"/>`;
      });
      return `<path class="hair" d="M${this.X(step).toFixed(1)} ${this.top}V${this.bottom}"/>${this.totals ? "" : found.join("")}`;
    }
  }

  class Group {
    constructor(figure, data) {
      Object.assign(this, {figure, step: null, view: null, chosen: null, smooth: true});
      figure.innerHTML = `<div class="tools"><span>drag to zoom, double-click to reset</span><button type="button">smooth</button><button type="button">reset zoom</button></div>`;
      const [smooth, reset] = figure.querySelectorAll(".tools button");
      Object.assign(this, {smoothing: smooth, reset});
      smooth.onclick = () => { this.smooth = !this.smooth; this.draw(); };
      reset.onclick = () => this.zoom();
      this.charts = [];
      this.set(data);
      new ResizeObserver(() => this.draw()).observe(figure);
    }

    set(data) {
      this.data = data;
      data.charts.forEach((each, i) => {
        if (this.charts[i] && this.charts[i].data.title === each.title) { this.charts[i].set(each); return; }
        for (const old of this.charts.splice(i)) old.box.remove();
        const chart = new Chart(this, each);
        this.charts.push(chart);
        this.figure.append(chart.box);
      });
      for (const old of this.charts.splice(data.charts.length)) old.box.remove();
      const xs = data.charts.flatMap((each) => each.lines.flatMap((line) => line.x));
      this.whole = xs.length ? {from: xs.reduce((a, b) => Math.min(a, b)), to: xs.reduce((a, b) => Math.max(a, b))} : {from: 0, to: 1};
      this.long = data.charts.some((each) => !each.stack && each.lines.some((line) => line.x.length >= 80));
      this.draw();
    }

    range() { return this.view || this.whole; }
    value(pixel, inner) { const {from, to} = this.range(); return clamp(Math.round(from + (pixel / inner) * (to - from)), from, to); }
    pixels(a, b, inner) { const {from, to} = this.range(); return ((b - a) / (to - from || 1)) * inner; }
    zoom(from, to) { this.view = from === undefined || to - from < 1 ? null : {from, to}; this.draw(); }
    select(from, to) { this.chosen = from === null ? null : [from, to]; this.charts.forEach((chart) => chart.point()); }
    point(step) { this.step = step; this.charts.forEach((chart) => chart.point()); }

    move(by, xs) {
      const {from, to} = this.range();
      const at = this.step === null ? (by > 0 ? nearest(xs, from) : nearest(xs, to)) : nearest(xs, this.step) + by;
      this.point(clamp(xs[clamp(at, 0, xs.length - 1)], from, to));
    }

    selection(chart) {
      if (!this.chosen) return "";
      const [a, b] = this.chosen.map(chart.X).sort((x, y) => x - y);
      return `<rect class="chosen" x="${a}" y="${chart.top}" width="${b - a}" height="${chart.bottom - chart.top}"/>`;
    }

    draw() {
      this.reset.hidden = this.view === null;
      this.smoothing.hidden = !this.long;
      this.smoothing.setAttribute("aria-pressed", String(this.smooth));
      this.charts.forEach((chart) => chart.draw());
    }
  }

  function show(name, data) {
    const figure = document.querySelector(`figure[data-charts="${name}"]`);
    if (!figure || !data.charts.length) return;
    if (groups.has(name)) { groups.get(name).set(data); return; }
    figure.hidden = false;
    for (const old of document.querySelectorAll(`[data-static="${name}"]`)) old.hidden = true;
    groups.set(name, new Group(figure, data));
  }

  for (const script of document.querySelectorAll("script.data")) show(script.dataset.of, JSON.parse(script.textContent));

  // `shardwise watch`: fetch what has changed, keep the zoom and the place.
  const pulse = document.querySelector("[data-live]");
  let stamp = "";
  async function poll() {
    let wait = 2000;
    try {
      const answer = await fetch(`now?${stamp}`);
      if (answer.status === 200) {
        const news = await answer.json();
        if (news.whole !== pulse.dataset.live) { location.reload(); return; }
        stamp = news.stamp;
        for (const [name, html] of Object.entries(news.parts)) {
          const part = document.querySelector(`[data-part="${name}"]`);
          if (part) part.innerHTML = html;
        }
        for (const [name, data] of Object.entries(news.charts)) show(name, data);
        if (news.ended) wait = 15000;
      }
      pulse.classList.remove("lost");
    } catch {
      pulse.classList.add("lost");
      wait = 5000;
    }
    setTimeout(poll, wait);
  }
  if (pulse) poll();
  root.classList.add("scripted");
})();
