for (const th of document.querySelectorAll("th")) th.addEventListener("click", () => {
  const body = th.closest("table").tBodies[0], i = th.cellIndex;
  const up = th.getAttribute("aria-sort") !== "ascending";
  for (const other of th.parentNode.cells) other.removeAttribute("aria-sort");
  th.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = tr => tr.cells[i].dataset.n ?? tr.cells[i].textContent;
  const rank = (a, b) => (a === "") - (b === "") || (up ? 1 : -1) *
    (a !== "" && b !== "" && !isNaN(a) && !isNaN(b) ? a - b : String(a).localeCompare(b));
  body.append(...[...body.rows].sort((a, b) => rank(key(a), key(b))));
});
