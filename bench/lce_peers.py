#!/usr/bin/env python3
"""Linear compression beside its peers in one process: our stages, the same work by PyTorch and cuBLAS, and the public
Triton and TLX kernels, which are not part of this repository: --peers names a folder that holds them as `ikbo/ikbo/ops`
(the folder experimental/ikbo of pytorch/FBGEMM). TLX also needs Meta's Triton fork in front on PYTHONPATH.

Time is on the device: calls are captured in CUDA graphs, every round replays each contestant once, and the median
counts. Small inputs come in copies, several times the L2 cache together. Results are written after every case.

usage: lce_peers.py --library build/kernels/bench/libikbo_lce_c.so --peers .peers --json lce_peers.json [--cases main|all]"""

import argparse
import ctypes
import datetime
import json
import os
import statistics
import subprocess
import sys

import torch

M, N, K_USER, K_CAND = 433, 256, 1178, 866
COLD_BYTES = 300 << 20  # several times the L2 cache
MOST_COPIES = 24
GRAPH_MS = 6.0
ROUNDS = 9


class LceCall(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("batch", "m", "n", "k_candidate", "users", "k_user")],
        *[(name, ctypes.c_int64) for name in ("w_candidate_row_stride", "w_user_row_stride")],
        *[(name, ctypes.c_void_p) for name in ("w_candidate", "e_candidate", "w_user", "e_user")],
        *[(name, ctypes.c_void_p) for name in ("index", "out", "workspace")],
        ("workspace_bytes", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        *[(name, ctypes.c_int32) for name in ("is_fp16", "single_launch", "block_m", "cluster")],
    ]


def load_peers(folder):
    """The public kernels with the configurations that win here, to keep tuning short; a missing one is left out."""
    sys.path.insert(0, os.path.join(folder, "ikbo"))
    peers = {}
    try:
        from ikbo.ops.triton_ikbo_lce import triton_ikbo_lce, triton_ikbo_lce_kernel as kernel

        tiles = ((64, 128, 64), (128, 128, 64), (64, 64, 64))
        tile_of = lambda c: tuple(c.kwargs[k] for k in ("BM", "BN", "BK"))
        kernel.configs = [c for c in kernel.configs if tile_of(c) in tiles and c.num_stages in (3, 4)]
        peers["triton"] = triton_ikbo_lce
    except Exception as error:
        print("no Triton peer:", type(error).__name__, str(error)[:120], flush=True)
    try:
        from ikbo.ops.tlx_ikbo_lce import create_user_flag, tlx_ikbo_lce, tlx_ikbo_lce_kernel as kernel

        tiles = ((64, 128, 64, 6), (128, 128, 64, 4))
        tile_of = lambda c: tuple(c.kwargs[k] for k in ("BM", "BN", "BK", "NUM_STAGES"))
        kernel.configs = [c for c in kernel.configs if tile_of(c) in tiles]
        peers["tlx"] = (tlx_ikbo_lce, create_user_flag)
    except Exception as error:
        print("no TLX peer:", type(error).__name__, str(error)[:120], flush=True)
    return peers


class Replay:
    """The calls of a contestant in a graph that lasts some milliseconds."""

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
    replays, failed = {}, {}
    for name, call in contestants.items():
        try:
            replays[name] = Replay(call)
        except Exception as error:
            failed[name] = f"{type(error).__name__} {str(error)[:100]}"
            torch.cuda.synchronize()
    times = {name: [] for name in replays}
    for round_ in range(rounds + 1):
        for name, replay in replays.items():
            time = replay.microseconds()
            if round_:
                times[name].append(time)
    for name, why in failed.items():
        print(f"   {name} failed: {why}", flush=True)
    return {name: statistics.median(values) for name, values in times.items()}


def pad(tensor, k):
    """Zeros along K: the last dimension of W, the second of E."""
    if tensor.dim() == 3:
        return torch.nn.functional.pad(tensor, (0, 0, 0, k - tensor.shape[1]))
    return torch.nn.functional.pad(tensor, (0, k - tensor.shape[1]))


def decomposed(w_cand, w_user, e_cand, e_user, index):
    return w_cand @ e_cand + (w_user @ e_user).index_select(0, index)


