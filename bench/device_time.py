"""What the benchmarks on a GPU share: time on the device of calls in CUDA graphs, contestants interleaved; the rates of the
card in the same run; and what a file of results says of where it came from."""

import datetime
import os
import statistics
import subprocess

import torch

ROUNDS = 7
GRAPH_MS = 5.0
ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")


class Replay:
    """The calls of a contestant in a graph that lasts some milliseconds. `call` is given the number of the call, so that
    it can take other copies of its inputs."""

    def __init__(self, call):
        for i in range(3):
            call(i)
        torch.cuda.synchronize()
        begin, end = self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        begin.record()
        for i in range(3):
            call(i)
        end.record()
        end.synchronize()
        self.calls = max(2, min(200, int(GRAPH_MS / max(begin.elapsed_time(end) / 3, 0.01))))
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(self.calls):
                call(i)

    def microseconds(self):
        begin, end = self.events
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / self.calls


def measure(contestants, rounds=ROUNDS):
    """Median microseconds of each contestant that runs, every round replaying each once."""
    replays = {}
    for name, call in contestants.items():
        try:
            replays[name] = Replay(call)
        except Exception as error:
            print(f"   {name} failed: {type(error).__name__} {str(error)[:100]}", flush=True)
            torch.cuda.synchronize()
    times = {name: [] for name in replays}
    for round_ in range(rounds + 1):
        for name, replay in replays.items():
            time = replay.microseconds()
            if round_:
                times[name].append(time)
    return {name: statistics.median(values) for name, values in times.items()}


def floor():
    """Rates of this card in this run: a product of 8192 by 8192 matrices, and a copy."""
    made = {}
    size = 8192
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        made[name] = lambda i, a=a, b=b: a @ b
    x, y = (torch.empty(2**29, device="cuda", dtype=torch.int32) for _ in range(2))
    made["copy"] = lambda i: torch.add(x, 1, out=y)
    times = measure(made, 3)
    return {
        "matmul_tflops": {name: round(2 * size**3 / times[name] * 1e-6, 1) for name in ("bf16", "fp16")},
        "copy_tbps": round(2 * 2**31 / times["copy"] * 1e-6, 3),
    }


def origin(digest):
    """The beginning of a file of results. `digest` is the name that scripts/source_digest.sh takes."""
    output = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "source_digest": output(os.path.join(ROOT, "scripts/source_digest.sh"), digest),
    }
