// A cursor with the values of the nearest step on every chart: mouse, touch and arrow keys. The page reads without it.
for (const data of document.querySelectorAll(".cursor-data")) {
  const rows = JSON.parse(data.textContent);
  const plot = data.closest(".chart").querySelector(".plot");
  const make = (tag, css, text) => {
    const node = document.createElement(tag);
    node.className = css;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const cursor = make("div", "cursor"), tip = make("div", "tip");
  tip.setAttribute("role", "status");
  cursor.hidden = tip.hidden = true;
  plot.append(cursor, tip);
  let current = -1;

  const hide = () => { cursor.hidden = tip.hidden = true; current = -1; };
  const show = (index) => {
    if (index === current) return;
    current = index;
    const [x, title, values] = rows[index];
    cursor.replaceChildren(...values.map(([css, , , y]) => {
      const dot = make("i", css);
      dot.style.bottom = `${y * 100}%`;
      return dot;
    }));
    cursor.style.left = `${x * 100}%`;
    tip.replaceChildren(make("b", "", title), ...values.map(([css, name, text]) => {
      const line = make("div", css);
      line.append(make("i", ""), make("span", "", name), make("span", "", text));
      return line;
    }));
    cursor.hidden = tip.hidden = false;
    const room = plot.clientWidth, place = x * room;
    const left = place + 14 + tip.offsetWidth <= room ? place + 14 : place - 14 - tip.offsetWidth;
    tip.style.left = `${Math.max(Math.min(left, room - tip.offsetWidth), -40)}px`;
  };
  const nearest = (event) => {
    const box = plot.getBoundingClientRect(), at = (event.clientX - box.left) / box.width;
    let best = 0;
    rows.forEach(([x], i) => { if (Math.abs(x - at) < Math.abs(rows[best][0] - at)) best = i; });
    show(best);
  };
  plot.addEventListener("pointermove", nearest);
  plot.addEventListener("pointerdown", nearest);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -rows.length, End: rows.length };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    const from = current < 0 ? (moves[event.key] > 0 ? -1 : rows.length) : current;
    show(Math.max(0, Math.min(rows.length - 1, from + moves[event.key])));
  });
}
