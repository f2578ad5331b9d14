// A row of figures, each with a title above and a note below.

/** Fill a list with tiles: [title, value, note, kind]. The optional kind colours the value. */
export function showTiles(parent, tiles) {
  parent.replaceChildren(
    ...tiles.map(([title, value, note, kind = ""]) => {
      const tile = document.createElement("div");
      for (const [name, text] of [["dt", title], ["dd", value], ["dd", note]]) {
        const line = document.createElement(name);
        line.textContent = text;
        tile.append(line);
      }
      tile.dataset.kind = kind;
      tile.lastChild.className = "note";
      return tile;
    }),
  );
}
