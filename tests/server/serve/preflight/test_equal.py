"""Facts that must be equal on all nodes: differing nodes and values are named, and equality is one line."""

from pathlib import Path
from typing import Any

import pytest

from server.machine.report import Check, CheckStatus
from server.serve.preflight import equal
from server.serve.preflight.device import Gpu, GpuFacts
from server.serve.preflight.equal import (
    compare,
    computing_facts,
    driver_version,
    facts_to_compare,
    file_digests,
    source_digest,
)
from server.serve.preflight.model import PreflightError, read_header
from tests.support.models.fake_checkpoint import write_checkpoint, write_safetensors

NODES = ["a", "b", "c"]
GPUS = {
    "set of GPUs": "8 x NVIDIA H200",
    "NCCL": "2.28.9",
    "torch's CUDA": "13.0",
    "NVIDIA driver": "580.95.05",
}


def facts(**changes: Any) -> dict[str, Any]:
    versions = {
        "wideep": "0.1.0 (source 1234)",
        "wideep's link digest": "11aa",
        "wideep's dispatch digest": "22bb",
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "numpy": "2.3.0",
    }
    versions |= changes.pop("versions", {})
    return {
        "versions": versions,
        "processor": "EPYC",
        "gpus": GPUS,
        "files": {"config.json": "aa", "model.safetensors": "bb"},
        "key": None,
        **changes,
    }


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def test_equal_nodes_are_green() -> None:
    found = by_name(compare(NODES, [facts(), facts(), facts()]))
    assert {check.status for check in found.values()} == {CheckStatus.OK}
    assert found["equal GPUs"].text == (
        "on all 3 nodes: set of GPUs 8 x NVIDIA H200, NCCL 2.28.9, torch's CUDA 13.0, NVIDIA driver 580.95.05"
    )
    assert found["checkpoints"].text == "equal on all 3 nodes: 2 files, by size, header and samples"


def test_nodes_without_gpus_say_nothing_of_them() -> None:
    none = facts(gpus=dict.fromkeys(GPUS, ""))
    assert "equal GPUs" not in by_name(compare(NODES, [none] * 3))


@pytest.mark.parametrize(
    ("other", "name", "status", "says"),
    [
        (
            facts(versions={"torch": "2.11.0"}),
            "versions",
            CheckStatus.FAILURE,
            "the nodes differ: torch is 2.13.0 on a and 1 more, 2.11.0 on c: install the same versions",
        ),
        (
            facts(versions={"wideep": "0.1.0 (source 77)"}),
            "versions",
            CheckStatus.WARNING,
            "0.1.0 (source 77) on c: they serve together, but upgrade the others too",
        ),
        (
            facts(versions={"wideep": "0.2.0 (source 77)", "wideep's link digest": "33cc"}),
            "versions",
            CheckStatus.FAILURE,
            "wideep's link digest is 11aa on a and 1 more, 33cc on c: install the same versions",
        ),
        (
            facts(versions={"wideep": "0.2.0 (source 77)", "wideep's dispatch digest": "33cc"}),
            "versions",
            CheckStatus.FAILURE,
            "wideep's dispatch digest is 22bb on a and 1 more, 33cc on c: install the same versions",
        ),
        (
            facts(versions={"wideep": "0.2.0 (source 77)", "numpy": "2.2.0"}),
            "versions",
            CheckStatus.WARNING,
            "numpy is 2.3.0 on a and 1 more, 2.2.0 on c: install the same versions",
        ),
        (
            facts(versions={"numpy": "2.2.0"}),
            "versions",
            CheckStatus.WARNING,
            "numpy is 2.3.0 on a and 1 more, 2.2",
        ),
        (facts(versions={"numpy": ""}), "versions", CheckStatus.WARNING, "not installed on c"),
        (
            facts(files={"config.json": "aa", "model.safetensors": "cc"}),
            "checkpoints",
            CheckStatus.FAILURE,
            "model.safetensors differ; model.safetensors is bb on a and 1 more, cc on c: copy the model",
        ),
        (facts(files={"config.json": "aa"}), "checkpoints", CheckStatus.FAILURE, "missing on c"),
        (facts(files=None), "checkpoints", CheckStatus.FAILURE, "config.json and 1 more differ"),
        (
            facts(key="0123456789ab"),
            "cluster key",
            CheckStatus.FAILURE,
            "none on a and 1 more, key 0123... on c",
        ),
        (
            facts(gpus={**GPUS, "NCCL": "2.27.5"}),
            "equal GPUs",
            CheckStatus.FAILURE,
            "NCCL is 2.28.9 on a and 1 more, 2.27.5 on c: install the same torch",
        ),
        (
            facts(gpus={**GPUS, "set of GPUs": "8 x NVIDIA H100"}),
            "equal GPUs",
            CheckStatus.WARNING,
            "set of GPUs is 8 x NVIDIA H200 on a and 1 more, 8 x NVIDIA H100 on c",
        ),
        (
            facts(gpus={**GPUS, "NVIDIA driver": "570.1"}),
            "equal GPUs",
            CheckStatus.WARNING,
            "NVIDIA driver is 580.95.05 on a and 1 more, 570.1 on c",
        ),
        (facts(gpus=dict.fromkeys(GPUS, "")), "equal GPUs", CheckStatus.FAILURE, "none on c"),
        (facts(processor="Xeon"), "processors", CheckStatus.WARNING, "EPYC on a and 1 more, Xeon on c"),
    ],
)
def test_what_differs_is_named_with_its_node(
    other: dict[str, Any], name: str, status: CheckStatus, says: str
) -> None:
    check = by_name(compare(NODES, [facts(), facts(), other]))[name]
    assert check.status is status and says in check.sentence, check.sentence


