// Shortcuts, refused settings, the model picker, and the lines of the gauges.
import assert from "node:assert/strict";
import { converse } from "./keeping.mjs";

const press = async (page, ...keys) => {
  for (const key of keys.slice(0, -1)) await page.keyboard.down(key);
  await page.keyboard.press(keys.at(-1));
  for (const key of keys.slice(0, -1).reverse()) await page.keyboard.up(key);
};
const focused = page => page.evaluate(() => document.activeElement.id);

export const tests = {
  async shortcuts_do_what_their_list_says(page, proxy) {
    await press(page, "Control", "/");
    await page.until(() => document.querySelector("#shortcuts").open);
    const list = await page.texts("#shortcut-list dt");
    assert.equal(list.length, 15);
    await press(page, "Escape");
    await converse(page, proxy, "First", "One");
    await press(page, "Control", "k");
    assert.equal(await focused(page), "search");
    await press(page, "Control", "Shift", "O");
    await page.until(() => document.querySelector(".welcome"));
    assert.equal(await focused(page), "say");
    for (const [key, panel] of [["b", "list"], [".", "gauges"]]) {
      const before = await page.isOpen(panel);
      await press(page, "Control", key);
      assert.equal(await page.isOpen(panel), !before);
      await press(page, "Control", key);
    }
    await press(page, "Control", ",");
    await page.until(() => document.querySelector("#settings").open);
    await press(page, "Control", "k");
    assert.ok(await page.$eval("#settings", dialog => dialog.contains(document.activeElement)), "a dialog keeps the keys");
    await press(page, "Escape");
    await page.focus("#say");
    await converse(page, proxy, "Second", "Two");
    await press(page, "ArrowUp");
    await page.until(() => document.activeElement.matches(".editor textarea"));
    await press(page, "Escape");
    proxy.script(["Three"]);
    await press(page, "Control", "Shift", "Enter");
    await page.until(() => document.querySelector(".turn.assistant > .text")?.textContent === "Three");
    await page.isIdle();
    await page.focus("[aria-label='Previous version']");
    await press(page, "ArrowLeft");
    assert.equal(await page.answer(), "Two");
    await press(page, "ArrowRight");
    assert.equal(await page.answer(), "Three");
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.type("?");
    await page.until(() => document.querySelector("#shortcuts").open);
    await press(page, "Escape");
    await page.focus("#say");
    await page.keyboard.type("?");
    assert.equal(await page.$eval("#say", field => field.value), "?", "a field gets the letter");
    await press(page, "Control", "Shift", "Backspace");
    await page.until(() => document.querySelector("#notice").textContent.includes("“Second” is deleted."));
  },

  async invalid_tools_are_refused_in_the_dialog(page) {
    const tool = fields => JSON.stringify([{ type: "function", function: { name: "f", ...fields } }]);
    await page.click("#show-settings");
    for (const [text, sentence] of [["[{bad", /not valid JSON/], ["{}", /must be a JSON list/], ["[5]", /Tool 1 needs "type"/], ['[{"function": {"name": "f"}}]', /needs "type"/],
      [tool({ name: "a b" }), /needs a "name" of 1 to 128/], [tool({ name: 5 }), /needs a "name"/], [tool({ parameters: 5 }), /needs a JSON schema/], [tool({ parameters: [] }), /needs a JSON schema/]]) {
      await page.$eval("#settings [name=tools]", (field, text) => { field.value = text; field.dispatchEvent(new Event("input", { bubbles: true })); }, text);
      await page.press("Done", "#settings");
      assert.ok(await page.$eval("#settings", dialog => dialog.open), text);
      assert.match(await page.text("#tools-problem"), sentence);
      assert.equal(await page.evaluate(() => document.activeElement.name), "tools");
    }
    await page.$eval("#settings [name=tools]", (field, text) => { field.value = text; field.dispatchEvent(new Event("input", { bubbles: true })); }, tool({ parameters: { type: "object" } }));
    await page.press("Done", "#settings");
    await page.until(() => !document.querySelector("#settings").open);
  },

  async reset_settings_come_back(page) {
    await page.set("system", "Be brief.");
    await page.click("#show-settings");
    await page.press("Reset all", "#settings");
    assert.equal(await page.$eval("#settings [name=system]", field => field.value), "");
    await page.press("Undo reset", "#settings");
    assert.equal(await page.$eval("#settings [name=system]", field => field.value), "Be brief.");
    assert.equal(await page.evaluate(() => readSettings().system), "Be brief.");
  },

  async picker_says_size_and_fit(page, proxy) {
    const plan = { device: "cpu", limit: 16e9, reserved: 10e9, trunk: 2e9, experts: 4e9, prompt_cache: 1e9, draft: 0, residency: 1 };
    proxy.json("GET /health", { status: "ok", model: "now", context: 100, plan });
    proxy.json("GET /v1/models", { object: "list", data: [{ id: "now", loaded: true, size: 6e9 }, { id: "small", loaded: false, size: 12.9e9 }, { id: "large", loaded: false, size: 13.1e9 }] });
    await page.evaluate(() => refreshModels(true));
    await page.haveTexts("#model option", ["now (6.0 GB, fits in memory)", "small (not loaded, 12.9 GB, fits in memory)", "large (not loaded, 13.1 GB, partly read from the disk)"]);
  },

  async server_tells_the_size_of_its_models(page) {
    assert.match((await page.texts("#model option"))[0], /^moestro-demo \(\d+\.\d MB, fits in memory\)$/);
  },

  async gauges_draw_the_last_five_minutes(page, proxy) {
    if (!await page.isOpen("gauges")) await page.click("#show-gauges");
    let tokens = 0, hits = 0;
    proxy.routes["GET /metrics"] = outgoing => {
      tokens += 30;
      hits += 9;
      outgoing.end(`moestro_generated_tokens_total ${tokens}\nmoestro_expert_lookups_total{result="hit"} ${hits}\nmoestro_expert_lookups_total{result="miss"} ${hits / 9}\nmoestro_ssd_disk_bytes_total ${tokens * 1e6}\nmoestro_process_memory_bytes{kind="resident"} 5e9\n`);
    };
    await page.until(() => document.querySelectorAll(".line:not([hidden])").length === 4);
    const labels = await page.$$eval(".line svg", all => all.map(line => line.getAttribute("aria-label")));
    assert.match(labels[0], /^Last five minutes: Tokens per second, at most [\d.]+, now [\d.]+$/);
    await page.until(() => document.querySelectorAll(".line svg")[1].getAttribute("aria-label").endsWith("now 90.0 %"));
    assert.match(labels[2], /MB\/s/);
    assert.match(labels[3], /Memory in use, at most 5\.0 GB, now 5\.0 GB/);
    // A line holds five minutes: what is older leaves it, and a time without a value is a gap.
    const drawn = await page.evaluate(() => {
      const line = new Line("Test", String);
      for (let second = 0; second < 400; second += 1) line.add(second, second + 1, second === 350 ? null : second % 7);
      const result = { samples: line.samples.length, moves: line.path.getAttribute("d").match(/M/g).length, box: line.path.getBBox().width };
      line.figure.remove();
      return result;
    });
    assert.ok(drawn.samples <= 300 && drawn.samples >= 299 && drawn.moves === 2 && drawn.box <= 300 && drawn.box > 290, JSON.stringify(drawn));
  },
};
