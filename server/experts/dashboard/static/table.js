// A table from rows. Columns are [title, function of a row that returns its text, class].

/** @param classOf returns a row's class */
export function fillTable(parent, columns, rows, classOf = () => "") {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [title, , kind] of columns) head.append(cell("th", title, kind));
  const body = table.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    line.className = classOf(row);
    for (const [, text, kind] of columns) line.append(cell("td", text(row), kind));
  }
  parent.replaceChildren(...(rows.length ? [table] : []));
}

function cell(name, text, kind) {
  const element = document.createElement(name);
  element.textContent = text;
  element.className = kind;
  return element;
}
