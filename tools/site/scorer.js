// The order of search results: what explains a concept comes first. Sphinx's own weights, then a place for each page.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: function ([page, title, anchor, description, score, file]) {
    if (page.includes('glossary') && anchor.includes('term-')) return score + 100; // the entry of that name
    const asked = (new URLSearchParams(window.location.search).get('q') || '').toLowerCase().trim();
    const named = asked && title.toLowerCase().includes(asked) ? 40 : 0; // the words stand in the heading
    if (page.includes('chapters/')) return score + named + 20;
    if (/benchmarks|references|genindex|how_to_use|setup/.test(page)) return score - 20;
    return score;
  },
};
