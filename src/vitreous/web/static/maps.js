// Maps drawn in the browser from raw scores: sign, threshold, opacity and wipe need no request to the server.
"use strict";
window.vitreousMaps = (() => {
  const FIELD = 320; // pixels of the longer side of an interpolated map

  // Numbers arrive as base64: float32, or 16 bits between the lowest and the highest score for maps of many values.
  function decode(map) {
    const bytes = Uint8Array.from(atob(map.data), (one) => one.charCodeAt(0));
    if (map.type === "f4") return new Float32Array(bytes.buffer);
    const steps = new Uint16Array(bytes.buffer);
    return Float32Array.from(steps, (one) => map.low + (one / 65535) * (map.high - map.low));
  }

  // Where the cells of a map begin and end, as parts of what the model sees.
  function edgesOf(count, given) {
    if (given && given.length === count) return given;
    return Array.from({ length: count }, (_, number) => [number / count, (number + 1) / count]);
  }

  function cellAt(edges, place) {
    for (let number = 0; number < edges.length; number += 1) if (place < edges[number][1]) return number;
    return edges.length - 1;
  }

  // For every pixel along an axis: the two cells between whose centres it lies, and how near it is to the second.
  function weights(edges, size, smooth) {
    const centres = edges.map(([low, high]) => (low + high) / 2);
    return Array.from({ length: size }, (_, pixel) => {
      const place = (pixel + 0.5) / size;
      if (!smooth) { const cell = cellAt(edges, place); return [cell, cell, 0]; }
      let next = centres.findIndex((centre) => centre > place);
      if (next === 0) return [0, 0, 0];
      if (next < 0) return [centres.length - 1, centres.length - 1, 0];
      return [next - 1, next, (place - centres[next - 1]) / (centres[next] - centres[next - 1])];
    });
  }

  // Scores at every pixel; kept until smoothness changes.
  function field(map, smooth, aspect) {
    map.fields = map.fields || {};
    const key = `${smooth}`;
    if (map.fields[key]) return map.fields[key];
    const width = aspect >= 1 ? FIELD : Math.max(1, Math.round(FIELD * aspect));
    const height = aspect >= 1 ? Math.max(1, Math.round(FIELD / aspect)) : FIELD;
    const down = weights(map.rowEdges, height, smooth), across = weights(map.columnEdges, width, smooth);
    const values = new Float32Array(width * height), scores = map.scores, columns = map.columns;
    for (let y = 0, at = 0; y < height; y += 1) {
      const [r0, r1, dy] = down[y];
      for (let x = 0; x < width; x += 1, at += 1) {
        const [c0, c1, dx] = across[x];
        const upper = scores[r0 * columns + c0] * (1 - dx) + scores[r0 * columns + c1] * dx;
        const lower = scores[r1 * columns + c0] * (1 - dx) + scores[r1 * columns + c1] * dx;
        values[at] = upper * (1 - dy) + lower * dy;
      }
    }
    return (map.fields[key] = { values, width, height });
  }

  function prepare(map, view) {
    map.scores = decode(map);
    map.rowEdges = edgesOf(map.rows, map.rows === view.grid[0] ? view.edges.rows : null);
    map.columnEdges = edgesOf(map.columns, map.columns === view.grid[1] ? view.edges.columns : null);
    // Signed maps are scaled around zero, others from zero, or from the lowest score if none is above zero.
    map.zero = map.signed || map.high > 0 ? 0 : Math.min(0, map.low);
    map.span = map.signed ? Math.max(Math.abs(map.low), Math.abs(map.high)) : map.high - map.zero;
    return map;
  }

  // The strength of a score on the colour scale, in [-1, 1]; 0 where settings hide it.
  function strength(map, score, settings) {
    if (!(map.span > 0)) return 0;
    const value = (score - map.zero) / map.span;
    if (Math.abs(value) < settings.threshold || (!map.signed && value < 0)) return 0;
    if (map.signed && settings.sign === "for" && value < 0) return 0;
    if (map.signed && settings.sign === "against" && value > 0) return 0;
    return value;
  }

  function coloured(map, settings, aspect, tables) {
    const { values, width, height } = field(map, settings.smooth, aspect);
    const picture = new ImageData(width, height), pixels = picture.data;
    const table = map.signed ? tables.signed : tables.unsigned;
    for (let at = 0; at < values.length; at += 1) {
      const value = Math.max(-1, Math.min(1, strength(map, values[at], settings)));
      if (value === 0) continue;
      const place = 3 * Math.round(map.signed ? ((value + 1) / 2) * 255 : value * 255);
      pixels[4 * at] = table[place];
      pixels[4 * at + 1] = table[place + 1];
      pixels[4 * at + 2] = table[place + 2];
      pixels[4 * at + 3] = 255 * settings.opacity * Math.pow(Math.abs(value), 0.65);
    }
    const canvas = document.createElement("canvas");
    canvas.width = width; canvas.height = height;
    canvas.getContext("2d").putImageData(picture, 0, 0);
    return canvas;
  }

  // The part of the photo that is shown, and where in it the model looks, both in pixels of the photo.
  function region(view, settings) {
    const frame = view.photo.frame;
    if (settings.context) return { left: 0, top: 0, width: view.photo.width, height: view.photo.height };
    return { left: frame[0], top: frame[1], width: frame[2] - frame[0], height: frame[3] - frame[1] };
  }

  // Draw the photo, or a map over it, to fit the width of a canvas.
  function draw(canvas, view, map, settings, tables, cssWidth) {
    const shown = region(view, settings), frame = view.photo.frame;
    const density = Math.min(2, window.devicePixelRatio || 1);
    const scale = (cssWidth * density) / shown.width;
    canvas.width = Math.max(1, Math.round(cssWidth * density));
    canvas.height = Math.max(1, Math.round(shown.height * scale));
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    const photo = (filter) => {
      context.filter = filter;
      context.drawImage(view.image, shown.left, shown.top, shown.width, shown.height, 0, 0, canvas.width, canvas.height);
      context.filter = "none";
    };
    const left = (frame[0] - shown.left) * scale, top = (frame[1] - shown.top) * scale;
    const width = (frame[2] - frame[0]) * scale, height = (frame[3] - frame[1]) * scale;
    if (!map) {
      photo("none");
    } else {
      const wiped = settings.wipe * canvas.width;
      photo("saturate(0.45) brightness(0.82)");
      const layer = coloured(map, settings, width / height, tables);
      context.imageSmoothingEnabled = settings.smooth;
      context.drawImage(layer, left, top, width, height);
      context.imageSmoothingEnabled = true;
      if (wiped > 0) {
        context.save();
        context.beginPath();
        context.rect(0, 0, wiped, canvas.height);
        context.clip();
        photo("none");
        context.restore();
        context.fillStyle = "#fff";
        context.fillRect(wiped - density, 0, 2 * density, canvas.height);
      }
    }
    if (settings.context && (width < canvas.width - 1 || height < canvas.height - 1)) {
      context.fillStyle = "rgb(0 0 0 / .55)"; // what the model does not see
      context.beginPath();
      context.rect(0, 0, canvas.width, canvas.height);
      context.rect(left, top, width, height);
      context.fill("evenodd");
    }
  }

  // The cell of a map under a place of a tile; null outside of what the model sees.
  function locate(view, map, settings, x, y) {
    const shown = region(view, settings), frame = view.photo.frame;
    const across = (shown.left + x * shown.width - frame[0]) / (frame[2] - frame[0]);
    const down = (shown.top + y * shown.height - frame[1]) / (frame[3] - frame[1]);
    if (across < 0 || across >= 1 || down < 0 || down >= 1) return null;
    const row = cellAt(map.rowEdges, down), column = cellAt(map.columnEdges, across);
    return { row, column, score: map.scores[row * map.columns + column] };
  }

  return { prepare, draw, locate, strength, region };
})();
