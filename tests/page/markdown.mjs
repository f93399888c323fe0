// Markdown against markdown-it, math against KaTeX, and text that grows against the same text at once.
import assert from "node:assert/strict";
import MarkdownIt from "markdown-it";
import katex from "katex";

export const widths = [1280];

/** Markdown as models write it. Both sides must give the same elements and text. */
const SAMPLES = [
  "# One\n\n## Two\n### Three ###\n####### seven",
  "Plain text\nwith a second line.\n\nA new paragraph.",
  "*em* **strong** ***both*** _em_ __strong__ snake_case_name 2 * 3 * 4 ~~gone~~ **a *b* c**",
  "**bold**text, *a*b, un*frigging*believable, ** not bold **, *not\n\nend*",
  "`code` ``with ` tick`` `a*b*c` \\*escaped\\* \\`no code\\` \\# \\a",
  "- one\n- two\n  - nested\n    - deeper\n- three",
  "1. one\n2. two\n   - bullet\n   - bullet\n3. three",
  "5. five\n6. six",
  "- first\n\n  second paragraph\n\n- another\n  ```py\n  x = 1\n  ```",
  "* a\n* b\n\ntext\n\n+ c\n+ d",
  "> quote\n> goes on\n>\n> > nested\n\nafter",
  "> - list in quote\n> - more\n>\n> ```\n> code\n> ```",
  "```python\ndef f(a):\n    return a * 2\n\n# no heading\n```",
  "~~~\ntilde ``` inside\n~~~",
  "````md\n```\ninner\n```\n````",
  "```js\nunclosed *fence*\n\n- stays",
  "| a | b |\n|---|:-:|\n| 1 | **2** |\n| `x` | y \\| z |",
  "Name | Value\n--- | ---:\nleft | 1\n\nafter",
  "text before\n| a | b |\n| - | - |\n| 1 | 2 |\n",
  "[link](https://example.com/a_b_c) and [a *b* c](https://example.com/?q=1&r=2 \"title\") and [paren](https://example.com/a_(b))",
  "<https://example.com/x> and https://example.com/bare. And (https://example.com/p).",
  "[not a link] [also not](javascript:alert(1)) [no](relative/path)",
  "---\n\n***\n\n* * *\n\ntext",
  "A & B &amp; C &lt;tag&gt; 1 < 2 > 0",
  "line one  \nline two\\\nline three",
  "Step 1:\n1. Do **this**\n2. Then `that`\n\n   With a note.\n\n3. Done",
  "**Note:** text\n- item right after\n- another\n\nEnd.",
  "日本語の**強調**です。Ünïcödé *ß* 🦊 **🦊**",
  "Term: `a`, `b`\n\n> **Warning** do not\nlazy line\n\n1) paren\n2) list",
  "- [link](https://example.com) in list\n- **bold** start\n-   wide marker\n\n10. ten\n11. eleven",
];

/** Formulas as models write them. The texts of all leaves must be KaTeX's. */
const FORMULAS = [
  "x^2 + y_1 - z_{ij}^{2n}", "\\frac{a+b}{c} = \\dfrac{1}{2}", "\\sqrt{x} + \\sqrt[3]{y}", "\\sum_{i=1}^{n} i = \\frac{n(n+1)}{2}", "\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}",
  "\\alpha\\beta\\gamma\\Delta\\Omega", "a \\le b \\leq c \\ge d \\neq e \\approx f", "\\lim_{x \\to 0} \\frac{\\sin x}{x} = 1", "\\left( \\frac{a}{b} \\right)^2", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",
  "f(x) = \\begin{cases} x & x > 0 \\\\ -x & x \\le 0 \\end{cases}", "\\begin{aligned} a &= b + c \\\\ &= d \\end{aligned}", "\\mathbb{R}^n \\subset \\mathbb{C}", "\\mathcal{L}(\\theta)", "\\text{if } n \\in \\mathbb{N}", "P(A \\mid B) = \\frac{P(B \\mid A) P(A)}{P(B)}",
  "\\hat{x} + \\bar{y} + \\vec{v}", "\\boxed{42}", "\\binom{n}{k}", "a \\cdot b \\times c \\pm d", "\\log_2 n + \\ln x + \\max(a, b)", "x_1, x_2, \\ldots, x_n", "\\forall x \\exists y : x \\in A \\cup B \\cap C", "f'(x) + f''(x)", "\\nabla \\cdot \\vec{E} = \\frac{\\rho}{\\varepsilon_0}",
  "A \\Rightarrow B \\iff C \\implies D", "\\lfloor x \\rfloor + \\lceil y \\rceil", "|x| + \\|v\\|", "3.14 \\times 10^{-5}", "x^12", "\\frac12", "a^{b^{c}}", "\\operatorname{rank}(A)", "\\mathrm{kg}", "\\prod_{k=1}^{\\infty} \\left(1 - \\frac{1}{k^2}\\right)", "50\\%", "\\{a, b\\}", "\\mathbf{v}",
];

