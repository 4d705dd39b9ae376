// The chat page: event handlers, and the requests behind them.

import { ApiError, explain, stream, useKey } from "./api.js";
import { Attachments } from "./attachments.js";
import * as talk from "./conversation.js";
import { button, byId, copy, element } from "./dom.js";
import { Monitor } from "./monitor.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { Turns } from "./turns.js";

const NARROW = matchMedia("(max-width: 52rem)");
const TOUCH = matchMedia("(pointer: coarse)"); // keyboards on glass have no Shift+Enter

const runs = new Map(); // by conversation id: { conversation, controller } of the answer under way
const NO_DRAFT = { text: "", files: [], editing: null };
const attachments = new Attachments(byId("files"), showError);
const turns = new Turns(byId("turns"), { edit, copy: copyText, regenerate, show: showVersion, continueFrom });
let conversation = talk.newConversation({});
let editing = null; // index of the turn beside which the next message is put

// --- what the page shows ---

function showError(message) {
  byId("error").textContent = message;
  byId("error").hidden = !message;
}

function showNote(message, ...more) {
  byId("note").replaceChildren(message, ...more);
}

function showConversation() {
  const busy = runs.has(conversation.id);
  turns.update(conversation);
  byId("welcome").hidden = conversation.turns.length > 0;
  byId("send").setAttribute("aria-disabled", busy); // a disabled button would lose the keyboard's focus
  byId("stop").setAttribute("aria-disabled", !busy);
  byId("turns").setAttribute("aria-busy", busy);
  document.title = conversation.turns.length ? `${talk.titleOf(conversation)} · paceline` : "paceline: chat";
}

function showList() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const conversations = guarded(store.all) ?? [];
  const found = conversations.filter((one) => {
    const text = talk.textOf(one).toLowerCase();
    return words.every((word) => text.includes(word));
  });
  byId("conversations").replaceChildren(...found.map(makeEntry));
  byId("found").textContent = words.length ? `${found.length} of ${conversations.length}` : "";
}

function makeEntry(one) {
  const [entry, link] = [element("li"), element("a", "", talk.titleOf(one))];
  link.href = `#${one.id}`;
  link.title = new Date(one.changed).toLocaleString();
  if (one.id === conversation.id) link.setAttribute("aria-current", "true");
  const remove = button("small", "×", `Delete ${talk.titleOf(one)}`);
  remove.addEventListener("click", () => removeConversation(one));
  entry.append(link, remove);
  return entry;
}

function showDefaults() {
  const chosen = Object.keys(settings.formValues(byId("settings"))).length;
  byId("show-settings").textContent = chosen ? `Settings (${chosen})` : "Settings";
  const card = monitor.models.find((model) => model.id === byId("model-choice").value) ?? monitor.models[0];
  if (card) settings.showDefaults(byId("settings"), card, "chats");
}

function showPanel(name, open) {
  const focused = byId(name).contains(document.activeElement);
  byId(name).classList.toggle("open", open);
  if (!open && focused) byId(`show-${name}`).focus();
  byId(`show-${name}`).setAttribute("aria-expanded", open);
}

function togglePanel(name) {
  const open = !byId(name).classList.contains("open");
  if (open && NARROW.matches) closePanels();
  showPanel(name, open);
}

function closePanels() {
  for (const name of ["list", "settings"]) showPanel(name, false);
}

// --- conversations ---

// Returns what a function of the store returns, or shows why there is nothing.
function guarded(act) {
  try {
    return act();
  } catch (error) {
    if (!(error instanceof store.StorageError)) throw error;
    showError(error.message);
    return undefined;
  }
}

function keep(one) {
  const dropped = guarded(() => (one.turns.length ? store.save(one) : store.remove(one.id)));
  if (dropped) showNote(`The oldest conversations were dropped (${dropped}); ${store.LIMIT} characters are kept.`);
  showList();
}

function open(one) {
  conversation = one;
  if (editing !== null) setDraft(NO_DRAFT);
  showError("");
  showNote("");
  settings.fillForm(byId("settings"), one.setup);
  showConversation();
  showList();
  byId("scrolled").scrollTop = byId("scrolled").scrollHeight;
}

