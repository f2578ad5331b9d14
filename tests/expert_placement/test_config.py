"""--eplb-config accepts vLLM's keys and names unknown ones."""

import pytest

from expert_placement.config import EplbConfig, EplbConfigError, parse_eplb_config


def test_vllms_keys_and_defaults_are_taken() -> None:
    config = parse_eplb_config(
        '{"window_size": 10, "step_interval": 20, "num_redundant_experts": 4, "log_balancedness": true, '
        '"use_async": true, "policy": "default"}'
    )
    assert (config.window_size, config.step_interval, config.num_redundant_experts) == (10, 20, 4)
    assert parse_eplb_config("{}") == EplbConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"windowsize": 1}', "windowsize is not known; the keys are window_size"),
        ('{"window_size": 0}', "window_size is 0; it must be at least 1"),
        ('{"window_size": 1.5}', "window_size is 1.5; it must be a whole number"),
        ('{"window_size": true}', "window_size is True; it must be a whole number"),
        ('{"log_balancedness": 1}', "it must be true or false"),
        ('{"max_moved": 1.5}', "max_moved is 1.5; it must be 0 or more, at most 1"),
        ('{"horizon_s": -1}', "horizon_s is -1"),
        ('{"policy": "magic"}', "it must be one of default, repair, shares"),
        ('{"use_async": false}', "remove it"),
    ],
)
def test_a_wrong_value_is_named(text: str, said: str) -> None:
    with pytest.raises(EplbConfigError, match=said.replace("[", r"\[")):
        parse_eplb_config(text)
