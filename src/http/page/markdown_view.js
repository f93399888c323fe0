// Markdown: MarkdownView draws blocks, and only those that have changed.

/** Blocks as children of an element. A block is drawn again only if its source has changed. */
class BlockList {
  constructor(parent) {
    this.parent = parent;
    this.shown = [];
  }

  /** Shows `blocks` from position `first` on. The blocks before it stay. */
  show(blocks, first = 0) {
    blocks.forEach((block, index) => {
      const old = this.shown[first + index];
      if (old && old.block.type === block.type && (old.block.source === block.source || old.update?.(block))) old.block = block;
      else {
        const drawn = {block, ...DRAW[block.type](block)};
        if (old) old.node.replaceWith(drawn.node); else this.parent.append(drawn.node);
        this.shown[first + index] = drawn;
      }
    });
    for (const {node} of this.shown.splice(first + blocks.length)) node.remove();
  }
}

/** How each type of block is drawn: its node, and `update` if it can show a changed block. */
const DRAW = {
  paragraph: ({text}) => ({node: make("p", "", inline(text.split("\n").map(line => line.trimStart()).join("\n")))}),
  heading: ({level, text}) => ({node: make("h" + Math.min(6, level + 2), "", inline(text))}),
  rule: () => ({node: make("hr")}),
  math: ({tex}) => ({node: scrollable("Formula", drawMath(tex, true))}),
  quote: drawQuote,
  list: drawList,
  table: drawTable,
  code: drawCode,
};

/** A box that scrolls sideways, also with the keyboard. */
function scrollable(label, ...children) {
  const box = make("div", "scroll", ...children);
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  return box;
}

function drawQuote(block) {
  const node = make("blockquote"), inside = new BlockList(node);
  const update = ({lines, depth}) => { inside.show(parseBlocks(lines, depth + 1)); return true; };
  update(block);
  return {node, update};
}

function drawList(block) {
  const node = make(block.isOrdered ? "ol" : "ul"), items = [];
  if (block.isOrdered) node.start = block.start;
  const update = ({isOrdered, start, items: changed, depth}) => {
    if (isOrdered !== block.isOrdered || start !== block.start || changed.length < items.length) return false;
    changed.forEach(({lines, source}, index) => {
      if (!items[index]) {
        const item = make("li");
        node.append(item);
        items.push({list: new BlockList(item)});
      }
      if (items[index].source !== source) items[index].list.show(parseBlocks(lines, depth + 1));
      items[index].source = source;
    });
    return true;
  };
  update(block);
  return {node, update};
}

function drawTable(block) {
  const row = (line, tag) => make("tr", "", ...block.align.map((align, index) => make(tag, align, inline(cells(line)[index] || ""))));
  const body = make("tbody"), shown = [];
  const update = ({head, align, rows}) => {
    if (head !== block.head || align.join() !== block.align.join() || rows.length < shown.length) return false;
    rows.forEach((line, index) => {
      if (shown[index] === line) return;
      if (index < shown.length) body.children[index].replaceWith(row(line, "td")); else body.append(row(line, "td"));
      shown[index] = line;
    });
    return true;
  };
  update(block);
  return {node: scrollable("Table", make("table", "", make("thead", "", row(block.head, "th")), body)), update};
}

function drawCode(block) {
  const code = make("code"), pre = make("pre", "", code), view = new CodeView(code, block.language);
  let shown = "";
  const update = ({language, text}) => {
    if (language !== block.language || !text.startsWith(shown)) return false;
    // Newlines at the end are left out until text follows: at the end of a part they would show no empty line.
    const added = text.slice(shown.length).replace(/\n+$/, "");
    view.add(added);
    shown += added;
    return true;
  };
  update(block);
  pre.tabIndex = 0;
  pre.setAttribute("role", "group");
  pre.setAttribute("aria-label", `Code${block.language ? ", " + block.language : ""}`);
  const copy = button("Copy", "plain", () => copyText(shown, copy));
  copy.setAttribute("aria-label", "Copy code");
  return {node: make("div", "code", make("div", "", make("span", "soft", block.language || "text"), copy), pre), update};
}

/** Markdown that may grow. */
class MarkdownView {
  constructor(element) {
    this.list = new BlockList(element);
    /** Characters and blocks that no later text can change. */
    this.finalLength = this.finalBlocks = 0;
  }

  show(text, isComplete) {
    const rest = text.slice(this.finalLength), lines = rest.split("\n");
    // The last line is hidden while it has only marks: more text decides whether they make a list, a rule or a fence.
    if (!isComplete && /^[\s>]*[-*+_~`#|$=:\\\d.)]*$/.test(lines.at(-1))) lines[lines.length - 1] = "";
    const blocks = parseBlocks(lines);
    this.list.show(blocks, this.finalBlocks);
    // All blocks before the one with the last whole line are final.
    const last = blocks.findLastIndex(block => block.from < lines.length - 1);
    if (last <= 0) return;
    this.finalLength += lines.slice(0, blocks[last].from).reduce((sum, line) => sum + line.length + 1, 0);
    this.finalBlocks += last;
  }
}
