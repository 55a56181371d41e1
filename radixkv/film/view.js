// Plays a film of a prefix cache: a slider, a caption, the picture, and what the cache counted along the way.
//
// One file for a page (`openPage`, which the page calls) and for a notebook (`render`, which anywidget calls). Text goes
// into the document as text and never as markup. Pictures are parsed as XML, so a broken one is an error and not a guess.

const SVG = "http://www.w3.org/2000/svg";
const SPEEDS = [1, 2, 4, 8, 16]; // pictures a second
const MANY_STEPS = 24; // buttons in the panel of a node
const MANY_CHAPTERS = 60; // more lines than these would hide the course behind them

// ------------------------------------------------------------------------------------------------ data

/** The film that Python packed: base64 of gzipped JSON. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** The picture of a frame as a string: whole if it came alone, else put together from the film's pieces. */
function pictureOf(film, frame) {
  if (typeof frame.picture === "string") return frame.picture;
  return frame.picture.map((index) => film.pieces[index]).join("");
}

const hitRate = ({ meters }) => (meters.prompt_tokens ? meters.hit_tokens / meters.prompt_tokens : null);
const counted = (number) => number.toLocaleString("en");
const percent = (share) => (share === null ? "–" : `${(100 * share).toFixed(1)}%`);

// ------------------------------------------------------------------------------------------------ elements

/** An element with attributes and children; strings become text. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null) made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** The same for SVG. */
function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

/** The drawing in a string, as an element of this document. */
function parsed(svg) {
  const drawing = new DOMParser().parseFromString(svg, "image/svg+xml").documentElement;
  if (drawing.nodeName !== "svg") throw new Error("a picture of this film is not well-formed");
  return document.importNode(drawing, true);
}

// ------------------------------------------------------------------------------------------------ the player

/**
 * Puts a player into `root` and shows a frame (the first, unless `options.at` says another).
 * Gives back { show, append, end }: go to a frame, add one that came later, stop.
 */