def contestants_of(library, peers, batch, ratio, dtype, slow):
    users = -(-batch // ratio)
    index = (torch.arange(batch, device="cuda") // ratio).int()
    k_user, k_cand = (K_USER + 7) // 8 * 8, (K_CAND + 7) // 8 * 8
    copies = max(1, min(MOST_COPIES, COLD_BYTES // (2 * N * (batch * (K_CAND + M) + users * K_USER))))
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)
    w_cand, w_user = random(M, K_CAND) / K_CAND**0.5, random(M, K_USER) / K_USER**0.5
    e_cand = [random(batch, K_CAND, N) for _ in range(copies)]
    e_user = [random(users, K_USER, N) for _ in range(copies)]
    w_cand_padded, w_user_padded = pad(w_cand, k_cand), pad(w_user, k_user)
    e_cand_padded, e_user_padded = [pad(e, k_cand) for e in e_cand], [pad(e, k_user) for e in e_user]
    padded = lambda i: (w_cand_padded, w_user_padded, e_cand_padded[i % copies], e_user_padded[i % copies], index)
    out = torch.empty(batch, M, N, device="cuda", dtype=dtype)

    def ours(single_launch):
        call = LceCall(batch, M, N, K_CAND, users, K_USER, k_cand, k_user)
        call.w_candidate, call.w_user = w_cand_padded.data_ptr(), w_user_padded.data_ptr()
        call.e_candidate, call.e_user = e_cand[0].data_ptr(), e_user[0].data_ptr()
        call.index, call.out = index.data_ptr(), out.data_ptr()
        call.is_fp16, call.single_launch = dtype == torch.float16, single_launch
        workspace_bytes = library.ikbo_lce(ctypes.byref(call))
        if workspace_bytes < 0:
            raise RuntimeError(library.ikbo_lce_error().decode())
        workspace = torch.empty(workspace_bytes, device="cuda", dtype=torch.uint8)
        call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()

        def run(i, keep=workspace):
            call.e_candidate, call.e_user = e_cand[i % copies].data_ptr(), e_user[i % copies].data_ptr()
            call.stream = torch.cuda.current_stream().cuda_stream
            if library.ikbo_lce(ctypes.byref(call)) != 0:
                raise RuntimeError(library.ikbo_lce_error().decode())

        return run

    found = {"fused_ws": ours(1), "fused": ours(0)}
    if slow:
        w = torch.cat((w_user, w_cand), 1)
        joined = lambda i: torch.cat((e_user[i % copies].index_select(0, index), e_cand[i % copies]), 1)
        found["broadcast"] = lambda i: w @ joined(i)
        found["decomposed"] = lambda i: decomposed(w_cand, w_user, e_cand[i % copies], e_user[i % copies], index)
    found["decomposed_padded"] = lambda i: decomposed(*padded(i))
    found["candidate_gemm_alone"] = lambda i: w_cand_padded @ e_cand_padded[i % copies]
    found["user_gemm_alone"] = lambda i: w_user_padded @ e_user_padded[i % copies]
    if "triton" in peers:
        found["triton"] = lambda i: peers["triton"](*padded(i))
    if "tlx" in peers and dtype == torch.float16:
        tlx, make_flag = peers["tlx"]
        flag = make_flag(w_user_padded, e_user_padded[0])
        found["tlx"] = lambda i: tlx(*padded(i), flag)
    # Our result against the decomposed one in fp32, so that what is timed is also right.
    found["fused_ws"](0)
    expected = w_cand.float() @ e_cand[0][:8].float() + (w_user.float() @ e_user[0].float())[index[:8].long()]
    error = ((out[:8].float() - expected).norm() / expected.norm()).item()
    assert error < 5e-3, f"fused_ws is off by {error}"
    return found


def floor():
    made = {}
    size = 8192
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        made[name] = lambda i, a=a, b=b: a @ b
    x, y = (torch.empty(2**29, device="cuda", dtype=torch.int32) for _ in range(2))
    made["copy"] = lambda i: torch.add(x, 1, out=y)
    times = measure(made)
    rate = {name: 2 * size**3 / times[name] * 1e-6 for name in ("bf16", "fp16")}
    return {"matmul_tflops": rate, "copy_tbps": 2 * 2**31 / times["copy"] * 1e-6}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--cases", choices=("main", "all"), default="all")
    options = parser.parse_args()
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    library = ctypes.CDLL(options.library)
    library.ikbo_lce.restype, library.ikbo_lce_error.restype = ctypes.c_int64, ctypes.c_char_p
    peers = load_peers(options.peers)
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
    output = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": datetime.date.today().isoformat(),
        "source_digest": output(os.path.join(root, "scripts/source_digest.sh"), "lce_peers"),
        "floor": floor(),
        "rows": [],
    }
    print(json.dumps(result["floor"]), flush=True)
    cases = [(1024, 70)]
    if options.cases == "all":
        cases += [(batch, 70) for batch in (10, 64, 128, 512, 1536, 2048, 2560, 3072)]
        cases += [(1024, ratio) for ratio in (2, 5, 10, 50, 100, 1000)]
    for batch, ratio in cases:
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            users = -(-batch // ratio)
            candidate, user = 2 * M * N * batch * K_CAND, 2 * M * N * users * K_USER
            operations = {"candidate_gemm_alone": candidate, "user_gemm_alone": user}
            kinds = dict.fromkeys(("fused_ws", "fused"), "ours")
            kinds |= dict.fromkeys(("triton", "tlx", "candidate_gemm_alone", "user_gemm_alone"), "peer")
            slow = (batch, ratio) == (1024, 70)
            times = measure(contestants_of(library, peers, batch, ratio, dtype, slow))
            shape = {"B": batch, "M": M, "N": N, "K_user": K_USER, "K_cand": K_CAND, "ratio": ratio, "dtype": name}
            for contestant, microseconds in times.items():
                result["rows"].append({
                    "case": shape,
                    "name": contestant,
                    "kind": kinds.get(contestant, "stage"),
                    "us": round(microseconds, 3),
                    "useful_tflops": round(operations.get(contestant, candidate + user) / microseconds * 1e-6, 2),
                })
            print(name, batch, ratio, {k: round(v, 1) for k, v in times.items()}, flush=True)
            with open(options.json, "w") as file:
                file.write(json.dumps(result, indent=1) + "\n")
            torch.cuda.empty_cache()


main()
