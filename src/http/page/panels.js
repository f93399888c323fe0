// The panels beside the chat: the list of conversations and the gauges.

function setPanel(name, isOpen) {
  $(name).classList.toggle("open", isOpen);
  $("show-" + name).setAttribute("aria-expanded", String(isOpen));
  if (isOpen && isNarrow()) setPanel(name === "list" ? "gauges" : "list", false);
}

for (const name of ["list", "gauges"]) {
  $("show-" + name).onclick = () => setPanel(name, !$(name).classList.contains("open"));
  setPanel(name, !isNarrow());
  $(name).onkeydown = event => {
    if (event.key !== "Escape" || !isNarrow()) return;
    setPanel(name, false);
    $("show-" + name).focus();
  };
}
$("chat").onclick = () => { if (isNarrow()) ["list", "gauges"].forEach(name => setPanel(name, false)); };
