"""Images come from data URLs, from the web and from one folder, and from nowhere else."""

import asyncio
import base64
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.front.errors import ApiError
from server.front.images.sources import ImageSources, is_listed, is_public
from server.options.images import ImageOptions
from tests.support.requests.pictures import data_url, png

WHERE = "messages.0.content.1.image_url.url"
PICTURE = png(4, 4)


def read(url: str, **options: Any) -> bytes:
    """Read one image."""

    async def run() -> bytes:
        sources = ImageSources(ImageOptions(**options))
        try:
            return await sources.read(url, WHERE)
        finally:
            await sources.close()

    return asyncio.run(run())


def refusal(url: str, **options: Any) -> str:
    """Return the message of the 400 for an image, which names the part."""
    with pytest.raises(ApiError) as caught:
        read(url, **options)
    assert caught.value.status == 400 and caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    return caught.value.message


class Web:
    """A web server on the loopback interface. Its pages are functions of the request."""

    def __init__(self) -> None:
        self.pages: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.num_requests = 0
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.num_requests += 1
                web.pages[self.path](self)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        # The interval bounds the time to shut down.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def page(content: bytes, status: int = 200, **fields: str) -> Callable[[BaseHTTPRequestHandler], None]:
    """Return a page with this content and these header fields."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **fields}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return answer


@pytest.fixture
def web() -> Iterator[Web]:
    web = Web()
    web.pages["/picture"] = page(PICTURE)
    yield web
    web.close()


LOOPBACK = {"allowed_domains": ("127.0.0.1",)}


def test_a_data_url_is_decoded() -> None:
    assert read(data_url(PICTURE)) == PICTURE
    assert read(data_url(PICTURE, "image/png;charset=x")) == PICTURE


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("data:image/png,abc", "must be a data URL with base64"),
        ("data:image/png;base64", "must be a data URL with base64"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,****", "not valid base64"),
        ("data:image/png;base64,", "is an empty image"),
        ("ftp://images.example/x.png", "must be a data, http or https URL"),
        ("x.png", "must be a data, http or https URL"),
        ("file:///etc/passwd", "the server accepts none"),
        ("http://" + "a" * 9000, "more than 8192 characters"),
        ("http://user:secret@images.example/x.png", "must not contain a user name"),
        ("http://[::1", "cannot be fetched"),
        ("http://images.example/\ud800", "cannot be fetched"),
        ("http://\uff11\uff12\uff17.0.0.1/x.png", "is not public"),
        ("http:///x.png", "is not an http or https URL"),
    ],
)
def test_other_urls_are_refused(url: str, reason: str) -> None:
    assert reason in refusal(url)


def test_large_images_are_refused() -> None:
    assert "has more than 10 bytes" in refusal(data_url(b"x" * 11), most_bytes=10)
    assert read(data_url(b"x" * 10), most_bytes=10) == b"x" * 10


def test_a_listed_host_is_fetched(web: Web) -> None:
    assert read(web.url("/picture"), **LOOPBACK) == PICTURE


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]", "127.1"]
)
def test_hosts_of_this_machine_are_refused(host: str, web: Web) -> None:
    assert "is not public" in refusal(web.url("/picture", host))
    assert web.num_requests == 0


@pytest.mark.parametrize(
    "address",
    [
        *("10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("::", "::1", "fe80::1%eth0", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::"),
        *(
            "fec0::1",
            "::10.0.0.1",
            "::ffff:0:10.0.0.1",
            "64:ff9b:1::808:808",
            "2001:0:a00:1::1",
            "ff0e::1",
            "5f00::1",
        ),
        *("192.0.0.192", "168.63.129.16", "::ffff:168.63.129.16", "240.0.0.1"),
    ],
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "2001:4860:4860::8888", "64:ff9b::808:808", "2002:808:808::1"]
)
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


def test_an_unlisted_host_is_refused_if_there_is_a_list(web: Web) -> None:
    assert "are not allowed here" in refusal(web.url("/picture"), allowed_domains=("images.example",))
    assert is_listed("a.images.example", ("*.images.example",))
    assert not is_listed("images.example", ("*.images.example",))
    assert not is_listed("badimages.example", ("*.images.example", "images.example"))


def test_a_redirect_to_a_host_that_is_not_listed_is_refused(web: Web) -> None:
    web.pages["/moved"] = page(b"", 302, Location=web.url("/picture", "localhost"))
    assert "images from 'localhost' are not allowed" in refusal(web.url("/moved"), **LOOPBACK)
    assert web.num_requests == 1


def test_redirects_are_followed_a_few_times(web: Web) -> None:
    web.pages["/moved"] = page(b"", 301, Location="/picture")
    web.pages["/round"] = page(b"", 302, Location="/round")
    assert read(web.url("/moved"), **LOOPBACK) == PICTURE
    assert "more than 3 redirects" in refusal(web.url("/round"), **LOOPBACK)


def test_a_url_may_have_any_characters(web: Web) -> None:
    sent = "/b%C3%BCcher/%25?x=%C3%BC"
    web.pages[sent] = page(PICTURE)
    web.pages["/moved"] = page(b"", 302, Location="/b\u00fccher/%25?x=\u00fc".encode().decode("latin-1"))
    assert read(web.url("/b\u00fccher/%25?x=\u00fc"), **LOOPBACK) == PICTURE
    assert read(web.url("/moved"), **LOOPBACK) == PICTURE


def test_a_redirect_to_a_file_is_refused(web: Web, tmp_path: Path) -> None:
    web.pages["/moved"] = page(b"", 302, Location=f"file://{tmp_path}/x.png")
    assert "is not an http or https URL" in refusal(web.url("/moved"), **LOOPBACK)


def test_a_name_that_changes_its_address_is_checked_at_the_connection(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the first answer is public, the second one is this machine."""
    answers = iter(["93.184.216.34", "127.0.0.1"])

    def resolve(_host: str, port: int, **_how: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), port))]

    connected: list[str] = []

    class Backend:
        async def connect_tcp(self, host: str, *_more: Any) -> Any:
            connected.append(host)
            raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)

    async def run() -> None:
        sources = ImageSources(ImageOptions())
        sources._backend._backend = Backend()  # type: ignore[assignment]
        with pytest.raises(ApiError, match="cannot be fetched"):
            await sources.read("http://images.example/x.png", WHERE)
        with pytest.raises(ApiError, match="is not public"):
            await sources.read("http://images.example/x.png", WHERE)

    asyncio.run(run())
    assert connected == ["93.184.216.34"], "the connection goes to the address that was checked"


