"""Structures in the engine: next to other requests, through preemption, replay, aborts and failures."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from scheduler.policy.request import FinishReason, Request, RequestOutput, Structure
from scheduler.policy.sequence import Sequence
from scheduler.structure.compiler import OnReady, Vocabulary
from scheduler.structure.masks import Mask, MaskThreads
from tests.fixtures import PoolOf
from tests.support.engines.serving import Served, build, own_share, request, serve
from tests.support.models.families import VOCABULARY as NUM_TOKENS
from tests.support.models.families import write_checkpoint

END = 2  # end-of-sequence id of the families
BYTES = Vocabulary(
    tokens=(b"<pad>", b"<begin>", b"<end>", *(bytes([byte]) for byte in range(3, NUM_TOKENS))),
    special_ids=frozenset({0, 1, END}),
    end_ids=frozenset({END}),
)
FORMS = {
    "schema": Structure(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {
                    "a": {"enum": ["x", "yy"]},
                    "b": {"type": "integer", "minimum": 0, "maximum": 99},
                },
                "required": ["a", "b"],
                "additionalProperties": False,
                "x-guidance": {"whitespace_flexible": False},
            }
        ),
    ),
    "regex": Structure("regex", "[a-f]{3}-[0-9]{2,5}"),
    "choice": Structure("choice", '["red", "green", "blue"]'),
    "grammar": Structure("grammar", 'start: "(" start ")" | "x"\n'),
}
Texts = dict[str, tuple[str, FinishReason | None]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny checkpoint."""
    path = tmp_path_factory.mktemp("structured")
    write_checkpoint("qwen3_moe", path)
    return path


def requests(**params: Any) -> list[Request]:
    """Return structured requests, greedy and seeded, each followed by one without a structure."""
    made = []
    for index, (name, form) in enumerate(FORMS.items()):
        for kind, more in (
            ("greedy", {}),
            ("seeded", {"temperature": 1.0, "seed": index, "top_p": 0.9}),
        ):
            prompt = range(10 * index + 3, 10 * index + 20)
            asked = {"max_tokens": 40, "stop_token_ids": (END,), **more, **params}
            made.append(request(f"{name}-{kind}", prompt, structure=form, **asked))
            made.append(request(f"free-{index}-{kind}", prompt, **asked))
    return made


def texts(served: Served) -> Texts:
    """Return every answer with its finish reason."""
    ends = {output.request_id: output.finish_reason for output in served.outputs if output.finish_reason}
    return {
        name: ("".join(map(chr, (each for each in token_ids if each != END))), ends.get(name))
        for name, token_ids in served.token_ids.items()
    }


def serve_all(
    directory: Path,
    share: list[Request],
    *,
    alone: bool = False,
    preempts: bool = False,
    **settings: Any,
) -> Texts:
    """Serve requests on one or more ranks. Check that nothing leaks."""
    built = build(directory, load_vocabulary=lambda: BYTES, max_model_len=160, **settings)
    served = serve(built, *([[one] for one in share] if alone else [share]))
    stats = built.scheduler.stats
    assert stats.num_free_blocks == stats.num_blocks and (stats.num_preemptions > 0) == preempts
    return texts(served)


def serve_share(directory: Path) -> Texts:
    """Serve this rank's share in a pool."""
    return serve_all(directory, own_share(requests()))


@pytest.fixture(scope="module")
def served_alone(directory: Path) -> Texts:
    """Return the answers to every request served alone."""
    return serve_all(directory, requests(), alone=True)


def test_answers_have_their_forms(served_alone: Texts) -> None:
    for kind in ("greedy", "seeded"):
        content = json.loads(served_alone[f"schema-{kind}"][0])
        assert content["a"] in ("x", "yy") and 0 <= content["b"] <= 99
        head, digits = served_alone[f"regex-{kind}"][0].split("-")
        assert len(head) == 3 and set(head) <= set("abcdef") and 2 <= len(digits) <= 5 and digits.isdigit()
        assert served_alone[f"choice-{kind}"][0] in ("red", "green", "blue")
        for name in ("schema", "regex", "choice"):
            assert served_alone[f"{name}-{kind}"][1] is FinishReason.STOP
        text, end = served_alone[f"grammar-{kind}"]
        assert end is FinishReason.LENGTH or text == "(" * (len(text) // 2) + "x" + ")" * (len(text) // 2)


@pytest.mark.crossed("settings", every=2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 23, "max_num_seqs": 4},
        {"kv_cache_bytes": 16 * 12 * 768, "preempts": True},
    ],
    ids=["full batch", "chunks", "preemption"],
)
def test_forms_change_nobody_elses_tokens_and_nobody_changes_theirs(
    directory: Path, served_alone: Texts, settings: dict[str, Any]
) -> None:
    assert serve_all(directory, requests(), **settings) == served_alone


