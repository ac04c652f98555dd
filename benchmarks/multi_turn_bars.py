"""What two runs of `bench_multi_turn.py` come to, round by round, and the bars they are held to.

Refuses to know engines. All figures of the link are parts of the time to first token without the
prefix: *busy*, while it moves bytes; *alone*, while it moves the last ones and all is computed.
"""

from __future__ import annotations

from typing import NamedTuple

LINK_BINDS, LEAST_GAIN, MOST_OFF = 0.6, 0.5, 0.1  # parts of a time to first token


class Round(NamedTuple):
    """One turn: seconds to the first token, those after which prefill has computed all, what the
    model says, and what crossed."""

    num_tokens: int
    held_by_prefill: int
    held_by_decode: int
    first_token_s: float
    computed_s: float
    model_s: float
    nbytes: int
    answer: tuple[int, ...]


class Compared(NamedTuple):
    """One round without and with the prefix, as parts of the time to first token without it."""

    busy: float
    alone: float
    gain: float
    off: float

    @property
    def is_bound(self) -> bool:
        """Whether the first token waits for the link, and for little else."""
        return self.alone >= LINK_BINDS

    def misses(self, number: int) -> list[str]:
        """What of the bars in this file's docstring the round does not keep."""
        missed = []
        if self.off > MOST_OFF:
            missed.append(f"round {number} is {self.off:.0%} off the model")
        if number > 1 and self.is_bound and self.gain < LEAST_GAIN:
            missed.append(
                f"round {number} gains {self.gain:.0%}, though the link alone is {self.alone:.0%}"
            )
        return missed


def compare(slow: Round, fast: Round, speed: float, token_nbytes: int) -> Compared:
    """ValueError where the answers differ."""
    if slow.answer != fast.answer:
        raise ValueError(f"a prompt of {slow.num_tokens} tokens: the answers differ")
    link_s = slow.num_tokens * token_nbytes / speed if speed else 0.0
    return Compared(
        busy=link_s / slow.first_token_s,
        alone=1 - slow.computed_s / slow.first_token_s,
        gain=1 - fast.first_token_s / slow.first_token_s,
        off=max(abs(r.first_token_s / r.model_s - 1) for r in (slow, fast)),
    )


def bounds(slow: Round, fast: Round, token_nbytes: int) -> tuple[float, float, float]:
    """The speeds up to which, by arithmetic, the link is alone and busy for LINK_BINDS of the
    time, and the prefix gains LEAST_GAIN; bytes per second.

    With C the time to compute, the first token is there after all / speed while the link binds, and
    after C + new / speed with the prefix, or where the link does not bind.
    """
    every = slow.num_tokens * token_nbytes
    new = (fast.num_tokens - fast.held_by_decode) * token_nbytes
    alone = (1 - LINK_BINDS) * every / slow.computed_s
    busy = (every - LINK_BINDS * new) / (LINK_BINDS * slow.computed_s)
    gains = ((1 - LEAST_GAIN) * every - new) / slow.computed_s
    return alone, busy, gains


def show(
    without: list[Round], with_prefix: list[Round], speed: float, token_nbytes: int
) -> list[str]:
    """A line per round, and what they come to; the bars that are missed."""
    print("     prompt  held      bytes sent     first token, ms    link in TTFT    gain   off the")
    print(
        "  #  tokens       without     with    without   with     busy   alone           model  bar"
    )
    missed, found = [], []
    for number, (slow, fast) in enumerate(zip(without, with_prefix, strict=True), 1):
        one = compare(slow, fast, speed, token_nbytes)
        missed += one.misses(number)
        found.append(one)
        bar = "-"
        if number > 1 and one.is_bound:
            bar = "missed" if one.misses(number) else "holds"
        print(
            f"  {number}  {slow.num_tokens:>5}  {fast.held_by_decode:>4} {slow.nbytes:>10} "
            f"{fast.nbytes:>9} {1e3 * slow.first_token_s:>8.0f} {1e3 * fast.first_token_s:>6.0f}"
            f"{100 * one.busy:>8.0f} % {100 * one.alone:>5.0f} % {100 * one.gain:>5.0f} %"
            f"{100 * one.off:>5.1f} %  {bar}"
        )
    if not any(one.is_bound for one in found[1:]):
        most = max(one.gain for one in found[1:])
        print(f"  the link does not bind: no bar at this speed, and {most:.0%} are gained at most")
    return missed


def show_bounds(without: list[Round], with_prefix: list[Round], token_nbytes: int) -> None:
    """Where, by arithmetic, the bar applies, and where what it asks for is there."""
    print("by arithmetic, up to so many MB/s    link alone 60 %   gain 50 %   link busy 60 %")
    for number, (slow, fast) in enumerate(zip(without, with_prefix, strict=True), 1):
        if number > 1:
            alone, busy, gains = (b / 1e6 for b in bounds(slow, fast, token_nbytes))
            print(f"  round {number}{alone:>42.0f}{gains:>12.0f}{busy:>17.0f}")
