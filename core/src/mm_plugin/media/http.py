"""http(s), with httpx: a URL -> encoded bytes. Trusts neither the client that chose the URL nor the host that responds.

A host's name is resolved and checked here, and the connection goes to the checked address itself, so that a second answer
of a name server has no effect. The name stays in the Host header and in TLS. `fetch` is `fetch_async` in a thread.
"""

from __future__ import annotations

import asyncio
import functools
import io
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mm_plugin.errors import MediaError, MMPluginError, UsageError
from mm_plugin.media.limits import Arrived, check_bytes, uncounted
from mm_plugin.settings import Settings

if TYPE_CHECKING:
    import httpx

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_LONGEST_URL = 16_384  # characters
_MOST_ADDRESSES = 4  # of one host; others are not tried
_RESOLVERS = 32  # threads: a name server that does not answer holds one for as long as the system's resolver waits
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")  # all that is allocated for unicast
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# What `ipaddress` calls global, or does in some releases of Python.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "100.64.0.0/10",  # carrier-grade NAT
            "192.0.0.0/24",  # protocol assignments; metadata of one cloud
            "192.88.99.0/24",  # relays of 6to4
            "168.63.129.16/32",  # another cloud's agent, on an address that looks public
            "2001::/23",  # Teredo, ORCHID and other protocols
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation
        ),
    )
)


class _Rule(NamedTuple):
    """One entry of a list of hosts: a host, or every host below it; a port, or None."""

    host: str
    below: bool
    port: int | None


def fetch(url: str, path: str, settings: Settings, arrived: Arrived = uncounted) -> bytes:
    """What `fetch_async` returns and raises, for callers without an event loop."""
    # In a thread of its own, since the caller's thread may be running an event loop.
    with ThreadPoolExecutor(1, "mm-plugin-fetch") as thread:
        return thread.submit(asyncio.run, fetch_async(url, path, settings, arrived)).result()


async def fetch_async(url: str, path: str, settings: Settings, arrived: Arrived = uncounted) -> bytes:
    """Fetch an http(s) URL.

    Args:
        url: on one of `allowed_hosts`; up to `max_redirects` redirects are followed, each checked as the first.
        path: where it stands in the request, for messages.
        settings: hosts, and limits on time, redirects and bytes.
        arrived: called with the length of each piece of the body as it arrives; an error of ours that it raises comes through.

    Raises:
        MediaError: reason "url": the URL is refused, or its host failed, was too slow, or responded with a status other than 200.
        LimitError: more bytes than `max_media_bytes`.
        UsageError: hosts are allowed and httpx is missing, or a list of hosts is malformed.
    """
    if not settings.allowed_hosts:
        raise _error(path, "URLs are not fetched: allowed_hosts is empty; set MM_PLUGIN_ALLOWED_HOSTS")
    deadline = asyncio.get_running_loop().time() + settings.fetch_seconds
    try:
        async with asyncio.timeout_at(deadline):
            return await _follow(url, path, settings, await _in_thread(_open_tls), deadline, arrived)
    except TimeoutError as error:
        raise _error(
            path, f"the URL was not fetched within {settings.fetch_seconds} seconds (fetch_seconds)"
        ) from error


async def _follow(
    url: str, path: str, settings: Settings, tls: ssl.SSLContext, deadline: float, arrived: Arrived
) -> bytes:
    import httpx

    who = "the URL"  # messages name the host that the client wrote, never one that came from a redirect
    try:
        if len(url) > _LONGEST_URL:
            raise _error(path, f"expected a URL of at most {_LONGEST_URL} characters, got {len(url)}")
        before, target = None, httpx.URL(url)
        for _ in range(settings.max_redirects + 1):
            target, private = _admit(target, before, who, path, settings)
            who = who if before else f"the host {_name(target)}"
            addresses = await _resolve(_name(target), private, who, path)
            async with _get(target, addresses, tls, deadline) as response:
                location = response.headers.get("location")
                if response.status_code not in _REDIRECTS or not location:
                    return await _read(response, who, path, settings, arrived)
            who = who if before else f"{who} redirects, and what it leads to"
            before, target = target, target.join(location)
    except MMPluginError:
        raise
    except Exception as error:  # of any class: libraries raise many on malformed URLs and responses
        raise _error(path, f"{who} cannot be fetched ({type(error).__name__})") from error
    raise _error(path, f"{who} redirects more than {settings.max_redirects} times (max_redirects)")


def _error(path: str, text: str) -> MediaError:
    return MediaError(f"{path}: {text}", path=path, reason="url")


def _name(url: httpx.URL) -> str:
    """The host as it is compared: lower case, IDNA, without brackets or a final dot."""
    return url.raw_host.decode().removesuffix(".")


def _admit(
    target: httpx.URL, before: httpx.URL | None, who: str, path: str, settings: Settings
) -> tuple[httpx.URL, bool]:
    """The URL with its host as it is compared, and whether that host may be private; `before` is the URL that redirected to it."""
    name = _name(target)
    if target.scheme not in _PORTS:
        raise _error(path, f"{who} must use http: or https:")
    if before and before.scheme == "https" and target.scheme == "http":
        raise _error(path, f"{who} must not leave https: for http:")
    if target.userinfo:
        raise _error(path, f"{who} must not contain a user name or password")
    if not _is_host(name):
        raise _error(path, f"{who} has no valid host")
    usual = _PORTS[target.scheme]
    port = usual if target.port is None else target.port
    if not _is_listed(name, port, _rules("allowed_hosts", settings.allowed_hosts), usual):
        raise _error(path, f"{who} is not on a host in allowed_hosts" + ("" if before else f": {name}, port {port}"))
    return target.copy_with(host=name), _is_listed(name, port, _rules("private_hosts", settings.private_hosts), port)


