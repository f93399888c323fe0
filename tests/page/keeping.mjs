// Conversations: versions of messages, tabs, reloads, deleted conversations, old storage, search, export and import.
import assert from "node:assert/strict";
import { openTab } from "./harness.mjs";

export const widths = [1280];

const openList = async page => { if (!await page.isOpen("list")) await page.click("#show-list"); };

/** Asks and waits for the whole answer. */
export async function converse(page, proxy, question, answer) {
  const before = await page.count(".turn.assistant");
  proxy.script([answer]);
  await page.say(question);
  await page.until(before => document.querySelectorAll(".turn.assistant").length > before, before);
  await page.isIdle();
}

/** Makes the database refuse this method of its stores. */
const refuse = (page, method) => page.evaluate(method => {
  const { prototype } = IDBObjectStore, real = prototype[method];
  prototype[method] = () => { throw new DOMException("The disk is full", "QuotaExceededError"); };
  window.accept = () => { prototype[method] = real; };
}, method);
const accept = page => page.evaluate(() => window.accept());
/** Waits for a notice with this text and no buttons. */
const hasNotice = (page, text) => page.until(text => new RegExp(`^${text}$`).test(document.querySelector("#notice").textContent), text);

const shown = page => page.evaluate(() => [...document.querySelectorAll(".turn.user .words, .turn.assistant > .text")].map(element => element.innerText.trim()));

/** Waits until a tab has written its messages, which may be after the end of an answer. */
const allKept = page => page.until(() => unsaved.size === 0);

/** The texts of all messages that the browser has kept, without their order. */
async function keptTexts(page) {
  await allKept(page);
  return page.evaluate(async () => (await inDatabase("readonly", (_, nodes) => nodes.getAll())).map(node => node.content).sort());
}

