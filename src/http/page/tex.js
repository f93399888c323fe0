// A subset of TeX as MathML.

const MATHML = $("math-template").content.firstElementChild.namespaceURI;
/** Characters of a formula. The limit keeps hostile text linear. */
const MAX_MATH = 5000;

function mathElement(name, ...children) {
  const element = document.createElementNS(MATHML, name);
  element.append(...children);
  return element;
}

/** Returns MathML for TeX, or the TeX itself as code if it has an error. */
function drawMath(tex, isDisplay) {
  try {
    if (tex.length > MAX_MATH) throw new Error("Too long");
    const math = mathElement("math", new TexParser(tex, isDisplay).parse());
    if (isDisplay) math.setAttribute("display", "block");
    math.setAttribute("alttext", tex.trim());
    return math;
  } catch { return make("code", "", tex); }
}

class TexParser {
  constructor(tex, isDisplay) {
    this.tokens = tex.match(/\\[a-zA-Z]+|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu) || [];
    this.at = this.depth = 0;
    this.isDisplay = isDisplay;
  }

  parse() {
    const content = this.table([undefined], "right left");
    if (this.at < this.tokens.length) throw new Error("Unexpected " + this.peek());
    return content;
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] || "")) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Error("Unexpected end");
    this.at += 1;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error("Expected " + token);
  }

  /** True if the next token is this one, which is then skipped. */
  skip(token) {
    const isNext = this.peek() === token;
    if (isNext) this.at += 1;
    return isNext;
  }

  /** Rows and cells up to one of the tokens `ends`. A single cell is no table. */
  table(ends, align) {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.row([...ends, "&", "\\\\"]));
      if (this.skip("&")) continue;
      if (!this.skip("\\\\")) break;
      if (this.peek() === "[") this.rawGroup("[", "]");
      rows.push([]);
    }
    if (rows.length > 1 && rows.at(-1).length === 1 && !rows.at(-1)[0].childNodes.length) rows.pop();
    if (rows.length === 1 && rows[0].length === 1) return rows[0][0];
    const classes = align.split(" ");
    return mathElement("mtable", ...rows.map(row => mathElement("mtr", ...row.map((content, column) => {
      const cell = mathElement("mtd", content);
      cell.setAttribute("class", classes[column % classes.length]);
      return cell;
    }))));
  }

  row(ends) {
    const row = mathElement("mrow");
    while (!ends.includes(this.peek())) {
      const node = this.scripted();
      if (node) row.append(node);
    }
    return row;
  }

  /** An atom with its subscript and superscript. */
  scripted() {
    const base = this.atom();
    let below = null, above = null, primes = "";
    if (!base) return null;
    for (;;) {
      if (["\\limits", "\\nolimits"].includes(this.peek())) this.at += 1;
      else if (!below && this.skip("_")) below = this.argument();
      else if (!above && this.skip("^")) above = this.argument();
      else if (!above && this.skip("'")) primes += "′";
      else break;
    }
    if (primes) above = mathElement("mrow", mathElement("mo", primes), ...above ? [above] : []);
    if (!below && !above) return base;
    const [sub, sup, both] = base.hasLimits && this.isDisplay ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    return below && above ? mathElement(both, base, below, above)
      : below ? mathElement(sub, base, below)
      : mathElement(sup, base, above);
  }

  /** A group, or a single token: of a number its first digit. */
  argument() {
    const token = this.peek();
    if (/^\d./.test(token || "")) {
      this.tokens[this.at] = token.slice(1);
      return mathElement("mn", token[0]);
    }
    return this.nested(() => this.atom()) || mathElement("mrow");
  }

  /** Runs a part of the parser one level deeper. The limit keeps hostile input from filling the stack. */
  nested(parse) {
    if ((this.depth += 1) > 40) throw new Error("Too deep");
    const result = parse();
    this.depth -= 1;
    return result;
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      const group = this.nested(() => this.row(["}"]));
      this.expect("}");
      return group;
    }
    if (/^\d/.test(token)) return mathElement("mn", token);
    if (token.length > 1 && token[0] === "\\") return this.command(token.slice(1));
    if (token === "_" || token === "^") { this.at -= 1; return mathElement("mrow"); }
    if (token === "~") return this.space(".33em");
    if (token === "}" || token === "&") throw new Error("Unexpected " + token);
    if (/[()[\]|]/.test(token)) return this.fence(token, false);
    if (/[+\-*/=<>!,:;.]/.test(token)) return mathElement("mo", token === "-" ? "−" : token);
    return mathElement("mi", token);
  }

  fence(text, isStretchy) {
    const fence = mathElement("mo", text);
    fence.setAttribute("stretchy", String(isStretchy));
    if (!isStretchy) fence.setAttribute("form", /[(\[{⟨⌊⌈]/.test(text) ? "prefix" : "postfix");
    return fence;
  }

  space(width) {
    const space = mathElement("mspace");
    space.setAttribute("width", width);
    return space;
  }

  withLimits(element) {
    element.hasLimits = true;
    return element;
  }

  command(name) {
    if (Object.hasOwn(IDENTIFIERS, name)) return mathElement("mi", IDENTIFIERS[name]);
    if (Object.hasOwn(OPERATORS, name)) return mathElement("mo", OPERATORS[name]);
    if (Object.hasOwn(FENCES, name)) return this.fence(FENCES[name], false);
    if (Object.hasOwn(LARGE, name)) return this.withLimits(mathElement("mo", LARGE[name]));
    if (Object.hasOwn(INTEGRALS, name)) return mathElement("mo", INTEGRALS[name]);
    if (Object.hasOwn(LIMITS, name)) return this.withLimits(mathElement("mi", LIMITS[name]));
    if (FUNCTIONS.has(name)) return mathElement("mi", name);
    if (Object.hasOwn(SPACES, name)) return this.space(SPACES[name]);
    if (IGNORED.has(name)) return null;
    if (Object.hasOwn(ACCENTS, name)) return this.accent("mover", ACCENTS[name]);
    if (Object.hasOwn(ACCENTS_BELOW, name)) return this.accent("munder", ACCENTS_BELOW[name]);
    if (Object.hasOwn(ALPHABETS, name)) return this.letters(...ALPHABETS[name]);
    return this.structure(name);
  }

  accent(element, text) {
    const accent = mathElement(element, this.argument(), mathElement("mo", text));
    accent.setAttribute(element === "mover" ? "accent" : "accentunder", "true");
    return /brace/.test(text) || "⏞⏟".includes(text) ? this.withLimits(accent) : accent;
  }

  letters(first, others) {
    const group = this.argument();
    for (const leaf of group.matches("mi, mn") ? [group] : group.querySelectorAll("mi, mn")) {
      leaf.textContent = leaf.textContent.replace(/[A-Za-z]/g, letter => {
        const place = others.indexOf(letter), code = letter.charCodeAt(0);
        return place >= 0 ? others[place + 1] : String.fromCodePoint(first + (code < 97 ? code - 65 : code - 71));
      });
    }
    return group;
  }

  structure(name) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac": return mathElement("mfrac", this.argument(), this.argument());
      case "binom": case "dbinom": return this.binomial();
      case "sqrt": return this.root();
      case "left": return this.leftRight();
      case "begin": return this.environment();
      case "text": case "textrm": case "mbox": case "textbf": case "textit": case "texttt": case "label": return this.text(name);
      case "operatorname": case "mathrm": case "mathit": case "rm": return this.upright(name);
      case "boxed": case "fbox": return this.bordered("boxed");
      case "overline": return this.bordered("overlined");
      case "underline": return this.bordered("underlined");
      case "overset": case "stackrel": { const above = this.argument(); return mathElement("mover", this.argument(), above); }
      case "underset": { const below = this.argument(); return mathElement("munder", this.argument(), below); }
      case "xrightarrow": return mathElement("mover", mathElement("mo", "→"), this.argument());
      case "pmod":
        return mathElement("mrow",
          mathElement("mo", "("), mathElement("mi", "mod"), this.space(".33em"), this.argument(), mathElement("mo", ")"));
      case "bmod": case "mod": return mathElement("mo", " mod ");
      case "not": return mathElement("mo", this.argument().textContent + "\u0338");
      case "tag": return mathElement("mrow", this.space("2em"), mathElement("mtext", `(${this.rawGroup("{", "}")})`));
      case "color": this.rawGroup("{", "}"); return null;
      case "textcolor": this.rawGroup("{", "}"); return this.argument();
      case "phantom": return mathElement("mphantom", this.argument());
      case "substack": { this.expect("{"); const rows = this.table(["}"], "center"); this.expect("}"); return rows; }
      default: throw new Error("Unknown command " + name);
    }
  }

  /** The source between two brackets. */
  rawGroup(open, close) {
    this.expect(open);
    let text = "";
    for (let depth = 1; this.at < this.tokens.length; this.at += 1) {
      const token = this.tokens[this.at];
      if (token === open) depth += 1;
      if (token === close && !(depth -= 1)) { this.at += 1; return text; }
      text += token;
    }
    throw new Error("Missing " + close);
  }

  text(name) {
    const text = this.rawGroup("{", "}").replace(/\\([%$&#_{}])/g, "$1").replace(/^ | $/g, "\u00a0");
    return name === "label" ? null : mathElement("mtext", text);
  }

  upright() {
    this.skip("*");
    const group = this.argument(), text = group.textContent;
    if (group.querySelector("mfrac, msup, msub, msubsup, msqrt, mtable")) return group;
    const name = mathElement("mi", text);
    name.setAttribute("mathvariant", "normal");
    return name;
  }

  /** Lines around a group are borders, because few fonts have lines that grow. */
  bordered(sides) {
    const box = mathElement("mrow", this.argument());
    box.setAttribute("class", sides);
    return box;
  }

  binomial() {
    const fraction = mathElement("mfrac", this.argument(), this.argument());
    fraction.setAttribute("linethickness", "0");
    return mathElement("mrow", this.fence("(", true), fraction, this.fence(")", true));
  }

  root() {
    if (!this.skip("[")) return mathElement("msqrt", this.argument());
    const degree = this.row(["]"]);
    this.expect("]");
    return mathElement("mroot", this.argument(), degree);
  }

  delimiter() {
    const token = this.next(), text = token.startsWith("\\") ? FENCES[token.slice(1)] : token;
    if (text === undefined) throw new Error("Unknown delimiter " + token);
    return text === "." ? "" : text;
  }

  leftRight() {
    const open = this.delimiter(), inside = this.nested(() => this.row(["\\right"]));
    this.expect("\\right");
    return this.fenced(open, inside, this.delimiter());
  }

  /** A row between fences that grow with it. Bars are borders, because many fonts have no bars that grow. */
  fenced(open, inside, close) {
    const row = mathElement("mrow", inside), bars = {"|": "bar", "‖": "bars"};
    for (const [side, text] of [["left", open], ["right", close]].filter(([, text]) => text)) {
      const fence = this.fence(text, true);
      if (bars[text]) {
        fence.setAttribute("class", "drawn");
        row.classList.add(`${side}-${bars[text]}`);
      }
      if (side === "left") row.prepend(fence); else row.append(fence);
    }
    return row;
  }

  environment() {
    const name = this.rawGroup("{", "}").replace(/\*$/, "");
    if (!Object.hasOwn(ENVIRONMENTS, name)) throw new Error("Unknown environment " + name);
    const [open, close, ownAlign] = ENVIRONMENTS[name];
    const columns = name === "array" ? this.rawGroup("{", "}").match(/[lcr]/g) : null;
    const align = columns ? columns.map(letter => ({l: "left", c: "center", r: "right"})[letter]).join(" ") : ownAlign || "center";
    const rows = this.nested(() => this.table(["\\end"], align));
    this.expect("\\end");
    if (this.rawGroup("{", "}").replace(/\*$/, "") !== name) throw new Error("Expected the end of " + name);
    return this.fenced(open, rows, close);
  }
}
