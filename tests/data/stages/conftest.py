import sys
from pathlib import Path

# Benchmarks are scripts: they import one another from their own folder.
sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
