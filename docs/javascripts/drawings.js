// Loads Mermaid, which draws the manual's drawings. Where it cannot be loaded, such as without a network, their text is
// shown. The theme's own loader would then stop the page's search and its choice of colours.
(() => {
  const SOURCE = "https://unpkg.com/mermaid@11/dist/mermaid.min.js";
  // The theme's rule for these names an id that newer releases of Mermaid have extended.
  const ARROWS = 'marker[id$="arrowhead"] path { fill: var(--md-mermaid-edge-color); stroke: var(--md-mermaid-edge-color) }';
  let settings = {};
  let loading;

  const load = () =>
    (loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = SOURCE;
      script.onload = () => resolve(window.mermaid);
      script.onerror = reject;
      document.head.append(script);
    }));

  const asText = (text) => {
    const block = document.createElement("pre");
    block.textContent = text;
    return block.outerHTML;
  };

  window.mermaid = {
    initialize(given) {
      settings = { ...given, themeCSS: `${given.themeCSS ?? ""} ${ARROWS}` };
    },
    async render(id, text) {
      try {
        const mermaid = await load();
        mermaid.initialize(settings);
        return await mermaid.render(id, text);
      } catch {
        return { svg: asText(text) };
      }
    },
  };
})();
