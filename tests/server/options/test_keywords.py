"""Options as keywords: the command line's names, values and refusals."""

from typing import Any

import pytest

from server.cli import build_parser
from server.options.checks import OptionsError
from server.options.command_line import Options, options_from
from server.options.keywords import options_from_keywords


def from_words(*words: str) -> Options:
    """What `wideep serve` makes of these words."""
    return options_from(build_parser().parse_args(["serve", *words]))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({}, ()),
        ({"data_parallel_size": 2, "max_model_len": 64}, ("--data-parallel-size=2", "--max-model-len=64")),
        ({"dtype": "bfloat16", "kv_cache_memory": "16M"}, ("--dtype=bfloat16", "--kv-cache-memory=16M")),
        ({"enable_eplb": True}, ("--enable-eplb",)),
        ({"enable_eplb": False, "enable_prefix_caching": True}, ()),
        ({"enable_prefix_caching": False}, ("--no-enable-prefix-caching",)),
        ({"eplb_config": {"num_redundant_experts": 2}}, ('--eplb-config={"num_redundant_experts": 2}',)),
        ({"served_model_name": ["a", "b"], "api_key": ["k"]}, ("--served-model-name=a", "--served-model-name=b", "--api-key=k")),
        ({"max_model_len": None, "request_timeout": 1.5}, ("--request-timeout=1.5",)),
        ({"port": 1234}, ("--port=1234",)),
        ({"allowed_origins": ["http://a", "http://b"]}, ('--allowed-origins=["http://a", "http://b"]',)),
    ],
)  # fmt: skip
def test_keywords_mean_what_the_flags_mean(keywords: dict[str, Any], words: tuple[str, ...]) -> None:
    assert options_from_keywords("m", keywords) == from_words("m", "--port=0", "--disable-access-log", *words)


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        (
            {"tensor_parallel_size": 2},
            "'tensor_parallel_size' is no option; the options are access_log, ",
        ),
        ({"model_len": 2}, "'model_len' is no option"),
        ({"dtype": "int3"}, "invalid choice: 'int3'"),
        ({"max_num_seqs": "many"}, "invalid int value: 'many'"),
        ({"max_num_seqs": 0}, "--max-num-seqs is 0; it must be at least 1"),
        ({"enable_eplb": "yes"}, "enable_eplb is 'yes'; it must be True or False"),
        ({"max_num_seqs": True}, "max_num_seqs is True; it takes a value and is no switch"),
    ],
)
def test_a_wrong_keyword_is_a_sentence_and_not_the_end_of_the_script(
    keywords: dict[str, Any], says: str
) -> None:
    with pytest.raises(OptionsError) as caught:
        options_from_keywords("m", keywords)
    assert says in str(caught.value)
