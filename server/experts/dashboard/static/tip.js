// A box of numbers next to the pointer.

const AWAY = 14; // pixels between the pointer and the box
const box = document.getElementById("tip");

/** Show text with its line breaks near a position in the window. */
export function showTip(text, x, y) {
  box.textContent = text;
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const left = x + AWAY + width > innerWidth ? x - AWAY - width : x + AWAY;
  const top = y + AWAY + height > innerHeight ? y - AWAY - height : y + AWAY;
  box.style.left = `${Math.max(4, left)}px`;
  box.style.top = `${Math.max(4, top)}px`;
}

/** Hide the box. */
export function hideTip() {
  box.hidden = true;
}
