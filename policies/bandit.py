"""Which draft length next, learned from the rounds so far: UCB-SpecStop and its relatives.

An arm is a draft length; 0 means no speculation, the verifier decodes on by itself. A round is one
NAV with no other in flight (window 1): it lasted `round_ms` and committed `committed` tokens. The
cost of an arm is a ratio of sums, milliseconds per committed token, as TPT is. `select` only looks,
`update` learns; one instance serves one client. Nothing here knows the models or the network.

Algorithms, theorems and sections are those of UCB-SpecStop (`specstop`, arXiv 2606.20591).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from policies.saved import entries, saved_count, saved_numbers

MAX_ROUND_MS = 86_400_000.0  # a longer round is a fault of the clock, not a measurement
MAX_COMMITTED = 1_000_000  # of a round without drafts, which has no bound of its own
OUTLIER = 10.0  # times the ordinary, beyond which a round is cut or its arm cleared
FORGOTTEN = 0.05  # an arm whose rounds weigh less together, a fresh one being 1, is untried again
HYSTERESIS = 0.5  # how much larger the bonus of the arm in play is


@dataclass(slots=True)
class Tally:
    """Sums over the rounds of one arm, older ones discounted. All zero: untried."""

    rounds: float = 0.0  # T_k
    round_ms: float = 0.0  # S_N
    committed: float = 0.0  # S_A, never below `rounds`
    squared_ms: float = 0.0  # squares of what each round lasted beyond its expectation

    @property
    def cost_ms(self) -> float:
        """Milliseconds per committed token, S_N / S_A; undefined if untried."""
        return self.round_ms / self.committed

    @property
    def variance_ms2(self) -> float:
        """Mean square of one round's deviation, per committed token; undefined if untried."""
        return self.squared_ms * self.rounds / (self.committed * self.committed)

    def discount(self, factor: float) -> None:
        """Weigh every round so far by `factor`."""
        self.rounds *= factor
        self.round_ms *= factor
        self.committed *= factor
        self.squared_ms *= factor
        if self.rounds < FORGOTTEN:
            self.clear()

    def add(self, round_ms: float, committed: float, expected_cost_ms: float) -> None:
        """Count one round, cut to `OUTLIER` times the mean of those before."""
        if self.rounds:
            round_ms = min(round_ms, OUTLIER * self.round_ms / self.rounds)
        deviation_ms = max(-OUTLIER * round_ms, round_ms - expected_cost_ms * committed)
        self.rounds += 1.0
        self.round_ms += round_ms
        self.committed += committed
        self.squared_ms += deviation_ms * deviation_ms

    def clear(self) -> None:
        """Back to untried."""
        self.rounds = self.round_ms = self.committed = self.squared_ms = 0.0


def total(tallies: Sequence[Tally]) -> Tally:
    """The sums over all arms."""
    return Tally(
        sum(tally.rounds for tally in tallies),
        sum(tally.round_ms for tally in tallies),
        sum(tally.committed for tally in tallies),
        sum(tally.squared_ms for tally in tallies),
    )


def clear_outliers(no_longer: Sequence[Tally], longest_ms: float) -> None:
    """Clear the arms that cost out of all proportion a token, being no longer than one just played.

    All its drafts rejected, that one would have cost `longest_ms`, which is more than a shorter one
    ever costs. So a cold start, which falls on the shortest arm, does not shut it.
    """
    for tally in no_longer:
        if tally.rounds and tally.cost_ms > OUTLIER * longest_ms:
            tally.clear()


def check_draft_lens(draft_lens: Sequence[int]) -> tuple[int, ...]:
    """The arms, increasing; ValueError otherwise."""
    arms = tuple(draft_lens)
    whole = all(isinstance(draft_len, int) and draft_len >= 0 for draft_len in arms)
    if not (arms and whole and all(shorter < longer for shorter, longer in pairwise(arms))):
        raise ValueError(f"draft_lens must be increasing whole numbers >= 0, got {arms}")
    return arms


