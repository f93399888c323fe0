// Starts the page, once all parts are defined.

/** Repeats `work` while the page is visible. A failure is tried again. */
async function repeat(work, interval, isNeeded = () => true) {
  for (;;) {
    if (!document.hidden && isNeeded()) await work().catch(() => { previous = null; });
    await sleep(interval);
  }
}

async function startPage() {
  changeSettings({});
  drawConversation();
  repeat(checkServer, 1000);
  await recover();
  await readTitles();
  let current = null;
  try { current = sessionStorage.getItem("moestro.current"); } catch { /* Start with a new chat. */ }
  if (current && keptTitle(current)) await openConversation(current);
  emptyBin();
  await refreshModels();
  const gaugesAreOpen = () => $("gauges").classList.contains("open") && !isDown;
  repeat(drawGauges, 1000, gaugesAreOpen);
  repeat(drawExperts, 2000, gaugesAreOpen);
  repeat(() => refreshModels(true), 5000, () => !isDown);
}

/** Asks the server for a sign of life if it has not answered anything for a second. */
async function checkServer() {
  if (Date.now() - lastAnswer < 1000) return;
  const wasDown = isDown;
  await poll("health");
  if (wasDown) await refreshModels(true);
}

addEventListener("pagehide", rescue);
document.addEventListener("visibilitychange", () => { if (!document.hidden) running.get(conversation.id)?.draw(); });
startPage();
