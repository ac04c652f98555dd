"""Coverage-guided fuzzing of the decoders and of two nodes, with atheris (optional).

    pip install atheris
    python scripts/fuzz_guided.py build/corpus -max_total_time=600

The first byte of an input says where it goes: the decoders, a node of either role as a body, as a
frame, or as a notification. The corpus folder is written first, from the golden frames and words
about live requests, and grows with whatever reaches new code. What a run finds becomes a test.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("this script needs atheris: pip install atheris")

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

with atheris.instrument_imports(include=["pdkv"]):
    from golden_frames import SAMPLES, frames
    from pdkv.protocol import encode
    from pdkv.testing.fuzz import CodecTarget, NodeTarget

CODEC = CodecTarget()
NODES = NodeTarget()


def feed_one(data: bytes) -> None:
    """One input to one target."""
    if not data:
        return
    where, rest = data[0] % 6, data[1:]
    if where == 0:
        CODEC.feed(rest)
        return
    if where in (1, 2):
        NODES.feed(rest, to_prefill=where == 1)
    elif where in (3, 4):
        NODES.feed_raw(rest, to_prefill=where == 3)
    else:
        NODES.feed_notification(rest)
    NODES.step()


def write_corpus(folder: Path) -> None:
    """One file for each thing that is known to be valid."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = [b"\0" + encode(message) for message in SAMPLES.values()]
    inputs += [bytes([where]) + frame for where in (0, 3, 4) for frame in frames().values()]
    for to_prefill, bodies in NODES.bodies().items():
        inputs += [bytes([1 if to_prefill else 2]) + body for body in bodies]
    inputs += [b"\5" + note for note in NODES.notes()]
    for number, data in enumerate(inputs):
        (folder / f"seed-{number:04}").write_bytes(data)


def main() -> None:
    logging.getLogger("pdkv").setLevel(logging.ERROR)
    folders = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if folders:
        write_corpus(Path(folders[0]))
    atheris.Setup(sys.argv, feed_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
