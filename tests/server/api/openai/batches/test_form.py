"""Forms: those that httpx writes are read back, and malformed ones are refused."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.openai.batches.form import read_form
from server.front.errors import ApiError

FORM = b"multipart/form-data; boundary=x"
PART = b'Content-Disposition: form-data; name="a"\r\n\r\nb'


@settings(max_examples=40, deadline=None)
@given(
    fields=st.dictionaries(st.text("abc[]", min_size=1), st.text("a\u00e9\u20ac\r\n-x"), max_size=3),
    content=st.one_of(
        st.binary(), st.sampled_from([b"\r\n", b"--", b"\r\n--", b"\r\n\r\n", b"a\r\n--x--\r\n"])
    ),
)
def test_a_form_is_read_as_it_was_written(fields: dict[str, str], content: bytes) -> None:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("n\u00e9.jsonl", content)})
    form = read_form(request.headers["content-type"].encode(), request.read())
    file = form.pop("file")
    assert (file.content, file.filename) == (content, "n\u00e9.jsonl")
    assert {name: part.text for name, part in form.items()} == fields


@settings(max_examples=60, deadline=None)
@given(kind=st.binary(), body=st.binary())
def test_bytes_that_are_no_form_are_a_400(kind: bytes, body: bytes) -> None:
    for content_type in (kind, b"multipart/form-data; " + kind, FORM + kind, FORM):
        for content in (body, b"--x\r\n" + body + b"\r\n--x--", b"--x\r\n" + PART + body + b"\r\n--x--\r\n"):
            try:
                read_form(content_type, content)
            except ApiError as refused:
                assert refused.status == 400


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (b"application/json", b"{}", "multipart/form-data with a boundary"),
        (b"multipart/form-data", b"", "multipart/form-data with a boundary"),
        (b"multipart/form-data; boundary=" + b"x" * 71, b"", "multipart/form-data with a boundary"),
        (FORM + b";" * 60_000, b"", "Content-Type header has 60031 bytes; the maximum is 1024"),
        (FORM, b"--x\r\n" + PART[:-5] + b";" * 2000 + b"\r\n\r\nb\r\n--x--", "more than 1024 bytes"),
        (FORM, b"", "begin and end with its boundary"),
        (FORM, b"--x\r\n" + PART, "begin and end with its boundary"),
        (FORM, (b"--x\r\n" + PART + b"\r\n") * 20 + b"--x--", "too many fields"),
        (FORM, b"--x\r\nno head\r\n--x--", "does not end with an empty line"),
        (FORM, b"--x\r\nA: " + b"b" * 5000 + b"\r\n\r\n\r\n--x--", "does not end with an empty line"),
        (FORM, b"--x\r\nContent-Disposition: form-data\r\n\r\n\r\n--x--", "no name"),
        (FORM, (b"--x\r\n" + PART + b"\r\n") * 2 + b"--x--", "has the field 'a' twice"),
        (
            FORM,
            b"--x\r\nContent-Disposition: form-data; name=a; filename*=punycode''%ff\r\n\r\n\r\n--x--",
            "name cannot be read",
        ),
    ],
)
def test_what_is_no_form_is_refused_by_a_sentence(kind: bytes, body: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words):
        read_form(kind, body)
