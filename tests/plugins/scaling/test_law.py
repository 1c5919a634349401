"""Published laws against the figures of their papers, and closed forms against numeric minima."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from shardwise.core.errors import RecipeError
from shardwise.plugins.scaling.files import LAWS_FOLDER, names, read_law
from shardwise.plugins.scaling.law import ParametricLaw, PowerLaw, SizeAndTokens, extrapolation, log_log_fit
from shardwise.plugins.scaling.search import minimum
from shardwise.plugins.scaling.standing import standing

CHINCHILLA_FLOPS = 5.76e23


def parametric(name: str) -> ParametricLaw:
    law = read_law(name)
    assert isinstance(law, ParametricLaw)
    return law


def table() -> PowerLaw:
    law = read_law("hoffmann-1")
    assert isinstance(law, PowerLaw)
    return law


def test_the_exponents_of_chinchillas_table() -> None:
    """Hoffmann et al. 2022, table 2: a = b = 0.50; the nine rows of table 3 give 0.498 and 0.502."""
    rows = table().rows
    assert len(rows) == 9
    flops = [row[1] for row in rows]
    assert log_log_fit(flops, [row[0] for row in rows])[1] == pytest.approx(0.498, abs=0.005)
    assert log_log_fit(flops, [row[2] for row in rows])[1] == pytest.approx(0.502, abs=0.005)
    assert table().exponent == pytest.approx(0.498, abs=0.005)


def test_chinchillas_table_has_six_flops_per_parameter_and_token() -> None:
    for parameters, flops, tokens in table().rows:
        assert SizeAndTokens(parameters, tokens).flops / flops == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("name", "exponent"), [("hoffmann-1", 0.50), ("hoffmann-2", 0.49), ("hoffmann-3", 0.46), ("twenty", 0.5)]
)
def test_the_exponents_of_the_papers_three_approaches(name: str, exponent: float) -> None:
    """Hoffmann et al. 2022, table 2."""
    law = read_law(name)
    grown = law.optimum(1e24).parameters / law.optimum(1e20).parameters
    assert math.log10(grown) / 4 == pytest.approx(exponent, abs=0.006)


def test_the_corrected_fit_at_chinchillas_budget() -> None:
    best = parametric("besiroglu").optimum(CHINCHILLA_FLOPS)
    assert best.parameters == pytest.approx(7.2e10, rel=0.01)
    assert best.tokens == pytest.approx(1.33e12, rel=0.01)
    assert best.tokens_per_parameter == pytest.approx(18.4, abs=0.5)
    assert parametric("besiroglu").exponent == pytest.approx(0.513, abs=0.001)


def test_the_published_coefficients_of_approach_3_train_far_too_long() -> None:
    """Besiroglu et al. 2024: they contradict the 20 tokens per parameter of the same paper."""
    best = parametric("hoffmann-3").optimum(CHINCHILLA_FLOPS)
    assert best.tokens_per_parameter == pytest.approx(59, abs=1)


def test_gpt_3_was_undertrained() -> None:
    found = standing(read_law("besiroglu"), 175e9, 300e9)
    assert found.run.tokens_per_parameter == pytest.approx(1.7, abs=0.05)
    assert found.verdict == "undertrained"
    # A brute-force search of 100,000 sizes at 3.15e23 FLOPs gives 1.99228, at 53 billion parameters.
    assert found.loss == pytest.approx(2.00852, abs=1e-5)
    assert found.best_loss == pytest.approx(1.99228, abs=1e-5)
    assert found.penalty == pytest.approx(0.01623, abs=1e-5)
    assert found.best.parameters == pytest.approx(53e9, rel=0.01)
    assert "smaller model" in found.sentences()[0]


def test_chinchilla_is_ranked_above_gopher() -> None:
    """Hoffmann et al. 2022, section 4: 70 billion on 1.4 trillion beat 280 billion on 300 billion tokens."""
    for name in names():
        law = read_law(name)
        assert law.loss(70e9, 1.4e12) < law.loss(280e9, 300e9), name
    assert standing(read_law("besiroglu"), 70e9, 1.4e12).verdict == "compute-optimal"
    assert standing(read_law("besiroglu"), 8e9, 15e12).verdict == "overtrained"


@pytest.mark.parametrize("flops", [1e15, 1e20, CHINCHILLA_FLOPS])
@pytest.mark.parametrize("name", ["besiroglu", "hoffmann-3"])
def test_the_closed_form_is_the_numeric_optimum(name: str, flops: float) -> None:
    law = parametric(name)
    best = law.optimum(flops)

    def loss(log_parameters: float) -> float:
        parameters = math.exp(log_parameters)
        return law.loss(parameters, flops / (6 * parameters))

    assert math.exp(minimum(loss, 0.0, 40.0)) == pytest.approx(best.parameters, rel=1e-5)
    assert best.flops == pytest.approx(flops, rel=1e-12)
    assert law.flops_for(law.loss(best.parameters, best.tokens)) == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize("name", names())
def test_the_size_for_a_number_of_tokens_inverts_the_optimum(name: str) -> None:
    law = read_law(name)
    best = law.optimum(1e22)
    assert law.parameters_for(best.tokens) == pytest.approx(best.parameters, rel=1e-9)
    assert law.merit(best.parameters, best.tokens) <= law.merit(2 * best.parameters, best.tokens / 2)
    assert law.merit(best.parameters, best.tokens) <= law.merit(best.parameters / 2, best.tokens * 2)


def test_small_exponents_ask_for_finite_sizes() -> None:
    for a, b in ((1.0, 1e-3), (1e-3, 1.0)):
        law = ParametricLaw("flat", "", 1.0, a, b, 1e-3, 1e-3)
        best = law.optimum(1e20)
        sizes = (best.parameters, best.tokens, law.parameters_for(1e9))
        assert all(0 < size < math.inf for size in sizes)


def test_tokens_for_a_loss() -> None:
    law = parametric("besiroglu")
    assert law.tokens_for(70e9, law.loss(70e9, 1.4e12)) == pytest.approx(1.4e12, rel=1e-9)
    assert math.isinf(law.tokens_for(1e6, 1.9))
    assert math.isinf(law.flops_for(law.E))


def test_a_prediction_two_orders_outside_of_the_runs_is_marked() -> None:
    law = read_law("besiroglu")
    assert extrapolation(law, law.optimum(1e21)) is None
    assert extrapolation(law, law.optimum(1e23)) is None  # one order and a half above 3e21
    far = extrapolation(law, law.optimum(3.1e23))
    assert far is not None and "the FLOPs are 2.0 orders" in far
    assert "extrapolated" in standing(law, 6e6, 1e8).sentences()[-1]


def test_no_loss_is_said_three_orders_outside_of_the_runs() -> None:
    """A model of bytes on a laptop: the law would predict a loss of 16 nats, where guessing has 5.5."""
    first, second = standing(read_law("besiroglu"), 3.3e6, 1.8e6).sentences()
    assert "0.545 tokens per parameter; no prediction" in first
    assert "orders of magnitude outside" in second
    assert "predicts a loss of" in standing(read_law("besiroglu"), 175e9, 300e9).sentences()[0]


def test_every_published_law_cites_its_paper() -> None:
    assert {"besiroglu", "hoffmann-1", "hoffmann-2", "hoffmann-3", "twenty"} <= set(names())
    for name in names():
        law = read_law(name)
        assert "arXiv:" in law.source
        assert law.fitted is not None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("alpha = 0.3478", "alpha = 0", "alpha must be a positive number, found 0"),
        ("alpha = 0.3478", "", "alpha is missing"),
        ("alpha = 0.3478", "alpha = nan", "alpha must be a positive number, found nan"),
        ("alpha = 0.3478", f"alpha = 1{'0' * 400}", "alpha must be a positive number, found 1000"),
        ("[coefficients]", "x = " + "[" * 5000 + "]" * 5000 + "\n[coefficients]", "recursion"),
        (
            'source = "',
            'source = ""  # "',
            "source must be text that says where the figures are from, found ''",
        ),
        ("[coefficients]", "intervals = 3\n[coefficients]", "not iterable"),
        ('kind = "parametric"', 'kind = "cubic"', "kind must be parametric, table or ratio, found 'cubic'"),
        ("flops = [6e18, 3e21]", "flops = 6e18", "range.flops must be two numbers"),
        ("[coefficients]", "coefficients]", "at line 6"),
        (
            'kind = "parametric"',
            'kind = "ratio"\ntokens_per_parameter = 5\nloss = "twenty"',
            "loss must name a param",
        ),
        (
            'kind = "parametric"',
            'kind = "table"\nloss = "besiroglu"\nrows = [[1e8, 1e19, 1e9], [2e8, 1e19, 1e9]]',
            "rows must have at least two numbers of FLOPs",
        ),
    ],
)
def test_a_faulty_law_file_is_refused_with_its_key(old: str, new: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text((LAWS_FOLDER / "besiroglu.toml").read_text().replace(old, new), encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        read_law(str(path))
    assert said in caught.value.why
    assert "mine.toml" in caught.value.where


def test_an_unknown_law_names_the_known_ones() -> None:
    with pytest.raises(RecipeError) as caught:
        read_law("chinchila")
    assert "besiroglu" in caught.value.line()
