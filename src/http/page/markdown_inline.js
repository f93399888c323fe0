// Markdown: inline() turns the text of a block into nodes: emphasis, code, links and formulas.

const SPECIAL = /\\[^]|`+|\*+|_+|~+|!?\[|<|\$+|\n|&|https?:\/\//g;
const ENTITIES = {amp: "&", lt: "<", gt: ">", quot: "\"", nbsp: "\u00a0", "#39": "'"};
/** Limits that keep hostile text linear: emphasis marks in one block, and characters of a link's text. */
const MAX_MARKS = 1000, MAX_LINK = 2000;

/** Returns the address if it may be a link, else null. Everything but web and mail addresses would run or leave the page's origin. */
function safeAddress(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch { return null; }
}

function linkTo(address, ...children) {
  const link = make("a", "", ...children);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

/** Returns the nodes of Markdown text. */
function inline(text, insideLink = false) {
  const parent = document.createDocumentFragment(), marks = [];
  let at = 0, plain = "";
  const flush = () => { if (plain) parent.append(plain); plain = ""; };
  const put = (node, to) => { flush(); parent.append(node); at = to; };
  const match = new RegExp(SPECIAL);
  for (let found; (match.lastIndex = at, found = match.exec(text));) {
    plain += text.slice(at, found.index);
    at = found.index;
    const token = found[0], end = at + token.length, kind = token[0];
    const special = kind === "\\" ? readEscape(text, at)
      : kind === "`" ? readCode(text, at, token)
      : kind === "$" ? readDollars(text, at, token)
      : kind === "<" ? readAngle(text, at)
      : kind === "&" ? readEntity(text, at)
      : kind === "\n" ? {node: make("br"), to: end}
      : insideLink ? null
      : kind === "[" || kind === "!" ? readLink(text, at, end)
      : kind === "h" ? readBareLink(text, at)
      : null;
    if (special) {
      if (kind === "\n") plain = plain.trimEnd();
      put(special.node, special.to);
    } else if ("*_~".includes(kind) && token.length <= 3 && marks.length < MAX_MARKS) {
      const node = document.createTextNode(token);
      marks.push({node, kind, count: token.length, ...flanks(text, at, end, kind)});
      put(node, end);
    } else { plain += token; at = end; }
  }
  plain += text.slice(at);
  flush();
  pairMarks(marks);
  return parent;
}

function readEscape(text, at) {
  const next = text[at + 1];
  if (next === "(" || next === "[") {
    const length = text.slice(at + 2, at + MAX_MATH).indexOf(next === "(" ? "\\)" : "\\]");
    if (length >= 0) return {node: drawMath(text.slice(at + 2, at + 2 + length), next === "["), to: at + length + 4};
  }
  if (next === "\n") return {node: make("br"), to: at + 2};
  return /[!-/:-@[-`{-~]/.test(next) ? {node: next, to: at + 2} : null;
}

function readCode(text, at, ticks) {
  for (let close = at + ticks.length; (close = text.indexOf(ticks, close)) >= 0;) {
    let to = close + ticks.length;
    while (text[to] === "`") to += 1;
    if (to === close + ticks.length) {
      const code = text.slice(at + ticks.length, close).replaceAll("\n", " ");
      return {node: make("code", "", code.startsWith(" ") && code.endsWith(" ") && code.trim() ? code.slice(1, -1) : code), to};
    }
    close = to;
  }
  return null;
}

/** `$...$` is math if no space is inside the dollars and no digit follows, so that prices stay prices. */
function readDollars(text, at, dollars) {
  const from = at + dollars.length, close = text.indexOf(dollars, from);
  if (dollars.length > 2 || close <= from) return null;
  const tex = text.slice(from, close), to = close + dollars.length;
  if (dollars === "$" && (/^\s|\s$|\n\s*\n/.test(tex) || /\d/.test(text[to] || ""))) return null;
  return {node: drawMath(tex, dollars === "$$"), to};
}

function readAngle(text, at) {
  const found = /^<(?:(br)\s*\/?|((?:https?:|mailto:)[^\s<>]{1,2000}))>/i.exec(text.slice(at, at + MAX_LINK));
  if (!found) return null;
  const address = found[2] && safeAddress(found[2]), to = at + found[0].length;
  return found[1] ? {node: make("br"), to} : address && {node: linkTo(address, found[2]), to};
}

function readEntity(text, at) {
  const found = /^&(amp|lt|gt|quot|nbsp|#39);/.exec(text.slice(at, at + 7));
  return found && {node: ENTITIES[found[1]], to: at + found[0].length};
}

/** `[text](address "title")`. An image becomes a link, because the page loads nothing from elsewhere. */
function readLink(text, at, from) {
  const close = closing(text, from, "[", "]");
  if (close < 0 || text[close + 1] !== "(") return null;
  const end = closing(text, close + 2, "(", ")");
  if (end < 0) return null;
  const [address] = /^<[^<>]*>|^\S*/.exec(text.slice(close + 2, end).trim());
  const safe = safeAddress(address.replace(/^<|>$/g, "").replace(/\\([!-/:-@[-`{-~])/g, "$1"));
  return safe && {node: linkTo(safe, inline(text.slice(from, close) || address, true)), to: end + 1};
}

/** Position of the bracket that closes the one before `from`, or -1. */
function closing(text, from, open, close) {
  for (let at = from, depth = 1; at < Math.min(text.length, from + MAX_LINK); at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === open) depth += 1;
    else if (text[at] === close && !(depth -= 1)) return at;
  }
  return -1;
}

function readBareLink(text, at) {
  let [address] = /^[^\s<>"'`*]+/.exec(text.slice(at, at + MAX_LINK));
  address = address.replace(/[.,;:!?\]}~_]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  const safe = /^https?:\/\/./.test(address) && !/\w/.test(text[at - 1] || "") && safeAddress(address);
  return safe ? {node: linkTo(safe, address), to: at + address.length} : null;
}

/** Whether a run of marks can open or close emphasis: CommonMark's flanking rules. */
function flanks(text, at, end, kind) {
  const [before, after] = [text[at - 1] || " ", text[end] || " "], isMark = /[\p{P}\p{S}]/u;
  const left = !/\s/.test(after) && (!isMark.test(after) || /\s/.test(before) || isMark.test(before));
  const right = !/\s/.test(before) && (!isMark.test(before) || /\s/.test(after) || isMark.test(after));
  if (kind !== "_") return {opens: left, closes: right};
  return {opens: left && (!right || isMark.test(before)), closes: right && (!left || isMark.test(after))};
}

/** Turns pairs of marks into emphasis. */
function pairMarks(marks) {
  for (let at = 0; at < marks.length; at += 1) {
    const close = marks[at];
    for (let from = at - 1; close.closes && close.count && from >= 0; from -= 1) {
      const open = marks[from];
      if (open.kind !== close.kind || !open.opens || !open.count || (close.kind === "~" && open.count !== close.count)) continue;
      const count = close.kind === "~" ? close.count : Math.min(open.count, close.count, 2);
      const element = make(close.kind === "~" ? "del" : count === 2 ? "strong" : "em");
      while (open.node.nextSibling !== close.node) element.append(open.node.nextSibling);
      open.node.after(element);
      for (const mark of [open, close]) {
        mark.count -= count;
        mark.node.data = mark.node.data.slice(count);
      }
      for (const inside of marks.slice(from + 1, at)) inside.count = 0;
      if (open.count) from += 1;
    }
  }
}
