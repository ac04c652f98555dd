"""The planner against the byte oracle: any topology to any topology, every byte exactly once."""

from __future__ import annotations

from random import Random

import pytest

from pdkv.testing.cases import random_case
from pdkv.testing.check_plan import check_plan


@pytest.mark.parametrize("first_seed", range(0, 500, 50))
def test_random_cases_of_a_fixed_seed_deliver_every_byte_once(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 50):
        try:
            check_plan(random_case(Random(seed)))
        except Exception as error:
            raise AssertionError(f"random_case(Random({seed}))") from error
