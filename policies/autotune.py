"""Bayesian optimisation of the two NAV thresholds while they serve, by ask and tell.

PipeSD's autotuner (§3.7): the TPT is a black box over (R_1, R_2), a Gaussian process models it, and
expected improvement says which setting to try next. An evaluation serves a setting for some tokens
(50 in §9.1) and tells its TPT; the caller decides how long one is. The module knows no session, no
trigger and no environment: a drift shows in the TPT of the setting that is served, or the caller
has seen one and calls `retune`.

Grid and random search run in the same loop: their settings are start points that use up the budget.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from policies.saved import entries, saved_numbers
from policies.thresholds import Bounds, Setting, check_budget, grid, random_search

MAX_TPT_MS = 1e6  # a token in a quarter of an hour is no measurement
PENALTY = 2.0  # a bad score counts as so many times the worst good one
FIRST_CELLS = 4  # of a grid, at most, before the Gaussian process proposes
ALTERNATIVES = 100  # at random, where what it proposes was tried already
REFERENCE = 8  # evaluations of the setting that won, against which drift is seen
DRIFT_RUN = 3  # evaluations in a row that must lie on one side of their mean,
DRIFT_SHIFT = 0.25  # each by this share of it
DRIFT_NOISE = 3.0  # and by so many of their standard deviations


@dataclass(frozen=True, slots=True)
class _Scores:
    """The good scores of one setting by count, mean and Σ(deviation²), and how many were bad."""

    good: int = 0
    mean_ms: float = 0.0
    squares: float = 0.0
    bad: int = 0

    def with_score(self, tpt_ms: float) -> _Scores:
        """One score more; not good counts as bad."""
        if not 0.0 < tpt_ms <= MAX_TPT_MS:
            return _Scores(self.good, self.mean_ms, self.squares, self.bad + 1)
        mean_ms = self.mean_ms + (tpt_ms - self.mean_ms) / (self.good + 1)
        squares = self.squares + (tpt_ms - self.mean_ms) * (tpt_ms - mean_ms)
        return _Scores(self.good + 1, mean_ms, squares, self.bad)


class Autotuner:
    """Tries `budget` settings besides the default, and serves the best that it knows of.

    Guarantees: the default is evaluated first. A setting that turned out slower than it is not
    served again, and the best known one is served before the next is tried: as far as scores tell,
    no two evaluations in a row are slower than the default. A setting replaces the default while
    its mean + its standard error lies below the default's mean, so a lucky score does not last. No
    setting is tried twice unless the bounds leave hardly another.

    The scores of one setting are averaged. A score that is missing, NaN, infinite, above
    `MAX_TPT_MS`, zero or negative is bad: `PENALTY` times the worst good mean, and counted.
    `starts` are tried right after the default, clipped to the bounds; scores from elsewhere are
    not taken over, since they may be of other conditions.

    When the TPT of the setting that won moves by `DRIFT_SHIFT` and more than noise, the search
    begins anew from the default and that setting. A drift amid a search is not seen.
    """

    def __init__(
        self,
        default: Setting,
        *,
        bounds: Bounds,
        budget: int,
        seed: int,
        starts: Sequence[Setting] = (),
    ) -> None:
        if not bounds.contains(default):
            raise ValueError(f"default must lie within {bounds}, got {default}")
        for start in starts:
            if not all(math.isfinite(threshold) for threshold in start):
                raise ValueError(f"starts must be finite, got {start}")
        if seed < 0:
            raise ValueError(f"seed must be >= 0, got {seed}")
        check_budget(budget)
        self._default = _plain(default)
        self._bounds, self._budget, self._seed = bounds, int(budget), int(seed)
        self.retunes = self.bad_scores = 0
        self._begin([bounds.clip(start) for start in starts])

    def _begin(self, starts: list[Setting]) -> None:
        # the process needs something to start from: some cells of a coarse grid, in any order
        cells = grid(self._bounds, FIRST_CELLS)
        order = np.random.default_rng((self._seed, self.retunes)).permutation(len(cells))
        self._starts: list[Setting] = starts + [cells[i] for i in order[: self._budget - 1]]
        self._scores: dict[Setting, _Scores] = {}
        self._proposal: Setting | None = None
        self._tried = 0
        self._was_slower = False  # the last evaluation, than the default
        self._winner = self._default  # whose TPT is watched for drift once the search is over
        self._reference = _Scores()
        self._beyond = 0  # newest scores in a row above the reference; negative: below it

    @property
    def tuning(self) -> bool:
        """Whether the search is going on."""
        unfinished = self._tried < self._budget and bool(self._bounds.free)
        return unfinished or self._default not in self._scores

    @property
    def best(self) -> Setting:
        """The best setting known, which is the default unless another beats it beyond noise."""
        if self._default not in self._scores:
            return self._default
        noise_ms, means_ms = self._noise_ms(), self._means_ms()
        pessimistic_ms = {
            setting: means_ms[setting] + noise_ms / math.sqrt(max(1, scores.good))
            for setting, scores in self._scores.items()
        }
        best = min(pessimistic_ms, key=lambda setting: pessimistic_ms[setting])
        return best if pessimistic_ms[best] < means_ms[self._default] else self._default

    def ask(self) -> Setting:
        """The setting to serve for the next evaluation; the same until something is told.

        Fits a Gaussian process where a new setting is due and no start point is left.
        """
        if not self.tuning or self._was_slower or self._default not in self._scores:
            return self.best
        if self._proposal is None:
            self._proposal = self._propose()
        return self._proposal

    def tell(self, setting: Setting, tpt_ms: float | None) -> None:
        """Take the score of an evaluation, in any order and any number per setting; None: missing.

        Raises ValueError for a setting outside the bounds.
        """
        setting = _plain(setting)
        if not self._bounds.contains(setting):
            raise ValueError(f"setting must lie within {self._bounds}, got {setting}")
        settled = not self.tuning and setting == self.best
        before = self._scores.get(setting, _Scores())
        after = before.with_score(math.nan if tpt_ms is None else float(tpt_ms))
        self._scores[setting] = after
        self.bad_scores += after.bad - before.bad
        if setting == self._proposal:
            self._proposal = None
            self._tried += 1
        if self._default in self._scores:
            means_ms = self._means_ms()
            slower = means_ms[setting] > means_ms[self._default]
            self._was_slower = slower and setting != self.best
        if settled and tpt_ms is not None and after.good > before.good:
            self._watch(setting, float(tpt_ms))

    def retune(self) -> None:
        """Forget all scores and search anew, from the default and then the best setting so far."""
        self.retunes += 1
        self._begin([self.best])

    def state(self) -> dict[str, object]:
        """All that was told and how far the search is, in plain JSON types."""
        return {
            "kind": "autotuner",
            "default": list(self._default),
            "bounds": [[float(low), float(high)] for low, high in self._bounds.ranges],
            "budget": self._budget,
            "seed": self._seed,
            "counts": [self.retunes, self.bad_scores, self._tried, int(self._was_slower)],
            "starts": [list(start) for start in self._starts],
            "scores": [[*setting, *astuple(scores)] for setting, scores in self._scores.items()],
            "proposal": [] if self._proposal is None else list(self._proposal),
            "winner": [*self._winner, *astuple(self._reference)],
            "beyond": self._beyond,
        }

    def restore(self, state: object) -> None:
        """Go on where the tuner that left `state` stopped.

        Raises ValueError, and changes nothing, unless that one had the same default, bounds, budget
        and seed.
        """
        own = self.state()
        names = [name for name in own if name != "kind"]
        saved = dict(zip(names, entries(state, "autotuner", *names), strict=True))
        for name in ("default", "bounds", "budget", "seed"):
            if saved[name] != own[name]:
                raise ValueError(f"{name} must be {own[name]}, got {saved[name]!r:.200}")
        counts, beyond = saved_numbers("counts", saved["counts"], 4), saved["beyond"]
        if not all(n >= 0 and n.is_integer() for n in counts) or type(beyond) is not int:
            raise ValueError(f"counts and beyond must be whole, got {counts} and {beyond!r}")
        starts = [self._saved_setting("starts", x) for x in _list("starts", saved["starts"])]
        scores = dict(self._saved_scores("scores", x) for x in _list("scores", saved["scores"]))
        if not all(told.good + told.bad for told in scores.values()):
            raise ValueError(
                f"scores must be of settings with a score, got {saved['scores']!r:.200}"
            )
        winner, reference = self._saved_scores("winner", saved["winner"])
        proposal = saved["proposal"] and self._saved_setting("proposal", saved["proposal"])
        self.retunes, self.bad_scores, self._tried, was_slower = map(int, counts)
        self._was_slower, self._beyond = bool(was_slower), beyond
        self._starts, self._scores, self._proposal = starts, scores, proposal or None
        self._winner, self._reference = winner, reference

    def _saved_setting(self, name: str, values: object) -> Setting:
        setting = Setting(*map(float, saved_numbers(name, values, 2)))
        if not self._bounds.contains(setting):
            raise ValueError(f"{name} must lie within {self._bounds}, got {setting}")
        return setting

    def _saved_scores(self, name: str, values: object) -> tuple[Setting, _Scores]:
        *setting, good, mean_ms, squares, bad = saved_numbers(name, values, 6)
        whole = good.is_integer() and bad.is_integer()
        possible = 0.0 < mean_ms <= MAX_TPT_MS if good else mean_ms == squares == 0.0
        if not (whole and min(good, bad) >= 0 and possible and squares >= 0.0):
            raise ValueError(f"{name} must be scores of a setting, got {values!r:.200}")
        scores = _Scores(int(good), mean_ms, squares, int(bad))
        return self._saved_setting(name, setting), scores

    def _watch(self, setting: Setting, tpt_ms: float) -> None:
        if setting != self._winner:
            self._winner, self._reference, self._beyond = setting, _Scores(), 0
        reference = self._reference
        if reference.good < REFERENCE:
            self._reference = reference.with_score(tpt_ms)
            return
        deviation_ms = math.sqrt(reference.squares / (REFERENCE - 1))
        limit_ms = max(DRIFT_SHIFT * reference.mean_ms, DRIFT_NOISE * deviation_ms)
        shift_ms = tpt_ms - reference.mean_ms
        side = (shift_ms > limit_ms) - (shift_ms < -limit_ms)
        self._beyond = self._beyond + side if self._beyond * side > 0 else side
        if abs(self._beyond) >= DRIFT_RUN:
            self.retune()

    def _means_ms(self) -> dict[Setting, float]:
        """The mean score of every setting told, bad ones by their penalty."""
        worst_ms = max((s.mean_ms for s in self._scores.values() if s.good), default=1.0)
        return {
            setting: (scores.good * scores.mean_ms + scores.bad * PENALTY * worst_ms)
            / (scores.good + scores.bad)
            for setting, scores in self._scores.items()
        }

    def _noise_ms(self) -> float:
        """The standard deviation of one score, pooled over settings; 0 while none has two."""
        squares = sum(scores.squares for scores in self._scores.values())
        freedom = sum(max(0, scores.good - 1) for scores in self._scores.values())
        return math.sqrt(squares / freedom) if freedom else 0.0

    def _propose(self) -> Setting:
        while self._starts:
            start = self._starts.pop(0)
            if start not in self._scores:
                return start
        rng = np.random.default_rng((self._seed, self.retunes, self._tried))
        proposals = [
            self._most_promising(int(rng.integers(2**31))),
            *random_search(self._bounds, ALTERNATIVES, rng),
        ]
        return next((x for x in proposals if x not in self._scores), proposals[0])

    def _most_promising(self, seed: int) -> Setting:
        """Where a Gaussian process over the means expects the greatest improvement.

        It models their logarithm: a TPT is as likely to halve as to double.
        """
        # here, since the import takes a second that only a search should wait for
        from skopt import Optimizer
        from threadpoolctl import threadpool_limits

        free = self._bounds.free
        optimizer = Optimizer(
            [self._bounds.ranges[i] for i in free],
            "GP",
            n_initial_points=0,
            acq_func="EI",
            acq_optimizer_kwargs={"n_points": 1000},
            random_state=seed,
        )
        points = [[setting[i] for i in free] for setting in self._scores]
        # matrices this small gain nothing from threads, which would take the drafter's cores
        with threadpool_limits(limits=1), warnings.catch_warnings():
            # a point found twice and a fit at the edge of its range are no news to the user
            warnings.simplefilter("ignore")
            optimizer.tell(points, [math.log(mean_ms) for mean_ms in self._means_ms().values()])
            found = {i: float(x) for i, x in zip(free, optimizer.ask(), strict=True)}
        return self._bounds.clip(Setting(*(found.get(i, x) for i, x in enumerate(self._default))))


def _plain(setting: Setting) -> Setting:
    """The same in plain floats, whatever numbers came."""
    return Setting(*map(float, setting))


def _list(name: str, values: object) -> list[object]:
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {values!r:.200}")
    return values
