// Conversations in this browser's local storage: one entry each, and a bound on all together.

const PREFIX = "paceline.chat.1."; // the number is the form of the entries
export const LIMIT = 2_500_000; // characters; browsers give a server's pages about five million

export class StorageError extends Error {}

// The conversation, or null where the browser does not have it.
export function load(id) {
  return JSON.parse(storage().getItem(PREFIX + id));
}

// All conversations, the last changed first.
export function all() {
  const found = entries().map(([, text]) => JSON.parse(text));
  return found.sort((one, other) => other.changed - one.changed);
}

export function remove(id) {
  storage().removeItem(PREFIX + id);
}

// Keeps a conversation. Drops the oldest others beyond the bound and returns how many. Throws StorageError.
export function save(conversation) {
  const text = JSON.stringify(conversation);
  if (text.length > LIMIT) throw new StorageError(`this conversation has ${text.length} characters; ${kept()}`);
  let room = LIMIT - text.length;
  let dropped = 0;
  for (const { id } of all().filter((other) => other.id !== conversation.id)) {
    room -= storage().getItem(PREFIX + id).length;
    if (room >= 0) continue;
    remove(id);
    dropped += 1;
  }
  write(PREFIX + conversation.id, text);
  return dropped;
}

const kept = () => `the browser keeps ${LIMIT} in all, so its newest turns are lost when you leave the page`;

function write(key, text) {
  try {
    storage().setItem(key, text);
  } catch {
    const advice = "it is lost when you leave the page; delete others to make room";
    throw new StorageError(`the browser has no room for this conversation: ${advice}`);
  }
}

function entries() {
  return Object.entries(storage()).filter(([key]) => key.startsWith(PREFIX));
}

function storage() {
  try {
    return window.localStorage;
  } catch {
    throw new StorageError("the browser lets this page keep nothing: conversations are lost when you leave the page");
  }
}

// Calls back when another tab changed the conversations.
export function onChange(callback) {
  window.addEventListener("storage", ({ key }) => (key === null || key.startsWith(PREFIX)) && callback());
}
