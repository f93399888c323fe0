// The cost of long answers in the browser: CPU time of the page's renderer process, as the browser measures it.
import assert from "node:assert/strict";

export const widths = [1280];

/** The goal is 5 s on a quiet machine. Other programs on the same cores raise the cost. 12 s still catch a cost that
 *  grows with the square of the answer: the page once took over 60 s. */
const MAX_SECONDS = 12;

/** Text like a model's, in pieces of about one token. */
function tokens(count) {
  const paragraph = "The quick brown fox jumps over the lazy dog, and **then** it `runs` away into the forest of expert layers. ";
  const block = `## Part\n\n${paragraph.repeat(6)}\n\n- one item with some words\n- another item with *emphasis*\n  - nested item\n\n\`\`\`python\n${"def function(argument):\n    return argument * 2\n".repeat(12)}\`\`\`\n\n| a | b |\n|---|---|\n${"| cell with words | another cell |\n".repeat(8)}\nAnd $x^2 + \\frac{1}{2}$ in between.\n\n`;
  const pieces = block.match(/\s?\S{1,5}|\s/g);
  return Array.from({ length: count }, (_, index) => pieces[index % pieces.length]);
}

/** Browsers have further renderer processes, so only that of the page counts. */
async function processSeconds(session) {
  const { metrics } = await session.send("Performance.getMetrics");
  return metrics.find(({ name }) => name === "ProcessTime").value;
}

async function costOf(page, proxy, deltas) {
  proxy.script(deltas, { pause: Number(process.env.PAGE_TOKEN_PAUSE || 1) });
  const session = await page.createCDPSession();
  await session.send("Performance.enable");
  const before = await processSeconds(session), start = Date.now();
  await page.say("Write a long answer");
  await page.isBusy();
  await page.waitForFunction(() => document.querySelector("#send").textContent === "Send", { timeout: 240000, polling: 500 });
  const seconds = await processSeconds(session) - before;
  console.log(`        ${deltas.length} tokens in ${((Date.now() - start) / 1000).toFixed(1)} s: ${seconds.toFixed(2)} s of renderer CPU`);
  return seconds;
}

export const tests = {
  async long_answer_costs_little_cpu(page, proxy) {
    const deltas = tokens(12000);
    assert.ok(await costOf(page, proxy, deltas) < MAX_SECONDS);
    assert.equal(await page.evaluate(() => conversation.messages.at(-1).content), deltas.join(""));
  },

  async long_block_of_code_costs_little_cpu(page, proxy) {
    const deltas = ["```python\n", ...Array.from({ length: 12000 }, (_, index) => index % 9 ? " word" : "\n    line")];
    assert.ok(await costOf(page, proxy, deltas) < MAX_SECONDS);
  },

  async long_reasoning_costs_little_cpu(page, proxy) {
    await page.set("opensReasoning", true);
    const deltas = [...tokens(12000).map(text => ({ reasoning_content: text })), "Done."];
    assert.ok(await costOf(page, proxy, deltas) < MAX_SECONDS);
  },
};
