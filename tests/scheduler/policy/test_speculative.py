"""Values that --speculative-config accepts, and its messages for all others."""

import pytest

from scheduler.policy.speculative import Method, SpeculativeConfigError, parse_speculative_config


@pytest.mark.parametrize(
    ("given", "method", "num_drafts"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 4}', Method.NGRAM, 4),
        ('{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}', Method.NGRAM, 4),
        ('{"method": "suffix"}', Method.SUFFIX, 24),
        ('{"method": "mtp", "num_speculative_tokens": 3}', Method.MTP, 3),
        ('{"method": "deepseek_mtp"}', Method.MTP, 1),
        (
            '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}',
            Method.MTP,
            2,
        ),
    ],
)
def test_vllms_keys_are_read(given: str, method: Method, num_drafts: int) -> None:
    read = parse_speculative_config(given)
    assert (read.method, read.num_drafts) == (method, num_drafts)


def test_one_lookup_length_stands_for_both() -> None:
    read = parse_speculative_config(
        '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3}'
    )
    assert (read.shortest_match, read.longest_match) == (3, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ngram", "not valid JSON"),
        ("[1]", "give a JSON object"),
        ("{}", "no method is given; it must be one of ngram, suffix, mtp"),
        ('{"method": "medusa"}', "the method is 'medusa'; it must be one of ngram, suffix, mtp"),
        ('{"method": "ngram"}', "num_speculative_tokens is missing"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "is 0; it must be a whole number from 1 to 32"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "is True"),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "model": "x"}',
            "model is not a key of method ngram",
        ),
        (
            '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 5, "prompt_lookup_max": 2}',
            "prompt_lookup_min is 5; it must not exceed prompt_lookup_max, which is 2",
        ),
        ('{"method": "suffix", "suffix_decoding_min_token_prob": 2}', "must be a number from 0 to 1"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 1}', "from 2 to 256"),
        ('{"method": "mtp", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size must be 1"),
    ],
)
def test_what_cannot_be_served_is_named(given: str, words: str) -> None:
    with pytest.raises(SpeculativeConfigError) as raised:
        parse_speculative_config(given)
    assert words in str(raised.value)
