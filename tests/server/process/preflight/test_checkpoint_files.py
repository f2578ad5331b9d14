"""Files of weights that are missing, cut or something else."""

import json
from pathlib import Path

import pytest

from server.process.preflight.memory import weight_bytes
from server.process.preflight.model import safetensors_files
from tests.support.fake_checkpoint import CONFIG, write_checkpoint
from tests.support.starts import complaint_of


def test_missing_safetensors_say_what_is_there_instead(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    complaint = complaint_of(lambda: safetensors_files(model))
    assert (
        "has no .safetensors weights; it has pytorch_model.bin, a format that WideEP does not read"
        in complaint
    )


def test_files_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    complaint = complaint_of(lambda: safetensors_files(model))
    assert complaint.startswith("1 of the 2 weight files")
    assert "model-2.safetensors" in complaint
    index.write_text("[]")
    assert "is not a safetensors index" in complaint_of(lambda: safetensors_files(model))


def test_a_cut_download_is_named(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4])
    assert f"has {len(content) - 4} bytes, its header says {len(content)}" in complaint_of(
        lambda: weight_bytes(tmp_path, CONFIG, 4)
    )


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"\x02\0\0\0\0\0\0\0{}"]
)
def test_what_is_no_safetensors_file_is_named(tmp_path: Path, content: bytes) -> None:
    (write_checkpoint(tmp_path) / "model.safetensors").write_bytes(content)
    assert "is not a safetensors file" in complaint_of(lambda: weight_bytes(tmp_path, CONFIG, 4))
