"""Fitting a law: known coefficients come back, L-BFGS finds no better ones, intervals cover the truth."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwise.core.errors import DataError
from shardwise.plugins.scaling.files import COEFFICIENTS, law_text, read_law
from shardwise.plugins.scaling.fit import TrainedPoint, fit_law
from shardwise.plugins.scaling.isoflop import envelope, exponent, isoflops
from shardwise.plugins.scaling.law import ParametricLaw, extrapolation


def truth() -> ParametricLaw:
    law = read_law("besiroglu")
    assert isinstance(law, ParametricLaw)
    return law


def synthetic(seed: int, sizes: int = 12, lengths: int = 12, noise: float = 0.01) -> list[TrainedPoint]:
    """Losses of the corrected law with relative noise: 10 million to 100 billion parameters."""
    random = np.random.default_rng(seed)
    return [
        TrainedPoint(n, d, truth().loss(n, d) * math.exp(noise * random.standard_normal()), f"{n:.3g}")
        for n, d in itertools.product(
            np.geomspace(1e7, 1e11, sizes).tolist(), np.geomspace(3e8, 3e12, lengths).tolist()
        )
    ]


def test_exact_losses_give_the_exact_law() -> None:
    found = fit_law(synthetic(0, 5, 5, noise=0.0), draws=0).law
    for key in COEFFICIENTS:
        assert getattr(found, key) == pytest.approx(getattr(truth(), key), rel=1e-4), key


def test_noise_of_one_percent() -> None:
    """E within 1 %, both exponents within 0.01."""
    found = fit_law(synthetic(0), draws=0).law
    assert pytest.approx(truth().E, rel=0.01) == found.E
    assert found.alpha == pytest.approx(truth().alpha, abs=0.01)
    assert found.beta == pytest.approx(truth().beta, abs=0.01)
    assert found.exponent == pytest.approx(truth().exponent, abs=0.01)


def test_l_bfgs_finds_no_lower_objective() -> None:
    """The published method, in torch: the sum of Huber losses with delta 1e-3 on log loss, from several starts."""
    points = synthetic(3, 6, 6)
    log_n, log_d, log_loss = (
        torch.tensor([math.log(getattr(point, key)) for point in points], dtype=torch.float64)
        for key in ("parameters", "tokens", "loss")
    )

    def objective(theta: torch.Tensor) -> torch.Tensor:
        a, b, e, alpha, beta = theta
        terms = torch.stack([a - alpha * log_n, b - beta * log_d, e.expand(len(points))])
        predicted = torch.logsumexp(terms, dim=0)
        return torch.nn.functional.huber_loss(predicted, log_loss, delta=1e-3, reduction="sum")

    def minimised(start: tuple[float, ...]) -> float:
        theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [theta], max_iter=300, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
        )

        def closure() -> float:
            optimizer.zero_grad()
            value = 1e4 * objective(theta)
            value.backward()
            return value.item()

        optimizer.step(closure)
        return objective(theta).item()

    law = fit_law(points, draws=0).law
    ours = torch.tensor([math.log(law.A), math.log(law.B), math.log(law.E), law.alpha, law.beta])
    lowest = min(minimised(start) for start in ((5.0, 5.0, 0.3, 0.3, 0.3), (8.0, 8.0, 0.7, 0.5, 0.5)))
    assert float(objective(ours.double())) == pytest.approx(lowest, rel=1e-6)


def coverage(draws: int, samples: int, side: int = 12) -> float:
    """Share of 95 % intervals that hold the true coefficient, over samples of 1 % noise and all coefficients."""
    hits = []
    for seed in range(samples):
        law = fit_law(synthetic(seed + 1, side, side), draws=draws, seed=seed).law
        for key in COEFFICIENTS:
            low, high = law.intervals[key]
            hits.append(low <= getattr(truth(), key) <= high)
    return sum(hits) / len(hits)


def test_intervals_hold_the_truth_in_a_few_samples() -> None:
    assert coverage(draws=50, samples=3, side=7) >= 0.6


@pytest.mark.long
def test_intervals_cover_the_truth() -> None:
    assert coverage(draws=200, samples=200) >= 0.90


def test_an_outlier_hardly_moves_the_fit() -> None:
    points = synthetic(1, 8, 8, noise=0.001)
    spoiled = [replace(points[20], loss=3 * points[20].loss), *points[:20], *points[21:]]
    assert fit_law(spoiled, draws=0).law.alpha == pytest.approx(fit_law(points, draws=0).law.alpha, abs=0.002)


def test_too_few_runs_are_refused() -> None:
    for points in (synthetic(0, 2, 4), synthetic(0, 4, 2), synthetic(0, 3, 3)[:5]):
        with pytest.raises(DataError, match="too few runs") as caught:
            fit_law(points)
        assert "branches of WSD runs" in caught.value.line()


RISING = ParametricLaw("rising", "", 1.0, 1.0, 1.0, -0.05, 0.3)
"""Losses that rise with the model's size."""
WALL = ParametricLaw("wall", "", 1.8, 1e59, 2000.0, 8.0, 0.36)
"""Losses that nearly all of the sizes share."""


