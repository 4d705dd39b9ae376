// Shows the answers of one request side by side, as their tokens arrive.

import { element } from "./dom.js";

function number(value, digits) {
  return value === null || value === undefined ? "–" : value.toFixed(digits);
}

const KINDS = ["accepted", "recovered", "bonus", "plain"];

class Answer {
  constructor(index) {
    this.box = element("article", "answer");
    this.box.setAttribute("aria-label", `Answer ${index + 1}`);
    this.state = element("span", "progress", "waiting");
    this.counts = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    this.text = element("div", "text");
    this.text.tabIndex = 0;
    this.thoughts = null; // made when the first of them comes
    this.calls = [];
    this.bar = element("div", "bar");
    this.bar.setAttribute("aria-hidden", "true");
    this.parts = Object.fromEntries(KINDS.map((kind) => [kind, this.bar.appendChild(element("i", kind))]));
    this.figures = element("dl", "figures");
    const head = element("header");
    head.append(element("h2", "", `Answer ${index + 1}`), this.state);
    this.box.append(head, this.text, this.bar, this.figures);
  }

  get tokens() {
    return Object.values(this.counts).reduce((sum, count) => sum + count, 0);
  }

  add(choice) {
    const { reasoning_content: thoughts, tool_calls: calls } = choice.delta ?? {};
    if (thoughts) this.addThoughts(thoughts);
    for (const call of calls ?? []) this.addToCall(call);
    if (choice.paceline) this.addTokens(choice);
  }

  // The text below has the tokens of thoughts and calls, too: these are shown as a client gets them.
  addThoughts(text) {
    if (!this.thoughts) {
      const box = element("details", "thoughts");
      this.thoughts = element("p");
      box.append(element("summary", "", "Thoughts"), this.thoughts);
      this.text.before(box);
    }
    this.thoughts.append(text);
  }

  addToCall({ index, function: called }) {
    if (!this.calls[index]) {
      const box = element("div", "call");
      this.calls[index] = element("code");
      box.append(element("strong", "", called.name), this.calls[index]);
      this.bar.before(box);
    }
    this.calls[index].append(called.arguments);
  }

  addTokens(choice) {
    const { token_ids: ids, kinds, pieces, metrics } = choice.paceline;
    const below = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 24;
    ids.forEach((id, i) => this.addToken(id, kinds[i], pieces[i]));
    if (below) this.text.scrollTop = this.text.scrollHeight;
    this.state.textContent = `${this.tokens} tokens`;
    for (const kind of KINDS) this.parts[kind].style.flexGrow = this.counts[kind];
    if (metrics) this.end(metrics, choice.finish_reason);
  }

  addToken(id, kind, piece) {
    this.counts[kind] += 1;
    if (!piece) return; // a special token, or half a character whose other half is to come
    const mark = element("mark", kind, piece);
    mark.dataset.kind = kind;
    mark.title = `${kind} · token ${id}`;
    this.text.append(mark);
  }

  end(metrics, reason) {
    this.box.classList.add("ended");
    this.state.textContent = `${metrics.output_tokens} tokens · ${reason}`;
    const pace = metrics.ms_per_token ? 1000 / metrics.ms_per_token : null;
    this.show("tokens/s", number(pace, 1));
    this.show("acceptance length", number(metrics.mean_acceptance_length, 2));
    this.show("kept", metrics.drafted ? `${metrics.accepted} of ${metrics.drafted}` : "no draft tokens");
    if (metrics.saved_by_sibling) this.show("saved by siblings", `${metrics.saved_by_sibling} of ${metrics.rounds} rounds`);
    this.show("first token", metrics.ttft_ms === null ? "–" : `${number(metrics.ttft_ms, 0)} ms`);
  }

  show(name, value) {
    const pair = element("div");
    pair.append(element("dt", "", name), element("dd", "", value));
    this.figures.append(pair);
  }

  stopped() {
    if (!this.box.classList.contains("ended")) this.state.textContent = `${this.tokens} tokens · stopped`;
    this.box.classList.add("ended");
  }
}

export class Answers {
  constructor(parent, n) {
    this.list = Array.from({ length: n }, (_, index) => new Answer(index));
    parent.replaceChildren(...this.list.map((answer) => answer.box));
  }

  add(chunk) {
    for (const choice of chunk.choices) this.list[choice.index].add(choice);
  }

  get tokens() {
    return this.list.reduce((sum, answer) => sum + answer.tokens, 0);
  }

  remove() {
    for (const answer of this.list) answer.box.remove();
  }

  stopped() {
    for (const answer of this.list) answer.stopped();
  }
}
