from benchmarks.live_answers import longest_pause_s

STOPS = [0.0, 0.1, 0.2, 0.21, 0.9, 1.0, 1.1, 3.0]


def test_the_longest_pause_counts_where_it_overlaps_the_time() -> None:
    assert longest_pause_s(STOPS, 1.5, 2.0) == 3.0 - 1.1
    assert longest_pause_s(STOPS, 0.0, 1.05) == 0.9 - 0.21
    assert longest_pause_s(STOPS, 4.0, 5.0) is None
    assert longest_pause_s([], 0.0, 1.0) is None
