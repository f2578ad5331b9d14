"""The front accepts images exactly if the ranks of its service take them."""

from pathlib import Path

import pytest

pytest.importorskip("PIL", reason="needs Pillow: pip install 'wideep[images]'")

from moe.model import Skeleton
from scheduler.policy.config import EngineConfig, EngineSettings
from scheduler.step.parts import INTERPRETER, backend_of
from server.options.table import Options
from server.serve.front.served_model import image_support
from tests.support.gpu.interpreted import needs_triton
from tests.support.models.seeing import write_seeing_checkpoint

FAMILIES = ("ernie4_5_vl_moe", "qwen3_vl_moe")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, directory in found.items():
        write_seeing_checkpoint(family, directory)
        (directory / "preprocessor_config.json").write_text("{}")
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("device", "is_compiled"),
    [("cpu", False), pytest.param("cuda", False, marks=needs_triton), pytest.param("cuda", True, marks=needs_triton)],
)  # fmt: skip
def test_the_front_and_a_rank_agree_on_images(
    family: str, device: str, is_compiled: bool, directories: dict[str, Path]
) -> None:
    """The interpreter takes the place of the GPU. Its backend decides by the same settings."""
    directory = directories[family]
    options = Options(
        model=str(directory), device=device, engine=EngineSettings(enable_torch_compile=is_compiled)
    )
    on = "cpu" if device == "cpu" else INTERPRETER
    config = EngineConfig(
        directory=directory, device=on, enable_torch_compile=is_compiled, kv_cache_bytes=1 << 20
    )
    rank_takes_images = Skeleton(directory, backend_of(config)).takes_images
    assert (image_support(options, {}).why_not == "") == rank_takes_images
    assert rank_takes_images == (family != "ernie4_5_vl_moe" or not is_compiled)
