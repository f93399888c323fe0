// Runs the tests of the page: node check.mjs BROWSER URL URL_WITH_KEY KEY DIRECTORY [FILTER]
import fs from "node:fs";
import { isFirefox, isSlow, launch, openPage, startProxy } from "./harness.mjs";
import * as attacks from "./attacks.mjs";
import * as chat from "./chat.mjs";
import * as connection from "./connection.mjs";
import * as keeping from "./keeping.mjs";
import * as layout from "./layout.mjs";
import * as markdown from "./markdown.mjs";
import * as panels from "./panels.mjs";
import * as server from "./server.mjs";
import * as speed from "./speed.mjs";

const [executable, upstream, upstreamWithKey, key, downloads, filter = ""] = process.argv.slice(2);
// Firefox runs them at one width. Puppeteer cannot measure its CPU time or choose its colour scheme.
const [suites, onlyWidth] = isFirefox(executable) ? [{ chat, keeping, connection, panels, markdown, attacks, server }, 1280] : [{ chat, keeping, connection, panels, markdown, attacks, layout, server, speed }];
// These tests measure the processor.
if (isSlow("processor")) delete suites.speed;
fs.mkdirSync(downloads, { recursive: true });
const browser = await launch(executable), proxy = await startProxy(upstream), proxyWithKey = await startProxy(upstreamWithKey);
const failed = [];

async function run(name, test, width) {
  proxy.routes = {};
  proxyWithKey.routes = {};
  proxy.isDown = proxy.isFrozen = false;
  const page = await openPage(browser, proxy.url, width);
  try {
    await test(page, proxy, { downloads, browser, proxyWithKey, key });
    // A status of 4xx or 5xx that a test asks for is no fault of the page.
    const errors = page.seen.errors.filter(error => !/the server responded with a status of|ERR_EMPTY_RESPONSE|ERR_CONNECTION/.test(error));
    if (errors.length) throw new Error("on the console: " + errors.join("; "));
    const others = [...page.seen.origins].filter(origin => origin !== new URL(proxy.url).origin);
    if (others.length) throw new Error("requests to " + others);
    console.log(`ok      ${name}, ${width} px`);
  } catch (error) {
    failed.push(`${name}, ${width} px`);
    console.log(`FAILED  ${name}, ${width} px\n${error.stack}`);
    await page.screenshot({ path: `${downloads}/failed-${name.split("::")[1]}-${width}.png` }).catch(() => {});
  } finally {
    await page.context.close();
  }
}

try {
  for (const [suite, { tests, widths = [360, 1280] }] of Object.entries(suites)) {
    for (const [name, test] of Object.entries(tests)) {
      if (`${suite}::${name}`.includes(filter)) for (const width of onlyWidth ? [onlyWidth] : widths) await run(`${suite}::${name}`, test, width);
    }
  }
} finally {
  await browser.close();
  proxy.close();
  proxyWithKey.close();
}
if (failed.length) console.log(`\n${failed.length} failed:\n${failed.join("\n")}`);
process.exitCode = failed.length ? 1 : 0;
