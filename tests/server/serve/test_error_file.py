from pathlib import Path

from server.serve.error_file import FIRST, first_failure, write_failure


def test_a_failure_is_read_back(tmp_path: Path) -> None:
    write_failure(tmp_path / "error.json", "why")
    assert first_failure(tmp_path) == "why"


def test_a_cause_known_to_be_the_first_wins_over_earlier_stamps(tmp_path: Path) -> None:
    for name, time_ns in (("a", None), ("b", FIRST)):
        (tmp_path / name).mkdir()
        write_failure(tmp_path / name / "error.json", name, time_ns=time_ns)
    assert first_failure(tmp_path) == "b"


def test_the_first_of_several_failures_is_the_cause(tmp_path: Path) -> None:
    assert first_failure(tmp_path) is None
    for rank, text in enumerate(
        (
            '{"message": {"message": "later"}, "time_ns": 20}',
            '{"message": {"message": "first"}, "time_ns": 10}',
            '{"message": "of another program"}',
            '{"half',
        )
    ):
        (tmp_path / "attempt_0" / str(rank)).mkdir(parents=True)
        (tmp_path / "attempt_0" / str(rank) / "error.json").write_text(text)
    assert first_failure(tmp_path) == "first"
