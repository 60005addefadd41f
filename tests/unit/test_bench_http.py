"""The bench's HTTP client: when packets came, and how connections end."""

import asyncio
import contextlib
import gzip
import shutil
import socket
import ssl
import struct
import subprocess
import threading
import time

import pytest

from paceline.bench import http, packets
from paceline.bench.answer import Answer
from paceline.bench.conversation import Turn
from paceline.bench.exchange import Exchange
from paceline.bench.http import ConnectionBrokenError, Origin, request_bytes, send
from paceline.bench.program import _new_loop
from paceline.bench.target import TargetError, find_model
from tests.fake_server import FINISH, ROLE, FakeServer, Script, delta, steady

BODY = b'{"stream":true}'
OWN_S = 0.001  # that a time may be wrong beyond what the server knows of its own writes


@pytest.fixture(params=[asyncio.new_event_loop, _new_loop])
def run(request):
    """Runs a coroutine in the loop of Python, and in that of the bench (uvloop, if installed)."""

    def run(coroutine):
        with asyncio.Runner(loop_factory=request.param) as runner:
            found = runner.run(coroutine)
        assert not packets._Poll._polls
        return found

    return run


async def ask(url: str, answer: Answer, body: bytes = BODY) -> float:
    origin = Origin.parse(url)
    request = request_bytes(origin, "POST", "/chat/completions", {}, body)
    async with asyncio.timeout(60):
        return await send(origin, request, answer)


def serve_once(reply: bytes, *, then: bytes = b"", tls: ssl.SSLContext | None = None) -> str:
    """Return the address of a server that writes `reply` whatever it is asked, and closes.

    With `then` it writes that until its reader leaves.
    """
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            connection = connection if tls is None else tls.wrap_socket(connection, True)
            connection.recv(65536)
            connection.sendall(reply)
            while then:
                connection.sendall(then)
        connection.close()
        listener.close()

    threading.Thread(target=answer, daemon=True).start()
    scheme = "http" if tls is None else "https"
    return f"{scheme}://127.0.0.1:{listener.getsockname()[1]}"


def test_a_packet_has_the_time_at_which_it_came_and_not_that_of_a_late_event_loop(run):
    script = Script(((0, ROLE), (150, delta(content="a"))), end="hang")
    answer = Answer(keeps_text=True)

    async def read_late(server: FakeServer) -> None:
        asking = asyncio.create_task(ask(server.url, answer))
        while answer.first_byte_at is None:
            await asyncio.sleep(0.001)
        while len(server.served[0].written_at) < 2:  # the event loop stands still meanwhile
            time.sleep(0.01)
        time.sleep(0.1)
        while not answer.arrivals:
            await asyncio.sleep(0.001)
        asking.cancel()

    with FakeServer(lambda number, body: script) as server:
        run(read_late(server))
    assert answer.text == "a"
    (arrival,) = answer.arrivals
    (served,) = server.served
    assert served.begun_at[1] - OWN_S <= arrival <= served.written_at[1] + OWN_S


def test_an_answer_ends_with_its_last_packet_and_its_times_rise(run):
    with FakeServer(lambda number, body: steady(ttft_ms=20, gap_ms=10, tokens=5)) as server:
        answer = Answer(keeps_text=True)
        ended_at = run(ask(server.url, answer))
    times = [answer.connected_at, answer.first_byte_at, *answer.arrivals, ended_at]
    assert times == sorted(times)
    (served,) = server.served
    assert served.begun_at[-1] - OWN_S <= ended_at <= served.ended_at + OWN_S


def test_a_clock_that_was_set_back_makes_no_packet_younger_than_its_reading():
    def told(moment: float) -> list[tuple[int, int, bytes]]:
        value = struct.pack("@ll", int(moment), int(moment % 1 * 1e9))
        return [(socket.SOL_SOCKET, packets._SO_TIMESTAMPNS, value)]

    now = time.perf_counter()
    assert packets._received_at(told(time.time() - 500)) == pytest.approx(now - 500, abs=50)
    assert now <= packets._received_at(told(time.time() + 500)) <= time.perf_counter()
    assert now <= packets._received_at([]) <= time.perf_counter()


