/* Stands before the theme's search worker, whose library is lunr 2.3.9.

lunr joins the nodes of its automaton of words that have the same text, and that text is ambiguous where words
have digits: an edge "1" to node 23 reads as an edge "12" to node 3. Joined wrongly, the automaton has words that
the index lacks, and queries throw. A semicolon after each node makes the text unambiguous.

A query is words alone: the signs of lunr's own syntax would make an exclusion of `--run-dir`. The theme searches for
what begins with a word, so that "a" would find every page: such words are left out beside others. */
"use strict";

function textOf() {
  const edges = Object.keys(this.edges).sort();
  return (this.final ? "1" : "0") + edges.map((label) => `${label}${this.edges[label].id};`).join("");
}

self.addEventListener("message", ({ data: message }) => {
  self.lunr.TokenSet.prototype.toString = textOf;
  if (typeof message.data === "string") {
    const words = message.data.replace(/[+\-~^:*"]+/g, " ").trim().split(/\s+/);
    const telling = words.filter((word) => self.lunr.stopWordFilter(word.toLowerCase()));
    message.data = (telling.length ? telling : words).join(" ");
  }
});
