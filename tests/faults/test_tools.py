"""The proxy and the server's knobs make the faults that they say."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.faults.proxy import Proxy
from tests.faults.server import LISTENERS, Knobs
from tests.workers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Database
    from tests.postgres import Cluster


class Echo:
    """A server that answers what it is told, and remembers it."""

    def __init__(self) -> None:
        """Listen, and serve each connection in a thread."""
        self.heard = b""
        self.ended: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"postgresql://127.0.0.1:{self._listener.getsockname()[1]}/x"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more."""
        self._listener.shutdown(socket.SHUT_RDWR)  # a mere close would not wake the thread
        self._listener.close()

    def _accept(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
        except OSError:
            return

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    self.heard += data
                    connection.sendall(data)
                self.ended.append("closed")
            except ConnectionResetError:
                self.ended.append("reset")


@pytest.fixture
def echo() -> Iterator[Echo]:
    """A server behind the proxy."""
    server = Echo()
    yield server
    with suppress(OSError):
        server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    """A proxy in front of it."""
    with Proxy(echo.url) as proxy:
        yield proxy


def connected(proxy: Proxy, within: float = 20) -> socket.socket:
    """Return a client's connection."""
    return socket.create_connection(("127.0.0.1", proxy.port), within)


def answered(client: socket.socket, question: bytes) -> bytes:
    """Ask, and return the whole answer."""
    client.sendall(question)
    answer = b""
    while len(answer) < len(question):
        data = client.recv(65536)
        assert data, "closed"
        answer += data
    return answer


def silent(client: socket.socket, seconds: float = 0.2) -> bool:
    """Tell whether nothing comes for a while, not even an end."""
    client.settimeout(seconds)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(20)
    return False


def test_a_healthy_proxy_changes_nothing(echo: Echo, proxy: Proxy) -> None:
    """Every byte arrives in order, and so does the end of a connection, at both ends."""
    block = bytes(range(256)) * 20_000
    with connected(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(block,))
        sender.start()
        answer = b""
        while len(answer) < len(block):
            answer += client.recv(65536)
        sender.join()
        assert answer == block
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""
    wait_until(lambda: echo.ended == ["closed"])
    wait_until(lambda: proxy.connections == 0)
    assert proxy.accepted == 1


def test_a_delay_is_for_each_way_and_may_change(proxy: Proxy) -> None:
    """What is sent in a row is late by the same time, not one after the other."""
    with connected(proxy) as client:
        proxy.delay = 0.3
        began = time.monotonic()
        for _ in range(5):
            client.sendall(b"x")
            time.sleep(0.02)
        got = b""
        while len(got) < 5:
            got += client.recv(5)
        assert 0.6 <= time.monotonic() - began < 1.8
        proxy.delay = 0
        assert answered(client, b"y") == b"y"


def test_what_is_dropped_is_silent_until_it_is_healed(echo: Echo, proxy: Proxy) -> None:
    """Neither data nor an end comes through, on old connections and new ones; nothing is lost."""
    with connected(proxy) as old:
        assert answered(old, b"a") == b"a"
        proxy.drop()
        with connected(proxy) as new, connected(proxy) as gone:
            old.sendall(b"b")
            new.sendall(b"c")
            gone.close()
            assert silent(old)
            assert silent(new)
            assert (echo.heard, echo.ended) == (b"a", [])
            proxy.heal()
            assert old.recv(1) == b"b"
            assert new.recv(1) == b"c"


def test_answers_alone_can_be_dropped(echo: Echo, proxy: Proxy) -> None:
    """The server does what it was told, and the client does not learn of it."""
    with connected(proxy) as client:
        proxy.drop(requests=False)
        client.sendall(b"do it")
        wait_until(lambda: echo.heard == b"do it")
        assert silent(client)
        with connected(proxy) as other:
            other.sendall(b"!")
            wait_until(lambda: echo.heard == b"do it!")
            assert silent(other)


def test_a_cut_resets_both_ends(echo: Echo, proxy: Proxy) -> None:
    """Client and server are told at once, and the next connection works."""
    with connected(proxy) as client:
        answered(client, b"x")
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
        wait_until(lambda: echo.ended == ["reset"])
        assert proxy.connections == 0
    with connected(proxy) as client:
        assert answered(client, b"x") == b"x"


@pytest.mark.parametrize("server_knows", [True, False])
def test_a_half_open_connection_never_ends(echo: Echo, proxy: Proxy, *, server_knows: bool) -> None:
    """The client hears nothing, and new connections work."""
    with connected(proxy) as client:
        answered(client, b"x")
        proxy.half_open(server_knows=server_knows)
        client.sendall(b"lost")
        assert silent(client)
        with connected(proxy) as other:
            assert answered(other, b"y") == b"y"
        proxy.heal()
        assert silent(client)
        wait_until(lambda: len(echo.ended) == 1 + server_knows)
        assert proxy.connections == 1
    wait_until(lambda: proxy.connections == 0)
    assert echo.heard == b"xy"
    assert ("reset" in echo.ended) is server_knows


def test_new_connections_can_be_refused(proxy: Proxy) -> None:
    """Nobody new gets in, those inside stay, and the port is the same afterwards."""
    with connected(proxy) as client:
        answered(client, b"x")
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
        assert answered(client, b"y") == b"y"
        proxy.heal()
        with connected(proxy) as other:
            assert answered(other, b"z") == b"z"


def test_without_a_server_a_connection_is_reset(echo: Echo, proxy: Proxy) -> None:
    """Whoever connects while there is no server behind the proxy is told so."""
    echo.close()
    # The reset may come before connect() has returned.
    with pytest.raises(ConnectionResetError), connected(proxy) as client:
        client.recv(1)


def test_nothing_is_left_of_a_proxy(echo: Echo) -> None:
    """Its thread, its port and its connections end with the block, whatever the fault."""
    for fault in (Proxy.drop, Proxy.half_open, Proxy.refuse):
        with Proxy(echo.url) as proxy:
            client = connected(proxy)
            answered(client, b"x")
            fault(proxy)
        with client, pytest.raises(ConnectionResetError):
            client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            connected(proxy)
    assert "proxy" not in [thread.name for thread in threading.enumerate()]


def test_a_database_is_reached_through_the_proxy(database: Database) -> None:
    """The URL that a proxy makes of another one leads to the same database."""
    url = database.url("psycopg")
    with Proxy(url) as proxy:
        through = proxy.url(url).replace("+psycopg", "")
        with psycopg.connect(through) as connection:
            assert connection.info.dbname == database.name
            assert connection.info.port == proxy.port
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")


def test_settings_reach_open_sessions_and_go_back(own_cluster: Cluster) -> None:
    """A setting of the server, of a role, and read-only mode take effect and end."""
    knobs = Knobs(own_cluster)
    role = knobs.role(lock_timeout="200ms")
    address = knobs.url_of(role, own_cluster.url("postgres", "psycopg")).replace("+psycopg", "")
    with psycopg.connect(address, autocommit=True) as session:
        assert session.execute("SELECT current_user").fetchone() == (role,)
        session.execute("CREATE TABLE t (i int)")
        with knobs.read_only():
            wait_until(lambda: shown(session, "default_transaction_read_only") == "on")
            with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
                session.execute("INSERT INTO t VALUES (1)")
        wait_until(lambda: shown(session, "default_transaction_read_only") == "off")
        session.execute("INSERT INTO t VALUES (1)")
        assert shown(session, "lock_timeout") == "200ms"
        with knobs.altered(statement_timeout="300ms", idle_session_timeout="1min"):
            wait_until(lambda: shown(session, "idle_session_timeout") == "1min")
            with pytest.raises(psycopg.errors.QueryCanceled):
                session.execute("SELECT pg_sleep(20)")


def shown(session: psycopg.Connection, name: str) -> str:
    """Return a session's setting."""
    ((value,),) = session.execute(f"SHOW {name}".encode()).fetchall()
    return str(value)


def test_sessions_are_ended_by_what_they_do(own_cluster: Cluster) -> None:
    """The listener is told from the others, in the database that was named."""
    knobs = Knobs(own_cluster)
    other = own_cluster.create_database()
    with own_cluster.connect() as listens, own_cluster.connect() as works:
        with own_cluster.connect(other) as elsewhere:
            for session in (listens, elsewhere):
                session.execute('LISTEN "here"')
            works.execute("SELECT 1")
            assert len(knobs.sessions(LISTENERS)) == 2
            assert knobs.sessions(LISTENERS, database="postgres") == [listens.info.backend_pid]
            assert knobs.terminate(LISTENERS, database="postgres") == 1
            with pytest.raises(psycopg.OperationalError):
                listens.execute("SELECT 1")
            works.execute("SELECT 1")
            elsewhere.execute("SELECT 1")
        assert knobs.terminate() == 1
        with pytest.raises(psycopg.OperationalError):
            works.execute("SELECT 1")


def test_a_crash_forgets_no_commit(own_cluster: Cluster) -> None:
    """What was committed a moment before is there when the server is back."""
    knobs = Knobs(own_cluster)
    own_cluster.psql("CREATE TABLE t (i int)")
    own_cluster.psql("INSERT INTO t VALUES (1)")
    knobs.crash()
    with pytest.raises(psycopg.OperationalError):
        own_cluster.psql("SELECT 1")
    own_cluster.start()
    own_cluster.psql("INSERT INTO t VALUES (2)")
    own_cluster.restart("immediate")
    assert own_cluster.psql("SELECT i FROM t ORDER BY i") == [(1,), (2,)]


def test_the_log_tells_faults_from_mistakes(own_cluster: Cluster) -> None:
    """Deadlocks, wrong statements and missing rights are complaints; an ended session is none."""
    own_cluster.psql("CREATE TABLE t (i int PRIMARY KEY)")
    own_cluster.psql("INSERT INTO t VALUES (1), (2)")
    with pytest.raises(psycopg.errors.SyntaxError):
        own_cluster.psql("SELEC before")
    knobs = Knobs(own_cluster)
    with own_cluster.connect() as session:
        knobs.terminate(f"pid = {session.info.backend_pid}")
    assert len(knobs.errors()) == 1
    assert knobs.complaints() == []
    with pytest.raises(psycopg.errors.SyntaxError):
        own_cluster.psql("SELEC 1")
    address = knobs.url_of(knobs.role(member_of=None), own_cluster.url("postgres", "psycopg"))
    with (
        psycopg.connect(address.replace("+psycopg", "")) as session,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        session.execute("SELECT * FROM t")
    deadlock(own_cluster)
    found = knobs.complaints()
    assert len(found) == 3
    for line, expected in zip(found, ("syntax error", "permission", "deadlock"), strict=True):
        assert expected in line


def deadlock(server: Cluster) -> None:
    """Lock two rows in two orders."""
    statement = "UPDATE t SET i = i WHERE i = %s"
    with server.connect() as one, server.connect() as two:
        for session in (one, two):
            session.execute("SET deadlock_timeout = '100ms'")
        one.execute("BEGIN")
        two.execute("BEGIN")
        one.execute(statement, (1,))
        two.execute(statement, (2,))
        failed: list[Exception] = []

        def lock(session: psycopg.Connection, number: int) -> None:
            try:
                session.execute(statement, (number,))
            except psycopg.errors.DeadlockDetected as error:
                failed.append(error)
            session.execute("ROLLBACK")

        threads = [threading.Thread(target=lock, args=pair) for pair in ((one, 2), (two, 1))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(failed) == 1
