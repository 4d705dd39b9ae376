// Event handlers of the page's controls.

import { Answers } from "./answers.js";
import { ApiError, stream, useKey } from "./api.js";
import { Monitor } from "./monitor.js";
import { checkTools, invalidField, isChat, isLimited, readRequest, showDefaults } from "./request.js";

const byId = (id) => document.getElementById(id);
const EXAMPLES = {
  chat: "Write a short poem about the sea, then repeat it word for word.",
  completion: "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,",
};
let running = null; // the AbortController of the request under way

function showError(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function showState(state, words) {
  byId("state").dataset.state = state;
  if (byId("state").textContent !== words) byId("state").textContent = words;
  if (state === "key") byId("key-field").hidden = false;
  if (monitor.model) {
    byId("model").textContent = monitor.model.id;
    showDefaults(monitor.model);
  }
}

function showBusy(busy) {
  byId("send").setAttribute("aria-disabled", busy); // a disabled button would lose the keyboard's focus
  byId("stop").setAttribute("aria-disabled", !busy);
  byId("answers").setAttribute("aria-busy", busy);
}

async function generate() {
  if (running) return;
  const field = invalidField();
  if (field) {
    field.reportValidity();
    return;
  }
  const { path, body, n } = readRequest();
  const answers = new Answers(byId("answers"), n);
  running = new AbortController();
  byId("empty").hidden = true;
  byId("total").textContent = "";
  showError("");
  showBusy(true);
  if (isBelow(byId("answers"))) byId("answers").scrollIntoView({ block: "start" });
  const began = performance.now();
  try {
    for await (const chunk of stream(path, body, running.signal)) answers.add(chunk);
  } catch (error) {
    explain(error);
  }
  if (answers.tokens === 0 && !byId("error").hidden) clearAnswers(answers); // refused: empty boxes say nothing
  answers.stopped();
  showTotal(answers, (performance.now() - began) / 1000);
  running = null;
  showBusy(false);
}

// Whether an element begins below what the window shows, as the answers do on a phone.
function isBelow(element) {
  return element.getBoundingClientRect().top > window.innerHeight - 80;
}

function clearAnswers(answers) {
  answers.remove();
  byId("empty").hidden = false;
}

function explain(error) {
  if (error.name === "AbortError") return;
  if (error instanceof ApiError && error.status === 401) byId("key-field").hidden = false;
  const known = error instanceof ApiError;
  showError(known ? error.message : `the server cannot be reached (${error.message}); is it running?`);
}

function showTotal(answers, seconds) {
  const { tokens } = answers;
  if (tokens === 0) return;
  const pace = (tokens / seconds).toFixed(1);
  byId("total").textContent = `${tokens} tokens in ${seconds.toFixed(1)} s, ${pace} tokens/s as seen from this page`;
}

function showMode() {
  const prompt = byId("prompt");
  if (monitor.model) showDefaults(monitor.model);
  const untouched = prompt.value === "" || Object.values(EXAMPLES).includes(prompt.value);
  byId("system-field").hidden = !isChat();
  byId("tools-field").hidden = !isChat();
  byId("prompt-label").textContent = isChat() ? "Message" : "Text to continue";
  if (untouched) prompt.value = EXAMPLES[isChat() ? "chat" : "completion"];
}

function showSpeculation() {
  byId("k-field").hidden = !isLimited();
}

function onKey(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    generate();
  } else if (event.key === "Escape" && running) {
    running.abort();
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("tools").addEventListener("input", checkTools);
byId("key").addEventListener("input", () => useKey(byId("key").value));
byId("marks").addEventListener("change", () => byId("answers").classList.toggle("unmarked", !byId("marks").checked));
document.addEventListener("keydown", onKey);
for (const input of document.querySelectorAll('input[name="mode"]')) input.addEventListener("change", showMode);
for (const input of document.querySelectorAll('input[name="speculation"]')) {
  input.addEventListener("change", showSpeculation);
}

const monitor = new Monitor(byId("charts"), showState);
showMode();
showSpeculation();
monitor.run();
