// Helpers for elements, for all modules of the pages.

export const byId = (id) => document.getElementById(id);

export function element(name, className = "", content = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = content;
  return made;
}

export function button(className, content, label = content) {
  const made = element("button", className, content);
  made.type = "button";
  if (label !== content) made.setAttribute("aria-label", label);
  return made;
}

// Copies a text. Pages that came by plain HTTP from another machine have no navigator.clipboard.
export async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const focused = document.activeElement;
  const field = element("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser does not let this page copy");
}
