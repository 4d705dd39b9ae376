// Client for the routes that the page uses. The API key is kept only in this module's memory.

let key = "";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(value) {
  key = value.trim();
}

function headers() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export async function get(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

// Yields the documents of a stream as they arrive. Throws ApiError, or AbortError when the signal fires.
export async function* stream(path, body, signal) {
  const reply = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  await checked(reply);
  for await (const data of events(reply.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(200, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(200, "the server hung up before the answer's end");
}

// Yields the documents of a stream that goes on until the signal fires or the server ends.
export async function* watch(path, signal) {
  const reply = await checked(await fetch(path, { headers: headers(), cache: "no-store", signal }));
  for await (const data of events(reply.body)) yield JSON.parse(data);
}

// What a person is told about a request that failed; nothing where they stopped it.
export function explain(error) {
  if (error.name === "AbortError") return "";
  return error instanceof ApiError ? error.message : `the server cannot be reached (${error.message}); is it running?`;
}

async function checked(reply) {
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text || reply.statusText;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // an error page of a proxy: show its text
  }
  const wait = reply.headers.get("Retry-After");
  throw new ApiError(reply.status, wait ? `${message} (in about ${wait} s)` : message);
}

// Yields the data of server-sent events. This server sends one line per event.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice("data: ".length);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
