// Code with colours: comments, strings, numbers and keywords. A line is coloured again only while it grows.

const wordSet = text => new Set(text.trim().split(/\s+/));
const C_STRINGS = "\"(?:[^\"\\\\]|\\\\.)*\"?|'(?:[^'\\\\]|\\\\.)*'?";
const C_BLOCK = {"/*": ["*/", "comment"]};
const C_WORDS = `auto bool break case catch char class const continue default delete do double else enum extern false final finally
  float for goto if inline int long namespace new null nullptr private protected public return short signed sizeof static struct
  super switch template this throw true try typedef union unsigned using virtual void volatile while`;

/** Languages: `blocks` may go over several lines; `comment` and `strings` are patterns within a line. */
const LANGUAGES = {
  python: {
    blocks: {"\"\"\"": ["\"\"\"", "string"], "'''": ["'''", "string"]}, comment: "#.*", strings: C_STRINGS,
    words: wordSet(`and as assert async await break case class continue def del elif else except False finally for from global if
      import in is lambda match None nonlocal not or pass raise return self True try while with yield`),
  },
  javascript: {
    blocks: {...C_BLOCK, "`": ["`", "string"]}, comment: "//.*", strings: C_STRINGS,
    words: wordSet(`abstract any as async await boolean break case catch class const continue debugger default delete do else enum
      export extends false finally for from function if implements import in instanceof interface let new null number of private
      public readonly return static string super switch this throw true try type typeof undefined var void while yield`),
  },
  rust: {
    blocks: C_BLOCK, comment: "//.*", strings: "\"(?:[^\"\\\\]|\\\\.)*\"?|'(?:[^'\\\\]|\\\\.[^']*)'",
    words: wordSet(`as async await bool break char const continue crate dyn else enum extern f32 f64 false fn for i8 i16 i32 i64 if
      impl in isize let loop match mod move mut pub ref return self Self static str struct super trait true type u8 u16 u32 u64
      unsafe use usize where while`),
  },
  c: {blocks: C_BLOCK, comment: "//.*", strings: C_STRINGS, words: wordSet(C_WORDS)},
  java: {
    blocks: {...C_BLOCK, "\"\"\"": ["\"\"\"", "string"]}, comment: "//.*", strings: C_STRINGS,
    words: wordSet(`${C_WORDS} abstract as async await base boolean byte data extends fun func guard implements import in init
      instanceof interface internal is let lock nil object out override package readonly record sealed string String synchronized
      throws transient val var when`),
  },
  go: {
    blocks: {...C_BLOCK, "`": ["`", "string"]}, comment: "//.*", strings: C_STRINGS,
    words: wordSet(`any bool break byte case chan const continue default defer else error fallthrough false float64 for func go goto
      if import int int64 interface map nil package range return rune select string struct switch true type uint64 var`),
  },
  bash: {
    blocks: {}, comment: "(?<=^|\\s)#.*", strings: "\"(?:[^\"\\\\]|\\\\.)*\"?|'[^']*'?",
    words: wordSet("case do done echo elif else esac exit export fi for function if in local return set shift then until while"),
  },
  sql: {
    blocks: C_BLOCK, comment: "--.*", strings: "'(?:[^']|'')*'?|\"[^\"]*\"?", ignoresCase: true,
    words: wordSet(`add all alter and as asc between by case create delete desc distinct drop else end exists foreign from full
      group having in index inner insert into is join key left like limit not null on or order outer primary references right
      select set table then union unique update values view when where with`),
  },
  json: {blocks: {}, comment: "//.*", strings: C_STRINGS, words: wordSet("true false null")},
  yaml: {blocks: {}, comment: "(?<=^|\\s)#.*", strings: C_STRINGS, words: wordSet("true false null yes no")},
  html: {blocks: {"<!--": ["-->", "comment"]}, comment: "", strings: "\"[^\"]*\"|(?<=<\\/?)[a-zA-Z][\\w-]*", words: new Set()},
  css: {blocks: C_BLOCK, comment: "", strings: C_STRINGS, words: wordSet("important media import supports keyframes")},
  ruby: {
    blocks: {}, comment: "#.*", strings: C_STRINGS,
    words: wordSet(`and begin break case class def do else elsif end ensure false for if in module next nil not or require rescue
      return self then true unless until when while yield`),
  },
};
const LANGUAGE_NAMES = {
  py: "python", python3: "python", js: "javascript", jsx: "javascript", mjs: "javascript", ts: "javascript", tsx: "javascript",
  typescript: "javascript", rs: "rust", cpp: "c", "c++": "c", cc: "c", h: "c", hpp: "c", cuda: "c", metal: "c", kotlin: "java",
  kt: "java", cs: "java", csharp: "java", "c#": "java", swift: "java", scala: "java", dart: "java", php: "java", golang: "go",
  sh: "bash", shell: "bash", zsh: "bash", console: "bash", dockerfile: "bash", makefile: "bash", jsonc: "json", json5: "json",
  yml: "yaml", toml: "yaml", ini: "yaml", xml: "html", svg: "html", vue: "html", scss: "css", less: "css", rb: "ruby",
};

