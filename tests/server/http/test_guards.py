"""Access checks: keys that open the service, re-reading of key files, and pages that may change something."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from server.front.generations import Asker
from server.http.app import build_app
from server.http.exchanges import asker_of_exchange
from server.http.guards import OPERATOR_PATHS, ApiKeys
from server.http.routes import new_router
from server.options.checks import read_keys
from server.options.flag import OptionsError
from server.options.table import HttpOptions
from tests.support.clock import Clock
from tests.support.requests.asgi import ask


async def answer() -> str:
    return "done"


def write(path: Path, text: str, *, at_s: int) -> None:
    path.write_text(text)
    os.utime(path, (at_s, at_s))


def test_a_file_has_a_key_per_line_and_comments(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\none\n\n  two  \n")
    assert read_keys(file) == ("one", "two")
    file.write_text("one\nt w o\n")
    with pytest.raises(OptionsError, match="key 2 contains white space") as caught:
        read_keys(file)
    assert "t w o" not in str(caught.value), "keys are not printed"


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock(0.0)
    write(file, "old\n", at_s=1)
    keys = ApiKeys(["fixed"], file, clock=clock)
    assert keys.opens(b"old") and keys.opens(b"fixed") and not keys.opens(b"new")
    write(file, "new\n", at_s=2)
    assert not keys.opens(b"new"), "the file is checked once a second"
    clock.now_s = 1.0
    assert keys.opens(b"new") and keys.opens(b"fixed") and not keys.opens(b"old"), "withdrawn"
    file.unlink()
    clock.now_s = 2.0
    assert keys.opens(b"new"), "old keys stay valid while the file is missing"


def test_a_request_carries_a_digest_of_its_key_and_no_key() -> None:
    askers: list[Asker] = []
    router = new_router()

    @router.post("/v1/ask")
    async def note() -> str:
        askers.append(asker_of_exchange())
        return ""

    app = build_app([router], version="0", keys=ApiKeys(["one", "two"]))
    for headers in (
        {"authorization": "Bearer one"},
        {"x-api-key": "one", "x-session-id": "s"},
        {"x-api-key": "two", "x-session-id": "s"},
    ):
        assert ask(app, "POST", "/v1/ask", headers=headers).status_code == 200
    first, same, other = askers
    assert first.key_id == same.key_id != other.key_id and "one" not in first.key_id
    assert same.session != other.session, "sessions of different keys differ"
    ask(build_app([router], version="0", keys=ApiKeys()), "POST", "/v1/ask", headers={"x-api-key": "one"})
    assert askers[-1].key_id == "", "without keys, all clients are alike"


def test_a_file_without_keys_opens_to_nobody(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    keys = ApiKeys((), file)
    assert keys.are_needed and not keys.opens(b"") and not keys.opens(b"# none yet")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        *((path, 401) for path in ("/health_generate", "/get_model_info", "/model_info", "/tokenizer_info")),
        *((path, 401) for path in ("/experts/history", "/experts/record", "/v1/models", "/api/tags")),
        *((path, 200) for path in ("/health", "/ping", "/metrics", "/server_info", "/throughput")),
        *((path, 200) for path in ("/experts/load", "/v1/fault_tolerance/status", "/dashboard", "/docs")),
    ],
)
def test_what_costs_or_reveals_something_needs_a_key_and_probes_do_not(path: str, status: int) -> None:
    router = new_router()
    router.add_api_route(path, answer, methods=["GET"])
    app = build_app([router], version="0", keys=ApiKeys(["sesame"]))
    assert ask(app, "GET", path).status_code == status
    assert ask(app, "GET", path, headers={"x-api-key": "sesame"}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/llm/v1/models", "/work", "/llm/work"])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "sesame"}, 401),
        ({"Authorization": "Bearer sesame"}, 200),
        ({"authorization": "bearer sesame"}, 200),
        ({"x-api-key": "sesame"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": "schl\u00fcssel"}, 401),
    ],
)
def test_what_is_guarded_needs_a_key_also_under_a_root_path(
    path: str, headers: dict[str, str], status: int
) -> None:
    router = new_router()
    router.add_api_route("/v1/models", answer, methods=["GET"])
    router.add_api_route("/work", answer, methods=["POST"])
    app = build_app([router], version="0", keys=ApiKeys(["sesame"]), http=HttpOptions(root_path="/llm"))
    encoded = {name: value.encode() for name, value in headers.items()}
    method = "POST" if path.endswith("work") else "GET"
    assert ask(app, method, path, headers=encoded).status_code == status


@pytest.mark.parametrize("path", ["/health", "/v1/fault_tolerance/status"])
def test_looking_at_health_needs_none(path: str) -> None:
    router = new_router()
    router.add_api_route(path, answer, methods=["GET"])
    app = build_app([router], version="0", keys=ApiKeys(["sesame"]))
    assert ask(app, "GET", path).status_code == 200


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "[::1]:8000", "localhost:8000", "gpu-box:8000", "192.168.1.5"]
)
def test_our_own_pages_may_change_something_and_others_may_not(host: str) -> None:
    def status(**headers: str) -> int:
        return change({"host": host, **headers})

    assert status() == 200, "curl and SDKs send no origin"
    assert status(origin=f"http://{host}") == status(origin=f"https://{host}") == 200
    assert status(origin="https://chat.example") == 200, "the origin is allowed"
    for origin in (
        "http://evil.example",
        "null",
        "http://127.0.0.1:9",
        f"http://{host}.evil.example",
        "http://[",
    ):
        assert status(origin=origin) == 403, origin


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "gpu-box.evil.example", "[::1", ""]
)
def test_a_foreign_name_that_was_pointed_at_us_is_none_of_our_pages(host: str) -> None:
    assert change({"host": host, "origin": f"http://{host}"}) == 403
    assert change({"host": host}) == 200, "clients that are no browsers may send any host"


@pytest.mark.parametrize(
    ("host", "allowed_hosts", "status"),
    [
        ("127.0.0.1:8000", (), 200),
        ("[::1]:8000", (), 200),
        ("localhost", (), 200),
        ("LOCALHOST.:8000", (), 200),
        ("a.localhost", (), 200),
        ("gpu-box:8000", (), 200),
        ("chat.example", (), 200),  # of an allowed origin
        ("evil.example:8000", (), 403),
        ("127.0.0.1.evil.example", (), 403),
        ("gpu-box.evil.example", (), 403),
        ("localhost.evil.example", (), 403),
        ("localhost@evil.example", (), 403),
        ("[::1", (), 403),
        ("", (), 403),
        ("llm.example", ("llm.example",), 200),
        ("LLM.example:443", ("llm.Example",), 200),
        ("a.llm.example", ("llm.example",), 403),
        ("a.llm.example", ("*.llm.example",), 200),
        ("llm.example", ("*.llm.example",), 403),
        ("evilllm.example", ("*.llm.example",), 403),
        ("evil.example", ("*",), 200),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_without_keys_contents_are_shown_under_own_names_only(
    host: str, allowed_hosts: tuple[str, ...], status: int, method: str
) -> None:
    """After DNS rebinding, a page of evil.example sends requests as its own site: with its Host and without an Origin."""
    seen = {"host": host}
    assert change(seen, method=method, path="/v1/files", hosts=allowed_hosts) == status
    assert change(seen, method=method, path="/health", hosts=allowed_hosts) == 200, "monitoring is open"
    assert change(seen, method=method, path="/v1/files", hosts=allowed_hosts, keys=["sesame"]) == 401


def test_a_proxy_s_name_that_is_allowed_serves_own_pages() -> None:
    page = {"host": "llm.example", "origin": "https://llm.example"}
    assert change(page) == 403
    assert change(page, hosts=("llm.example",)) == 200
    assert change({**page, "origin": "https://evil.example"}, hosts=("llm.example",)) == 403


def test_a_refused_host_is_shown_in_short_with_the_way_out() -> None:
    router = new_router()
    router.add_api_route("/v1/files", answer, methods=["GET"])
    app = build_app([router], version="0", keys=ApiKeys())
    refused = ask(app, "GET", "/v1/files", headers={"host": "x" * 300})
    message = refused.json()["error"]["message"]
    assert "--allowed-hosts" in message and len(message) < 250


@pytest.mark.parametrize(
    "path", [*OPERATOR_PATHS, "/pools", "/experts/plan", "/experts/apply", "/experts/what-comes-next"]
)
@pytest.mark.parametrize("keys", [(), ("user",)])
def test_what_acts_on_the_whole_service_is_for_operators_if_they_have_keys(
    tmp_path: Path, path: str, keys: tuple[str, ...]
) -> None:
    file = tmp_path / "operators"
    file.write_text("root\n")
    method = "GET" if path == "/experts/record" else "POST"
    router = new_router()
    router.add_api_route(path, answer, methods=[method])
    operators = ApiKeys(file=file)

    def status(key: str | None, *, operators: ApiKeys | None = operators) -> int:
        app = build_app([router], version="0", keys=ApiKeys(keys, operators=operators))
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return ask(app, method, path, headers=headers).status_code

    assert (status(None), status("root")) == (401, 200)
    assert status("user") == 403, "a user key, known or not, is not an operator's"
    assert status("user", operators=None) == 200, "without an operator file, every key may do so"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/files"), ("POST", "/work"), ("GET", "/experts/load")]
)
def test_operators_keys_open_the_rest_too_and_other_keys_still_do(
    tmp_path: Path, method: str, path: str
) -> None:
    file = tmp_path / "operators"
    file.write_text("root\n")
    keys = ApiKeys(["user"], operators=ApiKeys(file=file))
    router = new_router()
    router.add_api_route(path, answer, methods=[method])
    app = build_app([router], version="0", keys=keys)
    for key, status in (("root", 200), ("user", 200), ("wrong", 200 if path == "/experts/load" else 401)):
        headers = {"Authorization": f"Bearer {key}"}
        assert ask(app, method, path, headers=headers).status_code == status
    assert not keys.are_several, "operators do not count: they need no share"
    assert ApiKeys(["user", "other"]).are_several and not ApiKeys().are_several


def test_pages_may_look_and_an_open_service_is_open() -> None:
    evil = {"host": "127.0.0.1:8000", "origin": "http://evil.example"}
    assert change(evil, method="GET") == change(evil, path="/ping") == 200
    assert change(evil, allowed=("*",)) == 200
    assert change({**evil, "authorization": "Bearer sesame"}, keys=["sesame"]) == 200, "a key is sufficient"
    assert change(evil, keys=["sesame"]) == 401


def change(
    headers: dict[str, str],
    *,
    method: str = "POST",
    path: str = "/work",
    allowed: tuple[str, ...] = ("https://chat.example",),
    hosts: tuple[str, ...] = (),
    keys: Sequence[str] = (),
) -> int:
    """Send a request that changes or reads something, and return the status."""
    router = new_router()
    for each in ("/work", "/ping"):
        router.add_api_route(each, answer, methods=["POST"])
    for each in ("/work", "/health", "/v1/files"):
        router.add_api_route(each, answer, methods=["GET", "HEAD"])
    http = HttpOptions(allowed_origins=allowed, allowed_hosts=hosts)
    app = build_app([router], version="0", keys=ApiKeys(keys), http=http, own_names=["gpu-box"])
    return ask(app, method, path, headers=headers).status_code