// Opens the conversation that the page's address names, or a new one with the settings of the last.
function openAddressed() {
  const id = location.hash.slice(1);
  const known = id ? (runs.get(id)?.conversation ?? loaded(id)) : null;
  open(known ?? talk.newConversation(settings.formValues(byId("settings"))));
  if (id && !known) showError("This browser does not have that conversation.");
}

function loaded(id) {
  const one = guarded(() => store.load(id)) ?? null;
  if (one) talk.endAnswers(one); // whose page was left before they were complete
  return one;
}

function openNew() {
  history.pushState(null, "", location.pathname);
  openAddressed();
  byId("message").focus();
}

function removeConversation(one) {
  runs.get(one.id)?.controller.abort();
  runs.delete(one.id);
  guarded(() => store.remove(one.id));
  if (one.id === conversation.id) openNew();
  showList();
  const undo = button("small", "Undo");
  undo.addEventListener("click", () => {
    keep(one);
    location.hash = one.id;
    byId("message").focus();
  });
  showNote(`Deleted: ${talk.titleOf(one)}. `, undo);
  undo.focus(); // the button with the focus is gone
}

// --- turns ---

// The message that is being written. editing: as above.
function setDraft(draft) {
  editing = draft.editing;
  byId("message").value = draft.text;
  attachments.set(draft.files);
  byId("editing").hidden = editing === null;
}

function edit(index) {
  const { text, files } = conversation.turns[index];
  setDraft({ text, files, editing: index });
  byId("message").focus();
}

function cancelEditing() {
  setDraft(NO_DRAFT);
  byId("message").focus();
}

// label: of the button that was pressed, which the version has, too.
function showVersion(index, label) {
  if (isBusy()) return;
  talk.show(conversation, index);
  keep(conversation);
  showConversation();
  turns.views.get(index).box.querySelector(`[aria-label="${label}"]`).focus();
}

async function copyText(text, from) {
  const label = from.textContent;
  try {
    await copy(text);
    from.textContent = "Copied";
    setTimeout(() => (from.textContent = label), 1500);
  } catch (error) {
    showError(`not copied: ${error.message}`);
  }
}

// --- requests ---

// Whether this conversation's answer is under way, which then is said.
function isBusy() {
  const busy = runs.has(conversation.id);
  if (busy) showNote("One answer at a time; Esc stops the one that comes.");
  return busy;
}

// Whether a request may begin: one answer at a time, and no setting that is rejected.
function ready() {
  if (isBusy()) return false;
  const invalid = settings.invalidField(byId("settings"));
  if (!invalid) return true;
  showPanel("settings", true);
  settings.report(invalid);
  return false;
}

function send() {
  const draft = { text: byId("message").value.trim(), files: attachments.files, editing };
  if ((!draft.text && draft.files.length === 0) || !ready()) return;
  const { leaf } = conversation;
  const parent = editing === null ? leaf : conversation.turns[editing].parent;
  const first = talk.addTurn(conversation, parent, { role: "user", text: draft.text, files: draft.files });
  setDraft(NO_DRAFT);
  ask(first, { first, leaf, draft });
}

// Another answer to the same turn, beside the one that is there.
function regenerate(index) {
  continueFrom(conversation.turns[index].parent);
}

// The answer after a turn that is there: of a person, or of the assistant with the results of its calls.
function continueFrom(parent) {
  if (!ready()) return;
  ask(parent, { first: conversation.turns.length, leaf: conversation.leaf, draft: null });
  byId("stop").focus(); // the answer whose button was pressed may be gone
}

