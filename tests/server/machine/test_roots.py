"""Which packages are imported if others have the same names, and the error if ours cannot be imported."""

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import wideep
from server import offline
from server.machine.roots import PACKAGES, WIDEEP_COMMAND, RootError, check_roots


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
    """Write the metadata that pip would write."""
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


ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(sys.executable).with_name("wideep")  # installed by pip


def run(*command: str | Path, cwd: Path, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path is not None:
        environment["PYTHONPATH"] = str(python_path)
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=cwd, env=environment)


def write_clash(folder: Path) -> Path:
    """Write packages with all our names that report their import, and their own server/cli.py."""
    for name in PACKAGES:
        write_package(folder, name)
    (folder / "server" / "cli.py").write_text("def main(): return 7")
    return folder


@pytest.mark.skipif(not SCRIPT.exists(), reason=f"needs the installed script {SCRIPT}")
def test_the_installed_command_takes_our_packages_whatever_pythonpath_and_the_folder_hold(
    tmp_path: Path,
) -> None:
    clash = write_clash(tmp_path / "clash")
    answer = run(SCRIPT, "serve", "--enable-lora-bias", cwd=clash, python_path=clash)
    assert answer.returncode == 2
    assert answer.stderr.startswith("wideep serve: --enable-lora-bias: adapters have no weights")


def test_the_service_s_own_processes_take_our_packages_too(tmp_path: Path) -> None:
    clash = write_clash(tmp_path / "clash")
    answer = run(*WIDEEP_COMMAND, "serve", "/no/such/model", cwd=clash, python_path=clash)
    assert answer.stderr == "wideep serve: the model path /no/such/model does not exist\n"


SCRIPT_TEXT = (
    f"import sys; sys.path.append({str(ROOT)!r}); from wideep import LLM, SamplingParams; print(LLM.__name__)"
)


def test_a_script_has_the_public_names_from_one_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_TEXT)
    assert run(sys.executable, script, cwd=tmp_path).stdout == "LLM\n"


def test_a_server_py_beside_a_script_is_named_with_ours_and_the_remedy(tmp_path: Path) -> None:
    script, other = tmp_path / "script.py", tmp_path / "server.py"
    script.write_text(SCRIPT_TEXT)
    other.write_text("")
    answer = run(sys.executable, script, cwd=ROOT)
    assert answer.stderr.splitlines()[-1].endswith(
        f"RootError: Python finds the package 'server' in {other.resolve()}, which hides WideEP's in {ROOT}; rename it, or "
        "move it out of the script's folder, which Python searches first"
    )


def test_a_package_on_pythonpath_is_named_with_the_remedy(tmp_path: Path) -> None:
    clash, script = tmp_path / "clash", tmp_path / "script.py"
    other = write_package(clash, "scheduler")
    script.write_text(SCRIPT_TEXT)
    answer = run(sys.executable, script, cwd=ROOT, python_path=clash)
    assert (
        f"'scheduler' in {other}, which hides WideEP's in {ROOT}; remove {clash} from PYTHONPATH"
        in answer.stderr
    )


def test_a_distribution_that_wrote_over_our_files_is_named(tmp_path: Path) -> None:
    site = tmp_path / "site"
    write_clash(site)
    shutil.copy(ROOT / "wideep.py", site)
    (site / "server" / "machine").mkdir()
    shutil.copy(ROOT / "server" / "machine" / "roots.py", site / "server" / "machine")
    (site / "server" / "__init__.py").write_text("")
    metadata = site / "quick_server-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: quick-server\nVersion: 1.2\n")
    (metadata / "RECORD").write_text("server/cli.py,,\n")
    answer = run(sys.executable, "-P", site / "wideep.py", "serve", cwd=tmp_path, python_path=site)
    assert answer.returncode == 2
    assert answer.stderr == (
        f"wideep: the distribution quick-server 1.2 wrote server/cli.py into WideEP's folder {site}; uninstall it "
        "and reinstall WideEP, or use a separate virtual environment for WideEP\n"
    )


def test_public_names_are_those_of_the_offline_module() -> None:
    assert sorted(wideep.__all__) == sorted(name for name in vars(offline) if not name.startswith("_"))
    assert wideep.LLM is offline.LLM
    with pytest.raises(AttributeError, match="module 'wideep' has no attribute 'Llm'; it has LLM, "):
        wideep.Llm  # noqa: B018
