// Plays a recorded run (docs/data/traces/README.md) moment by moment. Data: window.FLEDGE_TRACES.
(function () {
  "use strict";
  var box = document.getElementById("fledge-player");
  var traces = window.FLEDGE_TRACES || {}, draw = window.fledgeDraw;
  if (!box || !Object.keys(traces).length) return;
  var LOOK = ["prefill", "draft prefill", "forward", "draft", "verify", "draft extend"];
  var state = { trace: null, request: 0, at: 0, scenes: [] };

  function html(name, className, text) {
    var node = document.createElement(name);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }

  // ---- what there is to see ----

  function levels(entry) {
    var found = entry.candidates, depth = [];
    if (!found) return 0;
    found.parents.forEach(function (parent, i) { depth[i] = parent < 0 ? 1 : depth[parent] + 1; });
    return Math.max.apply(null, depth);
  }

  function scenesOf(trace, request) {
    var scenes = [], written = [], cache = [], round = 0;
    trace.steps.forEach(function (step, number) {
      if (step.cache) cache = step.cache;
      step.requests.forEach(function (entry) {
        if (entry.request !== request) return;
        var base = { step: step, number: number, entry: entry, before: written.slice(), cache: cache };
        function add(kind, more) { scenes.push(Object.assign({ kind: kind, round: round }, base, more)); }
        if (step.kind === "verify") {
          round += 1;
          for (var level = 1, all = levels(entry); level <= all; level++) add("draft", { level: level });
          add("choose");
          add("verify");
          add("commit");
        } else {
          add(step.kind);
        }
        written = written.concat(entry.tokens);
      });
    });
    return scenes;
  }

  function phases(step) {
    var found = {}, used = 0;
    step.phases.forEach(function (phase) {
      if (LOOK.indexOf(phase.name) < 0) return;
      var span = phase.device_us || [phase.start_us, phase.end_us];
      found[phase.name] = (found[phase.name] || 0) + span[1] - span[0];
      used += span[1] - span[0];
    });
    var parts = Object.keys(found).map(function (name) { return { name: name, us: found[name] }; });
    parts.push({ name: "host", us: Math.max(0, step.end_us - step.start_us - used) });
    return parts;
  }

  function piece(token) { return state.trace.pieces[String(token)]; }
  function say(token) { return "“" + draw.shown(piece(token)) + "”"; }
  function count(number, what) { return number + " " + what + (number === 1 ? "" : "s"); }

  // ---- one scene in words: the text equivalent, and what the screen reader says ----

  function words(scene) {
    var entry = scene.entry, step = scene.step;
    if (scene.kind === "prefill") {
      return "Prefill: " + entry.cached + " positions were in the prefix cache, the target runs over " +
        (entry.seq_len - entry.cached) + (entry.tokens.length ? " and says " + say(entry.tokens[0]) + "." :
        "; the prompt goes on in the next step.");
    }
    if (scene.kind === "decode") return "Plain decoding: one forward, one token, " + say(entry.tokens[0]) + ".";
    var lead = "Round " + scene.round + ". ", found = entry.candidates, accepted = entry.path.length - 1;
    if (scene.kind === "draft") {
      var counted = countLevels(found);
      if (scene.level === 1) {
        return lead + "Level 1: " + counted[1] + " proposals behind " + say(entry.tree[0]) +
          ". They cost nothing now: the draft extend of the step before made them.";
      }
      return lead + "Draft forward " + (scene.level - 1) + ": each of the " + beams(found, scene.level - 1).length +
        " best proposals of level " + (scene.level - 1) + " gets children, " + counted[scene.level] +
        " in all. A number is the product of probabilities from the root.";
    }
    if (scene.kind === "choose") {
      return lead + (found ? "Of " + found.tokens.length + " proposals the best " + (entry.tree.length - 1) +
        " stay; with the root that makes " : "The tree has ") + count(entry.tree.length, "node") +
        ". " + (entry.draft_slots.length ? "The drafts' scratch slots are given back, and " : "For the target ") +
        entry.slots.length + (entry.reserved ? " of the reserved slots are" : " slots are taken") + " to verify in.";
    }
    if (scene.kind === "verify") {
      return lead + "One target forward over " + count(entry.tree.length, "node") +
        ". Each sees the prefix, itself and its ancestors. From the root on, the walk goes to the child that is " +
        "what the target says: " + (accepted ? count(accepted, "draft") + " accepted." : "no draft accepted.");
    }
    var texts = entry.tokens.map(say).join(" "), given = entry.slots.length - entry.kept_slots.length;
    var ended = entry.tokens.length < entry.path.length ? " The answer ended inside the run." : "";
    return lead + count(entry.tokens.length, "token") + ": " + texts + "." + ended + " " + count(entry.kept_slots.length, "slot") +
      " kept, " + given + rest(entry) + ". The round took " + draw.duration(step.end_us - step.start_us) + ".";
  }

  // What becomes of the slots that a round does not keep.
  function rest(entry) { return entry.reserved ? " stay reserved" : " given back"; }

  function depths(found) {
    var depth = [];
    found.parents.forEach(function (parent, i) { depth[i] = parent < 0 ? 1 : depth[parent] + 1; });
    return depth;
  }

  function countLevels(found) {
    var counted = {};
    depths(found).forEach(function (depth) { counted[depth] = (counted[depth] || 0) + 1; });
    return counted;
  }

  function beams(found, level) {
    var depth = depths(found), has = {};
    found.parents.forEach(function (parent) { if (parent >= 0 && depth[parent] === level) has[parent] = true; });
    return Object.keys(has).map(Number);
  }

  // ---- pictures ----

  function growing(scene, width) {
    var entry = scene.entry, found = entry.candidates, depth = depths(found), place = {}, nodes = [];
    var goesOn = {};
    found.parents.forEach(function (parent) { if (parent >= 0) goesOn[parent] = true; });
    nodes.push({ parent: -1, text: piece(entry.tree[0]), state: "root", title: "the last output token" });
    found.tokens.forEach(function (token, i) {
      if (depth[i] > scene.level) return;
      place[i] = nodes.length;
      var isBeam = depth[i] < scene.level && goesOn[i];
      nodes.push({ parent: found.parents[i] < 0 ? 0 : place[found.parents[i]], text: piece(token),
        score: found.scores[i], state: isBeam ? "beam" : "leaf" });
    });
    return draw.tree(nodes, width, "The draft tree at level " + scene.level);
  }

  function chosen(scene, width) {
    var entry = scene.entry, found = entry.candidates, isWalked = scene.kind !== "choose";
    var nodes = entry.tree.map(function (token, i) {
      var onPath = entry.path.indexOf(i) >= 0;
      var node = { parent: entry.parents[i], text: piece(token), state: i === 0 ? "root" : "node" };
      if (found && i > 0) node.score = found.scores[found.nodes[i]];
      if (isWalked && i > 0) node.state = onPath ? "accepted" : "rejected";
      return node;
    });
    var last = entry.path[entry.path.length - 1];
    if (isWalked && entry.tokens.length === entry.path.length) {
      nodes.push({ parent: last, text: piece(entry.tokens[entry.tokens.length - 1]), state: "bonus",
        title: "the target's own token" });
    }
    return draw.tree(nodes, width, "The tree that is verified");
  }

  function slotRows(scene) {
    var entry = scene.entry, rows = [];
    function all(ids, stateOf) {
      return ids.map(function (id) { return { id: id, state: typeof stateOf === "string" ? stateOf : stateOf(id) }; });
    }
    if (scene.kind === "decode") return [{ name: "taken, kept", slots: all(entry.slots, "kept") }];
    if (scene.kind === "draft") return [{ name: "drafts’ scratch", slots: all(entry.draft_slots, "scratch") }];
    if (scene.kind === "choose" && entry.draft_slots.length) {
      rows.push({ name: "given back", slots: all(entry.draft_slots, "free") });
    }
    if (scene.kind !== "commit") rows.push({ name: entry.reserved ? "verify, reserved" : "verify, taken", slots: all(entry.slots, "taken") });
    if (scene.kind === "commit") {
      rows.push({ name: "kept, in order", slots: all(entry.kept_slots, "kept") });
      rows.push({ name: rest(entry).trim(), slots: all(entry.slots.filter(function (id) {
        return entry.kept_slots.indexOf(id) < 0;
      }), "free") });
    }
    return rows;
  }

  function cacheList(cache) {
    var lists = [], top = html("ul", "cache");
    cache.forEach(function (edge, i) {
      var item = html("li"), text = edge.tokens.map(function (t) { return draw.shown(piece(t)); }).join("");
      var line = html("span", edge.users ? "edge used" : "edge");
      line.appendChild(html("code", "", text.length > 64 ? text.slice(0, 30) + " … " + text.slice(-30) : text));
      line.appendChild(document.createTextNode(" " + count(edge.tokens.length, "entr").replace(/entr$/, "entry")
        .replace(/entrs$/, "entries") + (edge.users ? ", in use by " + edge.users : ", may be evicted")));
      item.appendChild(line);
      lists[i] = html("ul");
      item.appendChild(lists[i]);
      (edge.parent < 0 ? top : lists[edge.parent]).appendChild(item);
    });
    return cache.length ? top : html("p", "", "empty");
  }

  // ---- the page ----

  var parts = {};
  ["controls", "words", "text", "tree", "side", "note"].forEach(function (name) {
    parts[name] = box.appendChild(html("div", "part " + name));
  });
  parts.words.setAttribute("aria-live", "polite");
  var panels = {};
  [["mask", "Tree mask"], ["slots", "Slots"], ["times", "Time of this round"], ["cache", "Prefix cache"]].forEach(
    function (panel) {
      var holder = parts.side.appendChild(html("section"));
      holder.appendChild(html("h3", "", panel[1]));
      panels[panel[0]] = holder.appendChild(html("div"));
    });

  function fill(holder, child) {
    holder.textContent = "";
    if (child) holder.appendChild(child);
    holder.parentNode.hidden = holder.parentNode.tagName === "SECTION" && !child;
  }

  function answer(scene) {
    var holder = html("p", "answer");
    holder.appendChild(html("b", "", state.trace.requests[state.request].prompt + " "));
    scene.before.forEach(function (token) { holder.appendChild(html("span", "", piece(token))); });
    if (scene.kind !== "draft" && scene.kind !== "choose" && scene.kind !== "verify") {
      scene.entry.tokens.forEach(function (token, i) {
        var isOwn = scene.kind !== "commit" || i === scene.entry.path.length - 1;
        holder.appendChild(html("span", isOwn ? "new own" : "new", piece(token)));
      });
    }
    return holder;
  }

  function show() {
    var scene = state.scenes[state.at], entry = scene.entry, isRound = scene.step.kind === "verify";
    var wide = parts.tree.clientWidth || 320, side;
    parts.words.textContent = words(scene);
    fill(parts.text, answer(scene));
    fill(parts.tree, !isRound ? null : scene.kind === "draft" ? growing(scene, wide) : chosen(scene, wide));
    side = panels.times.clientWidth || Math.min(wide, 420);
    var names = isRound ? entry.tree.map(piece) : [];
    fill(panels.mask, isRound && scene.kind !== "draft" ?
      draw.mask(names, entry.parents, scene.kind === "choose" ? null : entry.path, side, "Tree mask") : null);
    fill(panels.slots, scene.kind === "prefill" ? null : draw.slots(slotRows(scene), side, "Slots"));
    if (panels.slots.firstChild) {
      panels.slots.appendChild(html("p", "note", "free after the step: " + scene.step.free.toLocaleString("en")));
    }
    var split = phases(scene.step), total = scene.step.end_us - scene.step.start_us;
    var summed = split.reduce(function (sum, part) { return sum + part.us; }, 0);
    fill(panels.times, draw.times(split, Math.max(total, summed), side, "Time by phase"));
    fill(panels.cache, cacheList(scene.cache));
    place.max = state.scenes.length - 1;
    place.value = state.at;
    where.textContent = (state.at + 1) + " / " + state.scenes.length;
    box.setAttribute("data-at", state.at);
    box.setAttribute("data-scenes", state.scenes.length);
  }

  function go(at) {
    state.at = Math.max(0, Math.min(state.scenes.length - 1, at));
    show();
  }

  function goRound(by) {
    var at = state.at, number = state.scenes[at].number;
    while (state.scenes[at + by] && state.scenes[at].number === number) at += by;
    if (by < 0) while (state.scenes[at - 1] && state.scenes[at - 1].number === state.scenes[at].number) at -= 1;
    go(at);
  }

  function open(name, request) {
    state.trace = traces[name];
    parts.note.textContent = state.trace.about;
    state.request = request;
    state.scenes = scenesOf(state.trace, request);
    go(0);
  }

  var place, where, ACTIONS = [
    ["Home", "|◀", "first moment", function () { go(0); }],
    ["PageUp", "◀◀", "round before", function () { goRound(-1); }],
    ["ArrowLeft", "◀", "moment before", function () { go(state.at - 1); }],
    ["ArrowRight", "▶", "next moment", function () { go(state.at + 1); }],
    ["PageDown", "▶▶", "next round", function () { goRound(1); }],
    ["End", "▶|", "last moment", function () { go(state.scenes.length - 1); }]
  ];

  function controls() {
    ACTIONS.forEach(function (action) {
      var button = parts.controls.appendChild(html("button", "", action[1] + "\ufe0e"));
      button.type = "button";
      button.title = action[2] + " (" + action[0] + ")";
      button.setAttribute("aria-label", action[2]);
      button.addEventListener("click", action[3]);
    });
    place = parts.controls.appendChild(html("input"));
    place.type = "range";
    place.min = 0;
    place.setAttribute("aria-label", "moment");
    place.addEventListener("input", function () { go(Number(place.value)); });
    where = parts.controls.appendChild(html("span", "where"));
    var choice = parts.controls.appendChild(html("select"));
    choice.setAttribute("aria-label", "recording and request");
    Object.keys(traces).forEach(function (name) {
      traces[name].requests.forEach(function (request, i) {
        var option = choice.appendChild(html("option", "", name + ": " + (request.prompt || "request " + i)));
        option.value = name + " " + i;
      });
    });
    choice.addEventListener("change", function () {
      var chosen = choice.value.split(" ");
      open(chosen[0], Number(chosen[1]));
    });
    document.addEventListener("keydown", function (event) {
      var target = event.target, tag = target && target.tagName;
      if (event.altKey || event.ctrlKey || event.metaKey || tag === "SELECT" || tag === "TEXTAREA") return;
      if (tag === "INPUT" && target !== place) return;
      ACTIONS.forEach(function (action) {
        if (action[0] !== event.key) return;
        event.preventDefault();
        event.stopPropagation();
        action[3]();
      });
    }, true);
  }

  controls();
  open(Object.keys(traces)[0], 0);
  // What the page is about, at once: a tree with more than one draft accepted. Home goes to the beginning.
  go(state.scenes.findIndex(function (scene) { return scene.kind === "verify" && scene.entry.path.length > 2; }));
  window.addEventListener("resize", show);
})();
