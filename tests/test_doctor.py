"""`python -m pdkv doctor`: each trap gets its line, and what to do about it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from pdkv.cli import doctor
from pdkv.cli.doctor import checks
from pdkv.cli.doctor.checks import Finding
from pdkv.control.zmq import ZmqControl
from pdkv.errors import ConfigError

DEADLINE_S = 60.0


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def test_a_machine_without_nixl_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks._version
    monkeypatch.setattr(checks, "_version", lambda name: "" if name == "nixl" else real(name))
    found = by_subject(checks.packages())["backend nixl"]
    assert (found.state, found.advice) == ("warn", "pip install nixl")
    (skipped,) = checks.data_plane(None, "x", 1.0)
    assert (skipped.state, skipped.advice) == ("note", "pip install nixl")


def test_a_machine_without_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_version", lambda name: "")
    found = by_subject(checks.packages())["torch"]
    assert (found.state, found.advice) == ("fail", "pip install torch")


def test_devices_are_named_and_limits_that_stop_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net" / "eth7").mkdir(parents=True)
    (tmp_path / "net" / "eth7" / "operstate").write_text("up\n")
    (tmp_path / "net" / "eth7" / "speed").write_text("400000\n")
    (tmp_path / "rdma" / "mlx5_0").mkdir(parents=True)
    monkeypatch.setattr(checks, "_NET", tmp_path / "net")
    monkeypatch.setattr(checks, "_RDMA", tmp_path / "rdma")
    monkeypatch.setattr(checks, "_MIN_MEMLOCK", 1 << 62)
    found = checks.network()
    assert Finding("interface eth7", "ok", "up, 400 Gb/s") in found
    assert Finding("RDMA devices", "ok", "mlx5_0") in found
    monkeypatch.setattr(checks, "_RDMA", tmp_path / "absent")
    assert by_subject(checks.network())["RDMA devices"].state == "note"


@pytest.mark.parametrize(
    ("enabled", "state", "advice"),
    [
        ("always [madvise] never\n", "ok", ""),
        ("[always] madvise never\n", "ok", ""),
        ("always madvise [never]\n", "note", "echo madvise > "),
        (None, "note", ""),
    ],
)
def test_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str | None, state: str, advice: str
) -> None:
    setting = tmp_path / "enabled"
    if enabled is not None:
        setting.write_text(enabled)
    monkeypatch.setattr(checks, "_HUGE_PAGES", setting)
    (line,) = checks.huge_pages()
    assert (line.state, line.advice.startswith(advice)) == (state, True)
    assert bool(line.advice) is bool(advice)


@pytest.mark.parametrize(
    ("setting", "is_trap"), [(None, False), ("^efa", False), ("^ib,cuda", False), ("all", True)]
)
def test_the_efa_trap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, is_trap: bool
) -> None:
    (tmp_path / "libibverbs").mkdir()
    (tmp_path / "libibverbs" / "libefa-rdmav34.so").touch()
    monkeypatch.setattr(checks, "_VERBS_PROVIDERS", (tmp_path, tmp_path / "absent"))
    monkeypatch.delenv("UCX_MODULES", raising=False)
    if setting is not None:
        monkeypatch.setenv("UCX_MODULES", setting)
    assert checks.efa_trap() is is_trap
    monkeypatch.setattr(checks, "_version", lambda name: "1.5")
    (line,) = checks.second_efa()
    assert line.state == ("fail" if is_trap else "ok" if setting else "warn")
    assert ("UCX_MODULES=^efa" in line.advice) is (line.state != "ok")
    crashed = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    crashed.wait(DEADLINE_S)
    (found,) = checks._exit(crashed)
    assert found.state == "fail"
    assert "signal 11" in found.detail
    assert ("UCX_MODULES=^efa" in found.advice) is is_trap


@pytest.mark.parametrize(
    ("words", "state", "text"),
    [
        ({"failed": "control", "text": "x"}, "fail", "control plane: x"),
        ({"failed": "data", "text": "y"}, "fail", "data plane: y"),
        (
            {"ok": True, "transport": "cma", "gbytes_per_s": 5.0, "small_us": 9.0},
            "ok",
            "cma, 5 GB/s, 4 KiB in 9 us",
        ),
        (
            {"ok": True, "transport": "", "gbytes_per_s": 0.05, "small_us": 9.0},
            "ok",
            "0.05 GB/s, 4 KiB in 9 us",
        ),
        ({"failed": "import", "text": "no NIXL"}, "fail", "no NIXL"),
        ({"failed": "address", "text": "no way there"}, "fail", "no way there"),
    ],
)
def test_how_far_the_client_came_says_what_is_closed(
    words: dict[str, object], state: str, text: str
) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(DEADLINE_S)
    (found,) = checks.judge("x", [{"step": "control"}, words], process)
    assert (found.state, found.detail) == (state, text)
    assert bool(found.advice) == (state == "fail")


def test_a_client_that_hangs_behind_a_firewall_is_no_broken_nixl() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    (found,) = checks.judge("x", [{"step": "control"}, {"step": "data"}], process)
    assert found.detail.startswith("data plane: no connection")
    assert "UCX_TCP_PORT_RANGE" in found.advice


def test_a_check_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_NET", Path("/proc/self/mem/nothing"))

    def broken() -> list[Finding]:
        raise OSError("no such thing")

    for name in ("network", "data_plane", "second_efa"):
        monkeypatch.setattr(checks, name, lambda *_: [])
    monkeypatch.setattr(checks, "gpus", broken)
    assert Finding("broken", "fail", "OSError: no such thing", "report this") in [
        *checks.run_all(1.0)
    ]


def test_the_table_and_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Finding("thing", "fail", "is broken", "mend it")
    for found, status in (([Finding("a", "ok", "b")], 0), ([bad], 1)):
        monkeypatch.setattr(checks, "run_all", lambda _, found=found: iter(found))
        assert doctor.main(["--seconds", "1"]) == status
    assert "FAIL  thing" in capsys.readouterr().out
    assert doctor.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out)["advice"] == "mend it"


def test_a_machine_without_a_second_efa_has_no_line_about_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_VERBS_PROVIDERS", (tmp_path,))
    assert checks.second_efa() == []


def test_a_side_without_nixl_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pdkv.cli.doctor.probe", None)
    assert doctor.main(["--serve", "tcp://127.0.0.1:0"]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert doctor.main(["--to", "tcp://127.0.0.1:9", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == "import"


def test_a_mistyped_address_is_no_fault_of_the_data_plane(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in (["--to", "nowhere"], ["--to", "h:0"], ["--serve", "10.0.0.1"]):
        assert doctor.main(arguments) == 1
        assert "is no address" in capsys.readouterr().err
    pytest.importorskip("nixl")
    assert doctor.main(["--to", "nowhere.invalid:7000", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == "address"


@pytest.mark.parametrize("seconds", ["-3", "0", "nan", "inf", "soon"])
def test_a_time_that_is_none_is_told_before_anything_is_tried(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--seconds", seconds])
    assert "no number of seconds" in capsys.readouterr().err


def test_what_belongs_to_a_transfer_is_not_left_out_in_silence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for option in (["--transports", "tcp"], ["--bind", "127.0.0.1:0"]):
        with pytest.raises(SystemExit):
            doctor.main(option)
        assert "--serve or --to" in capsys.readouterr().err


def test_a_nixl_that_does_not_load_is_shown_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nixl")
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        broken = "raise ImportError('libcuda.so.1: cannot open shared object file')"
        (tmp_path / f"{name}.py").write_text(broken)
    source = Path(doctor.__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{source}")
    (found,) = checks.data_plane(None, "here", DEADLINE_S)
    assert found.state == "fail"
    assert "libcuda.so.1" in found.detail
    assert "--force-reinstall" in found.advice


def test_the_own_address_is_the_one_that_leads_there() -> None:
    pytest.importorskip("nixl")
    from pdkv.cli.doctor.probe import own_address

    assert own_address("tcp://127.0.0.1:7000") == "tcp://127.0.0.1:0"
    with pytest.raises(ConfigError, match="no way leads"):
        own_address("tcp://nowhere.invalid:7000")


@pytest.mark.slow
class TestRealTransfers:
    pytest.importorskip("nixl")

    def test_two_processes_of_this_host(self) -> None:
        (found,) = checks.data_plane("tcp", "tcp", 20.0)
        assert found.state == "ok", found
        assert "GB/s" in found.detail

    def test_memory_is_lent_to_one_after_the_other_and_a_strange_frame_ends_nothing(self) -> None:
        server = checks._child("--serve", "tcp://127.0.0.1:0", "tcp", DEADLINE_S)
        try:
            address = checks._line(server)["address"]
            stranger = ZmqControl("tcp://127.0.0.1:0")
            for frame in (b"", b"junk", msgspec.msgpack.encode(["hello"])):
                assert stranger.send(address, frame)
            for _ in range(2):
                found = checks.to_other(address, None, "tcp", 20.0)
                assert found.state == "ok", found
            stranger.close()
        finally:
            server.kill()
            server.communicate()

    def test_a_control_plane_that_does_not_answer(self) -> None:
        client = checks._child("--to", "tcp://127.0.0.1:9", None, 1.0)
        said = [json.loads(line) for line in checks._finish(client, DEADLINE_S)]
        (found,) = checks.judge("x", said, client)
        assert found.detail.startswith("control plane: tcp://127.0.0.1:9 did not answer")

    def test_a_data_plane_that_is_closed_behind_a_control_plane_that_answers(self) -> None:
        """UCX of the client may use a device alone that can't reach the server's."""
        server = checks._child("--serve", "tcp://127.0.0.1:0", "tcp", DEADLINE_S)
        try:
            address = checks._line(server)["address"]
            os.environ["UCX_NET_DEVICES"] = "ifb0"
            client = checks._child("--to", address, "tcp", 3.0)
            said = [json.loads(line) for line in checks._finish(client, DEADLINE_S)]
        finally:
            del os.environ["UCX_NET_DEVICES"]
            server.kill()
            server.communicate()
        (found,) = checks.judge("x", said, client)
        assert found.state == "fail"