@pytest.mark.parametrize("address", ["10.0.0.7", "127.0.0.1", "169.254.169.254", "::1"])
def test_a_redirect_to_a_private_address_is_refused_without_a_list_of_hosts(
    address: str, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loopback web server takes the place of a public one. The redirect names an address, or a host with it."""
    addresses = {"images.example": "93.184.216.34", "inside.example": address}

    def resolve(host: str, port: int, **_how: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (addresses.get(host, host), port))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    connected: list[str] = []

    async def run() -> None:
        sources = ImageSources(ImageOptions())
        own = sources._backend._backend

        class Backend:
            async def connect_tcp(self, host: str, port: int, *more: Any) -> Any:
                connected.append(host)
                return await own.connect_tcp("127.0.0.1", port, *more)

        sources._backend._backend = Backend()  # type: ignore[assignment]
        for host in ("inside.example", f"[{address}]" if ":" in address else address):
            web.pages["/moved"] = page(b"", 302, Location=f"http://{host}:{web.port}/picture")
            with pytest.raises(ApiError, match="is not public") as caught:
                await sources.read(web.url("/moved", "images.example"), WHERE)
            assert caught.value.status == 400 and caught.value.param == WHERE
        await sources.close()

    asyncio.run(run())
    assert connected and set(connected) == {"93.184.216.34"} and web.num_requests == 2


def test_names_that_never_resolve_do_not_hold_up_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **_how: over.wait(20))

    async def run() -> None:
        sources = ImageSources(ImageOptions(fetch_timeout_s=0.05))
        urls = [f"http://{number}.example/x.png" for number in range(64)]
        found = await asyncio.gather(*(sources.read(url, WHERE) for url in urls), return_exceptions=True)
        assert all(isinstance(each, ApiError) and "did not arrive" in each.message for each in found)
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 10) == "free"
        await sources.close()

    try:
        asyncio.run(run())
    finally:
        over.set()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (page(b"", 404), "answered 404"),
        (page(b"x" * 101), "has more than 100 bytes"),
        (page(b""), "is an empty image"),
        (page(b"x", Content_Encoding="gzip"), "compressed"),
    ],
)
def test_other_answers_are_refused(
    answer: Callable[[BaseHTTPRequestHandler], None], reason: str, web: Web
) -> None:
    web.pages["/x"] = answer
    assert reason in refusal(web.url("/x"), most_bytes=100, **LOOPBACK)


def test_an_endless_answer_without_a_length_is_cut(web: Web) -> None:
    def pour(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b"x" * 65536)
        except OSError:
            pass

    web.pages["/x"] = pour
    assert "has more than 100000 bytes" in refusal(web.url("/x"), most_bytes=100_000, **LOOPBACK)


def test_a_slow_server_has_a_bounded_time(web: Web) -> None:
    over = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while not over.wait(0.02):
                handler.wfile.write(b"x")
                handler.wfile.flush()
        except OSError:
            pass

    web.pages["/x"] = drip
    try:
        assert "did not arrive within 0.2 s" in refusal(web.url("/x"), fetch_timeout_s=0.2, **LOOPBACK)
    finally:
        over.set()


def test_an_unreachable_source_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x"
        assert "cannot be fetched" in refusal(url, **LOOPBACK)


def test_a_file_in_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a picture.png").write_bytes(PICTURE)
    assert read(f"file://{tmp_path}/a%20picture.png", local_path=str(tmp_path)) == PICTURE


def test_files_elsewhere_are_refused(tmp_path: Path) -> None:
    folder, secret = tmp_path / "pictures", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("secret")
    (folder / "link").symlink_to(secret)
    (folder / "folder").mkdir()
    outside = (f"file://{secret}", f"file://{folder}/../secret", f"file://{folder}/%2e%2e/secret")
    for url in (*outside, f"file://{folder}/link", f"file://other{folder}/x", f"file:{folder}/x"):
        assert "is outside the folder" in refusal(url, local_path=str(folder))
    for name in ("missing", "folder", "%00", "\ud800"):
        assert "cannot be read" in refusal(f"file://{folder}/{name}", local_path=str(folder))


def test_long_data_urls_are_decoded_too() -> None:
    content = bytes(range(256)) * 8192
    assert read(data_url(content)) == content
    assert base64.b64decode(data_url(content).partition(",")[2]) == content
