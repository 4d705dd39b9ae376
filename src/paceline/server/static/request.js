// Turns the form into a request to the API.

const byId = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

export const isChat = () => chosen("mode") === "chat";
export const isLimited = () => chosen("speculation") === "limit";

// Returns the first field that the browser's validation rejects, or null.
export function invalidField() {
  const fields = [...byId("form").querySelectorAll("input, textarea")];
  return fields.find((field) => !field.closest("[hidden]") && !field.checkValidity()) ?? null;
}

// Returns path, body and number of answers of the request.
export function readRequest() {
  const n = byId("n").valueAsNumber;
  const body = {
    n,
    stream: true,
    metrics: true,
    ...optional("temperature"),
    ...optional("top-p"),
    ...optional("max-tokens"),
    ...optional("seed"),
    ...speculation(),
  };
  if (isChat()) return { path: "v1/chat/completions", body: { ...body, messages: messages(), ...tools() }, n };
  return { path: "v1/completions", body: { ...body, prompt: byId("prompt").value }, n };
}

// Tells the browser's validation whether the tools are a list in JSON. The server checks what is in it.
export function checkTools() {
  const field = byId("tools");
  let problem = "";
  try {
    if (field.value.trim() && !Array.isArray(JSON.parse(field.value))) problem = "a list of tools, in JSON";
  } catch (error) {
    problem = `not JSON: ${error.message}`;
  }
  field.setCustomValidity(problem);
}

function tools() {
  const written = byId("tools").value.trim();
  return written ? { tools: JSON.parse(written), tool_choice: byId("tool-choice").value } : {};
}

// A number that was left empty is the server's to choose, and is not sent.
function optional(id) {
  const { value, valueAsNumber } = byId(id);
  return value === "" ? {} : { [id.replace("-", "_")]: valueAsNumber };
}

// Shows in the empty fields what the server chooses. card: the model's entry in /v1/models.
export function showDefaults(card) {
  const sampling = card.default_sampling[isChat() ? "chats" : "completions"];
  byId("temperature").placeholder = sampling.temperature;
  byId("top-p").placeholder = sampling.top_p ?? 1;
  byId("max-tokens").placeholder = isChat() ? "to the end" : "16";
}

function speculation() {
  if (chosen("speculation") === "auto") return {}; // the server's own policy
  return { num_speculative_tokens: isLimited() ? byId("k").valueAsNumber : 0 };
}

function messages() {
  const user = { role: "user", content: byId("prompt").value };
  const system = byId("system").value;
  return system ? [{ role: "system", content: system }, user] : [user];
}
