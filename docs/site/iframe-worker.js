// A page opened from the disk may not start a worker, and the search runs in one. There it gets a hidden frame instead:
// the same script, the same messages, on the page's own thread.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      frame.contentDocument.open();
      frame.contentDocument.write("<!doctype html><title>search</title>");
      frame.contentDocument.close();
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.say(this, data);
      this.ready = new Promise((resolve, reject) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = () => reject(new Error(`could not load ${url}`));
        frame.contentDocument.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.say(this.inside, data));
    }
    say(to, data) {
      const message = new MessageEvent("message", { data: structuredClone(data) });
      queueMicrotask(() => to.dispatchEvent(message));
    }
    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