function play(root, film, options = {}) {
  let at = -1;
  let opened = null; // serial of the node whose panel is open
  let timer = null;

  const playButton = element("button", { class: "play", type: "button", onclick: () => toggle() }, "▶ Play");
  const speed = element("select", { class: "speed", "aria-label": "Pictures a second" });
  for (const value of SPEEDS) speed.append(element("option", { value }, `${value}/s`));
  speed.value = "2";
  const where = element("span", { class: "where" });
  const chapters = element("select", { class: "chapters", "aria-label": "Go to chapter", onchange: toChapter });
  const slider = element("input", {
    type: "range", min: 0, step: 1, value: 0, "aria-label": "Step", oninput: () => show(Number(slider.value)),
  });
  const numbers = element("div", { class: "numbers" });
  const course = element("div", { class: "course", onpointerdown: seek, onpointermove: (e) => e.buttons && seek(e) });
  const caption = element("div", { class: "caption", "aria-live": "polite" });
  const stage = element("div", { class: "stage", onclick: openNode, onkeydown: openNode });
  const panel = element("aside", { class: "panel", hidden: "", "aria-label": "Node" });
  const step = (label, text, move) =>
    element("button", { type: "button", "aria-label": label, title: label, onclick: () => show(move()) }, text);

  root.replaceChildren(
    element("div", { class: "controls" },
      playButton,
      step("First", "«", () => 0),
      step("Back", "◀", () => at - 1),
      step("Forward", "▶", () => at + 1),
      step("Last", "»", () => film.frames.length - 1),
      speed, where, element("span", { class: "grow" }), chapters),
    numbers,
    element("div", {}, course, slider),
    caption,
    element("div", { class: "scene" }, stage, panel),
  );
  root.addEventListener("keydown", onKey);
  if (options.keys) options.keys.addEventListener("keydown", onKey);

  function show(index) {
    at = Math.max(0, Math.min(film.frames.length - 1, index));
    const frame = film.frames[at];
    if (!frame) return;
    slider.value = String(at);
    slider.setAttribute("aria-valuetext", frame.sentences.join(" "));
    where.textContent = `Picture ${at + 1} of ${film.frames.length}`;
    chapters.value = String(frame.chapter);
    showNumbers(frame);
    showCaption(frame);
    showPicture(frame);
    showPanel();
    moveCursor();
    if (at === film.frames.length - 1) pause();
  }

  function showNumbers(frame) {
    const { meters } = frame;
    const entry = (name, value, colour) => {
      const mark = colour ? [element("i", { style: `background: var(--${colour})` })] : [];
      return element("span", {}, ...mark, `${name} `, element("b", {}, value));
    };
    numbers.replaceChildren(
      entry("hit rate so far", percent(hitRate(frame)), "rate"),
      entry("evictable", counted(meters.evictable), "evictable"),
      entry("protected", counted(meters.protected), "protected"),
      entry("private", counted(meters.private), "private"),
      entry("free", `${counted(meters.free)} of ${counted(film.num_blocks)} blocks`),
      entry("requests", `${counted(meters.requests)}, ${meters.running} running`),
      entry("evicted", `${counted(meters.evicted_blocks)} blocks`),
    );
  }

  function showCaption(frame) {
    const kinds = frame.kinds.map((kind) => element("span", { class: `kind kind-${kind}` }, kind));
    const many = frame.num_steps > 1 ? [`${frame.num_steps} steps: `] : [];
    const title = film.chapters[frame.chapter];
    const marks = [];
    if (frame.matched.length) marks.push("Black outline: the path that it matches.");
    if (next().gone.length) marks.push("Dashed in magenta: leaves in the next picture.");
    const quiet = (...texts) => element("span", { class: "quiet" }, ...texts);
    caption.replaceChildren(
      element("p", {}, ...kinds, quiet(...many, title === undefined ? "" : title)),
      ...frame.sentences.map((sentence) => element("p", {}, sentence)),
      element("p", {}, quiet(marks.join(" "))),
    );
    caption.className = `caption kind-${frame.kinds.at(-1)}`;
  }

  function showPicture(frame) {
    const focused = stage.contains(document.activeElement) ? document.activeElement.dataset.node : undefined;
    stage.replaceChildren(parsed(pictureOf(film, frame)));
    const leaving = new Set(next().gone.map(String));
    // A picture marks what changed in its own step; where it stands for several, what changed in the others is marked here.
    const changed = new Set(frame.changed.map(String));
    const matched = new Set(frame.matched.map(String));
    for (const node of stage.querySelectorAll("g.node")) {
      const serial = node.dataset.node;
      node.setAttribute("tabindex", "0");
      node.setAttribute("role", "button");
      node.classList.toggle("matched", matched.has(serial));
      node.classList.toggle("leaving", leaving.has(serial));
      node.classList.toggle("changed", film.steps_per_frame > 1 && changed.has(serial));
      node.classList.toggle("open", serial === opened);
      if (serial === focused) node.focus({ preventScroll: true });
    }
  }

  // ---------------------------------------------------------------------------------------------- a node

  function openNode(event) {
    if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
    const node = event.target.closest("g.node");
    if (!node) return;
    event.preventDefault();
    event.stopPropagation();
    opened = opened === node.dataset.node ? null : node.dataset.node;
    for (const other of stage.querySelectorAll("g.node")) other.classList.toggle("open", other.dataset.node === opened);
    showPanel();
  }

  function showPanel() {
    panel.hidden = opened === null;
    if (opened === null) return;
    const node = [...stage.querySelectorAll("g.node")].find((each) => each.dataset.node === opened);
    const title = node && node.querySelector("title");
    const close = () => {
      opened = null;
      show(at);
    };
    const serial = Number(opened);
    const steps = [];
    film.frames.forEach((frame, index) => {
      if (frame.changed.includes(serial) || frame.gone.includes(serial)) steps.push(index);
    });
    const now = steps.findLastIndex((index) => index <= at);
    const first = Math.max(0, now - MANY_STEPS / 2);
    const near = steps.slice(first, first + MANY_STEPS);
    const left = next().gone.includes(serial);
    panel.replaceChildren(
      element("h2", {}, `Node ${opened}`, element("button", { type: "button", "aria-label": "Close", onclick: close }, "✕")),
      element("pre", {}, title ? title.textContent : "Not in this picture: not there yet, gone, or beyond the nodes that are drawn."),
      ...(left ? [element("p", { class: "failed" }, "It leaves in the next picture.")] : []),
      element("p", {}, steps.length ? "It changes in these pictures:" : "It does not change in this film."),
      element("div", { class: "steps" }, ...near.map((index) =>
        element("button", { type: "button", "aria-current": index === at ? "step" : null, onclick: () => show(index) }, String(index + 1)))),
    );
  }

  function next() {
    return film.frames[at + 1] || { gone: [] };
  }

  // ---------------------------------------------------------------------------------------------- the course

  /** Blocks by state, stacked, as shares of the most that were in use at a time; and the hit rate. */
  function drawCourse() {
    const x = (index) => Math.max(0, Math.min(1000, (1000 * index) / Math.max(film.frames.length - 1, 1)));
    const y = (share) => 100 - 100 * share;
    // A picture's counts hold half-way to its neighbours.
    const steps = (shares) => shares.flatMap((share, index) =>
      share === null ? [] : [[x(index - 0.5), y(share)], [x(index + 0.5), y(share)]]);
    const drawing = shape("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img",
      "aria-label": "Blocks in use and hit rate, over the film" });
    const inUse = ({ meters }) => meters.private + meters.protected + meters.evictable;
    const most = Math.max(1, ...film.frames.map(inUse));
    let floor = film.frames.map(() => 0);
    for (const state of ["private", "protected", "evictable"]) {
      const ceiling = film.frames.map((frame, index) => floor[index] + frame.meters[state] / most);
      const points = [...steps(ceiling), ...steps(floor).reverse()];
      drawing.append(shape("polygon", { points: points.join(" "), fill: `var(--${state})` }));
      floor = ceiling;
    }
    film.frames.forEach((frame, index) => {
      if (film.chapters.length <= MANY_CHAPTERS && index && frame.chapter !== film.frames[index - 1].chapter) {
        drawing.append(shape("line", { x1: x(index), x2: x(index), y1: 0, y2: 100, stroke: "var(--quiet)", "stroke-width": 0.5,
          opacity: 0.5, "vector-effect": "non-scaling-stroke" }));
      }
    });
    const line = { points: steps(film.frames.map(hitRate)).join(" "), fill: "none", "vector-effect": "non-scaling-stroke" };
    drawing.append(
      shape("polyline", { ...line, stroke: "var(--paper)", "stroke-width": 4 }),
      shape("polyline", { ...line, stroke: "var(--rate)", "stroke-width": 2 }),
      shape("line", { class: "cursor", y1: 0, y2: 100, stroke: "var(--ink)", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }),
    );
    course.replaceChildren(drawing, element("span", { class: "scale" }, `top: ${counted(most)} of ${counted(film.num_blocks)} blocks in use, 100% hits`));
    chapters.replaceChildren(...film.chapters.map((title, index) => element("option", { value: index }, title)));
    chapters.hidden = film.chapters.length === 0;
    slider.max = String(film.frames.length - 1);
  }

  function moveCursor() {
    const x = String((1000 * at) / Math.max(film.frames.length - 1, 1));
    const cursor = course.querySelector(".cursor");
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
  }

  function seek(event) {
    const box = course.getBoundingClientRect();
    show(Math.round(((event.clientX - box.left) / box.width) * (film.frames.length - 1)));
  }

  function toChapter() {
    const first = film.frames.findIndex((frame) => frame.chapter >= Number(chapters.value));
    show(first < 0 ? film.frames.length - 1 : first);
  }

  // ---------------------------------------------------------------------------------------------- playing

  function toggle() {
    if (timer !== null) {
      pause();
      return;
    }
    if (at === film.frames.length - 1) show(0);
    playButton.textContent = "❚❚ Pause";
    const tick = () => {
      timer = setTimeout(tick, 1000 / Number(speed.value));
      show(at + 1);
    };
    timer = setTimeout(tick, 1000 / Number(speed.value));
  }

  function pause() {
    clearTimeout(timer);
    timer = null;
    playButton.textContent = "▶ Play";
  }

  function onKey(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const name = event.target.tagName;
    if (name === "SELECT" || (name === "BUTTON" && event.key === " ")) return; // they have a use of their own for it
    const moves = { ArrowLeft: () => show(at - 1), ArrowRight: () => show(at + 1), Home: () => show(0),
      End: () => show(film.frames.length - 1), " ": toggle, Escape: () => { opened = null; show(at); } };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  }

  /** Adds a frame that came later; who looks at the last one goes along. */
  function append(frame, titles) {
    const follows = at === film.frames.length - 1;
    film.frames.push(frame);
    film.chapters = titles;
    drawCourse();
    show(follows ? film.frames.length - 1 : at);
  }

  function end() {
    pause();
    root.removeEventListener("keydown", onKey);
    if (options.keys) options.keys.removeEventListener("keydown", onKey);
  }

  drawCourse();
  show(options.at === undefined ? 0 : options.at);
  return { show, append, end, get at() { return at; } };
}

