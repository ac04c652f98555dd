"""The planner against the byte oracle: any topology to any topology, every byte exactly once."""

from __future__ import annotations

import os
import time
from random import Random

import pytest

from pdkv.testing.cases import random_case
from pdkv.testing.planner import Form, check_plan


def check_seed(seed: int, form: Form = "runs") -> None:
    try:
        check_plan(random_case(Random(seed)), form)
    except Exception as error:
        raise AssertionError(f"check_plan(random_case(Random({seed})), {form!r})") from error


@pytest.mark.slow
@pytest.mark.parametrize("form", ["runs", "strided", "indices", "staged"])
def test_random_cases_of_fixed_seeds_deliver_every_byte_once(form: Form) -> None:
    for seed in range(200 if form == "runs" else 50):
        check_seed(seed, form)


@pytest.mark.check
def test_10000_fresh_random_cases_deliver_every_byte_once() -> None:
    first = int.from_bytes(os.urandom(6), "big")
    print(f"seeds from {first}")
    began, cpu = time.monotonic(), time.process_time()
    forms: tuple[Form, ...] = ("runs", "staged", "strided", "indices")
    for i in range(10_000):
        check_seed(first + i, forms[i % 4])
    wall, cpu = time.monotonic() - began, time.process_time() - cpu
    print(f"10,000 cases in {wall:.0f} s, {cpu:.0f} s of one core")
