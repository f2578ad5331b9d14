"""The recorder: recorded against reported counts, both file formats, and bounded memory."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from expert_placement.files import read_loads
from server.experts.recorder import LoadRecorder
from tests.support.placement.load_reports import EXPERTS, counts, expert_map

WRITER = Path(__file__).resolve().parents[3] / "server" / "experts" / "record_to_pt.py"


def recorder_of(times: list[float]) -> tuple[LoadRecorder, list[np.ndarray]]:
    recorder, given = LoadRecorder(), [counts(index) for index in range(len(times))]
    recorder.start()
    for index, time_s in enumerate(times):
        recorder.add(time_s, 10 * index, index, given[index])
    return recorder, given


def test_a_row_is_a_second_and_adds_up_the_ranks() -> None:
    recorder, given = recorder_of([100.1, 100.9, 101.2, 107.0])
    record = recorder.take("m", expert_map())
    assert [(row.time_s, row.step, row.version) for row in record.rows] == [
        (100.9, 10, 1),
        (101.2, 20, 2),
        (107.0, 30, 3),
    ]
    np.testing.assert_array_equal(
        [row.counts for row in record.rows], [given[0] + given[1], given[2], given[3]]
    )


def test_nothing_is_kept_while_off_and_a_start_forgets() -> None:
    recorder, _ = recorder_of([1.0])
    recorder.stop()
    recorder.add(2.0, 1, 0, counts(9))
    assert recorder.num_rows == 1
    recorder.start()
    assert recorder.num_rows == 0


def test_full_memory_makes_rows_longer_and_loses_nothing() -> None:
    recorder = LoadRecorder(max_bytes=10 * counts(0).nbytes)
    recorder.start()
    given = [counts(index) for index in range(100)]
    for index, each in enumerate(given):
        recorder.add(1000.5 + index, index, 0, each)
        assert recorder.num_rows <= 11
    record = recorder.take("m", expert_map())
    np.testing.assert_array_equal(sum(row.counts for row in record.rows), np.sum(given, axis=0))
    assert np.all(np.diff([row.time_s for row in record.rows]) > 0)
    assert (record.rows[-1].time_s, record.rows[-1].step) == (1099.5, 99)


def test_later_reports_and_merges_change_nothing_of_a_record_that_was_taken() -> None:
    recorder = LoadRecorder(max_bytes=4 * counts(0).nbytes)
    recorder.start()
    for index in range(4):
        recorder.add(1000.5 + index, index, 0, counts(index))
    record = recorder.take("m", expert_map())
    before = [row.counts.copy() for row in record.rows]
    for index in range(3, 40):
        recorder.add(1000.5 + index, index, 0, counts(index))
    assert recorder.num_rows <= 5
    np.testing.assert_array_equal([row.counts for row in record.rows], before)


@pytest.mark.parametrize("num_later", [0, 1, 3, 37])
def test_what_is_recorded_while_a_record_is_written_is_not_forgotten_with_it(num_later: int) -> None:
    recorder = LoadRecorder(max_bytes=4 * counts(0).nbytes)
    recorder.start()
    for index in range(4):
        recorder.add(1000.1 + index, index, 0, counts(index))
    record = recorder.take("m", expert_map())
    later = [counts(index) for index in range(50, 50 + num_later)]
    for index, each in enumerate(later):
        recorder.add(1003.2 + index, index, 0, each)  # the first within the last second
    recorder.forget(record)
    assert bool(recorder.num_rows) is bool(num_later)
    if num_later:
        rows = recorder.take("m", expert_map()).rows
        np.testing.assert_array_equal(sum(row.counts for row in rows), np.sum(later, axis=0))


def npz(recorder: LoadRecorder) -> bytes:
    """Return a record in our file format."""
    file = io.BytesIO()
    recorder.take("m", expert_map()).write_npz(file)
    return file.getvalue()


def test_our_file_has_a_time_axis_and_is_read_by_simulate(tmp_path: Path) -> None:
    recorder, given = recorder_of([5.0, 6.0])
    content = npz(recorder)
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        assert arrays["time_s"].tolist() == [5.0, 6.0]
        assert arrays["layers"].tolist() == [2, 3, 5]
        np.testing.assert_array_equal(arrays["prefill"], np.array(given)[:, :, 0, :EXPERTS])
        np.testing.assert_array_equal(arrays["decode"], np.array(given)[:, :, 1, :EXPERTS])
        np.testing.assert_array_equal(arrays["rank_tokens"], np.array(given)[:, :, :, EXPERTS:])
    path = tmp_path / "load.npz"
    path.write_bytes(content)
    trace = read_loads([path])
    np.testing.assert_array_equal(trace.load, np.array(given)[..., :EXPERTS].sum(axis=2))


def test_sglangs_record_has_the_models_layers_with_dense_ones_zero() -> None:
    recorder, given = recorder_of([5.0, 6.0])
    record = json.loads("".join(recorder.take("m", expert_map()).sglang_json()))
    logical = np.array(record["logical_count"])
    assert logical.shape == (2, 7, EXPERTS)
    np.testing.assert_array_equal(logical[:, [2, 3, 5]], np.array(given)[..., :EXPERTS].sum(axis=2))
    assert not logical[:, [0, 1, 4, 6]].any()
    even = np.array(given).sum(axis=(0, 2))[:, EXPERTS:]
    assert record["average_utilization_rate_over_window"] == pytest.approx(
        (even.mean(1) / even.max(1)).mean()
    )


@pytest.mark.slow
def test_the_pt_file_is_what_sglangs_recorder_saves(tmp_path: Path) -> None:
    recorder, given = recorder_of([5.0])
    source, target = tmp_path / "r.json", tmp_path / "r.pt"
    source.write_text("".join(recorder.take("m", expert_map()).sglang_json()))
    subprocess.run([sys.executable, "-P", WRITER, source, target], check=True, timeout=60)
    loaded = torch.load(target, weights_only=True)
    assert set(loaded) == {"rank", "logical_count", "average_utilization_rate_over_window"}
    assert loaded["logical_count"].dtype == torch.int32
    assert loaded["logical_count"].shape == (1, 7, EXPERTS)
    assert loaded["logical_count"].sum() == given[0][..., :EXPERTS].sum()
