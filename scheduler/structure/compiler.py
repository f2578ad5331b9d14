"""Compiles the structures of requests in two threads, outside the step loop.

A request waits here until its structure is compiled, while other requests continue. Most structures compile in
milliseconds; the slowest that the front accepts (`server.front.structure.structure_checks`) takes two seconds. So owners
of API keys take turns, an owner's shortest structure comes first, and one thread stays free of an owner's second long
one. Threads have a far larger stack than the front's checker, because llguidance recurses along chains of references
and a stack overflow would end the rank: what the checker compiles also compiles here. `scheduler.structure.grammar`,
which imports llguidance, is imported for the first request with a structure; without such requests it is not needed.

A `Vocabulary` holds all that a grammar needs of a tokenizer: the tokens as bytes. The code that builds one knows the
tokenizer (`server.front.tokenizer`). Ranks compile with it, and the front's checker process gets it as JSON.
"""

import heapq
import importlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from scheduler.policy.request import FinishReason, Request, RequestOutput
from scheduler.policy.sequence import StructureMatcher
from scheduler.structure.masks import MaskThreads


class StructureError(ValueError):
    """A structure that cannot be compiled. The message gives the reason, for the client."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id."""

    tokens: tuple[bytes, ...]  # text of each; special tokens by their names, unused ids empty
    special_ids: frozenset[int]  # tokens without text
    end_ids: frozenset[int]  # the special tokens that end an answer


LoadVocabulary = Callable[[], Vocabulary]


def vocabulary_to_json(vocabulary: Vocabulary) -> str:
    """Encode a vocabulary as one line of JSON."""
    return json.dumps(
        {
            "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
            "special_ids": sorted(vocabulary.special_ids),
            "end_ids": sorted(vocabulary.end_ids),
        }
    )


def vocabulary_from_json(text: str) -> Vocabulary:
    """Decode the result of `vocabulary_to_json`."""
    content = json.loads(text)
    return Vocabulary(
        tokens=tuple(token.encode("latin-1") for token in content["tokens"]),
        special_ids=frozenset(content["special_ids"]),
        end_ids=frozenset(content["end_ids"]),
    )


CLIENTS_FAULT = "the structure is too "  # start of all failures that the structure causes, not the service
NUM_THREADS = 2
LONG_CHARS = 2_000  # shorter structures usually compile in milliseconds
STACK_BYTES = 64 << 20  # of address space; untouched pages use no memory


class Structured(NamedTuple):
    """A request that is ready to be served."""

    request: Request
    matcher: StructureMatcher


class MatcherSource(Protocol):
    """Compiled structures; implemented by `grammar.Forms`."""

    def matcher_for(self, request: Request) -> StructureMatcher:
        """Return a matcher for the request's structure. Raises: StructureError."""


OnReady = Callable[[Structured | RequestOutput], None]


def no_vocabulary() -> Vocabulary:
    """Default for engines without a tokenizer."""
    raise StructureError("this engine was started without a tokenizer")


def _threads_with_stack(count: int, num_bytes: int) -> ThreadPoolExecutor:
    """Start threads. The stack size is a setting of the process that applies to threads started after it is set."""
    before, all_run = threading.stack_size(num_bytes), threading.Barrier(count + 1)
    try:
        threads = ThreadPoolExecutor(count, thread_name_prefix="structure")
        for _ in range(count):
            threads.submit(all_run.wait)
        all_run.wait()
    finally:
        threading.stack_size(before)
    return threads


class _Job(NamedTuple):
    size: int  # of the structure's text, in characters
    number: int  # then by arrival
    request: Request
    on_ready: OnReady

    @property
    def is_long(self) -> bool:
        """Whether it may take long to compile."""
        return self.size > LONG_CHARS


