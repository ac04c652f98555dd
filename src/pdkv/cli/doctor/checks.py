"""What `doctor` looks at, one function a subject; each returns findings and raises nothing.

Whatever could crash or hang runs in a child process with a deadline. Layer 6.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

__all__ = [
    "Finding",
    "State",
    "data_plane",
    "efa_trap",
    "gpus",
    "huge_pages",
    "judge",
    "network",
    "packages",
    "run_all",
    "second_efa",
    "to_other",
]

State = Literal["ok", "note", "warn", "fail"]
_NET = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")
_VERBS_PROVIDERS = (Path("/usr/lib"), Path("/usr/lib64"), Path("/lib"))
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MIN_MEMLOCK = 1 << 30
_START_S = 10.0  # of a process that loads NIXL, on a busy machine
_REQUIRED = ("torch", "numpy", "pyzmq", "msgspec")
_BACKENDS = {
    "nixl": "nixl",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "mori": "amd-mori",
}
_DATA_ADVICE = (
    "the control plane answered: UCX's data ports are closed (a firewall?), or its device can't be "
    "used; name one with UCX_NET_DEVICES on both sides, or fix its ports with "
    "UCX_TCP_PORT_RANGE=LOW-HIGH there and open them"
)


class Finding(NamedTuple):
    """One line of the table: what was looked at, how it is, and what to do about it."""

    subject: str
    state: State
    detail: str
    advice: str = ""


def run_all(seconds: float) -> Iterator[Finding]:
    """Every check, in order; one that fails by itself is a finding too."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        packages,
        second_efa,
        network,
        huge_pages,
        gpus,
        partial(data_plane, None, "this host, as UCX chooses", seconds),
        partial(data_plane, "tcp", "this host, over TCP", seconds),
    )
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            name = getattr(check, "__name__", "transfers of this host")
            yield Finding(name, "fail", f"{type(error).__name__}: {error}", "report this")


def packages() -> list[Finding]:
    """Versions of what pdkv needs, and of the transfer engines it could use."""
    found = [Finding("python", "ok", sys.version.split()[0])]
    for name in _REQUIRED:
        installed = _version(name)
        found.append(
            Finding(name, "ok", installed)
            if installed
            else Finding(name, "fail", "not installed", f"pip install {name}")
        )
    for backend, package in _BACKENDS.items():
        installed = _version(package)
        state: State = "warn" if backend == "nixl" else "note"
        found.append(
            Finding(f"backend {backend}", "ok", f"{package} {installed}")
            if installed
            else Finding(
                f"backend {backend}", state, f"{package} is missing", f"pip install {package}"
            )
        )
    return found


def second_efa() -> list[Finding]:
    """The trap of ibverbs-providers: whether it is set, and whether it would spring."""
    if not _version("nixl") or not _has_second_efa():
        return []
    subject, found = "ibverbs-providers", "brings a second libefa, with which NIXL crashes at exit"
    if efa_trap():
        detail = f"{found}, and UCX_MODULES={os.environ['UCX_MODULES']} lets it in"
        advice = "set UCX_MODULES=^efa, or remove ibverbs-providers"
        return [Finding(subject, "fail", detail, advice)]
    if "UCX_MODULES" in os.environ:
        detail = f"kept out by UCX_MODULES={os.environ['UCX_MODULES']}"
        return [Finding(subject, "ok", detail)]
    advice = (
        "pdkv's own backend keeps it out; export UCX_MODULES=^efa where another library of the "
        "same process makes a NIXL agent first, or remove ibverbs-providers"
    )
    return [Finding(subject, "warn", found, advice)]


def _has_second_efa() -> bool:
    """Whether the system has an EFA provider beside the one that NIXL's wheel carries."""
    roots = [root for root in _VERBS_PROVIDERS if root.is_dir()]
    return any(True for root in roots for _ in root.glob("**/libefa*rdmav*.so"))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def network() -> list[Finding]:
    """Interfaces, RDMA devices, and whether memory may be locked for them."""
    found = []
    for path in sorted(_NET.iterdir()) if _NET.is_dir() else ():
        state = _read(path / "operstate")
        if state in ("up", "unknown"):
            speed = _read(path / "speed")
            speed = f", {int(speed) / 1000:g} Gb/s" if speed.isdigit() else ""
            found.append(Finding(f"interface {path.name}", "ok", f"{state}{speed}"))
    devices = sorted(_RDMA.iterdir()) if _RDMA.is_dir() else []
    if not devices:
        text = "none: between hosts bytes go over TCP"
        return [*found, Finding("RDMA devices", "note", text)]
    found.append(Finding("RDMA devices", "ok", ", ".join(path.name for path in devices)))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and soft < _MIN_MEMLOCK:
        found.append(
            Finding("locked memory", "fail", f"at most {soft >> 10} KiB", "ulimit -l unlimited")
        )
    if not os.access("/dev/infiniband", os.R_OK | os.X_OK):
        advice = "give the container /dev/infiniband"
        found.append(Finding("RDMA devices", "fail", "/dev/infiniband is out of reach", advice))
    return found


def huge_pages() -> list[Finding]:
    """Whether Linux gives them when the NIXL backend asks for host memory that it registers."""
    enabled = _read(_HUGE_PAGES)
    if enabled and "[never]" not in enabled:
        return [Finding("huge pages", "ok", "for host memory that is registered")]
    detail = "none: copies between the processes of a host take a third longer"
    advice = f"echo madvise > {_HUGE_PAGES}" if enabled else ""
    return [Finding("huge pages", "note", detail, advice)]


