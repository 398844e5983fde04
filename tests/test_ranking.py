"""Choosing the fastest of several algorithms, on a made-up card."""

import numpy as np
import pytest

from nbtrain.device.ranking import CALLS, LONG_MS, NEAR, ROUNDS, SHORT_ROUNDS, fastest


class Card:
    """`cool` ms a call of each algorithm in a short turn, `hot` where a turn lasts longer than 50 ms."""

    def __init__(self, cool, hot=None):
        self.cool, self.hot, self.asked = np.array(cool), np.array(cool if hot is None else hot), []

    def __call__(self, some, calls, rounds):
        self.asked.append((list(some), calls, rounds))
        long = calls * self.cool[some].min() > 50
        return (self.hot if long else self.cool)[some]


def test_at_length_the_frugal_one_wins_and_far_ones_are_not_timed_again():
    card = Card(cool=[0.30, 0.20, 0.21, 0.23], hot=[0.25, 0.26, 0.24, 0.20])
    assert fastest([0, 1, 2, 3], card, at_length=True) == 2
    some, calls, rounds = card.asked[-1]
    assert some == [1, 2] and calls == round(LONG_MS / 0.2) and rounds == 1
    assert fastest([0, 1, 2, 3], card, at_length=False) == 1
    assert card.asked[-1] == ([1, 2], CALLS, ROUNDS)
    assert 0.21 < NEAR * 0.20 < 0.23


def test_short_products_are_timed_in_several_short_rounds_whatever_they_are_for():
    for at_length in (False, True):
        card = Card(cool=[0.010, 0.008, 0.009])
        assert fastest([0, 1, 2], card, at_length) == 1
        some, calls, rounds = card.asked[-1]
        assert some == [0, 1, 2] and rounds == SHORT_ROUNDS > 1 and calls * 0.01 < 1


@pytest.mark.parametrize("ms", [0.0, 1e-3, 0.5, 40.0, 900.0])
def test_one_algorithm_is_taken_whatever_it_takes(ms):
    card = Card(cool=[1.0, ms])
    assert fastest([1], card, at_length=True) == 1
    assert all(4 <= calls <= 250 for _, calls, _ in card.asked)
