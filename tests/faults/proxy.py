"""A TCP proxy between a worker and its server, which can be slow, silent, cut and half open.

    with Proxy(database.url("psycopg")) as proxy, jobs.worker(tasks, direct_url=proxy.url(url)):
        proxy.delay = 0.3  # seconds each way
        proxy.drop()       # nothing comes through any more, and nobody is told
        proxy.heal()

It carries bytes and knows nothing of what they mean. When a method returns, the fault is there.
The kernel still answers for the proxy: a TCP keepalive finds nothing wrong with a connection that
is dropped, which only a question to the server itself can tell.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self

from sqlalchemy import make_url

if TYPE_CHECKING:
    from collections.abc import Generator

_CHUNK = 65536
_MOST_UNSENT = 16 * _CHUNK
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends RST instead of FIN
_CONNECT_WITHIN = 5.0


class Proxy:
    """Forwards every connection to the server that a database URL names."""

    def __init__(self, url: str) -> None:
        """Prepare a proxy in front of the server of *url*."""
        parsed = make_url(url)
        self._server = (parsed.host or "127.0.0.1", parsed.port or 5432)
        self._lock = threading.RLock()
        self._links: list[_Link] = []
        self._listener: socket.socket | None = None
        self._address = ("127.0.0.1", 0)
        self._delay = 0.0
        self._requests_pass = True
        self._answers_pass = True
        self._stopped = False
        self.accepted = 0

    def __enter__(self) -> Self:
        """Start to forward."""
        self._listen()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.settimeout(0)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cut every connection and end."""
        with self._changed():
            self._stopped = True
        self._thread.join(30)
        assert not self._thread.is_alive(), "the proxy did not end"
        self.cut()
        self.refuse()
        self._wake_in.close()
        self._wake_out.close()

    # --- what tests look at --------------------------------------------------------------------

    @property
    def port(self) -> int:
        """The port on 127.0.0.1, the same as long as the proxy lives."""
        return self._address[1]

    def url(self, url: str) -> str:
        """Return a URL of the server's as one that leads through the proxy."""
        through = make_url(url).set(host="127.0.0.1", port=self.port)
        return through.render_as_string(hide_password=False)

    @property
    def connections(self) -> int:
        """How many connections clients have open, half open ones included."""
        with self._lock:
            return sum(link.client is not None for link in self._links)

    # --- faults --------------------------------------------------------------------------------

    @property
    def delay(self) -> float:
        """Seconds that everything takes, each way; for what arrives from now on."""
        return self._delay

    @delay.setter
    def delay(self, seconds: float) -> None:
        with self._changed():
            self._delay = seconds

    def drop(self, *, requests: bool = True, answers: bool = True) -> None:
        """Stop forwarding, and say nothing: neither data nor ends of connections come through.

        New connections are accepted and hear nothing. With ``requests=False`` what the clients say
        still arrives and only the answers are lost; after ``heal()`` all that was held back
        arrives.
        """
        with self._changed():
            self._requests_pass = not requests
            self._answers_pass = not answers

    def cut(self) -> None:
        """Reset every connection, at both ends; new ones are welcome."""
        with self._changed():
            for link in self._links:
                link.cut()
            self._links.clear()

    def half_open(self, *, server_knows: bool = True) -> None:
        """End the server's side of every connection; the clients are not told, ever.

        With ``server_knows=False`` the server believes in its side too, until ``cut()``. New
        connections work.
        """
        with self._changed():
            for link in self._links:
                link.lost = True
                if server_knows:
                    link.cut_server()

    def refuse(self) -> None:
        """Refuse new connections; those that are open go on."""
        with self._changed():
            if self._listener is not None:
                # The thread's poll() would keep it alive for a moment after a mere close.
                with suppress(OSError):
                    self._listener.shutdown(socket.SHUT_RDWR)
                self._listener.close()
                self._listener = None

    def heal(self) -> None:
        """End the delay and every fault but those of half open connections, which stay lost."""
        with self._changed():
            self._delay = 0.0
            self._requests_pass = self._answers_pass = True
            if self._listener is None and not self._stopped:
                self._listen()

    # --- the thread ----------------------------------------------------------------------------

    def _listen(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self._address)
        listener.listen(128)
        listener.settimeout(0)
        self._address = listener.getsockname()
        self._listener = listener

    @contextmanager
    def _changed(self) -> Generator[None]:
        with self._lock:
            yield
        with suppress(OSError):
            self._wake_in.send(b"x")

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._stopped:
                    return
                wanted, wait = self._wanted()
            ready = dict(self._poll(wanted, wait))
            with self._lock:
                if self._wake_out.fileno() in ready:
                    self._wake_out.recv(_CHUNK)
                self._accept()
                for link in self._links:
                    self._forward(link)
                self._links = [link for link in self._links if not link.ended]

    def _wanted(self) -> tuple[dict[int, int], float | None]:
        """Return what to wait for, by file descriptor, and for how long at most."""
        wanted = {self._wake_out.fileno(): select.POLLIN}
        dues: list[float] = []
        if self._listener is not None and self._requests_pass:
            wanted[self._listener.fileno()] = select.POLLIN
        now = time.monotonic()
        for link in self._links:
            for way in self._open_ways(link):
                if way.readable:
                    _add(wanted, way.source, select.POLLIN)
                if way.unsent and way.unsent[0][0] <= now:
                    _add(wanted, way.target, select.POLLOUT)
                elif way.unsent:
                    dues.append(way.unsent[0][0] - now)
            if link.lost and link.client is not None:
                _add(wanted, link.client, select.POLLIN)
        return wanted, min(dues, default=None)

    @staticmethod
    def _poll(wanted: dict[int, int], wait: float | None) -> list[tuple[int, int]]:
        poll = select.poll()
        for number, events in wanted.items():
            poll.register(number, events)
        # Rounded up: to wait for less than is left would be a busy loop.
        return poll.poll(None if wait is None else int(wait * 1000) + 1)

    def _open_ways(self, link: _Link) -> list[_Way]:
        if link.lost:
            return []
        passing = [(link.requests, self._requests_pass), (link.answers, self._answers_pass)]
        return [way for way, passes in passing if passes]

    def _accept(self) -> None:
        while self._listener is not None and self._requests_pass:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                server = socket.create_connection(self._server, _CONNECT_WITHIN)
            except OSError:
                _reset(client)
                continue
            self._links.append(_Link(client, server))

    def _forward(self, link: _Link) -> None:
        if link.lost:
            link.swallow()
        try:
            for way in self._open_ways(link):
                way.read(self._delay)
                way.send()
        except OSError:
            link.cut()
        if link.requests.ended and link.answers.ended:
            link.close()


