"""Which steps are replayed, what a capture runs, and where results are stored. A recording fake replaces CUDA."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import pytest
import torch
from torch import Tensor

from kvcache.gpu.step import DeviceStep
from kvcache.step import Span
from scheduler.step import graphs as graphs_module
from scheduler.step.graphs import WARM_UPS, CudaRecorder, GraphError, Run, StepGraphs
from scheduler.step.parts import open_forward


class FakeRecorder:
    """Runs a function once to capture it, and again for every replay, into one tensor."""

    def __init__(self) -> None:
        self.captured: list[int] = []

    def capture(self, run: Run) -> Run:
        """Record the size by the result's rows."""
        result = run()
        self.captured.append(len(result))

        def replay() -> Tensor:
            return result.copy_(run())

        return replay

    def finish(self) -> int:
        """Pretend that graphs hold memory."""
        return 1000


class FakeModel:
    """Its logits encode the tokens and positions that it received. It counts its calls."""

    def __init__(self, step: DeviceStep) -> None:
        self.step, self.calls = step, 0
        self.kept: list[bool] = []

    def forward(
        self,
        token_T: Tensor,
        cache: Any,
        logits_R: Tensor,
        *,
        keeps_hidden: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return token and position of the wanted rows."""
        self.calls += 1
        self.kept.append(keeps_hidden)
        seen = torch.stack((token_T, self.step.positions), dim=1).float()
        return seen[logits_R] if out is None else out.copy_(seen[logits_R])


@pytest.fixture
def step() -> DeviceStep:
    """Return a small step."""
    return DeviceStep(
        max_tokens=32, max_sequences=8, max_blocks=2, block_tokens=16, device=torch.device("cpu")
    )


def run(graphs: StepGraphs, step: DeviceStep, positions: list[int], **options: Any) -> Tensor:
    """Run a step that decodes token 50 + position at each position."""
    step.fill([Span(position, 1, [0, 1]) for position in positions], len(positions))
    inputs = step.inputs([50 + position for position in positions], range(len(positions)))
    return graphs(inputs.token_T, None, inputs.row_R, **options)  # type: ignore[arg-type]


def test_graphs_are_captured_from_the_largest_down_with_padded_rows_only(step: DeviceStep) -> None:
    model, recorder = FakeModel(step), FakeRecorder()
    told: list[tuple[int, int]] = []
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture(step.sizes, recorder, lambda *each: told.append(each))
    assert recorder.captured == [8, 4, 2, 1] and graphs.sizes == (1, 2, 4, 8)
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert step.num_tokens == 0 and step.on_device.cache_slot_P.tolist() == [-1]


def test_a_replay_sees_the_step_that_was_filled_last(step: DeviceStep) -> None:
    model = FakeModel(step)
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture(step.sizes, FakeRecorder())
    first = run(graphs, step, [3, 9, 4])
    assert first[:3].tolist() == [[53, 3], [59, 9], [54, 4]]
    second = run(graphs, step, [5, 6, 7, 8])
    assert second[:4].tolist() == [[55, 5], [56, 6], [57, 7], [58, 8]]
    assert second.data_ptr() == first.data_ptr()
    assert graphs.num_replays == 2


def test_steps_with_drafts_replay_the_sizes_of_their_rows(step: DeviceStep) -> None:
    """A graph depends only on the number of rows, of one sequence or of several."""
    model = FakeModel(step)
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture(step.sizes, FakeRecorder())
    captured = model.calls
    for replays, lengths in enumerate([(3, 1), (1,), (2,), (4, 3, 1), (1, 1, 1), (8,)], start=1):
        spans = [Span(3 + 5 * at, length, [0, 1]) for at, length in enumerate(lengths)]
        rows = sum(lengths)
        step.fill(spans, rows)
        inputs = step.inputs(range(50, 50 + rows), range(rows))
        found = graphs(inputs.token_T, None, inputs.row_R)[:rows]  # type: ignore[arg-type]
        positions = [span.start + row for span in spans for row in range(span.length)]
        assert found.tolist() == [[50 + row, position] for row, position in enumerate(positions)]
        assert graphs.num_replays == replays
        assert step.num_padded == min(size for size in step.sizes if size >= rows)
    # A replay runs the model once more here.
    assert model.calls == captured + replays


def test_steps_with_adapters_have_graphs_that_see_changed_tables(step: DeviceStep) -> None:
    step.num_adapters = 2
    model, told = FakeModel(step), list[tuple[int, int]]()
    recorded: list[bool] = []
    forward = model.forward

    def noting(*args: Any, **options: Any) -> Tensor:
        recorded.append(step.records_adapters)
        return forward(*args, **options)

    graphs = StepGraphs(noting, step, None)  # type: ignore[arg-type]
    graphs.capture([1, 2], FakeRecorder(), lambda *each: told.append(each))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)] and graphs.sizes == (1, 2) and graphs.num_graphs == 4
    assert recorded[1:] == [False, True, False, True] and not step.records_adapters
    copied: list[str] = []
    for adapter, copies in ((-1, []), (1, ["table"]), (1, ["table"])):
        if not copied:
            step.changed_tables = {lambda: copied.append("table")}
        step.fill([Span(3, 1, [0, 1], adapter=adapter)], 1)
        inputs = step.inputs([53], [0])
        assert graphs(inputs.token_T, None, inputs.row_R).tolist() == [[53, 3]]  # type: ignore[arg-type]
        assert copied == copies, "a step without adapters copies nothing, and each table is copied once"
    assert graphs.num_replays == 3 and recorded[-3:] == [False, True, True]


@pytest.mark.parametrize("why", ["prompt", "hidden states", "no graph of the size"])
def test_other_steps_run_as_they_are(step: DeviceStep, why: str) -> None:
    model = FakeModel(step)
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture([4] if why == "no graph of the size" else step.sizes, FakeRecorder())
    before = model.calls
    if why == "prompt":
        step.fill([Span(0, 8, [0])])
        inputs = step.inputs(range(8), [7])
        assert graphs(inputs.token_T, None, inputs.row_R).tolist() == [[7, 7]]  # type: ignore[arg-type]
    else:
        found = run(graphs, step, [1, 2], keeps_hidden=why == "hidden states")
        assert found[:2].tolist() == [[51, 1], [52, 2]]
    assert graphs.num_replays == 0 and model.calls == before + 1
    assert model.kept[-1] == (why == "hidden states")


def test_among_several_ranks_only_steps_that_all_agreed_on_are_replayed() -> None:
    """A rank that decodes while another runs a prompt would otherwise wait for a number of tokens that no rank sends."""
    step = DeviceStep(
        max_tokens=32,
        max_sequences=20,
        max_blocks=2,
        block_tokens=16,
        device=torch.device("cpu"),
        num_ranks=2,
    )
    model, recorder = FakeModel(step), FakeRecorder()
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture(step.graph_sizes, recorder)
    assert recorder.captured == [20, 16, 8]
    for agreed, replays in ((8, 1), (0, 1), (16, 2)):
        step.fill([Span(4, 1, [0])], 1, agreed_tokens=agreed)
        inputs = step.inputs([54], [0])
        assert graphs(inputs.token_T, None, inputs.row_R)[0].tolist() == [54, 4]  # type: ignore[arg-type]
        assert graphs.num_replays == replays


def run_prompts(graphs: StepGraphs, step: DeviceStep, lengths: list[int], num_decodes: int = 0) -> Tensor:
    """Run a step of sequences from position 3 on, with tokens 50, 51, ...; return the last rows' logits."""
    step.fill([Span(3, length, [0, 1]) for length in lengths], num_decodes)
    ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
    inputs = step.inputs(range(50, 50 + ends[-1]), [end - 1 for end in ends])
    return graphs(inputs.token_T, None, inputs.row_R)[: len(lengths)]  # type: ignore[arg-type]


def test_steps_with_prompts_replay_the_smallest_size_that_they_fit(step: DeviceStep) -> None:
    model, recorder = FakeModel(step), FakeRecorder()
    told: list[tuple[int, int]] = []
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture([1, 8], recorder, lambda *each: told.append(each), prompt_sizes=(8, 16, 24))
    assert recorder.captured == [8, 8, 8, 8, 1], (
        "prompts first; logits of as many rows as there may be sequences"
    )
    assert (graphs.sizes, graphs.prompt_sizes, graphs.num_graphs) == ((1, 8), (8, 16, 24), 5)
    assert told == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]
    assert graphs.num_bytes == 1000
    seen = set()
    cases = [([5], 0, 8), ([1, 1, 5], 2, 8), ([1, 8], 1, 16), ([7, 4, 6], 0, 24), ([1] * 7 + [10], 7, 24)]
    for replays, (lengths, decodes, rows) in enumerate(cases, start=1):
        found = run_prompts(graphs, step, lengths, decodes)
        assert (step.num_padded, graphs.num_replays) == (rows, replays)
        ends = [sum(lengths[: at + 1]) for at in range(len(lengths))]
        assert found.tolist() == [[49 + end, 2 + n] for end, n in zip(ends, lengths, strict=True)]
        seen.add(found.data_ptr())
    seen.add(run(graphs, step, [4]).data_ptr())
    assert len(seen) == 1, "all graphs write into the same logits"
    run_prompts(graphs, step, [25])
    assert (step.num_padded, graphs.num_replays) == (32, len(cases) + 1), "larger steps run as they are"


