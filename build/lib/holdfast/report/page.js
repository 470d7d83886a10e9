"use strict";
(() => {
  const root = document.documentElement;
  const sorted = new Map(); // of a table's id: the column it is sorted by, and in which direction
  const say = (text) => { document.getElementById("said").textContent = text; };

  // Colours: those of the system until a reader chooses others.
  const themes = ["system", "light", "dark"];
  const button = document.getElementById("theme");
  const remembered = () => { try { return localStorage.getItem("holdfast-theme"); } catch { return null; } };
  const dress = (theme) => {
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = `Colours: ${theme}`;
    try { localStorage.setItem("holdfast-theme", theme); } catch { /* a file may not be allowed to remember */ }
  };
  let theme = themes.includes(remembered()) ? remembered() : "system";
  dress(theme);
  button.hidden = false;
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    dress(theme);
  });

  // Tables: a button in each head sorts by its column; what is empty comes last.
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), undefined, { numeric: true });
  const sort = (table, column, direction) => {
    const body = table.tBodies[0];
    const sign = direction === "ascending" ? 1 : -1;
    const rows = [...body.rows].map((row) => [value(row, column), row]);
    rows.sort(([a], [b]) => a === "" || b === "" ? (a === "") - (b === "") : sign * compare(a, b));
    body.append(...rows.map(([, row]) => row));
    [...table.tHead.rows[0].cells].forEach((head, place) => head.setAttribute("aria-sort", place === column ? direction : "none"));
    sorted.set(table.id, [column, direction]);
  };
  document.addEventListener("click", (event) => {
    const head = event.target.closest("th");
    if (!head || !event.target.closest("button")) return;
    const first = head.classList.contains("number") ? "descending" : "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const direction = head.getAttribute("aria-sort") === first ? other : first;
    sort(head.closest("table"), head.cellIndex, direction);
    say(`Sorted by ${head.textContent.trim()}, ${direction}.`);
  });

  // A live page asks for itself again, and puts in place only the parts that have changed.
  const live = document.getElementById("live");
  if (!live) return;
  const parts = (page) => [...page.querySelectorAll("[data-part]")];
  const source = new Map(parts(document).map((part) => [part.id, part.outerHTML]));
  const keep = (old, part) => {
    part.querySelectorAll("details").forEach((each) => { each.open = document.getElementById(each.id)?.open ?? false; });
    part.querySelectorAll("table").forEach((table) => { if (sorted.has(table.id)) sort(table, ...sorted.get(table.id)); });
    part.querySelectorAll(".scroll").forEach((each, place) => { each.dataset.left = old?.querySelectorAll(".scroll")[place]?.scrollLeft ?? 0; });
  };
  const put = (old, part) => {
    const focused = old.contains(document.activeElement) ? [...old.querySelectorAll("button, summary, [tabindex]")].indexOf(document.activeElement) : -1;
    keep(old, part);
    old.replaceWith(part);
    part.querySelectorAll(".scroll").forEach((each) => { each.scrollLeft = Number(each.dataset.left); });
    if (focused >= 0) part.querySelectorAll("button, summary, [tabindex]")[focused]?.focus({ preventScroll: true });
  };
  const take = (next) => {
    const found = parts(next);
    const texts = new Map(found.map((part) => [part.id, part.outerHTML]));
    if (found.map((part) => part.id).join() !== [...source.keys()].join()) {
      const main = document.getElementById("main");
      found.filter((part) => part.closest("main")).forEach((part) => keep(document.getElementById(part.id), part));
      main.replaceChildren(...next.getElementById("main").children);
      source.clear();
    }
    found.forEach((part) => {
      const text = texts.get(part.id);
      const old = document.getElementById(part.id);
      if (source.has(part.id) && source.get(part.id) !== text && old) put(old, document.adoptNode(part));
      source.set(part.id, text);
    });
    document.title = next.title;
  };
  let tag = "";
  let changed = Date.now();
  const ask = async () => {
    try {
      const answer = await fetch(location.pathname, { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        const first = tag === "";
        tag = answer.headers.get("ETag") ?? "";
        take(new DOMParser().parseFromString(await answer.text(), "text/html"));
        if (!first) changed = Date.now();
        root.dataset.updates = Number(root.dataset.updates ?? 0) + 1;
      }
      const state = answer.headers.get("X-Run-State") ?? "";
      const ago = Math.round((Date.now() - changed) / 1000);
      live.classList.remove("lost");
      live.textContent = `${state}, ${ago < 2 ? "just now" : `unchanged for ${ago} s`}`;
    } catch {
      live.classList.add("lost");
      live.textContent = "nobody serves this page any more: it shows what was known last";
    }
    setTimeout(ask, 1000 * Number(root.dataset.live));
  };
  setTimeout(ask, 1000 * Number(root.dataset.live));
})();
