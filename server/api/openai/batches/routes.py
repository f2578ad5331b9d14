"""OpenAI's /v1/files and /v1/batches: files of requests in, files of answers out, processed in the background.

Fields, statuses and pages are those of https://platform.openai.com/docs/api-reference/batch. A file is a batch's input or its
answers; other purposes are refused by name. With API keys, only the key that created a file or batch can see it: other keys
get the 404 of a missing one.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from server.api.openai.batches.batch_store import Batch, BatchStore
from server.api.openai.batches.file_store import (
    INPUT,
    LIFETIME_S,
    MAX_FILES,
    MAX_NAME_CHARS,
    UPLOADS,
    FileStore,
    StoredFile,
    expiry_of,
    page_of,
)
from server.api.openai.batches.form import Part, read_form
from server.api.openai.batches.input_lines import URLS
from server.api.openai.batches.runs import BatchRuns
from server.front.errors import bad_request
from server.http.exchanges import owner_of_exchange
from server.http.json_writer import json_response
from server.http.routes import new_router

_MAX_LISTED_BATCHES = 100
_Text = Annotated[str, Field(max_length=512)]
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [*UPLOADS]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}
_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"application/octet-stream": {"schema": {"type": "string"}}}}
}


class ExpiresAfter(BaseModel):
    """The lifetime of answer files."""

    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(BaseModel):
    """POST /v1/batches."""

    model_config = ConfigDict(extra="allow")

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], _Text], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


def file_routes(files: FileStore, batches: BatchStore) -> APIRouter:
    """Return the routes of /v1/files."""
    router = new_router()

    @router.post("/v1/files", response_model=None, openapi_extra=_FORM)
    async def create_file(http: HttpRequest) -> Response:
        """Store a file of requests, or an image."""
        form = read_form(http.headers.get("content-type", "").encode("latin-1"), await http.body())
        purpose = form.get("purpose", Part(b"", None)).text
        if purpose not in UPLOADS:
            raise bad_request(
                f"purpose is {purpose[:80]!r}; it must be one of {', '.join(UPLOADS)}.", "purpose"
            )
        file = form.get("file")
        if file is None or not file.content:
            raise bad_request("file is missing or empty.", "file")
        kept = await files.add(
            file.content,
            owner=owner_of_exchange(),
            filename=_told_name(file),
            purpose=purpose,
            lifetime_s=_lifetime_of(form),
        )
        return json_response(kept.shown())

    @router.get("/v1/files", response_model=None)
    async def list_files(
        purpose: str | None = None,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_FILES)] = MAX_FILES,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        """List files, newest first by default."""
        found = [each for each in files.all_of(owner_of_exchange()) if purpose in (None, each.purpose)]
        page = page_of(found, StoredFile.shown, after=after, limit=limit, newest_first=order == "desc")
        return json_response(page)

    @router.get("/v1/files/{file_id}", response_model=None)
    async def retrieve_file(file_id: str) -> Response:
        """Return a file object."""
        return json_response(files.find(file_id, owner_of_exchange()).shown())

    @router.get(
        "/v1/files/{file_id}/content", response_model=None, response_class=FileResponse, responses=_CONTENT
    )
    async def download_file(file_id: str) -> Response:
        """Return a file's content."""
        found = files.find(file_id, owner_of_exchange())
        return FileResponse(
            files.path_of(found.id), media_type="application/octet-stream", filename=found.filename
        )

    @router.delete("/v1/files/{file_id}", response_model=None)
    async def delete_file(file_id: str) -> Response:
        """Delete a file, unless a batch still reads it."""
        found = files.find(file_id, owner_of_exchange())
        if reader := batches.reader_of(found.id):
            raise bad_request(
                f"{file_id} is read by {reader.id}, which has not ended; cancel it first.", "file_id"
            )
        files.delete(found)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    return router


def batch_routes(batches: BatchStore, files: FileStore, runs: BatchRuns) -> APIRouter:
    """Return the routes of /v1/batches."""
    router = new_router()

    @router.post("/v1/batches", response_model=None)
    async def create_batch(body: BatchRequest) -> Response:
        """Create and start a batch."""
        if body.endpoint not in URLS:
            raise bad_request(
                f"endpoint is {body.endpoint[:80]!r}; it must be one of {', '.join(URLS)}.", "endpoint"
            )
        if body.completion_window != "24h":
            raise bad_request(
                f"completion_window is {body.completion_window[:80]!r}; it must be '24h'.",
                "completion_window",
            )
        expires = body.output_expires_after
        lifetime_s = expiry_of(expires.seconds, "output_expires_after.seconds") if expires else LIFETIME_S
        file = files.find(body.input_file_id, owner_of_exchange(), "input_file_id")
        if file.purpose != INPUT:
            raise bad_request(
                f"{file.id} contains a batch's answers; input_file_id must be a file of requests.",
                "input_file_id",
            )
        batch = batches.create(
            owner=owner_of_exchange(),
            endpoint=body.endpoint,
            input_file_id=file.id,
            metadata=body.metadata,
            answers_lifetime_s=lifetime_s,
        )
        runs.start(batch)
        return json_response(batch.shown())

    @router.get("/v1/batches", response_model=None)
    async def list_batches(
        after: str | None = None, limit: Annotated[int, Query(ge=1, le=_MAX_LISTED_BATCHES)] = 20
    ) -> Response:
        """List batches, newest first."""
        return json_response(
            page_of(batches.all_of(owner_of_exchange()), Batch.shown, after=after, limit=limit)
        )

    @router.get("/v1/batches/{batch_id}", response_model=None)
    async def retrieve_batch(batch_id: str) -> Response:
        """Return a batch object with its progress."""
        return json_response(batches.find(batch_id, owner_of_exchange()).shown())

    @router.post("/v1/batches/{batch_id}/cancel", response_model=None)
    async def cancel_batch(batch_id: str) -> Response:
        """Cancel a batch and keep its answers."""
        batch = batches.find(batch_id, owner_of_exchange())
        runs.cancel(batch)
        return json_response(batch.shown())

    return router


def _told_name(file: Part) -> str:
    """Return a file's name to store: the last part of the client's name, which is never used as a path here."""
    name = "".join(char for char in file.filename or "" if char.isprintable())
    return name.replace("\\", "/").rpartition("/")[2][-MAX_NAME_CHARS:] or "upload"


def _lifetime_of(form: dict[str, Part]) -> int:
    """Return the lifetime of an upload, in seconds."""
    if "expires_after[anchor]" in form and form["expires_after[anchor]"].text != "created_at":
        raise bad_request("expires_after[anchor] must be 'created_at'.", "expires_after[anchor]")
    seconds = form.get("expires_after[seconds]")
    return LIFETIME_S if seconds is None else expiry_of(seconds.text, "expires_after[seconds]")
