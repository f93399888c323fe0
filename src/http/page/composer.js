// The message field.

function sendMessage() {
  const content = $("say").value.trim();
  if (running.has(conversation.id) || (!content && !waiting.files.length && !waiting.images.length) || !settingsAreValid()) return;
  const message = {
    role: "user", content,
    ...waiting.files.length && {files: waiting.files},
    ...waiting.images.length && {images: waiting.images}
  };
  $("say").value = "";
  waiting = {files: [], images: []};
  drawWaitingFiles();
  growField();
  ask(message);
}

function growField() {
  $("say").style.height = "auto";
  $("say").style.height = $("say").scrollHeight + 2 + "px";
}

$("composer").onsubmit = event => {
  event.preventDefault();
  const generation = running.get(conversation.id);
  if (generation) generation.stop(); else sendMessage();
};
$("say").onkeydown = event => {
  if (isSubmitKey(event)) { event.preventDefault(); sendMessage(); }
  if (event.key === "Escape") running.get(conversation.id)?.stop();
};
$("say").oninput = growField;
$("new").onclick = startNewChat;
