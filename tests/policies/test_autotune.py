"""The autotuner against surfaces whose best setting is known, and against faulty scores (C39)."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.autotune import DRIFT_RUN, DRIFT_SHIFT, MAX_TPT_MS, REFERENCE, Autotuner
from policies.thresholds import Bounds, Setting, grid, random_search

BOUNDS = Bounds()
DEFAULT = Setting(0.5, 0.5)
FLOOR_MS = 129.0
BAD_SCORES = [math.nan, math.inf, -math.inf, None, 0.0, -5.0, 1e300, 2 * MAX_TPT_MS]
Surface = Callable[[Setting], float]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever is asked and told, nothing is warned of or logged."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not caplog.records


def bowl(*best: float) -> Surface:
    """A smooth TPT in milliseconds, `FLOOR_MS` at its best, about as wide as PipeSD's Table 4."""

    def tpt_ms(setting: Setting) -> float:
        sequence, token = setting[0] - best[0], setting[1] - best[1]
        return FLOOR_MS + 250 * sequence**2 + 180 * token**2 + 120 * sequence * token

    return tpt_ms


def autotuner(budget: int = 16, seed: int = 0, **options: Any) -> Autotuner:
    return Autotuner(DEFAULT, **{"bounds": BOUNDS, "budget": budget, "seed": seed} | options)


def search(tuner: Autotuner, tpt_ms: Surface) -> list[Setting]:
    """Evaluate until the search is over; every setting served, in order."""
    served = []
    while tuner.tuning:
        served.append(tuner.ask())
        tuner.tell(served[-1], tpt_ms(served[-1]))
        assert len(served) < 1000
    return served


def tried(served: list[Setting]) -> list[Setting]:
    """The settings in the order of their first evaluation, the default apart."""
    return [setting for setting in dict.fromkeys(served) if setting != DEFAULT]


# --- searching ---------------------------------------------------------------------------------


def test_sixteen_evaluations_beat_random_search_and_the_grid() -> None:
    """Each of four searches ends below the lowest tenth of random searches of the same surface.

    The tenth is of 4,000 random searches. A tuner no better than random search passes with
    probability 1e-4. The grid knows no chance: over the four surfaces its mean excess over the
    floor is more than twice the tuner's.
    """
    rng = np.random.default_rng(0)
    tuned, gridded = [], []
    for seed in range(4):
        tpt_ms = bowl(*rng.uniform(0.1, 0.95, size=2))
        tuner = autotuner(16, seed)
        assert len(tried(search(tuner, tpt_ms))) == 16
        tuned.append(tpt_ms(tuner.best))
        gridded.append(min(map(tpt_ms, [DEFAULT, *grid(BOUNDS, 16)])))
        drawn = np.moveaxis(rng.uniform(0.1, 0.95, size=(4000, 16, 2)), 2, 0)
        found = np.minimum(tpt_ms(Setting(*drawn)).min(axis=1), tpt_ms(DEFAULT))  # type: ignore[attr-defined,arg-type]
        assert tuned[-1] < np.quantile(found, 0.1)
    assert np.mean(tuned) - FLOOR_MS < 0.5 * (np.mean(gridded) - FLOOR_MS)


@pytest.mark.parametrize("budget", [1, 4])
def test_a_small_budget_is_kept(budget: int) -> None:
    """With a budget of 1 the Gaussian process has the default alone, no other initial point."""
    tuner = autotuner(budget)
    served = search(tuner, bowl(0.6, 0.35))
    assert served[0] == DEFAULT
    assert len(tried(served)) == budget
    assert tuner.ask() == tuner.best