@pytest.mark.crossed("settings", every=2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 23, "max_num_seqs": 4},
        {"enable_prefix_caching": False, "max_num_seqs": 6},
    ],
    ids=["full batch", "chunks", "without a prefix cache"],
)
def test_answers_do_not_depend_on_when_their_masks_are_ready(
    directory: Path, served_alone: Texts, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step waits here, so masks are late unless they finish before the model."""
    built = build(directory, load_vocabulary=lambda: BYTES, max_model_len=160, **settings)
    sat_out: list[str] = []
    park = built.scheduler._roster.park

    def note(sequence: Sequence) -> None:
        sat_out.append(sequence.request.request_id)
        park(sequence)

    monkeypatch.setattr(built.scheduler._roster, "park", note)
    built.structures.masks = SlowMasks()
    served = serve(built, requests())
    assert texts(served) == served_alone
    assert sat_out and not any(name.startswith("free") for name in sat_out)
    stats = built.scheduler.stats
    assert (stats.num_free_blocks, stats.num_waiting) == (stats.num_blocks, 0)


class SlowMasks(MaskThreads):
    """Makes every third mask late: it is computed only when requested."""

    def __init__(self) -> None:
        super().__init__()
        self._num_started = 0
        self._late: dict[Future[Mask], Callable[[], Mask]] = {}

    def start(self, compute: Callable[[], Mask], last_s: float) -> "Future[Mask]":
        self._num_started += 1
        if self._num_started % 3:
            return super().start(compute, last_s)
        late: Future[Mask] = Future()
        self._late[late] = compute
        return late

    def wait(self, mask: "Future[Mask]") -> bool:
        if mask in self._late:
            computed = super().start(self._late.pop(mask), 0.0)
            computed.add_done_callback(lambda done: mask.set_result(done.result()))
            return False
        mask.exception(60)
        return True


def test_a_parked_request_is_aborted_and_leaves_nothing(directory: Path) -> None:
    built = build(directory, load_vocabulary=lambda: BYTES)
    never = threading.Event()

    class Never(MaskThreads):
        def start(self, compute: Callable[[], Mask], last_s: float) -> "Future[Mask]":
            return Future()

        def wait(self, mask: "Future[Mask]") -> bool:
            if not never.is_set():
                never.set()
                built.engine.abort("1")
            return False

    built.structures.masks = Never()
    served = serve(
        built, [request("1", (3, 4), structure=FORMS["regex"]), request("2", (3, 4), max_tokens=9)]
    )
    ends = {output.request_id: output.finish_reason for output in served.outputs if output.finish_reason}
    assert ends == {"1": FinishReason.ABORT, "2": FinishReason.LENGTH}
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks


@pytest.mark.slow
def test_two_ranks_give_the_same_answers(directory: Path, served_alone: Texts, pool_of: PoolOf) -> None:
    parts = pool_of(2).run(serve_share, directory)
    assert {key: value for part in parts for key, value in part.items()} == served_alone


def test_a_replay_goes_on_where_the_answer_was_cut(directory: Path, served_alone: Texts) -> None:
    replays = []
    for asked in requests():
        if asked.params.structure is not None:
            text = served_alone[asked.request_id][0]
            replayed = tuple(map(ord, text[: len(text) // 2]))
            replays.append(Request(**{**vars(asked), "replayed_ids": replayed}))
    for name, (text, end) in serve_all(directory, replays).items():
        whole, wanted_end = served_alone[name]
        assert (whole[: len(whole) // 2] + text, end) == (whole, wanted_end)


def test_a_replay_of_a_complete_form_ends_at_once(directory: Path) -> None:
    asked = request("1", (3, 4), structure=FORMS["choice"])
    done = Request(**{**vars(asked), "replayed_ids": tuple(b"red")})
    built = build(directory, load_vocabulary=lambda: BYTES)
    (output,) = serve(built, [done]).outputs
    assert (output.token_ids, output.finish_reason) == ([], FinishReason.STOP)


class Broken:
    """A matcher that fails after some tokens."""

    has_ended = is_late = False
    is_ready = True

    def __init__(self, num_tokens: int) -> None:
        self.failure: str | None = None
        self._num_left = num_tokens

    def begin_step(self) -> None: ...

    def mask(self, logits_V: Any) -> None: ...

    def advance(self, token_id: int) -> None:
        """Count down to the failure."""
        self._num_left -= 1
        self.failure = None if self._num_left else "this matcher is broken"


def test_a_matcher_that_fails_ends_its_request_with_an_error_and_no_other(
    directory: Path, served_alone: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build(directory, load_vocabulary=lambda: BYTES, max_model_len=160)
    broken = {"regex-greedy": 1, "choice-seeded": 3}
    whole = built.structures._matcher_for

    def matcher_for(asked: Request) -> Any:
        return Broken(broken[asked.request_id]) if asked.request_id in broken else whole(asked)

    monkeypatch.setattr(built.structures, "_matcher_for", matcher_for)
    served = serve(built, requests())
    for name, num_tokens in broken.items():
        (end,) = [o for o in served.outputs if o.request_id == name and o.finish_reason]
        assert (end.finish_reason, end.error) == (FinishReason.ERROR, "this matcher is broken")
        assert len(served.token_ids[name]) == num_tokens - 1
    others = {name: answer for name, answer in texts(served).items() if name not in broken}
    assert others == {name: answer for name, answer in served_alone.items() if name not in broken}
    assert built.scheduler.stats.num_free_blocks == built.scheduler.stats.num_blocks


def test_a_form_that_does_not_compile_on_a_rank_ends_its_request_with_an_error(directory: Path) -> None:
    built = build(directory, load_vocabulary=lambda: BYTES)
    wrong = request("wrong", (3, 4), structure=Structure("regex", "("))
    served = serve(built, [wrong, request("free", (3, 4), max_tokens=5)])
    ends: dict[str, RequestOutput] = {o.request_id: o for o in served.outputs if o.finish_reason}
    assert ends["wrong"].finish_reason is FinishReason.ERROR and "cannot be compiled" in ends["wrong"].error
    assert ends["free"].finish_reason is FinishReason.LENGTH


def test_an_abort_while_a_form_is_compiled_is_answered(directory: Path) -> None:
    built = build(directory, load_vocabulary=lambda: BYTES)
    asked = request("1", (3, 4), structure=FORMS["regex"])

    def submit(request: Request, on_ready: OnReady) -> None:
        built.structures._waiting[request.request_id] = request

    built.structures.submit = submit  # type: ignore[method-assign]
    built.engine.submit(asked)
    built.engine.abort("1")
    (output,) = serve(built, []).outputs
    assert (output.request_id, output.finish_reason) == ("1", FinishReason.ABORT)
