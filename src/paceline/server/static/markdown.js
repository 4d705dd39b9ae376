// Markdown as elements. No text becomes HTML here: only the elements and attributes below can come about.

import { button, element } from "./dom.js";
import MarkdownIt from "./vendor/markdown-it.min.js";

const parser = new MarkdownIt({ html: false, linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
const SCHEMES = ["http:", "https:", "mailto:"];
const PLAIN = new Set(["p", "blockquote", "ul", "li", "em", "strong", "s", "thead", "tbody", "tr"]);
const TOP_LEVEL = 2; // levels above an answer's own headings: the page's and the turn's

// Shows a text in a box. Blocks that did not change stay, with the focus and the selection in them.
export function showMarkdown(box, text) {
  const blocks = [...render(text).childNodes];
  let same = 0;
  while (same < blocks.length && box.childNodes[same]?.isEqualNode(blocks[same])) same += 1;
  while (box.childNodes.length > same) box.lastChild.remove();
  box.append(...blocks.slice(same));
}

function render(text) {
  const root = document.createDocumentFragment();
  appendTokens(root, parser.parse(text, {}));
  return root;
}

function appendTokens(root, tokens) {
  const open = [root];
  for (const token of tokens.filter(({ hidden }) => !hidden)) { // hidden: the paragraphs of a tight list
    if (token.nesting < 0) open.pop();
    else if (token.type === "inline") appendTokens(open.at(-1), token.children);
    else if (token.nesting === 0) open.at(-1).append(makeLeaf(token));
    else open.push(appendOpened(open.at(-1), token));
  }
}

function makeLeaf({ type, content, info, attrs }) {
  if (type === "softbreak") return "\n";
  if (type === "hardbreak") return element("br");
  if (type === "hr") return element("hr");
  if (type === "code_inline") return element("code", "", content);
  if (type === "fence" || type === "code_block") return makeCode(content, info.trim().split(/\s/)[0]);
  if (type === "image") return makeLink(new Map(attrs).get("src"), content || "image"); // never fetched
  return content;
}

// Appends the element that a token opens. Returns where its content goes.
function appendOpened(parent, token) {
  const { tag } = token;
  if (tag === "table") {
    const [frame, table] = [element("div", "scroll"), element("table")];
    frame.tabIndex = 0; // so that the keyboard can scroll it
    frame.append(table);
    parent.append(frame);
    return table;
  }
  const made = tag === "a" ? makeLink(token.attrGet("href")) : element(allowed(tag));
  if (tag === "ol") made.start = token.attrGet("start") ?? 1;
  if (tag === "th" || tag === "td") made.style.textAlign = token.attrGet("style")?.replace("text-align:", "") ?? "";
  parent.append(made);
  return made;
}

function allowed(tag) {
  if (/^h[1-6]$/.test(tag)) return `h${Math.min(6, Number(tag[1]) + TOP_LEVEL)}`;
  return PLAIN.has(tag) || tag === "ol" || tag === "th" || tag === "td" ? tag : "span";
}

// A link to another site, or the text alone: addresses of this server and scripts are no links.
function makeLink(address, content = "") {
  if (!URL.canParse(address) || !SCHEMES.includes(new URL(address).protocol)) return element("span", "", content);
  const link = element("a", "", content);
  link.href = address;
  link.title = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
  return link;
}

function makeCode(content, language) {
  const [frame, head, body] = [element("figure", "code"), element("figcaption"), element("pre")];
  head.append(element("span", "title", language), button("small copy-code", "Copy", "Copy the code"));
  body.tabIndex = 0;
  body.append(element("code", "", content.replace(/\n$/, "")));
  frame.append(head, body);
  return frame;
}
