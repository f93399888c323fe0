// Markdown: parseBlocks() cuts lines into blocks. A block never changes because of text that comes after the block that
// follows it, so a streamed answer is parsed from its last block on. Raw HTML is text. Indented code and underlined headings
// are not supported: models indent by accident and write --- for a line.

const MAX_DEPTH = 10;
const MARKER = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s(.*))?$/;
const QUOTE = /^ {0,3}> ?/;
const MATH_START = /^\s*(\$\$|\\\[|\\begin\{([a-zA-Z]+\*?)\})/;

const indentOf = line => line.length - line.trimStart().length;
const startsBlock = line => FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || MARKER.test(line)
  || MATH_START.test(line);

function parseBlocks(lines, depth = 0) {
  const blocks = [], readers = depth < MAX_DEPTH ? [readFence, readMath, readHeading, readRule, readQuote, readList, readTable] : [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at += 1; continue; }
    let block = null;
    for (const read of readers) if ((block = read(lines, at))) break;
    block ||= readParagraph(lines, at);
    Object.assign(block, {from: at, depth, source: lines.slice(at, block.to).join("\n")});
    blocks.push(block);
    at = block.to;
  }
  return blocks;
}

function readFence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const close = new RegExp(`^ {0,3}${open[1][0]}{${open[1].length},}\\s*$`), indent = indentOf(lines[at]);
  let to = at + 1;
  while (to < lines.length && !close.test(lines[to])) to += 1;
  const inside = lines.slice(at + 1, to).map(line => line.slice(Math.min(indent, indentOf(line))));
  return {type: "code", language: open[2].trim().split(/\s/)[0], text: inside.join("\n"), to: Math.min(to + 1, lines.length)};
}

/** Display math. Without its end, the lines up to the next blank line are a paragraph. */
function readMath(lines, at) {
  const open = MATH_START.exec(lines[at]);
  if (!open) return null;
  if (open[2]) return readEnvironment(lines, at, open[2]);
  const closer = open[1] === "$$" ? "$$" : "\\]";
  let tex = lines[at].slice(open[0].length), to = at + 1;
  while (!tex.includes(closer) && to < lines.length && lines[to].trim()) tex += "\n" + lines[to++];
  const [inside, rest] = tex.split(closer, 2);
  if (rest !== undefined && /^[\s.,;]*$/.test(tex.slice(inside.length + closer.length))) return {type: "math", tex: inside, to};
  while (rest !== undefined && to < lines.length && lines[to].trim() && !startsBlock(lines[to])) to += 1;
  return {type: "paragraph", text: lines.slice(at, to).join("\n"), to};
}

/** An environment such as `align` without dollars around it. */
function readEnvironment(lines, at, name) {
  const end = `\\end{${name}}`;
  let to = at;
  while (to < lines.length && !lines[to].includes(end) && lines[to].trim()) to += 1;
  const tex = lines.slice(at, to + 1).join("\n").trim();
  const isWhole = Object.hasOwn(ENVIRONMENTS, name.replace("*", "")) && /^[.,;]?$/.test(tex.split(end)[1] ?? "-");
  return isWhole ? {type: "math", tex: tex.slice(0, tex.indexOf(end) + end.length), to: to + 1} : null;
}

function readHeading(lines, at) {
  const heading = HEADING.exec(lines[at]);
  return heading && {type: "heading", level: heading[1].length, text: (heading[2] || "").trim().replace(/\s#+$/, ""), to: at + 1};
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? {type: "rule", to: at + 1} : null;
}

function readQuote(lines, at) {
  if (!QUOTE.test(lines[at])) return null;
  let to = at + 1;
  while (to < lines.length && (QUOTE.test(lines[to]) || (lines[to].trim() && !startsBlock(lines[to])))) to += 1;
  return {type: "quote", lines: lines.slice(at, to).map(line => line.replace(QUOTE, "")), to};
}

function readList(lines, at) {
  const first = MARKER.exec(lines[at]);
  if (!first) return null;
  const isOrdered = first[2].length > 1, items = [];
  let to = at, next = at;
  for (let marker = first; marker && (marker[2].length > 1) === isOrdered && !RULE.test(lines[next]);
    marker = next < lines.length && MARKER.exec(lines[next])) {
    const item = readItem(lines, next, marker);
    items.push(item);
    to = next = item.to;
    while (next < lines.length && !lines[next].trim()) next += 1;
  }
  return items.length ? {type: "list", isOrdered, start: parseInt(first[2], 10) || 0, items, to} : null;
}

/** An item continues with lines that are indented by two more than its marker, which is less than CommonMark asks for. */
function readItem(lines, at, marker) {
  const content = marker[3].length > 4 || !marker[3] ? marker[1].length + marker[2].length + 1 : marker[0].length;
  const nested = Math.min(content, marker[1].length + 2), inside = [lines[at].slice(content)];
  let to = at + 1, end = to;
  for (; to < lines.length; to += 1) {
    const line = lines[to], isBlank = !line.trim();
    if (!isBlank && indentOf(line) < nested && (!lines[to - 1].trim() || startsBlock(line))) break;
    inside.push(line.slice(Math.min(content, indentOf(line))));
    if (!isBlank) end = to + 1;
  }
  inside.length = end - at;
  inside[0] = inside[0].replace(/^\[( |x|X)\] /, (_, mark) => mark === " " ? "☐ " : "☑ ");
  return {lines: inside, source: inside.join("\n"), to: end};
}

const isDivider = line => line.includes("-") && /^[\s|:-]+$/.test(line) && cells(line).every(cell => /^:?-+:?$/.test(cell));

/** Cells of a table row. `\|` is no border. */
function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(^|[^\\])\|$/, "$1");
  return inside.replace(/\\\|/g, "\0").split("|").map(cell => cell.replaceAll("\0", "|").trim());
}

const startsTable = (lines, at) => at + 1 < lines.length && lines[at].includes("|") && isDivider(lines[at + 1])
  && cells(lines[at]).length === cells(lines[at + 1]).length;

function readTable(lines, at) {
  if (!startsTable(lines, at)) return null;
  let to = at + 2;
  while (to < lines.length && lines[to].trim() && !startsBlock(lines[to])) to += 1;
  const align = cells(lines[at + 1]).map(cell => cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left");
  return {type: "table", head: lines[at], align, rows: lines.slice(at + 2, to), to};
}

function readParagraph(lines, at) {
  let to = at + 1;
  while (to < lines.length && lines[to].trim() && !startsBlock(lines[to]) && !startsTable(lines, to)) to += 1;
  return {type: "paragraph", text: lines.slice(at, to).join("\n"), to};
}
