// Elements of a conversation's turns. What is done with a turn is left to the callbacks in "actions".

import { pathTo, versions } from "./conversation.js";
import { button, element } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const PAUSE = 30; // least milliseconds between two looks at a growing answer
const BUSY_SHARE = 5; // and at least so many times what one takes

const size = (text) => (text.length < 1000 ? `${text.length} B` : `${Math.round(text.length / 1000)} kB`);

export class Turns {
  // actions: edit, regenerate and continueFrom, called with a turn's index; show, with that and the button's label;
  // copy, with a text and a button.
  constructor(parent, actions) {
    Object.assign(this, { parent, actions, views: new Map(), conversation: null });
  }

  // Shows a conversation's turns up to its leaf. Elements of turns that were there before stay.
  update(conversation) {
    if (conversation !== this.conversation) this.views.clear();
    this.conversation = conversation;
    const path = pathTo(conversation, conversation.leaf);
    for (const index of path) if (!this.views.has(index)) this.views.set(index, this.make(index));
    const views = path.map((index) => this.views.get(index));
    views.forEach(({ box }, place) => {
      if (this.parent.children[place] !== box) this.parent.insertBefore(box, this.parent.children[place] ?? null);
    });
    while (this.parent.children.length > views.length) this.parent.lastChild.remove();
    for (const view of views) view.refresh();
  }

  // Forgets the elements of the turns from this index on, which were taken back.
  forget(index) {
    for (const at of [...this.views.keys()]) if (at >= index) this.views.delete(at);
  }

  make(index) {
    const made = this.conversation.turns[index].role === "user" ? PersonTurn : AnswerTurn;
    return new made(this.conversation, index, this.actions);
  }
}

class Turn {
  constructor(conversation, index, actions, name) {
    Object.assign(this, { conversation, index, actions });
    this.turn = conversation.turns[index];
    this.box = element("article", `turn ${this.turn.role}`);
    this.box.setAttribute("aria-label", `${name}, turn ${pathTo(conversation, index).length}`);
    this.head = element("header");
    this.versions = element("span", "versions");
    this.head.append(element("h2", "", name), this.versions);
    this.tools = element("footer", "tools");
    this.box.append(this.head, this.tools);
  }

  addTool(label, act) {
    const made = button("small", label);
    made.addEventListener("click", () => act(this.index, made));
    this.tools.append(made);
  }

  // Shows which of several versions this is, with a way to those beside it.
  refresh() {
    const all = versions(this.conversation, this.index);
    const place = all.indexOf(this.index);
    if (all.length === 1) {
      this.versions.replaceChildren();
      return;
    }
    const arrow = (sign, label, to) => {
      const made = button("small", sign, label);
      made.setAttribute("aria-disabled", to === undefined);
      made.addEventListener("click", () => to !== undefined && this.actions.show(to, label));
      return made;
    };
    const before = arrow("‹", "Version before", all[place - 1]);
    const after = arrow("›", "Version after", all[place + 1]);
    this.versions.replaceChildren(before, `${place + 1} of ${all.length}`, after);
  }
}

class PersonTurn extends Turn {
  constructor(conversation, index, actions) {
    super(conversation, index, actions, "You");
    const text = element("p", "said", this.turn.text);
    text.dir = "auto";
    this.tools.before(text, ...this.turn.files.map(makeFile));
    this.addTool("Edit", actions.edit);
    this.addTool("Copy", (_, from) => actions.copy(this.turn.text, from));
  }
}

function makeFile({ name, text }) {
  const [box, content] = [element("details", "file"), element("pre", "", text)];
  content.tabIndex = 0;
  box.append(element("summary", "", `${name}, ${size(text)}`), content);
  return box;
}

