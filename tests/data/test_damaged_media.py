"""Files damaged at random; ``benchmarks/damaged_media.py`` tries many more."""

import sys
from pathlib import Path

import pytest

# Benchmarks are scripts: they import one another from their own folder.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from damaged_media import measure


@pytest.mark.filterwarnings("ignore")
def test_e09_e22_a_damaged_file_is_a_picture_or_a_refusal_that_names_it(tmp_path) -> None:
    rows = measure(tmp_path, each=4, seed=1)
    assert len(rows) == 14
    assert all(row["other"] == 0 for row in rows), rows
    assert sum(row["read"] for row in rows) > 5 and sum(row["refused"] for row in rows) > 20
