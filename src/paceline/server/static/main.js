// Event handlers of the inspector's controls.

import { Answers } from "./answers.js";
import { ApiError, explain, stream, useKey } from "./api.js";
import { Charts } from "./charts.js";
import { asChoice, messagesTo } from "./conversation.js";
import { byId, element } from "./dom.js";
import { Monitor } from "./monitor.js";
import { getEarlier, isChat, isLimited, readRequest, setEarlier } from "./request.js";
import * as settings from "./settings.js";
import { StorageError, load } from "./store.js";

const EXAMPLES = {
  chat: "Write a short poem about the sea, then repeat it word for word.",
  completion: "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. Monday, Tuesday,",
};
let running = null; // the AbortController of the request under way

function showError(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

// Shows in empty fields what the chosen model does.
function showDefaults() {
  const card = monitor.models.find((model) => model.id === byId("model-choice").value) ?? monitor.models[0];
  if (card) settings.showDefaults(byId("form"), card, isChat() ? "chats" : "completions");
}

function showBusy(busy) {
  byId("send").setAttribute("aria-disabled", busy); // a disabled button would lose the keyboard's focus
  byId("stop").setAttribute("aria-disabled", !busy);
  byId("answers").setAttribute("aria-busy", busy);
}

async function generate() {
  if (running) return;
  const field = settings.invalidField(byId("form"));
  if (field) {
    settings.report(field);
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
    showError(explain(error));
    if (error instanceof ApiError && error.status === 401) byId("key-field").hidden = false;
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

function showTotal(answers, seconds) {
  const { tokens } = answers;
  if (tokens === 0) return;
  const pace = (tokens / seconds).toFixed(1);
  byId("total").textContent = `${tokens} tokens in ${seconds.toFixed(1)} s, ${pace} tokens/s as seen from this page`;
}

function showMode() {
  const prompt = byId("prompt");
  const untouched = prompt.value === "" || Object.values(EXAMPLES).includes(prompt.value);
  byId("system-field").hidden = !isChat();
  byId("tools-field").hidden = !isChat();
  for (const field of document.querySelectorAll("[data-chats]")) field.hidden = !isChat();
  showDefaults();
  showEarlier();
  byId("prompt-label").textContent = isChat() ? "Message" : "Text to continue";
  if (untouched) prompt.value = EXAMPLES[isChat() ? "chat" : "completion"];
}

function showSpeculation() {
  byId("k-field").hidden = !isLimited();
}

// --- an answer of the chat, by an address such as #inspect=CONVERSATION.TURN ---

function openAnswer() {
  const [, id, index] = /^#inspect=([0-9a-f]+)\.(\d+)$/.exec(location.hash) ?? [];
  if (!id) return;
  const conversation = kept(id);
  const turn = conversation?.turns[index];
  if (turn?.role !== "assistant") {
    showError("This browser does not have that answer any more.");
    return;
  }
  fillRequest(conversation.setup, messagesTo(conversation, turn.parent));
  const answers = new Answers(byId("answers"), 1);
  answers.add({ choices: [asChoice(turn)] });
  answers.stopped();
  byId("empty").hidden = true;
  byId("total").textContent = "The answer as the chat got it. Generate asks for others to the same messages.";
}

function kept(id) {
  try {
    return load(id);
  } catch (error) {
    if (error instanceof StorageError) return null; // the browser keeps nothing, so it has no such answer
    throw error;
  }
}

// Fills the form with a request of the chat. setup: its settings as texts.
function fillRequest(setup, messages) {
  const turns = messages.filter(({ role }) => role !== "system"); // which is in the setup
  const last = turns.at(-1).role === "user" ? turns.pop() : null;
  byId("prompt").value = last?.content ?? "";
  setEarlier(turns);
  settings.fillForm(byId("form"), setup);
  const k = setup.num_speculative_tokens;
  const choice = { undefined: "auto", 0: "off" }[k] ?? "limit";
  document.querySelector(`input[name="speculation"][value="${choice}"]`).checked = true;
  if (choice === "limit") byId("k").value = k;
  showSpeculation();
  showEarlier();
}

function showEarlier() {
  const messages = getEarlier();
  byId("earlier").hidden = messages.length === 0;
  byId("earlier-number").textContent = messages.length;
  byId("earlier-messages").replaceChildren(...messages.map(makeMessage));
  byId("prompt").required = messages.at(-1)?.role !== "tool";
}

function makeMessage({ role, content, tool_calls: calls }) {
  const entry = element("li");
  const called = (calls ?? []).map(({ function: { name, arguments: text } }) => `${name} ${text}`);
  entry.append(element("strong", "", role), ` ${[content, ...called].filter(Boolean).join("\n")}`);
  return entry;
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
byId("forget").addEventListener("click", () => {
  setEarlier([]);
  showEarlier();
  byId("prompt").focus();
});
byId("stop").addEventListener("click", () => running?.abort());
byId("form").addEventListener("input", showDefaults);
byId("key").addEventListener("input", () => useKey(byId("key").value));
byId("marks").addEventListener("change", () => byId("answers").classList.toggle("unmarked", !byId("marks").checked));
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", openAnswer);
for (const input of document.querySelectorAll('input[name="mode"]')) input.addEventListener("change", showMode);
for (const input of document.querySelectorAll('input[name="speculation"]')) {
  input.addEventListener("change", showSpeculation);
}

settings.buildSettings(byId("common"), settings.COMMON);
settings.buildSettings(byId("others"), settings.OTHERS.filter((name) => name !== "num_speculative_tokens"));
const charts = new Charts(byId("charts"));
const monitor = new Monitor(
  (models) => {
    settings.showModels(byId("model-choice"), models);
    openAnswer(); // here, because it may name one of the models
    showDefaults();
  },
  (stats) => charts.show(stats),
);
showMode();
showSpeculation();
monitor.run();
