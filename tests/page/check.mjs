// Tests the page like a user: a streamed chat with reasoning, a tool call, a stopped answer, gauges, a small screen.
import assert from "node:assert/strict";
import puppeteer from "puppeteer-core";

const [chromium, url, shots] = process.argv.slice(2);
const browser = await puppeteer.launch({ executablePath: chromium, args: ["--no-sandbox"] });
const page = await browser.newPage();
const errors = [], origins = new Set();
page.on("console", message => { if (["error", "warn"].includes(message.type())) errors.push(message.text()); });
page.on("pageerror", error => errors.push(String(error)));
page.on("request", request => { if (!request.url().startsWith("data:")) origins.add(new URL(request.url()).origin); });

const text = selector => page.$eval(selector, element => element.textContent);
const gauge = name => page.$$eval("#now dt", (all, name) => all.find(term => term.textContent === name).nextSibling.textContent, name);
const until = (what, ...args) => page.waitForFunction(what, { timeout: 30000, polling: 50 }, ...args);
const answers = count => until(count => document.querySelectorAll(".turn.assistant .foot").length === count, count);
const say = async words => { await page.type("#say", words); await page.keyboard.press("Enter"); };

try {
  await page.setViewport({ width: 1200, height: 760 });
  await page.goto(url);
  await until(() => document.querySelector("#model option") && document.querySelector("#now dd"));
  assert.match(await text("#model"), /moestro-demo/);

  await page.$eval("#temperature", field => { field.value = "0"; });
  await page.evaluate(() => {
    // An answer is drawn at most once per frame.
    window.frames = window.draws = 0;
    const count = () => { window.frames += 1; requestAnimationFrame(count); };
    count();
    const observer = new MutationObserver(() => { window.draws += 1; });
    observer.observe(document.querySelector("#log"), { subtree: true, childList: true, characterData: true });
  });
  await say("What is 12+7?");
  await until(() => document.querySelector(".reasoning div"));
  await answers(1);
  assert.match(await text(".turn.assistant .text"), /12 \+ 7 = 19/);
  assert.ok((await text(".reasoning div")).length > 10, "the reasoning is shown");
  assert.equal(await page.$eval(".reasoning", details => details.open), false, "and folded when the answer begins");
  assert.match(await text(".turn.assistant .foot"), /\d+ tokens, [\d.]+ a second, the first after/);
  const { frames, draws } = await page.evaluate(() => ({ frames: window.frames, draws: window.draws }));
  assert.ok(draws <= frames + 5, `${draws} draws in ${frames} frames`);
  console.log("ok      a chat that streams, with reasoning");

  const tools = [{ type: "function", function: { name: "get_weather", description: "The weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
  await page.$eval("#tools", (field, tools) => { field.value = tools; }, JSON.stringify(tools));
  await page.click("#new");
  await say("What is the weather in Paris?");
  await answers(1);
  assert.equal(await text(".call b"), "get_weather");
  assert.equal(typeof JSON.parse(await text(".call pre")).city, "string");
  assert.match(await page.$eval("#say", field => field.placeholder), /tool answers/);
  await say('{"temperature": 21, "sky": "clear"}');
  await answers(2);
  assert.equal(await page.$$eval(".error", all => all.length), 0);
  if (shots) await page.screenshot({ path: `${shots}/page.png` });
  console.log("ok      a tool is called and answered");

  await page.$eval("#tools", field => { field.value = ""; });
  await page.click("#new");
  await page.$eval("#think", box => { box.checked = false; });
  await say("Count from one to five hundred, and after that to a thousand.");
  await until(() => document.querySelector("#send").textContent === "Stop");
  await page.click("#send");
  await answers(1);
  assert.match(await text(".turn.assistant .foot"), /stopped|tokens/);
  await until(() => document.querySelector("#send").textContent === "Send");
  console.log("ok      an answer is stopped:", await text(".turn.assistant .foot"));

  await until(() => [...document.querySelectorAll("#now dt")].some(term => term.textContent === "Prompts known in part" && /\d/.test(term.nextSibling.textContent)));
  await say("Say something.");
  await until(() => [...document.querySelectorAll("#now dt")].some(term => term.textContent === "Tokens a second" && Number(term.nextSibling.textContent) > 0));
  assert.match(await gauge("Experts found in memory"), /%/);
  assert.match(await text("#memory"), /limit/);
  await until(() => !document.querySelector("#slots").hidden && document.querySelector("#slots").height > 3);
  // The heatmap is drawn every two seconds.
  await new Promise(done => setTimeout(done, 3000));
  const colours = await page.$eval("#slots", canvas => new Set(new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size);
  assert.ok(colours > 1, "selected experts have another colour");
  console.log("ok      gauges change, and the experts are drawn");

  await page.setViewport({ width: 360, height: 640 });
  const wide = () => page.evaluate(() => document.documentElement.scrollWidth);
  assert.ok(await wide() <= 360, `${await wide()} pixels wide`);
  const box = await (await page.$("#send")).boundingBox();
  assert.ok(box.x >= 0 && box.x + box.width <= 360 && box.y + box.height <= 640, JSON.stringify(box));
  await page.click("#gauges");
  assert.ok(await wide() <= 360);
  await page.click("#gauges");
  if (shots) await page.screenshot({ path: `${shots}/page-360.png` });
  for (const scheme of ["dark", "light"]) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
    const [red] = (await page.$eval("body", body => getComputedStyle(body).backgroundColor)).match(/\d+/g).map(Number);
    assert.equal(red < 128, scheme === "dark", `${scheme}: ${red}`);
  }
  console.log("ok      360 pixels, dark and light");

  assert.deepEqual([...origins], [new URL(url).origin], "no request to another origin");
  assert.deepEqual(errors, [], "nothing on the console");
  console.log("ok      no other origin, nothing on the console");
} finally {
  await browser.close();
}
