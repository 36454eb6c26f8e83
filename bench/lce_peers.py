#!/usr/bin/env python3
"""Linear compression beside its peers in one process: our stages, the same work by PyTorch and cuBLAS, and the public
Triton and TLX kernels, which are not part of this repository: --peers names a folder that holds them as `ikbo/ikbo/ops`
(the folder experimental/ikbo of pytorch/FBGEMM). TLX also needs Meta's Triton fork in front on PYTHONPATH.

Time is on the device: calls are captured in CUDA graphs, every round replays each contestant once, and the median
counts. Small inputs come in copies, several times the L2 cache together. Results are written after every case.

usage: lce_peers.py --library build/kernels/bench/libikbo_lce_c.so --peers .peers --json lce_peers.json
         [--cases main|sweep|all]    the main shape; with the sweeps over batch and ratio; with 48 other shapes too
         [--seconds 300]             cases that would begin later are left out"""

import argparse
import collections
import concurrent.futures
import ctypes
import json
import math
import multiprocessing
import os
import random
import sys
import time

import torch

from device_time import floor, measure, origin

Shape = collections.namedtuple("Shape", "batch ratio m n k_user k_cand dtype", defaults=(433, 256, 1178, 866, "bf16"))
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OTHERS_SEED = 48
COLD_BYTES = 300 << 20  # several times the L2 cache
MOST_COPIES = 24
ROUNDS = 7


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


def quick_bench(call, quantiles):
    import triton

    return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)


def load_peers(folder):
    """The public kernels with the configurations that win here, to keep tuning short; a missing one is left out."""
    sys.path.insert(0, os.path.join(folder, "ikbo"))
    peers = {}
    try:
        from ikbo.ops.triton_ikbo_lce import triton_ikbo_lce, triton_ikbo_lce_kernel as kernel

        tiles = ((64, 128, 64), (128, 128, 64), (64, 64, 64))
        tile_of = lambda c: tuple(c.kwargs[k] for k in ("BM", "BN", "BK"))
        kernel.configs = [c for c in kernel.configs if tile_of(c) in tiles and c.num_stages in (3, 4)]
        kernel.do_bench = quick_bench
        peers["triton"] = triton_ikbo_lce
    except Exception as error:
        print("no Triton peer:", type(error).__name__, str(error)[:120], flush=True)
    try:
        from ikbo.ops.tlx_ikbo_lce import create_user_flag, tlx_ikbo_lce, tlx_ikbo_lce_kernel as kernel

        tiles = ((64, 128, 64, 6), (128, 128, 64, 4))
        tile_of = lambda c: tuple(c.kwargs[k] for k in ("BM", "BN", "BK", "NUM_STAGES"))
        kernel.configs = [c for c in kernel.configs if tile_of(c) in tiles]
        kernel.do_bench = quick_bench
        peers["tlx"] = (tlx_ikbo_lce, create_user_flag)
    except Exception as error:
        print("no TLX peer:", type(error).__name__, str(error)[:120], flush=True)
    return peers


def pad(tensor, k):
    """Zeros along K: the last dimension of W, the second of E."""
    if tensor.dim() == 3:
        return torch.nn.functional.pad(tensor, (0, 0, 0, k - tensor.shape[1]))
    return torch.nn.functional.pad(tensor, (0, k - tensor.shape[1]))


def decomposed(w_cand, w_user, e_cand, e_user, index):
    return w_cand @ e_cand + (w_user @ e_user).index_select(0, index)


