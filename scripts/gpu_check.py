"""All that only a GPU can tell, in under four minutes: `scripts/gpu_check`.

1. Every kernel case against the reference, on the device, in poisoned memory; pages to pinned host
   memory and back; offsets beyond 2**31 elements where there is the memory.
2. GB/s of gather, scatter, page copies and conversions, as a share of a device copy of the same
   bytes; tiles and numbers of programs compared. The device is kept busy until the call has
   returned, so that what the host does first is no part of it.
3. What a launch costs on the host.
4. NIXL from device memory to device memory on one card, where nixl is installed.

Prints a line each and exits 1 if a case is wrong, 3 if none is but a part had to be left out that
`--may-skip` does not name, 2 without a device. Timings decide nothing. `--device cpu` rehearses it
in Triton's interpreter with little memory: the numbers then mean nothing, and what needs a device
is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))


PARTS = ("cases", "host_pages", "far", "speeds", "launches", "nixl")
LIMIT_S = 240
_BUSY_CYCLES = 20_000_000  # some 10 ms: longer than the host takes to build tables and launch


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0", help="cuda:N (HIP too), or cpu to rehearse")
    parser.add_argument(
        "--may-skip", action="append", default=[], choices=PARTS, help="no failure if left out"
    )
    args = parser.parse_args(arguments)
    kind, _, index = args.device.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdecimal()):
        parser.error(f"--device must be cuda, cuda:N or cpu, not {args.device!r}")
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    else:
        os.environ.pop("TRITON_INTERPRET", None)
    import torch

    if args.device != "cpu":
        if not torch.cuda.is_available():
            print(f"no accelerator is visible to torch {torch.__version__}")
            return 2
        if int(index or 0) >= torch.cuda.device_count():
            print(f"there is no {args.device}: torch sees {torch.cuda.device_count()} devices")
            return 2
        # Events and synchronize() mean the current device.
        torch.cuda.set_device(int(index or 0))
    return run(Check(args.device, may_skip=args.may_skip))


def run(check: Check) -> int:
    """All parts, whatever becomes of one; the exit status."""
    began = time.monotonic()
    for name in PARTS:
        try:
            getattr(check, name)()
        except Exception:
            check.num_wrong += 1
            print(f"WRONG {name}:\n{traceback.format_exc()}")
        print(f"-- {name} done after {time.monotonic() - began:.0f} s", flush=True)
    if time.monotonic() - began > LIMIT_S:
        print(f"took longer than {LIMIT_S} s")
    print(f"{check.num_wrong} wrong; left out: {', '.join(check.skipped) or 'nothing'}")
    if check.num_wrong:
        return 1
    return 3 if check.is_real and set(check.skipped) - set(check.may_skip) else 0


class Check:
    """The parts, how many cases were wrong, and which parts were left out."""

    def __init__(self, device: str, *, may_skip: Collection[str] = ()) -> None:
        import torch

        from pdkv.kernels import TritonKernels

        self.torch = torch
        self.device = device
        self.is_real = device != "cpu"
        self.num_wrong = 0
        self.may_skip = tuple(may_skip)
        self.skipped: list[str] = []
        self.kernels = TritonKernels(device, block=512 if self.is_real else 4096)
        if self.is_real:
            print(torch.cuda.get_device_name(device), "torch", torch.__version__)

    def skip(self, part: str, why: str) -> None:
        """A part can't be done here."""
        self.skipped.append(part)
        print(f"SKIPPED {part}: {why}")

    def sync(self) -> None:
        if self.is_real:
            self.torch.cuda.synchronize()

    def cases(self) -> None:
        from pdkv import kernels
        from pdkv.testing.kernels import kernel_cases, run_case

        count = 0
        for case in kernel_cases():
            count += 1
            try:
                run_case(case, kernels, self.kernels, self.device)
                self.sync()
            except Exception as error:
                self.num_wrong += 1
                print(f"WRONG {case}: {type(error).__name__}: {error}")
        print(f"{count} cases, {self.num_wrong} wrong")

    def host_pages(self) -> None:
        """Device pages to pinned host memory and back, other pages each time."""
        from pdkv.kernels import copy_pages

        torch, shape = self.torch, (64, 16, 8, 128)
        src = [torch.randn(shape, device=self.device).to(torch.bfloat16) for _ in range(2)]
        host = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)]
        if self.is_real:
            host = [h.pin_memory() for h in host]
        back = [torch.zeros_like(s) for s in src]
        copy_pages(src, range(0, 64, 2), host, range(32), kernels=self.kernels)
        copy_pages(host, range(32), back, range(1, 64, 2), kernels=self.kernels)
        self.sync()
        right = all(torch.equal(a[0::2], b[1::2]) for a, b in zip(src, back, strict=True))
        self.num_wrong += not right
        print("pages to host and back:", "right" if right else "WRONG")

    def far(self) -> None:
        """A page that begins beyond 2**31 words of 8 bytes."""
        from pdkv.kernels import gather_heads

        torch = self.torch
        if not self.is_real or torch.cuda.mem_get_info(self.device)[0] < 24 << 30:
            self.skip("far", "offsets beyond 2**31 words need 24 GiB of free device memory")
            return
        pages = (18 << 30) // (16 * 8 * 128 * 2)
        pool = torch.zeros((pages, 16, 8, 128), dtype=torch.bfloat16, device=self.device)
        pool[pages - 1] = 7
        out = torch.zeros((1, 16, 2, 128), dtype=torch.bfloat16, device=self.device)
        gather_heads([pool], [pages - 1], out, heads=range(2, 4), kernels=self.kernels)
        self.sync()
        right = bool((out == 7).all())
        self.num_wrong += not right
        print("offsets beyond 2**31 words:", "right" if right else "WRONG")

    def seconds(self, call: Callable[[], object], rounds: int = 12) -> float:
        """Median time on the device, the first calls left out."""
        torch, times = self.torch, []
        for _ in range(rounds if self.is_real else 1):
            if not self.is_real:
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
                continue
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_BUSY_CYCLES)
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return statistics.median(times[2:] or times)

    def speeds(self) -> None:
        for order, page_size in (("NHD", 1), ("NHD", 64), ("HND", 64)):
            self.slice_speeds(order, page_size)
        self.page_speed()

    def slice_speeds(self, order: str, page_size: int) -> None:
        """Two of eight heads in all layers, by block and number of programs."""
        from pdkv.kernels import Staged, TritonKernels, gather_heads, scatter_heads

        torch, kind = self.torch, self.torch.bfloat16
        num_layers, pool_tokens, num_tokens = self.extent()
        pages, heads = pool_tokens // page_size, range(2, 4)
        axes = (page_size, 8) if order == "NHD" else (8, page_size)
        shape = (pages, *axes, 128)
        layers = [torch.ones(shape, dtype=kind, device=self.device) for _ in range(num_layers)]
        ids = torch.randperm(pages)[: num_tokens // page_size]
        dense = (num_tokens, 2) if order == "NHD" else (2, num_tokens)
        out = torch.empty((num_layers, *dense, 128), dtype=kind, device=self.device)
        other, small = torch.empty_like(out), out.to(torch.float8_e4m3fn)
        nbytes, plain = out.numel() * 2, self.seconds(lambda: other.copy_(out))
        sources, factors = [Staged(out, heads)], [1.0] * num_layers

        def gather(mover: TritonKernels) -> None:
            gather_heads(layers, ids, out, heads=heads, order=order, kernels=mover)

        def scatter(mover: TritonKernels) -> None:
            scatter_heads(sources, layers, ids, order=order, kernels=mover)

        def convert(mover: TritonKernels) -> None:
            gather_heads(
                layers, ids, small, heads=heads, order=order, factors=factors, kernels=mover
            )

        for block in (256, 512, 1024) if self.is_real else (4096,):
            for programs in (0, 264, 528, 1056) if self.is_real else (0,):
                mover = TritonKernels(self.device, block=block, max_programs=programs)
                for call in (gather, scatter, convert):
                    taken = self.seconds(partial(call, mover))
                    print(
                        f"{call.__name__:>8} {order} page {page_size:>2} block {block:>4} programs "
                        f"{programs:>4}: {nbytes / taken / 1e9:7.0f} GB/s, "
                        f"{plain / taken:.2f} of a device copy"
                    )

    def page_speed(self) -> None:
        """Whole pages of 32 KiB from pool to pool."""
        from pdkv.kernels import copy_pages

        torch = self.torch
        num_layers, _, num_tokens = self.extent()
        shape = (num_tokens * 2 // 16, 16, 8, 128)
        pools = [
            [torch.ones(shape, dtype=torch.bfloat16, device=self.device) for _ in range(num_layers)]
            for _ in range(2)
        ]
        ids = torch.randperm(shape[0])
        taken = self.seconds(lambda: copy_pages(pools[0], ids, pools[1], ids, kernels=self.kernels))
        nbytes = sum(layer.numel() * 2 for layer in pools[0])
        print(f"   pages NHD page 16, 32 KiB each: {nbytes / taken / 1e9:7.0f} GB/s")

    def extent(self) -> tuple[int, int, int]:
        """(layers, tokens in the pool, tokens that move)."""
        return (80, 16_384, 4_096) if self.is_real else (2, 128, 64)

    def launches(self) -> None:
        """From the call until it returns, and how much of that is the launch itself."""
        from pdkv.kernels import gather_heads

        torch = self.torch
        layers = [
            torch.ones((8, 16, 8, 128), dtype=torch.bfloat16, device=self.device)
            for _ in range(80 if self.is_real else 2)
        ]
        out = torch.empty((len(layers), 16, 2, 128), dtype=torch.bfloat16, device=self.device)
        times = []
        for _ in range(200 if self.is_real else 2):
            began = time.perf_counter()
            gather_heads(layers, [3], out, heads=range(2, 4), kernels=self.kernels)
            times.append(time.perf_counter() - began)
            self.sync()
        print(f"host time of one small gather: {statistics.median(times) * 1e6:.0f} us")

    def nixl(self) -> None:
        """Two agents of one process: a write, its notification, the bytes; and the speed."""
        try:
            from pdkv.backends.nixl import NixlBackend

            source, target = NixlBackend(name="source"), NixlBackend(name="target")
        except Exception as error:
            self.skip("nixl", f"{type(error).__name__}: {error}")
            return
        import numpy as np

        from pdkv.layout import MemoryRegion
        from pdkv.plan import Runs

        torch, nbytes = self.torch, (256 if self.is_real else 1) << 20
        a = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=self.device)
        b = torch.zeros_like(a)
        self.sync()
        source.register([MemoryRegion(a.data_ptr(), nbytes, str(a.device))])
        target.register([MemoryRegion(b.data_ptr(), nbytes, str(b.device))])
        peer = source.connect(target.metadata())
        step = min(nbytes, source.limits.max_nbytes_per_post)
        began, num_posts, arrived = time.monotonic(), nbytes // step, 0
        errors: list[str] = []

        def progress() -> int:
            done = source.poll(time.monotonic())
            errors.extend(completion.error for completion in done if completion.error)
            return len(target.notifications())

        for start in range(0, nbytes, step):
            columns = (a.data_ptr() + start, b.data_ptr() + start, step)
            runs = Runs(*(np.array([value], np.uint64) for value in columns))
            while source.post(peer, runs, b"arrived") is None and time.monotonic() < began + 30:
                arrived += progress()
        while arrived < num_posts and not errors and time.monotonic() < began + 30:
            arrived += progress()
        taken = time.monotonic() - began
        self.sync()
        right = bool(torch.equal(a, b)) and arrived == num_posts and not errors
        self.num_wrong += not right
        print(*errors, sep="\n", end="\n" if errors else "")
        print(
            f"nixl over {source.transport(peer) or 'unknown'}: {'right' if right else 'WRONG'}, "
            f"{nbytes / taken / 1e9:.1f} GB/s, {arrived} notifications"
        )
        for backend in (source, target):
            backend.close()


if __name__ == "__main__":
    sys.exit(main())
