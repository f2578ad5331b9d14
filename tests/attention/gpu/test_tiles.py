"""The table of tiles: the closest device is used, a missing shape falls back, errors are named."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from attention.gpu.tiles import device_names, read_table, tile_of


class Tile(NamedTuple):
    tokens: int = 32
    warps: int = 4


TABLE = {
    "NVIDIA H200": {"paged_decode": {"bfloat16 D128": {"tokens": 64}}},
    "sm_90": {"paged_decode": {"bfloat16 D128": {"warps": 8}, "bfloat16 D64": {"warps": 2}}},
}
H200 = ("NVIDIA H200", "sm_90")


def test_the_closest_device_counts_and_fields_it_lacks_come_from_the_fallback() -> None:
    assert tile_of("paged_decode", "bfloat16 D128", Tile(), H200, TABLE) == Tile(tokens=64)
    assert tile_of("paged_decode", "bfloat16 D128", Tile(), ("NVIDIA H100", "sm_90"), TABLE) == Tile(warps=8)
    assert tile_of("paged_decode", "bfloat16 D64", Tile(), H200, TABLE) == Tile(warps=2)


@pytest.mark.parametrize(
    ("kernel", "shape", "names"),
    [
        ("paged_decode", "bfloat16 D96", H200),
        ("latent_decode", "bfloat16 D128", H200),
        ("paged_decode", "bfloat16 D128", ("NVIDIA B200", "sm_100")),
        ("paged_decode", "bfloat16 D128", ()),
    ],
)
def test_what_the_table_does_not_know_falls_back(kernel: str, shape: str, names: tuple[str, ...]) -> None:
    assert tile_of(kernel, shape, Tile(), names, TABLE) == Tile()


def test_a_star_stands_for_the_shapes_of_a_type_that_a_device_has_no_entry_of() -> None:
    table = {**TABLE, "sm_80": {"paged_decode": {"bfloat16 *": {"warps": 1}, "bfloat16 D64": {"warps": 2}}}}
    a100 = ("NVIDIA A100", "sm_80")
    assert tile_of("paged_decode", "bfloat16 D96", Tile(), a100, table) == Tile(warps=1)
    assert tile_of("paged_decode", "bfloat16 D64", Tile(), a100, table) == Tile(warps=2)
    assert tile_of("paged_decode", "float16 D96", Tile(), a100, table) == Tile()
    assert tile_of("latent_decode", "bfloat16 H128", Tile(), a100, table) == Tile()


def test_a_field_that_the_tile_lacks_is_named() -> None:
    table = {"sm_90": {"paged_decode": {"bfloat16 D128": {"stages": 3}}}}
    with pytest.raises(
        ValueError, match="sm_90 / paged_decode / bfloat16 D128 has stages; its tile has tokens, warps"
    ):
        tile_of("paged_decode", "bfloat16 D128", Tile(), H200, table)


@pytest.mark.parametrize("value", [0, 1.5, True, "4", None])
def test_a_table_of_anything_but_whole_numbers_is_refused(tmp_path: Path, value: object) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"sm_90": {"paged_decode": {"bfloat16 D128": {"warps": value}}}}))
    with pytest.raises(ValueError, match="sm_90 / paged_decode / bfloat16 D128 / warps"):
        read_table(path)


def test_the_cpu_has_no_entries() -> None:
    assert device_names(torch.device("cpu")) == ()
    read_table()
