"""A daemon that speaks as much of Docker's API as `crossdock up --runtime docker` uses, on a real unix socket.

Nothing runs in its containers: a test says what they print and when they end.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

DEADLINE_S = 120.0
_POLL_S = 0.05


class Container:
    """One container.

    Attributes:
        name: without the slash that the API puts before it.
        body: what `create` was asked for.
        starts: times it was started.
        status, code: as the API says them.
        log: what it has printed.
    """

    def __init__(self, name: str, number: int, body: dict[str, Any]) -> None:
        self.name, self.number, self.body = name, number, body
        self.starts, self.status, self.code = 0, "created", 0
        self.log = b""

    def as_json(self) -> dict[str, Any]:
        """As `inspect` shows it."""
        state = {"Status": self.status, "ExitCode": self.code, "StartedAt": str(self.starts)}
        config = {"Labels": self.body["Labels"], "Image": self.body["Image"], "Tty": False}
        return {
            "Id": self.name,
            "Name": f"/{self.name}",
            "Created": f"{self.number:09}",
            "State": state,
            "Config": config,
        }


class Daemon(ThreadingMixIn, UnixStreamServer):
    """Listens on a socket in `folder`.

    Attributes:
        images: names that it has.
        containers: by name.
        networks: body of `create`, by name.
        calls: what changed something, in order: "create NAME", "start NAME", "stop NAME", "remove NAME".
        refused: path of a request that is answered 500, "" = none.
    """

    daemon_threads = True

    def __init__(self, folder: Path, *images: str) -> None:
        self.path = folder / "docker.sock"
        self.images = set(images)
        self.containers: dict[str, Container] = {}
        self.networks: dict[str, dict[str, Any]] = {}
        self.calls: list[str] = []
        self.refused = ""
        self.changed = threading.Condition()
        self._numbers = itertools.count()
        super().__init__(str(self.path), _Handler)
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": _POLL_S}, daemon=True).start()

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def url(self) -> str:
        """For `docker.host`."""
        return f"unix://{self.path}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed hangs up: no event."""

    def make(self, name: str, body: dict[str, Any]) -> Container:
        """Make a container."""
        with self.changed:
            self.containers[name] = made = Container(name, next(self._numbers), body)
            self.changed.notify_all()
            return made

    def say(self, name: str, text: str) -> None:
        """The container prints something."""
        with self.changed:
            self.containers[name].log += text.encode()
            self.changed.notify_all()

    def turn(self, name: str, status: str, code: int = 0) -> None:
        """The container runs or has ended."""
        with self.changed:
            one = self.containers[name]
            one.starts += status == "running"
            one.status, one.code = status, code
            self.changed.notify_all()

    def wait_for(self, call: str, times: int = 1) -> None:
        """Until there were so many such calls."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.calls.count(call) >= times, DEADLINE_S), self.calls


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Daemon

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        self.body = json.loads(self.rfile.read(length)) if length else {}
        path = re.sub(r"^/v[0-9.]+", "", unquote(url.path))
        if path == self.server.refused:
            return self._send(500, {"message": "the daemon is out of order"})
        _, kind, *words = path.split("/")
        getattr(self, f"_{kind.removeprefix('_')}", self._unknown)(*words)
        return None

    def _unknown(self, *words: str) -> None:
        self._send(404, {"message": f"page not found: {self.path}"})

    def _ping(self) -> None:
        self._send(200, "OK")

    def _version(self) -> None:
        self._send(200, {"ApiVersion": "1.41", "Version": "test"})

    def _images(self, *words: str) -> None:
        name = "/".join(words[:-1])
        known = name.removesuffix(":latest") in self.server.images
        self._send(200, {"Id": name}) if known else self._send(404, {"message": f"No such image: {name}"})

    def _labelled(self, labels: dict[str, str]) -> bool:
        wanted = json.loads(self.query.get("filters", "{}")).get("label", [])
        return {tuple(one.split("=", 1)) for one in wanted} <= set(labels.items())

    def _networks(self, name: str = "", *_: str) -> None:
        known = self.server.networks
        if name == "create":
            known[self.body["Name"]] = self.body
            self._note("create", "network", {"Id": self.body["Name"]}, 201)
        elif self.command == "DELETE":
            del known[name]
            self._note("remove", "network")
        elif name:
            self._send(200, {"Id": name, "Name": name})
        else:
            self._send(200, [{"Id": n, "Name": n} for n, body in known.items() if self._labelled(body["Labels"])])

    def _containers(self, name: str, verb: str = "") -> None:
        known = self.server.containers
        if name == "json":
            self._send(200, [one.as_json() for one in list(known.values()) if self._labelled(one.body["Labels"])])
        elif name == "create":
            name = self.query["name"]
            if name in known:
                return self._send(409, {"message": f"the name {name} is already in use"})
            self.server.make(name, self.body)
            self._note("create", name, {"Id": name}, 201)
        elif name not in known:
            self._send(404, {"message": f"No such container: {name}"})
        elif self.command == "DELETE":
            del known[name]
            self._note("remove", name)
        elif verb == "json":
            self._send(200, known[name].as_json())
        elif verb == "logs":
            self._logs(known[name])
        else:
            self.server.turn(name, *{"start": ("running", 0), "stop": ("exited", 0)}[verb])
            self._note(verb, name)
        return None

    def _note(self, verb: str, name: str, answer: object = None, status: int = 204) -> None:
        with self.server.changed:
            self.server.calls.append(f"{verb} {name}")
            self.server.changed.notify_all()
        self._send(status, answer)

    def _send(self, status: int, answer: object) -> None:
        body = b"" if answer is None else answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _logs(self, one: Container) -> None:
        """The whole log from the start; followed until the container ends, if asked for."""
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        sent, follow = 0, self.query.get("follow") == "1"
        while True:
            with self.server.changed:
                running = follow and one.status == "running"
                new = one.log[sent:]
                if running and not new:
                    self.server.changed.wait(_POLL_S)
                    continue
            if new:
                self.wfile.write(struct.pack(">BxxxL", 1, len(new)) + new)
                self.wfile.flush()
                sent += len(new)
            elif not running:
                break
        self.close_connection = True
