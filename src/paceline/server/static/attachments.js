// Text files that wait to be sent with a message.

import { button, byId, element } from "./dom.js";

const MAX_BYTES = 1_000_000;

export class Attachments {
  // onProblem: called with why a file was not taken.
  constructor(parent, onProblem) {
    Object.assign(this, { parent, onProblem, files: [] });
  }

  set(files) {
    this.files = files;
    this.parent.replaceChildren(...files.map((file) => this.makeEntry(file)));
  }

  // Adds files that the browser offers. Only texts are taken.
  async add(offered) {
    for (const file of offered) {
      try {
        this.set([...this.files, { name: file.name, text: await readText(file) }]);
      } catch (error) {
        this.onProblem(error.message);
      }
    }
  }

  makeEntry(file) {
    const entry = element("li", "", file.name);
    const remove = button("small", "×", `Remove ${file.name}`);
    remove.addEventListener("click", () => {
      this.set(this.files.filter((other) => other !== file));
      byId("attach").focus(); // the button with the focus is gone
    });
    entry.append(remove);
    return entry;
  }
}

async function readText(file) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has ${file.size} bytes; at most ${MAX_BYTES} are read`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is no text in UTF-8`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is no text: it has zero bytes`);
  return text;
}
