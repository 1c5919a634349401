"""The server of a live page: one reader that stalls or leaves changes nothing for the others."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from shardwise.plugins.live.server import LOOPBACK, page_server

REQUEST = f"GET / HTTP/1.1\r\nHost: {LOOPBACK}\r\n\r\n".encode()


class LargePage:
    """A page that no socket's buffers hold."""

    policy = "default-src 'none'"

    def page(self) -> str:
        return "x" * 20_000_000

    def now(self, query: str) -> str | None:
        return "{}"


@pytest.fixture
def port() -> Iterator[int]:
    with page_server(LargePage(), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def status_of_now(port: int) -> int:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    connection.request("GET", "/now")
    return connection.getresponse().status


def test_a_reader_that_stalls_holds_nobody_up(port: int) -> None:
    with socket.create_connection((LOOPBACK, port)) as stalled:
        stalled.sendall(REQUEST)
        assert stalled.recv(1)  # the page is being sent
        assert status_of_now(port) == 200


def test_a_reader_that_leaves_prints_no_trace(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection((LOOPBACK, port)) as leaving:
        leaving.sendall(REQUEST)
        assert leaving.recv(1)
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    time.sleep(0.2)
    assert status_of_now(port) == 200
    assert capsys.readouterr().err == ""
