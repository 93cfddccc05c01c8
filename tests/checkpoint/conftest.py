import pytest

from checkpoint_folders import base_folder, specialist


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A base and two specialists, in several shards each."""
    root = tmp_path_factory.mktemp("made")
    base = base_folder(root / "base", shards=2)
    assert len(list(base.glob("*.safetensors"))) > 1
    return base, specialist(base, root / "one", 1), specialist(base, root / "two", 2)
