"""`python -m pdkv plan`, its picture, and the page that is generated from them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from pdkv.__main__ import main
from pdkv.layout import EngineLayout, KVLayout
from pdkv.plan import Picture, validate

ROOT = Path(__file__).resolve().parent.parent
ARGUMENTS = ["plan", "--src-tp", "4", "--dst-tp", "6", "--kv-heads", "12"]


def test_the_table_names_every_pair_and_its_heads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ARGUMENTS) == 0
    out = capsys.readouterr().out
    assert re.search(r"^ +0 +1 +2 +0-31 +64 MiB$", out, re.MULTILINE)
    assert "768 MiB in all, in transfer chunks of 256 tokens" in out


def test_json_has_the_same_flows(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ARGUMENTS, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [(f["src_rank_id"], f["dst_rank_id"], f["heads"]) for f in plan["flows"]][:3] == [
        (0, 0, [0, 1]),
        (0, 1, [2]),
        (1, 1, [3]),
    ]
    assert plan["num_readers"] == [2, 2, 2, 2]


def test_ranks_without_a_reader_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--src-tp", "4", "--dst-tp", "1", "--mla", "--head-dim", "576"]) == 0
    assert "1 by 0, 2 by 0, 3 by 0" in capsys.readouterr().out


def test_sizes_that_own_no_whole_heads_are_an_error_with_both_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "--src-tp", "3", "--dst-tp", "4", "--kv-heads", "8"]) == 1
    error = capsys.readouterr().err
    assert "placements.kv.head_maps: src has 3, dst has 4" in error


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plane"]) == 2
    assert "no command 'plane'" in capsys.readouterr().err
    assert main(["--help"]) == 0


def test_the_svg_file_has_a_column_for_each_rank_of_tp16(tmp_path: Path) -> None:
    path = tmp_path / "heads.svg"
    assert main(["plan", "--src-tp", "16", "--dst-tp", "2", "--svg", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    ET.fromstring(text)
    for rank in range(16):
        assert f">P{rank}</text>" in text
    assert ">D1</text>" in text


def test_a_picture_that_cannot_be_written_is_an_error_that_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, "--svg", str(tmp_path / "none" / "heads.svg")]) == 1
    assert re.match("error: .*none/heads.svg", capsys.readouterr().err)


def test_a_picture_shows_itself_in_a_notebook_and_is_always_the_same() -> None:
    kv = KVLayout.mha(num_layers=2, total_kv_heads=64, head_dim=8, dtype="float16")
    engine = EngineLayout.simple(kv, page_size=4, tp_size=2, pp_size=2, cp_size=2)
    first, second = (Picture(validate(engine, engine), num_tokens=64) for _ in range(2))
    assert first._repr_svg_() == second._repr_svg_()
    ET.fromstring(first._repr_svg_())


@pytest.mark.slow
def test_the_page_on_head_distribution_is_what_the_planner_says() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "draw_heads.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