def test_the_same_seed_searches_the_same_way_and_another_does_not() -> None:
    runs = [search(autotuner(5, seed), bowl(0.7, 0.3)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_asking_again_before_telling_gives_the_same_setting() -> None:
    tuner = autotuner(3)
    tuner.tell(DEFAULT, 100.0)
    assert tuner.ask() == tuner.ask() != DEFAULT


@pytest.mark.parametrize("budget", [4, 16])
def test_grid_and_random_search_run_in_the_same_loop(budget: int) -> None:
    rng = np.random.default_rng(1)
    for settings_ in (grid(BOUNDS, budget), random_search(BOUNDS, budget, rng)):
        tuner = autotuner(budget, starts=settings_)
        assert tried(search(tuner, bowl(0.62, 0.37))) == settings_
        assert tuner.best == min([DEFAULT, *settings_], key=bowl(0.62, 0.37))


def test_a_grid_is_the_centres_of_equal_cells() -> None:
    unit = Bounds((0.0, 1.0), (0.0, 1.0))
    assert grid(unit, 4) == [(0.25, 0.25), (0.25, 0.75), (0.75, 0.25), (0.75, 0.75)]
    assert len(grid(unit, 16)) == len(set(grid(unit, 16))) == 16
    assert len(grid(unit, 7)) == 6  # two rows of three
    assert grid(Bounds((0.3, 0.3), (0.0, 1.0)), 2) == [(0.3, 0.25), (0.3, 0.75)]
    assert grid(Bounds((0.0, 1.0), (0.3, 0.3)), 2) == [(0.25, 0.3), (0.75, 0.3)]
    assert grid(Bounds((0.3, 0.3), (0.4, 0.4)), 9) == [(0.3, 0.4)]


def test_random_search_is_uniform_within_the_bounds() -> None:
    """Kolmogorov-Smirnov on each threshold; both pass at a false-alarm probability of 1e-6."""
    bounds = Bounds((0.2, 0.9), (0.0, 0.5))
    drawn = random_search(bounds, 2000, np.random.default_rng(2))
    assert all(map(bounds.contains, drawn))
    for values, (low, high) in zip(zip(*drawn, strict=True), bounds.ranges, strict=True):
        ranks = (np.sort(values) - low) / (high - low)
        distance = np.abs(ranks - (np.arange(2000) + 0.5) / 2000).max()
        assert distance < math.sqrt(math.log(4e6) / 2 / 2000)  # the bound of DKW


# --- what is served meanwhile ------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    scores=st.lists(st.sampled_from([90.0, 95.0, 105.0, 110.0, math.nan]), min_size=1, max_size=16),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_two_evaluations_in_a_row_are_slower_than_the_default(
    scores: list[float], seed: int
) -> None:
    starts = random_search(BOUNDS, len(scores), np.random.default_rng(seed))
    tpt_ms = {DEFAULT: 100.0} | dict(zip(starts, scores, strict=True))
    tuner = autotuner(len(starts), starts=starts)
    served = search(tuner, lambda setting: tpt_ms[setting])
    served.append(tuner.ask())
    assert served[0] == DEFAULT
    slower = [not tpt_ms[setting] <= 100.0 for setting in served]
    assert not any(first and second for first, second in pairwise(slower))
    assert not slower[-1]


def test_no_better_setting_leaves_the_default_in_place() -> None:
    tuner = autotuner(4)
    served = search(tuner, bowl(*DEFAULT))
    assert tuner.best == DEFAULT
    assert served.count(DEFAULT) == 1 + 3  # between the four that are slower


def test_a_lucky_score_does_not_last() -> None:
    lucky = Setting(0.8, 0.8)
    tuner = autotuner(1, starts=[lucky])
    for tpt_ms in (100.0, 104.0, 96.0):
        tuner.tell(DEFAULT, tpt_ms)
    tuner.tell(tuner.ask(), 90.0)
    assert tuner.ask() == lucky
    tuner.tell(lucky, 106.0)
    assert tuner.ask() == DEFAULT


def test_a_difference_within_the_noise_does_not_replace_the_default() -> None:
    tuner = autotuner(1, starts=[Setting(0.8, 0.8)])
    for tpt_ms in (100.0, 110.0, 90.0):
        tuner.tell(DEFAULT, tpt_ms)
    tuner.tell(tuner.ask(), 95.0)
    assert tuner.ask() == DEFAULT


# --- drift -------------------------------------------------------------------------------------


def settled(starts: list[Setting]) -> tuple[Autotuner, Setting]:
    """A tuner whose search is over, its winner evaluated often enough to see a drift."""
    tuner = autotuner(len(starts), starts=starts)
    search(tuner, bowl(0.8, 0.8))
    for _ in range(REFERENCE):
        tuner.tell(tuner.best, 130.0)
    return tuner, tuner.best


@pytest.mark.parametrize("factor", [1 + 1.01 * DRIFT_SHIFT, 1 - 1.01 * DRIFT_SHIFT])
def test_a_drift_of_the_served_setting_starts_a_new_search(factor: float) -> None:
    tuner, winner = settled([Setting(0.8, 0.8), Setting(0.2, 0.2)])
    assert winner == Setting(0.8, 0.8)
    for _ in range(DRIFT_RUN):
        assert not tuner.tuning
        tuner.tell(winner, 130.0 * factor)
    assert tuner.tuning
    assert tuner.retunes == 1
    served = search(tuner, bowl(0.2, 0.2))
    assert served[0] == DEFAULT
    assert tried(served)[0] == winner


def test_a_setting_that_falls_back_to_the_default_is_no_drift() -> None:
    """The reference is the served setting's own: what the one before it took does not count."""
    tuner = autotuner(1, starts=[Setting(0.8, 0.8)])
    tuner.tell(DEFAULT, 170.0)
    before = tuner.ask()
    for tpt_ms in [130.0] * (1 + REFERENCE) + [400.0, 130.0] * 3:
        tuner.tell(before, tpt_ms)
    assert not tuner.tuning
    assert tuner.best == DEFAULT != before
    for _ in range(REFERENCE + DRIFT_RUN):
        tuner.tell(DEFAULT, 170.0)
    assert (tuner.retunes, tuner.best) == (0, DEFAULT)


def test_a_few_outliers_are_no_drift() -> None:
    tuner, winner = settled([Setting(0.8, 0.8)])
    for _ in range(10):
        for tpt_ms in (200.0, 200.0, 130.0, 60.0, 200.0, math.nan, 60.0):
            tuner.tell(winner, tpt_ms)
    assert tuner.retunes == 0


def test_noise_is_no_drift() -> None:
    """Twenty times 200 evaluations with a deviation of 25 %: at most three searches begin anew.

    A search of 200 evaluations begins anew with probability 0.027, by the normal law given the
    eight evaluations of its reference, so that four of twenty do with probability below 2e-3.
    """
    rng = np.random.default_rng(4)
    retunes = 0
    for _ in range(20):
        tuner = autotuner(1, bounds=Bounds((0.5, 0.5), (0.5, 0.5)))
        for tpt_ms in 100 * (1 + 0.25 * rng.standard_normal(200)):
            tuner.tell(DEFAULT, float(tpt_ms))
        retunes += tuner.retunes
    assert retunes <= 3


def test_the_caller_may_ask_for_a_new_search() -> None:
    tuner, winner = settled([Setting(0.8, 0.8)])
    tuner.retune()
    assert tuner.ask() == DEFAULT
    tuner.tell(DEFAULT, 300.0)
    assert tuner.ask() == winner


# --- C39: faulty scores, awkward spaces --------------------------------------------------------


def test_sixty_noisy_scores_ten_of_them_for_one_setting() -> None:
    rng = np.random.default_rng(5)
    tuner = autotuner(60)
    same = Setting(0.3, 0.6)
    told = [same] * 10 + random_search(BOUNDS, 50, rng)
    for setting in told:
        tuner.tell(setting, bowl(0.6, 0.4)(setting) + rng.normal(0, 10))
    tuner.tell(DEFAULT, 150.0)
    assert BOUNDS.contains(tuner.ask())
    assert tuner.ask() not in told


def test_scores_of_one_setting_are_averaged() -> None:
    tuner = autotuner(2, starts=[Setting(0.2, 0.2), Setting(0.8, 0.8)])
    for tpt_ms in (100.0, 100.0):
        tuner.tell(DEFAULT, tpt_ms)
    for tpt_ms in (60.0, 120.0) * 20:  # 90 on average, though the best single score
        tuner.tell(Setting(0.2, 0.2), tpt_ms)
    for tpt_ms in (69.0, 71.0) * 20:
        tuner.tell(Setting(0.8, 0.8), tpt_ms)
    assert tuner.best == Setting(0.8, 0.8)


def test_a_constant_objective_is_searched_without_repeats_and_keeps_the_default() -> None:
    tuner = autotuner(8)
    served = search(tuner, lambda _: 100.0)
    assert len(set(served)) == len(served) == 9
    assert tuner.best == DEFAULT


@pytest.mark.parametrize("bad", BAD_SCORES)
def test_a_bad_score_is_counted_and_never_the_best(bad: float | None) -> None:
    tuner = autotuner(6)
    served = [tuner.ask()]
    tuner.tell(served[0], 150.0)
    for _ in range(8):
        served.append(tuner.ask())
        tuner.tell(served[-1], bad if len(served) == 3 else bowl(0.9, 0.9)(served[-1]))
    assert tuner.bad_scores == 1
    assert tuner.best != served[2]
    assert BOUNDS.contains(tuner.ask())


def test_only_bad_scores_leave_the_default_in_place() -> None:
    tuner = autotuner(6)
    served = search(tuner, lambda _: math.nan)
    assert tuner.bad_scores == len(served) == 7
    assert tuner.best == DEFAULT


def test_a_default_that_fails_is_replaced() -> None:
    tuner = autotuner(1, starts=[Setting(0.2, 0.2)])
    tuner.tell(DEFAULT, math.inf)
    tuner.tell(tuner.ask(), 100.0)
    assert tuner.ask() == Setting(0.2, 0.2)


@pytest.mark.parametrize("fixed", [0, 1])
def test_a_fixed_threshold_stays_as_it_is(fixed: int) -> None:
    ranges = [(0.1, 0.95), (0.1, 0.95)]
    ranges[fixed] = (0.5, 0.5)
    tuner = autotuner(7, bounds=Bounds(*ranges))
    served = search(tuner, bowl(0.7, 0.7))
    assert {setting[fixed] for setting in served} == {0.5}
    assert len(tried(served)) == 7
    other = 1 - fixed
    along = [Setting(*((0.5, x) if other else (x, 0.5))) for x in np.linspace(0.1, 0.95, 200)]
    assert bowl(0.7, 0.7)(tuner.best) < min(map(bowl(0.7, 0.7), along)) + 0.5


def test_with_both_thresholds_fixed_there_is_nothing_to_search() -> None:
    tuner = autotuner(16, bounds=Bounds((0.5, 0.5), (0.5, 0.5)))
    assert search(tuner, lambda _: 100.0) == [DEFAULT]
    assert tuner.ask() == DEFAULT


@pytest.mark.parametrize("width", [1e-15, 1e-6, 2e-3])
def test_bounds_that_leave_hardly_a_choice_end_the_search_all_the_same(width: float) -> None:
    bounds = Bounds((0.5, 0.5 + width), (0.5, 0.5))
    tuner = autotuner(5, bounds=bounds)
    served = search(tuner, lambda _: 100.0)
    assert len(served) <= 6
    assert all(map(bounds.contains, served))


def test_a_setting_is_not_tried_twice_while_there_is_another() -> None:
    """Eleven settings lie within the bounds, and rounding makes neighbours the same."""
    for seed in range(3):
        tuner = autotuner(6, seed, bounds=Bounds((0.5, 0.51), (0.5, 0.5)))
        served = search(tuner, lambda _: 100.0)
        assert len(set(served)) == len(served) == 7


def test_start_points_outside_the_bounds_are_clipped_to_them() -> None:
    bounds = Bounds((0.2, 0.6), (0.3, 0.7))
    starts = [DEFAULT, Setting(0.0, 1.0), Setting(-7.0, 0.5), Setting(0.4, 0.45)]
    tuner = autotuner(3, bounds=bounds, starts=starts)
    assert tried(search(tuner, bowl(0.4, 0.5))) == [(0.2, 0.7), (0.2, 0.5), (0.4, 0.45)]


def test_numpy_numbers_are_taken_and_plain_ones_given() -> None:
    default = Setting(np.float32(0.5), np.float64(0.5))
    bounds = Bounds((np.float64(0.1), np.float64(0.9)), (np.float32(0.25), np.int64(1)))
    tuner = Autotuner(default, bounds=bounds, budget=np.int64(3), seed=np.int32(1))
    for _ in range(6):
        setting = tuner.ask()
        assert [type(threshold) for threshold in setting] == [float, float]
        tuner.tell(Setting(*map(np.float64, setting)), np.float32(bowl(0.8, 0.8)(setting)))
    assert json.loads(json.dumps(tuner.state(), allow_nan=False)) == tuner.state()


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf])
def test_bounds_that_are_no_range_of_thresholds_are_refused(value: float) -> None:
    for bounds in ((value, 0.5), (0.5, value), (0.6, 0.5)):
        with pytest.raises(ValueError, match="token_threshold must have 0 <= low <= high <= 1"):
            Bounds(token_threshold=bounds)


