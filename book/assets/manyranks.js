// Names for what the widgets leave without one, so that a screen reader says "ranks, 4" and not "slider, 1".
(function () {
  "use strict";

  function nameSlider(slider) {
    const handle = slider.querySelector(".noUi-handle");
    const label = slider.querySelector(".widget-label");
    const readout = slider.querySelector(".widget-readout");
    if (!handle) return;
    const name = label ? label.textContent.trim() : "";
    const value = readout ? readout.textContent.trim() : "";
    if (name && handle.getAttribute("aria-label") !== name) handle.setAttribute("aria-label", name);
    if (value && handle.getAttribute("aria-valuetext") !== value) handle.setAttribute("aria-valuetext", value);
  }

  const playNames = { "fa-play": "Play", "fa-pause": "Pause", "fa-step-backward": "Step back",
                      "fa-step-forward": "Step forward", "fa-retweet": "Repeat", "fa-stop": "Stop" };
  function nameButton(button) {
    const icon = button.querySelector("i");
    for (const kind in playNames) {
      if (icon && icon.classList.contains(kind) && button.getAttribute("aria-label") !== playNames[kind]) {
        button.setAttribute("aria-label", playNames[kind]);
      }
    }
  }

  // A box that scrolls must be reachable by keyboard.
  function letScroll(box) {
    const wide = box.scrollWidth > box.clientWidth + 1;
    if (wide && !box.hasAttribute("tabindex")) {
      box.setAttribute("tabindex", "0");
      box.setAttribute("role", "group");
      box.setAttribute("aria-label", "wide content, scrolls sideways");
    } else if (!wide && box.getAttribute("aria-label") === "wide content, scrolls sideways") {
      ["tabindex", "role", "aria-label"].forEach((name) => box.removeAttribute(name));
    }
  }

  // Where the theme's label says something else than what one sees, speech control and screen readers disagree.
  function nameByText() {
    document.querySelectorAll("button.search-button__button[aria-label], details.hide > summary[aria-label]")
      .forEach((element) => { if (element.textContent.trim()) element.removeAttribute("aria-label"); });
    // docutils calls it a list, and its entries something else.
    document.querySelectorAll(".citation-list[role=list]").forEach((element) => element.removeAttribute("role"));
  }

  let waiting = false;
  function look() {
    waiting = false;
    document.querySelectorAll(".widget-slider").forEach(nameSlider);
    document.querySelectorAll(".widget-play button").forEach(nameButton);
    document.querySelectorAll(".mr-frame, .bd-article .katex-display, .bd-article div.highlight pre, .bd-article .output pre")
      .forEach(letScroll);
  }
  function lookSoon() {
    if (!waiting) { waiting = true; requestAnimationFrame(look); }
  }

  const article = document.querySelector(".bd-article") || document.body;
  new MutationObserver(lookSoon).observe(article,
    { subtree: true, childList: true, characterData: true, attributes: true, attributeFilter: ["class"] });
  window.addEventListener("resize", lookSoon);
  nameByText();
  lookSoon();
})();
