// A user who searches for an error or a symptom wants help, not how it is built. A page that helps goes before those that
// mention the word, and the first of these before the last; a heading with the word counts more. All else is as in Sphinx.
const HELP = ["messages", "failures", "howto/hangs", "check", "tutorial", "rendezvous", "launchers", "some_ranks"];
const BACKGROUND = ["architecture", "process_state", "contributing", "benchmarks/index", "explored", "changelog", "bytes"];

var Scorer = {
  score: ([page, , , , score]) =>
    score + (HELP.includes(page) ? 9 - HELP.indexOf(page) : 0) - (BACKGROUND.includes(page) ? 40 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
