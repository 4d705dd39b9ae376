// Sampling settings: the table of fields, and a form's fields as a request's. What is left empty is not sent.

import { element } from "./dom.js";

const whole = (label, empty, options = {}) => ({ kind: "number", label, empty, step: 1, min: 0, ...options });
const real = (label, empty, options = {}) => ({ kind: "number", label, empty, step: "any", min: 0, ...options });
const flag = (label, empty, options = {}) => ({ kind: "flag", label, empty, ...options });

// By the names of the API. empty: what an empty field means, a number where the server has one.
// recommended: the model's files may say another. chats: only chats have it.
export const FIELDS = {
  max_tokens: whole("Max tokens", "to the end", { min: 1 }),
  temperature: real("Temperature", 1, { max: 100, recommended: true }),
  top_p: real("Top-p", 1, { max: 1, recommended: true }),
  seed: whole("Seed", "random", { min: -1 }),
  top_k: whole("Top-k", 0, { min: -1, recommended: true }),
  min_p: real("Min-p", 0, { max: 1, recommended: true }),
  repetition_penalty: real("Repetition penalty", 1, { max: 100, recommended: true }),
  presence_penalty: real("Presence penalty", 0, { min: -2, max: 2 }),
  frequency_penalty: real("Frequency penalty", 0, { min: -2, max: 2 }),
  typical_p: real("Typical-p", 1, { max: 1, recommended: true }),
  epsilon_cutoff: real("Epsilon cutoff", 0, { max: 1, recommended: true }),
  eta_cutoff: real("Eta cutoff", 0, { max: 1, recommended: true }),
  top_n_sigma: real("Top-n-sigma", 0, { max: 100 }),
  min_tokens: whole("Min tokens", 0),
  max_thinking_tokens: whole("Thought tokens, at most", "no limit", { chats: true }),
  reasoning_effort: {
    kind: "choice", label: "Thoughts", empty: "as the model has them", choices: ["none", "low", "medium", "high"],
    chats: true,
  },
  num_speculative_tokens: whole("k, draft tokens per round", "auto"),
  deadline_ms: real("Time limit, ms", "none"),
  stop: { kind: "lines", label: "Ends at these texts", empty: "one a line; \\n is a line break" },
  bad_words: { kind: "lines", label: "Texts that must not come", empty: "one a line; \\n is a line break" },
  stop_token_ids: { kind: "ids", label: "Token ids that end it", empty: "none" },
  allowed_token_ids: { kind: "ids", label: "Token ids that may come", empty: "all" },
  logit_bias: { kind: "bias", label: "Logit bias", empty: '{"TOKEN ID": -100 to 100}' },
  ignore_eos: flag("Goes on after the end of text", "no"),
  include_stop_str_in_output: flag("Keeps the text that ended it", "no"),
  skip_special_tokens: flag("Leaves special tokens out", "yes"),
  parallel_tool_calls: flag("Parallel tool use", "yes", { chats: true }),
  keep_prefix: flag("Later requests may reuse it", "yes"),
  cache_salt: { kind: "text", label: "Cache salt", empty: "none" },
};
export const COMMON = ["max_tokens", "temperature", "top_p", "seed"];
export const OTHERS = Object.keys(FIELDS).filter((name) => !COMMON.includes(name));

const RECOMMENDED = Object.keys(FIELDS).filter((name) => FIELDS[name].recommended);
const WIDE = new Set(["lines", "ids", "bias"]);

// Appends a labelled field for each name.
export function buildSettings(parent, names) {
  for (const name of names) {
    const { kind, label, chats } = FIELDS[name];
    const box = element("div", WIDE.has(kind) ? "field wide" : "field");
    const control = makeControl(FIELDS[name]);
    control.id = `setting-${name}`;
    control.name = name;
    const caption = element("label", "", label);
    caption.htmlFor = control.id;
    if (chats) box.dataset.chats = "";
    box.append(caption, control);
    parent.append(box);
  }
}

function makeControl({ kind, empty, step, min, max, choices }) {
  if (kind === "flag" || kind === "choice") {
    const select = element("select");
    select.append(new Option(kind === "flag" ? `${empty}, by default` : empty, ""));
    for (const choice of choices ?? ["yes", "no"]) select.append(new Option(choice, choice));
    return select;
  }
  const control = element(kind === "lines" ? "textarea" : "input");
  if (kind === "lines") control.rows = 2;
  if (kind === "number") Object.assign(control, { type: "number", inputMode: "decimal", step, min, max: max ?? "" });
  control.autocomplete = "off";
  control.spellcheck = false;
  control.placeholder = empty;
  return control;
}

