"""The measures of docs/method.md, 1.6, as terms of single items and as torchmetrics.

Each function gives one term an item, and the measure is the terms' mean: metrics average the
same terms that intervals resample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torchmetrics import Metric


def tool_gain(with_N: Bool[Tensor, "N"], without_N: Bool[Tensor, "N"]) -> Float[Tensor, "N"]:
    """``TG = Acc(tools on) - Acc(tools off)``, paired on the same items.

    Args:
        with_N: Which items are answered right with tools.
        without_N: And which without.
    """
    return with_N.float() - without_N.float()


@dataclass(frozen=True)
class GainHarmTerms:
    """Terms of gain and harm, split by whether a tool was called; the splits add up.

    Attributes:
        gain_called_N: Right with tools and wrong without, a tool was called.
        gain_not_called_N: The same, no tool was called.
        harm_called_N: Wrong with tools and right without, a tool was called.
        harm_not_called_N: The same, no tool was called.
    """

    gain_called_N: Float[Tensor, "N"]
    gain_not_called_N: Float[Tensor, "N"]
    harm_called_N: Float[Tensor, "N"]
    harm_not_called_N: Float[Tensor, "N"]

    def named(self) -> dict[str, Float[Tensor, "N"]]:
        """All six terms by their names in results.json."""
        return {
            "gain": self.gain_called_N + self.gain_not_called_N,
            "harm": self.harm_called_N + self.harm_not_called_N,
            "gain_called": self.gain_called_N,
            "gain_not_called": self.gain_not_called_N,
            "harm_called": self.harm_called_N,
            "harm_not_called": self.harm_not_called_N,
        }


def gain_and_harm(
    with_N: Bool[Tensor, "N"], without_N: Bool[Tensor, "N"], called_N: Bool[Tensor, "N"]
) -> GainHarmTerms:
    """P(right with, wrong without) and P(wrong with, right without); their difference is TG."""
    gain_N, harm_N = with_N & ~without_N, ~with_N & without_N
    return GainHarmTerms(
        gain_called_N=(gain_N & called_N).float(),
        gain_not_called_N=(gain_N & ~called_N).float(),
        harm_called_N=(harm_N & called_N).float(),
        harm_not_called_N=(harm_N & ~called_N).float(),
    )


def observation_dependence(
    true_N: Bool[Tensor, "N"], random_N: Bool[Tensor, "N"], blank_N: Bool[Tensor, "N"] | None
) -> Float[Tensor, "N"]:
    """``OD = Acc(true) - (Acc(random) + Acc(blank)) / 2``.

    Args:
        true_N: Which items are answered right when the forced calls return the evidence.
        random_N: When they return regions or frames disjoint from it.
        blank_N: When they return a constant image; None selects ``Acc(true) - Acc(random)``.
    """
    control_N = random_N.float() if blank_N is None else (random_N.float() + blank_N.float()) / 2
    return true_N.float() - control_N


def pass_at_k(
    num_correct_N: Int[Tensor, "N"], num_samples_N: Int[Tensor, "N"], k: int
) -> Float[Tensor, "N"]:
    """Unbiased ``1 - C(n - c, k) / C(n, k)``: P(one of k of the n samples is right).

    Raises:
        ValueError: k is not positive, or an item has fewer than k samples or impossible counts.
    """
    if k < 1:
        raise ValueError(f"k is {k}: pass@k needs k >= 1.")
    if bool((num_samples_N < k).any()):
        raise ValueError(
            f"pass@{k} needs at least {k} samples an item, but an item has "
            f"{int(num_samples_N.min())}: draw more samples or lower k."
        )
    if bool((num_correct_N > num_samples_N).any()) or bool((num_correct_N < 0).any()):
        raise ValueError("An item has more right samples than samples, or a negative count.")
    drawn_k = torch.arange(k, device=num_samples_N.device)
    all_N1, wrong_N1 = num_samples_N[:, None], (num_samples_N - num_correct_N)[:, None]
    # As a product of ratios, since binomial coefficients overflow; past the last wrong sample the
    # numerator is 0 and the product stays 0.
    ratios_Nk = (wrong_N1 - drawn_k).clamp(min=0).double() / (all_N1 - drawn_k).double()
    return (1 - ratios_Nk.prod(-1)).float()


class _MeanOfTerms(Metric):
    """Averages terms over items, batches and processes."""

    full_state_update: ClassVar[bool] = False  # type: ignore[misc]
    is_differentiable: ClassVar[bool] = False  # type: ignore[misc]
    higher_is_better: ClassVar[bool] = True  # type: ignore[misc]

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def _add(self, terms_N: Float[Tensor, "N"]) -> None:
        self.total += terms_N.sum()
        self.count += terms_N.numel()

    def compute(self) -> Float[Tensor, ""]:
        """The mean so far; NaN without items."""
        return self.total / self.count


class ToolGain(_MeanOfTerms):
    """Tool gain: see :func:`tool_gain`."""

    def update(self, with_N: Bool[Tensor, "N"], without_N: Bool[Tensor, "N"]) -> None:
        """Adds items, answered with and without tools."""
        self._add(tool_gain(with_N, without_N))


class ObservationDependence(_MeanOfTerms):
    """Observation dependence: see :func:`observation_dependence`."""

    def update(
        self,
        true_N: Bool[Tensor, "N"],
        random_N: Bool[Tensor, "N"],
        blank_N: Bool[Tensor, "N"] | None = None,
    ) -> None:
        """Adds items, answered in the two or three forced-call arms."""
        self._add(observation_dependence(true_N, random_N, blank_N))


class PassAtK(_MeanOfTerms):
    """pass@k: see :func:`pass_at_k`."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def update(self, num_correct_N: Int[Tensor, "N"], num_samples_N: Int[Tensor, "N"]) -> None:
        """Adds items with the counts of their right samples and of all samples."""
        self._add(pass_at_k(num_correct_N, num_samples_N, self.k))


class GainHarm(Metric):
    """Gain and harm with their splits: see :func:`gain_and_harm`."""

    full_state_update: ClassVar[bool] = False  # type: ignore[misc]
    is_differentiable: ClassVar[bool] = False  # type: ignore[misc]

    totals: Tensor
    count: Tensor
    _NAMES = ("gain", "harm", "gain_called", "gain_not_called", "harm_called", "harm_not_called")

    def __init__(self) -> None:
        super().__init__()
        self.add_state("totals", torch.zeros(len(self._NAMES)), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(
        self,
        with_N: Bool[Tensor, "N"],
        without_N: Bool[Tensor, "N"],
        called_N: Bool[Tensor, "N"],
    ) -> None:
        """Adds items, answered with and without tools."""
        terms = gain_and_harm(with_N, without_N, called_N).named()
        self.totals += torch.stack([terms[name].sum() for name in self._NAMES])
        self.count += with_N.numel()

    def compute(self) -> dict[str, Float[Tensor, ""]]:
        """The six rates so far by name; NaN without items."""
        return dict(zip(self._NAMES, self.totals / self.count, strict=True))
