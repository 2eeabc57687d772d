// Renders formulas for the Sphinx extension: one JSON request a line in, one JSON answer a line out.
//   node katex_server.js path/to/katex.min.js
//   {"tex": "x^2", "display": false}  ->  {"html": "..."} or {"error": "..."}
const katex = require(require("path").resolve(process.argv[2]));
const lines = require("readline").createInterface({ input: process.stdin, crlfDelay: Infinity });
lines.on("line", (line) => {
  let answer;
  try {
    const { tex, display } = JSON.parse(line);
    answer = { html: katex.renderToString(tex, { displayMode: display, strict: "ignore", output: "htmlAndMathml" }) };
  } catch (problem) {
    answer = { error: String(problem.message) };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
});
