// The dashboard: asks this server alone, and draws with SVG. Names are strangers' words, so all text goes through textContent.
'use strict';

const PAGE = 4096;
const ASK_EVERY = 5000;
const GUESTS = 50;
let last = 'hour';

const at = id => document.getElementById(id);

function make(tag, of = {}, ...inside) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(of)) one[name] = value;
  one.append(...inside);
  return one;
}

function draw(tag, of = {}, ...inside) {
  const one = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(of)) one.setAttribute(name, value);
  one.append(...inside);
  return one;
}

function bytes(count) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let value = Math.abs(count), unit = 0;
  while (value >= 1024 && unit + 1 < units.length) { value /= 1024; unit += 1; }
  const digits = unit === 0 || value >= 99.95 ? 0 : 1;
  return (count < 0 ? '-' : '') + value.toFixed(digits) + ' ' + units[unit];
}

const percent = value => (value >= 10 || value === 0 ? value.toFixed(0) : value.toFixed(value >= 1 ? 1 : 2)) + ' %';
const number = value => value.toLocaleString('en');
const count = (value, thing) => `${number(value)} ${thing}${value === 1 ? '' : 's'}`;

function clock(seconds, span) {
  const date = new Date(seconds * 1000);
  return span > 2 * 86400
    ? date.toLocaleDateString('en', { day: 'numeric', month: 'short' })
    : date.toLocaleTimeString('en', { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
}

const moment = seconds => new Date(seconds * 1000).toLocaleString('en',
  { day: 'numeric', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });

// The least of 1, 2, 5 times a power that is no less; for bytes the power is of 2, so that labels are round.
function ceiling(value, binary) {
  if (!(value > 0)) return 1;
  const base = binary ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 10 ** Math.floor(Math.log10(value));
  const steps = binary ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : [1, 2, 5, 10];
  return base * steps.find(step => step * base >= value);
}

// What is drawn in each figure: its lines, how places become times, and the time of its cursor, if it has one.
const views = new Map();

// Lines over time. `lines`: name, colour, and a value for each of `times`; a value that is null leaves a gap.
function chart(into, times, lines, show, binary) {
  if (times.length < 2) {
    views.delete(into);
    for (const name of ['role', 'tabindex']) into.removeAttribute(name);
    into.replaceChildren(make('p', { className: 'legend', textContent: 'The first points come within half a minute.' }));
    return;
  }
  // As wide as the place, so that its letters have the size of the others.
  const [width, height, left, bottom] = [Math.max(280, into.clientWidth), 190, 62, 20];
  const values = lines.flatMap(line => line.values).filter(value => value !== null);
  const top = ceiling(Math.max(0, ...values), binary), low = Math.min(0, ...values) < 0 ? -ceiling(-Math.min(...values), binary) : 0;
  const [first, span] = [times[0], times[times.length - 1] - times[0]];
  const x = time => left + (width - left - 4) * (time - first) / span;
  const y = value => 6 + (height - bottom - 6) * (top - value) / (top - low);
  const all = draw('svg', { viewBox: `0 0 ${width} ${height}` });
  for (const part of [0, .25, .5, .75, 1]) {
    const value = low + (top - low) * part;
    all.append(draw('line', { class: 'grid', x1: left, x2: width - 4, y1: y(value), y2: y(value) }));
    if (part !== .25 && part !== .75) all.append(draw('text', { x: left - 8, y: y(value) + 4, 'text-anchor': 'end' }, show(value)));
  }
  for (const [part, anchor] of [[0, 'start'], [.5, 'middle'], [1, 'end']]) {
    const time = first + span * part;
    all.append(draw('text', { x: x(time), y: height - 4, 'text-anchor': anchor }, clock(time, span)));
  }
  const legend = make('p', { className: 'legend' });
  for (const line of lines) {
    let path = '', pen = 'M';
    line.values.forEach((value, n) => {
      // A value between gaps is a dot: a line of no length, with round ends.
      if (value !== null) path += `${pen}${x(times[n]).toFixed(1)} ${y(value).toFixed(1)}${pen === 'M' ? 'h0' : ''}`;
      pen = value === null ? 'M' : 'L';
    });
    if (path) all.append(draw('path', { d: path, fill: 'none', stroke: line.colour, 'stroke-width': 2, 'stroke-linejoin': 'round', 'stroke-linecap': 'round' }));
    const mark = make('i');
    mark.style.background = line.colour;
    legend.append(make('span', {}, mark, ''));
  }
  const cursor = draw('g', { class: 'cursor' });
  all.append(cursor);
  into.replaceChildren(all, legend);
  const time = place => first + span * (place - left) / (width - left - 4);
  const points = times.map((_, n) => n).filter(n => lines.some(line => line.values[n] !== null));
  const view = { into, times, lines, show, points, x, y, time, width, floor: height - bottom, all, cursor, legend, at: views.get(into)?.at ?? null };
  views.set(into, view);
  mark(view);
}

// The sample next to a time, of those with a value.
function nearest(view, time) {
  const away = n => Math.abs(view.times[n] - time);
  return view.points.reduce((best, n) => away(n) <= away(best) ? n : best, view.points[0]);
}

// Draws the cursor. The legend has the values there, or without a cursor the last that are known.
function mark(view) {
  const { into, lines, points } = view;
  const n = view.at === null || !points.length ? null : nearest(view, view.at);
  const value = line => n === null ? line.values.findLast(one => one !== null) ?? null : line.values[n];
  const said = lines.map(line => `${line.name}: ${value(line) === null ? 'unknown' : view.show(value(line))}`);
  said.forEach((text, k) => { view.legend.children[k].lastChild.textContent = text; });
  view.cursor.replaceChildren(...(n === null ? [] : pointer(view, n)));
  const when = n === null ? 'now' : moment(view.times[n]);
  const state = { role: 'slider', tabindex: 0, 'aria-label': into.parentElement.querySelector('h2').textContent, 'aria-valuemin': 0,
    'aria-valuemax': Math.max(0, points.length - 1), 'aria-valuenow': Math.max(0, n === null ? points.length - 1 : points.indexOf(n)),
    'aria-valuetext': `${when}, ${said.join(', ')}` };
  for (const [name, what] of Object.entries(state)) into.setAttribute(name, what);
}

// The line of a cursor, its time, and a dot on each value.
function pointer(view, n) {
  const x = view.x(view.times[n]), on = x > view.width / 2 ? ['end', -5] : ['start', 5];
  const dots = view.lines.filter(line => line.values[n] !== null)
    .map(line => draw('circle', { cx: x, cy: view.y(line.values[n]), r: 3.5, fill: line.colour }));
  return [draw('line', { x1: x, x2: x, y1: 6, y2: view.floor }), ...dots,
    draw('text', { x: x + on[1], y: 14, 'text-anchor': on[0] }, moment(view.times[n]))];
}

// A chart's cursor goes with mouse, pen or finger, or by the arrow keys.
function listen(into) {
  const move = time => {
    const view = views.get(into);
    if (!view) return;
    view.at = time;
    mark(view);
  };
  const hide = () => move(null);
  const follow = event => {
    const view = views.get(into);
    if (!view) return;
    const place = view.all.getBoundingClientRect();
    move(view.time((event.clientX - place.left) * view.width / place.width));
  };
  into.addEventListener('pointermove', follow);
  // A finger hides what it points at, so its cursor stays until another place is touched.
  into.addEventListener('pointerdown', event => { if (event.pointerType === 'touch') into.focus({ preventScroll: true }); follow(event); });
  into.addEventListener('pointerleave', event => { if (event.pointerType !== 'touch') hide(); });
  into.addEventListener('pointercancel', hide);
  into.addEventListener('blur', hide);
  into.addEventListener('keydown', event => {
    const view = views.get(into);
    if (!view || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === 'Escape') hide();
    const last = view.points.length - 1, now = view.at === null ? last + 1 : view.points.indexOf(nearest(view, view.at));
    const next = { ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, PageDown: now - 10, PageUp: now + 10, Home: 0, End: last }[event.key];
    if (next === undefined || last < 0) return;
    event.preventDefault();
    move(view.times[view.points[Math.min(last, Math.max(0, next))]]);
  });
}

function bar(parts, whole) {
  const all = draw('svg', { viewBox: '0 0 100 6', preserveAspectRatio: 'none', 'aria-hidden': 'true' });
  all.append(draw('rect', { width: 100, height: 6, fill: 'var(--line)' }));
  let from = 0;
  for (const [part, colour] of parts) {
    const wide = whole > 0 ? 100 * part / whole : 0;
    all.append(draw('rect', { x: from, width: wide, height: 6, fill: colour }));
    from += wide;
  }
  return all;
}

// A cell is a text, a number, an element, or an object with a class.
function table(id, heads, rows, none) {
  const cell = (tag, what) => {
    const one = make(tag, typeof what === 'object' && what.className ? { className: what.className } : {});
    one.append(typeof what === 'object' && 'text' in what ? what.text : what);
    return one;
  };
  if (!rows.length) { at(id).replaceChildren(make('tr', {}, make('td', { textContent: none }))); return; }
  const head = make('thead', {}, make('tr', {}, ...heads.map(what => cell('th', what))));
  at(id).replaceChildren(head, make('tbody', {}, ...rows.map(row => make('tr', {}, ...row.map(what => cell('td', what))))));
}

const right = text => ({ text: String(text), className: 'number' });
const words = text => ({ text, className: 'words' });
// A cell that a narrow page has no room for.
const less = text => ({ text: String(text), className: 'number less' });
const aside = text => ({ text, className: 'words less' });

function tiles(status) {
  const modes = ['stopped', 'merging', 'giving all back'];
  const present = ['pages_shared', 'pages_sharing', 'pages_unshared', 'pages_volatile', 'zero_pages', 'pages_skipped']
    .reduce((sum, name) => sum + status[name], 0) * PAGE;
  const share = present > 0 ? percent(100 * status.saved_bytes / present) : '–';
  at('state').textContent = `${modes[status.run]}, ${count(status.threads, 'thread')}, a look every ${status.effective_period_ms / 1000} s, ` +
    count(status.full_scans, 'round') + (status.only_user === null ? '' : `; only guests of user ${status.only_user}`);
  const whole = [['net, less all overhead', bytes(status.net_saved_bytes)],
    ['canonical pages', bytes(status.store_bytes)], ['own memory', bytes(status.metadata_bytes)],
    ['longest window', `${number(status.window_max_us)} µs`]];
  // Figures of the whole engine are told to those who see all guests.
  const all = [['saved', bytes(status.saved_bytes)], ['of the memory offered', share], ['guests', number(status.guests.length)],
    ...(status.only_user === null ? whole : [])];
  at('tiles').replaceChildren(...all.map(([name, value]) => make('div', {}, make('b', { textContent: value }), make('span', { textContent: name }))));
}

function pages(status) {
  const states = [['sharing: saved', status.pages_sharing, '--two'], ['shared: the copies', status.pages_shared, '--one'],
    ['zero', status.zero_pages, '--four'], ['unshared', status.pages_unshared, '--five'],
    ['volatile', status.pages_volatile, '--three'], ['skipped', status.pages_skipped, '--six']];
  const whole = states.reduce((sum, [, count]) => sum + count, 0);
  const legend = make('p', { className: 'legend' });
  for (const [name, count, colour] of states) {
    const mark = make('i');
    mark.style.background = `var(${colour})`;
    legend.append(make('span', {}, mark, `${name}: ${bytes(count * PAGE)}`));
  }
  const stack = bar(states.map(([, count, colour]) => [count, `var(${colour})`]), whole);
  stack.style.height = '1.6rem';
  at('pages').replaceChildren(stack, legend);
}

function guests(status) {
  const ranked = [...status.guests].sort((a, b) => b.saved_bytes - a.saved_bytes);
  const heads = ['name', right('PID'), 'domain', right('saved'), less('net'), { text: 'of its memory', className: 'bar' }, less('memory'), less('in motion'),
    less('mappings'), less('CPU time'), aside('')];
  const rows = ranked.slice(0, GUESTS).map(guest => [guest.name || guest.comm, right(guest.pid), guest.domain, right(bytes(guest.saved_bytes)),
    less(bytes(guest.net_saved_bytes)), { text: bar([[guest.saved_bytes, 'var(--two)']], guest.pages * PAGE), className: 'bar' },
    less(bytes(guest.pages * PAGE)), less(bytes(guest.pages_volatile * PAGE)), less(number(guest.vmas)), less(`${guest.cpu_seconds.toFixed(1)} s`),
    aside(guest.responsive ? '' : 'does not answer')]);
  const more = ranked.length > GUESTS ? [[`and ${ranked.length - GUESTS} more`]] : [];
  table('guests', heads, [...rows, ...more], 'No guests: `pageone run -- COMMAND` starts one.');
}

function domains(status) {
  const all = new Map();
  for (const guest of status.guests) {
    const one = all.get(guest.domain) || { guests: 0, saved: 0, pages: 0 };
    one.guests += 1; one.saved += guest.saved_bytes; one.pages += guest.pages;
    all.set(guest.domain, one);
  }
  const ranked = [...all].sort((a, b) => b[1].saved - a[1].saved).slice(0, GUESTS);
  const alone = one => one.guests === 1 ? 'one guest alone: it shares with no other' : '';
  table('domains', ['domain', right('guests'), right('memory'), right('saved'), aside('')],
    ranked.map(([name, one]) => [name, right(one.guests), right(bytes(one.pages * PAGE)), right(bytes(one.saved)), aside(alone(one))]), 'none');
  table('nodes', ['node', 'domain', right('held'), right('astray')], status.store_nodes.slice(0, GUESTS).map(one =>
    [`node ${one.node}`, one.domain, right(bytes(one.pages * PAGE)), right(bytes(one.astray * PAGE))]), 'This machine has one node.');
}

function reasons(status, ksm) {
  const rows = [];
  const add = (whose, why, much) => rows.push([whose, words(why), right(much)]);
  const parts = [['written lately, or not yet observed for two periods', status.pages_volatile],
    ['settled, and no other page of the domain is equal', status.pages_unshared],
    ['written after they were merged, and not to be merged again', status.pages_broken],
    ['in use for I/O, or shared by fork or KSM', status.pages_pinned],
    ['in mappings of files, or in stores of another engine', status.pages_foreign],
    ['in mappings of a kind that is not merged', status.pages_unfit],
    ['waiting for another try: there was no room, or merging failed', status.pages_skipped - status.pages_broken -
      status.pages_pinned - status.pages_foreign - status.pages_unfit]];
  for (const [why, pages] of parts) if (pages > 0) add('all guests', why, bytes(pages * PAGE));
  if (status.huge_pages_kept) add('all guests', 'huge pages that are left whole (thp)', bytes(status.huge_pages_kept * 512 * PAGE));
  if (status.pages_over_limit) add('all guests', 'no room below store_limit, tries so far', number(status.pages_over_limit));
  // The table ends somewhere, and these are not told of elsewhere.
  for (const one of status.unserved) add(`process ${one.pid} of user ${one.uid}`, `not served: ${one.why}`, count(one.times, 'time'));
  for (const guest of status.guests.slice(0, 1000)) {
    const whose = `${guest.name || guest.comm} ${guest.pid}`;
    for (const reason of guest.reasons) add(whose, reason.why, reason.pages ? bytes(reason.pages * PAGE) : '');
  }
  table('reasons', ['whose', 'why', right('how much')], rows.slice(0, 4 * GUESTS), 'Nothing is left alone.');
  const runs = { 0: 'stopped', 1: 'running', 2: 'unmerging' }[ksm.run];
  at('ksm').textContent = runs === undefined ? 'This kernel has no KSM.'
    : `The kernel's KSM, for comparison: ${runs}, ${bytes(Number(ksm.pages_sharing || 0) * PAGE)} saved, ` +
      `${bytes(Number(ksm.general_profit || 0))} by its own estimate of the profit.`;
}

// Percent of a core between two samples; nothing before or after leaves a gap, and so does a count that began anew.
function rate(samples) {
  return samples.map((sample, n) => {
    const before = samples[n - 1];
    if (!before || before.cpu_seconds === null || sample.cpu_seconds === null || sample.cpu_seconds < before.cpu_seconds) return null;
    return 100 * (sample.cpu_seconds - before.cpu_seconds) / (sample.at - before.at);
  });
}

// A sample of nothing wherever no daemon ran: lines break there.
function broken(samples) {
  const nothing = { saved_bytes: null, net_saved_bytes: null, stall_percent: null, cpu_seconds: null };
  return samples.flatMap((sample, n) => n > 0 && sample.unseen_seconds > 0 ? [{ ...nothing, at: sample.at }, sample] : [sample]);
}

function charts(seen) {
  const samples = broken(seen);
  const times = samples.map(sample => sample.at), of = name => samples.map(sample => sample[name]);
  chart(at('saved'), times, [{ name: 'saved', colour: 'var(--two)', values: of('saved_bytes') },
    { name: 'net', colour: 'var(--one)', values: of('net_saved_bytes') }], bytes, true);
  chart(at('cpu'), times, [{ name: 'engine and agents', colour: 'var(--three)', values: rate(samples) }], percent, false);
  chart(at('stalls'), times, [{ name: 'waiting', colour: 'var(--six)', values: of('stall_percent') }], percent, false);
}

async function get(path) {
  const answer = await fetch(path, { cache: 'no-store' });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

async function look() {
  const trouble = [];
  try {
    const { status, ksm } = await get('/api/status');
    tiles(status); pages(status); guests(status); domains(status); reasons(status, ksm);
  } catch (why) { trouble.push(why.message); }
  try { charts((await get(`/api/history?last=${last}`)).samples); } catch (why) { trouble.push(why.message); }
  at('trouble').hidden = !trouble.length;
  at('trouble').textContent = [...new Set(trouble)].join(' · ');
}

at('range').addEventListener('click', event => {
  if (!event.target.dataset.last) return;
  last = event.target.dataset.last;
  for (const one of at('range').children) one.setAttribute('aria-pressed', String(one.dataset.last === last));
  look();
});

async function follow() {
  if (!document.hidden) await look();
  setTimeout(follow, ASK_EVERY);
}
for (const id of ['saved', 'cpu', 'stalls']) listen(at(id));
addEventListener('resize', () => look());
follow();
