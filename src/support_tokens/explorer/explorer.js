"use strict";
// Texts reach the page by value and textContent only.
(() => {
  const at = (id) => document.getElementById(id);
  const kept = (name, value) =>
    value === undefined ? JSON.parse(sessionStorage.getItem(name) || "null") : sessionStorage.setItem(name, JSON.stringify(value));
  const client = kept("client") || crypto.getRandomValues(new Uint32Array(4)).join("-");
  kept("client", client);
  const current = location.pathname.startsWith("/result/") ? location.pathname.split("/")[2] : null;

  const say = (sentence, problem = false) => {
    const status = at("ask-status");
    status.textContent = problem ? sentence[0].toUpperCase() + sentence.slice(1) : sentence;
    status.classList.toggle("problem", problem);
    status.setAttribute("role", problem ? "alert" : "status");
  };
  const post = (path, content) =>
    fetch(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ client, ...content }) });

  const indices = (words) => words.split(",").map((word) => word.trim()).filter(Boolean).flatMap((word) => {
    const [, first, last] = word.match(/^(\d+)-(\d+)$/) || [];
    if (first === undefined) return [/^-?\d+$/.test(word) ? Number(word) : word];
    return Array.from({ length: Math.min(1000, Math.max(0, last - first + 1)) }, (_, i) => Number(first) + i);
  });

  const showDepth = async () => {
    const label = at("ask-model").value;
    const answer = await (await post("/depth", { model: label })).json();
    if (label !== at("ask-model").value) return;
    at("ask-depth").textContent = answer.depth ? `of 0 to ${answer.depth - 1}` : "";
    if (answer.error) say(answer.error, true);
    else if (indices(at("ask-layers").value).some((layer) => layer >= answer.depth))
      at("ask-layers").value = answer.depth > 1 ? "0, 1" : "0";
  };

  const analyze = async () => {
    const asked = { text: at("ask-text").value, model: at("ask-model").value, layers: at("ask-layers").value,
      noise: at("ask-noise").checked, block: at("ask-block").checked };
    kept("asked", asked);
    at("ask-run").disabled = true;
    say("waiting …");
    try {
      const views = ["noise", "block"].filter((view) => asked[view]);
      const answer = await post("/analyze", { text: asked.text, model: asked.model, layers: indices(asked.layers), views });
      if (!answer.ok) return say(await answer.text(), true);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let waiting = "", part = await reader.read(); !part.done; part = await reader.read()) {
        const lines = (waiting + part.value).split("\n\n");
        waiting = lines.pop();
        for (const event of lines.map((line) => JSON.parse(line.slice("data: ".length)))) {
          if (event.error) return say(event.error, true);
          if (!event.name) { say(`${event.done} of ${event.total} tokens`); continue; }
          kept("before", current);
          kept("shown", current && Object.fromEntries(["layer", "view", "quantity", "k"].map((id) => [id, at(id).value])));
          location.assign(`/result/${event.name}#controls`);
        }
      }
    } catch (error) {
      say("the explorer does not answer; start it again.", true);
    } finally {
      at("ask-run").disabled = false;
    }
  };

  const asked = kept("asked");
  if (asked) {
    for (const name of ["text", "layers"]) at(`ask-${name}`).value = asked[name];
    for (const name of ["noise", "block"]) at(`ask-${name}`).checked = asked[name];
    if ([...at("ask-model").options].some((option) => option.value === asked.model)) at("ask-model").value = asked.model;
  }
  if (current) {
    for (const [id, value] of Object.entries(kept("shown") || {})) {
      const control = at(id);
      if (control.tagName === "SELECT" && ![...control.options].some((option) => option.value === value)) continue;
      control.value = value;
      control.dispatchEvent(new Event("change", { bubbles: true }));
    }
    if (kept("before")) {
      at("ask-compare").href = `/changes/${kept("before")}/${current}`;
      at("ask-compare").hidden = false;
    }
  }
  at("ask").addEventListener("submit", (event) => { event.preventDefault(); analyze(); });
  at("ask-stop").addEventListener("click", async () => {
    const answer = await (await post("/stop", {})).json();
    say(answer.stopped ? "stopping …" : "nothing is running.");
  });
  at("ask-model").addEventListener("change", showDepth);
  showDepth();
  document.documentElement.classList.add("asks");
})();
