"""Stored responses: found again, bounded in number and size, forgotten on demand."""

import pytest

from server.api.responses.kept import ResponseStore
from server.errors import ApiError


def response(number: int, text: str = "") -> dict[str, str]:
    return {"id": f"resp_{number}", "text": text}


def missing(store: ResponseStore, *numbers: int) -> bool:
    for number in numbers:
        with pytest.raises(ApiError, match=r"Response with id .* not found") as caught:
            store.get(f"resp_{number}", "previous_response_id")
        assert (caught.value.status, caught.value.param) == (404, "previous_response_id")
    return True


def test_what_was_put_is_found_with_its_conversation() -> None:
    store = ResponseStore()
    store.put(response(1), [{"role": "user", "content": "u"}])
    stored = store.get("resp_1", "response_id")
    assert stored.response == response(1) and stored.messages == ({"role": "user", "content": "u"},)
    assert missing(store, 2)


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(max_responses=2)
    for number in (1, 2):
        store.put(response(number), [])
    store.get("resp_1", "response_id")
    store.put(response(3), [])
    assert missing(store, 2) and store.get("resp_1", "x") and store.get("resp_3", "x")


def test_the_size_is_bounded_whatever_the_number() -> None:
    store = ResponseStore(max_chars=1000)
    for number in range(10):
        store.put(response(number, "x" * 300), [{"role": "user", "content": "y" * 100}])
    assert missing(store, *range(8)) and store.get("resp_9", "x")
    store.put(response(10, "x" * 2000), [])
    assert missing(store, 10) and store.get("resp_9", "x"), "one that never fits pushes nothing out"


def test_a_deleted_response_is_gone_and_its_room_is_free() -> None:
    store = ResponseStore(max_chars=500)
    for number in range(50):
        store.put(response(number, "x" * 300), [])
        store.delete(f"resp_{number}")
        assert missing(store, number)
    with pytest.raises(ApiError):
        store.delete("resp_0")