class _Way:
    """One direction of a connection: what was read, and when it is to be sent."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.unsent: deque[tuple[float, bytes]] = deque()
        self.ended = False
        self._at_end = False
        self._size = 0

    @property
    def readable(self) -> bool:
        return not self._at_end and self._size < _MOST_UNSENT

    def read(self, delay: float) -> None:
        while self.readable:
            try:
                data = self.source.recv(_CHUNK)
            except BlockingIOError:
                return
            self._at_end = not data
            self._size += len(data)
            self.unsent.append((time.monotonic() + delay, data))

    def send(self) -> None:
        while self.unsent and self.unsent[0][0] <= time.monotonic():
            due, data = self.unsent[0]
            if not data:
                self.unsent.popleft()
                self.ended = True
                self.target.shutdown(socket.SHUT_WR)
                return
            try:
                sent = self.target.send(data)
            except BlockingIOError:
                return
            self._size -= sent
            self.unsent.popleft()
            if sent < len(data):
                self.unsent.appendleft((due, data[sent:]))


class _Link:
    """A client's connection, and the one to the server that was opened for it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        for end in (client, server):
            end.settimeout(0)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.client: socket.socket | None = client
        self.server: socket.socket | None = server
        self.requests = _Way(client, server)
        self.answers = _Way(server, client)
        self.lost = False

    @property
    def ended(self) -> bool:
        return self.client is None and self.server is None

    def swallow(self) -> None:
        """Read what the client says to nobody, to notice its end."""
        try:
            while self.client is not None and self.client.recv(_CHUNK):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        if self.client is not None:
            self.client.close()
            self.client = None

    def close(self) -> None:
        """Close both ends without the reset that would take from them what they have not read."""
        for end in (self.client, self.server):
            if end is not None:
                end.close()
        self.client = self.server = None

    def cut(self) -> None:
        if self.client is not None:
            _reset(self.client)
            self.client = None
        self.cut_server()

    def cut_server(self) -> None:
        if self.server is not None:
            _reset(self.server)
            self.server = None


def _add(wanted: dict[int, int], end: socket.socket, events: int) -> None:
    wanted[end.fileno()] = wanted.get(end.fileno(), 0) | events


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    end.close()
