"""What the peer asks of transformers, whose names change between the versions that we run with."""

from dataclasses import dataclass

from transformers.generation import ContinuousBatchingConfig

from benchmarks.transformers_worker import PAGE_TOKENS, page_option


@dataclass
class OfOlderVersions:
    block_size: int = 256


@dataclass
class OfNewerVersions:
    page_size: int = 256
    block_size: int | None = None


def test_pages_are_named_as_the_version_at_hand_names_them() -> None:
    assert page_option(OfOlderVersions) == {"block_size": PAGE_TOKENS}
    assert page_option(OfNewerVersions) == {"page_size": PAGE_TOKENS}
    ContinuousBatchingConfig(**page_option(ContinuousBatchingConfig))