const show = (page, text) => page.evaluate(text => {
  const box = make("div");
  new MarkdownView(box).show(text, true);
  return box.innerHTML;
}, text);

/** Elements and text in one form for both sides: our headings start at h3, code has a frame, tables scroll. */
const normal = (page, html) => page.evaluate(html => {
  const box = document.createElement("div");
  box.append(new DOMParser().parseFromString(html, "text/html").body);
  for (const code of box.querySelectorAll("div.code")) code.replaceWith(code.querySelector("pre"));
  for (const scroll of box.querySelectorAll("div.scroll")) scroll.replaceWith(...scroll.childNodes);
  const lines = [];
  const walk = (node, depth) => {
    if (node.nodeType === 3) { if (node.data.trim()) lines.push("  ".repeat(depth) + JSON.stringify(node.data.replace(/\s+/g, " ").trim())); return; }
    const align = node.className || "left", heading = /^H([1-6])$/.exec(node.tagName);
    const name = { S: "DEL" }[node.tagName] || (heading ? "H" + Math.min(6, Number(heading[1]) + (node.dataset.theirs === undefined ? 0 : 2)) : node.tagName);
    const detail = name === "A" ? " " + node.href : name === "OL" ? ` from ${node.start}` : /^T[HD]$/.test(name) ? ` ${align}` : "";
    if (name === "PRE") return lines.push("  ".repeat(depth) + "PRE " + JSON.stringify(node.textContent.replace(/\n$/, "")));
    // Tight lists have paragraphs on our side only, and their look is the same.
    const isTight = name === "P" && node.parentNode.tagName === "LI";
    if (!isTight) lines.push("  ".repeat(depth) + name + detail);
    for (const child of node.childNodes) walk(child, isTight ? depth : depth + 1);
  };
  for (const child of box.firstChild.childNodes) walk(child, 0);
  return lines.join("\n");
}, html);

/** `text`, grown by one character at a time. */
const grow = (page, text) => page.evaluate(text => {
  const box = make("div"), view = new MarkdownView(box);
  for (let end = 1; end <= text.length; end += 1) view.show(text.slice(0, end), false);
  view.show(text, true);
  return box.innerHTML;
}, text);

