import importlib
import sys
from pathlib import Path

import pytest

from server.roots import PACKAGES, RootError, check_roots


def test_our_own_packages_come_from_one_root() -> None:
    check_roots()
    assert len(PACKAGES) == 7


def write_package(root: Path, name: str, *, is_namespace: bool = False) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    if not is_namespace:
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
    return folder.resolve()


def install(root: Path, distribution: str, package: str) -> None:
    """Write the metadata that pip would."""
    metadata = root / f"{distribution}-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
    (metadata / "RECORD").write_text(f"{package}/__init__.py,,\n")


@pytest.fixture
def two_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return (first on the path, ours)."""
    first, ours = tmp_path / "site", tmp_path / "ours"
    for root in (first, ours):
        root.mkdir()
    monkeypatch.setattr(sys, "path", [str(first), str(ours), *sys.path])
    importlib.invalidate_caches()
    return first, ours


def test_a_package_in_the_way_is_named_with_its_distribution(two_roots: tuple[Path, Path]) -> None:
    first, ours = two_roots
    write_package(ours, "qq_moe")
    other = write_package(first, "qq_moe")
    install(first, "qq-mixture", "qq_moe")
    with pytest.raises(RootError) as caught:
        check_roots(ours, ("qq_moe",))
    assert f"'qq_moe' in {other} (distribution qq-mixture 1.2)" in str(caught.value)
    assert "uninstall it" in str(caught.value)


def test_a_folder_that_nobody_installed_is_named_by_its_path(two_roots: tuple[Path, Path]) -> None:
    first, ours = two_roots
    other = write_package(first, "qq_folder", is_namespace=True)
    with pytest.raises(RootError, match=f"in {other}, which hides"):
        check_roots(ours, ("qq_folder",))


def test_a_missing_package_is_named(two_roots: tuple[Path, Path]) -> None:
    with pytest.raises(RootError, match="'qq_absent' is missing"):
        check_roots(two_roots[1], ("qq_absent",))


def test_packages_are_looked_up_without_being_imported(two_roots: tuple[Path, Path]) -> None:
    write_package(two_roots[1], "qq_explosive")
    check_roots(two_roots[1], ("qq_explosive",))
    assert "qq_explosive" not in sys.modules
