// Tokens of an answer, on a page with the elements #log and #tip. cli/page.py puts this file into both pages.
const at = id => document.getElementById(id);
const log = at("log"), tip = at("tip");
let about = {};  // the model, as /v1/models has it; plain_tok_s, its source and plain_until where plain decoding was measured

const make = (tag, name = "", text = "") => Object.assign(document.createElement(tag), {className: name, textContent: text});
const formatted = (x, digits = 2) => x === null || x === undefined ? "–" : x.toFixed(digits);

/** A token as text that tells where it came from. */
function append(element, token) {
  const span = make("span", token.origin, token.text);
  span.dataset.origin = token.origin;
  const drafted = token.q !== null ? `p ${formatted(token.p, 4)} of the target, q ${formatted(token.q, 4)} of the draft\n`
    + `Σ min(p, q) ${formatted(token.overlap, 4)} at this position\n` : `p ${formatted(token.p, 4)} of the target, not drafted\n`;
  const unfiltered = `${formatted(Math.exp(token.logprob), 4)} before temperature and filters\n`;
  span.dataset.tip = `${token.origin}\n${drafted}${unfiltered}round ${token.round}, after ${formatted(1000 * token.at, 0)} ms`;
  element.append(span);
  return span;
}

/** Was plain decoding measured in the same minutes? An older rate is of a machine that had other work, or less. */
const isRecent = () => Boolean(about.plain_tok_s) && performance.now() < (about.plain_until ?? Infinity);

/** Rates so far by the clock of decoding, for the line below a text. */
class Tally {
  constructor() { this.tokens = 0; this.overlap = 0; this.numVerified = 0; this.rounds = new Set(); }
  add(token) {
    this.first ??= token.at;
    this.last = token.at;
    this.tokens++;
    if (this.tokens > 1) this.rounds.add(token.round);
    if (token.q !== null) { this.overlap += token.overlap; this.numVerified++; }
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
log.addEventListener("blur", () => point(null));
log.addEventListener("keydown", event => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key], spans = [...log.querySelectorAll("[data-origin]")];
  if (!step || !spans.length) return;
  event.preventDefault();
  const now = spans.indexOf(chosen), next = spans[now < 0 ? (step > 0 ? 0 : spans.length - 1) : Math.max(0, Math.min(now + step, spans.length - 1))];
  next.scrollIntoView({block: "nearest"});
  requestAnimationFrame(() => point(next));
});
