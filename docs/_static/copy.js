// A button that copies, at each block of code that a reader may run: output has none. From an example with prompts it
// copies what stands after them, without the output.
const PROMPT = /^(>>> ?|\.\.\. ?)/;

function runnable(text) {
  const lines = text.split("\n");
  const prompted = lines.filter((line) => PROMPT.test(line));
  const code = lines[0].startsWith(">>>") ? prompted.map((line) => line.replace(PROMPT, "")).join("\n") : text;
  return code.trimEnd(); // the end of a line would start a command as soon as it is pasted
}

async function copy(button, shown) {
  try {
    await navigator.clipboard.writeText(runnable(shown.textContent));
    button.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(shown); // browsers refuse it to pages that came over http from elsewhere
    button.textContent = "press Ctrl-C";
  }
  setTimeout(() => (button.textContent = "copy"), 2000);
}

for (const block of document.querySelectorAll(":is(.highlight-python, .highlight-sh, .highlight-yaml, .doctest) > .highlight")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "copy";
  button.ariaLabel = "Copy this code";
  button.addEventListener("click", () => copy(button, block.querySelector("pre")));
  block.append(button);
}
