"""Which pools run prompts for which."""

import pytest

from server.options.pools import read_pools
from server.tools.size.roles import sides_of


@pytest.mark.parametrize(
    ("text", "sides"),
    [
        ("both:1,both:2", ([], [], ["both-0", "both-1"])),
        ("prefill:1,decode:2", (["prefill"], ["decode"], [])),
        ("prefill:1,decode:1,decode:1", (["prefill"], ["decode-0", "decode-1"], [])),
        ("prefill:1,both:2,decode:1", (["prefill"], ["decode"], ["both"])),
        ("prefill:1,both:2", (["prefill"], ["both"], [])),
        ("both:2,decode:1", (["both"], ["decode"], [])),
    ],
)
def test_pools_of_role_both_take_the_part_that_no_other_pool_has(
    text: str, sides: tuple[list[str], list[str], list[str]]
) -> None:
    assert tuple([pool.name for pool in side] for side in sides_of(read_pools(text))) == sides
