// The theme's arrows that open a part of the sidebar have no name for screen readers.
document.addEventListener("DOMContentLoaded", () => {
  for (const summary of document.querySelectorAll("nav details > summary:not([aria-label])")) {
    const link = summary.closest("li").querySelector("a");
    summary.setAttribute("aria-label", `Names in ${link.textContent.trim()}`);
  }
});
