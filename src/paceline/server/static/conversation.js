// Conversations as values. The turns are a tree: an edited message or another answer stands beside the first one.
//
// conversation: { id, changed, setup, leaf, turns }. setup: the settings as texts, by the names of the form.
// turns: each has the index of its parent, or -1. leaf: index of the last turn that is shown, or -1.
// a person's turn: { parent, role: "user", text, files: [{ name, text }] }
// an answer: { parent, role: "assistant", text, thoughts, calls, finish, metrics, token_ids, kinds, pieces }
// calls: [{ id, name, arguments, result }]; result: what the person says that the call returned.

const KINDS = ["accepted", "recovered", "bonus", "plain"];
const TITLE_LENGTH = 60; // characters

export function newConversation(setup) {
  const bytes = crypto.getRandomValues(new Uint8Array(8)); // randomUUID is for pages that came by HTTPS
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, changed: Date.now(), setup, leaf: -1, turns: [] };
}

// Appends a turn, which becomes the last that is shown. Returns its index.
export function addTurn(conversation, parent, turn) {
  conversation.leaf = conversation.turns.push({ parent, ...turn }) - 1;
  conversation.changed = Date.now();
  return conversation.leaf;
}

// Takes back the turns from this index on, the newest ones. leaf: index of the turn that is shown last.
export function withdraw(conversation, index, leaf) {
  conversation.turns.splice(index);
  conversation.leaf = leaf;
}

// Indexes from the first turn to this one.
export function pathTo({ turns }, index) {
  const path = [];
  for (let at = index; at >= 0; at = turns[at].parent) path.unshift(at);
  return path;
}

// Indexes of the turns that follow the same one as this, itself among them.
export function versions({ turns }, index) {
  return turns.flatMap(({ parent }, at) => (parent === turns[index].parent ? [at] : []));
}

// Shows the conversation through this turn: to the newest of its followers.
export function show(conversation, index) {
  const followerOf = (at) => conversation.turns.findLastIndex(({ parent }) => parent === at);
  conversation.leaf = index;
  for (let at = followerOf(index); at >= 0; at = followerOf(at)) conversation.leaf = at;
}

export function titleOf({ turns }) {
  const first = turns[0]?.text || turns[0]?.files?.[0]?.name || "New conversation";
  const line = first.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}…` : line;
}

// Everything in a conversation that a person can look for.
export function textOf({ turns }) {
  const namesOf = (files) => (files ?? []).map(({ name }) => name);
  return turns.flatMap(({ text, thoughts, files }) => [text, thoughts ?? "", ...namesOf(files)]).join("\n");
}

// The messages that are sent for the answer after this turn.
export function messagesTo(conversation, index) {
  const { system } = conversation.setup;
  const turns = pathTo(conversation, index).flatMap((at) => messagesOf(conversation.turns[at]));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

function messagesOf(turn) {
  if (turn.role === "user") return [{ role: "user", content: contentOf(turn) }];
  const message = { role: "assistant", content: turn.text };
  if (turn.thoughts) message.reasoning_content = turn.thoughts;
  if (turn.calls.length === 0) return [message];
  message.tool_calls = turn.calls.map(({ id, name, arguments: text }) => ({
    id, type: "function", function: { name, arguments: text },
  }));
  const answered = turn.calls.filter((call) => call.result !== undefined);
  return [message, ...answered.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result }))];
}

// A person's text with the attached files behind it, each in a fence longer than any in the file.
function contentOf({ text, files }) {
  const blocks = files.map(({ name, text: content }) => {
    const longest = Math.max(2, ...(content.match(/`+/g) ?? []).map((ticks) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${content.replace(/\n$/, "")}\n${fence}`;
  });
  return [text, ...blocks].filter(Boolean).join("\n\n");
}

export function emptyAnswer() {
  const nothing = { text: "", thoughts: "", calls: [], token_ids: [], kinds: [], pieces: [] };
  return { role: "assistant", ...nothing, finish: null, metrics: null };
}

// Extends an answer by a choice of a streamed chunk.
export function extend(answer, { delta, paceline, finish_reason: finish }) {
  answer.text += delta.content ?? "";
  answer.thoughts += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    answer.calls[index] ??= { id, name: called.name, arguments: "" };
    answer.calls[index].arguments += called.arguments;
  }
  if (paceline) {
    answer.token_ids.push(...paceline.token_ids);
    answer.kinds.push(...paceline.kinds.map((kind) => KINDS.indexOf(kind)));
    answer.pieces.push(...paceline.pieces);
    answer.metrics = paceline.metrics ?? answer.metrics;
  }
  answer.finish = finish ?? answer.finish;
}

// Ends the answers that nobody extends any more.
export function endAnswers({ turns }) {
  for (const turn of turns) if (turn.role === "assistant") turn.finish ??= "stopped";
}

// The choice of a streamed chunk that would have given a whole answer at once.
export function asChoice({ thoughts, calls, token_ids, kinds, pieces, metrics, finish }) {
  const called = calls.map(({ name, arguments: text }, index) => ({ index, function: { name, arguments: text } }));
  return {
    index: 0,
    delta: { reasoning_content: thoughts, tool_calls: called },
    paceline: { token_ids, kinds: kinds.map((kind) => KINDS[kind]), pieces, metrics },
    finish_reason: finish,
  };
}
