"""A small server that speaks OpenAI's chat completions, and can be told to fail."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Behaviour = Callable[[int, dict[str, Any]], tuple[int, dict[str, str], str]]


def completion(text: str, **more: Any) -> str:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"} | more
    return json.dumps(
        {"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 10}}
    )


def echo(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
    """Answers with the last word of the first line asked."""
    text = body["messages"][0]["content"][-1]["text"].splitlines()[0]
    return 200, {}, completion(f"Let me see. <answer>{text.split()[-1]}</answer>")


class ChatServer:
    """Counts requests; ``behaviour`` maps (request number, body) to (status, headers, body)."""

    def __init__(self, behaviour: Behaviour = echo) -> None:
        self.behaviour = behaviour
        self.drip_s = 0.0
        """Waited after each byte of an answer."""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.at_once = self.most_at_once = 0
        self.port = 0
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> "ChatServer":
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.bodies)
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    status, headers, text = outer.behaviour(number, body)
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(text.encode())))
                    self.end_headers()
                    if outer.drip_s:
                        for byte in text.encode():
                            self.wfile.write(bytes([byte]))
                            time.sleep(outer.drip_s)
                    else:
                        self.wfile.write(text.encode())
                except (BrokenPipeError, ConnectionResetError):
                    pass
                finally:
                    with outer._lock:
                        outer.at_once -= 1

            def log_message(self, *_: Any) -> None:
                pass

        # On the port it had before: the endpoint's address is part of what answers are kept by.
        ThreadingHTTPServer.allow_reuse_address = True
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> "ChatServer":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def slow(seconds: float, behaviour: Behaviour = echo) -> Behaviour:
    def wait(number: int, body: dict[str, Any]) -> tuple[int, dict[str, str], str]:
        time.sleep(seconds)
        return behaviour(number, body)

    return wait
