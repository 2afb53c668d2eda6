// A page that was opened from a folder may start no worker: browsers refuse files as their scripts.
// The search then runs in a hidden frame, which behaves like one.
if (location.protocol === "file:") {
  const loaded = (owner, url) =>
    new Promise((resolve, reject) => {
      const script = owner.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
      owner.document.body.append(script);
    });

  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.frame = frame;
      this.started = new Promise((resolve, reject) => {
        frame.addEventListener("load", () => {
          const inner = frame.contentWindow;
          inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          inner.importScripts = async (...urls) => {
            for (const each of urls) await loaded(inner, each);
          };
          loaded(inner, new URL(url, location.href).href).then(() => resolve(inner), reject);
        }, { once: true });
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      const inner = await this.started;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
