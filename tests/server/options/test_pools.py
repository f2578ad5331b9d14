"""Pools from their flag: names, ranks, and refusals."""

from pathlib import Path

import pytest

from server.options.flag import OptionsError
from server.options.pools import (
    Pool,
    Role,
    in_words,
    pool_from_text,
    pool_of,
    pool_to_text,
    pools_of,
    rank_pool_sizes,
    read_pools,
)
from server.options.reading import handed_on, options_from_json
from tests.support.service.starts import options_for

MODEL = Path("m")


def test_pools_take_consecutive_ranks_and_are_named_after_their_roles() -> None:
    pools = read_pools("prefill:2, decode:1,decode:3")
    assert pools == (
        Pool("prefill", Role.PREFILL, 0, 2),
        Pool("decode-0", Role.DECODE, 2, 1),
        Pool("decode-1", Role.DECODE, 3, 3),
    )
    assert [pool_of(pools, rank).name for rank in range(6)] == [
        *["prefill"] * 2,
        "decode-0",
        *["decode-1"] * 3,
    ]
    assert rank_pool_sizes(pools, range(1, 5)) == [2, 1, 3, 3]
    assert in_words(pools) == "prefill 2, decode-0 1, decode-1 3"


def test_a_service_without_the_flag_is_one_pool() -> None:
    (pool,) = pools_of(None, 4)
    assert (pool.role, pool.ranks) == (Role.BOTH, range(4))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "invalid --pools entry ''"),
        ("prefill", "write ROLE:RANKS"),
        ("both:0", "invalid --pools entry 'both:0'"),
        ("mixed:1", "with prefill, decode or both"),
        ("both:1,,both:1", "invalid --pools entry ''"),
        ("prefill:1", "no pool has the role decode or both"),
        ("decode:1,decode:2", "no pool has the role prefill or both"),
    ],
)
def test_other_forms_and_roles_without_a_counterpart_are_refused(text: str, says: str) -> None:
    with pytest.raises(OptionsError) as caught:
        read_pools(text)
    assert says in str(caught.value)


def test_pools_of_another_number_of_ranks_are_refused() -> None:
    assert len(pools_of("both:1,both:2", 3)) == 2
    with pytest.raises(OptionsError, match=r"--pools both:1,both:2 has 3 ranks, but the service has 4"):
        pools_of("both:1,both:2", 4)


def test_every_process_of_a_service_gets_the_same_pools() -> None:
    options = options_for(MODEL, "--pools=prefill:1,decode:1")
    assert options_from_json(handed_on(options)[1], {}) == options
    assert [pool.name for pool in options.pools_among(2)] == ["prefill", "decode"]


def test_pools_that_hand_requests_over_need_the_prefix_cache() -> None:
    with pytest.raises(OptionsError, match=r"--no-enable-prefix-caching disables the prefix cache"):
        options_for(MODEL, "--pools=prefill:1,decode:1", "--no-enable-prefix-caching")
    options_for(MODEL, "--pools=both:1,both:1", "--no-enable-prefix-caching")


def test_a_torchrun_may_be_one_pool_that_is_named_after_its_role_by_default() -> None:
    options = options_for(MODEL, "--pool=long", "--role=prefill")
    assert options.pools_among(3) == (Pool("long", Role.PREFILL, 0, 3),)
    assert options_from_json(handed_on(options)[1], {}) == options
    assert options_for(MODEL, "--role=decode").pools_among(1)[0].name == "decode"
    assert options_for(MODEL, "--pool=a").pools_among(1)[0].role is Role.BOTH
    assert not options_for(MODEL).has_own_pool
    assert options_for(MODEL, "--pool=a", "--pool-roles=auto").pool_roles == "auto"
    pool = Pool("long", Role.PREFILL, 2, 3)
    assert pool_from_text(pool_to_text(pool)) == pool
    assert pool.in_words == "pool long (prefill, ranks 2 to 4)"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--pool=a", "--pools=both:1,both:1"), "--pool makes this torchrun one pool; give one of them"),
        (("--role=both", "--pools=both:1"), "--role makes this torchrun one pool; give one of them"),
        (("--pool=a:b",), "--pool is 'a:b'; use 1 to 64 letters"),
        (("--pool=",), "--pool is ''; use 1 to 64 letters"),
        (("--role=writer",), "--role is 'writer'; it must be one of both, prefill, decode"),
        (("--role=decode", "--no-enable-prefix-caching"), "--role decode hands requests over"),
    ],
)
def test_other_names_and_roles_of_an_own_pool_are_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(OptionsError) as caught:
        options_for(MODEL, *flags)
    assert says in str(caught.value)


def test_roles_follow_the_load_of_several_pools_only() -> None:
    assert options_for(MODEL, "--pools=both:1,both:1", "--pool-roles=auto").pool_roles == "auto"
    for flags in ((), ("--pools=both:2",)):
        with pytest.raises(OptionsError, match=r"--pool-roles auto changes the roles of several pools"):
            options_for(MODEL, "--pool-roles=auto", *flags)
