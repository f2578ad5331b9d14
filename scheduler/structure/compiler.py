"""Compiles the structures that requests ask for, in a thread beside the step loop.

A request waits here until its structure is compiled and others go on. One thread: structures compile in milliseconds,
and the front has let none through that does not (`server.front.structure.structure_checks`). Its stack is far larger than the one
on which the front's checker compiles, because llguidance recurses along a chain of references and overflowing the stack
would end the rank: what fits there fits here. What imports llguidance (`scheduler.structure.grammar`) is imported when the
first request asks for a structure, so an engine that nobody asks runs without it.

A `Vocabulary` is all that a grammar needs to know of a tokenizer, the tokens as bytes. Whoever builds one knows the
tokenizer (`server.front.tokenizer`); ranks compile with it, and the front's checker process gets it as JSON.
"""

import importlib
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.policy.request import FinishReason, Request, RequestOutput
from scheduler.policy.sequence import StructureMatcher
from scheduler.structure.masks import MaskThreads


class StructureError(ValueError):
    """A form that cannot be compiled; the message says why, in words for the client."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id."""

    tokens: tuple[bytes, ...]  # what each stands for; special tokens by their names, unused ids empty
    special_ids: frozenset[int]  # tokens that are no text
    end_ids: frozenset[int]  # of those, the ones that end an answer


LoadVocabulary = Callable[[], Vocabulary]


def vocabulary_to_json(vocabulary: Vocabulary) -> str:
    """Encode on one line."""
    return json.dumps(
        {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "special_ids": sorted(vocabulary.special_ids),
            "end_ids": sorted(vocabulary.end_ids),
        }
    )


def vocabulary_from_json(text: str) -> Vocabulary:
    """Decode."""
    content = json.loads(text)
    return Vocabulary(
        tokens=tuple(token.encode("latin-1") for token in content["tokens"]),
        special_ids=frozenset(content["special_ids"]),
        end_ids=frozenset(content["end_ids"]),
    )


CLIENTS_FAULT = "the structure is too "  # so begins a failure that is the structure's, not ours
STACK_BYTES = 64 << 20  # of address space; pages that nobody touches cost nothing


class Structured(NamedTuple):
    """A request that may be served now."""

    request: Request
    matcher: StructureMatcher


class MatcherSource(Protocol):
    """See `grammar.Forms`."""

    def matcher_for(self, request: Request) -> StructureMatcher:
        """Raises: StructureError."""
        ...


OnReady = Callable[[Structured | RequestOutput], None]


def no_vocabulary() -> Vocabulary:
    """Stand in where nobody said how to load the tokenizer."""
    raise StructureError("this engine was started without a tokenizer")


def _thread_with_stack(num_bytes: int) -> ThreadPoolExecutor:
    """Start a thread; the size of stacks is a setting of the process, for threads that start from then on."""
    before = threading.stack_size(num_bytes)
    try:
        thread = ThreadPoolExecutor(1, thread_name_prefix="structure")
        thread.submit(str).result()
    finally:
        threading.stack_size(before)
    return thread


class StructureCompiler:
    """What compiles, keeps and waits. `submit` and `forget` may be called from any thread."""

    def __init__(self, load_vocabulary: LoadVocabulary = no_vocabulary) -> None:
        """Args: load_vocabulary is called once, in the thread, when the first request asks for a form."""
        self._load_vocabulary = load_vocabulary
        self._lock = threading.Lock()
        self._waiting: set[str] = set()  # ids of requests whose forms are being compiled
        self._thread = _thread_with_stack(STACK_BYTES)
        self.masks = MaskThreads()
        self._forms: MatcherSource | None = None  # the thread's alone

    def submit(self, request: Request, on_ready: OnReady) -> None:
        """Compile what a request asks for; `on_ready` is called in the thread, with the request or with its end.

        It is called under the lock: whoever hears from `forget` that nothing waits finds the request handed over.
        """
        with self._lock:
            self._waiting.add(request.request_id)
        self._thread.submit(self._prepare, request, on_ready)

    def forget(self, request_id: str) -> bool:
        """Drop a request that waits here; False when none does."""
        with self._lock:
            waits = request_id in self._waiting
            self._waiting.discard(request_id)
        return waits

    def close(self) -> None:
        """End the thread once it has compiled what it is at; nothing may be submitted any more."""
        self._thread.shutdown(cancel_futures=True)
        self.masks.close()

    def _prepare(self, request: Request, on_ready: OnReady) -> None:
        ready: Structured | RequestOutput
        try:
            ready = Structured(request, self._matcher_for(request))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request that waits must end
            why = str(error) if isinstance(error, StructureError) else repr(error)
            ready = RequestOutput(
                request_id=request.request_id,
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error=f"the structure cannot be compiled: {why}",
            )
        with self._lock:
            if request.request_id in self._waiting:
                self._waiting.remove(request.request_id)
                on_ready(ready)

    def _matcher_for(self, request: Request) -> StructureMatcher:
        if self._forms is None:
            self._forms = _open_forms(self._load_vocabulary(), self.masks)
        return self._forms.matcher_for(request)


def _open_forms(vocabulary: Vocabulary, masks: MaskThreads) -> MatcherSource:
    try:
        module = importlib.import_module("scheduler.structure.grammar")
    except ImportError as error:
        raise StructureError(f"this rank cannot import llguidance ({error}); install it there") from error
    forms: MatcherSource = module.Forms(vocabulary, masks)
    return forms
