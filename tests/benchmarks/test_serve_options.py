import pytest

from benchmarks.serve_options import OptionsError, ServedLayout, parse_options


def test_defaults_are_the_whole_measurement() -> None:
    options = parse_options([])
    assert options.models == ("demo", "random")
    assert options.levels == ((1, 2), (4, 8), (16, 16), (32, 32))
    assert (options.rounds, options.prompt_tokens, options.output_tokens) == (3, 128, 64)
    assert options.layouts == (ServedLayout(1, 2), ServedLayout(2, 1))
    assert options.max_model_len == 192
    assert options.max_num_seqs == 32
    assert not options.static


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--models", "demo,gpt"], "--models has 'gpt'; give names of demo, random"),
        (["--concurrency", "1,x"], "--concurrency is '1,x'; give whole numbers above 0"),
        (["--concurrency", "0"], "--concurrency is '0'"),
        (["--rounds", "-1"], "--rounds is '-1'"),
        (["--concurrency", "1,4", "--requests-per-level", "8"], "--requests-per-level has 1 numbers"),
        (["--ranks", "2"], "--ranks has '2'; give ranks x threads such as 1x2"),
        (["--peer-experts", "fast"], "--peer-experts has 'fast'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(arguments: list[str], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        parse_options(arguments)
