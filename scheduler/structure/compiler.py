"""Compiles the structures that requests ask for, in two threads beside the step loop.

A request waits here until its structure is compiled and others go on. Most structures compile in milliseconds, the slowest that
the front lets through (`server.front.structure.structure_checks`) in two seconds. So owners of API keys take turns, an owner's shortest
structure comes first, and one thread is kept free of an owner's second long one. A thread's stack is far larger than the one
on which the front's checker compiles, because llguidance recurses along a chain of references and overflowing the stack
would end the rank: what fits there fits here. What imports llguidance (`scheduler.structure.grammar`) is imported when the
first request asks for a structure, so an engine that nobody asks runs without it.

A `Vocabulary` is all that a grammar needs to know of a tokenizer, the tokens as bytes. Whoever builds one knows the
tokenizer (`server.front.tokenizer`); ranks compile with it, and the front's checker process gets it as JSON.
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
NUM_THREADS = 2
LONG_CHARS = 2_000  # what is shorter compiles in milliseconds, as a rule
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


def _threads_with_stack(count: int, num_bytes: int) -> ThreadPoolExecutor:
    """Start threads; the size of stacks is a setting of the process, for threads that start from then on."""
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
    number: int  # then in order of arrival
    request: Request
    on_ready: OnReady

    @property
    def is_long(self) -> bool:
        """Whether it may take long."""
        return self.size > LONG_CHARS


class _Line:
    """Who compiles next: owners take turns, the shortest of an owner first."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, list[_Job]] = OrderedDict()  # heaps by owner, whose turn it is first
        self._running: dict[str, list[_Job]] = {}
        self._numbers = itertools.count()

    def add(self, request: Request, on_ready: OnReady) -> None:
        """Queue a request behind its owner's shorter ones."""
        assert request.params.structure is not None, "only requests that ask for a form come here"
        job = _Job(len(request.params.structure.text), next(self._numbers), request, on_ready)
        heapq.heappush(self._jobs.setdefault(request.key_id, []), job)

    def take(self) -> _Job | None:
        """Return what to compile; None if there is nothing, or only what waits for its owner's other one.

        Beside a long one of the same owner only a short one is taken; beside a short one nothing, so that they keep their order.
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
        """Note that it is compiled."""
        running = self._running[job.request.key_id]
        running.remove(job)
        if not running:
            del self._running[job.request.key_id]


class StructureCompiler:
    """What compiles, keeps and waits. `submit` and `forget` may be called from any thread."""

    def __init__(self, load_vocabulary: LoadVocabulary = no_vocabulary) -> None:
        """Args: load_vocabulary is called once, in a thread, when the first request asks for a form."""
        self._load_vocabulary = load_vocabulary
        self._lock = threading.Lock()
        self._is_closed = False
        self._waiting: set[str] = set()  # ids of requests whose forms are being compiled
        self._line = _Line()
        self._threads = _threads_with_stack(NUM_THREADS, STACK_BYTES)
        self.masks = MaskThreads()
        self._loading = threading.Lock()
        self._forms: MatcherSource | None = None

    def submit(self, request: Request, on_ready: OnReady) -> None:
        """Compile what a request asks for; `on_ready` is called in a thread, with the request or with its end.

        It is called under the lock: whoever hears from `forget` that nothing waits finds the request handed over.
        """
        with self._lock:
            self._waiting.add(request.request_id)
            self._line.add(request, on_ready)
        self._threads.submit(self._work)

    def forget(self, request_id: str) -> bool:
        """Drop a request that waits here; False when none does."""
        with self._lock:
            waits = request_id in self._waiting
            self._waiting.discard(request_id)
        return waits

    def close(self) -> None:
        """End the threads once they have compiled what they are at; nothing may be submitted any more."""
        self._is_closed = True
        self._threads.shutdown(cancel_futures=True)
        self.masks.close()

    def _work(self) -> None:
        """Compile until nothing may be begun."""
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
        with self._loading:
            if self._forms is None:
                self._forms = _open_forms(self._load_vocabulary(), self.masks)
            forms = self._forms
        return forms.matcher_for(request)


def _open_forms(vocabulary: Vocabulary, masks: MaskThreads) -> MatcherSource:
    try:
        module = importlib.import_module("scheduler.structure.grammar")
    except ImportError as error:
        raise StructureError(f"this rank cannot import llguidance ({error}); install it there") from error
    forms: MatcherSource = module.Forms(vocabulary, masks)
    return forms
