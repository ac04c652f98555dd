"""What can be tried of `scripts/gpu_check` without a GPU: that it says no loudly.

The rehearsal of its parts, in Triton's interpreter, is among the checks of test_kernels_assembly.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script says how Triton runs in its process; in this one that is taken back."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")


class Parts(SimpleNamespace):
    """A check of which each part does what the test says."""

    def __init__(self, script: ModuleType, **parts: object) -> None:
        super().__init__(
            num_wrong=0, skipped=[], may_skip=(), is_real=True, **dict.fromkeys(script.PARTS, int)
        )
        self.__dict__.update(parts)


def test_every_part_is_a_method(script: ModuleType) -> None:
    assert all(callable(getattr(script.Check, name)) for name in script.PARTS)


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cpux", "cuda:-1"])
def test_a_device_that_makes_no_sense_is_refused(script: ModuleType, device: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main(["--device", device])
    assert stopped.value.code == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_it_fails(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([]) == 2
    assert "no accelerator is visible" in capsys.readouterr().out


def test_a_device_that_is_not_there_fails(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert script.main(["--device", "cuda:1"]) == 2
    assert "there is no cuda:1: torch sees 1 devices" in capsys.readouterr().out


def test_a_part_that_is_left_out_on_a_device_is_a_failure_unless_allowed(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Parts(script)
    check.far = lambda: script.Check.skip(check, "far", "no memory")
    assert script.run(check) == 3
    assert "SKIPPED far: no memory" in capsys.readouterr().out
    allowed = Parts(script, may_skip=("far",), skipped=["far"])
    assert script.run(allowed) == 0
    assert script.run(Parts(script, is_real=False, skipped=["far", "nixl"])) == 0


def test_a_part_that_raises_is_wrong_and_the_others_run(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def broken() -> None:
        raise RuntimeError("an illegal memory access")

    check = Parts(script, cases=broken, nixl=lambda: ran.append("nixl"))
    assert script.run(check) == 1
    assert ran == ["nixl"]
    assert "an illegal memory access" in capsys.readouterr().out
