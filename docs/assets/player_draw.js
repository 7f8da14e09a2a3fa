// Draws one moment of a recorded run as SVG: the draft tree, the mask, slots and times. No state of its own.
(function () {
  "use strict";
  var NS = "http://www.w3.org/2000/svg";
  var CHAR = 6.7, ROW = 21, PILL = 17; // px: width of a character, height of a row and of a node

  function el(name, attributes, children) {
    var node = document.createElementNS(NS, name);
    Object.keys(attributes || {}).forEach(function (key) { node.setAttribute(key, attributes[key]); });
    (children || []).forEach(function (child) {
      node.appendChild(typeof child === "string" ? document.createTextNode(child) : child);
    });
    return node;
  }

  function picture(width, height, label, children) {
    return el("svg", { width: width, height: height, viewBox: "0 0 " + width + " " + height, role: "img",
      "aria-label": label }, children);
  }

  // A token as it can be seen: spaces and line ends have a sign.
  function shown(piece) {
    return piece.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");
  }

  function cut(text, most) {
    return text.length <= most ? text : text.slice(0, Math.max(1, most - 1)) + "…";
  }

  function percent(p) {
    if (p >= 0.0995) return Math.round(p * 100) + "%";
    return p >= 0.00095 ? (p * 100).toFixed(1) + "%" : "<0.1%";
  }

  // nodes: [{parent, text, score, state, title}], parents first, parent -1 for the root.
  // state is a class: "root", "beam", "leaf", "node", "accepted", "rejected", "bonus".
  function tree(nodes, width, label) {
    var depth = [], children = nodes.map(function () { return []; }), deepest = 0, next = 0, y = [];
    nodes.forEach(function (node, i) {
      depth[i] = node.parent < 0 ? 0 : depth[node.parent] + 1;
      deepest = Math.max(deepest, depth[i]);
      if (node.parent >= 0) children[node.parent].push(i);
    });
    function place(i) {
      children[i].forEach(place);
      var below = children[i];
      y[i] = below.length ? (y[below[0]] + y[below[below.length - 1]]) / 2 : ROW * (next++ + 0.5);
    }
    nodes.forEach(function (node, i) { if (node.parent < 0) place(i); });
    var gap = width < 500 ? 9 : 26, column = (width + gap) / (deepest + 1);
    var room = Math.floor((Math.min(column - gap, 190) - 8) / CHAR);
    var edges = [], pills = [], ends = [];
    nodes.forEach(function (node, i) {
      var score = node.score === undefined ? "" : " " + percent(node.score);
      var mark = node.state === "accepted" ? "✓" : node.state === "bonus" ? "★" : "";
      var text = mark + cut(shown(node.text), Math.max(2, room - score.length - mark.length));
      var x = depth[i] * column, w = (text + score).length * CHAR + 8;
      ends[i] = x + w;
      if (node.parent >= 0) {
        var from = ends[node.parent], mid = (from + x) / 2;
        edges.push(el("path", { "class": "edge " + node.state,
          d: "M" + from + " " + y[node.parent] + "C" + mid + " " + y[node.parent] + " " + mid + " " + y[i] + " " +
            x + " " + y[i] }));
      }
      var shade = node.score === undefined ? 0.3 : 0.06 + 0.6 * node.score;
      pills.push(el("g", { "class": "pill " + node.state }, [
        el("title", {}, [node.title || shown(node.text) + score]),
        el("rect", { x: x, y: y[i] - PILL / 2, width: w, height: PILL, rx: 5, style: "--shade:" + shade.toFixed(3) }),
        el("text", { x: x + 4, y: y[i] + 4 }, [text, el("tspan", { "class": "score" }, [score])])
      ]));
    });
    return picture(width, Math.max(1, next) * ROW, label, edges.concat(pills));
  }

  // Who sees whom: rows ask, columns are seen; the first column stands for all of the prefix.
  function mask(texts, parents, path, width, label) {
    var n = texts.length, legend = Math.min(90, width * 0.28), cell = Math.min(24, (width - legend) / (n + 2.6));
    var top = 16, parts = [];
    var onPath = function (i) { return path && path.indexOf(i) >= 0; };
    parts.push(el("text", { x: legend, y: 11, "class": "small" }, ["prefix"]));
    for (var row = 0; row < n; row++) {
      var seen = {}, up = row;
      while (up >= 0) { seen[up] = true; up = parents[up]; }
      var y = top + row * cell;
      parts.push(el("text", { x: 0, y: y + cell * 0.68, "class": onPath(row) ? "name accepted" : "name" },
        [row + " " + cut(shown(texts[row]), Math.floor(legend / CHAR) - 3)]));
      parts.push(el("rect", { x: legend, y: y + 1, width: cell * 2 - 2, height: cell - 2, rx: 2, "class": "cell seen" }));
      for (var other = 0; other < n; other++) {
        parts.push(el("rect", { x: legend + (other + 2.3) * cell, y: y + 1, width: cell - 2, height: cell - 2, rx: 2,
          "class": "cell" + (seen[other] ? " seen" : "") + (onPath(row) && seen[other] ? " accepted" : "") }));
      }
    }
    for (var c = 0; c < n; c++) {
      parts.push(el("text", { x: legend + (c + 2.8) * cell - 1, y: 11, "class": "small middle" }, [String(c)]));
    }
    return picture(width, top + n * cell + 2, label, parts);
  }

  // rows: [{name, slots: [{id, state}]}]; states are classes: "scratch", "taken", "kept", "free".
  function slots(rows, width, label) {
    var legend = Math.min(118, width * 0.34), box = 31, high = 19, parts = [], y = 0;
    var perLine = Math.max(2, Math.floor((width - legend) / (box + 2)));
    rows.forEach(function (row) {
      parts.push(el("text", { x: 0, y: y + 13, "class": "name" }, [row.name]));
      row.slots.forEach(function (slot, i) {
        var x = legend + (i % perLine) * (box + 2), line = y + Math.floor(i / perLine) * (high + 2);
        parts.push(el("rect", { x: x, y: line, width: box, height: high, rx: 3, "class": "slot " + slot.state }));
        parts.push(el("text", { x: x + box / 2, y: line + 13, "class": "small middle slot-" + slot.state },
          [String(slot.id)]));
      });
      y += Math.max(1, Math.ceil(row.slots.length / perLine)) * (high + 2) + 7;
    });
    return picture(width, Math.max(y, 1), label, parts);
  }

  // parts: [{name, us}]; one bar, and a line of text for each part.
  function times(parts, scale, width, label) {
    var x = 0, drawn = [], line = 0;
    parts.forEach(function (part) {
      var w = Math.max(1, part.us / scale * width), kind = "time " + part.name.replace(/ /g, "-");
      drawn.push(el("rect", { x: x, y: 0, width: Math.max(0.5, w - 1), height: 16, "class": kind }));
      drawn.push(el("rect", { x: 0, y: 26 + line * 18, width: 11, height: 11, "class": kind }));
      drawn.push(el("text", { x: 18, y: 36 + line * 18, "class": "name" }, [part.name + "  " + duration(part.us)]));
      x += w;
      line += 1;
    });
    return picture(width, 28 + line * 18, label, drawn);
  }

  function duration(us) {
    return us >= 1000 ? (us / 1000).toFixed(2) + " ms" : Math.round(us) + " µs";
  }

  window.fledgeDraw = { tree: tree, mask: mask, slots: slots, times: times, shown: shown, percent: percent,
    duration: duration };
})();
