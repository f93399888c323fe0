// A server that stops, freezes or breaks an answer, and 200 random actions with all of these.
import assert from "node:assert/strict";
import { sleep } from "./harness.mjs";

export const widths = [1280];

/**
 * The page's own times add up to 4.5 s. On a busy machine, all of them get longer. Without its own times, the page
 * never shows a frozen server, because browsers wait for minutes.
 */
const MAX_SECONDS = 30;

/** Waits until the page says that the server is gone, and returns the seconds. */
async function secondsUntilShown(page) {
  const start = Date.now();
  await page.until(() => document.querySelector("#down").checkVisibility() && /^No answer from the server since \d\d:\d\d:\d\d\. Check that it is running\./.test(document.querySelector("#down").textContent));
  return (Date.now() - start) / 1000;
}

export const tests = {
  async dead_server_is_shown_within_seconds(page, proxy) {
    await page.until(() => document.querySelector("#now dd"));
    for (const state of ["isDown", "isFrozen"]) {
      await sleep(1500);
      proxy[state] = true;
      const seconds = await secondsUntilShown(page);
      assert.ok(seconds < MAX_SECONDS, `${state}: ${seconds} s`);
      assert.match(await page.text("#gauges-time"), /^As of \d\d:\d\d:\d\d$/);
      const colours = await page.evaluate(() => ["#now dd", "#now dt"].map(selector => getComputedStyle(document.querySelector(selector)).color));
      assert.equal(colours[0], colours[1], "the values are grey");
      proxy[state] = false;
      await page.until(() => !document.querySelector("#down").textContent && !document.querySelector("#gauges-time").textContent);
      assert.equal(await page.text("#announce"), "The server answers again");
    }
    await page.isOnlyDisturbed();
  },

  async frozen_answer_shows_dead_server(page, proxy) {
    let resume, end;
    proxy.script(["Part", () => { proxy.isFrozen = true; return new Promise(done => { resume = done; }); }, " two", () => new Promise(done => { end = done; })]);
    await page.say("Hi");
    assert.ok(await secondsUntilShown(page) < MAX_SECONDS);
    resume();
    // Words of an answer are a sign of life.
    await page.until(() => !document.querySelector("#down").textContent);
    end();
    await page.isIdle();
    assert.equal(await page.answer(), "Part two");
    await page.isOnlyDisturbed();
  },

  async long_answer_is_a_sign_of_life(page, proxy) {
    // All other requests wait, as they do if the browser has as many connections as it may have.
    let before;
    const words = Array.from({ length: 60 }, () => "word ");
    proxy.script([() => { proxy.isFrozen = true; }, ...words, async () => { before = await page.text("#down"); }], { pause: 100 });
    await page.say("Hi");
    await page.isIdle();
    assert.equal(before, "");
    proxy.isFrozen = false;
    await page.isOnlyDisturbed();
  },

  async broken_answer_is_a_sentence(page, proxy) {
    const breaks = { destroyed: outgoing => outgoing.destroy(), ended: outgoing => outgoing.end(), garbage: outgoing => outgoing.end("data: {oops\n\n"), cut: outgoing => outgoing.end('data: {"choices": [') };
    for (const [name, end] of Object.entries(breaks)) {
      await page.click("#new");
      const isShown = () => page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Half an answer");
      proxy.script(["Half an answer", async (_, outgoing) => { await isShown(); end(outgoing); }]);
      await page.say("Hi");
      await page.until(() => document.querySelector(".turn.assistant .error"));
      assert.match(await page.text(".turn.assistant .error"), /^(The connection to the server broke before the answer was complete|The server sent something that is no part of an answer)\. The text so far is kept\.$/, name);
      assert.equal(await page.answer(), "Half an answer");
    }
    await page.isOnlyDisturbed();
  },

  async nothing_shown_is_lost_in_an_evening(page, proxy) {
    const seed = Number(process.env.PAGE_SEED || 55), actions = Number(process.env.PAGE_ACTIONS || 100);
    const counts = await evening(page, proxy, random(seed), actions);
    console.log(`        seed ${seed}: ${JSON.stringify(counts)}`);
    await page.isOnlyDisturbed();
  },
};