@pytest.mark.parametrize(("law", "limit"), [(RISING, "0.01"), (WALL, "5")])
def test_runs_that_do_not_determine_a_law_are_refused(law: ParametricLaw, limit: str) -> None:
    sizes, lengths = (1e7, 2e7, 4e7, 8e7), (1e9, 2e9, 4e9, 8e9)
    points = [TrainedPoint(n, d, law.loss(n, d)) for n, d in itertools.product(sizes, lengths)]
    with pytest.raises(DataError, match=f"do not determine a law .* exponent {limit} for parameters"):
        fit_law(points, draws=20)


def test_an_exponent_whose_interval_reaches_a_limit_is_not_determined() -> None:
    """Twenty tokens for each parameter: the runs do not tell the one from the other."""
    random = np.random.default_rng(2)
    points = [
        TrainedPoint(n, 20 * n, truth().loss(n, 20 * n) * math.exp(0.002 * random.standard_normal()))
        for n in np.geomspace(1e7, 1e10, 12).tolist()
    ]
    fit = fit_law(points, draws=100)
    assert fit.undetermined and all(map(math.isfinite, fit.optimum_interval(1e21)))
    assert not fit_law(synthetic(1), draws=20).undetermined


def test_the_file_of_a_fit_is_the_law(tmp_path: Path) -> None:
    points = synthetic(2, 5, 5)
    found = fit_law(points, draws=20)
    rows = [(point.run, point.parameters, point.tokens, point.loss) for point in points]
    path = tmp_path / "mine.toml"
    path.write_text(law_text(found.law, rows), encoding="utf-8")
    assert read_law(str(path)) == replace(found.law, name=str(path))
    assert extrapolation(found.law, found.law.optimum(1e20)) is None
    far = extrapolation(found.law, found.law.optimum(1e27))
    assert far is not None and "extrapolated" in far


def test_intervals_of_predictions_widen_with_the_distance() -> None:
    found = fit_law(synthetic(4, 8, 8), draws=40)

    def width(parameters: float, tokens: float) -> float:
        low, high = found.loss_interval(parameters, tokens)
        assert low < found.law.loss(parameters, tokens) < high
        assert abs(truth().loss(parameters, tokens) - (low + high) / 2) < 2 * (high - low)
        return (high - low) / low

    assert width(1e9, 3e10) < width(1e12, 1e14) < width(1e14, 1e16)
    low, high = found.optimum_interval(1e23)
    assert low < truth().optimum(1e23).parameters < high
    low, high = found.exponent_interval()
    assert low < truth().exponent < high


def test_envelope_and_isoflop_parabolas_agree_with_the_law() -> None:
    """Approaches 1 and 2 on noiseless curves of 12 sizes: a is 0.513."""
    points = synthetic(0, 14, 30, noise=0.0)
    slices = isoflops(points)
    vertices = [(each.flops, each.optimum[0]) for each in slices if each.optimum is not None]
    assert len(vertices) >= 4
    assert exponent(vertices) == pytest.approx(truth().exponent, abs=0.03)
    middle = [(flops, size) for flops, size, _ in envelope(points) if 1e19 < flops < 1e23]
    assert exponent(middle) == pytest.approx(truth().exponent, abs=0.04)
    for flops, _, loss in envelope(points):
        if 1e19 < flops < 1e23:
            best = truth().optimum(flops)
            assert loss == pytest.approx(truth().loss(best.parameters, best.tokens), rel=0.01)


def test_curves_that_do_not_overlap_have_no_parabola() -> None:
    points = [TrainedPoint(n, d * n, 3.0, "") for n in (1e6, 1e8, 1e10) for d in (20.0, 40.0)]
    assert isoflops(points) == []
    assert exponent([]) is None
