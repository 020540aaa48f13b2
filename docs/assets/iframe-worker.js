// Search in pages that are opened as files: there, browsers refuse to start a worker. A hidden frame does the worker's work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => Promise.all(urls.map((each) => load(inside.document, each)));
      this.inside = inside;
      this.ready = load(inside.document, url);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  const load = (page, url) =>
    new Promise((loaded, failed) => {
      const script = page.createElement("script");
      Object.assign(script, { src: url, onload: loaded, onerror: failed });
      page.head.append(script);
    });
}
