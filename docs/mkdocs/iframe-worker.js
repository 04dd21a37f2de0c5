// The search in a site that is opened as files, where a page may not start a worker: it runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.frame = frame.contentWindow;
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.loaded = new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        script.onload = done;
        script.src = url;
        frame.contentDocument.body.appendChild(script);
      });
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
// `--mem` would ask for pages without the word: ask for the whole word.
const { postMessage } = Worker.prototype;
Worker.prototype.postMessage = function (message) {
  const { data } = message;
  postMessage.call(this, typeof data === "string" ? { ...message, data: data.replace(/(^|\s)--+(\S+)/g, "$1$2^1") } : message);
};
