"""Servers for the tests in the real engine; they are started once, and stopped by their pids."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "integrations/vllm/scripts"))

import servers  # noqa: E402

MODELS = Path(os.environ.get("PDKV_VLLM_MODELS", ROOT / ".cache" / "vllm"))


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[servers.Deployment]:
    """As the module's MODEL, TP_SIZES and LIMITS say."""
    module = request.module
    folder, model = tmp_path_factory.mktemp("servers"), MODELS / module.MODEL
    with servers.deployment(
        folder, model, tp_sizes=module.TP_SIZES, limits=module.LIMITS
    ) as deployed:
        yield deployed
