"""URLs: which are fetched, to which address the connection goes, how much is read, and what is left open afterwards.

Servers are real and on loopback; names are answered by a resolver of the test's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import random
import re
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trustme
from PIL import Image
from toy import PlainToy, toy_spec

from mm_plugin.errors import LimitError, MediaError, MMPluginError, UsageError
from mm_plugin.media import ImageSource, http, open_image
from mm_plugin.media.http import fetch, fetch_async
from mm_plugin.processor import ModelProcessor
from mm_plugin.settings import Settings

PATH = "images[1]"
HOST = "media.test"
BODY = b"\x00body\xff" * 5


def ok(body: bytes = BODY, *headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def redirect(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()


def chunked(*pieces: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


class Server:
    """Answers every connection in a thread: with bytes, or by a function of the connection and the request's head."""

    def __init__(
        self, answer: Any, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer, self.tls = answer, tls
        self.patient = False
        self.heads: list[bytes] = []
        self.names: list[str | None] = []
        self.sent = 0
        self.stopped = threading.Event()
        self.threads: list[threading.Thread] = []
        self.listener = socket.create_server((address, port))
        self.port = self.listener.getsockname()[1]
        if tls:
            tls.sni_callback = lambda connection, name, context: self.names.append(name)
        self.start(self.accept)

    def start(self, *call: Any) -> None:
        self.threads.append(threading.Thread(target=call[0], args=call[1:]))
        self.threads[-1].start()

    def accept(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            self.start(self.serve, connection)

    def serve(self, connection: socket.socket) -> None:
        connection.settimeout(20)
        try:
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
            with connection:
                head = b""
                while b"\r\n\r\n" not in head:
                    piece = connection.recv(1 << 16)
                    if not piece:
                        return
                    head += piece
                    if head[:1] == b"\x16" and not self.patient:  # somebody speaks TLS to a server that does not
                        return
                self.heads.append(head)
                if callable(self.answer):
                    self.answer(self, connection, head)
                else:
                    connection.sendall(self.answer)
        except OSError:
            pass
        finally:
            connection.close()

    def send(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.sent += len(data)

    def close(self) -> None:
        if self.stopped.is_set():
            return
        self.stopped.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()

    def header(self, name: str) -> list[str]:
        lines = [line for head in self.heads for line in head.decode().split("\r\n")]
        return [line.partition(": ")[2] for line in lines if line.lower().startswith(f"{name}:")]


def open_sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += str(entry.readlink()).startswith("socket:")
    return found


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = open_sockets()
    yield
    assert open_sockets() == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mm-plugin-fetch")]


@pytest.fixture
def serve(_nothing_stays_open: None) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answer: Any, **arguments: Any) -> Server:
        servers.append(Server(answer, **arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Names:
    """A resolver: a list of addresses for each name, of lists, one for each time it is asked, or a function."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {HOST: ["127.0.0.1"]}
        self.asked: list[str] = []
        self.threads: set[int] = set()

    def __call__(self, host: Any, port: Any, *args: Any, **named: Any) -> list[Any]:
        self.asked.append(host)
        self.threads.add(threading.get_ident())
        answer = self.answers.get(host)
        if callable(answer):
            answer = answer()
        elif answer and isinstance(answer[0], list):
            answer = answer.pop(0)
        if not answer:
            raise socket.gaierror(socket.EAI_NONAME, f"secret resolver says: {host} is unknown")
        return [
            (socket.AF_INET6 if ":" in found else socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, port or 0))
            for found in answer
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    return made


def sync_opener(*arguments: Any) -> bytes:
    return fetch(*arguments)


def async_opener(*arguments: Any) -> bytes:
    return asyncio.run(fetch_async(*arguments))


@pytest.fixture(params=[sync_opener, async_opener], ids=["sync", "async"])
def opener(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    return request.param


def limits(*servers: Server, **changes: Any) -> Settings:
    """Settings under which the test's hosts are fetched from, private as they are."""
    hosts = tuple(f"{prefix}{HOST}:{server.port}" for server in servers for prefix in ("", "*."))
    return Settings(**{"allowed_hosts": hosts, "private_hosts": hosts, "fetch_seconds": 20.0} | changes)


def refused(opener: Callable[..., bytes], url: str, settings: Settings, kind: type[MMPluginError] = MediaError) -> Any:
    with pytest.raises(kind) as caught:
        opener(url, PATH, settings)
    error: Any = caught.value
    assert type(error) is kind
    assert error.path == PATH
    assert str(error).startswith(f"{PATH}: ")
    if kind is MediaError:
        assert error.reason == "url"
    # Never a path, a query, a password or an address that the client did not write.
    assert "secret" not in str(error)
    host = re.sub(r"^\w+://([^/?#]*@)?", "", url)
    assert not [found for found in re.findall(r"\d+\.\d+\.\d+\.\d+|\w*::\w*", str(error)) if found not in host]
    return error


# --- what is fetched ---------------------------------------------------------------------------------------------------


def test_a_url_is_fetched(opener: Callable[..., bytes], serve: Callable[..., Server], names: Names) -> None:
    server = serve(ok())
    assert opener(f"http://{HOST}:{server.port}/secret/a.png?b=%20c#d", PATH, limits(server)) == BODY
    assert server.heads[0].startswith(b"GET /secret/a.png?b=%20c HTTP/1.1\r\n")
    assert server.header("host") == [f"{HOST}:{server.port}"]
    assert server.header("accept-encoding") == ["identity"]
    assert server.header("authorization") == server.header("cookie") == []
    assert names.asked == [HOST]


@pytest.mark.parametrize(
    "answer",
    [
        chunked(BODY[:3], BODY[3:], b""),
        b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
        ok(BODY, "Content-Encoding: identity"),
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + ok(),
    ],
    ids=["chunks", "until closed", "identity", "interim answers"],
)
def test_every_framing_is_read(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, answer: bytes
) -> None:
    server = serve(answer)
    assert opener(f"http://{HOST}:{server.port}/", PATH, limits(server)) == BODY


def test_an_image_after_a_url_is_the_image(serve: Callable[..., Server], names: Names) -> None:
    pixels = (np.arange(8 * 6 * 3) % 256).astype(np.uint8).reshape(8, 6, 3)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    server = serve(ok(buffer.getvalue()))
    found = open_image(f"HTTP://{HOST.upper()}.:{server.port}/", path=PATH, settings=limits(server)).decode()
    assert np.array_equal(found.pixels, pixels)
    empty = serve(ok(b""))
    with pytest.raises(MediaError) as caught:
        open_image(f"http://{HOST}:{empty.port}/", path=PATH, settings=limits(empty))
    assert caught.value.reason == "empty"


def test_the_sync_opener_opens_where_a_loop_runs(serve: Callable[..., Server], names: Names) -> None:
    server = serve(ok())

    async def call() -> bytes:
        return fetch(f"http://{HOST}:{server.port}/", PATH, limits(server))

    assert asyncio.run(call()) == BODY


def test_neither_the_environment_s_proxies_nor_its_passwords_are_used(
    opener: Callable[..., bytes],
    serve: Callable[..., Server],
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    server, proxy = serve(ok()), serve(ok(b"from the proxy"))
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
    (tmp_path / "netrc").write_text(f"machine {HOST} login a password b\nmachine 127.0.0.1 login a password b\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert opener(f"http://{HOST}:{server.port}/", PATH, limits(server)) == BODY
    assert proxy.heads == []
    assert server.header("authorization") == []


def test_urls_are_not_logged(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server = serve(ok())
    opener(f"http://{HOST}:{server.port}/secret", PATH, limits(server))
    assert [record for record in caplog.records if record.name != "asyncio"] == []


# --- which hosts -------------------------------------------------------------------------------------------------------


def test_nothing_is_fetched_without_an_allow_list(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    server = serve(ok())
    error = refused(opener, f"http://{HOST}:{server.port}/secret", limits(server, allowed_hosts=()))
    assert "MM_PLUGIN_ALLOWED_HOSTS" in str(error)
    assert names.asked == server.heads == []


def test_a_missing_httpx_is_the_operator_s_fault(
    opener: Callable[..., bytes], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    http._open_tls.cache_clear()
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'mm-plugin[http]'")) as caught:
        opener(f"http://{HOST}/", PATH, Settings(allowed_hosts=(HOST,)))
    assert caught.value.argument == "allowed_hosts"
    refused(opener, f"http://{HOST}/", Settings())


LISTED = [
    # entry, URL, whether it is allowed
    ("media.test", "http://media.test/", True),
    ("media.test", "https://media.test:443/", True),
    ("Media.TEST.", "http://mEDIA.test./", True),
    ("media.test", "http://media.test:8080/", False),
    ("media.test", "https://media.test:80/", False),
    ("media.test:80", "http://media.test/", True),
    ("media.test:80", "https://media.test/", False),
    ("media.test:8080", "http://media.test:8080/", True),
    ("media.test:8080", "http://media.test/", False),
    ("media.test", "http://a.media.test/", False),
    ("media.test", "http://xmedia.test/", False),
    ("media.test", "http://media.test.evil/", False),
    ("media.test", "http://media.test../", False),
    ("*.media.test", "http://a.media.test/", True),
    ("*.media.test", "http://a.b.media.test/", True),
    ("*.media.test", "http://media.test/", False),
    ("*.media.test", "http://.media.test/", False),
    ("*.media.test", "http://xmedia.test/", False),
    ("*.media.test", "http://media.test.evil/", False),
    ("*.media.test", "http://evil%2f.media.test/", False),
    ("*.media.test", "http://evil%00.media.test/", False),
    ("*.media.test:81", "http://a.media.test:81/", True),
    ("bücher.test", "http://b%C3%BCcher.test/", False),
    ("bücher.test", "http://BÜCHER.test/", True),
    ("bücher.test", "http://xn--bcher-kva.test/", True),
    ("xn--bcher-kva.test", "http://bücher.test/", True),
    ("xn--bcher-kva.test", "http://bücher。test/", True),
    ("bücher.test", "http://bucher.test/", False),
    ("1.2.3.4", "http://1.2.3.4/", True),
    ("[2600::1]", "http://[2600::1]/", True),
    ("[2600::1]:81", "http://[2600::1]:81/", True),
    ("[2600::1]", "http://[2600::2]/", False),
]


@pytest.mark.parametrize(("entry", "url", "good"), LISTED, ids=[f"{entry} {url}" for entry, url, _ in LISTED])
def test_hosts_and_ports_are_those_of_the_list(names: Names, entry: str, url: str, good: bool) -> None:
    error = refused(sync_opener, url, Settings(allowed_hosts=("other.test", entry)))
    # No name is known here: what is allowed fails when its address is asked for, all else before.
    assert len(names.asked) == good
    assert ("no public address" in str(error)) == good


@pytest.mark.parametrize("setting", ["allowed_hosts", "private_hosts"])
@pytest.mark.parametrize(
    "entry",
    [
        *(
            "",
            "*",
            "*.",
            "a.*.test",
            "http://a.test",
            "a.test/x",
            "a.test?x",
            "u@a.test",
            "a b",
            "a..test",
            "\uff41.test",
        ),
        *("::1", "[x]", "a.test:0", "a.test:65536", "a.test:x"),
    ],
)
def test_an_entry_that_is_no_host_is_the_operator_s_fault(names: Names, setting: str, entry: str) -> None:
    with pytest.raises(UsageError, match=f"setting {setting}") as caught:
        fetch(f"http://{HOST}/", PATH, Settings(**{"allowed_hosts": (HOST,)} | {setting: (entry, HOST)}))
    assert caught.value.argument == setting
    assert names.asked == []


@pytest.mark.parametrize(
    "url",
    [
        "http://user:secret@media.test/",
        "http://secret@media.test/",
        "http://media.test\\@evil.test/",
        "http://evil.test\\@media.test/",
        "http://media.test@evil.test/",
        "http://evil.test#@media.test/",
        "http://evil.test?media.test/",
        "http://evil.test/media.test",
        "http:///media.test/",
        "http://",
        "http://?media.test",
        "http://[media.test]/",
        "http://media.test:port/",
        "http://media.test:-1/",
        "http://media.test:0/",
        "http://media.test:99999999999/",
        "http://media.test /secret",
        "http://media.test\r\nX: secret/",
        "http://media.test/\r\nHost: evil.test",
        "http://media.test/\x00",
        "http://media.test/\ud800",
        "http://\ud800.test/",
        "http://xn--\u00fc.test/",
        "http://" + "a" * 64 + ".test/",
        "http://media.test/" + "a" * 16_384,
    ],
    ids=lambda url: ascii(url)[:40],
)
def test_a_url_that_means_two_things_or_none_is_refused(
    serve: Callable[..., Server], names: Names, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    names.answers["evil.test"] = ["127.0.0.1"]
    refused(sync_opener, url, Settings(allowed_hosts=(HOST,), private_hosts=(HOST,)))
    assert names.asked == []


# --- which addresses ---------------------------------------------------------------------------------------------------

PRIVATE = """
    0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.8.9.1 169.254.169.254 172.16.0.1 172.31.255.255
    168.63.129.16 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1 192.168.0.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
    239.255.255.255 240.0.0.1 255.255.255.255
    :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 64:ff9b::127.0.0.1
    64:ff9b::a9fe:a9fe 64:ff9b:1::808:808 100::1 2001::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 2001:10::1 2001:20::1
    2001:db8::1 2002:7f00:1::1 2002:808:808::1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%lo fec0::1 ff02::1
""".split()  # noqa: SIM905
PUBLIC = """
    1.1.1.1 8.8.8.8 11.0.0.1 93.184.216.34 100.63.255.255 100.128.0.1 126.255.255.255 128.0.0.1 169.253.0.1 172.15.0.1
    172.32.0.1 191.255.0.1 192.0.1.1 193.0.0.1 223.255.255.255 2001:4860:4860::8888 2606:4700:4700::1111 2a00::1 64:ff9b::8.8.8.8
""".split()  # noqa: SIM905


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_outside_the_public_internet_is_refused(names: Names, address: str) -> None:
    for answer in ([address], ["8.8.8.8", address]):  # one bad address is enough
        names.answers[HOST] = answer
        error = refused(
            sync_opener, f"http://{HOST}/secret", Settings(allowed_hosts=(HOST,), private_hosts=("*." + HOST,))
        )
        assert "no public address" in str(error)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_connected_to(
    opener: Callable[..., bytes],
    serve: Callable[..., Server],
    names: Names,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
) -> None:
    server = serve(ok())
    wanted: list[Any] = []
    original = anyio.connect_tcp

    async def connect(remote_host: str, remote_port: int, **arguments: Any) -> Any:
        wanted.append((remote_host, remote_port))
        return await original("127.0.0.1", server.port, **arguments)

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    names.answers[HOST] = [address]
    assert opener(f"http://{HOST}/", PATH, Settings(allowed_hosts=(HOST,))) == BODY
    assert wanted == [(address, 80)]
    assert server.header("host") == [HOST]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "[::1]", "[::ffff:7f00:1]"]
)
def test_an_address_in_the_url_is_checked_like_any_other(serve: Callable[..., Server], host: str) -> None:
    # The machine's own resolver reads all of them as loopback.
    server = serve(ok())
    refused(sync_opener, f"http://{host}:{server.port}/", limits(server))
    refused(sync_opener, f"http://{host}:{server.port}/", limits(server, allowed_hosts=(f"{host}:{server.port}",)))
    assert server.heads == []


def test_a_second_answer_of_the_name_server_counts_for_nothing(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    good = serve(ok())
    bad = serve(ok(b"internal"), address="127.0.0.2", port=good.port)
    names.answers[HOST] = [["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]]
    assert opener(f"http://{HOST}:{good.port}/", PATH, limits(good)) == BODY
    assert names.asked == [HOST]
    assert bad.heads == []


def test_a_name_is_checked_again_at_every_redirect(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Public at first; at the redirect to itself it turns out private.
    server = serve(redirect("/again"))
    original = anyio.connect_tcp

    async def connect(remote_host: str, remote_port: int, **arguments: Any) -> Any:
        assert remote_host == "8.8.8.8"
        return await original("127.0.0.1", server.port, **arguments)

    monkeypatch.setattr(anyio, "connect_tcp", connect)
    names.answers[HOST] = [["8.8.8.8"], ["127.0.0.1"]]
    assert "no public address" in str(refused(opener, f"http://{HOST}/", Settings(allowed_hosts=(HOST,))))
    assert names.asked == [HOST, HOST]
    assert len(server.heads) == 1


def test_the_next_address_is_tried_when_one_takes_no_connection(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    server = serve(ok())
    # Nobody listens at the first; the second lets every connection wait.
    with socket.create_server(("127.0.0.3", server.port), backlog=0) as full, socket.socket() as waiting:
        waiting.connect(full.getsockname())
        names.answers[HOST] = ["127.0.0.2", "127.0.0.3", "127.0.0.1"]
        assert opener(f"http://{HOST}:{server.port}/", PATH, limits(server, fetch_seconds=3.0)) == BODY


def test_no_more_than_four_addresses_are_tried(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    server = serve(ok())
    names.answers[HOST] = [f"127.0.0.{last}" for last in range(2, 200)] + ["127.0.0.1"]
    assert "ConnectError" in str(refused(opener, f"http://{HOST}:{server.port}/", limits(server)))


def test_a_private_host_needs_no_port_of_its_own(serve: Callable[..., Server], names: Names) -> None:
    server = serve(ok())
    assert fetch(f"http://{HOST}:{server.port}/", PATH, limits(server, private_hosts=(HOST,))) == BODY
    for other in ("evil.test", "*.media.test", f"{HOST}:1"):
        refused(sync_opener, f"http://{HOST}:{server.port}/", limits(server, private_hosts=(other,)))
    refused(sync_opener, f"http://{HOST}:{server.port}/", limits(server, allowed_hosts=("a.test",)))


def test_unknown_and_private_names_cannot_be_distinguished(opener: Callable[..., bytes], names: Names) -> None:
    names.answers["db.media.test"] = ["10.0.0.1"]
    settings = Settings(allowed_hosts=("*.media.test",))
    private, unknown = (
        str(refused(opener, f"http://{name}/", settings)) for name in ("db.media.test", "nodb.media.test")
    )
    assert private == unknown.replace("nodb", "db")


# --- redirects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("location", ["/b?c", "b?c", "//media.test:{port}/b?c", "http://media.test:{port}/b?c#d"])
def test_redirects_are_followed(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, status: int, location: str
) -> None:
    def answer(server: Server, connection: socket.socket, head: bytes) -> None:
        moved = redirect(location.format(port=server.port), status)
        connection.sendall(moved if head.startswith(b"GET /a") else ok())

    server = serve(answer)
    assert opener(f"http://{HOST}:{server.port}/a", PATH, limits(server)) == BODY
    assert server.heads[1].startswith(b"GET /b?c HTTP/1.1\r\n")
    assert server.header("host") == [f"{HOST}:{server.port}"] * 2


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_redirects_end(opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, allowed: int) -> None:
    server = serve(redirect("/secret"))
    error = refused(opener, f"http://{HOST}:{server.port}/", limits(server, max_redirects=allowed))
    assert "max_redirects" in str(error)
    assert len(server.heads) == allowed + 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/secret",
        "http://secret.test/",
        "http://private.media.test:{port}/",
        "http://u:secret@media.test:{port}/",
        "http://media.test/other-port",
        "https://media.test:{port}/no-tls-there",
        "file:///etc/passwd",
        "ftp://media.test:{port}/",
        "gopher://media.test:{port}/",
        "data:text/plain,secret",
        "javascript:secret",
        "http://[::secret/",
        "\x01secret",
        "/" + "a" * 70_000,
    ],
    ids=lambda location: ascii(location)[:30],
)
def test_a_redirect_is_checked_as_the_first_url(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, location: str
) -> None:
    server = serve(lambda server, connection, head: connection.sendall(redirect(location.format(port=server.port))))
    names.answers |= {"private.media.test": ["127.0.0.1"], "secret.test": ["127.0.0.1"]}
    settings = limits(server, private_hosts=(HOST,))
    text = str(refused(opener, f"http://{HOST}:{server.port}/", settings))
    assert HOST in text
    assert ("must use http: or https:" in text) == (
        location.split(":", maxsplit=1)[0] in ("file", "ftp", "gopher", "data", "javascript")
    )
    assert len(server.heads) == 1


def test_an_answer_that_is_no_redirect_leads_nowhere(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    server = serve(ok(BODY, "Location: /secret"))
    assert opener(f"http://{HOST}:{server.port}/", PATH, limits(server)) == BODY
    server.answer = redirect("/secret", 201)
    assert "status 201" in str(refused(opener, f"http://{HOST}:{server.port}/", limits(server)))
    assert len(server.heads) == 2


@pytest.mark.parametrize(
    "status", [100, 101, 201, 204, 206, 300, 302, 304, 400, 401, 403, 404, 418, 429, 500, 503, 999]
)
def test_only_status_200_is_taken(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, status: int
) -> None:
    server = serve(f"HTTP/1.1 {status} Why\r\nContent-Length: 3\r\n\r\nabc".encode())
    error = refused(opener, f"http://{HOST}:{server.port}/secret", limits(server))
    if status > 101:
        assert f"status {status}" in str(error)


# --- bytes -------------------------------------------------------------------------------------------------------------

LIMIT = 1 << 20
# What may be under way when the reader stops: the socket buffers of both sides, and what one read takes.
UNDER_WAY = 8 << 20


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK", "HTTP/1.1 200 OK\r\nContent-Length: 999999999999", "chunked"])
def test_an_endless_body_is_read_to_the_limit(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, head: str
) -> None:
    def answer(server: Server, connection: socket.socket, _: bytes) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        start = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked" if head == "chunked" else head
        connection.sendall(start.encode() + b"\r\n\r\n")
        piece = b"8000\r\n" + bytes(0x8000) + b"\r\n" if head == "chunked" else bytes(0x8000)
        while not server.stopped.is_set():
            server.send(connection, piece)

    server = serve(answer)
    error = refused(opener, f"http://{HOST}:{server.port}/", limits(server, max_media_bytes=LIMIT), LimitError)
    assert (error.setting, error.limit) == ("max_media_bytes", LIMIT)
    assert LIMIT < error.value < LIMIT + (1 << 19) or error.value == 999999999999
    server.threads[1].join(20)  # it can send no more once the reader has hung up
    assert not server.threads[1].is_alive()
    assert server.sent < LIMIT + UNDER_WAY


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("frame", [ok, lambda body: chunked(body, b""), lambda body: b"HTTP/1.1 200 OK\r\n\r\n" + body])
def test_the_limit_is_exact(
    opener: Callable[..., bytes],
    serve: Callable[..., Server],
    names: Names,
    frame: Callable[[bytes], bytes],
    extra: int,
) -> None:
    body = bytes(range(256)) * 4
    server = serve(frame(body))
    settings = limits(server, max_media_bytes=len(body) - extra)
    if extra > 0:
        assert refused(opener, f"http://{HOST}:{server.port}/", settings, LimitError).value == len(body)
    else:
        assert opener(f"http://{HOST}:{server.port}/", PATH, settings) == body


def test_a_length_over_the_limit_is_refused_before_the_body(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    def answer(server: Server, connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        assert connection.recv(1) == b""  # it hangs up without a byte of the body
        server.sent = -1

    server = serve(answer)
    assert (
        refused(opener, f"http://{HOST}:{server.port}/", limits(server, max_media_bytes=999), LimitError).value == 1000
    )
    server.close()
    assert server.sent == -1


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "br", "zstd", "x", "identity, gzip", "gzip, gzip"])
def test_compressed_answers_are_refused(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, coding: str
) -> None:
    server = serve(ok(BODY, f"Content-Encoding: {coding}"))
    assert "content encoding that was not requested" in str(
        refused(opener, f"http://{HOST}:{server.port}/", limits(server))
    )


@pytest.mark.parametrize(
    "answer",
    [
        ok()[:-1],
        chunked(BODY),
        chunked(BODY)[:-9],
        ok()[:20],
        b"",
        b"\x00\xff" * 50,
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1" + b"0" * 5000 + b"\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\nabc",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000 + b"\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffffffffffff\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 300_000 + b"\r\nabc",
        b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe\r\n\r\n",
    ],
    ids=range(15),
)
def test_a_broken_answer_is_a_media_error(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, answer: bytes
) -> None:
    server = serve(answer)
    refused(opener, f"http://{HOST}:{server.port}/secret", limits(server, max_redirects=0))


@pytest.mark.parametrize("count", [pytest.param(60, id="some"), pytest.param(3000, marks=pytest.mark.slow, id="many")])
def test_mutated_answers_end_in_bytes_or_a_media_error(serve: Callable[..., Server], names: Names, count: int) -> None:
    draw = random.Random(5)
    good = [ok(), chunked(BODY, b""), redirect("/a"), b"HTTP/1.1 100 Continue\r\n\r\n" + ok(BODY, "X: y")]
    server = serve(b"")

    async def call() -> None:
        for _ in range(count):
            answer = bytearray(draw.choice(good))
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(len(answer))
                answer[at : at + draw.randint(0, 3)] = draw.randbytes(draw.randint(0, 3))
            server.answer = bytes(answer)
            with contextlib.suppress(MediaError):
                assert isinstance(await fetch_async(f"http://{HOST}:{server.port}/", PATH, limits(server)), bytes)

    asyncio.run(call())


# --- time --------------------------------------------------------------------------------------------------------------


def drip(data: bytes, head: bytes = b"") -> Callable[..., None]:
    def answer(server: Server, connection: socket.socket, _: bytes) -> None:
        connection.sendall(head)
        while not server.stopped.wait(0.02):
            connection.sendall(data)

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        drip(b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"),
        drip(b"x", b"HTTP/1.1 200 OK\r\nX: "),
        drip(b"HTTP/1.1 100 Continue\r\n\r\n"),
        drip(b""),
    ],
    ids=["body", "head", "interim answers", "silence"],
)
def test_time_counts_for_the_whole_and_not_for_each_read(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, answer: Any
) -> None:
    server = serve(answer)
    start = time.monotonic()
    assert "fetch_seconds" in str(
        refused(opener, f"http://{HOST}:{server.port}/secret", limits(server, fetch_seconds=0.4))
    )
    assert 0.4 <= time.monotonic() - start < 5


def test_time_counts_for_all_redirects_together(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    def answer(server: Server, connection: socket.socket, _: bytes) -> None:
        server.stopped.wait(0.15)
        connection.sendall(redirect("/"))

    server = serve(answer)
    settings = limits(server, fetch_seconds=0.5, max_redirects=1000)
    assert "fetch_seconds" in str(refused(opener, f"http://{HOST}:{server.port}/", settings))
    assert len(server.heads) <= 4


def test_a_name_server_that_never_answers_takes_no_more_than_the_time(
    opener: Callable[..., bytes], names: Names
) -> None:
    waiting = threading.Event()
    names.answers[HOST] = lambda: waiting.wait() and None
    try:
        start = time.monotonic()
        assert "fetch_seconds" in str(
            refused(opener, f"http://{HOST}/", Settings(allowed_hosts=(HOST,), fetch_seconds=0.3))
        )
        assert time.monotonic() - start < 5
    finally:
        names.answers.clear()
        waiting.set()


def test_a_handshake_that_never_ends_takes_no_more_than_the_time(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names
) -> None:
    server = serve(b"")
    server.patient = True
    error = refused(opener, f"https://{HOST}:{server.port}/", limits(server, fetch_seconds=0.4))
    assert "fetch_seconds" in str(error)


# --- TLS ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def certify(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., ssl.SSLContext]]:
    """Makes a server's side of TLS for names. Its authority is trusted as an operator's own is: by SSL_CERT_FILE."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    http._open_tls.cache_clear()

    def make(*hosts: str) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(*hosts).configure_cert(context)
        return context

    yield make
    http._open_tls.cache_clear()


def test_tls_is_spoken_with_the_name_and_not_with_the_address(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, certify: Any
) -> None:
    server = serve(ok(), tls=certify(HOST))
    assert opener(f"https://{HOST}.:{server.port}/", PATH, limits(server)) == BODY
    assert server.names == [HOST]
    assert server.header("host") == [f"{HOST}:{server.port}"]


@pytest.mark.parametrize("hosts", [("other.test",), ("127.0.0.1",), ("*.media.test",)])
def test_a_certificate_for_another_name_is_refused(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, certify: Any, hosts: tuple[str, ...]
) -> None:
    server = serve(ok(), tls=certify(*hosts))
    assert "cannot be fetched" in str(refused(opener, f"https://{HOST}:{server.port}/", limits(server)))
    assert server.heads == []


def test_an_unknown_authority_is_refused(
    opener: Callable[..., bytes],
    serve: Callable[..., Server],
    names: Names,
    certify: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve(ok(), tls=certify(HOST))
    monkeypatch.delenv("SSL_CERT_FILE")
    http._open_tls.cache_clear()
    assert "cannot be fetched" in str(refused(opener, f"https://{HOST}:{server.port}/", limits(server)))
    assert server.heads == []


def test_a_connection_of_another_name_is_not_used_again(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, certify: Any
) -> None:
    # Both names have one address, and its certificate holds for the first alone.
    names.answers["a.media.test"] = ["127.0.0.1"]
    server = serve(
        lambda server, connection, head: connection.sendall(redirect(f"https://a.{HOST}:{server.port}/")),
        tls=certify(HOST),
    )
    assert "cannot be fetched" in str(refused(opener, f"https://{HOST}:{server.port}/", limits(server)))
    assert server.names == [HOST, f"a.{HOST}"]
    assert len(server.heads) == 1


def test_a_redirect_may_lead_to_tls_and_not_away_from_it(
    opener: Callable[..., bytes], serve: Callable[..., Server], names: Names, certify: Any
) -> None:
    secure, plain = serve(ok(), tls=certify(HOST)), serve(b"")
    plain.answer = redirect(f"https://{HOST}:{secure.port}/")
    settings = limits(secure, plain)
    assert opener(f"http://{HOST}:{plain.port}/", PATH, settings) == BODY
    secure.answer, plain.answer = redirect(f"http://{HOST}:{plain.port}/"), ok()
    assert "must not leave https:" in str(refused(opener, f"https://{HOST}:{secure.port}/", settings))
    assert len(plain.heads) == 1


# --- threads, cancellation ---------------------------------------------------------------------------------------------


def test_names_and_certificates_are_read_off_the_loop(
    serve: Callable[..., Server], names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    import httpx

    server, built, original = serve(ok()), set(), httpx.create_ssl_context
    http._open_tls.cache_clear()
    monkeypatch.setattr(httpx, "create_ssl_context", lambda: built.add(threading.get_ident()) or original())

    async def call() -> int:
        await fetch_async(f"http://{HOST}:{server.port}/", PATH, limits(server))
        return threading.get_ident()

    loop_thread = asyncio.run(call())
    assert len(names.threads) == len(built) == 1
    assert loop_thread not in names.threads | built


def test_others_have_their_turn_while_tiny_chunks_come_in(serve: Callable[..., Server], names: Names) -> None:
    body = b"a" * 5_000
    server, turns, done = serve(chunked(*[b"a"] * len(body), b"")), 0, False

    async def count() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    async def call() -> bytes:
        nonlocal done
        counting = asyncio.create_task(count())
        found = await fetch_async(f"http://{HOST}:{server.port}/", PATH, limits(server))
        done = True
        await counting
        return found

    assert asyncio.run(call()) == body
    assert turns >= len(body)


@pytest.mark.parametrize("tls", [False, True], ids=["http", "https"])
def test_a_cancelled_fetch_leaves_nothing_open(
    serve: Callable[..., Server], names: Names, certify: Any, tls: bool
) -> None:
    begun, gone = threading.Event(), threading.Event()

    def answer(server: Server, connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        begun.set()
        with contextlib.suppress(OSError):  # TLS tells that the other side hung up without a word
            assert connection.recv(1) == b""
        gone.set()

    server = serve(answer, tls=certify(HOST) if tls else None)

    async def call() -> bool:
        url = f"http{'s' * tls}://{HOST}:{server.port}/"
        task = asyncio.create_task(fetch_async(url, PATH, limits(server)))
        await asyncio.to_thread(begun.wait, 10)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(gone.wait, 10)  # while the loop still runs

    assert asyncio.run(call())


def test_a_fetch_cancelled_while_tls_begins_leaves_nothing_open(serve: Callable[..., Server], names: Names) -> None:
    server = serve(b"")
    server.patient = True

    async def call() -> None:
        before = open_sockets()
        task = asyncio.create_task(fetch_async(f"https://{HOST}:{server.port}/", PATH, limits(server)))
        while len(server.threads) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(server.threads[1].join, 5)  # while the loop still runs
        assert not server.threads[1].is_alive()
        assert open_sockets() == before

    asyncio.run(call())


def test_cancelling_while_a_name_is_resolved_frees_the_caller(names: Names) -> None:
    waiting = threading.Event()
    names.answers[HOST] = lambda: waiting.wait() and None

    async def call() -> None:
        task = asyncio.create_task(
            fetch_async(f"http://{HOST}/", PATH, Settings(allowed_hosts=(HOST,), fetch_seconds=60))
        )
        while not names.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        asyncio.run(call())
    finally:
        names.answers.clear()
        waiting.set()


def test_many_are_fetched_at_once(serve: Callable[..., Server], names: Names) -> None:
    server = serve(lambda server, connection, head: connection.sendall(ok(head.split()[1])))

    async def call() -> list[bytes]:
        urls = [f"http://{HOST}:{server.port}/{index}" for index in range(50)]
        return await asyncio.gather(*(fetch_async(url, PATH, limits(server)) for url in urls))

    assert asyncio.run(call()) == [f"/{index}".encode() for index in range(50)]


def test_a_forked_child_can_fetch(fresh: Callable[..., Any]) -> None:
    code = """
import json, os
from mm_plugin.media import http
assert http._threads().submit(int, 3).result(10) == 3
child = os.fork()
if not child:
    os._exit(http._threads().submit(int, 7).result(10))
print(json.dumps(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""
    assert fresh(code) == 7


def test_httpx_is_imported_by_the_first_url_alone(fresh: Callable[..., Any]) -> None:
    code = """
import json, sys
from mm_plugin import Settings
from mm_plugin.media import http, open_image
seen = []
for settings in Settings(), Settings(allowed_hosts=("a.test",)):
    try:
        open_image("http://localhost/", path="p", settings=settings)
    except Exception as error:
        seen.append([type(error).__name__, "httpx" in sys.modules])
print(json.dumps(seen))
"""
    assert fresh(code) == [["MediaError", False], ["MediaError", True]]


def test_a_traceback_holds_no_url(serve: Callable[..., Server], names: Names) -> None:
    server = serve(b"nonsense\r\n\r\n")
    for url in (f"http://{HOST}:{server.port}/secret", f"http://{HOST}/secret\n"):
        error = refused(sync_opener, url, limits(server))
        assert "secret" not in "".join(traceback.format_exception(error))


# --- requests ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_async", [False, True], ids=["sync", "async"])
def test_urls_of_a_request_are_fetched_and_the_first_bad_one_is_named(
    serve: Callable[..., Server],
    names: Names,
    open_words: Callable[..., ModelProcessor],
    monkeypatch: pytest.MonkeyPatch,
    as_async: bool,
) -> None:
    pixels = np.full((3, 4, 3), 7, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    good, bad = serve(ok(buffer.getvalue())), serve(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    settings = limits(good, bad)
    processor = open_words(
        PlainToy,
        toy_spec(),
        allowed_hosts=settings.allowed_hosts,
        private_hosts=settings.private_hosts,
        fetch_seconds=20.0,
    )
    loop_threads: list[int] = []

    def run(images: Sequence[Any]) -> Any:
        if not as_async:
            return processor.process("<image> " * len(images), images)

        async def call() -> Any:
            loop_threads.append(threading.get_ident())
            return await processor.process_async("<image> " * len(images), images)

        return asyncio.run(call())

    url = f"http://{HOST}:{good.port}/a.png"
    output = run([url, buffer.getvalue(), url])
    assert [item.num_tokens for item in output.mm_items] == [3, 3, 3]
    assert len({item.identity for item in output.mm_items}) == 1  # a URL is what lies after it
    with pytest.raises(MediaError) as caught:
        run([url, f"http://{HOST}:{bad.port}/b.png", "missing.png"])
    assert (caught.value.path, caught.value.reason) == ("images[1]", "url")
    if as_async:
        # What is fetched is waited for on the loop; what is decoded is not decoded there.
        decoded: list[int] = []
        original = ImageSource.decode
        monkeypatch.setattr(
            ImageSource,
            "decode",
            lambda self, *size, **named: (decoded.append(threading.get_ident()), original(self, *size, **named))[1],
        )
        other = io.BytesIO()
        Image.fromarray(pixels + 1).save(other, "PNG")
        run([url, other.getvalue()])
        assert decoded
        assert loop_threads[-1] not in decoded
