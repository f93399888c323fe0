// The chat: every feature with scripted answers, at a phone's and at a desktop's width.
import assert from "node:assert/strict";
import fs from "node:fs";
import path from "node:path";
import { eventually, sleep } from "./harness.mjs";

const openList = async page => { if (!await page.isOpen("list")) await page.click("#show-list"); };

export const tests = {
  async streamed_answer_shows_text_and_figures(page, proxy) {
    proxy.script(["Hello", " **world**", "."], { usage: { prompt_tokens_details: { cached_tokens: 7 } }, timings: { predicted_ms: 400 } });
    await page.say("Hi");
    await page.isIdle();
    assert.equal(await page.answer(), "Hello world.");
    assert.match(await page.text(".foot"), /3 tokens · 5\.0 tokens per second · first token after [\d.]+ s · prompt of 20 tokens, 7 of them cached/);
    const body = proxy.lastChat();
    assert.deepEqual(body.messages, [{ role: "user", content: "Hi" }]);
    assert.equal(body.return_progress, true);
  },

  async answer_is_drawn_at_most_ten_times_a_second(page, proxy) {
    const words = Array.from({ length: 400 }, (_, index) => `word${index} `);
    // The rest follows once these words are drawn, however long that takes.
    const isDrawn = count => () => page.until(word => document.querySelector(".turn.assistant > .text").textContent.includes(word), words[count - 1].trim());
    proxy.script(words.flatMap((word, index) => [100, 200, 300].includes(index) ? [isDrawn(index), word] : [word]), { pause: 1 });
    await page.evaluate(() => {
      window.draws = 0;
      const draw = AnswerView.prototype.draw;
      AnswerView.prototype.draw = function (generation) { window.draws += 1; return draw.call(this, generation); };
    });
    const start = Date.now();
    await page.say("Hi");
    await page.isIdle();
    const draws = await page.evaluate(() => window.draws), most = (Date.now() - start) / 100 + 3;
    assert.ok(draws > 3 && draws <= most, `${draws} draws, at most ${most}`);
    assert.equal(await page.answer(), words.join("").trim());
  },

  async hidden_page_is_drawn_once_visible(page, proxy) {
    let resume;
    proxy.script(["Part", () => new Promise(done => { resume = done; })]);
    await page.evaluate(() => { window.isHidden = true; Object.defineProperty(document, "hidden", { get: () => window.isHidden }); });
    await page.say("Hi");
    await page.until(() => conversation.messages.at(-1).content === "Part");
    await sleep(200);
    assert.equal(await page.answer(), "");
    await page.evaluate(() => { window.isHidden = false; document.dispatchEvent(new Event("visibilitychange")); });
    assert.equal(await page.answer(), "Part");
    resume();
    await page.isIdle();
  },

  async reasoning_is_folded_and_opens(page, proxy) {
    let resume;
    proxy.script([{ reasoning_content: "First I **think**." }, () => new Promise(done => { resume = done; }), "The answer."]);
    await page.say("Hi");
    await page.until(() => document.querySelector(".reasoning summary")?.textContent.startsWith("Reasoning, "));
    assert.equal(await page.$eval(".reasoning", details => details.open), false);
    await page.click(".reasoning summary");
    await page.until(() => document.querySelector(".reasoning strong")?.textContent === "think");
    resume();
    await page.isIdle();
    assert.equal(await page.answer(), "The answer.");
    assert.equal(await page.$eval(".reasoning", details => details.open), true, "stays as the user left it");
    await page.say("Again");
    await page.until(() => document.querySelectorAll(".reasoning").length === 2);
    assert.equal(await page.$$eval(".reasoning", all => all[1].open), true, "the next one opens, too");
    resume();
    await page.isIdle();
    assert.equal(proxy.lastChat().messages[1].reasoning_content, "First I **think**.");
  },

  async tool_calls_are_cards_with_results(page, proxy) {
    const tools = [{ type: "function", function: { name: "get_weather", parameters: { type: "object" } } }];
    await page.set("tools", JSON.stringify(tools));
    const call = (index, id, city) => ({ tool_calls: [{ index, id, type: "function", function: { name: "get_weather", arguments: "" } }] });
    const rest = (index, city) => ({ tool_calls: [{ index, function: { arguments: `{"city": "${city}"}` } }] });
    proxy.script([call(0, "a"), rest(0, "Paris"), call(1, "b"), rest(1, "Rome")], { finish: "tool_calls" });
    await page.say("Weather?");
    await page.isIdle();
    assert.deepEqual(proxy.lastChat().tools, tools);
    assert.deepEqual(await page.texts(".card > b"), ["get_weather", "get_weather"]);
    assert.match(await page.text(".card pre"), /"city": "Paris"/);
    const fields = await page.$$(".card textarea");
    await fields[0].type("21 degrees");
    await fields[1].type("25 degrees");
    proxy.script(["Warm in both."]);
    await page.press("Send results");
    await page.until(() => document.querySelectorAll(".turn.assistant").length === 2);
    await page.isIdle();
    const { messages } = proxy.lastChat();
    assert.deepEqual(messages.map(message => message.role), ["user", "assistant", "tool", "tool"]);
    assert.deepEqual(messages.slice(2).map(({ tool_call_id: id, content }) => [id, content]), [["a", "21 degrees"], ["b", "25 degrees"]]);
    assert.equal(messages[1].tool_calls[1].function.arguments, '{"city": "Rome"}');
    assert.equal(await page.count(".card details.result"), 2);
  },

  async message_after_unanswered_call_is_sent(page, proxy) {
    proxy.script([{ tool_calls: [{ index: 0, id: "a", type: "function", function: { name: "f", arguments: "{}" } }] }], { finish: "tool_calls" });
    await page.say("Call it");
    await page.isIdle();
    proxy.script(["Fine."]);
    await page.say("Never mind");
    await page.until(() => document.querySelectorAll(".turn.assistant").length === 2);
    await page.isIdle();
    assert.deepEqual(proxy.lastChat().messages.map(message => message.role), ["user", "assistant", "tool", "user"]);
  },

  async stop_ends_the_answer_and_keeps_it(page, proxy) {
    let closed;
    const isClosed = new Promise(done => { closed = done; });
    proxy.script(["Partial", (_, outgoing) => new Promise(done => outgoing.on("close", () => { closed(); done(); })), "never"]);
    await page.say("Hi");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Partial");
    await page.isBusy();
    await page.click("#send");
    await page.isIdle();
    await isClosed;
    assert.match(await page.text(".foot"), /stopped/);
    assert.equal(await page.answer(), "Partial");
  },

  async regenerate_shows_a_new_version(page, proxy) {
    proxy.script(["One"]);
    await page.say("Hi");
    await page.isIdle();
    proxy.script(["Two"]);
    await page.press("Regenerate");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Two");
    await page.isIdle();
    assert.equal(await page.count(".turn.assistant"), 1);
    assert.equal(proxy.lastChat().messages.length, 1);
    assert.match(await page.text(".turn.assistant .versions"), /2\/2/);
  },

  async edited_message_is_sent_without_later_turns(page, proxy) {
    proxy.script(["One"]);
    await page.say("First");
    await page.isIdle();
    await page.say("Second");
    await page.until(() => document.querySelectorAll(".turn.assistant").length === 2);
    await page.isIdle();
    proxy.script(["New"]);
    await page.press("Edit", ".turn.user");
    await page.keyboard.press("Escape");
    assert.equal(await page.count(".editor"), 0);
    await page.press("Edit", ".turn.user");
    await page.type(".editor textarea", " changed");
    await page.keyboard.press("Enter");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "New");
    await page.isIdle();
    assert.deepEqual(proxy.lastChat().messages, [{ role: "user", content: "First changed" }]);
    assert.equal(await page.count(".turn"), 2);
  },

  async copy_puts_markdown_into_clipboard(page, proxy) {
    proxy.script(["**Bold**\n\n```js\nlet a = 1;\n```"]);
    await page.say("Hi");
    await page.isIdle();
    if (page.isFirefox) return; // It has no permission to read the clipboard.
    await page.context.overridePermissions(new URL(page.url()).origin, ["clipboard-read", "clipboard-write"]);
    const isCopied = text => page.until(text => navigator.clipboard.readText().then(read => read === text), text);
    await page.press("Copy", ".code");
    await isCopied("let a = 1;");
    await page.press("Copy", ".turn.assistant .foot");
    await isCopied("**Bold**\n\n```js\nlet a = 1;\n```");
    // Without navigator.clipboard, as on a page that is served without TLS to another machine.
    await page.evaluate(() => { Object.defineProperty(navigator.clipboard, "writeText", { value: () => Promise.reject(new Error("no")) }); });
    await page.press("Copy", ".turn.user");
    await isCopied("Hi");
  },

  async conversations_survive_reload(page, proxy) {
    proxy.script(["Kept answer"]);
    await page.say("Kept question");
    await page.isIdle();
    await page.reload();
    await page.until(() => document.querySelectorAll(".turn").length === 2);
    assert.equal(await page.answer(), "Kept answer");
    assert.match(await page.text(".foot"), /1 token · first token after/);
    await page.say("More");
    await page.until(() => document.querySelectorAll(".turn.assistant").length === 2);
    await page.isIdle();
    assert.equal(proxy.lastChat().messages.length, 3);
  },

  async conversation_interrupted_by_reload_is_kept(page, proxy) {
    proxy.script(["Some text ", (_, outgoing) => new Promise(done => outgoing.on("close", done))]);
    await page.say("Question");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent.startsWith("Some"));
    await page.reload();
    await page.until(() => document.querySelectorAll(".turn").length === 2);
    assert.match(await page.text(".foot"), /interrupted/);
  },

  async list_opens_renames_and_deletes(page, proxy) {
    proxy.script(["A"]);
    await page.say("First chat");
    await page.isIdle();
    await page.click("#new");
    assert.equal(await page.count(".turn"), 0);
    assert.equal(await page.evaluate(() => document.activeElement.id), "say");
    await page.say("Second chat");
    await page.isIdle();
    await openList(page);
    assert.deepEqual(await page.texts(".open-chat"), ["Second chat", "First chat"]);
    await page.press("First chat", "#titles");
    await page.until(() => document.querySelector(".turn.user .words")?.textContent === "First chat");
    await openList(page);
    await page.press("Rename", "#titles");
    await page.keyboard.type("Renamed");
    await page.keyboard.press("Enter");
    await page.until(() => [...document.querySelectorAll(".open-chat")].some(open => open.textContent === "Renamed"));
    await page.press("Delete", "#titles");
    await page.until(() => document.querySelectorAll(".open-chat").length === 1 && document.querySelector(".welcome"));
    await page.reload();
    await page.until(() => document.querySelectorAll(".open-chat").length === 1);
    assert.deepEqual(await page.texts(".open-chat"), ["Second chat"]);
  },

  async export_downloads_markdown_and_json(page, proxy, { downloads }) {
    proxy.script(["The *answer*"]);
    await page.say("What/is <it>?");
    await page.isIdle();
    if (page.isFirefox) return; // Puppeteer cannot choose its folder of downloads.
    const folder = path.join(downloads, String(page.width));
    fs.rmSync(folder, { recursive: true, force: true });
    const session = await page.createCDPSession();
    // The file exists before it is complete.
    const [names, complete] = [new Map(), new Set()];
    session.on("Browser.downloadWillBegin", ({ guid, suggestedFilename }) => names.set(guid, suggestedFilename));
    session.on("Browser.downloadProgress", ({ guid, state }) => { if (state === "completed") complete.add(names.get(guid)); });
    const behavior = { behavior: "allow", downloadPath: folder, browserContextId: page.context.id, eventsEnabled: true };
    await session.send("Browser.setDownloadBehavior", behavior);
    const read = async name => {
      await eventually(() => complete.has(name), name);
      return fs.readFileSync(path.join(folder, name), "utf8");
    };
    await openList(page);
    await page.press("Save as Markdown", "#titles");
    assert.equal(await read("Whatis it.md"), "# What/is <it>?\n\n## You\n\nWhat/is <it>?\n\n## Answer\n\nThe *answer*\n");
    await page.press("Save as JSON", "#titles");
    const kept = JSON.parse(await read("Whatis it.json"));
    assert.deepEqual(kept.messages, [{ role: "user", content: "What/is <it>?" }, { role: "assistant", content: "The *answer*" }]);
  },

  async answer_continues_while_another_chat_is_open(page, proxy) {
    let resume;
    proxy.script(["Slow ", () => new Promise(done => { resume = done; }), "answer"]);
    await page.say("Slow one");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent.startsWith("Slow"));
    const startAnother = async () => { await page.click("#new"); assert.equal(await page.text("#send"), "Send"); await openList(page); };
    await startAnother();
    await page.press("Slow one", "#titles");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent.startsWith("Slow"));
    await page.isBusy();
    await startAnother();
    await page.focus("#titles .open-chat");
    resume();
    await page.until(() => running.size === 0);
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Slow one");
    await page.press("Slow one", "#titles");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Slow answer");
    await page.isIdle();
  },

  async settings_are_sent_and_kept(page, proxy) {
    await page.click("#show-settings");
    const values = { system: "Be brief.", temperature: "0.5", top_p: "0.9", top_k: "40", seed: "7", max_tokens: "100", thinking_budget: "50" };
    for (const [name, value] of Object.entries(values)) await page.type(`#settings [name=${name}]`, value);
    await page.select("#settings [name=reasoning]", "off");
    await page.press("Done");
    await page.reload();
    await page.until(() => document.querySelector("#model option"));
    proxy.script(["ok"]);
    await page.say("Hi");
    await page.isIdle();
    const { temperature, top_p, top_k, seed, max_tokens, thinking_budget, chat_template_kwargs, messages } = proxy.lastChat();
    assert.deepEqual({ temperature, top_p, top_k, seed, max_tokens, thinking_budget }, { temperature: 0.5, top_p: 0.9, top_k: 40, seed: 7, max_tokens: 100, thinking_budget: 50 });
    assert.deepEqual(chat_template_kwargs, { enable_thinking: false });
    assert.deepEqual(messages[0], { role: "system", content: "Be brief." });
    await page.click("#show-settings");
    await page.press("Reset all");
    await page.press("Done");
    await page.press("Regenerate");
    await page.isIdle();
    assert.deepEqual(Object.keys(proxy.lastChat()).sort(), ["messages", "model", "return_progress", "stream", "stream_options"]);
  },

  async wrong_settings_stop_the_message(page, proxy) {
    proxy.requests.length = 0;
    for (const [name, value, sentence] of [["tools", "{oops", /not valid JSON/], ["tools", "{}", /must be a JSON list/], ["tools", "[{}]", /Tool 1 needs "type"/], ["temperature", "9", null]]) {
      await page.set("tools", "");
      await page.set(name, value);
      await page.$eval("#say", field => { field.value = ""; });
      await page.evaluate(() => { fillSettings(); });
      await page.say("Keep me");
      await page.until(() => document.querySelector("#settings").open);
      if (sentence) assert.match(await page.text("#tools-problem"), sentence);
      assert.equal(await page.evaluate(() => document.activeElement.name), name);
      assert.equal(await page.$eval("#say", field => field.value), "Keep me");
      await page.keyboard.press("Escape");
    }
    assert.equal(proxy.requests.length, 0);
    assert.equal(await page.count(".turn"), 0);
  },

  async prompt_progress_is_shown(page, proxy) {
    let resume;
    const progress = processed => send => { send({ choices: [], prompt_progress: { total: 20000, cache: 1000, processed, time_ms: 2000 } }); return new Promise(done => { resume = done; }); };
    proxy.script([progress(2000), "Done"]);
    await page.say("A long prompt");
    await page.until(() => document.querySelector(".turn.assistant progress")?.value === 2000);
    assert.match(await page.text(".turn.assistant > .soft"), /Reading the prompt: 2,000 of 20,000 tokens, 36 s left/);
    resume();
    await page.isIdle();
    assert.equal(await page.$eval(".turn.assistant > .soft", waiting => waiting.checkVisibility()), false);
  },

  async failures_are_sentences_and_can_be_retried(page, proxy) {
    proxy.json("POST /v1/chat/completions", { error: { message: "The queue is full." } }, 429);
    await page.say("Hi");
    await page.isIdle();
    assert.match(await page.text(".turn.assistant .error"), /The queue is full\./);
    proxy.script(["Half", send => send({ error: { message: "Expert 3 of layer 2 cannot be read." } })]);
    await page.press("Try again");
    await page.until(() => document.querySelector(".turn.assistant .error")?.textContent.startsWith("Expert 3"));
    proxy.script(["Half", (_, outgoing) => outgoing.end()]);
    await page.press("Try again");
    await page.until(() => document.querySelector(".turn.assistant .error")?.textContent.includes("The connection to the server broke"));
    proxy.routes["POST /v1/chat/completions"] = outgoing => outgoing.destroy();
    await page.press("Try again");
    await page.until(() => document.querySelector(".turn.assistant .error")?.textContent.includes("does not answer"));
    page.seen.errors.length = 0;
    proxy.script(["Good"]);
    await page.press("Try again");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Good");
    assert.equal(await page.count(".turn"), 2);
  },

  async text_files_are_attached_and_sent(page, proxy, { downloads }) {
    const [notes, binary] = [path.join(downloads, "notes.txt"), path.join(downloads, "data.bin")];
    fs.writeFileSync(notes, "line one\n```\nfence\n```\n");
    fs.writeFileSync(binary, Buffer.from([0, 255, 1, 2]));
    await (await page.$("#files")).uploadFile(notes);
    await page.until(() => document.querySelector("#waiting-files").textContent.includes("notes.txt"));
    await (await page.$("#files")).uploadFile(binary);
    await page.until(() => document.querySelector("#notice").textContent.includes("Cannot attach data.bin: it is not a text file."));
    // Dropped files take the same way.
    await page.evaluate(() => {
      const transfer = new DataTransfer();
      transfer.items.add(new File(["dropped text"], "dropped.md"));
      document.body.dispatchEvent(new DragEvent("dragover", { dataTransfer: transfer, bubbles: true, cancelable: true }));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
    });
    await page.until(() => document.querySelector("#waiting-files").textContent.includes("dropped.md"));
    proxy.script(["Read."]);
    await page.say("Read them");
    await page.isIdle();
    assert.equal(proxy.lastChat().messages[0].content, "File notes.txt:\n````\nline one\n```\nfence\n```\n\n````\n\nFile dropped.md:\n```\ndropped text\n```\n\nRead them");
    assert.equal(await page.count(".turn.user .attached details"), 2);
    assert.equal(await page.text("#waiting-files"), "");
    await (await page.$("#files")).uploadFile(notes);
    await page.until(() => document.querySelector("#waiting-files button"));
    await page.click("#waiting-files button");
    assert.equal(await page.text("#waiting-files"), "");
  },

  async images_need_a_model_that_takes_them(page, proxy, { downloads }) {
    const image = path.join(downloads, "dot.png");
    fs.writeFileSync(image, Buffer.from("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==", "base64"));
    const listed = vision => ({ object: "list", data: [{ id: "seer", loaded: true, capabilities: { chat: true, tools: true, reasoning: true, vision } }] });
    for (const vision of [false, true]) {
      proxy.json("GET /v1/models", listed(vision));
      await page.evaluate(() => refreshModels(true));
      await (await page.$("#files")).uploadFile(image);
      if (!vision) await page.until(() => document.querySelector("#notice").textContent.includes("the model does not take images"));
    }
    await page.until(() => document.querySelector("#waiting-files img")?.naturalWidth === 1);
    proxy.script(["A dot."]);
    await page.say("What is this?");
    await page.isIdle();
    const [picture, text] = proxy.lastChat().messages[0].content;
    assert.match(picture.image_url.url, /^data:image\/png;base64,iVBOR/);
    assert.deepEqual(text, { type: "text", text: "What is this?" });
    assert.equal(await page.$eval(".turn.user img", element => element.alt), "dot.png");
    // A large image is scaled, with white for what is transparent.
    const scaled = await page.evaluate(async () => {
      const canvas = make("canvas"), context = canvas.getContext("2d");
      [canvas.width, canvas.height] = [4000, 1000];
      const noise = context.createImageData(4000, 300);
      for (let at = 0; at < noise.data.length; at += 1) noise.data[at] = Math.random() * 256;
      context.putImageData(noise, 0, 700);
      await addFiles([new File([await new Promise(done => canvas.toBlob(done))], "large.png", { type: "image/png" })]);
      const image = make("img");
      image.src = waiting.images[0].url;
      await image.decode();
      const small = make("canvas");
      small.getContext("2d").drawImage(image, 0, 0);
      const result = [image.width, image.height, small.getContext("2d").getImageData(5, 5, 1, 1).data[0]];
      waiting.images = [];
      return result;
    });
    assert.deepEqual(scaled, [2048, 512, 255]);
    if (page.isFirefox) return; // Scripts cannot paste files.
    // An image that is pasted into the field.
    await page.evaluate(() => {
      const transfer = new DataTransfer();
      transfer.items.add(new File([new Uint8Array([1])], "pasted.png", { type: "image/png" }));
      document.querySelector("#say").dispatchEvent(new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true }));
    });
    await page.until(() => document.querySelector("#waiting-files img")?.alt === "pasted.png");
  },

  async picked_model_is_loaded(page, proxy) {
    const models = ["small", "mlx-community/Qwen3.5-397B-A17B-Instruct-4bit-with-a-very-long-name"].map((id, index) => ({ id, loaded: index === 0 }));
    proxy.json("GET /v1/models", { object: "list", data: models });
    let resume, loads = 0;
    proxy.routes["POST /tokenize"] = async (outgoing, body) => {
      assert.equal(body.model, models[1].id);
      await new Promise(done => { resume = done; });
      if ((loads += 1) === 1) { outgoing.writeHead(500, { "content-type": "application/json" }); return outgoing.end('{"error": {"message": "The disk is full."}}'); }
      models.forEach((model, index) => { model.loaded = index === 1; });
      proxy.json("GET /v1/models", { object: "list", data: models });
      outgoing.writeHead(200, { "content-type": "application/json" });
      outgoing.end('{"count": 0}');
    };
    await page.evaluate(() => refreshModels(true));
    await page.haveTexts("#model option", ["small", models[1].id + " (not loaded)"]);
    await page.select("#model", models[1].id);
    await page.until(() => document.querySelector("#notice progress"));
    await eventually(() => resume, "the model is loaded");
    resume();
    await page.until(() => /Cannot load .*: The disk is full\./.test(document.querySelector("#notice").textContent));
    await page.until(() => document.querySelector("#model").value === "small");
    page.seen.errors.length = 0;
    resume = null;
    await page.select("#model", models[1].id);
    await eventually(() => resume, "the model is loaded again");
    resume();
    await page.until(() => /is loaded\./.test(document.querySelector("#notice").textContent));
    await page.until(() => !document.querySelector("#model").textContent.includes(models[1].id + " (not loaded)"));
    proxy.script(["ok"]);
    await page.say("Hi");
    await page.isIdle();
    assert.equal(proxy.lastChat().model, models[1].id);
  },

  async field_grows_and_shift_enter_breaks_lines(page, proxy) {
    const height = () => page.$eval("#say", field => field.offsetHeight);
    const one = await height();
    await page.focus("#say");
    for (let line = 0; line < 6; line += 1) { await page.keyboard.type("line"); await page.keyboard.down("Shift"); await page.keyboard.press("Enter"); await page.keyboard.up("Shift"); }
    assert.ok(await height() > one * 3, `${one} to ${await height()} pixels`);
    proxy.script(["ok"]);
    await page.keyboard.press("Enter");
    await page.isIdle();
    assert.equal(await height(), one);
  },

  async view_stays_where_the_user_scrolled(page, proxy) {
    let resume;
    proxy.script(["line\n\n".repeat(80), () => new Promise(done => { resume = done; }), "line\n\n".repeat(80)]);
    await page.say("Hi");
    await page.until(() => document.querySelectorAll(".turn.assistant p").length >= 79);
    const rest = () => page.$eval("#log", log => log.scrollHeight - log.scrollTop - log.clientHeight);
    assert.ok(await rest() < 5, "follows the answer");
    await page.$eval("#log", log => { log.scrollTop = 100; });
    await page.until(() => !isFollowing);
    resume();
    await page.isIdle();
    assert.equal(await page.$eval("#log", log => log.scrollTop), 100);
  },

  async welcome_names_the_model_and_sends_a_prompt(page, proxy) {
    await page.until(() => /in memory/.test(document.querySelector(".welcome p")?.textContent));
    assert.equal(await page.text(".welcome h2"), "moestro-demo");
    assert.match(await page.text(".welcome p"), /MB in memory · computed on .* · context of [\d,]+ tokens/);
    assert.match((await page.texts(".welcome p"))[1], /This is a 9 MB toy .* moestro run mlx-community\/Qwen3\.5-4B/);
    const prompts = await page.$$(".welcome button");
    assert.equal(prompts.length, 4);
    proxy.script(["ok"]);
    const words = await prompts[1].evaluate(prompt => prompt.textContent);
    await prompts[1].click();
    await page.isIdle();
    assert.deepEqual(proxy.lastChat().messages, [{ role: "user", content: words }]);
  },
};