def test_a_pause_between_the_readings_of_two_clocks_moves_no_packet(monkeypatch):
    """A process may lose its CPU anywhere: here for 30 ms before it reads the wall clock, twice."""
    elapsed, pauses = [0.0], [0.030, 0.030]

    class Clocks:
        @staticmethod
        def perf_counter() -> float:
            return 100.0 + elapsed[0]

        @staticmethod
        def time() -> float:
            elapsed[0] += pauses.pop() if pauses else 0.0
            return 5000.0 + elapsed[0]

    monkeypatch.setattr(packets, "time", Clocks)
    received = struct.pack("@ll", 4999, 500_000_000)
    at = packets._received_at([(socket.SOL_SOCKET, packets._SO_TIMESTAMPNS, received)])
    assert at == pytest.approx(99.5, abs=1e-6)


def test_a_clock_that_was_set_forward_puts_no_packet_before_the_connection(run, monkeypatch):
    monkeypatch.setattr(packets, "_received_at", lambda ancillary: time.perf_counter() - 3600)
    with FakeServer(lambda number, body: steady(ttft_ms=5, gap_ms=1, tokens=2)) as server:
        answer = Answer(keeps_text=True)
        run(ask(server.url, answer))
    assert list(answer.arrivals) == [answer.connected_at] * len(answer.arrivals)


def test_a_body_without_a_length_ends_with_its_connection(run):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    answer = Answer(keeps_text=True)
    run(ask(serve_once(head + delta(content="a") + FINISH), answer))
    assert (answer.text, answer.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("interim", [b"100 Continue", b"103 Early Hints\r\nContent-Length: 5"])
def test_a_response_is_what_follows_interim_ones(run, interim):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    answer = Answer(keeps_text=True)
    before = b"HTTP/1.1 %b\r\n\r\n" % interim
    run(ask(serve_once(before * 2 + head + delta(content="a") + FINISH), answer))
    assert (answer.status, answer.text, answer.finish_reason) == (200, "a", "stop")


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (b"", "connection lost"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "connection lost"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", "connection lost"),
        (b"nonsense\r\n\r\n", "no HTTP"),
    ],
)
def test_a_response_that_is_none_or_not_whole_is_a_broken_connection(run, reply, reason):
    with pytest.raises(ConnectionBrokenError, match=reason):
        run(ask(serve_once(reply), Answer(keeps_text=False)))


def test_an_answer_that_wants_no_more_ends_its_request_while_the_server_still_writes(run):
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: "
    answer = Answer(keeps_text=False)
    run(ask(serve_once(head, then=b"x" * 65536), answer))
    assert answer.error == "no answer: its event is longer than 4 MiB"


def test_a_server_that_sends_its_readers_elsewhere_is_told_with_its_place(run):
    reply = b"HTTP/1.1 307 X\r\nLocation: https://there/v1\r\nContent-Length: 0\r\n\r\n"
    answer = Answer(keeps_text=False)
    run(ask(serve_once(reply), answer))
    turn = Turn(messages=(), max_tokens=1)
    exchange = Exchange(idx=0, kind="x", turn_idx=0, turn=turn, answer=answer, scheduled_at=0.0)
    exchange.close(1.0)
    told = "it redirects to https://there/v1: name that address"
    assert (exchange.outcome, exchange.error) == ("error", f"HTTP 307: {told}")
    with pytest.raises(TargetError, match=rf"/v1/models answers 307 \({told}\)"):
        run(find_model(Origin.parse(serve_once(reply)), {}))


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_an_answer_that_is_compressed_says_so_and_none_is_asked_for(run, kind):
    body = gzip.compress(delta(content="a") + FINISH)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Encoding: gzip\r\n\r\n" % kind
    answer = Answer(keeps_text=True)
    run(ask(serve_once(head + body), answer))
    answer.finish(1.0)
    assert answer.error == "no answer: its body is gzip, and the request takes identity alone"
    request = request_bytes(Origin.parse("http://127.0.0.1:1"), "POST", "/x", {}, BODY)
    assert b"\r\nAccept-Encoding: identity\r\n" in request


