"""A headless Chromium, driven over a pipe by its own protocol: no driver, no package, no port."""

import base64
import fcntl
import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
         "--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe")  # fmt: skip
PATIENCE = 60  # seconds without a word from the browser before a test fails
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "PageDown": 34, "PageUp": 33, "Home": 36, "End": 35}


class Browser:
    """One browser with one page; `problems` and `requests` collect what its console and network said."""

    def __init__(self, program: str, profile: Path):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # High numbers, so that making them 3 and 4 overwrites none of them.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        self.process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=lambda: [os.dup2(fd, number) for number, fd in enumerate(high, 3)],
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self.reader, self.writer = ours_in, ours_out
        self.buffer, self.count, self.session = b"", 0, None
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
        except (OSError, EOFError):
            pass
        self.process.wait(PATIENCE)
        os.close(self.reader)
        os.close(self.writer)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.count += 1
        number, message = self.count, {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.writer, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._event(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def look(self, width: int, height: int, scheme: str) -> None:
        """Size of the window and "light" or "dark", from the next page on."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, address: str) -> None:
        """Go to a page and wait until it and what it refers to are loaded."""
        self.loaded = False
        if error := self.call("Page.navigate", url=address).get("errorText"):
            raise RuntimeError(f"{address}: {error}")
        while not self.loaded:
            self._event(self._next())

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(json.dumps(done["exceptionDetails"])[:500])
        return done["result"].get("value")

    def type(self, text: str) -> None:
        """Type into what has the focus: inserted text lifts no key, and a search waits for that."""
        self.call("Input.insertText", text=text)
        self.press("End")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save a PNG of the page."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))["data"]
        path.write_bytes(base64.b64decode(data))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {
            "clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        }

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            if not select.select([self.reader], [], [], PATIENCE)[0]:
                raise RuntimeError("the browser says nothing any more")
            if not (read := os.read(self.reader, 1 << 20)):
                raise EOFError("the browser is gone")
            self.buffer += read
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _event(self, message: dict[str, Any]) -> None:
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Page.loadEventFired":
            self.loaded = True
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(a.get("value", a)) for a in params["args"]))
        elif kind == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif kind == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
