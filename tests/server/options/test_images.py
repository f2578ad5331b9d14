"""Options for images: vLLM's forms, and values that are refused."""

import json
import os
from pathlib import Path

import pytest

from server.cli import build_parser
from server.options.flag import OptionsError
from server.options.images import ImageOptions
from server.options.reading import options_from, options_from_keywords


def given(*words: str) -> ImageOptions:
    """Return the options of a command line."""
    return options_from(build_parser().parse_args(["serve", "m", *words])).images


def test_the_defaults() -> None:
    options = given()
    assert (options.most_images, options.allowed_domains, options.local_path) == (16, (), None)


@pytest.mark.parametrize(
    ("limits", "most"),
    [
        ('{"image": 4}', 4),
        ('{"image": 0, "video": 0}', 0),
        ('{"image": {"count": 5, "width": 512, "height": 512}}', 5),
        ('{"video": 0}', 16),
    ],
)
def test_the_number_of_images_has_vllm_s_forms(limits: str, most: int) -> None:
    assert given("--limit-mm-per-prompt", limits).most_images == most


@pytest.mark.crossed("words", every=2)
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--limit-mm-per-prompt", '{"video": 1}'), "video is not supported"),
        (("--limit-mm-per-prompt", '{"pictures": 1}'), "give a number of images"),
        (("--limit-mm-per-prompt", '{"image": -1}'), "give a number of images"),
        (("--limit-mm-per-prompt", "4"), "give a JSON object"),
        (("--limit-mm-per-prompt", "{"), "give a JSON object"),
        (("--allowed-media-domains", "https://images.example"), "give host names"),
        (("--allowed-media-domains", "a..example"), "give host names"),
        (("--allowed-local-media-path", "/no/such/folder"), "is not a folder"),
        (("--image-fetch-timeout", "0"), "above 0"),
        (("--max-image-pixels", "0"), "at least 1"),
        (("--max-image-bytes", "0"), "give a size"),
        (("--image-encoder-device", "gpu"), "must be cpu, cuda or cuda:N"),
        (("--image-encoder-device", "cuda:x"), "must be cpu, cuda or cuda:N"),
        (("--image-encoder-threads", "0"), "1 to 1024"),
        (("--mm-processor-kwargs", "5"), "give a JSON object"),
        (("--mm-processor-kwargs", "{"), "give a JSON object"),
        (("--mm-processor-kwargs", '{"patch_size": 5}'), "patch_size cannot be set: use max_pixels"),
        (("--mm-processor-kwargs", '{"max_pixels": 0}'), "max_pixels must be a whole number above 0"),
        (("--mm-processor-kwargs", '{"max_pixels": true}'), "max_pixels must be a whole number above 0"),
        (("--mm-processor-kwargs", '{"size": 5}'), "size must be an object of whole numbers above 0"),
        (
            ("--mm-processor-kwargs", '{"size": {"height": 1.5}}'),
            "size must be an object of whole numbers above 0",
        ),
    ],
)
def test_other_values_are_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        given(*words)


def test_the_encoder_has_a_device_threads_and_settings_of_the_processor() -> None:
    settings = {"size": {"longest_edge": 5}, "max_pixels": 7}
    words = ("--image-encoder-device", "cuda:1", "--image-encoder-threads", "4")
    options = given(*words, "--mm-processor-kwargs", json.dumps(settings))
    assert (options.encoder_device, options.encoder_threads) == ("cuda:1", 4)
    assert options.processor_settings == settings
    assert given().processor_settings == given("--mm-processor-kwargs", "{}").processor_settings == {}
    assert options_from_keywords("m", {"mm_processor_kwargs": settings}).images.processor_settings == settings


def test_hosts_are_a_list_and_the_folder_is_a_real_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    options = given(
        *("--allowed-media-domains", "Images.example", "*.b\u00fccher.example"),
        *("--allowed-local-media-path", str(tmp_path / "link"), "--language-model-only"),
    )
    assert options.allowed_domains == ("images.example", "*.xn--bcher-kva.example")
    assert options.local_path == os.path.realpath(tmp_path) and options.is_off


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), ""),
        (("--limit-mm-per-prompt", '{"image": 0}'), "--limit-mm-per-prompt and 0 images"),
        (("--language-model-only",), "--language-model-only"),
    ],
)
def test_an_operator_can_refuse_images(words: tuple[str, ...], reason: str) -> None:
    assert given(*words).why_off == (f"the server was started with {reason}" if reason else "")


def test_a_cache_counts_gib_without_a_unit() -> None:
    assert given("--mm-processor-cache-gb", "2").cache_bytes == 2 << 30
    assert given("--image-cache-size", "64M").cache_bytes == 64 << 20
    assert given("--image-cache-size", "0").cache_bytes == 0
