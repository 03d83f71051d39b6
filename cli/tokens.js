// Tokens of an answer, on a page with the elements #log and #tip. cli/page.py puts this file into both pages.
const at = id => document.getElementById(id);
const log = at("log"), tip = at("tip");
let about = {};  // the model, as /v1/models has it; plain_tok_s, its source and plain_until where plain decoding was measured

const make = (tag, name = "", text = "") => Object.assign(document.createElement(tag), {className: name, textContent: text});
const formatted = (x, digits = 2) => x === null || x === undefined ? "–" : x.toFixed(digits);

const quoted = text => `“${text.replaceAll("\n", "↵")}”`;

/** What is known of a token, line by line. token.top, of some: the target's most likely tokens, [text, log-probability]. */
function description(token) {
  const lines = [token.origin], [rejected, ...dropped] = token.rejected ?? [];
  if (token.q === null) lines.push(`p ${formatted(token.p, 4)} of the target, not drafted`);
  else lines.push(`p ${formatted(token.p, 4)} of the target, q ${formatted(token.q, 4)} of the draft`,
    `Σ min(p, q) ${formatted(token.overlap, 4)} at this position`);
  lines.push(`${formatted(Math.exp(token.logprob), 4)} before temperature and filters`);
  if (rejected !== undefined) lines.push(`the draft had ${quoted(rejected)}: p ${formatted(token.rejected_p, 4)}, q ${formatted(token.rejected_q, 4)}`);
  if (dropped.length) lines.push(`and behind it ${quoted(dropped.join(""))}, dropped with it`);
  if (token.top) lines.push("the target's candidates: " + token.top.map(([text, logprob]) => `${quoted(text)} ${formatted(Math.exp(logprob))}`).join(", "));
  return [...lines, `round ${token.round}, after ${formatted(1000 * token.at, 0)} ms`].join("\n");
}

/** A token as text that tells where it came from. */
function append(element, token) {
  const span = make("span", token.origin, token.text);
  Object.assign(span.dataset, {origin: token.origin, round: token.round, tip: description(token)});
  if (token.rejected?.length) span.dataset.rejected = token.rejected.join("").replaceAll("\n", "↵");
  element.append(span);
  return span;
}

/** Was plain decoding measured in the same minutes? An older rate is of a machine that had other work, or less. */
const isRecent = () => Boolean(about.plain_tok_s) && performance.now() < (about.plain_until ?? Infinity);

/** Rates so far by the clock of decoding, for the line below a text. */
class Tally {
  constructor() {
    this.tokens = 0; this.overlap = 0; this.numVerified = 0; this.rounds = new Set();
    this.round = null; this.index = 0;
    this.reached = []; this.accepted = [];  // by position in the draft
  }
  add(token) {
    this.index = token.round === this.round ? this.index + 1 : 0;
    this.round = token.round;
    this.first ??= token.at;
    this.last = token.at;
    this.tokens++;
    if (this.tokens > 1) this.rounds.add(token.round);
    if (token.q === null) return;
    this.overlap += token.overlap;
    this.numVerified++;
    this.reached[this.index] = (this.reached[this.index] ?? 0) + 1;
    this.accepted[this.index] = (this.accepted[this.index] ?? 0) + (token.origin === "accepted");
  }
  /** Bars of the acceptance by position; null where nothing was drafted. */
  get bars() {
    if (!this.numVerified) return null;
    const figure = make("div", "bars"), labels = [];
    this.reached.forEach((reached, index) => {
      const share = this.accepted[index] / reached, bar = figure.appendChild(make("span"));
      bar.append(make("b", "", formatted(share)), make("i"), make("small", "", `${index + 1}`));
      bar.style.setProperty("--share", `${100 * share}%`);
      labels.push(`position ${index + 1}: ${this.accepted[index]} of ${reached}`);
    });
    figure.append(make("small", "", "accepted, by position in the draft"));
    figure.title = `Drafted tokens that were accepted, of those that were verified. ${labels.join(", ")}`;
    figure.setAttribute("role", "img");
    figure.setAttribute("aria-label", figure.title);
    return figure;
  }
  get rate() { return this.last > this.first ? (this.tokens - 1) / (this.last - this.first) : null; }
  get line() {
    const rounds = this.rounds.size;
    return `${formatted(this.rate, 1)} tok/s · α ${this.numVerified ? formatted(this.overlap / this.numVerified) : "–"} · `
      + `${rounds ? formatted((this.tokens - 1) / rounds) : "–"} tokens a round`
      + (isRecent() ? ` · plain decoding: ${formatted(about.plain_tok_s, 1)} tok/s ${about.plain_source}` : "");
  }
}

// One tip for all tokens: by mouse, by a tap, and by the arrow keys within the conversation. A finger leaves when it is
// lifted, and the tip stays until the next tap elsewhere.
let chosen = null;
function point(span) {
  chosen = span;
  tip.hidden = !span;
  if (!span) return;
  tip.textContent = span.dataset.tip;
  const box = span.getClientRects()[0] ?? span.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${box.top > tip.offsetHeight + 8 ? box.top - tip.offsetHeight - 4 : box.bottom + 4}px`;
}
log.addEventListener("pointerover", event => point(event.target.closest("[data-origin]")));
log.addEventListener("pointerleave", event => { if (event.pointerType === "mouse") point(null); });
addEventListener("pointerdown", event => { if (!event.target.closest("[data-origin]")) point(null); });
addEventListener("scroll", () => point(null), true);  // of the page, or of a box in it
log.addEventListener("focusout", () => point(null));
log.addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], spans = [...log.querySelectorAll("[data-origin]")];
  if (!step || !spans.length || event.target !== log) return;
  event.preventDefault();
  const now = spans.indexOf(chosen), next = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.max(0, Math.min(now + step, spans.length - 1))];
  next.scrollIntoView({block: "nearest"});
  requestAnimationFrame(() => point(next));
});