export const tests = {
  async samples_render_like_markdown_it(page) {
    const reference = new MarkdownIt({ breaks: true, linkify: false });
    // Bare web addresses are links. markdown-it needs another package for that.
    reference.validateLink = address => /^(https?|mailto):/.test(address);
    for (const sample of SAMPLES) {
      const bare = sample.replace(/(^|[ (])(https:\/\/[\w./]+?)(?=[.)]*(\s|$))/g, "$1<$2>");
      const theirs = reference.render(bare).replace(/<(h[1-6])>/g, "<$1 data-theirs>").replace(/style="text-align:(\w+)"/g, "class=$1");
      assert.equal(await normal(page, await show(page, sample)), await normal(page, theirs), sample);
    }
  },

  async growing_text_renders_like_whole_text(page) {
    const all = [...SAMPLES, SAMPLES.join("\n\n"), ...FORMULAS.slice(0, 8).map(tex => `Before $${tex}$ after.\n\n$$\n${tex}\n$$\n\n\\[ ${tex} \\]\n- end`), "$$\na\n- b\n$$\nafter", "- a\n**b** c\n*d* e\n1. f"];
    for (const sample of all) assert.equal(await grow(page, sample), await show(page, sample), sample);
  },

  async finished_blocks_are_not_drawn_again(page) {
    const kept = await page.evaluate(() => {
      const box = make("div"), view = new MarkdownView(box), text = "First.\n\n- a\n- b\n\n```js\none\ntwo\n";
      view.show(text, false);
      const [paragraph, item, code] = [box.querySelector("p"), box.querySelector("li"), box.querySelector("code")];
      view.show(text + "three\n```\n\nLast *one*", false);
      return [paragraph, item, code].every(node => box.contains(node)) && code.textContent === "one\ntwo\nthree" && box.lastChild.textContent === "Last one";
    });
    assert.ok(kept);
  },

  async long_code_grows_in_parts(page) {
    const { parts, isSame, heights } = await page.evaluate(() => {
      const lines = Array.from({ length: 400 }, (_, index) => "\n".repeat(index % 4) + "    line " + index);
      const text = ["x".repeat(CODE_PART), "", "", ...lines].join("\n"), boxes = [make("div", "text"), make("div", "text")];
      const [grown, whole] = boxes.map(box => { $("turns").append(box); return new MarkdownView(box); });
      for (let end = 1; end <= text.length; end += 1) grown.show("```\n" + text.slice(0, end), false);
      for (const view of [grown, whole]) view.show("```\n" + text + "\n```", true);
      const codes = boxes.map(box => box.querySelector("code"));
      const selected = codes.map(code => { getSelection().selectAllChildren(code); return getSelection().toString(); });
      return { parts: codes.map(code => code.children.length), isSame: codes.every((code, index) => code.textContent === text && selected[index] === text), heights: codes.map(code => code.offsetHeight) };
    });
    assert.ok(parts[0] > 2 && parts[1] === parts[0], parts.join());
    assert.ok(isSame, "the text and the selected text are those of the code");
    assert.equal(heights[0], heights[1]);
  },

  async task_lists_and_lenient_nesting_work(page) {
    assert.match(await show(page, "- [ ] open\n- [x] done"), /☐ open.*☑ done/s);
    assert.match(await show(page, "1. one\n  - nested by two\n2. two"), /<ol start="1"><li><p>one<\/p><ul><li>.*<\/ul><\/li><li><p>two/);
  },

  async code_has_label_copy_and_scrolls(page, proxy) {
    proxy.script(["```python\n" + "x".repeat(500) + "\n```"]);
    await page.say("Code");
    await page.isIdle();
    assert.equal(await page.text(".code .soft"), "python");
    const { scrolls, fits } = await page.$eval(".code pre", pre => ({ scrolls: pre.scrollWidth > pre.clientWidth, fits: document.documentElement.scrollWidth <= innerWidth }));
    assert.ok(scrolls && fits);
  },

  async formulas_have_the_leaves_of_katex(page) {
    const leaves = (page, html) => page.evaluate(html => {
      const math = new DOMParser().parseFromString(html, "text/html").querySelector("math");
      if (!math) return html;
      math.querySelector("annotation")?.remove();
      return [...math.querySelectorAll("mi, mn, mo, mtext")].map(leaf => leaf.textContent).join("")
        .replace(/[\u2061\u2062\u200b]/g, "").replace(/-/g, "−").replace(/[\s\u00a0]+/g, "").replace(/[ˉ¯‾]/g, "bar").normalize("NFKC").replace(/[~˜]/g, "~").replace(/⋅|·/g, "·").replace(/∥|‖/g, "‖").replace(/\u20d7|→|⃗/g, "→").replace(/∣/g, "|");
    }, html);
    for (const tex of FORMULAS) {
      const ours = await show(page, `$$${tex}$$`), theirs = katex.renderToString(tex, { output: "mathml", displayMode: true });
      assert.match(ours, /<math/, `${tex} is drawn as MathML`);
      assert.equal(await leaves(page, ours), await leaves(page, theirs), tex);
    }
  },

  async formulas_have_size_on_the_screen(page) {
    const [fraction, plain] = await page.evaluate(() => ["\\frac{a}{b}", "a"].map(tex => {
      const math = drawMath(tex, true);
      $("turns").append(math);
      return math.getBoundingClientRect().height;
    }));
    assert.ok(fraction > plain * 1.5, `${fraction} and ${plain} pixels`);
  },

  async roots_and_brackets_grow_with_their_content(page) {
    const heights = await page.evaluate(() => {
      const tall = "\\begin{matrix} a \\\\ b \\\\ c \\\\ d \\end{matrix}", height = element => element.getBoundingClientRect().height;
      const draw = tex => { const math = drawMath(tex, true); $("turns").append(math); return math; };
      const fences = ["()", "[]", "\\{\\}"].map(pair => pair.match(/\\?./g)).map(([open, close]) => draw(`\\left${open} ${tall} \\right${close}`).querySelector("mo"));
      const named = ["pmatrix", "bmatrix"].map(name => draw(`\\begin{${name}} a \\\\ b \\\\ c \\\\ d \\end{${name}}`).querySelector("mo"));
      const root = draw("\\sqrt{\\pi}").querySelector("msqrt"), inside = root.firstElementChild;
      const bars = ["|", "\\|"].map(bar => getComputedStyle(draw(`\\left${bar} ${tall} \\right${bar}`).querySelector("[class*=left-bar]")));
      return { bars: bars.map(style => style.borderLeftWidth + " " + style.borderRightWidth), table: height(draw(tall).querySelector("mtable")), fences: [...fences, ...named].map(height), root: root.getBoundingClientRect().width - inside.getBoundingClientRect().width };
    });
    for (const height of heights.fences) assert.ok(height > 0.75 * heights.table, JSON.stringify(heights));
    assert.deepEqual(heights.bars, ["1px 1px", "3px 3px"]);
    assert.ok(heights.root > 5, "the sign of the root has a width");
  },

  async environments_need_no_dollars(page) {
    const align = "\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}";
    for (const text of [align, `Text\n${align}\nmore`, "- item\n\n  " + align.replaceAll("\n", "\n  "), "\\begin{equation*}x^2\\end{equation*}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}."]) {
      const math = (await show(page, text)).match(/<(mtable|msup)/g);
      assert.equal(math?.length, 1, text);
    }
    assert.equal((await show(page, align)).match(/<mtr>/g).length, 2);
    for (const text of ["\\begin{unknown}\nx\n\\end{unknown}", "\\begin{align}\nno end", "\\begin{align} x \\end{align} and text"]) assert.ok(!(await show(page, text)).includes("<math"), text);
  },

  async code_of_many_languages_has_colours(page) {
    const coloured = (language, code) => page.evaluate((language, code) => {
      const box = make("div", "text");
      $("turns").replaceChildren(box);
      const view = new MarkdownView(box);
      for (let end = 1; end <= code.length; end += 3) view.show("```" + language + "\n" + code.slice(0, end), false);
      view.show("```" + language + "\n" + code + "\n```", true);
      if (box.querySelector("code").textContent !== code) throw new Error("the text is changed");
      return [...box.querySelectorAll("code span span")].map(span => `${span.className} ${span.textContent}`);
    }, language, code);
    assert.deepEqual(await coloured("python", 'def f(x):  # why\n    return "a\\"b" + 5.5'), ["keyword def", "comment # why", "keyword return", 'string "a\\"b"', "number 5.5"]);
    assert.deepEqual(await coloured("py", 'x = """a\ndef b\n"""\nif x: pass'), ['string """', "string a", "string def b", 'string """', "keyword if", "keyword pass"]);
    assert.deepEqual(await coloured("rust", "fn a<'a>(x: &'a str) -> char { 'b' } /* let\n let */ let"), ["keyword fn", "keyword str", "keyword char", "string 'b'", "comment /*", "comment  let", "comment  let */", "keyword let"]);
    assert.deepEqual(await coloured("ts", "const a = `b\n${c}`; // d"), ["keyword const", "string `", "string b", "string ${c}`", "comment // d"]);
    assert.deepEqual(await coloured("bash", "echo $#  # count\nfor a in 'b'; do"), ["keyword echo", "comment # count", "keyword for", "keyword in", "string 'b'", "keyword do"]);
    assert.deepEqual(await coloured("json", '{"a": [1, true]}'), ['string "a"', "number 1", "keyword true"]);
    assert.deepEqual(await coloured("sql", "SELECT a FROM b -- all"), ["keyword SELECT", "keyword FROM", "comment -- all"]);
    assert.deepEqual(await coloured("html", '<!-- a\n--><a href="b">c</a>'), ["comment <!--", "comment  a", "comment -->", "string a", 'string "b"', "string a"]);
    assert.deepEqual(await coloured("unheard", "def f"), []);
    assert.deepEqual(await coloured("constructor", "def f"), []);
    for (const name of ["c", "java", "go", "yaml", "css", "ruby"]) assert.ok((await coloured(name, 'a: "b" 5')).length >= 2, name);
    const contrast = await page.evaluate(() => ["keyword", "string", "number", "comment"].map(kind => getComputedStyle(document.body.appendChild(make("span", kind, "x"))).color));
    assert.equal(new Set(contrast).size, 4);
  },

  async wrong_formulas_stay_source_and_prices_stay_text(page) {
    for (const tex of ["\\unknown{x}", "\\frac{a}", "{a", "\\begin{foo}x\\end{foo}", "\\constructor", "\\begin{toString}a\\end{toString}", "a}"]) {
      const html = await show(page, `Formula $${tex}$ here`);
      assert.ok(!html.includes("<math") && html.includes("<code>"), `${tex}: ${html}`);
    }
    for (const text of ["It costs $5 and $10.", "From $5 to $10", "$5/$10", "a $ b $ c", "\\$5 and \\$6"]) assert.ok(!(await show(page, text)).includes("<math"), text);
  },
};
