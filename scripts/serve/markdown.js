// Markdown as nodes, in a time that grows with the text's length. A model's text enters the page as text nodes alone, and
// no part of it is ever parsed as HTML: tags that it writes stay visible text. Of links only http and https become
// anchors. serve.html includes this file.

const MAX_DEPTH = 16;  // of quotes and lists, and again of marks; what stands deeper is text

// The marks that a character may begin. A text between two signs ends at the first `close` behind `open`, which is
// looked for once: where a text has none, its other signs need not look again. The other marks end before the next
// character of their own sort.
const DELIMITED = {
  "**": {tag: "strong", open: /\*\*(?=\S)/yu, close: /(?<=\S)\*\*/gu},
  "__": {tag: "strong", open: /(?<![\p{L}\p{N}])__(?=\S)/yu, close: /(?<=\S)__(?![\p{L}\p{N}])/gu},
  "~~": {tag: "del", open: /~~(?=\S)/yu, close: /(?<=\S)~~/gu},
};
const NEAR = {
  "*": {tag: "em", pattern: /\*([^\s*](?:[^*]*[^\s*])?)\*/yu},
  "_": {tag: "em", pattern: /(?<![\p{L}\p{N}])_([^\s_](?:[^_]*[^\s_])?)_(?![\p{L}\p{N}])/yu},
  "[": {tag: "a", pattern: /\[([^[\]\n]+)\]\((https?:\/\/[^\s()<>]+)\)/yu},
  "\\": {tag: "", pattern: /\\([!-/:-@[-`{-~])/yu},
};

const execAt = (pattern, text, i) => { pattern.lastIndex = i; return pattern.exec(text); };

/** Code at text[i], a run of ticks: [content, end]. Without an equal run behind it the ticks are text. */
function codeAt(text, i, absent) {
  const [ticks] = execAt(/`+/y, text, i), start = i + ticks.length;
  absent.runs ??= new Map([...text.matchAll(/`+/g)].map(run => [run[0].length, run.index]));  // the last of each length
  if (!(absent.runs.get(ticks.length) > i)) return [null, start];
  for (const run of text.slice(start).matchAll(/`+/g)) {
    if (run[0].length !== ticks.length) continue;
    const code = text.slice(start, start + run.index), isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
    return [isPadded ? code.slice(1, -1) : code, start + run.index + ticks.length];
  }
}

/** The mark at text[i]: {tag, inner, url, end}, or null. */
function markAt(text, i, absent) {
  const sign = text.slice(i, i + 2), delimited = DELIMITED[sign];
  if (delimited && !absent[sign] && execAt(delimited.open, text, i)) {
    const close = execAt(delimited.close, text, i + 3);
    if (close) return {tag: delimited.tag, inner: text.slice(i + 2, close.index), end: close.index + 2};
    absent[sign] = true;
  }
  const near = NEAR[text[i]], match = near && execAt(near.pattern, text, i);
  return match ? {tag: near.tag, inner: match[1], url: match[2], end: i + match[0].length} : null;
}

/** The text of a paragraph, a heading or an item, with its marks as elements. */
function inline(parent, text, depth = 0) {
  const absent = {}, signs = /[`*_~[\\]/g;
  let end = 0;  // of what the parent has
  const appendUpTo = (start, element, next) => { parent.append(text.slice(end, start), element); end = next; };
  for (let sign; depth < MAX_DEPTH && (sign = execAt(signs, text, signs.lastIndex));) {
    const i = sign.index;
    if (sign[0] === "`") {
      const [code, next] = codeAt(text, i, absent);
      if (code !== null) appendUpTo(i, make("code", "", code), next);
      signs.lastIndex = next;
      continue;
    }
    const mark = markAt(text, i, absent);
    if (!mark) continue;
    const {tag, inner, url, end: next} = mark;
    if (tag === "") appendUpTo(i, inner, next);
    else if (url) appendUpTo(i, inline(Object.assign(make("a"), {href: url, rel: "noopener noreferrer", target: "_blank"}), inner, depth + 1), next);
    else appendUpTo(i, inline(make(tag), inner, depth + 1), next);
    signs.lastIndex = next;
  }
  parent.append(text.slice(end));
  return parent;
}

const BLOCKS = {
  fence: /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))[^`]*$/,
  heading: /^ {0,3}(#{1,6})\s+(?=\S)([^]*)$/,
  emptyHeading: /^ {0,3}(#{1,6})\s+$/,
  rule: /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/,
  quote: /^ {0,3}>\s?([^]*)$/,
  item: /^(\s*)([-*+]|\d{1,9}[.)])\s+(?=\S|$)([^]*)$/,
};
const beginsBlock = line => !line.trim() || Object.values(BLOCKS).some(pattern => pattern.test(line));

/** Appends the block that begins at lines[i], and returns the index of the line behind it. */
function block(parent, lines, i, depth) {
  const line = lines[i], match = name => line.match(BLOCKS[name]);
  let found, end = i + 1;
  if (!line.trim()) return end;
  if ((found = match("fence"))) {
    while (end < lines.length && !lines[end].trim().startsWith(found[1])) end++;
    parent.appendChild(make("pre")).append(make("code", "", lines.slice(i + 1, end).join("\n")));
    return end + 1;
  }
  if ((found = match("heading") ?? match("emptyHeading"))) {
    const title = (found[2] ?? "").trim().replace(/(?<![^\s])#+$/, "").trim();
    inline(parent.appendChild(make(`h${Math.min(6, found[1].length + 2)}`)), title);  // h1 and h2 are the page's own
    return end;
  }
  if (match("rule")) { parent.append(make("hr")); return end; }
  if (depth < MAX_DEPTH && match("quote")) {
    while (end < lines.length && BLOCKS.quote.test(lines[end])) end++;
    const content = lines.slice(i, end).map(line => line.match(BLOCKS.quote)[1]);
    parent.appendChild(make("blockquote")).append(markdown(content.join("\n"), depth + 1));
    return end;
  }
  if (depth < MAX_DEPTH && (found = match("item"))) return list(parent, lines, i, found, depth);
  while (end < lines.length && !beginsBlock(lines[end])) end++;
  inline(parent.appendChild(make("p")), lines.slice(i, end).join("\n"));
  return end;
}

/** A list: items of the same sort. Lines that stand further to the right than an item's sign belong to it. */
function list(parent, lines, i, [, , firstSign], depth) {
  const isOrdered = /\d/.test(firstSign), element = parent.appendChild(make(isOrdered ? "ol" : "ul"));
  if (isOrdered) element.start = parseInt(firstSign);
  while (i < lines.length) {
    const [, indent, sign, text] = lines[i].match(BLOCKS.item) ?? [];
    if (!sign || /\d/.test(sign) !== isOrdered) break;
    const content = [text];
    for (i++; i < lines.length && (!lines[i].trim() || lines[i].search(/\S/) > indent.length); i++)
      content.push(lines[i].slice(Math.min(lines[i].search(/\S|$/), indent.length + sign.length + 1)));
    element.appendChild(make("li")).append(markdown(content.join("\n"), depth + 1));
  }
  return i;
}

function markdown(text, depth = 0) {
  const blocks = document.createDocumentFragment(), lines = text.split("\n");
  for (let i = 0; i < lines.length;) i = block(blocks, lines, i, depth);
  return blocks;
}
