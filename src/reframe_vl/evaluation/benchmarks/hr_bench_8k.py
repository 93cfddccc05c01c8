"""HR-Bench 8K: as HR-Bench 4K, on the uncropped images of 8K. Rule and sources: see there."""

from __future__ import annotations

from reframe_vl.evaluation.benchmarks.hr_bench_4k import HRBench4K
from reframe_vl.evaluation.releases.files import Hub


class HRBench8K(HRBench4K):
    """``hr_bench_8k.tsv``, or Parquet, with images in base64."""

    hub = Hub("DreamMr/HR-Bench", "hrbench_8k", ("hrbench_version_split",))
    files = ("hr_bench_8k*.tsv", "hr_bench_8k*.parquet")
