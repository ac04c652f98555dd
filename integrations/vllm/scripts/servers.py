"""vLLM servers and routers as processes of a script or test, on this machine's CPU.

Each rank computes with one thread, on the small model that `export_model.py` writes. float32, since
CPUs without bfloat16 units are ten times slower with it. Everything is stopped by its own pid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RENDEZVOUS = "tcp://127.0.0.1:7100"
ROUTERS = {"concurrent": 8300, "sequential": 8301}
"""Port of each flow's router."""
VLLM = shutil.which("vllm", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "vllm"


def pdkv_config(name: str, **more: Any) -> dict[str, Any]:
    """vLLM's kv_transfer_config for this connector."""
    policy = {"kv_load_failure_policy": more.pop("policy", "fail")}
    extra = {"rendezvous": RENDEZVOUS, "name": name, **more}
    return {
        "kv_connector": "PdkvConnector",
        "kv_connector_module_path": "pdkv_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
        **policy,
    }


def nixl_config() -> dict[str, Any]:
    """vLLM's own connector, for comparison."""
    return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


@dataclass
class Process:
    """One process group with its log. `stop` is safe to call twice."""

    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and return at once."""
        paths = [str(ROOT / "src"), str(ROOT / "integrations/vllm/src")]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths), **self.environment}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def stop(self, signal_number: int = signal.SIGTERM, timeout_s: float = 30.0) -> None:
        """End the whole group."""
        process, self.process = self.process, None
        if process is None:
            return
        for each in (signal_number, signal.SIGKILL):
            try:
                os.killpg(process.pid, each)
            except ProcessLookupError:
                return
            try:
                process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                continue
            if each == signal.SIGKILL:
                return
            # The leader is gone; its children may linger.
            time.sleep(0.5)


@dataclass
class Server(Process):
    """One vLLM server."""

    url: str = ""

    @classmethod
    def make(
        cls,
        *,
        port: int,
        cores: str,
        model: Path,
        folder: Path,
        config: dict[str, Any] | None,
        tp_size: int = 1,
        arguments: Sequence[str] = (),
        space_gib: int = 1,
    ) -> Server:
        """`cores`: as vLLM wants them, "0", or "nobind". `config` None: undivided.

        Several ranks must not be bound: workers that wait spin in sched_yield, and a core with two
        of them may run nothing else for half a minute (seen on Linux 6.18), pdkv's node included.
        """
        command = [VLLM, "serve", str(model), "--served-model-name", "m", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--block-size", "32", "--max-model-len", "4096"]
        command += ["--max-num-batched-tokens", "256", "-tp", str(tp_size), *arguments]
        if config is not None:
            command += ["--kv-transfer-config", json.dumps(config)]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(space_gib),
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "OMP_NUM_THREADS": "1",
            "UCX_MODULES": "^efa",
            "UCX_NET_DEVICES": "lo",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1000),
        }
        log = folder / f"server-{port}.log"
        return cls(command, log, environment, url=f"http://127.0.0.1:{port}")

    def wait(self, timeout_s: float = 400.0) -> None:
        """Until it answers. RuntimeError with the end of its log if it doesn't."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
            else:
                return
        raise RuntimeError(f"{self.url} does not answer:\n{self.log.read_text()[-3000:]}")

    def complete(self, prompt: Sequence[int], max_tokens: int = 1, **more: Any) -> dict[str, Any]:
        """One greedy completion; more goes into the request."""
        return post(f"{self.url}/v1/completions", completion(prompt, max_tokens, **more))

    def metrics(self) -> dict[str, float]:
        """Prometheus' sums, counts and gauges by name, labels dropped and values added."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=30).read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            if line and not line.startswith("#") and "_bucket" not in line:
                name, value = line.split("{")[0].split(" ")[0], float(line.rsplit(" ", 1)[1])
                found[name] = found.get(name, 0.0) + value
        return found


def router(
    port: int, folder: Path, prefill: Mapping[str, Server], decode: Sequence[Server], flow: str
) -> Process:
    """examples/vllm_router.py; the concurrent one runs the rendezvous server."""
    command = [sys.executable, str(ROOT / "examples/vllm_router.py"), "--port", str(port)]
    command += ["--flow", flow]
    for name, server in prefill.items():
        command += ["--prefill", f"{name}={server.url}"]
    for server in decode:
        command += ["--decode", server.url]
    if flow == "concurrent":
        command += ["--rendezvous", RENDEZVOUS]
    return Process(command, folder / f"router-{port}.log")


@dataclass(frozen=True)
class Deployment:
    """A prefill and a decode server behind a router for each flow."""

    prefill: Server
    decode: Server

    def ask(self, flow: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of this flow's router."""
        return post(f"http://127.0.0.1:{ROUTERS[flow]}/v1/completions", body)


@contextlib.contextmanager
def deployment(
    folder: Path,
    model: Path,
    *,
    tp_sizes: Sequence[int] = (1, 1),
    limits: Mapping[str, float],
    resolve_s: float = 3.0,
) -> Iterator[Deployment]:
    """Start all of it, and stop it at the end. `tp_sizes`: of prefill and decode."""
    is_alone = max(tp_sizes) == 1
    prefill, decode = (
        Server.make(
            port=8310 + i,
            cores=str(i) if is_alone else "nobind",
            model=model,
            folder=folder,
            config=pdkv_config(name, resolve_s=resolve_s, limits=dict(limits)),
            tp_size=tp_size,
        )
        for i, (name, tp_size) in enumerate(zip(("p0", "d0"), tp_sizes, strict=True))
    )
    routers = [router(p, folder, {"p0": prefill}, [decode], f) for f, p in ROUTERS.items()]
    processes: list[Process] = [*routers, prefill, decode]
    try:
        for process in processes:
            process.start()
        prefill.wait()
        decode.wait()
        yield Deployment(prefill, decode)
    finally:
        for process in processes:
            process.stop()


def completion(prompt: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a greedy request that generates exactly `max_tokens`."""
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def post(url: str, body: dict[str, Any], timeout_s: float = 600.0) -> dict[str, Any]:
    """The answer, or HTTPError."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """The generated tokens of the one choice."""
    found: list[int] = answer["choices"][0]["token_ids"]
    return found