/** Numbers below a limit that depend on the seed only. */
function random(seed) {
  let state = seed >>> 0;
  return limit => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor(state / 2 ** 32 * limit);
  };
}

/** Text that a message shows now. A growing answer may lose what was drawn in the last half second. */
const drawn = page => page.evaluate(() => conversation.messages.map(message => ({ id: message.id, content: message.content })));
const kept = page => page.evaluate(async () => (await inDatabase("readonly", (_, nodes) => nodes.getAll())).map(({ id, content }) => ({ id, content })));

async function evening(page, proxy, below, actions) {
  const seen = new Map(), counts = {};
  let question = 0;
  const answer = () => {
    const words = Array.from({ length: 5 + below(25) }, () => `w${below(1000)} `), end = below(6);
    // One answer of six breaks, and one takes long enough to be disturbed by the next actions.
    proxy.script(end === 0 ? [...words, (_, outgoing) => outgoing.destroy()] : words, { pause: end === 1 ? 60 : 3 });
  };
  const look = async () => { for (const { id, content } of await drawn(page)) if (content.length >= (seen.get(id) || "").length) seen.set(id, content); };
  const press = async (selector, text) => {
    const index = below(1000);
    return page.evaluate((selector, text, index) => {
      const all = [...document.querySelectorAll(selector)].filter(element => (!text || element.textContent === text) && element.checkVisibility() && !element.disabled);
      all[index % all.length]?.click();
      return all.length > 0;
    }, selector, text, index);
  };
  const all = {
    send: async () => { answer(); await page.evaluate(text => { $("say").value = text; sendMessage(); }, `question ${question += 1}`); },
    edit: async () => {
      answer();
      // In one step, because a conversation that is being opened replaces the editor.
      await page.evaluate((index, text) => {
        const all = [...document.querySelectorAll(".turn.user button")].filter(button => button.textContent === "Edit" && button.checkVisibility());
        if (!all.length) return;
        all[index % all.length].click();
        document.querySelector(".editor textarea").value += text;
        document.querySelector(".editor button").click();
      }, below(1000), ` edit ${question += 1}`);
    },
    regenerate: async () => { answer(); await press(".turn.assistant button", "Regenerate"); },
    retry: async () => { answer(); await press(".turn.assistant button", "Try again"); },
    version: () => press(".versions button"),
    stop: () => page.evaluate(() => running.get(conversation.id)?.stop()),
    open: () => press("#titles .open-chat"),
    fresh: () => page.click("#new"),
    remove: async () => { if (await press("#titles button", "Delete") && below(2)) await page.press("Undo", "#notice"); },
    reload: async () => { await look(); await page.reload(); await page.until(() => document.querySelector("#model option")); },
    restart: async () => { proxy.isDown = true; proxy.breakAll(); await sleep(300); proxy.isDown = false; },
  };
  const names = ["send", "send", "send", "edit", "edit", "regenerate", "regenerate", "version", "version", "retry", "stop", "open", "fresh", "remove", "reload", "restart"];
  for (let step = 0; step < actions; step += 1) {
    const name = names[below(names.length)];
    counts[name] = (counts[name] || 0) + 1;
    await all[name]();
    if (below(3)) await sleep(below(120)); else await page.until(() => running.size === 0);
    await look();
  }
  await page.until(() => running.size === 0);
  await look();
  await page.reload();
  await page.until(() => document.querySelector("#model option"));
  const after = new Map((await kept(page)).map(({ id, content }) => [id, content]));
  for (const [id, content] of seen) assert.ok(after.get(id)?.startsWith(content), `message ${id}: shown ${JSON.stringify(content)}, kept ${JSON.stringify(after.get(id))}`);
  counts.messages = seen.size;
  return counts;
}