class _Line:
    """The order of compilation: owners take turns, an owner's shortest first."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, list[_Job]] = OrderedDict()  # heaps by owner; the next owner comes first
        self._running: dict[str, list[_Job]] = {}
        self._numbers = itertools.count()

    def add(self, request: Request, on_ready: OnReady) -> None:
        """Queue a request after its owner's shorter ones."""
        assert request.params.structure is not None, "only requests with a structure are queued"
        job = _Job(len(request.params.structure.text), next(self._numbers), request, on_ready)
        heapq.heappush(self._jobs.setdefault(request.key_id, []), job)

    def take(self) -> _Job | None:
        """Return the next job. Returns None if there is none, or if all wait for another job of their owner.

        During an owner's long job only a short one of that owner is taken; during a short one none, to keep their order.
        """
        for owner, jobs in self._jobs.items():
            running = self._running.get(owner, [])
            if running and (jobs[0].is_long or not all(each.is_long for each in running)):
                continue
            job = heapq.heappop(jobs)
            self._running.setdefault(owner, []).append(job)
            self._jobs.move_to_end(owner)
            if not jobs:
                del self._jobs[owner]
            return job
        return None

    def end(self, job: _Job) -> None:
        """Note that a job is done."""
        running = self._running[job.request.key_id]
        running.remove(job)
        if not running:
            del self._running[job.request.key_id]


class StructureCompiler:
    """Compiles structures for waiting requests. Any thread may call `submit` and `forget`."""

    def __init__(self, load_vocabulary: LoadVocabulary = no_vocabulary) -> None:
        """`load_vocabulary` is called once, in a thread, for the first request with a structure."""
        self._load_vocabulary = load_vocabulary
        self._lock = threading.Lock()
        self._is_closed = False
        # Requests with structures in the queue or being compiled, by id. A request that was forgotten may come again, with more
        # tokens, while the job of the earlier one is still there.
        self._waiting: dict[str, Request] = {}
        self._line = _Line()
        self._threads = _threads_with_stack(NUM_THREADS, STACK_BYTES)
        self.masks = MaskThreads()
        self._loading = threading.Lock()
        self._forms: MatcherSource | None = None

    def submit(self, request: Request, on_ready: OnReady) -> None:
        """Compile a request's structure. Then call `on_ready` in a thread, with the request or with its end.

        `on_ready` is called under the lock. So if `forget` returns False, the request was already handed over.
        """
        with self._lock:
            self._waiting[request.request_id] = request
            self._line.add(request, on_ready)
        self._threads.submit(self._work)

    def forget(self, request_id: str) -> bool:
        """Drop a waiting request. Returns False if it does not wait here."""
        with self._lock:
            return self._waiting.pop(request_id, None) is not None

    def close(self) -> None:
        """End the threads after their present jobs. Nothing may be submitted afterwards."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        self.masks.close()

    def _work(self) -> None:
        """Compile until no job may begin."""
        while not self._is_closed:
            with self._lock:
                job = self._line.take()
            if job is None:
                return
            self._prepare(job.request, job.on_ready)
            with self._lock:
                self._line.end(job)

    def _prepare(self, request: Request, on_ready: OnReady) -> None:
        ready: Structured | RequestOutput
        try:
            ready = Structured(request, self._matcher_for(request))
        except Exception as error:  # noqa: BLE001 - the waiting request must end after any error
            why = str(error) if isinstance(error, StructureError) else repr(error)
            ready = RequestOutput(
                request_id=request.request_id,
                token_ids=[],
                finish_reason=FinishReason.ERROR,
                error=f"the structure cannot be compiled: {why}",
            )
        with self._lock:
            if self._waiting.get(request.request_id) is request:
                del self._waiting[request.request_id]
                on_ready(ready)

    def _matcher_for(self, request: Request) -> StructureMatcher:
        with self._loading:
            if self._forms is None:
                self._forms = _open_forms(self._load_vocabulary(), self.masks)
            forms = self._forms
        return forms.matcher_for(request)


def _open_forms(vocabulary: Vocabulary, masks: MaskThreads) -> MatcherSource:
    try:
        module = importlib.import_module("scheduler.structure.grammar")
    except ImportError as error:
        raise StructureError(f"this rank cannot import llguidance ({error}); install it") from error
    forms: MatcherSource = module.Forms(vocabulary, masks)
    return forms
