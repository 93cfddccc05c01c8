import sys
from pathlib import Path

# The tests' own folder of that name, before benchmarks/data.py can be taken for it.
import data  # noqa: F401

# Benchmarks are scripts: they import one another from their own folder.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