def test_a_checkpoint_with_other_numbers_has_another_digest(tmp_path: Path) -> None:
    for name in ("one", "same", "trained", "edited"):
        write_checkpoint(tmp_path / name)
        write_safetensors(tmp_path / name / "model.safetensors", {"w": [64, 1024]})
    trained = tmp_path / "trained" / "model.safetensors"
    content = bytearray(trained.read_bytes())
    content[-200_000:] = bytes([7]) * 200_000  # training changes every number; changing most of them suffices
    trained.write_bytes(content)
    (tmp_path / "edited" / "config.json").write_text("{}")
    one = file_digests(tmp_path / "one")
    assert set(one) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert file_digests(tmp_path / "same") == one
    assert file_digests(tmp_path / "trained")["model.safetensors"] != one["model.safetensors"]
    assert file_digests(tmp_path / "edited")["config.json"] != one["config.json"]


TENSORS = {"experts": [16, 256, 1024], "router": [8, 64], "qkv": [3 * 512, 512], "other": [512, 1024]}


def change(path: Path, tensor: str, first: float, last: float) -> None:
    """Change all bytes between two fractions of a tensor."""
    begin, end = read_header(path)[tensor]["data_offsets"]
    content = bytearray(path.read_bytes())
    start = len(content) - max(each["data_offsets"][1] for each in read_header(path).values()) + begin
    at, behind = (start + int(fraction * (end - begin)) for fraction in (first, last))
    content[at:behind] = bytes([7]) * (behind - at)
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("tensor", "first", "last"),
    [
        pytest.param("router", 0, 1, id="a small tensor"),
        pytest.param("experts", 10 / 16, 11 / 16, id="one expert of a tensor of all"),
        pytest.param("qkv", 0, 1 / 3, id="q of joined q, k and v"),
        pytest.param("qkv", 2 / 3, 1, id="v of joined q, k and v"),
    ],
)
def test_a_checkpoint_in_which_one_tensor_was_trained_has_another_digest(
    tmp_path: Path, tensor: str, first: float, last: float
) -> None:
    """As a merged adapter does, which often leaves all experts as they were."""
    write_checkpoint(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    before = file_digests(tmp_path)
    change(tmp_path / "model.safetensors", tensor, first, last)
    after = file_digests(tmp_path)
    assert {name for name in after if after[name] != before[name]} == {"model.safetensors"}


def test_a_weight_file_without_a_header_is_sampled_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"GGUF" + bytes(8 << 20))
    before = file_digests(tmp_path)
    assert file_digests(tmp_path) == before
    path.write_bytes(b"GGUF" + bytes(3 << 20) + bytes([7]) * (2 << 20) + bytes(3 << 20))
    assert file_digests(tmp_path) != before


def test_a_checkpoint_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=r"has no \.safetensors weights"):
        facts_to_compare(tmp_path, None)


def test_what_was_found_of_gpus_is_told() -> None:
    gpu = Gpu(name="NVIDIA H200", capability=(9, 0), free_bytes=1, total_bytes=2)
    found = GpuFacts(devices=(gpu, gpu), built_for="13.0", nccl="2.28.9")
    told = facts_to_compare(None, None, found)["gpus"]
    assert told == {
        "set of GPUs": "2 x NVIDIA H200",
        "NCCL": "2.28.9",
        "torch's CUDA": "13.0",
        "NVIDIA driver": driver_version(),
    }


def test_another_source_is_another_version(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "a.py").write_text("one")
    before = source_digest(tmp_path)
    (tmp_path / "server" / "a.py").write_text("two")
    assert source_digest(tmp_path) != before
    told = facts_to_compare(None, b"k" * 32)
    assert told["versions"]["wideep"].endswith(f"(source {source_digest(equal._ROOT)})")
    assert told["key"] and b"k" * 32 not in str(told).encode()


@pytest.mark.parametrize(
    ("file", "digests", "computes_the_same"),
    [
        ("server/http/app.py", {"wideep"}, True),
        ("server/link/messages.py", {"wideep", "wideep's link digest"}, True),
        ("server/serve/store/claim.py", {"wideep", "wideep's link digest"}, True),
        ("dispatch/rows.py", {"wideep", "wideep's dispatch digest"}, False),
        ("scheduler/policy/scheduler.py", {"wideep", "wideep's dispatch digest"}, False),
    ],
)
def test_a_change_of_a_file_changes_the_digests_that_cover_it(
    tmp_path: Path, file: str, digests: set[str], computes_the_same: bool
) -> None:
    changed = tmp_path / file
    changed.parent.mkdir(parents=True)
    changed.write_text("one")
    before, computing = facts_to_compare(None, None, root=tmp_path)["versions"], computing_facts(tmp_path)
    changed.write_text("two")
    after = facts_to_compare(None, None, root=tmp_path)["versions"]
    assert {name for name in after if after[name] != before[name]} == digests
    assert (computing_facts(tmp_path) == computing) is computes_the_same


def test_the_digests_cover_files_that_exist() -> None:
    for folders in (equal._LINK_FOLDERS, equal._DISPATCH_FOLDERS):
        assert all(any((equal._ROOT / folder).rglob("*.py")) for folder in folders)