@pytest.mark.parametrize("line", [b"X-%d: a\r\n" % 7 * 1000, b"x" * 65536])
def test_a_head_without_an_end_breaks_the_connection(run, line):
    endless = serve_once(b"HTTP/1.1 200 OK\r\nX-A: ", then=line)
    with pytest.raises(ConnectionBrokenError, match="head is longer than 256 KiB"):
        run(ask(endless, Answer(keeps_text=False)))


def test_a_port_where_nobody_listens_cannot_be_connected_to(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionBrokenError, match="cannot connect"):
        run(ask(f"http://127.0.0.1:{port}", Answer(keeps_text=False)))


def test_a_name_with_several_addresses_is_reached_where_somebody_listens(run, monkeypatch):
    find = socket.getaddrinfo
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
             (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]  # fmt: skip
    with FakeServer(lambda number, body: steady(ttft_ms=5, gap_ms=1, tokens=2)) as server:
        monkeypatch.setattr(
            socket, "getaddrinfo",
            lambda host, *rest, **more: found if host == "localhost" else find(host, *rest, **more),
        )  # fmt: skip
        answer = Answer(keeps_text=True)
        origin = Origin.parse(f"http://localhost:{server.port}")
        monkeypatch.undo()
        assert origin.address == "127.0.0.1"
        run(send(origin, request_bytes(origin, "POST", "/chat/completions", {}, BODY), answer))
    assert answer.text == " w0 w1"


def test_the_address_of_ipv6_stands_in_brackets_in_the_host_header():
    origin = Origin.parse("http://[::1]:8000")
    assert b"\r\nHost: [::1]:8000\r\n" in request_bytes(origin, "GET", "/models", {})
    assert origin.url == "http://[::1]:8000/v1"


def test_a_server_that_leaves_while_a_long_request_is_sent_ends_the_request(run):
    with pytest.raises(ConnectionBrokenError, match="connection lost"):
        run(ask(serve_once(b""), Answer(keeps_text=False), b"x" * 50_000_000))


def test_a_cancelled_request_closes_its_connection(run):
    async def leave(server: FakeServer) -> None:
        asking = asyncio.create_task(ask(server.url, Answer(keeps_text=False)))
        while not server.served:
            await asyncio.sleep(0.01)
        asking.cancel()
        while server.served[0].left_at is None:
            await asyncio.sleep(0.01)

    hanging = Script(((0, ROLE),), end="hang")
    with FakeServer(lambda number, body: hanging) as server:
        run(asyncio.wait_for(leave(server), timeout=60))


def test_a_reset_is_a_broken_connection_at_once(run):
    script = Script(((0, ROLE), (20, delta(content="a"))), end="reset")
    with FakeServer(lambda number, body: script) as server:
        for _ in range(5):
            with pytest.raises(ConnectionBrokenError, match="reset by peer"):
                run(ask(server.url, Answer(keeps_text=False)))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of its own for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    cert, key = (tmp_path_factory.mktemp("tls") / name for name in ("cert.pem", "key.pem"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=a",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.mark.parametrize("is_trusted", [True, False])
def test_tls_is_read_and_a_certificate_that_nobody_vouches_for_has_a_remedy(
    run, certificate, monkeypatch, is_trusted
):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    http._tls.cache_clear()
    answer = Answer(keeps_text=True)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    asking = ask(serve_once(head + delta(content="a") + FINISH, tls=context), answer)
    if is_trusted:
        run(asking)
        assert (answer.text, answer.finish_reason) == ("a", "stop")
    else:
        with pytest.raises(ConnectionBrokenError, match=r"self-signed .*SSL_CERT_FILE=FILE\.pem"):
            run(asking)
    http._tls.cache_clear()
