"""Adapters over HTTP: both programs' endpoints, the list of models, and adapters of some API keys only."""

import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.served import ServedModel
from server.api.sglang.service_routes import service_routes
from server.http.app import build_app
from server.http.guards import ApiKeys
from server.http.operators.adapter_routes import adapter_routes
from server.options.pools import single_pool
from tests.server.front.adapters.test_adapters import Service, write
from tests.support.requests.asgi import ask


class Site:
    """The application of a service with adapters."""

    def __init__(self, root: Path, *keys: str, num_places: int = 2) -> None:
        nothing: Any = None
        self.service = Service(root, num_places)
        model = ServedModel(
            names=("base",), tokenizer=nothing, sampling_defaults={}, max_len=lambda: 9, created=0, structures=nothing,
            adapters=self.service.adapters,
        )  # fmt: skip
        routes = [
            adapter_routes(self.service.adapters),
            service_routes(model, nothing, version="0", pools=single_pool(1)),
        ]
        self._app = build_app(routes, version="0", keys=ApiKeys(keys))

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return ask(self._app, method, path, json=body, headers=headers)

    def models(self, key: str | None = None) -> dict[str, str | None]:
        """Return the parents of the listed models."""
        return {card["id"]: card["parent"] for card in self.ask("GET", "/v1/models", key=key).json()["data"]}


def test_both_programs_endpoints_load_and_unload(tmp_path: Path) -> None:
    site, path = Site(tmp_path), write(tmp_path / "a")
    told = site.ask("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
    assert (told.status_code, told.text) == (200, "Success: LoRA adapter 'a' added successfully.")
    told = site.ask("POST", "/load_lora_adapter", {"lora_name": "b", "lora_path": path, "pinned": True})
    assert told.json() == {"success": True, "error_message": "", "loaded_adapters": {"a": path, "b": path}}
    assert site.models() == {"base": None, "a": "base", "b": "base"}
    assert site.ask("GET", "/v1/models/a").json()["root"] == path
    [first, second] = site.ask("GET", "/adapters").json()["adapters"]
    assert (first["state"], first["pinned"], second["pinned"]) == ("registered", False, True)
    told = site.ask("POST", "/v1/unload_lora_adapter", {"lora_name": "a", "lora_int_id": 3})
    assert told.text == "Success: LoRA adapter 'a' removed successfully."
    assert site.ask("POST", "/unload_lora_adapter", {"lora_name": "b"}).json()["loaded_adapters"] == {}
    assert site.models() == {"base": None}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a"}, 400, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": ""}, 400, "lora_path is empty"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/none"}, 400, "has no adapter_config.json"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/none", "rank": 3}, 400, "rank"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/none", "api_keys": [""]}, 400, "empty key"),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/none", "api_keys": []}, 400, "api_keys is empty"),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}, 404, "'a' is not loaded"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    answer = Site(tmp_path).ask("POST", path, body)
    assert answer.status_code == status and says in answer.text, answer.text


def test_a_service_without_adapters_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path, num_places=0)
    for answer in (
        site.ask("GET", "/adapters"),
        site.ask("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"}),
    ):
        assert answer.status_code in (400, 404) and "without --enable-lora" in answer.text


def test_an_adapter_of_some_keys_is_unknown_to_the_others(tmp_path: Path) -> None:
    site, path = Site(tmp_path, "ours", "theirs"), write(tmp_path / "a")
    body = {"lora_name": "a", "lora_path": path, "api_keys": ["ours"]}
    assert site.ask("POST", "/v1/load_lora_adapter", body, key="ours").status_code == 200
    assert site.models("ours") == {"base": None, "a": "base"} and site.models("theirs") == {"base": None}
    assert site.ask("GET", "/v1/models/a", key="ours").status_code == 200
    assert site.ask("GET", "/v1/models/a", key="theirs").status_code == 404
    named = site.service.adapters.find("a")
    assert named is not None and named.owners == (hashlib.sha256(b"ours").hexdigest(),)
    assert site.ask("GET", "/adapters").status_code == 401, "paths on this machine are not for everyone"
    again = {"lora_name": "a", "lora_path": write(tmp_path / "b", alpha=77), "load_inplace": True}
    assert site.ask("POST", "/v1/load_lora_adapter", again, key="ours").status_code == 200
    assert site.models("ours") == {"base": None, "a": "base"} and site.models("theirs") == {"base": None}