class AnswerTurn extends Turn {
  constructor(conversation, index, actions) {
    super(conversation, index, actions, "Assistant");
    this.text = element("div", "said");
    this.text.dir = "auto";
    this.thoughts = element("p");
    this.thinking = element("details", "thoughts");
    this.thinking.append(element("summary", "", "Thoughts"), this.thoughts);
    this.calls = element("div", "calls");
    this.figures = element("p", "figures");
    this.tools.before(this.thinking, this.text, this.calls, this.figures);
    this.addTool("Copy", (_, from) => actions.copy(this.turn.text, from));
    this.addTool("Regenerate", actions.regenerate);
    const inspect = element("a", "", "Inspect");
    inspect.href = `./#inspect=${conversation.id}.${index}`;
    this.tools.append(inspect);
    this.pause = PAUSE;
    this.timer = null;
    this.draw();
  }

  // Shows what the turn has now: soon, and less often where that takes long.
  grow() {
    this.timer ??= setTimeout(() => {
      const began = performance.now();
      this.draw();
      this.pause = Math.max(PAUSE, BUSY_SHARE * (performance.now() - began));
    }, this.pause);
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = null;
    const { text, thoughts, calls, finish } = this.turn;
    const scrolled = this.box.closest(".scrolled"); // null before the turn is shown
    const below = scrolled && scrolled.scrollHeight - scrolled.scrollTop - scrolled.clientHeight < 24;
    if (this.shown !== text) showMarkdown(this.text, text);
    this.shown = text;
    if (this.thoughts.textContent !== thoughts) this.thoughts.textContent = thoughts;
    this.thinking.hidden = !thoughts;
    this.showCalls(calls);
    this.figures.textContent = finish ? wordsOf(this.turn) : "";
    this.tools.hidden = !finish;
    this.box.classList.toggle("ended", Boolean(finish));
    if (below) scrolled.scrollTop = scrolled.scrollHeight;
  }

  refresh() {
    super.refresh();
    this.draw();
  }

  showCalls(calls) {
    calls.forEach((call, place) => {
      const box = this.calls.children[place] ?? this.calls.appendChild(makeCall(call));
      box.querySelector("code").textContent = call.arguments;
    });
    const followed = this.conversation.turns.some(({ parent, role }) => parent === this.index && role === "assistant");
    const ready = calls.length > 0 && Boolean(this.turn.finish);
    if (ready) this.showResults(calls, followed);
  }

  // Fields for what the calls returned; once an answer follows, they can be read only.
  showResults(calls, followed) {
    calls.forEach((call, place) => {
      const box = this.calls.children[place];
      if (!box.querySelector("textarea")) box.append(makeResult(call, `${this.index}-${place}`));
      box.querySelector("textarea").readOnly = followed;
    });
    const send = this.tools.querySelector(".send-results");
    if (followed) send?.remove();
    else if (!send) this.addResultsTool();
  }

  addResultsTool() {
    const send = button("small send-results", "Send results");
    send.addEventListener("click", () => {
      const fields = this.calls.querySelectorAll("textarea");
      this.turn.calls.forEach((call, place) => Object.assign(call, { result: fields[place].value }));
      this.actions.continueFrom(this.index);
    });
    this.tools.prepend(send);
  }
}

function makeCall({ name }) {
  const box = element("div", "call");
  box.append(element("strong", "", name), element("code"));
  return box;
}

function makeResult({ name, result }, id) {
  const [box, label, field] = [element("div", "field"), element("label", "", `Result of ${name}`), element("textarea")];
  field.id = label.htmlFor = `result-${id}`;
  field.rows = 2;
  field.value = result ?? "";
  box.append(label, field);
  return box;
}

// What is told below an answer: "120 tokens · 40.1 tokens/s · acceptance length 2.31 · cut off by max tokens".
function wordsOf({ metrics, finish, token_ids: ids }) {
  const words = [`${metrics?.output_tokens ?? ids.length} tokens`];
  if (metrics?.ms_per_token) words.push(`${(1000 / metrics.ms_per_token).toFixed(1)} tokens/s`);
  if (metrics?.drafted) words.push(`acceptance length ${metrics.mean_acceptance_length.toFixed(2)}`);
  if (finish === "length") words.push("cut off");
  if (finish === "stopped") words.push("stopped");
  return words.join(" · ");
}