const readIds = (text) => text.split(/[\s,]+/).filter(Boolean).map(Number);
const readLines = (text) => text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
const READERS = {
  number: Number,
  flag: (text) => text === "yes",
  choice: String,
  text: String,
  lines: readLines,
  ids: readIds,
  bias: JSON.parse,
};

// Returns what is wrong with a field that the browser cannot judge by itself, or an empty text.
function problemOf({ name, value }) {
  const kind = FIELDS[name]?.kind;
  if (kind === "ids" && !readIds(value).every(Number.isInteger)) return "token ids, with commas between them";
  if (kind === "bias") return problemOfJson(value, "an object in JSON", (read) => !Array.isArray(read));
  return name === "tools" ? problemOfJson(value, "a list of tools in JSON", Array.isArray) : "";
}

function problemOfJson(text, wanted, isWanted) {
  if (!text.trim()) return "";
  try {
    const read = JSON.parse(text);
    return read && typeof read === "object" && isWanted(read) ? "" : wanted;
  } catch (error) {
    return `${wanted}: ${error.message}`;
  }
}

// Returns the first field that is rejected, or null. The server checks what is in the JSON.
export function invalidField(form) {
  const fields = [...form.querySelectorAll("input, select, textarea")].filter((field) => !field.closest("[hidden]"));
  for (const field of fields) field.setCustomValidity(problemOf(field));
  return fields.find((field) => !field.checkValidity()) ?? null;
}

// Shows an invalid field with the browser's words, also where it is folded away.
export function report(field) {
  const folded = field.closest("details");
  if (folded) folded.open = true;
  field.reportValidity();
}

// A form's field by its name alone: form.elements finds ids, too, such as that of a button.
const fieldOf = (form, name) => form.querySelector(`[name="${name}"]`);

// The fields of a request that a form's settings choose.
export function chosenSettings(form) {
  const fields = {};
  for (const [name, { kind }] of Object.entries(FIELDS)) {
    const control = fieldOf(form, name);
    if (control?.value && !control.closest("[hidden]")) fields[name] = READERS[kind](control.value);
  }
  return fields;
}

// The model of a request. Without a name the server's first model answers.
export function chosenModel(form) {
  const { value } = fieldOf(form, "model");
  return value ? { model: value } : {};
}

// The tools of a request, from the fields "tools" and "tool_choice".
export function chosenTools(form) {
  const [tools, choice] = [fieldOf(form, "tools"), fieldOf(form, "tool_choice")];
  if (!tools.value.trim()) return {};
  return { tools: JSON.parse(tools.value), ...(choice.value ? { tool_choice: choice.value } : {}) };
}

// Shows in the empty fields what the server chooses. card: the model's entry in /v1/models. kind: of requests,
// "chats" or "completions". A chat that chooses one recommended value gets those of completions for the others.
export function showDefaults(form, card, kind) {
  const chosen = RECOMMENDED.some((name) => fieldOf(form, name).value);
  const sampling = card.default_sampling?.[chosen ? "completions" : kind];
  for (const name of RECOMMENDED) {
    fieldOf(form, name).placeholder = sampling ? (sampling[name] ?? FIELDS[name].empty) : "as the model's files say";
  }
  fieldOf(form, "max_tokens").placeholder = kind === "chats" ? FIELDS.max_tokens.empty : 16;
}

// Fills the choice of a model, and shows it where there is a choice. Without one the first model answers.
export function showModels(select, models) {
  select.replaceChildren(new Option(`${models[0].id}, by default`, ""));
  for (const { id } of models.slice(1)) select.append(new Option(id, id));
  select.closest(".field").hidden = models.length < 2;
}

// What a form's named fields hold, without the empty ones, as texts.
export function formValues(form) {
  return Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
}

// Fills a form's named fields; what has no value becomes empty.
export function fillForm(form, values) {
  for (const control of form.elements) {
    if (!control.name || control.type === "radio") continue;
    control.value = values[control.name] ?? "";
  }
  form.dispatchEvent(new Event("input"));
}
