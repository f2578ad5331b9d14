"""Read the bytes of a client's image: from a data URL, from the web, or from an allowed folder.

A URL is an order to this machine to open a connection, so it is checked (server-side request forgery). Names are resolved here,
and the connection goes to the very address that was checked, so a second answer of a name server changes nothing. Addresses
that are not public are refused, on each redirect again, unless the operator listed the host. Size and time are limited.

Rejected: a check of the URL before an HTTP client resolves the name again (DNS rebinding), and environment proxies, which
would resolve it elsewhere.
"""

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import os
import socket
import stat
import string
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

import httpcore

from server.front.errors import ApiError, bad_request
from server.options.images import ImageOptions

MOST_REDIRECTS = 3
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_URL_CHARS = 8192
_MOST_CONNECTIONS = 16
_MOST_NAMES = 16  # that are resolved at once
_LONG = 1 << 20  # bytes; decoding or reading more takes milliseconds, so a thread does it
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")  # IANA assigns all public addresses from it
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # the last 32 bits are an IPv4 address
# Refused although `ipaddress` calls them global: protocol assignments, and the address at which a machine of Azure reads its
# own configuration ("What is IP address 168.63.129.16?", Microsoft).
_RESERVED_IPV4 = (ipaddress.IPv4Network("192.0.0.0/24"), ipaddress.IPv4Network("168.63.129.16/32"))
_TROUBLE = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError, OSError)


class ForbiddenAddressError(OSError):
    """A host with an address that is not public; the message names the host."""


class ImageSources:
    """Reads images for one service."""

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._backend = CheckedBackend(options.allowed_domains)
        self._pool = httpcore.AsyncConnectionPool(
            network_backend=self._backend, max_connections=_MOST_CONNECTIONS, keepalive_expiry=5.0
        )

    async def read(self, url: str, where: str) -> bytes:
        """Return the bytes of the image at a URL.

        Args:
            where: The URL's field, for errors.

        Raises:
            ApiError: 400, naming the field.
        """
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await self._decode(url, where)
        if len(url) > _MOST_URL_CHARS:
            raise bad_request(f"{where} has more than {_MOST_URL_CHARS} characters.", where)
        if scheme in ("http", "https"):
            return await self._fetch(url, where)
        if scheme == "file":
            return await self._read_file(url, where)
        raise bad_request(f"{where} must be a data, http or https URL; got {url[:60]!r}.", where)

    async def close(self) -> None:
        """Close all connections."""
        await self._pool.aclose()
        self._backend.close()

    async def _decode(self, url: str, where: str) -> bytes:
        head, comma, content = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise bad_request(f"{where} must be a data URL with base64: data:image/png;base64,...", where)
        if len(content) * 3 // 4 > self._options.most_bytes + 3:
            raise self._too_large(where)

        def decode() -> bytes:
            return base64.b64decode(content, validate=True)

        try:
            found = await asyncio.to_thread(decode) if len(content) > _LONG else decode()
        except (binascii.Error, ValueError) as error:
            raise bad_request(f"{where} is not valid base64: {error}.", where) from None
        return self._checked(found, where)

    async def _read_file(self, url: str, where: str) -> bytes:
        folder = self._options.local_path
        if folder is None:
            raise bad_request(
                f"{where} is a file:// URL; the server accepts none (--allowed-local-media-path).", where
            )
        host, _, name = url[len("file://") :].partition("/")
        is_here = url.lower().startswith("file://") and host.lower() in ("", "localhost")
        try:
            path = Path(os.path.realpath("/" + unquote(name)))
            if not is_here or not path.is_relative_to(folder):
                raise bad_request(f"{where} is outside the folder of --allowed-local-media-path.", where)
            found = await asyncio.to_thread(_read_regular, path, self._options.most_bytes + 1)
        except (OSError, ValueError) as error:  # ValueError: no file can have this name
            reason = getattr(error, "strerror", None) or error
            raise bad_request(f"{where} cannot be read: {reason}.", where) from None
        return self._checked(found, where)

    async def _fetch(self, url: str, where: str) -> bytes:
        timeout_s = self._options.fetch_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(MOST_REDIRECTS + 1):
                    url = _as_ascii(url)
                    self._check_host(url, where)
                    found, url = await self._get(url, where)
                    if found is not None:
                        return self._checked(found, where)
        except TimeoutError:
            raise bad_request(
                f"{where}: the image did not arrive within {timeout_s:g} s (--image-fetch-timeout).", where
            ) from None
        except ForbiddenAddressError as error:
            raise bad_request(f"{where}: {error}.", where) from None
        except (*_TROUBLE, httpcore.UnsupportedProtocol, ValueError) as error:
            raise bad_request(
                f"{where}: the image cannot be fetched ({type(error).__name__}: {error}).", where
            ) from None
        raise bad_request(f"{where}: more than {MOST_REDIRECTS} redirects.", where)

    def _check_host(self, url: str, where: str) -> None:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower().rstrip(".")
        if parts.scheme not in ("http", "https") or not host:
            raise bad_request(f"{where} leads to {url[:60]!r}, which is not an http or https URL.", where)
        if parts.username is not None or parts.password is not None:
            raise bad_request(f"{where} must not contain a user name or a password.", where)
        allowed = self._options.allowed_domains
        if allowed and not is_listed(host, allowed):
            raise bad_request(
                f"{where}: images from {host[:100]!r} are not allowed here; allowed hosts: {', '.join(allowed)}.",
                where,
            )

    async def _get(self, url: str, where: str) -> tuple[bytes | None, str]:
        """Return the content of a URL, or None and the URL that it redirects to."""
        headers = [("Accept", "image/*"), ("User-Agent", "wideep")]
        limits: dict[str, Any] = {
            "timeout": dict.fromkeys(("connect", "read", "write", "pool"), self._options.fetch_timeout_s)
        }
        async with self._pool.stream("GET", url, headers=headers, extensions=limits) as response:
            fields = {name.lower(): value for name, value in response.headers}
            if response.status in _REDIRECTS and b"location" in fields:
                return None, urljoin(url, fields[b"location"].decode("utf-8", "replace"))
            if response.status != 200:
                raise bad_request(f"{where}: the image's server answered {response.status}.", where)
            if fields.get(b"content-encoding", b"identity") != b"identity":
                raise bad_request(f"{where}: the image's server sent a compressed answer.", where)
            announced = fields.get(b"content-length", b"0")
            if announced.isdigit() and int(announced) > self._options.most_bytes:
                raise self._too_large(where)
            content = bytearray()
            async for piece in response.aiter_stream():
                content += piece
                if len(content) > self._options.most_bytes:
                    raise self._too_large(where)
            return bytes(content), url

    def _checked(self, content: bytes, where: str) -> bytes:
        if len(content) > self._options.most_bytes:
            raise self._too_large(where)
        if not content:
            raise bad_request(f"{where} is an empty image.", where)
        return content

    def _too_large(self, where: str) -> ApiError:
        return bad_request(
            f"{where}: the image has more than {self._options.most_bytes} bytes (--max-image-bytes).", where
        )