def test_a_step_that_wants_more_logits_than_there_are_sequences_runs_as_it_is(step: DeviceStep) -> None:
    model = FakeModel(step)
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture([8], FakeRecorder(), prompt_sizes=(16,))
    step.fill([Span(0, 12, [0])])
    inputs = step.inputs(range(12), range(12))
    found = graphs(inputs.token_T, None, inputs.row_R)  # type: ignore[arg-type]
    assert found.tolist() == [[row, row] for row in range(12)] and graphs.num_replays == 0


@pytest.mark.parametrize(
    "error", [GraphError("reads a tensor"), torch.OutOfMemoryError("reads a tensor\nmore")]
)
def test_prompts_that_cannot_be_captured_run_as_without_graphs(step: DeviceStep, error: RuntimeError) -> None:
    model, recorder = FakeModel(step), FakeRecorder()
    capture = recorder.capture

    def refuse_the_second(run: Run) -> Run:
        if len(recorder.captured) == 1:
            recorder.captured.append(0)
            raise error
        return capture(run)

    recorder.capture = refuse_the_second  # type: ignore[method-assign]
    graphs = StepGraphs(model.forward, step, None)  # type: ignore[arg-type]
    graphs.capture([1, 8], recorder, prompt_sizes=(8, 16))
    assert graphs.why_no_prompts == "reads a tensor"
    assert (graphs.sizes, graphs.prompt_sizes) == ((1, 8), ())
    assert run_prompts(graphs, step, [1, 9], 1).tolist() == [[50, 3], [59, 11]]
    assert (step.num_padded, step.prompt_shape, graphs.num_replays) == (16, None, 0)


