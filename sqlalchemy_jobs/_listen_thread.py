"""The sync worker's listener: psycopg, in a thread."""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from ._connections import cut, cut_after, direct_url, keep_alive, own_engine
from ._cures import judged
from ._listen import (
    ANSWER_WITHIN,
    PROVE_AGAIN_AFTER,
    PROVE_EVERY,
    Listener,
    Listening,
    NoListener,
    SilentError,
)
from ._messages import ListenerChanged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine

    from ._core import Core
    from ._listen import Ask, Post, Steps


def listen_in_thread(engine: Engine, core: Core, post: Post, ask: Ask) -> Listener:
    """Listen in a thread. *ask* does a piece of work with the worker's ordinary connection."""
    listening = Listening(core, post)
    why = listening.unavailable(engine)
    if why is not None:
        post(ListenerChanged(up=False, reason=why))
        return NoListener()
    listener = _ThreadListener(engine, listening, ask)
    threading.Thread(target=listener.run, name="jobs-listen", daemon=True).start()
    return listener


class _ThreadListener:
    """One thread reads, and does what is asked of the connection in between."""

    def __init__(self, engine: Engine, listening: Listening, ask: Ask) -> None:
        url = direct_url(engine, listening.core.settings.direct_url)
        self._engine = own_engine(engine) if url is None else create_engine(url, poolclass=NullPool)
        self._listening = listening
        self._ask = ask
        self._stopped = threading.Event()
        self._driver: Any = None
        self._requests: queue.SimpleQueue[Callable[[Any], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()

    def rest(self) -> None:
        self._request(lambda driver: self._carry_out(driver, self._listening.resting()))

    def rouse(self) -> None:
        self._request(lambda driver: self._carry_out(driver, self._listening.rousing()))

    def stop(self) -> None:
        self._stopped.set()
        self._request(lambda _: None)
        cut(self._driver)

    def _request(self, work: Callable[[Any], None]) -> None:
        self._requests.put(work)
        with suppress(OSError):
            self._wake_in.send(b"x")

    def run(self) -> None:
        try:
            self._keep_listening()
        except BaseException as error:  # noqa: BLE001 - else nobody would know that it has ended
            self._listening.doom(error)

    def _keep_listening(self) -> None:
        while not self._stopped.is_set():
            connected = False
            try:
                with self._engine.connect() as connection:
                    connected = True
                    try:
                        self._listen(connection)
                    finally:
                        self._driver = None
                        connection.invalidate()
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                if not self._stopped.is_set():
                    pause = self._listening.down(judged(error) if connected else error)
                    self._stopped.wait(pause)
            finally:
                with suppress(Exception):
                    self._engine.dispose()
        self._wake_in.close()
        self._wake_out.close()

    def _listen(self, connection: Connection) -> None:
        self._driver = driver = connection.connection.driver_connection
        keep_alive(driver)
        with cut_after(ANSWER_WITHIN, driver):
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            for statement in self._listening.statements():
                connection.exec_driver_sql(statement)
        self._listening.marked.clear()
        while not self._requests.empty():  # asked of the connection before
            self._requests.get()
        self._prove(driver)
        for _ in range(self._listening.proofs - 1):
            self._read(driver, 1.0)
            self._prove(driver)
        self._listening.up()
        while not self._stopped.is_set():
            self._read(driver, PROVE_EVERY)
            if not self._prove(driver):
                self._read(driver, PROVE_AGAIN_AFTER)
                self._prove(driver)

    def _read(self, driver: Any, seconds: float, answers: Sequence[Any] = ()) -> bool:
        """Take notifications, and do what is asked, for so long or until something is answered.

        Returns True if the nonce came back.
        """
        until = time.monotonic() + seconds
        while not self._stopped.is_set():
            while not self._requests.empty():
                self._requests.get()(driver)
            # Also what came while a request was done: it waits in the driver, not in the socket.
            notices = list(driver.notifies(timeout=0))
            if sum(self._listening.heard(n.channel, n.payload) for n in notices):
                return True
            left = until - time.monotonic()
            if left <= 0 or answers:
                break
            if self._requests.empty():
                ready, _, _ = select.select([driver.fileno(), self._wake_out], [], [], left)
                if self._wake_out in ready:
                    self._wake_out.recv(4096)
        return False

    @staticmethod
    def _carry_out(driver: Any, steps: Steps) -> None:
        value = None
        with suppress(StopIteration), cut_after(ANSWER_WITHIN, driver):
            while True:
                statement, parameters = steps.send(value)
                cursor = driver.execute(statement, parameters)
                value = cursor.fetchone()[0] if cursor.description else None

    def _prove(self, driver: Any) -> bool:
        """Raise :class:`SilentError` if nothing arrives; False if nothing could be sent."""
        answers: list[Any] = []
        self._ask(
            self._listening.new_probe(),
            lambda answer: self._request(lambda _: answers.append(answer)),
            ANSWER_WITHIN,
        )
        if self._read(driver, ANSWER_WITHIN, answers) or self._stopped.is_set():
            return True
        if not answers or not self._listening.was_sent(answers[0]):
            return False  # the other connection is in trouble; this one is not to blame
        if not self._read(driver, ANSWER_WITHIN) and not self._stopped.is_set():
            raise SilentError
        return True