// ------------------------------------------------------------------------------------------------ the page, the widget

/**
 * Plays the film that the page carries. Where the browser cannot, the last picture stays and the page says why.
 * It opens on the last picture, which shows the most; an address that ends in `#17` opens it on picture 17.
 */
async function openPage() {
  const root = document.getElementById("film");
  try {
    const film = await unpack(document.getElementById("film-data").textContent);
    const asked = Number.parseInt(location.hash.slice(1), 10);
    play(root, film, { keys: document, at: (asked || film.frames.length) - 1 });
    root.dataset.ready = "";
  } catch (error) {
    root.prepend(element("p", { class: "failed" }, `The film cannot be played: ${error.message}`));
  }
}

/** anywidget's entry: the film in the model's `film`, and frames that come later as messages. */
function render({ model, el }) {
  const root = element("div", { class: "radixkv-film" });
  el.append(root);
  let player = null;
  async function load() {
    const film = await unpack(model.get("film"));
    if (player) player.end();
    player = play(root, film, { at: model.get("is_live") ? film.frames.length - 1 : 0 });
  }
  function receive(message) {
    if (player && message.frame) player.append(message.frame, message.chapters);
  }
  model.on("change:film", load);
  model.on("msg:custom", receive);
  load();
  return () => {
    model.off("change:film", load);
    model.off("msg:custom", receive);
    if (player) player.end();
  };
}

export default { render };
