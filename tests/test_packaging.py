import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

ASSETS = ("base/config.json", "base/model.safetensors", "base/tokenizer/chat_template.jinja")


class Build(NamedTuple):
    """A tree, and what was built from it."""

    tree: Path
    wheel: Path
    sdist: Path


def copy_of_working_tree(target: Path) -> None:
    """Copies what git would commit, links as links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        # A file that was deleted is listed until the deletion is committed.
        if source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The sdist of the working tree and the wheel that is made from that sdist."""
    folder = tmp_path_factory.mktemp("build")
    tree, out = folder / "tree", folder / "out"
    copy_of_working_tree(tree)
    for name in ASSETS:
        planted = tree / "src/reframe_vl/mini/assets/planted" / name
        planted.parent.mkdir(parents=True, exist_ok=True)
        planted.write_text("{}")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return Build(tree, wheel, sdist)


def package_files(build: Build) -> set[str]:
    """Files of the library in the tree, those behind the link included, as the wheel names them."""
    package = build.tree / "src" / "reframe_vl"
    files = [*package.rglob("*"), *(package / "callbacks").rglob("*")]
    return {str(f.relative_to(build.tree / "src")) for f in files if f.is_file()}


def test_callbacks_is_a_relative_link_in_the_tree(built: Build) -> None:
    link = built.tree / "src/reframe_vl/callbacks"
    assert link.is_symlink()
    assert link.readlink() == Path("../../callbacks")


def test_wheel_holds_every_file_of_the_library_and_nothing_else(built: Build) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == package_files(built)


def test_wheel_holds_the_callbacks_and_the_assets(built: Build) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    assert "reframe_vl/callbacks/__init__.py" in names
    assert {f"reframe_vl/mini/assets/planted/{name}" for name in ASSETS} <= names


def test_wheel_carries_the_licence(built: Build) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_sdist_holds_the_callbacks_as_files_not_as_a_link(built: Build) -> None:
    with tarfile.open(built.sdist) as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    expected = {f"src/{name}" for name in package_files(built)}
    assert expected <= members.keys()
    assert all(members[name].isfile() for name in expected)


def test_lock_names_exact_public_versions() -> None:
    lines = (ROOT / "requirements.lock.txt").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if not line.startswith("#")]
    assert entries
    for entry in entries:
        name, separator, version = entry.partition("==")
        assert separator and name and version, f"{entry!r} is not of the form name==version."
        assert "+" not in version, f"{entry!r} names a build that is not on every index."
