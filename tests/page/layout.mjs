// Sizes, colours, labels, focus and the keyboard.
import assert from "node:assert/strict";
import axe from "axe-core";

const RICH = "# Heading\n\nText with `code`, **bold** and a [link](https://example.com).\n\n> A quote\n\n- item\n  1. nested\n\n| a | b |\n|---|---|\n| " + "wide ".repeat(60) + " | 2 |\n\n```python\nprint('" + "x".repeat(200) + "')\n```\n\n$$\\sum_{i=1}^{n} \\frac{" + "a+".repeat(80) + "b}{2}$$\n\n" + "unbroken".repeat(60);

async function fill(page, proxy) {
  await page.set("tools", '[{"type":"function","function":{"name":"f"}}]');
  proxy.script([{ reasoning_content: "Some thoughts." }, RICH, { tool_calls: [{ index: 0, id: "a", type: "function", function: { name: "get_weather", arguments: '{"city": "Paris"}' } }] }], { finish: "tool_calls" });
  await page.evaluate(() => addFiles([new File(["text"], "a-long-file-name-".repeat(8) + ".txt")]));
  await page.say("A question");
  await page.isIdle();
  await page.evaluate(() => addFiles([new File(["text"], "waiting.txt")]));
}

async function fits(page, what) {
  const { width, clipped } = await page.evaluate(() => ({
    width: document.documentElement.scrollWidth,
    clipped: [...document.querySelectorAll("button, select, textarea, input:not([hidden])")].filter(element => element.checkVisibility() && !element.closest(".scroll, pre"))
      .filter(element => { const box = element.getBoundingClientRect(); return box.width && (box.left < -1 || box.right > innerWidth + 1); }).map(element => element.outerHTML),
  }));
  assert.ok(width <= page.width, `${what}: ${width} pixels wide`);
  assert.deepEqual(clipped, [], what);
}

async function axeFinds(page) {
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => window.axe.run(document, { runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"] }));
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map(node => node.html.slice(0, 100) + " " + (node.any[0]?.message || "")).join(" | ")}`);
}

export const tests = {
  async everything_fits_the_width(page, proxy) {
    await fits(page, "welcome");
    await fill(page, proxy);
    await fits(page, "chat");
    await page.press("Edit", ".turn.user");
    await fits(page, "editor");
    for (const panel of ["list", "gauges"]) {
      if (!await page.isOpen(panel)) await page.click(`#show-${panel}`);
      await fits(page, panel);
      if (page.width === 360) await page.click(`#show-${panel}`);
    }
    await page.click("#show-settings");
    await fits(page, "settings");
    await page.keyboard.press("Escape");
    const box = await (await page.$("#send")).boundingBox();
    assert.ok(box.y + box.height <= page.viewport().height, "the send button is in view");
    const model = await (await page.$("#model")).boundingBox();
    assert.ok(model.width > (page.width === 360 ? 320 : 200), `the model picker has ${model.width} pixels`);
  },

  async axe_finds_nothing_in_both_schemes(page, proxy) {
    for (const scheme of ["light", "dark"]) {
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      assert.deepEqual(await axeFinds(page), [], `${scheme}, ${await page.count(".welcome") ? "welcome" : "chat"}`);
      if (scheme === "light") await fill(page, proxy);
      await page.$$eval("details", all => all.forEach(details => { details.open = true; }));
      assert.deepEqual(await axeFinds(page), [], `${scheme}, chat`);
      await page.click("#show-settings");
      assert.deepEqual(await axeFinds(page), [], `${scheme}, settings`);
      await page.keyboard.press("Escape");
      if (page.width === 360) {
        for (const panel of ["list", "gauges"]) {
          await page.click(`#show-${panel}`);
          assert.deepEqual(await axeFinds(page), [], `${scheme}, ${panel}`);
          await page.click(`#show-${panel}`);
        }
      }
    }
  },

  async scheme_follows_system_and_setting(page) {
    const isDark = () => page.$eval("body", body => Number(getComputedStyle(body).backgroundColor.match(/\d+/)[0]) < 128);
    for (const scheme of ["dark", "light"]) {
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      assert.equal(await isDark(), scheme === "dark");
    }
    await page.set("theme", "dark");
    assert.equal(await isDark(), true);
  },

  async every_control_shows_focus_in_order(page, proxy) {
    await fill(page, proxy);
    const seen = [];
    await page.focus("#show-list");
    for (let step = 0; step < 80; step += 1) {
      if (step) await page.keyboard.press("Tab");
      const focused = await page.evaluate(() => {
        const element = document.activeElement, style = getComputedStyle(element);
        return element === document.body ? null : { name: element.id || element.name || element.getAttribute("aria-label") || element.textContent, outline: `${style.outlineStyle} ${style.outlineWidth}`, box: element.getBoundingClientRect().toJSON() };
      });
      if (!focused || seen.includes("send")) break;
      assert.equal(focused.outline, "solid 2px", focused.name);
      assert.ok(focused.box.width > 0, `${focused.name} is visible`);
      seen.push(focused.name);
    }
    for (const name of ["show-list", "model", "new", "show-gauges", "show-settings", "log", "Copy", "Edit", "Code, python", "Copy code", "Regenerate", "Send results", "attach", "say", "send"]) assert.ok(seen.includes(name), `${name} is reached: ${seen}`);
    assert.ok(seen.indexOf("model") < seen.indexOf("log") && seen.indexOf("Copy code") < seen.indexOf("say"));
  },

  async dialogs_and_panels_work_with_the_keyboard(page) {
    const focused = () => page.evaluate(() => document.activeElement.id);
    await page.focus("#show-settings");
    await page.keyboard.press("Enter");
    assert.ok(await page.$eval("#settings", dialog => dialog.open && dialog.contains(document.activeElement)));
    await page.keyboard.press("Escape");
    assert.equal(await focused(), "show-settings", "focus returns");
    const expanded = () => page.$eval("#show-gauges", button => button.getAttribute("aria-expanded"));
    const before = await expanded();
    assert.equal(before, String(page.width > 999), "a small screen opens the gauges with a button");
    await page.focus("#show-gauges");
    await page.keyboard.press("Enter");
    assert.notEqual(await expanded(), before);
    assert.equal(await page.isOpen("gauges"), before === "false");
  },

  async screen_readers_hear_start_and_end(page, proxy) {
    let resume;
    proxy.script(["Part", () => new Promise(done => { resume = done; }), " two"]);
    await page.say("Hi");
    await page.until(() => document.querySelector("#announce").textContent === "Waiting for the answer" && document.querySelector(".turn.assistant > .text")?.textContent === "Part");
    assert.equal(await page.$eval(".turn.assistant", turn => turn.getAttribute("aria-busy")), "true");
    assert.equal(await page.$eval("#log", log => log.getAttribute("aria-live")), null, "the growing answer is not read out");
    resume();
    await page.isIdle();
    assert.equal(await page.text("#announce"), "Answer complete");
  },
};
