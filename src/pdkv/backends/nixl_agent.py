"""Making a NIXL agent the way this library needs it: found, thread-safe, and not burning a core.

The one place that touches what is not NIXL's public Python API. Part of the NIXL plug; layer 4,
nixl only, and that only when `load_api` is called.

**The progress thread.** UCX needs somebody to call it on both sides. Without a progress thread the
target's process must poll, or its writers hang without an error, already at the first contact; and
a node sleeps for tens of milliseconds when it is idle. So there is one. But `nixl_agent` hard-codes
`pthrDelay = 0`, with which that thread spins: one core per agent, for ever, and every latency on a
busy machine with it. With any delay > 0 the thread sleeps in poll(2) on UCX's event descriptors,
is woken by traffic, and costs about 1 % of a core. No argument and no variable reaches that
setting, so the config class is replaced by a subclass while the agent is being made.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from pdkv.errors import ConfigError, TransferError

__all__ = ["engine_params", "load_api", "make_agent"]

_CHOOSER = "nixl._api"  # imports torch to find the CUDA version: a second, wasted without CUDA
_BUILDS = ("nixl_cu13._api", "nixl_cu12._api")
_ENVIRONMENT = {"UCX_MODULES": "^efa", "NIXL_LOG_LEVEL": "WARN"}
_making = threading.Lock()


def load_api() -> Any:
    """NIXL's Python module; ImportError, which says what to install, where there is none."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    reasons = []
    has_cuda = os.path.exists("/dev/nvidiactl")
    for module in (_CHOOSER, *_BUILDS) if has_cuda else (*_BUILDS, _CHOOSER):
        try:
            return importlib.import_module(module)
        except ImportError as e:
            reasons.append(f"{module}: {e}")
    raise ImportError(f"the nixl backend needs NIXL: pip install nixl ({'; '.join(reasons)})")


def make_agent(
    api: Any,
    name: str,
    *,
    engine: str = "UCX",
    progress_thread: bool,
    progress_delay_us: int,
    telemetry: bool = False,
    params: Mapping[str, str],
) -> Any:
    """A thread-safe agent with one engine of NIXL's, "UCX" or "LIBFABRIC".

    STRICT, since the default (no locking) loses transfers and crashes as soon as a second thread
    calls, and the progress thread is one; it is also the fastest of the modes.
    """
    if progress_thread and progress_delay_us < 1:
        raise ConfigError("progress_delay_us must be at least 1: with 0 the thread never sleeps")
    config = api.nixl_agent_config(
        backends=[],
        enable_prog_thread=progress_thread,
        capture_telemetry=telemetry,
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    bindings = api.nixlBind
    with _making:
        api.nixlBind = _with_delay(bindings, progress_delay_us)
        try:
            agent = api.nixl_agent(name, config)
        finally:
            api.nixlBind = bindings
    if engine not in agent.get_plugin_list():
        raise ConfigError(f"this NIXL has no engine {engine!r}; it has {agent.get_plugin_list()}")
    try:
        agent.create_backend(engine, dict(params))
    except Exception as e:
        raise TransferError(f"NIXL could not start {engine} with {dict(params)}: {e}") from e
    return agent


def engine_params(
    engine: str,
    given: Mapping[str, str],
    *,
    devices: Sequence[str],
    num_threads: int,
    tls: str | None,
) -> dict[str, str]:
    """Settings of a NIXL engine under the names that NIXL has for them.

    ConfigError for what an engine doesn't have, or what NIXL would cut.
    """
    params = dict(given)
    if num_threads:
        params["num_threads"] = str(num_threads)
    if engine != "UCX" and (devices or tls is not None):
        raise ConfigError(f"devices and transports are settings of UCX, not of {engine}")
    if devices:
        params["ucx_devices"] = ", ".join(devices)
    if tls is not None:
        if "," in tls:
            raise ConfigError(
                f"transports={tls!r}: NIXL cuts its settings at commas and would drop all "
                "but the first; set UCX_TLS for a list"
            )
        params["engine_config"] = f"TLS={tls}"
    return params


def _with_delay(bindings: Any, delay_us: int) -> Any:
    """`bindings` with a config class whose pthrDelay is `delay_us`, whatever is assigned to it."""
    base: Any = getattr(bindings, "nixlAgentConfig", None)
    if not hasattr(base, "pthrDelay"):
        warnings.warn(
            "this NIXL has no pthrDelay setting: its progress thread may use a whole core",
            RuntimeWarning,
            stacklevel=4,
        )
        return bindings
    setting = base.pthrDelay

    class Config(base):  # type: ignore[misc]
        @property
        def pthrDelay(self) -> Any:  # noqa: N802
            return setting.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, _: object) -> None:  # noqa: N802
            setting.__set__(self, delay_us)

    class Bindings:
        nixlAgentConfig = Config  # noqa: N815

        def __getattr__(self, attribute: str) -> Any:
            return getattr(bindings, attribute)

    return Bindings()