@functools.lru_cache(16)
def _rules(setting: str, entries: tuple[str, ...]) -> tuple[_Rule, ...]:
    """A list of hosts, parsed by the same rules as the host of a URL."""
    import httpx

    rules = []
    for entry in entries:
        try:
            # A scheme without a default port, so that no port is dropped.
            url = httpx.URL(f"any://{entry.removeprefix('*.')}")
            good = _is_host(_name(url)) and not url.userinfo and url.raw_path == b"/"
        except (httpx.InvalidURL, ValueError):
            good = False
        if not good or not 0 < (1 if url.port is None else url.port) < 1 << 16:
            forms = "images.example.org, *.example.org, example.org:8443, [2600::1]:80"
            raise UsageError(
                f"setting {setting}: {entry!r} is not a host; expected a form such as {forms}", argument=setting
            )
        rules.append(_Rule(_name(url), entry.startswith("*."), url.port))
    return tuple(rules)


def _is_listed(name: str, port: int, rules: tuple[_Rule, ...], usual: int) -> bool:
    return any(
        (name.endswith(f".{rule.host}") if rule.below else name == rule.host)
        and port == (usual if rule.port is None else rule.port)
        for rule in rules
    )


def _is_host(name: str) -> bool:
    try:
        return _NAME.fullmatch(name) is not None or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _is_public(address: str) -> bool:
    """Whether an address is on the public internet; an address that embeds another counts as the embedded one."""
    ip = ipaddress.ip_address(address)
    if ip in _NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)
    if ip.version == 6 and ip not in _GLOBAL_V6:
        return False
    kinds = ip.is_private, ip.is_loopback, ip.is_link_local, ip.is_multicast, ip.is_reserved, ip.is_unspecified
    return not any(kinds) and not any(ip in network for network in _NOT_PUBLIC)


async def _resolve(name: str, private: bool, who: str, path: str) -> list[str]:
    """The addresses of a host, each of them checked."""
    cause = None
    try:
        found = await _in_thread(functools.partial(socket.getaddrinfo, name, None, type=socket.SOCK_STREAM))
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        usable = bool(addresses) and (private or all(map(_is_public, addresses)))
    except (OSError, ValueError) as error:
        usable, cause = False, error
    if not usable:
        # One message for both cases: a client must not learn which internal names exist.
        raise _error(path, f"{who} has no public address; hosts without one must be listed in private_hosts") from cause
    return addresses[:_MOST_ADDRESSES]


@asynccontextmanager
async def _get(
    target: httpx.URL, addresses: list[str], tls: ssl.SSLContext, deadline: float
) -> AsyncIterator[httpx.Response]:
    """The head of a response, from the first address that accepts a connection; closed with everything below it."""
    import httpx

    headers = {
        "Host": target.netloc.decode(),
        "User-Agent": "mm-plugin",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
        "Connection": "close",
    }
    async with AsyncExitStack() as opened:

        async def watch(event: str, info: dict[str, Any]) -> None:
            # httpcore leaves a connection open that is cancelled while TLS starts.
            if event == "connection.connect_tcp.complete":
                opened.push_async_callback(info["return_value"].aclose)

        for left in range(len(addresses), 0, -1):
            # A transport, since a client would take proxies and passwords from the environment and log whole URLs; and one for
            # each request, since a pooled connection is keyed by its address, and was checked for another name's certificate.
            transport = await opened.enter_async_context(httpx.AsyncHTTPTransport(verify=tls, trust_env=False))
            # Only connecting has a limit of its own, so that an unreachable address leaves time for the next.
            limit = max(deadline - asyncio.get_running_loop().time(), 0.001) / left
            request = httpx.Request(
                "GET",
                target.copy_with(host=addresses[-left]),
                headers=headers,
                extensions={"sni_hostname": _name(target), "timeout": {"connect": limit}, "trace": watch},
            )
            try:
                response = await transport.handle_async_request(request)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if left == 1:
                    raise
            else:
                opened.push_async_callback(response.aclose)
                yield response
                return


async def _read(response: httpx.Response, who: str, path: str, settings: Settings, arrived: Arrived) -> bytes:
    """The body of a response, counted while it is read."""
    if response.status_code != 200:
        raise _error(path, f"{who} responded with status {response.status_code}, expected 200")
    if response.headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
        # A few compressed bytes may expand beyond memory, and media are compressed already.
        raise _error(path, f"{who} responded with a content encoding that was not requested")
    check_bytes(path, int(response.headers.get("content-length", 0)), settings)
    data = io.BytesIO()
    async for piece in response.aiter_raw():
        check_bytes(path, data.tell() + len(piece), settings)
        arrived(len(piece))
        data.write(piece)
        await asyncio.sleep(0)  # a thousand chunks of one byte may come in one read; other tasks need the loop
    return data.getvalue()


async def _in_thread(call: Callable[[], Any]) -> Any:
    """The result of a blocking call, not on the loop's own threads, which asyncio.run would wait for."""
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_RESOLVERS, "mm-plugin-resolve")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked child has no threads of its parent


@functools.cache
def _open_tls() -> ssl.SSLContext:
    """The certificates of certifi, or of the operator's SSL_CERT_FILE or SSL_CERT_DIR. Takes tens of milliseconds."""
    try:
        import httpx
    except ImportError as error:
        raise UsageError(
            "setting allowed_hosts is set and httpx is not installed: pip install 'mm-plugin[http]'",
            argument="allowed_hosts",
        ) from error
    return httpx.create_ssl_context()
