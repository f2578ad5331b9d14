from benchmarks.live_streams import goes_on_after_s, longest_pause_s

STEADY = [0.0, 0.1, 0.2, 0.3, 0.4]
STOPS = [
    0.0,
    0.1,
    0.2,
    0.21,
    0.9,
    1.0,
    1.1,
    3.0,
]  # killed at 0.2, on its way until 0.21; another pause at 1.1


def test_a_stream_goes_on_after_its_longest_pause_not_with_what_was_on_its_way() -> None:
    assert goes_on_after_s(STOPS, 0.2, 0.5) == 0.9 - 0.2


def test_a_stream_that_nothing_disturbs_goes_on_with_its_next_piece() -> None:
    found = goes_on_after_s(STEADY, 0.25, 0.28)
    assert found is not None
    assert abs(found - 0.05) < 1e-9


def test_a_stream_that_had_ended_does_not_go_on() -> None:
    assert goes_on_after_s(STEADY, 0.5, 1.0) is None
    assert goes_on_after_s([], 0.5, 1.0) is None


def test_the_longest_pause_counts_where_it_overlaps_the_time() -> None:
    assert longest_pause_s(STOPS, 1.5, 2.0) == 3.0 - 1.1
    assert longest_pause_s(STOPS, 0.0, 1.05) == 0.9 - 0.21
    assert longest_pause_s(STOPS, 4.0, 5.0) is None
