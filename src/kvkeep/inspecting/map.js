// Layers by positions on a canvas: one column a pixel, several positions where they are many.
const canvas = element("map");
const MARGIN = { left: 34, top: 6, bottom: 20 };
const picture = document.createElement("canvas");
let box = { width: 0, height: 0, row: 0 };

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const channels = (name) => colour(name).split(/\s+/).map(Number);

function hexChannels(name) {
  const hex = colour(name).slice(1);
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// The whole map anew, into a picture of one pixel a row.
function renderMap() {
  const wide = Math.max(120, Math.floor(canvas.clientWidth) - MARGIN.left - 2);
  const row = Math.min(22, Math.max(4, Math.floor((wide < 420 ? 220 : 360) / layers.length)));
  box = { width: wide, height: row * layers.length, row };
  const scale = window.devicePixelRatio || 1;
  const columns = Math.min(length, Math.round(wide * scale));
  picture.width = columns;
  picture.height = layers.length;
  const context = picture.getContext("2d");
  const image = context.createImageData(columns, layers.length);
  const [paper, kept, gone] = [hexChannels("--panel"), channels("--kept"), channels("--gone")];
  let out = 0;
  layers.forEach((layer, at) => {
    const there = setsOf(layer, state.head).length > 0;
    for (let column = 0; column < columns; column++) {
      const [start, stop] = span(column, columns);
      let shade = 0;
      let share = 0;
      for (let t = start; t < stop; t++) {
        if (shades[at][t] > shade) shade = shades[at][t];
        share += shares[at][t];
      }
      share /= stop - start;
      const veil = there ? 0.06 + 0.3 * share + (0.44 + 0.2 * share) * shade * shade : 0;
      for (let c = 0; c < 3; c++) {
        const ink = gone[c] + (kept[c] - gone[c]) * share;
        image.data[out++] = paper[c] + (ink - paper[c]) * veil;
      }
      image.data[out++] = 255;
    }
  });
  context.putImageData(image, 0, 0);
  canvas.style.height = `${box.height + MARGIN.top + MARGIN.bottom}px`;
  canvas.width = Math.round((wide + MARGIN.left + 2) * scale);
  canvas.height = Math.round((box.height + MARGIN.top + MARGIN.bottom) * scale);
  drawMap();
}

function span(column, columns) {
  const start = Math.floor((column * length) / columns);
  return [start, Math.max(start + 1, Math.floor(((column + 1) * length) / columns))];
}

const across = (position) => MARGIN.left + (position / length) * box.width;

// The picture, and what moves over it: axes, the text in view, the layer, the token.
function drawMap() {
  if (!box.width) return;
  const scale = window.devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = false;
  context.drawImage(picture, MARGIN.left, MARGIN.top, box.width, box.height);
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour("--muted");
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.max(1, Math.ceil(14 / box.row));
  layers.forEach((layer, at) => {
    if (at % every) return;
    context.fillText(layer.index, MARGIN.left - 7, MARGIN.top + (at + 0.5) * box.row);
  });
  context.textBaseline = "top";
  for (let tick = 0; tick <= 4; tick++) {
    context.textAlign = tick === 0 ? "left" : tick === 4 ? "right" : "center";
    const position = Math.round(((length - 1) * tick) / 4);
    const x = MARGIN.left + (box.width * tick) / 4;
    context.fillText(counted(position), x, MARGIN.top + box.height + 5);
  }
  const seen = chunks.filter((chunk) => chunk.seen);
  if (seen.length) {
    const first = across(seen[0].units[0].start);
    const last = across(Math.min(seen[seen.length - 1].units.at(-1).stop, length));
    context.fillRect(first, 0, Math.max(2, last - first), 3);
  }
  context.fillStyle = `rgb(${colour("--kept")})`;
  if (state.layer >= 0) {
    context.fillRect(MARGIN.left - 4, MARGIN.top + state.layer * box.row, 3, box.row);
  }
  if (state.unit >= 0 && units[state.unit].start < length) {
    context.fillStyle = colour("--focus");
    const x = across(units[state.unit].start);
    context.fillRect(Math.min(x, MARGIN.left + box.width - 1.5), MARGIN.top, 1.5, box.height);
    if (document.activeElement === canvas) {
      context.strokeStyle = colour("--focus");
      const top = MARGIN.top + state.row * box.row;
      context.strokeRect(MARGIN.left + 0.5, top + 0.5, box.width - 1, box.row - 1);
    }
  }
}

// The layer and the position under a pointer: of several, the one that the colour shows.
function under(event) {
  const place = canvas.getBoundingClientRect();
  const x = event.clientX - place.left - MARGIN.left;
  const y = event.clientY - place.top - MARGIN.top;
  if (x < 0 || x >= box.width || y < 0 || y >= box.height) return null;
  const at = Math.min(layers.length - 1, Math.floor(y / box.row));
  const columns = picture.width;
  const [start, stop] = span(Math.floor((x / box.width) * columns), columns);
  let best = start;
  for (let t = start; t < stop; t++) if (shades[at][t] > shades[at][best]) best = t;
  return { at, position: best };
}
