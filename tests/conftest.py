import os

# For child processes and for every library that is not loaded yet: the tests share few cores, and
# sums must not depend on how many there are. NumPy is loaded by then: `make test` sets the same.
os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
)

from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parents[1]

settings.register_profile("reframe", derandomize=True, deadline=None)
settings.load_profile("reframe")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> Path:
    """The folder of the mini model with random weights."""
    from reframe_vl.mini.model import build_model, save_checkpoint
    from reframe_vl.mini.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("model") / "random"
    tokenizer = build_tokenizer()
    save_checkpoint(build_model(tokenizer, 0), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the optional real media; a test that asks for it is skipped without."""
    named = os.environ.get("REFRAME_TEST_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if folder.is_dir():
        return folder
    if named:
        pytest.fail(f"REFRAME_TEST_DATA names {named}, which is not a folder.")
    pytest.skip("No optional real media: set REFRAME_TEST_DATA to their folder.")