/** The language with this name, with the pattern of its tokens. Undefined for a name that is not known. */
function languageOf(name) {
  const known = name.toLowerCase(), found = LANGUAGE_NAMES[known] || known;
  const language = Object.hasOwn(LANGUAGES, found) ? LANGUAGES[found] : undefined;
  if (language && !language.token) {
    const opens = Object.keys(language.blocks).map(open => open.replace(/[*/"'`<!-]/g, "\\$&")).join("|");
    const parts = {open: opens, comment: language.comment, string: language.strings, number: "\\b\\d[\\w.]*", word: "[A-Za-z_$][\\w$]*"};
    language.token = new RegExp(Object.entries(parts).filter(([, part]) => part).map(([kind, part]) => `(?<${kind}>${part})`).join("|"), "g");
  }
  return language;
}

/** Cuts a line into parts of [kind, text]. `block` is the block that is open before the line. Returns the one after it, too. */
function colourLine(line, language, block) {
  const parts = [];
  let at = 0;
  const put = (kind, to) => { if (to > at) parts.push([kind, line.slice(at, to)]); at = to; };
  while (at < line.length) {
    if (block) {
      const [end, kind] = block, found = line.indexOf(end, at);
      put(kind, found < 0 ? line.length : found + end.length);
      if (found >= 0) block = null;
      continue;
    }
    language.token.lastIndex = at;
    const found = language.token.exec(line);
    if (!found) { put("", line.length); break; }
    const {open, comment, string, number: digits, word} = found.groups, isWord = word !== undefined;
    const isKeyword = isWord && language.words.has(language.ignoresCase ? word.toLowerCase() : word);
    put("", found.index);
    if (open) block = language.blocks[open];
    const kind = open ? block[1] : comment ? "comment" : string ? "string" : digits ? "number" : isKeyword ? "keyword" : "";
    put(kind, found.index + found[0].length);
  }
  return {parts, block};
}

/** Long code is drawn in parts of about this many characters: the browser lays out again only the part that grows. */
const CODE_PART = 2000;
/** Longer lines are not coloured. */
const MAX_COLOURED = 400;

/** The text of a `code` element. It can only grow. */
class CodeView {
  constructor(code, languageName) {
    Object.assign(this, {code, language: languageOf(languageName), block: null, nextBlock: null});
    this.startPart();
  }

  startPart() {
    this.part = make("span");
    this.partLength = 0;
    this.startLine();
    this.code.append(this.part);
  }

  startLine() {
    this.line = "";
    this.lineNodes = [];
    this.block = this.nextBlock;
  }

  add(text) {
    text.split("\n").forEach((line, index) => {
      if (index) this.endLine();
      if (line) this.growLine(line);
    });
  }

  endLine() {
    if (this.partLength > CODE_PART) {
      this.code.append("\n");
      this.startPart();
    } else {
      this.part.append("\n");
      this.startLine();
    }
  }

  growLine(added) {
    this.line += added;
    this.partLength += added.length;
    if (!this.language || this.line.length > MAX_COLOURED) return this.part.append(added);
    const {parts, block} = colourLine(this.line, this.language, this.block);
    for (const node of this.lineNodes) node.remove();
    this.lineNodes = parts.map(([kind, text]) => kind ? make("span", kind, text) : document.createTextNode(text));
    this.part.append(...this.lineNodes);
    this.nextBlock = block;
  }
}