// Asks for the answer after a turn. before: what is taken back if the server refuses: the turns from "first" on.
async function ask(parent, before) {
  const one = conversation;
  one.setup = settings.formValues(byId("settings"));
  const body = makeBody(one, parent);
  const index = talk.addTurn(one, parent, talk.emptyAnswer());
  const controller = new AbortController();
  runs.set(one.id, { conversation: one, controller });
  history.replaceState(null, "", `#${one.id}`);
  showError("");
  showNote("");
  byId("ended").textContent = "";
  keep(one);
  showConversation();
  byId("scrolled").scrollTop = byId("scrolled").scrollHeight;
  const problem = await receive(one, index, body, controller.signal);
  if (runs.get(one.id)?.controller !== controller) return; // the conversation was deleted
  runs.delete(one.id);
  const refused = problem && one.turns[index].token_ids.length === 0;
  if (refused && one === conversation) takeBack(before);
  else if (refused) talk.withdraw(one, index, parent);
  keep(one);
  if (problem) showError(one === conversation ? problem : `${talk.titleOf(one)}: ${problem}`);
  if (one !== conversation) return;
  showConversation();
  const stopped = one.turns[index]?.finish === "stopped";
  byId("ended").textContent = refused ? "" : `Answer ${stopped ? "stopped" : "complete"}`;
}

function makeBody(one, parent) {
  const form = byId("settings");
  return {
    stream: true,
    metrics: true,
    ...settings.chosenModel(form),
    ...settings.chosenSettings(form),
    ...settings.chosenTools(form),
    messages: talk.messagesTo(one, parent),
  };
}

// Extends an answer as its tokens arrive. Returns what went wrong, or an empty text.
async function receive(one, index, body, signal) {
  const turn = one.turns[index];
  let problem = "";
  try {
    for await (const { choices } of stream("v1/chat/completions", body, signal)) {
      for (const choice of choices) talk.extend(turn, choice);
      if (one === conversation) turns.views.get(index).grow();
    }
  } catch (error) {
    problem = explain(error);
    if (error instanceof ApiError && error.status === 401) byId("key-field").hidden = false;
  }
  turn.finish ??= "stopped";
  return problem;
}

// Withdraws turns that the server refused. What the person wrote can be sent again.
function takeBack({ first, leaf, draft }) {
  talk.withdraw(conversation, first, leaf);
  if (conversation.turns.length === 0) history.replaceState(null, "", location.pathname);
  turns.forget(first);
  if (draft) setDraft(draft);
}

// --- events ---

function onKey(event) {
  if (event.key !== "Escape") return;
  if (runs.has(conversation.id)) runs.get(conversation.id).controller.abort();
  else if (editing !== null) cancelEditing();
  else closePanels();
}

function onMessageKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || TOUCH.matches) return;
  event.preventDefault();
  send();
}

function onCodeCopy({ target }) {
  if (target.matches(".copy-code")) copyText(target.closest("figure").querySelector("pre").textContent, target);
}

settings.buildSettings(byId("common"), settings.COMMON);
settings.buildSettings(byId("others"), settings.OTHERS);
const monitor = new Monitor((models) => {
  settings.showModels(byId("model-choice"), models);
  byId("model-choice").value = conversation.setup.model ?? "";
  showDefaults();
});

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("message").addEventListener("keydown", onMessageKey);
if (TOUCH.matches) byId("message").placeholder = "Message";
byId("stop").addEventListener("click", () => runs.get(conversation.id)?.controller.abort());
byId("cancel").addEventListener("click", cancelEditing);
byId("attach").addEventListener("click", () => byId("file").click());
byId("file").addEventListener("change", async () => {
  showError("");
  await attachments.add([...byId("file").files]);
  byId("file").value = ""; // so that the same file can be chosen again
});
byId("new").addEventListener("click", openNew);
byId("conversations").addEventListener("click", ({ target }) => NARROW.matches && target.matches("a") && closePanels());
byId("search").addEventListener("input", showList);
byId("settings").addEventListener("input", showDefaults);
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("reset").addEventListener("click", () => settings.fillForm(byId("settings"), {}));
byId("key").addEventListener("input", () => useKey(byId("key").value));
byId("turns").addEventListener("click", onCodeCopy);
for (const name of ["list", "settings"]) byId(`show-${name}`).addEventListener("click", () => togglePanel(name));
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", openAddressed);
window.addEventListener("pagehide", () => runs.forEach((run) => keep(run.conversation)));
store.onChange(showList);

openAddressed();
monitor.run();
