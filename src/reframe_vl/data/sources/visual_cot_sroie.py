"""Visual-CoT's questions about the receipts of ICDAR 2019 SROIE."""

from __future__ import annotations

from reframe_vl.data.sources.visual_cot import VisualCot


class VisualCotSroie(VisualCot):
    """The subset of receipts, under its own name and licence."""

    licence = "Images: ICDAR 2019 SROIE challenge data, for research; annotations: Visual-CoT."

    def is_of_text(self, dataset: str) -> bool:
        """All of them are."""
        return True
