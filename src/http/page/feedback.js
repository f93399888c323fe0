// What the page says and asks: notices, announcements, the question dialog, copied text and downloads.

const announce = text => { $("announce").textContent = text; };

/** Shows a message above the message field, with optional buttons. */
function notify(text = "", isError = false, ...buttons) {
  $("notice").replaceChildren(...text ? [make("span", isError ? "error" : "soft", text), ...buttons] : []);
}

/** Copies text. Browsers offer `navigator.clipboard` on localhost and over TLS only. */
async function copyText(text, copyButton) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", "unseen", text);
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
    copyButton.focus();
  }
  const label = copyButton.textContent;
  copyButton.textContent = "Copied";
  announce("Copied");
  setTimeout(() => { copyButton.textContent = label === "Copied" ? "Copy" : label; }, 1500);
}

/** Asks in a dialog. Returns the text of the field, true without a field, or null if the user cancels. */
function askUser({title, text = "", label, value = "", type = "text", action}) {
  const dialog = $("question"), field = $("question-field"), input = field.querySelector("input");
  $("question-title").textContent = title;
  $("question-text").textContent = text;
  $("question-yes").textContent = action;
  field.hidden = !label;
  field.querySelector("span").textContent = label || "";
  input.type = type;
  input.value = value;
  dialog.returnValue = "";
  dialog.showModal();
  (label ? input : $("question-yes")).focus();
  if (label) input.select();
  return new Promise(resolve => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? (label ? input.value : true) : null);
  });
}

function download(name, type, text) {
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], {type}));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
