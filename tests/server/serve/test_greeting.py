"""The message about the service's address on a node without the front."""

import pytest

from server.serve.greeting import address_elsewhere


@pytest.mark.parametrize(
    ("http", "head", "said"),
    [
        ("http://0.0.0.0:8000", "10.213.7.1:41", "http://10.213.7.1:8000"),
        ("https://[::]:8000", "[fd00::1]:41", "https://[fd00::1]:8000"),
        ("http://10.213.7.9:8000", "head:41", "http://10.213.7.9:8000"),
        ("http://127.0.0.1:8000", "127.0.0.1:41", "http://127.0.0.1:8000"),
        ("unix:/run/w.sock", "127.0.0.1:41", "unix:/run/w.sock"),
        ("unix:/run/w.sock", "head:41", "unix:/run/w.sock (on head only)"),
        (
            "http://127.0.0.1:8000",
            "head:41",
            "http://127.0.0.1:8000 (on head only; --host 0.0.0.0 opens it to others)",
        ),
    ],
)
def test_another_node_names_the_address_that_answers_there(http: str, head: str, said: str) -> None:
    assert address_elsewhere({"http": http, "ranks_address": head}) == said
