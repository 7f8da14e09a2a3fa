// A page opened from a file may start no worker; the search then runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = function (address) {
    "use strict";
    var worker = new EventTarget(), waiting = [], frame = document.createElement("iframe");
    frame.hidden = true;
    document.documentElement.appendChild(frame);
    var inside = frame.contentWindow, script = inside.document.createElement("script");
    function send(data) { inside.dispatchEvent(new inside.MessageEvent("message", { data: data })); }
    inside.postMessage = function (data) { worker.dispatchEvent(new MessageEvent("message", { data: data })); };
    worker.postMessage = function (data) { if (waiting) waiting.push(data); else send(data); };
    worker.terminate = function () { frame.remove(); };
    script.onload = function () {
      var kept = waiting;
      waiting = null;
      kept.forEach(send);
    };
    script.src = address;
    inside.document.head.appendChild(script);
    return worker;
  };
}
