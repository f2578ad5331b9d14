"""The encoder process's settings: device, threads and the image processor's sizes, and what belongs to the meaning of rows."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from kvcache.images import Image, read_rows
from server.front.images.encoder import EncoderSettings
from server.front.images.encoder_process import ImageEncoder, check_device, read_processor
from server.front.images.seeing import IMAGE_TYPES, PROCESSOR_FILES, SIZE_SETTINGS
from server.options.images import PROCESSOR_SETTINGS
from tests.support.models.seeing import write_seeing_model
from tests.support.requests.pictures import png

DIGEST = "ab" * 32
MOST_PIXELS = 1_000_000


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_seeing_model(directory)
    return directory


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of threads, which an encoder sets for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def answer_of(encoder: ImageEncoder, content: bytes, folder: Path) -> dict[str, Any]:
    """Return the answer to an order."""
    (folder / "content").write_bytes(content)
    (folder / "rows").touch()
    return encoder.answer(
        {"number": 3, "content": f"{folder / 'content'}", "digest": DIGEST, "rows": f"{folder / 'rows'}"}
    )


@pytest.mark.parametrize("settings", [{"max_pixels": 28 * 28 * 4}, {"size": {"longest_edge": 28 * 28 * 4}}])
def test_a_larger_picture_becomes_fewer_tokens_if_the_operator_limits_its_pixels(
    settings: dict[str, Any], directory: Path, tmp_path: Path
) -> None:
    plain = ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS))
    limited = ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS, processor=settings))
    wide, small = png(112, 112), png(28, 28)
    assert [answer_of(plain, each, tmp_path)["num_rows"] for each in (wide, small)] == [16, 1]
    assert [answer_of(limited, each, tmp_path)["num_rows"] for each in (wide, small)] == [4, 1]
    [image] = read_rows([Image(DIGEST, 0, 1, path=f"{tmp_path / 'rows'}")], 64)
    assert image.rows is not None and image.rows.shape[1] == 1
    assert plain.meaning != limited.meaning


@pytest.mark.parametrize(
    ("error", "failure", "lacks_memory"),
    [
        (RuntimeError("it is odd\nand more"), "RuntimeError: it is odd", False),
        (IndexError(), "IndexError", False),
        (MemoryError(), "MemoryError", True),
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory", True),
    ],
)
@pytest.mark.parametrize("where", ["_processor", "_tower"])
def test_an_error_is_the_answer_to_one_image_and_the_process_stays(
    error: Exception, failure: str, lacks_memory: bool, where: str, directory: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    encoder = ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS))

    def fail(*_: Any, **__: Any) -> None:
        raise error

    device = torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(
            encoder, where, fail if where == "_processor" else SimpleNamespace(encode=fail, device=device)
        )
        answer = answer_of(encoder, png(28, 28), tmp_path)
    assert answer == {"number": 3, "failure": failure, "lacks_memory": lacks_memory, "is_broken": False}
    assert "Traceback" in capfd.readouterr().err
    assert answer_of(encoder, png(28, 28), tmp_path)["num_rows"] == 1


def test_only_a_gpu_may_be_broken_by_an_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS))
    for error, is_broken in ((RuntimeError(), True), (torch.OutOfMemoryError(), False)):
        tower = Mock(device=torch.device("cuda"))
        tower.encode.side_effect = error
        monkeypatch.setattr(encoder, "_tower", tower)
        assert answer_of(encoder, png(28, 28), tmp_path)["is_broken"] == is_broken


def test_the_number_of_threads_is_set_and_part_of_the_meaning(directory: Path) -> None:
    one = ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS))
    assert torch.get_num_threads() == 1
    two = ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS, threads=2))
    assert torch.get_num_threads() == 2
    again = ImageEncoder(EncoderSettings(str(directory), 5))
    assert one.meaning == again.meaning != two.meaning, "the largest image changes no rows"


def test_the_device_and_the_type_are_part_of_the_meaning(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanings = set()
    for name in ("cpu", "H200", "B200"):
        monkeypatch.setattr("server.front.images.encoder_process.name_of", lambda _device, name=name: name)
        meanings.add(ImageEncoder(EncoderSettings(str(directory), MOST_PIXELS)).meaning)
    assert len(meanings) == 3


@pytest.mark.parametrize(("name", "count", "is_there"), [
    ("cpu", 0, True), ("cuda", 0, False), ("cuda", 1, True), ("cuda:1", 1, False), ("cuda:1", 2, True),
])  # fmt: skip
def test_a_device_that_torch_does_not_find_is_refused(
    name: str, count: int, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if is_there:
        check_device(name)
        return
    with pytest.raises(
        ValueError, match=f"^--image-encoder-device is {name}, but torch finds {count} CUDA devices$"
    ):
        check_device(name)


def test_a_size_that_the_processor_does_not_have_is_refused(directory: Path) -> None:
    with pytest.raises(
        ValueError, match=r"size has heigth, but that of the .* has only longest_edge, shortest_edge"
    ):
        read_processor(directory, {"size": {"heigth": 5}})


# A changed value of each setting, as an operator gives it, and what the processor then has.
_GIVEN: dict[str, Any] = {"min_pixels": 50, "max_pixels": 5000, "max_soft_tokens": 140, "max_patches": 3}


@pytest.mark.parametrize("family", IMAGE_TYPES)
def test_the_size_settings_of_a_type_reach_its_processor(family: str, tmp_path: Path) -> None:
    if family in ("intern_s2_preview", "mistral3", "mistral_large4"):
        kind = "Qwen2VLImageProcessor" if family == "intern_s2_preview" else "PixtralImageProcessor"
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        (tmp_path / PROCESSOR_FILES[0]).write_text(json.dumps({"image_processor_type": kind}))
    else:
        write_seeing_model(tmp_path, family)
    plain = read_processor(tmp_path).to_dict()
    for name, _, key in (each.partition(".") for each in SIZE_SETTINGS[family]):
        value = {key: 1000} if key else _GIVEN[name]
        changed = read_processor(tmp_path, {name: value}).to_dict()
        where = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}.get(name)
        expected = plain[name] | value if key else value
        assert (changed["size"][where] if where else changed[name]) == expected
    assert {each.partition(".")[0] for each in SIZE_SETTINGS[family]} <= set(PROCESSOR_SETTINGS)
    sizes = {each.partition(".")[2] for each in SIZE_SETTINGS[family]} - {""}
    assert not sizes or sizes == plain["size"].keys()
