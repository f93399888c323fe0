// The page with the real server: the demo model answers, the gauges move, the key is asked for.
import assert from "node:assert/strict";
import { openPage } from "./harness.mjs";

export const tests = {
  async demo_model_answers_with_reasoning(page) {
    await page.set("temperature", "0");
    await page.say("What is 12+7?");
    await page.isIdle();
    assert.match(await page.answer(), /12 \+ 7 = 19/);
    assert.match(await page.text(".foot"), /\d+ tokens · .*first token after [\d.]+ s · prompt of \d+ tokens/);
    await page.click(".reasoning summary");
    await page.until(() => document.querySelector(".reasoning .text").textContent.length > 10);
  },

  async demo_model_calls_a_tool(page, proxy) {
    await page.set("temperature", "0");
    await page.set("tools", JSON.stringify([{ type: "function", function: { name: "get_weather", description: "Get the current weather of a city.", parameters: { type: "object", properties: { city: { type: "string", description: "Name of the city" } }, required: ["city"] } } }]));
    await page.say("What is the weather in Paris?");
    await page.isIdle();
    assert.equal(await page.text(".card > b"), "get_weather");
    assert.equal(JSON.parse(await page.text(".card pre")).city, "Paris");
    await page.type(".card textarea", '{"sky": "sunny", "temperature": 21}');
    await page.keyboard.press("Enter");
    await page.until(() => document.querySelectorAll(".turn.assistant").length === 2);
    await page.isIdle();
    assert.equal(await page.count(".error:not(:empty)"), 0);
    assert.ok((await page.answer()).length > 3);
  },

  async welcome_prompts_are_answered(page) {
    await page.set("temperature", "0");
    await page.press("Write a Python function fibonacci(n).", ".welcome");
    await page.isIdle();
    assert.match(await page.text(".code code"), /def fibonacci\(n\)/);
    assert.equal(await page.text(".code .soft"), "python");
  },

  async stopped_answer_frees_the_server(page) {
    await page.set("reasoning", "off");
    // The answer may be short, so the page itself stops it at its first words.
    await page.evaluate(() => {
      const isBegun = () => [...document.querySelectorAll(".turn.assistant > .text")].some(text => text.textContent);
      new MutationObserver((changes, observer) => {
        if ($("send").textContent !== "Stop" || !isBegun()) return;
        observer.disconnect();
        $("send").click();
      }).observe(document.body, { childList: true, subtree: true, characterData: true });
    });
    await page.say("Count from one to five hundred, and after that to a thousand.");
    await page.until(() => document.querySelector(".foot"));
    await page.isIdle();
    assert.match(await page.text(".foot"), /stopped|tokens/);
    await page.until(async () => /moestro_requests_running 0/.test(await (await fetch("metrics")).text()));
  },

  async gauges_change_and_experts_are_drawn(page) {
    if (!await page.isOpen("gauges")) await page.click("#show-gauges");
    const fact = name => page.evaluate(name => [...document.querySelectorAll("#now dt")].find(term => term.textContent === name)?.nextSibling.textContent, name);
    await page.until(() => document.querySelector("#now dd"));
    await page.evaluate(() => { $("say").value = "Tell me a story about a fox."; sendMessage(); });
    await page.until(() => [...document.querySelectorAll("#now dt")].some(term => term.textContent === "Tokens per second" && Number(term.nextSibling.textContent) > 0));
    await page.isIdle();
    assert.match(await fact("Experts found in memory"), /%/);
    assert.match(await page.text("#memory"), /In use by the server[\d.]+ MB.*Limit/);
    assert.match(await page.text("#reserved"), /Experts[\d.]+ MB/);
    await page.until(() => !document.querySelector("#experts").hidden && document.querySelector("#experts").height > 3);
    // A read canvas makes the browser warn if it is read again.
    await page.until(() => /[1-9]/.test(document.querySelector("#experts").drawn));
    const colours = await page.$eval("#experts", canvas => new Set(new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size);
    assert.ok(colours > 1, "selected experts have another colour");
  },

  async key_is_asked_for_once_and_kept(page, proxy, { browser, proxyWithKey, key }) {
    const other = await openPage(browser, proxyWithKey.url, page.width, { waits: false });
    try {
      await other.until(() => document.querySelector("#question").open);
      assert.match(await other.text("#question"), /needs an API key/);
      await other.keyboard.type("wrong");
      await other.keyboard.press("Enter");
      await other.until(() => document.querySelector("#question").open && document.querySelector("#question-text").textContent.includes("does not accept"));
      await other.evaluate(() => { document.querySelector("#question input").value = ""; });
      await other.keyboard.type(key);
      await other.keyboard.press("Enter");
      await other.until(() => document.querySelector("#model option"));
      await other.say("What is 1+1?");
      await other.isIdle();
      assert.equal(await other.count(".error:not(:empty)"), 0);
      await other.reload();
      await other.until(() => document.querySelector("#model option"));
      assert.equal(await other.$eval("#question", dialog => dialog.open), false);
    } finally {
      await other.context.close();
    }
  },
};
