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
  await readTitles();
  let current = null;
  try { current = sessionStorage.getItem("moestro.current"); } catch { /* Start with a new chat. */ }
  if (current && titles.some(kept => kept.id === current)) await openConversation(current);
  await refreshModels();
  const gaugesAreOpen = () => $("gauges").classList.contains("open");
  repeat(drawGauges, 1000, gaugesAreOpen);
  repeat(drawExperts, 2000, gaugesAreOpen);
  repeat(() => refreshModels(true), 5000);
}

addEventListener("pagehide", () => { for (const {conversation: owner} of running.values()) save(owner); });
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) { running.get(conversation.id)?.draw(); readTitles().catch(() => {}); }
});
startPage();