export const tests = {
  async versions_are_kept_and_shown(page, proxy) {
    await converse(page, proxy, "First", "One");
    await converse(page, proxy, "Second", "Two");
    proxy.script(["New"]);
    await page.press("Edit", ".turn.user");
    await page.type(".editor textarea", " changed");
    await page.keyboard.press("Enter");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "New");
    await page.isIdle();
    assert.deepEqual(await shown(page), ["First changed", "New"]);
    assert.equal(await page.$eval(".turn.user .versions", element => element.innerText.replace(/\s/g, "")), "‹2/2›");
    await page.click(".turn.user [aria-label='Previous version']");
    assert.deepEqual(await shown(page), ["First", "One", "Second", "Two"]);
    assert.equal(await page.evaluate(() => document.activeElement.title), "Next version", "the focus stays at the arrows");
    assert.equal(await page.text("#announce"), "Version 1 of 2");
    // An answer in the middle gets a version, too, and the rest stays with the old one.
    proxy.script(["Other"]);
    await page.press("Regenerate", ".turn.assistant");
    await page.isIdle();
    await page.until(() => document.querySelectorAll(".turn").length === 2);
    await page.isIdle();
    assert.deepEqual(await shown(page), ["First", "Other"]);
    await page.click(".turn.assistant [aria-label='Previous version']");
    assert.deepEqual(await shown(page), ["First", "One", "Second", "Two"]);
    await page.reload();
    await page.until(() => document.querySelectorAll(".turn").length === 4);
    assert.deepEqual(await shown(page), ["First", "One", "Second", "Two"], "a reload shows the same versions");
    proxy.script(["Three"]);
    await page.say("Third");
    await page.until(() => document.querySelectorAll(".turn.assistant").length === 3);
    await page.isIdle();
    assert.deepEqual(proxy.lastChat().messages.map(message => message.content), ["First", "One", "Second", "Two", "Third"]);
  },

  async answer_replaced_while_it_runs_is_kept(page, proxy) {
    proxy.script(["Half", (_, outgoing) => new Promise(done => outgoing.on("close", done))]);
    await page.say("Hi");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Half");
    proxy.script(["Whole"]);
    await page.press("Edit", ".turn.user");
    await page.keyboard.press("Enter");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Whole");
    await page.isIdle();
    await page.click(".turn.user [aria-label='Previous version']");
    assert.deepEqual(await shown(page), ["Hi", "Half"]);
    assert.match(await page.text(".foot"), /stopped/);
  },

  async running_answer_continues_in_hidden_version(page, proxy) {
    await converse(page, proxy, "Hi", "One");
    let resume;
    proxy.script(["Tw", () => new Promise(done => { resume = done; }), "o"]);
    await page.press("Regenerate", ".turn.assistant");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Tw");
    await page.click("[aria-label='Previous version']");
    assert.deepEqual(await shown(page), ["Hi", "One"]);
    resume();
    await page.isIdle();
    await page.click("[aria-label='Next version']");
    assert.deepEqual(await shown(page), ["Hi", "Two"]);
  },

  async reload_keeps_what_was_shown(page, proxy) {
    const words = Array.from({ length: 200 }, (_, index) => `word${index} `), isShown = () => page.until(() => document.querySelector(".turn.assistant > .text")?.textContent);
    for (const isKilled of [false, true]) {
      await page.click("#new");
      proxy.script([words[0], isShown, ...words.slice(1), (_, outgoing) => new Promise(done => outgoing.on("close", done))], { pause: 10 });
      await page.say("Long");
      await page.until(() => conversation.messages.at(-1)?.content.includes("word100 "));
      if (isKilled) {
        // A page that is killed has no `pagehide`. It has kept these words while the answer grew, as it does more than twice a second.
        await page.until(async () => (await readNodes(conversation.id)).at(-1)?.content.includes("word100 "));
        await page.evaluate(() => { Storage.prototype.setItem = () => {}; });
      }
      const before = isKilled ? words.slice(0, 101).join("") : await page.evaluate(() => conversation.messages.at(-1).content);
      await page.reload();
      await page.until(() => document.querySelectorAll(".turn").length === 2);
      const after = await page.evaluate(() => conversation.messages.at(-1).content);
      assert.ok(after.startsWith(before), `${after} after ${before}, ${isKilled ? "killed" : "reloaded"}`);
      assert.match(await page.text(".foot"), /interrupted/);
      assert.equal(await page.evaluate(() => Object.keys(localStorage).filter(key => key.startsWith("moestro.unsaved")).length), 0);
    }
  },

  async message_survives_immediate_reload(page, proxy) {
    proxy.script([(_, outgoing) => new Promise(done => outgoing.on("close", done))]);
    await Promise.all([page.waitForNavigation(), page.evaluate(() => { $("say").value = "At once"; sendMessage(); location.reload(); })]);
    await page.until(() => document.querySelector(".turn.user .words")?.textContent === "At once");
  },

  async message_that_storage_refused_is_kept_later(page, proxy) {
    await refuse(page, "put");
    await converse(page, proxy, "Refused", "One");
    await hasNotice(page, "Cannot keep this conversation: .+ Delete old conversations for good to make room\\.");
    await accept(page);
    await converse(page, proxy, "Kept", "Two");
    await page.evaluate(() => localStorage.clear());
    await page.until(() => unsaved.size === 0);
    assert.deepEqual(await keptTexts(page), ["Kept", "One", "Refused", "Two"]);
    page.seen.errors.length = 0;
  },

  async refused_name_is_kept_later(page, proxy) {
    await converse(page, proxy, "Question", "One");
    await openList(page);
    await refuse(page, "put");
    await page.press("Rename", "#titles");
    await page.keyboard.type("Renamed");
    await page.keyboard.press("Enter");
    await hasNotice(page, "Cannot keep this change: .+");
    await accept(page);
    await converse(page, proxy, "More", "Two");
    await allKept(page);
    assert.deepEqual(await page.evaluate(async () => (await inDatabase("readonly", titles => titles.getAll())).map(kept => kept.title)), ["Renamed"]);
    page.seen.errors.length = 0;
  },

  async refused_deletion_is_no_success(page, proxy) {
    await converse(page, proxy, "Question", "One");
    await openList(page);
    await refuse(page, "put");
    await page.press("Delete", "#titles");
    await hasNotice(page, "Cannot keep this change: .+room\\.");
    // The closed page has rescued the change.
    await page.reload();
    await page.until(() => !document.querySelector("#deleted").hidden);
    await refuse(page, "put");
    await openList(page);
    await page.click("#deleted summary");
    await page.press("Restore", "#deleted");
    await hasNotice(page, "Cannot keep this change: .+");
    assert.equal(await page.count(".turn"), 0);
    await page.reload();
    await page.until(() => document.querySelectorAll(".open-chat").length === 1);
    await page.press("Question", "#titles");
    await page.until(() => document.querySelectorAll(".turn").length === 2);
    await page.press("Delete", "#titles");
    await page.until(() => document.querySelector("#notice button"));
    await refuse(page, "delete");
    await page.click("#deleted summary");
    await page.press("Delete for good", "#deleted");
    await page.press("Delete", "#question");
    await hasNotice(page, "Cannot keep this change: .+");
    assert.equal(await page.$eval("#deleted", deleted => deleted.hidden), false);
    page.seen.errors.length = 0;
  },

  async refused_message_can_be_deleted_for_good(page, proxy) {
    await refuse(page, "put");
    await converse(page, proxy, "Question", "One");
    await openList(page);
    await page.press("Delete", "#titles");
    await page.click("#deleted summary");
    await page.press("Delete for good", "#deleted");
    await page.press("Delete", "#question");
    await page.until(() => document.querySelector("#deleted").hidden);
    page.seen.errors.length = 0;
    await page.reload();
    await page.until(() => document.querySelector("#model option"));
    assert.deepEqual(await keptTexts(page), []);
  },

  async refused_conversation_stays_deleted(page, proxy) {
    await refuse(page, "put");
    await converse(page, proxy, "Question", "One");
    await accept(page);
    await openList(page);
    await page.press("Delete", "#titles");
    await page.press("Undo", "#notice");
    await page.until(() => document.querySelectorAll(".turn").length === 2);
    await page.press("Delete", "#titles");
    await page.until(() => document.querySelector("#notice button"));
    // The closed page has rescued the messages and the deletion.
    await page.reload();
    await page.until(() => !document.querySelector("#deleted").hidden);
    assert.deepEqual(await keptTexts(page), ["One", "Question"]);
    assert.equal(await page.count("#titles .open-chat"), 0);
    page.seen.errors.length = 0;
  },

  async refused_messages_with_the_same_ids_are_kept_later(page) {
    await refuse(page, "put");
    await page.evaluate(() => importFiles(["x", "y"].map(content => new File([JSON.stringify({ messages: [{ role: "user", content }] })], "a.json"))));
    await page.reload();
    await page.until(() => document.querySelectorAll("#titles .open-chat").length === 2);
    assert.deepEqual(await keptTexts(page), ["x", "y"]);
    page.seen.errors.length = 0;
  },

  async deletion_for_good_forgets_what_closed_pages_rescued(page, proxy) {
    await refuse(page, "put");
    await converse(page, proxy, "Question", "One");
    await accept(page);
    await page.evaluate(() => { rescue(); unsaved.clear(); return deleteForGood([conversation.id]); });
    page.seen.errors.length = 0;
    await page.reload();
    await page.until(() => document.querySelector("#model option"));
    assert.deepEqual(await keptTexts(page), []);
  },

  async refused_import_says_so(page) {
    await refuse(page, "put");
    await page.evaluate(() => importFiles([new File(['{"messages": [{"role": "user", "content": "x"}]}'], "a.json")]));
    await hasNotice(page, "1 conversation imported\\. Cannot keep this conversation: .+");
    assert.deepEqual(await shown(page), ["x"]);
    page.seen.errors.length = 0;
  },

  async refused_rescue_is_tried_again(page) {
    await page.evaluate(() => localStorage.setItem("moestro.unsaved.b", JSON.stringify({ id: "a", title: "T", choices: {}, message: { id: "b", parent: null, role: "user", content: "Rescued" } })));
    await refuse(page, "put");
    await page.evaluate(() => recover());
    assert.deepEqual(await keptTexts(page), []);
    await accept(page);
    await page.evaluate(() => recover());
    assert.deepEqual(await keptTexts(page), ["Rescued"]);
    page.seen.errors.length = 0;
  },

  async storage_of_first_version_is_read(page) {
    await page.evaluate(async () => {
      (await database).close();
      const finished = request => new Promise((done, failed) => { request.onsuccess = () => done(request.result); request.onerror = failed; });
      await finished(indexedDB.deleteDatabase("moestro"));
      const opening = indexedDB.open("moestro", 1);
      opening.onupgradeneeded = () => ["titles", "messages"].forEach(name => opening.result.createObjectStore(name, { keyPath: "id" }));
      const db = await finished(opening), transaction = db.transaction(["titles", "messages"], "readwrite");
      transaction.objectStore("titles").put({ id: "17-x", title: "Old chat", updated: 5 });
      transaction.objectStore("messages").put({ id: "17-x", messages: [{ role: "user", content: "Old question", files: [{ name: "a.txt", text: "kept" }] },
        { role: "assistant", content: "", tool_calls: [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }], results: { c: "5" } }, { role: "assistant", content: "Old answer", note: "3 tokens" }] });
      await new Promise(done => { transaction.oncomplete = done; });
      db.close();
      localStorage.setItem("moestro.settings", '{"system": "Be brief."}');
      sessionStorage.setItem("moestro.current", "17-x");
    });
    await page.reload();
    await page.until(() => document.querySelectorAll(".turn").length === 3);
    assert.deepEqual(await shown(page), ["Old question", "", "Old answer"]);
    assert.match(await page.text(".turn.user .attached"), /kept/);
    assert.equal(await page.text(".card .result pre"), "5");
    assert.equal(await page.evaluate(() => settings.system), "Be brief.");
    await openList(page);
    assert.deepEqual(await page.texts(".open-chat"), ["Old chat"]);
  },

  async two_tabs_keep_both_messages(page, proxy) {
    await converse(page, proxy, "Both", "One");
    const other = await openTab(page);
    // A second tab has its own session: it opens the conversation from the list.
    await openList(other);
    await other.press("Both", "#titles");
    await other.until(() => document.querySelectorAll(".turn").length === 2);
    await page.bringToFront();
    await converse(page, proxy, "From the first", "Two");
    await other.bringToFront();
    await other.until(() => document.querySelectorAll(".turn").length === 4);
    proxy.script(["Three"]);
    await other.press("Regenerate", ".turn.assistant");
    await other.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Three");
    await other.isIdle();
    await page.bringToFront();
    await page.until(() => document.querySelector(".turn.assistant .versions")?.textContent.includes("/2"));
    assert.deepEqual(await shown(page), ["Both", "One", "From the first", "Two"], "the shown version stays");
    await converse(page, proxy, "Again from the first", "Four");
    await other.close();
    await page.reload();
    await page.until(() => document.querySelector(".turn"));
    assert.deepEqual(await keptTexts(page), ["Again from the first", "Both", "Four", "From the first", "One", "Three", "Two"]);
  },

  async tabs_write_at_the_same_time(page, proxy) {
    await converse(page, proxy, "Both", "One");
    const other = await openTab(page);
    await other.evaluate(id => openConversation(id), await page.evaluate(() => conversation.id));
    await other.until(() => document.querySelectorAll(".turn").length === 2);
    proxy.script(Array.from({ length: 60 }, (_, index) => `w${index} `), { pause: 20 });
    for (const [tab, text] of [[page, "left"], [other, "right"]]) await tab.evaluate(text => { $("say").value = text; sendMessage(); }, text);
    for (const tab of [page, other]) { await tab.bringToFront(); await tab.isIdle(); await allKept(tab); }
    await other.close();
    const whole = Array.from({ length: 60 }, (_, index) => `w${index} `).join("");
    assert.deepEqual(await keptTexts(page), ["Both", "One", "left", "right", whole, whole]);
  },

  async deleted_conversation_comes_back(page, proxy) {
    await converse(page, proxy, "Precious", "Yes");
    const isGone = () => page.until(() => document.querySelectorAll(".open-chat").length === 0);
    const isBack = () => page.until(() => document.querySelectorAll(".open-chat").length === 1 && document.querySelectorAll(".turn").length === 2);
    await openList(page);
    await page.press("Delete", "#titles");
    await isGone();
    await page.press("Undo", "#notice");
    await isBack();
    await openList(page);
    await page.press("Delete", "#titles");
    await isGone();
    await page.reload();
    await page.until(() => !document.querySelector("#deleted").hidden);
    await openList(page);
    await page.click("#deleted summary");
    await page.press("Restore", "#deleted");
    await isBack();
    assert.deepEqual(await shown(page), ["Precious", "Yes"]);
    await openList(page);
    await page.press("Delete", "#titles");
    await page.until(() => !document.querySelector("#deleted").hidden);
    await openList(page);
    if (!await page.$eval("#deleted", details => details.open)) await page.click("#deleted summary");
    await page.press("Delete for good", "#deleted");
    await page.press("Delete", "#question");
    await page.until(() => document.querySelector("#deleted").hidden);
    await page.until(async () => (await inDatabase("readonly", (_, nodes) => nodes.count())) === 0);
  },

  async old_deleted_conversations_are_removed(page, proxy) {
    await converse(page, proxy, "Old", "Yes");
    const days = count => page.evaluate(count => setTitle(conversation.id, { deleted: Date.now() - count * DAY }), count);
    for (const [age, left] of [[29, 1], [31, 0]]) {
      await days(age);
      await page.reload();
      await page.until(() => document.querySelector("#model option"));
      await page.until(async left => (await inDatabase("readonly", titles => titles.count())) === left, left);
    }
  },

  async search_finds_messages_and_opens_them(page, proxy) {
    await converse(page, proxy, "About foxes", "A quick brown fox");
    proxy.script(["Another"]);
    await page.press("Regenerate");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Another");
    await page.isIdle();
    await page.click("#new");
    await converse(page, proxy, "About bears", "A slow bear");
    await openList(page);
    await page.type("#search", "BROWN");
    await page.until(() => document.querySelectorAll(".open-chat").length === 1);
    assert.match(await page.text("#titles p"), /A quick brown fox/);
    await page.press("About foxes", "#titles");
    // The match is in a version that was not shown.
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "A quick brown fox");
    await openList(page);
    await page.focus("#search");
    await page.keyboard.press("Escape");
    await page.until(() => document.querySelectorAll(".open-chat").length === 2);
    await page.type("#search", "nowhere");
    await page.until(() => document.querySelector("#no-titles").textContent === "Nothing found.");
  },

  async exported_conversation_is_imported(page, proxy) {
    await converse(page, proxy, "Question", "One");
    proxy.script(["Two"]);
    await page.press("Regenerate");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Two");
    await page.isIdle();
    const before = await page.evaluate(async () => {
      window.saved = [];
      download = (name, type, text) => saved.push(text);
      await exportAsJson([keptTitle(conversation.id)]);
      await exportAsJson([keptTitle(conversation.id), keptTitle(conversation.id)]);
      return saved;
    });
    const importText = (text, name = "a.json") => page.evaluate((text, name) => importFiles([new File([text], name)]), text, name);
    await importText(before[0]);
    assert.deepEqual(await shown(page), ["Question", "Two"]);
    assert.match(await page.text("#notice"), /1 conversation imported/);
    await page.click("[aria-label='Previous version']");
    assert.deepEqual(await shown(page), ["Question", "One"]);
    await importText(before[1]);
    await page.until(() => titles.length === 4);
    // The export of earlier versions, and messages as the API takes them.
    const messages = [{ role: "system", content: "no" }, { role: "user", content: [{ type: "text", text: "Hello" }] }, { role: "assistant", content: "", tool_calls: [{ id: "c", type: "function", function: { name: "f", arguments: "{}" } }] }, { role: "tool", tool_call_id: "c", content: "5" }, { role: "assistant", content: "Five" }];
    await importText(JSON.stringify({ title: "Earlier", messages }));
    assert.deepEqual(await shown(page), ["Hello", "", "Five"]);
    await page.reload();
    await page.until(() => document.querySelectorAll(".turn").length === 3);
    assert.equal(await page.text(".card .result pre"), "5");
    const count = await page.evaluate(() => titles.length);
    for (const bad of ["{", "5", "null", "[]", "{}", '{"messages": 5}', '{"messages": [null]}', '{"messages": [{"role": "root", "content": "x"}]}', '{"nodes": [{"id": "a", "parent": "a", "role": "user", "content": 5}]}']) {
      await importText(bad, "bad.json");
      assert.match(await page.text("#notice"), /^Cannot import bad\.json: [^.]+\.$/, bad);
    }
    assert.equal(await page.evaluate(() => titles.length), count);
    await importText('{"messages": [{"role": "user", "content": "x"}], "choices": null}');
    assert.deepEqual(await shown(page), ["x"]);
    await importText('{"nodes": [{"id": "a", "parent": "b", "role": "user", "content": "circle"}, {"id": "b", "parent": "a", "role": "user", "content": "c"}]}');
    await page.until(() => document.querySelectorAll(".turn").length === 2);
  },
};
