// Turns the inspector's form into a request to the API.

import { byId } from "./dom.js";
import { chosenModel, chosenSettings, chosenTools } from "./settings.js";

const chosen = (name) => document.querySelector(`input[name="${name}"]:checked`).value;

export const isChat = () => chosen("mode") === "chat";
export const isLimited = () => chosen("speculation") === "limit";

let earlier = []; // messages of a conversation, before the one in the form

export function setEarlier(messages) {
  earlier = messages;
}

// What the form leaves out of the request's messages, in chats.
export const getEarlier = () => (isChat() ? earlier : []);

// Returns path, body and number of answers of the request.
export function readRequest() {
  const form = byId("form");
  const n = byId("n").valueAsNumber;
  const body = { n, stream: true, metrics: true, ...chosenModel(form), ...chosenSettings(form), ...speculation() };
  if (!isChat()) return { path: "v1/completions", body: { ...body, prompt: byId("prompt").value }, n };
  return { path: "v1/chat/completions", body: { ...body, messages: messages(), ...chosenTools(form) }, n };
}

function speculation() {
  if (chosen("speculation") === "auto") return {}; // the server's own policy
  return { num_speculative_tokens: isLimited() ? byId("k").valueAsNumber : 0 };
}

function messages() {
  const system = byId("system").value;
  const prompt = byId("prompt").value; // may be empty after the results of calls
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...earlier,
    ...(prompt ? [{ role: "user", content: prompt }] : []),
  ];
}
