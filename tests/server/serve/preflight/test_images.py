"""Checks of the options for images: the processor's settings, the encoder's device, and its memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from moe.vision.tower import Tower
from server.front.images.seeing import IMAGE_TYPES
from server.serve.preflight.checks import check_room, check_start
from server.serve.preflight.device import NO_FACTS, Gpu, GpuFacts
from server.serve.preflight.images import check_images, encoder_memory, tower_bytes
from server.serve.preflight.memory import PROCESS_BYTES, weight_bytes
from tests.support.models.fake_checkpoint import CONFIG, write_checkpoint, write_safetensors
from tests.support.models.seeing import write_seeing_checkpoint
from tests.support.service.starts import complaint_of, options_for

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")
GPU = Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=2000, total_bytes=141 << 30)
TWO = GpuFacts(devices=(GPU, GPU))
TOWER_BYTES = 4 * 16 * 8


def seeing(directory: Path, model_type: str = "qwen3_vl_moe", **config: Any) -> Path:
    """Write the headers of a model with a tower of 128 values."""
    write_checkpoint(directory)
    config = {**CONFIG, "model_type": model_type, "vision_config": {}, **config}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text("{}")
    write_safetensors(directory / "tower.safetensors", {"model.visual.merger.weight": [16, 8]})
    return directory


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("qwen3_vl_moe", {"max_pixels": 5, "size": {"longest_edge": 5}}, ""),
        ("llama4", {"max_patches": 5}, ""),
        ("gemma4", {"max_pixels": 5}, "has max_pixels, but the image processor of gemma4 has only max_soft_tokens"),
        ("llama4", {"size": {"height": 5}}, "has size.height, but the image processor of llama4 has only max_patches"),
        ("mistral3", {"size": {"height": 5}}, "has size.height, but the image processor of mistral3 has only size.longest_edge"),
        ("qwen3_moe", {"max_pixels": 5}, "the model takes no images: images for models of type qwen3_moe"),
    ],
)  # fmt: skip
def test_settings_of_another_processor_are_refused_by_name(
    model_type: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = seeing(tmp_path, model_type)
    words = ("--mm-processor-kwargs", json.dumps(settings))
    if not reason:
        check_images(options_for(model, *words))
        return
    assert reason in complaint_of(lambda: check_images(options_for(model, *words)))
    check_images(options_for(model, *words, "--language-model-only"))


@pytest.mark.parametrize(
    ("device", "facts", "reason"),
    [
        ("cuda", TWO, ""),
        ("cuda:1", TWO, ""),
        ("cuda:2", TWO, "is cuda:2, but this machine has 2 GPUs; use cuda:0 to cuda:1, or cpu"),
        ("cuda", NO_FACTS, "is cuda, but it is broken; use cpu"),
    ],
)
def test_a_device_that_does_not_exist_is_refused_at_the_start(
    device: str, facts: GpuFacts, reason: str, tmp_path: Path
) -> None:
    options = options_for(seeing(tmp_path), "--image-encoder-device", device)

    def check() -> None:
        check_images(options, lambda: (facts, "" if facts.devices else "it is broken"))

    assert reason in complaint_of(check) if reason else check() is None  # type: ignore[func-returns-value]


def test_a_tower_must_fit_into_its_gpu(tmp_path: Path) -> None:
    options = options_for(seeing(tmp_path), "--image-encoder-device", "cuda:0")
    small = GpuFacts(devices=(Gpu(name="x", capability=(9, 0), free_bytes=TOWER_BYTES - 1, total_bytes=1),))
    complaint = complaint_of(lambda: check_images(options, lambda: (small, "")))
    assert "has 0.0 GiB free, but the image tower takes up to 0.0 GiB" in complaint


def test_each_front_has_a_tower_in_memory(tmp_path: Path) -> None:
    model = seeing(tmp_path)
    for words, num_bytes in (
        ((), PROCESS_BYTES + TOWER_BYTES),
        (("--api-server-count", "3"), 3 * (PROCESS_BYTES + TOWER_BYTES)),
        (("--image-encoder-device", "cuda"), PROCESS_BYTES),
        (("--language-model-only",), 0),
    ):
        assert encoder_memory(options_for(model, *words)).total_bytes == num_bytes
    assert encoder_memory(options_for(write_checkpoint(tmp_path / "text"))).total_bytes == 0


def test_encoders_that_do_not_fit_are_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(tmp_path)
    options, weights = options_for(model, "--api-server-count", "4"), weight_bytes(model, CONFIG, 4)
    memory = 4 * (PROCESS_BYTES + TOWER_BYTES)
    monkeypatch.setattr("server.serve.preflight.checks.available_bytes", lambda: memory + (1 << 20))

    def check(has_front: bool = True, gpu_bytes: int | None = None) -> None:
        check_room(options, weights, pool_sizes=[1], gpu_bytes=gpu_bytes, has_front=has_front)

    check(has_front=False)
    check(gpu_bytes=1 << 40)
    complaint = complaint_of(check)
    assert "The image encoders of 4 fronts take 1.2 GiB. Use --language-model-only" in complaint
    monkeypatch.setattr("server.serve.preflight.checks.available_bytes", lambda: memory - 1)
    complaint = complaint_of(lambda: check(gpu_bytes=1 << 40))
    assert "image encoders of 4 fronts take 1.2 GiB, but only 1.2 GiB of host memory is free" in complaint


@pytest.mark.usefixtures("much_memory")
def test_a_start_checks_images_on_the_node_with_the_front(tmp_path: Path) -> None:
    model = seeing(tmp_path, "gemma4")
    options = options_for(model, "--mm-processor-kwargs", '{"max_pixels": 5}')
    check_start(options, pool_sizes=[1], has_front=False)
    assert "has only max_soft_tokens" in complaint_of(
        lambda: check_start(options, pool_sizes=[1], has_front=True)
    )


@pytest.mark.parametrize("family", sorted({*IMAGE_TYPES} - {"intern_s2_preview"}))
def test_the_size_of_a_tower_is_known_from_headers(family: str, tmp_path: Path) -> None:
    write_seeing_checkpoint(family, tmp_path)
    tower = Tower(tmp_path)
    loaded = sum(each.numel() for each in tower._joining.parameters())
    assert tower_bytes(tmp_path) == 4 * loaded