def test_wrong_arguments_are_refused_by_name() -> None:
    outside = Setting(0.99, 0.5)
    with pytest.raises(ValueError, match="default must lie within"):
        Autotuner(outside, bounds=BOUNDS, budget=4, seed=0)
    with pytest.raises(ValueError, match="budget must be >= 1, got 0"):
        autotuner(0)
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        autotuner(seed=-1)
    with pytest.raises(ValueError, match="starts must be finite"):
        autotuner(starts=[Setting(0.5, math.nan)])
    for setting in (outside, Setting(math.nan, 0.5)):
        with pytest.raises(ValueError, match="setting must lie within"):
            autotuner().tell(setting, 100.0)
    for search_ in (grid, lambda *given: random_search(*given, np.random.default_rng(0))):
        with pytest.raises(ValueError, match="budget must be >= 1, got 0"):
            search_(BOUNDS, 0)


# --- saving ------------------------------------------------------------------------------------


def test_a_restored_search_goes_on_bit_for_bit() -> None:
    """Saved before each score, through JSON: amid a search, after it, and amid the next."""
    rng = np.random.default_rng(6)
    scores = [bowl(0.3, 0.3)(Setting(*x)) for x in rng.uniform(0.1, 0.95, size=(12, 2))]
    scores[3] = math.nan
    scores += [100.0] * 12 + [200.0] * 4
    original, restored = autotuner(6), autotuner(6)
    for tpt_ms in scores:
        assert restored.ask() == original.ask()
        saved = json.loads(json.dumps(original.state(), allow_nan=False))
        restored = autotuner(6)
        restored.restore(saved)
        assert restored.state() == original.state()
        for tuner in (original, restored):
            tuner.tell(tuner.ask(), tpt_ms)
    assert restored.state() == original.state()
    assert original.retunes == 1
    assert original.bad_scores == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "bandit"),
        ("default", [0.4, 0.5]),
        ("bounds", [[0.0, 1.0], [0.0, 1.0]]),
        ("budget", 17),
        ("seed", None),
        ("counts", [0, 0, 1]),
        ("counts", [0, -1, 1, 0]),
        ("counts", [0, 0.5, 1, 0]),
        ("starts", None),
        ("starts", [[0.5]]),
        ("starts", [[0.5, 0.99]]),
        ("scores", {}),
        ("scores", [[0.5, 0.5, 1, math.nan, 0.0, 0]]),
        ("scores", [[0.5, 0.5, 1, -1.0, 0.0, 0]]),
        ("scores", [[0.5, 0.5, 1, 9.0, -1.0, 0]]),
        ("scores", [[0.5, 0.5, 1.5, 9.0, 0.0, 0]]),
        ("scores", [[0.5, 0.5, 0, 9.0, 0.0, 1]]),
        ("scores", [[0.5, 0.5, 0, 0.0, 0.0, 0]]),
        ("scores", [[0.5, "0.5", 1, 9.0, 0.0, 0]]),
        ("scores", [[0.5, 0.99, 1, 9.0, 0.0, 0]]),
        ("proposal", [0.5]),
        ("proposal", 7),
        ("winner", [0.5, 0.5]),
        ("beyond", "0"),
        ("beyond", 0.5),
    ],
)
def test_a_state_that_no_such_tuner_left_is_refused_and_changes_nothing(
    name: str, value: object
) -> None:
    tuner = autotuner(starts=[Setting(0.3, 0.3)])
    tuner.tell(DEFAULT, 100.0)
    before = tuner.state()
    with pytest.raises(ValueError, match=name):
        tuner.restore(before | {name: value})
    for state in (None, [], {}, before | {"more": 1}):
        with pytest.raises(ValueError, match="state must"):
            tuner.restore(state)
    assert tuner.state() == before


def test_importing_the_module_does_not_import_scikit_optimize() -> None:
    code = "import sys, policies.autotune; sys.exit('skopt' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
