// Markdown as nodes. A model's text enters the page as text nodes alone, and no part of it is ever parsed as HTML: tags
// that it writes stay visible text. Of links only http and https become anchors. scripts/serve.html includes this file.
const MARK = new RegExp([
  /(?<tick>`+)(?<code>[^`](?:[^]*?[^`])?)\k<tick>(?!`)/,
  /\*\*(?<strong>\S(?:[^]*?\S)?)\*\*/,
  /(?<![\p{L}\p{N}])__(?<strong2>\S(?:[^]*?\S)?)__(?![\p{L}\p{N}])/,
  /\*(?<em>[^\s*](?:[^*]*[^\s*])?)\*/,
  /(?<![\p{L}\p{N}])_(?<em2>[^\s_](?:[^_]*[^\s_])?)_(?![\p{L}\p{N}])/,
  /~~(?<del>\S(?:[^]*?\S)?)~~/,
  /\[(?<label>[^\]\n]+)\]\((?<url>https?:\/\/[^\s()<>]+)\)/,
  /\\(?<escaped>[!-\/:-@[-`{-~])/,
].map(part => part.source).join("|"), "gu");

const BLOCKS = {
  fence: /^ {0,3}(`{3,}|~{3,})[^`]*$/,
  heading: /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/,
  rule: /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/,
  quote: /^ {0,3}>\s?(.*)$/,
  item: /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/,
};
const beginsBlock = line => !line.trim() || Object.values(BLOCKS).some(pattern => pattern.test(line));

/** The text of a paragraph, a heading or an item, with its marks as elements. */
function inline(parent, text) {
  let end = 0;
  for (const match of text.matchAll(MARK)) {
    const {code, strong, strong2, em, em2, del, label, url, escaped} = match.groups;
    parent.append(text.slice(end, match.index));
    end = match.index + match[0].length;
    if (code !== undefined) parent.append(make("code", "", code.replace(/^ (.*\S.*) $/s, "$1")));
    else if (escaped !== undefined) parent.append(escaped);
    else if (url !== undefined) {
      const link = parent.appendChild(Object.assign(make("a"), {href: url, rel: "noopener noreferrer", target: "_blank"}));
      inline(link, label);
    } else {
      const [tag, inner] = strong ?? strong2 ? ["strong", strong ?? strong2] : em ?? em2 ? ["em", em ?? em2] : ["del", del];
      inline(parent.appendChild(make(tag)), inner);
    }
  }
  parent.append(text.slice(end));
  return parent;
}

/** Appends the block that begins at lines[i], and returns the index of the line behind it. */
function block(parent, lines, i) {
  const line = lines[i], match = name => line.match(BLOCKS[name]);
  let found, end = i + 1;
  if (!line.trim()) return end;
  if ((found = match("fence"))) {
    while (end < lines.length && !lines[end].trim().startsWith(found[1])) end++;
    parent.appendChild(make("pre")).append(make("code", "", lines.slice(i + 1, end).join("\n")));
    return end + 1;
  }
  if ((found = match("heading"))) {
    inline(parent.appendChild(make(`h${Math.min(6, found[1].length + 2)}`)), found[2]);  // h1 and h2 are the page's own
    return end;
  }
  if (match("rule")) { parent.append(make("hr")); return end; }
  if (match("quote")) {
    while (end < lines.length && BLOCKS.quote.test(lines[end])) end++;
    parent.appendChild(make("blockquote")).append(markdown(lines.slice(i, end).map(line => line.match(BLOCKS.quote)[1]).join("\n")));
    return end;
  }
  if ((found = match("item"))) return list(parent, lines, i, found);
  while (end < lines.length && !beginsBlock(lines[end])) end++;
  inline(parent.appendChild(make("p")), lines.slice(i, end).join("\n"));
  return end;
}

/** A list: items of the same sort. Lines that stand further to the right than an item's sign belong to it. */
function list(parent, lines, i, [, , firstSign]) {
  const isOrdered = /\d/.test(firstSign), element = parent.appendChild(make(isOrdered ? "ol" : "ul"));
  if (isOrdered) element.start = parseInt(firstSign);
  while (i < lines.length) {
    const [, indent, sign, text] = lines[i].match(BLOCKS.item) ?? [];
    if (!sign || /\d/.test(sign) !== isOrdered) break;
    const content = [text];
    for (i++; i < lines.length && (!lines[i].trim() || lines[i].search(/\S/) > indent.length); i++)
      content.push(lines[i].slice(Math.min(lines[i].search(/\S|$/), indent.length + sign.length + 1)));
    element.appendChild(make("li")).append(markdown(content.join("\n")));
  }
  return i;
}

function markdown(text) {
  const blocks = document.createDocumentFragment(), lines = text.split("\n");
  for (let i = 0; i < lines.length;) i = block(blocks, lines, i);
  return blocks;
}