def check_discount(discount: float) -> float:
    """The discount, in (0, 1]; ValueError otherwise."""
    if not 0.0 < discount <= 1.0:
        raise ValueError(f"discount must be in (0, 1], got {discount}")
    return float(discount)


def is_round(arms: Sequence[int], draft_len: int, round_ms: float, committed: int) -> bool:
    """Whether this can have been a round of one of the `arms`; NaN never can."""
    most = draft_len + 1 if draft_len > 0 else MAX_COMMITTED
    return draft_len in arms and 0.0 < round_ms <= MAX_ROUND_MS and 1 <= committed <= most


def saved_tallies(values: object, count: int) -> list[Tally]:
    """The tallies of `count` arms from a saved state; ValueError if no rounds left them."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"tallies must be a list of {count}, got {values!r:.200}")
    tallies = [Tally(*saved_numbers("tallies", numbers, 4)) for numbers in values]
    for tally in tallies:
        tried = FORGOTTEN <= tally.rounds <= tally.committed and tally.round_ms >= 0.0
        if tally.squared_ms < 0.0 or not (tried or tally == Tally()):
            raise ValueError(f"tallies must be sums over rounds or zeros, got {astuple(tally)}")
    return tallies


class UcbSpecStop:
    """UCB-SpecStop (Algorithm 1): the arm whose cost may be lowest, S_N/S_A minus a bonus.

    The bonus is β · spread · sqrt(log(4 K T²) / T_k), β = `exploration`, K arms, T_k rounds of arm
    k. T is the rounds so far, so no horizon need be known. The paper's proof has L_max, a bound on
    the costs, in place of the spread; without either, β would be in milliseconds, and on costs of
    another size it would lock on an early arm or never settle. See `spread_ms`.

    Drift: each round weighs all earlier ones by `discount`. An arm that faded below `FORGOTTEN` is
    tried afresh, whatever it cost, so none is off for more than log(FORGOTTEN · (1 - discount)) /
    log(discount) rounds and one for each arm: 756 + K at 0.99, 298 + K if it had one round.
    1 is the paper's stationary case. Nothing is forgotten then, so take `exploration` 0.5 or more:
    of two arms 15 % apart, 1 run in 80 is on the wrong one after 1000 rounds (at 0.25, 1 in 9).
    Where drafts all stand or all fall, two bad rounds at the start can still lock an arm out.

    Near ties: the arm in play has a bonus 1 + `HYSTERESIS` times as large, so that its rival must
    be clearly ahead. A bonus between β and 1.5 β is still an upper confidence bound, and Theorem
    6 holds with 1.5 β.
    """

    def __init__(
        self, draft_lens: Sequence[int], exploration: float = 0.25, discount: float = 0.99
    ) -> None:
        if not (math.isfinite(exploration) and exploration >= 0.0):
            raise ValueError(f"exploration must be a finite number >= 0, got {exploration}")
        self.draft_lens = check_draft_lens(draft_lens)
        self.exploration = float(exploration)
        self.discount = check_discount(discount)
        self.ignored = 0  # rounds that cannot have been: see `is_round`
        self._tallies = [Tally() for _ in self.draft_lens]
        self._in_play = 0  # arm of the last round

    @property
    def spread_ms(self) -> float:
        """How far one round's cost per token lies from its arm's estimate: the root mean square.

        Each arm tried weighs the same, so the noise of the others is not forgotten while a quiet
        arm is played; an arm's first round is measured against all arms together, so the range
        between arms counts. One absurd round adds at most (`OUTLIER` times a mean round)² to one
        arm's sum of squares.
        """
        variances = [tally.variance_ms2 for tally in self._tallies if tally.rounds]
        return math.sqrt(sum(variances) / len(variances)) if variances else 0.0

    def select(self) -> int:
        """The draft length of the next round: the first one untried, else the lowest index."""
        rounds = 0.0
        for draft_len, tally in zip(self.draft_lens, self._tallies, strict=True):
            if not tally.rounds:
                return draft_len
            rounds += tally.rounds
        confidence = math.log(4 * len(self._tallies) * rounds**2)
        width_ms = self.exploration * self.spread_ms * math.sqrt(confidence)
        bonuses_ms = [width_ms / math.sqrt(tally.rounds) for tally in self._tallies]
        bonuses_ms[self._in_play] *= 1.0 + HYSTERESIS
        indices = [t.cost_ms - bonus for t, bonus in zip(self._tallies, bonuses_ms, strict=True)]
        return self.draft_lens[indices.index(min(indices))]

    def update(self, draft_len: int, round_ms: float, committed: int) -> None:
        """Learn from one round; one that `is_round` refuses is counted in `ignored` instead."""
        if not is_round(self.draft_lens, draft_len, round_ms, committed):
            self.ignored += 1
            return
        self._in_play = self.draft_lens.index(draft_len)
        tally = self._tallies[self._in_play]
        longest_ms = (draft_len + 1) * round_ms / committed
        clear_outliers(self._tallies[: self._in_play + 1], longest_ms)
        known = tally if tally.rounds else total(self._tallies)
        expected_cost_ms = known.cost_ms if known.rounds else round_ms / committed
        for other in self._tallies:
            other.discount(self.discount)
        tally.add(float(round_ms), float(committed), float(expected_cost_ms))

    def state(self) -> dict[str, object]:
        """What was learned, in plain JSON types."""
        return {
            "kind": "ucb_specstop",
            "draft_lens": list(self.draft_lens),
            "tallies": [list(astuple(tally)) for tally in self._tallies],
            "in_play": self._in_play,
            "ignored": self.ignored,
        }

    def restore(self, state: object) -> None:
        """Go on from a `state()`; ValueError if malformed or of other arms, and nothing changes."""
        names = ("draft_lens", "tallies", "in_play", "ignored")
        draft_lens, tallies, in_play, ignored = entries(state, "ucb_specstop", *names)
        if draft_lens != list(self.draft_lens):
            raise ValueError(f"draft_lens must be {list(self.draft_lens)}, got {draft_lens!r:.200}")
        if saved_count("in_play", in_play) >= len(draft_lens):
            raise ValueError(f"in_play must be < {len(draft_lens)}, got {in_play}")
        restored = saved_tallies(tallies, len(draft_lens))
        if total(restored).rounds and restored[in_play].rounds < 1.0:
            raise ValueError(f"tallies must have a round of arm {in_play}, the last, got {tallies}")
        self.ignored = saved_count("ignored", ignored)
        self._tallies, self._in_play = restored, in_play


class NaiveUcb:
    """The baseline of §VI-D: UCB on the mean of the rounds' own ratios, mean(N/A).

    A mean of ratios is the ratio of sums of rounds that commit one token each, so this is
    `UcbSpecStop` on those. It is biased against arms whose commits vary (Jensen).
    """

    def __init__(
        self, draft_lens: Sequence[int], exploration: float = 0.25, discount: float = 0.99
    ) -> None:
        self._ucb = UcbSpecStop(draft_lens, exploration, discount)

    @property
    def draft_lens(self) -> tuple[int, ...]:
        return self._ucb.draft_lens

    @property
    def ignored(self) -> int:
        return self._ucb.ignored

    def select(self) -> int:
        """The draft length of the next round."""
        return self._ucb.select()

    def update(self, draft_len: int, round_ms: float, committed: int) -> None:
        """Learn from one round; one that `is_round` refuses is counted in `ignored` instead."""
        if is_round(self.draft_lens, draft_len, round_ms, committed):
            self._ucb.update(draft_len, round_ms / committed, 1)
        else:
            self._ucb.ignored += 1

    def state(self) -> dict[str, object]:
        """What was learned, in plain JSON types."""
        return {"kind": "naive_ucb", "ratios": self._ucb.state()}

    def restore(self, state: object) -> None:
        """Go on from a `state()`; ValueError if malformed or of other arms, and nothing changes."""
        self._ucb.restore(*entries(state, "naive_ucb", "ratios"))