def is_listed(host: str, allowed: Iterable[str]) -> bool:
    """Return whether a host is in a list of names, such as images.example or *.example."""
    return any(
        host == each or (each.startswith("*.") and host.endswith(each[1:]) and host != each[2:])
        for each in allowed
    )


def is_public(address: str) -> bool:
    """Return whether an IP address belongs to the public internet, and so does the IPv4 address inside it."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        is_reserved = found.is_multicast or any(found in network for network in _RESERVED_IPV4)
        return found.is_global and not is_reserved
    if found.ipv4_mapped or found in _NAT64:
        return is_public(str(ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)))
    if found.sixtofour and not is_public(str(found.sixtofour)):
        return False
    return found in _PUBLIC_IPV6 and found.is_global


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections to public addresses, and to listed hosts. The checked address is the one that is used."""

    def __init__(self, allowed: Iterable[str] = ()) -> None:
        self._allowed = tuple(allowed)
        # Name servers of clients may never answer. Such names must not hold the threads of the front's other work.
        self._resolvers = ThreadPoolExecutor(_MOST_NAMES, "wideep-image-names")
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Resolve a host, check its addresses and connect to one of them."""
        resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._resolvers, resolve)
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        is_free = is_listed(host.lower().rstrip("."), self._allowed)
        if not is_free and not all(map(is_public, addresses)):
            raise ForbiddenAddressError(
                f"the address of {host} is not public (list the host in --allowed-media-domains to allow it)"
            )
        for address in addresses[:-1]:
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._backend.connect_tcp(address, port, timeout, local_address, socket_options)
        return await self._backend.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def sleep(self, seconds: float) -> None:
        """Pause."""
        await self._backend.sleep(seconds)

    def close(self) -> None:
        """Resolve no more names."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)


def _as_ascii(url: str) -> str:
    """Return a URL with the ASCII form of its host (IDNA) and percent signs for other characters, as browsers send it."""
    if url.isascii():
        return url
    parts = urlsplit(url)
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return urlunsplit((parts.scheme, parts.netloc.encode("idna").decode(), path, query, ""))


def _read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file, not a pipe or a device that would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        return file.read(most_bytes)
