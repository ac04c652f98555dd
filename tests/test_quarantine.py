"""What drains is counted as it changes, and bounds what is admitted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdkv.endpoint.quarantine import Quarantine
from pdkv.limits import Limits

STEPS = st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60)


@given(STEPS)
def test_the_counts_are_those_of_what_is_in_it(steps: list[tuple[bool, int]]) -> None:
    limits = Limits(max_quarantined_requests=4, max_quarantined_requests_per_peer=2)
    quarantine, model = Quarantine(limits), {}
    for is_added, ref in steps:
        engine = bytes([ref % 3]) * 16
        if is_added:
            quarantine.add(ref, engine)
            model[ref] = engine
        else:
            quarantine.drop(ref)
            model.pop(ref, None)
        assert len(quarantine) == len(model)
        expected = {f"{len(model)} requests in quarantine"} if len(model) > 4 else set()
        for engine in set(model.values()):
            count = list(model.values()).count(engine)
            if count > 2:
                expected.add(f"{count} requests in quarantine for {engine.hex()[:8]}")
        assert set(quarantine.problems()) == expected