def prepare(job):
    """Compiles a peer for a shape into Triton's cache on disk, in a process of its own."""
    folder, name, shape = job
    try:
        peers = load_peers(folder)
        users, dtype = -(-shape.batch // shape.ratio), TYPES[shape.dtype]
        k_cand, k_user = (shape.k_cand + 7) // 8 * 8, (shape.k_user + 7) // 8 * 8
        zeros = lambda *size: torch.zeros(*size, device="cuda", dtype=dtype)
        index = torch.zeros(shape.batch, device="cuda", dtype=torch.int32)
        inputs = [zeros(shape.m, k_cand), zeros(shape.m, k_user), zeros(shape.batch, k_cand, shape.n)]
        inputs += [zeros(users, k_user, shape.n), index]
        if name == "tlx":
            tlx, make_flag = peers["tlx"]
            tlx(*inputs, make_flag(inputs[1], inputs[3]))
        else:
            peers[name](*inputs)
        torch.cuda.synchronize()
        del inputs
        torch.cuda.empty_cache()
    except Exception as error:  # the measurement meets it again and reports it
        return f"{name} {shape}: {type(error).__name__} {str(error)[:80]}"


def prepare_all(folder, peers, cases):
    """Compiling takes far longer than measuring; what is compiled depends on little of a shape."""
    jobs = {}
    divides = lambda x: 1 if x == 1 else 16 if x % 16 == 0 else 0
    for shape in cases:
        tail = (shape.m, shape.n, shape.k_user, shape.k_cand, shape.dtype)
        if "triton" in peers:
            jobs.setdefault(("triton", *tail), (folder, "triton", shape))
        if "tlx" in peers and shape.dtype == "fp16" and shape.n % 8 == 0:
            users = -(-shape.batch // shape.ratio)
            jobs.setdefault(("tlx", *tail, divides(shape.batch), divides(users)), (folder, "tlx", shape))
    workers = max(1, (os.cpu_count() or 2) - 2)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        for failure in pool.map(prepare, jobs.values()):
            if failure:
                print("  ", failure, flush=True)


def other_shapes():
    """48 shapes from a seed, sizes even on a logarithmic scale; three of four N are multiples of 8."""
    draw = random.Random(OTHERS_SEED)
    size = lambda low, high: round(math.exp(draw.uniform(math.log(low), math.log(high))))
    shapes = []
    for i in range(48):
        m, n, k_user, k_cand = size(64, 1024), size(64, 512), size(100, 4096), size(100, 4096)
        n = n if i % 4 == 3 else max(64, n // 8 * 8)
        most = max(10, (1 << 29) // (n * (k_cand + m)))  # 1 GB of candidates and results
        shapes.append(Shape(min(size(10, 4096), most), size(1, 1000), m, n, k_user, k_cand, ("bf16", "fp16")[i // 4 % 2]))
    return shapes


def contestants_of(library, peers, shape, slow):
    batch, ratio, m, n, full_k_user, full_k_cand, type_name = shape
    dtype = TYPES[type_name]
    users = -(-batch // ratio)
    index = (torch.arange(batch, device="cuda") // ratio).int()
    k_user, k_cand = (full_k_user + 7) // 8 * 8, (full_k_cand + 7) // 8 * 8
    copies = max(1, min(MOST_COPIES, COLD_BYTES // (2 * n * (batch * (full_k_cand + m) + users * full_k_user))))
    random = lambda *shape: torch.randn(*shape, device="cuda", dtype=dtype)
    w_cand, w_user = random(m, full_k_cand) / full_k_cand**0.5, random(m, full_k_user) / full_k_user**0.5
    e_cand = [random(batch, full_k_cand, n) for _ in range(copies)]
    e_user = [random(users, full_k_user, n) for _ in range(copies)]
    w_cand_padded, w_user_padded = pad(w_cand, k_cand), pad(w_user, k_user)
    e_cand_padded, e_user_padded = [pad(e, k_cand) for e in e_cand], [pad(e, k_user) for e in e_user]
    padded = lambda i: (w_cand_padded, w_user_padded, e_cand_padded[i % copies], e_user_padded[i % copies], index)
    out = torch.empty(batch, m, n, device="cuda", dtype=dtype)

    def ours(single_launch, w_candidate=w_cand_padded, w_broadcast=w_user_padded):
        call = LceCall(batch, m, n, full_k_cand, users, full_k_user, w_candidate.stride(0), w_broadcast.stride(0))
        call.w_candidate, call.w_user = w_candidate.data_ptr(), w_broadcast.data_ptr()
        call.e_candidate, call.e_user = e_cand[0].data_ptr(), e_user[0].data_ptr()
        call.index, call.out = index.data_ptr(), out.data_ptr()
        call.is_fp16, call.single_launch = dtype == torch.float16, single_launch
        workspace_bytes = library.ikbo_lce(ctypes.byref(call))
        if workspace_bytes < 0:
            raise RuntimeError(library.ikbo_lce_error().decode())
        workspace = torch.empty(workspace_bytes, device="cuda", dtype=torch.uint8)
        call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()

        def run(i, keep=(workspace, w_candidate, w_broadcast)):
            call.e_candidate, call.e_user = e_cand[i % copies].data_ptr(), e_user[i % copies].data_ptr()
            call.stream = torch.cuda.current_stream().cuda_stream
            if library.ikbo_lce(ctypes.byref(call)) != 0:
                raise RuntimeError(library.ikbo_lce_error().decode())
            return out

        return run

    found = {"fused_ws": ours(1), "fused": ours(0)}
    if slow:
        w = torch.cat((w_user, w_cand), 1)
        joined = lambda i: torch.cat((e_user[i % copies].index_select(0, index), e_cand[i % copies]), 1)
        found["broadcast"] = lambda i: w @ joined(i)
        found["decomposed"] = lambda i: decomposed(w_cand, w_user, e_cand[i % copies], e_user[i % copies], index)
        found["fused_ws_unpadded_w"] = ours(1, w_cand, w_user)
    found["decomposed_padded"] = lambda i: decomposed(*padded(i))
    if "triton" in peers:
        found["triton"] = lambda i: peers["triton"](*padded(i))
    if "tlx" in peers and dtype == torch.float16 and n % 8 == 0:
        tlx, make_flag = peers["tlx"]
        flag = make_flag(w_user_padded, e_user_padded[0])
        found["tlx"] = lambda i: tlx(*padded(i), flag)
    # What is timed is also right: the first and last candidates against fp32. A peer that is not is left out.
    for some in (slice(0, 4), slice(max(0, batch - 4), batch)):
        expected = w_cand.float() @ e_cand[0][some].float() + w_user.float() @ e_user[0][index[some].long()].float()
        for name, call in list(found.items()):
            try:
                out.fill_(float("nan"))
                error = ((call(0)[some].float() - expected).norm() / expected.norm()).item()
            except Exception as reason:
                error = f"{type(reason).__name__} {str(reason)[:80]}"
            if not isinstance(error, float) or not error < 1e-2:
                assert not name.startswith("fused"), f"{name} is off by {error} at {shape}"
                print(f"   {name} left out: {error}", flush=True)
                del found[name]
    found["candidate_gemm_alone"] = lambda i: w_cand_padded @ e_cand_padded[i % copies]
    found["user_gemm_alone"] = lambda i: w_user_padded @ e_user_padded[i % copies]
    return found


def main():
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--json", required=True)
    parser.add_argument("--cases", choices=("main", "sweep", "all"), default="all")
    parser.add_argument("--seconds", type=float, default=300)
    options = parser.parse_args()
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    library = ctypes.CDLL(options.library)
    library.ikbo_lce.restype, library.ikbo_lce_error.restype = ctypes.c_int64, ctypes.c_char_p
    peers = load_peers(options.peers)
    result = {
        **origin("lce_peers"),
        "floor": {},
        "rows": [],
    }
    both = lambda **sizes: [Shape(dtype=dtype, **sizes) for dtype in TYPES]
    cases = both(batch=1024, ratio=70)
    if options.cases != "main":
        for batch in (10, 64, 128, 512, 1536, 2048, 2560, 3072):
            cases += both(batch=batch, ratio=70)
        for ratio in (2, 5, 10, 50, 100, 1000):
            cases += both(batch=1024, ratio=ratio)
        cases += both(batch=1024, ratio=70, n=255)
    if options.cases == "all":
        cases += other_shapes()
    prepare_all(options.peers, peers, cases)
    print(f"peers compiled after {time.monotonic() - started:.0f} s", flush=True)
    result["floor"] = floor()
    print(json.dumps(result["floor"]), flush=True)
    kinds = dict.fromkeys(("fused_ws", "fused", "fused_ws_unpadded_w"), "ours")
    kinds |= dict.fromkeys(("triton", "tlx", "candidate_gemm_alone", "user_gemm_alone"), "peer")
    for done, shape in enumerate(cases):
        if time.monotonic() - started > options.seconds:
            print(f"out of time: {len(cases) - done} cases left out", flush=True)
            break
        users = -(-shape.batch // shape.ratio)
        candidate, user = (2 * shape.m * shape.n * k for k in (shape.batch * shape.k_cand, users * shape.k_user))
        operations = {"candidate_gemm_alone": candidate, "user_gemm_alone": user}
        rounds = ROUNDS if (shape.m, shape.n) == (433, 256) else 5
        times = measure(contestants_of(library, peers, shape, slow=done < 2), rounds)
        case = {"B": shape.batch, "M": shape.m, "N": shape.n, "K_user": shape.k_user, "K_cand": shape.k_cand}
        case |= {"ratio": shape.ratio, "dtype": shape.dtype}
        for contestant, microseconds in times.items():
            result["rows"].append({
                "case": case,
                "name": contestant,
                "kind": kinds.get(contestant, "stage"),
                "us": round(microseconds, 3),
                "useful_tflops": round(operations.get(contestant, candidate + user) / microseconds * 1e-6, 2),
            })
        print(*case.values(), {k: round(v, 1) for k, v in times.items()}, flush=True)
        with open(options.json, "w") as file:
            file.write(json.dumps(result, indent=1) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
