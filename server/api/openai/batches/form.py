"""Parse a multipart/form-data body (RFC 7578) with a file upload. The body is already in memory, within its size limit.

Rejected: python-multipart, which Starlette's form parser needs. It would be one more dependency for one endpoint, and is
designed for bodies that arrive in pieces.
"""

from email.message import Message
from typing import NamedTuple

from server.front.errors import ApiError, bad_request

_MAX_PARTS = 16
_MAX_HEAD_BYTES = 4096  # per part
# Per parsed header: parsing time grows with the square of the length, and 60 KB take 2 s.
_MAX_HEADER_BYTES = 1024
_MAX_BOUNDARY_BYTES = 70  # RFC 2046's
_SENT_AS = "curl -F purpose=batch -F file=@requests.jsonl"


class Part(NamedTuple):
    """A field of a form."""

    content: bytes
    filename: str | None  # only for a file

    @property
    def text(self) -> str:
        """The content as text. Invalid UTF-8 is replaced."""
        return self.content.decode(errors="replace")


def read_form(content_type: bytes, body: bytes) -> dict[str, Part]:
    """Return a form's fields.

    Raises:
        ApiError: 400 if the body is not a form, or a field occurs twice.
    """
    if len(content_type) > _MAX_HEADER_BYTES:
        raise bad_request(
            f"The Content-Type header has {len(content_type)} bytes; the maximum is {_MAX_HEADER_BYTES}. Send the file as "
            f"multipart/form-data with a boundary, as {_SENT_AS} does."
        )
    head = Message()
    head["content-type"] = content_type.decode("latin-1")
    boundary = head.get_boundary("")
    is_boundary = 0 < len(boundary) <= _MAX_BOUNDARY_BYTES and boundary.isascii()
    if head.get_content_type() != "multipart/form-data" or not is_boundary:
        raise bad_request(f"Send the file as multipart/form-data with a boundary, as {_SENT_AS} does.")
    mark = b"\r\n--" + boundary.encode()
    # The first mark has no line before it. Nothing may precede it, and the rest after the last one is ignored.
    before, *pieces = (b"\r\n" + body).split(mark, _MAX_PARTS + 1)
    if before or not pieces or not pieces[-1].startswith(b"--"):
        raise _broken("it does not begin and end with its boundary, or has too many fields")
    fields: dict[str, Part] = {}
    for piece in pieces[:-1]:
        name, part = _read_part(piece)
        if name in fields:
            raise bad_request(f"The form has the field {name[:80]!r} twice.", name)
        fields[name] = part
    return fields


def _read_part(piece: bytes) -> tuple[str, Part]:
    line_end = piece.find(b"\r\n")
    blank = piece.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)
    if line_end < 0 or piece[:line_end].strip(b" \t") or blank < 0:
        raise _broken("the head of a field does not end with an empty line")
    head = Message()
    for line in piece[line_end:blank].split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if colon and key.strip().lower() == b"content-disposition":
            if len(value) > _MAX_HEADER_BYTES:
                raise _broken(f"a field's Content-Disposition has more than {_MAX_HEADER_BYTES} bytes")
            head["content-disposition"] = value.strip().decode(errors="replace")
    try:
        name, filename = head.get_param("name", header="content-disposition"), head.get_filename()
    except (UnicodeError, LookupError) as error:  # from the charset that the head names
        raise _broken("a field's name cannot be read") from error
    if not isinstance(name, str) or not name or head.get_content_disposition() != "form-data":
        raise _broken("a field has no name")
    return name, Part(piece[blank + 4 :], filename)


def _broken(why: str) -> ApiError:
    return bad_request(f"The body is not a valid form: {why}.")