def gpus() -> list[Finding]:
    """Devices that torch sees, and the kernel module that lets a NIC reach their memory."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return [Finding("GPUs", "note", f"none that torch {torch.__version__} sees")]
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    found = [Finding("GPUs", "ok", f"{len(names)}: {', '.join(sorted(set(names)))}")]
    modules = _read(Path("/proc/modules"))
    if _RDMA.is_dir() and "nvidia_peermem" not in modules and "nv_peer_mem" not in modules:
        detail = "nvidia_peermem is not loaded: RDMA copies through host memory, unless by dma-buf"
        found.append(Finding("GPUDirect RDMA", "warn", detail, "modprobe nvidia_peermem"))
    return found


def efa_trap() -> bool:
    """Whether NIXL would crash at its process's exit: UCX's EFA transport pulls in a second copy of
    a library that the wheel carries. The backend's own setting of UCX_MODULES prevents it."""
    if "UCX_MODULES" not in os.environ:
        return False
    excluded = os.environ["UCX_MODULES"].startswith("^") and (
        {"efa", "ib"} & set(os.environ["UCX_MODULES"][1:].split(","))
    )
    return not excluded and _has_second_efa()


def data_plane(transports: str | None, name: str, seconds: float) -> list[Finding]:
    """A transfer between two processes of this host: registration, bytes, notification, exit."""
    subject = f"transfer, {name}"
    if not _version("nixl"):
        return [Finding(subject, "note", "not tried: NIXL is missing", "pip install nixl")]
    server = _child("--serve", "tcp://127.0.0.1:0", transports, 6 * seconds)
    try:
        hello = _line(server)
        if hello.get("failed"):
            return [_unloaded(name, hello["text"])]
        if "address" not in hello:
            return [_broken(name, server)]
        client = _child("--to", hello["address"], transports, seconds)
        said = [json.loads(line) for line in _finish(client, 3 * seconds + _START_S)]
    finally:
        server.kill()
        server.communicate()
    return [*judge(name, said, client), *_exit(client)]


def to_other(address: str, bind: str | None, transports: str | None, seconds: float) -> Finding:
    """A transfer to the doctor that serves at another machine."""
    client = _child("--to", address, transports, seconds, bind)
    said = [json.loads(line) for line in _finish(client, 3 * seconds + _START_S)]
    (found,) = judge(f"to {address}", said, client)
    return found


def judge(name: str, said: list[dict[str, Any]], client: subprocess.Popen[str]) -> list[Finding]:
    """What the words of a client mean: how far it came says whose fault it is."""
    subject = f"transfer, {name}"
    for words in said:
        if words.get("ok"):
            figures = [
                words["transport"],
                f"{words['gbytes_per_s']:.2g} GB/s",
                f"4 KiB in {words['small_us']:.0f} us",
            ]
            return [Finding(subject, "ok", ", ".join(filter(None, figures)))]
        if words.get("failed") == "import":
            return [_unloaded(name, words["text"])]
        if words.get("failed") == "address":
            advice = "give HOST:PORT as the other machine's `doctor --serve` printed it"
            return [Finding(subject, "fail", words["text"], advice)]
        if words.get("failed") == "control":
            advice = (
                "is a doctor serving there (--serve)? let TCP through to the port of that address, "
                f"and from there back to {said[0].get('address', 'this one')}"
            )
            return [Finding(subject, "fail", f"control plane: {words['text']}", advice)]
        if words.get("failed"):
            detail = f"data plane: {words['text']}"
            return [Finding(subject, "fail", detail, _DATA_ADVICE)]
    if {"step": "data"} in said and client.returncode is not None and client.returncode < 0:
        # UCX connects inside a call that ends when the kernel gives up, minutes later.
        detail = "data plane: no connection; what is sent to its ports is dropped without a word"
        return [Finding(subject, "fail", detail, _DATA_ADVICE)]
    return [_broken(subject.removeprefix("transfer, "), client)]


def _exit(client: subprocess.Popen[str]) -> list[Finding]:
    if client.returncode >= 0:
        return []
    detail = f"NIXL's process died at its exit (signal {-client.returncode})"
    advice = (
        "set UCX_MODULES=^efa, or remove ibverbs-providers"
        if efa_trap()
        else "report this with the output of `pip list`"
    )
    return [Finding("exit", "fail", detail, advice)]


def _unloaded(name: str, text: str) -> Finding:
    """NIXL is not there, or it is and can't be loaded."""
    advice = "pip install nixl"
    if _version("nixl"):
        advice = "NIXL is installed and does not load: pip install --force-reinstall nixl"
    return Finding(f"transfer, {name}", "fail", text, advice)


def _broken(name: str, process: subprocess.Popen[str]) -> Finding:
    """A child that ended before it came to anything."""
    process.kill()
    _, errors = process.communicate()
    lines = [line for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the process ended with {process.returncode}"
    return Finding(f"transfer, {name}", "fail", last[:200], "read the error; is nixl whole?")


def _child(
    role: str, address: str, transports: str | None, seconds: float, bind: str | None = None
) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "pdkv", "doctor", role, address, "--json"]
    words += ["--seconds", str(seconds)]
    words += ["--transports", transports] if transports else []
    words += ["--bind", bind] if bind else []
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    found: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
    return found


def _finish(process: subprocess.Popen[str], seconds: float) -> list[str]:
    """What a child said until its end, or until it was ended."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    return [line for line in output.splitlines() if line.startswith("{")]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
