// Browsers start no worker from a file system: there, the search's worker runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc =
        '<script>self.postMessage = data => parent.postMessage(data, "*")</script>' +
        `<script src="${new URL(url, location)}"></script>`;
      this.loaded = new Promise(resolve => this.frame.addEventListener("load", resolve));
      window.addEventListener("message", event => {
        if (event.source !== this.frame.contentWindow) return;
        const told = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(told);
        if (this.onmessage) this.onmessage(told);
      });
      document.body.append(this.frame);
    }

    postMessage(data) {
      // Not by the frame's own postMessage: that is the worker's way back.
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