class FakeCapture:
    """Replaces `torch.cuda.graph`. Like there, the exit also raises if the body did."""

    def __init__(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "other threads may use CUDA during the capture"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    """Return a recorder with a fake CUDA."""
    for name in ("graph_pool_handle", "Stream", "current_stream", "CUDAGraph", "empty_cache", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "memory_reserved", mock.MagicMock(side_effect=[3000, 4500]))
    monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", FakeCapture)
    return CudaRecorder()


def test_a_capture_comes_after_warm_ups_and_nothing_is_collected_amid_it(recorder: CudaRecorder) -> None:
    collects: list[bool] = []

    def run() -> Tensor:
        collects.append(gc.isenabled())
        return torch.ones(1)

    replay = recorder.capture(run)
    assert collects == [*[True] * WARM_UPS, False] and gc.isenabled()
    assert replay() is replay(), "the result must be in the graph's memory"


def test_all_captures_share_one_stream_whose_free_memory_is_given_back(recorder: CudaRecorder) -> None:
    for _ in range(3):
        recorder.capture(lambda: torch.ones(1))
    assert torch.cuda.Stream.call_count == 1  # type: ignore[attr-defined]
    assert recorder.finish() == 1500
    assert torch.cuda.empty_cache.call_count == 2  # type: ignore[attr-defined]


def test_a_step_that_cannot_be_captured_says_why_and_what_to_do(recorder: CudaRecorder) -> None:
    calls: list[int] = []

    def run() -> Tensor:
        calls.append(1)
        if len(calls) > WARM_UPS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore words")
        return torch.ones(1)

    with pytest.raises(
        GraphError, match=r"\(CUDA error: operation not permitted .* capturing\); .*--enforce-eager"
    ):
        recorder.capture(run)
    assert gc.isenabled()
    torch.cuda.set_stream.assert_called_once_with(torch.cuda.current_stream())  # type: ignore[attr-defined]
    assert torch.cuda.graph_pool_handle.call_count == 2, "a failed capture keeps its pool"  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_model_whose_prompts_cannot_be_captured_is_named_once(
    step: DeviceStep, is_refused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refusing(FakeRecorder):
        def capture(self, run: Run) -> Run:
            if step.prompt_shape is not None and is_refused:
                raise GraphError("it reads a tensor")
            return super().capture(run)

    monkeypatch.setattr(graphs_module, "CudaRecorder", Refusing)
    model: Any = SimpleNamespace(
        device=torch.device("cuda"),
        step=step,
        forward=FakeModel(step).forward,
        net=SimpleNamespace(config=SimpleNamespace(model_type="some_moe")),
    )
    with caplog.at_level("INFO"):
        graphs = open_forward(model, None, replays=True, report=lambda *_: None)  # type: ignore[arg-type]
    assert isinstance(graphs, StepGraphs) and graphs.sizes == (1, 2, 4, 8)
    assert graphs.prompt_sizes == (() if is_refused else (32,)), "the largest step has 32 rows"
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == is_refused
    if is_refused:
        assert warnings[0].startswith("steps with prompts of some_moe run without CUDA graphs")
        assert warnings[0].endswith(": it reads a tensor")
