#!/usr/bin/env python3
"""Target attention beside its peers in one process: cuDNN and flash attention through PyTorch, and the public kernels,
which are not part of this repository: --peers names a folder that holds the TLX kernel as `ikbo/ikbo/ops` (the folder
experimental/ikbo of pytorch/FBGEMM). TLX needs Meta's Triton fork, FlashAttention-3 the package fa3-fwd, in front on
PYTHONPATH. Peers work on rows packed by hand beforehand; that is not counted.

Time is on the device: calls are captured in CUDA graphs, every round replays each contestant once, and the median
counts. Ours includes grouping the candidates. Before anything is timed, small random cases, with NaN in everything that
must not be read, are compared with float64.

usage: attention_peers.py --library build/kernels/bench/libikbo_attention_c.so --json attention.json [--peers FOLDER]
         [--cases even,uneven,self,seeds,shapes] [--lengths 512,1024,...] [--types bf16,fp16] [--checks N]"""

import argparse
import ctypes
import json
import os
import random
import sys

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from device_time import floor, measure, origin

CANDIDATES, USERS, SEEDS, HEADS, DIM = 2048, 32, 64, 2, 128
ROUNDS = 9
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALAR_TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}


class AttentionCall(ctypes.Structure):
    _fields_ = [
        *[(n, ctypes.c_int64) for n in ("candidates", "seeds", "q_heads", "kv_heads", "head_dim", "users", "length")],
        ("scale", ctypes.c_double),
        *[(n, ctypes.c_void_p) for n in ("q", "k", "v", "candidate_to_user", "kv_lengths", "kv_offsets")],
        *[(n, ctypes.c_void_p) for n in ("out", "logsumexp", "workspace")],
        ("workspace_bytes", ctypes.c_int64),
        ("stream", ctypes.c_void_p),
        *[(n, ctypes.c_int32) for n in ("type", "generic")],
        *[(n, ctypes.c_void_p) for n in ("self_q", "self_out", "self_logsumexp")],
    ]


class Ours:
    """Calls of the library on fixed tensors; the results are in out and lse, and in self_out and self_lse."""

    kernels = None

    def __init__(self, q, k, v, index, lengths=None, offsets=None, generic=False, with_lse=False, q_self=None):
        candidates, seeds, q_heads, dim = q.shape
        self.keep = (q, k, v, index, lengths, offsets, q_self)
        sums = torch.float64 if q.dtype == torch.float64 else torch.float32
        poisoned = lambda like: (torch.full_like(like, 12345.0), like.new_full(like.shape[:-1], 777.0, dtype=sums))
        self.out, self.lse = poisoned(q)
        users = k.shape[0] if offsets is None else offsets.numel() - 1
        length = k.shape[1] if offsets is None else k.shape[0]
        call = self.call = AttentionCall(candidates, seeds, q_heads, k.shape[-2], dim, users, length, dim**-0.5)
        call.q, call.k, call.v, call.out = (t.data_ptr() for t in (q, k, v, self.out))
        call.logsumexp = self.lse.data_ptr() if with_lse else None
        call.candidate_to_user = index.data_ptr()
        call.kv_lengths = lengths.data_ptr() if lengths is not None else None
        call.kv_offsets = offsets.data_ptr() if offsets is not None else None
        if q_self is not None:
            self.self_out, self.self_lse = poisoned(q_self)
            call.self_q, call.self_out = q_self.data_ptr(), self.self_out.data_ptr()
            call.self_logsumexp = self.self_lse.data_ptr() if with_lse else None
        call.type, call.generic = SCALAR_TYPES[q.dtype], generic
        if not generic:
            size = self.checked(self.kernels.ikbo_attention(ctypes.byref(call)))
            self.workspace = torch.full((size,), 0xA5, device="cuda", dtype=torch.uint8)
            call.workspace, call.workspace_bytes = self.workspace.data_ptr(), size

    def checked(self, status):
        if status < 0:
            raise RuntimeError(self.kernels.ikbo_attention_error().decode())
        return status

    def __call__(self):
        self.call.stream = torch.cuda.current_stream().cuda_stream
        self.checked(self.kernels.ikbo_attention(ctypes.byref(self.call)))


def check_case(seed, generator):
    """One random problem against float64; returns what is wrong with it, or None."""
    pick = generator.choice
    dtype = pick((torch.bfloat16, torch.float16))
    dim = pick((128, 128, 128, 64, 32, 256, 8, 96, 192))
    kv_heads, group = pick((1, 2, 3)), pick((1, 1, 2, 4))
    seeds = pick((1, 2, 3, 5, 32, 64, 100))
    users, candidates = pick((1, 2, 7, 40)), pick((1, 3, 20, 150))
    longest = pick((1, 7, 64, 127, 128, 129, 300, 777, 1500))
    what = f"seed {seed}: {dtype} B {candidates} S {seeds} H {kv_heads}x{group} D {dim} U {users} L {longest}"
    draw = torch.Generator("cuda").manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, device="cuda", generator=draw)
    q = (randn(candidates, seeds, kv_heads * group, dim) * pick((1, 1, 4))).to(dtype)
    lengths = torch.randint(0, longest + 1, (users,), device="cuda", generator=draw, dtype=torch.int32)
    lengths[generator.randrange(users)] = pick((longest, 0))
    index = torch.randint(0, users, (candidates,), device="cuda", generator=draw, dtype=torch.int32)
    if pick((0, 0, 1)):
        index = index.sort().values.contiguous()
    if pick((0, 0, 1)):
        index[generator.randrange(candidates)] = pick((-1, users, 2**31 - 1))
    if pick((0, 1)):  # packed
        gap = pick((0, 3))
        offsets = torch.zeros(users + 1, device="cuda", dtype=torch.int32)
        offsets[1:] = lengths.cumsum(0)
        k, v = (randn(int(offsets[-1]) + gap, kv_heads, dim).to(dtype) for _ in range(2))
        k[offsets[-1] :], v[offsets[-1] :] = float("nan"), float("nan")
        poisoned = generator.randrange(users)  # nothing of one user may reach another
        v[offsets[poisoned] : offsets[poisoned + 1]] = float("nan")
        if k.numel() == 0:
            return None
        arguments = dict(offsets=offsets)
    else:
        k, v = (randn(users, longest, kv_heads, dim).to(dtype) for _ in range(2))
        beyond = torch.arange(longest, device="cuda")[None] >= lengths[:, None]
        k[beyond], v[beyond] = float("nan"), float("nan")
        arguments = dict(lengths=lengths)
    shape = (*k.shape[:-2], kv_heads * group, dim)
    q_self = randn(*shape).to(dtype)
    nobody = beyond if "lengths" in arguments else torch.arange(len(k), device="cuda") >= offsets[-1]
    q_self[nobody] = float("nan")
    ours = Ours(q, k, v, index, with_lse=True, q_self=q_self, **arguments)
    ours()
    first = [t.clone() for t in (ours.out, ours.lse, ours.self_out, ours.self_lse)]
    for tensor in (ours.out, ours.lse, ours.self_out, ours.self_lse):
        tensor.fill_(54321.0)
    ours()
    alone = Ours(q, k, v, index, with_lse=True, **arguments)
    alone()
    wide = lambda *tensors: [t.double() for t in tensors]
    reference = Ours(*wide(q, k, v), index, generic=True, with_lse=True, **arguments)
    reference()
    # A row of a history is a candidate's only seed; rows of no history are nobody's.
    rows = torch.arange(nobody.numel(), device="cuda", dtype=torch.int32)
    owner = rows // longest if "lengths" in arguments else torch.searchsorted(offsets, rows, right=True) - 1
    owner = torch.where(nobody.flatten(), -1, owner).int()
    of_self = Ours(*wide(q_self.view(-1, 1, *shape[-2:]), k, v), owner, generic=True, with_lse=True, **arguments)
    of_self()
    torch.cuda.synchronize()
    of_self.out[owner < 0], of_self.lse[owner < 0] = 0, -float("inf")
    bits = lambda t: t.view(torch.int16)
    for a, b in zip(first, (ours.out, ours.lse, ours.self_out, ours.self_lse)):
        if not torch.equal(bits(a), bits(b)):
            return what + ": two runs differ"
    if not torch.equal(bits(alone.out), bits(ours.out)) or not torch.equal(bits(alone.lse), bits(ours.lse)):
        return what + ": self-attention changes target attention"
    expected = (reference.out, reference.lse, of_self.out.view(shape), of_self.lse.view(shape[:-1]))
    for name, got, expected in zip(("out", "lse", "self_out", "self_lse"), first, expected):
        got = got.double()
        if not torch.equal(got.isnan(), expected.isnan()):
            return f"{what}: {name}: {int((got.isnan() != expected.isnan()).sum())} wrong NaN"
        if not torch.equal(got.isinf(), expected.isinf()):
            return f"{what}: {name}: wrong infinities"
        if not got.numel():
            continue
        error = torch.where(expected.isfinite(), (got - expected).abs(), 0)
        largest = expected.abs().nan_to_num(0, 0, 0)
        if name.endswith("lse"):
            allowed = 1e-5 * (10 + largest)
        else:  # one rounding of the result, and those of the weights, which are of 16 bits
            allowed = (2**-8 if dtype == torch.bfloat16 else 2**-11) * (largest + 4 * (largest.max() * 0.1 + 0.02))
        if (error > allowed).any():
            return f"{what}: {name} is off by {error.max().item()}"
    return None


def check(count):
    seed = int.from_bytes(os.urandom(3), "little")
    wrong = []
    for i in range(count):
        found = check_case(seed + i, random.Random(seed + i))
        if found:
            wrong.append(found)
            print("WRONG", found, flush=True)
            assert len(wrong) < 8, "too much is wrong"
    print(f"{count} random cases, {len(wrong)} wrong", flush=True)
    # A candidate's bits do not depend on the batch.
    q = torch.randn(300, 5, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(4, 500, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    index = torch.randint(0, 4, (300,), device="cuda", dtype=torch.int32)
    all_of_them = Ours(q, k, v, index)
    all_of_them()
    for b in (0, 17, 299):
        alone = Ours(q[b : b + 1].contiguous(), k, v, index[b : b + 1].contiguous())
        alone()
        torch.cuda.synchronize()
        assert torch.equal(alone.out[0], all_of_them.out[b]), "a candidate depends on its batch"
    assert not wrong


def load_peers(folder):
    peers = {}
    try:
        import fa3_fwd_interface

        peers["fa3"] = fa3_fwd_interface
    except Exception as error:
        print("no FlashAttention-3:", type(error).__name__, str(error)[:120], flush=True)
    try:
        sys.path.insert(0, os.path.join(folder, "ikbo"))
        from ikbo.ops.tlx_ikbo_fa_ws import tlx_flash_attn_ikbo_tma_persistent

        peers["tlx"] = tlx_flash_attn_ikbo_tma_persistent
    except Exception as error:
        print("no TLX peer:", type(error).__name__, str(error)[:120], flush=True)
    return peers


def with_cudnn(call):
    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            call()

    return run


def even(peers, dtype, length, candidates=CANDIDATES, users=USERS, seeds=SEEDS, heads=HEADS, dim=DIM):
    """Equal numbers of candidates and lengths, sorted: what every peer can do."""
    each = candidates // users
    q = torch.randn(candidates, seeds, heads, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(users, length, heads, dim, device="cuda", dtype=dtype) for _ in range(2))
    index = (torch.arange(candidates, device="cuda") // each).int()
    found = {"ikbo": Ours(q, k, v, index)}
    packed = q.view(users, each * seeds, heads, dim)
    qp, kp, vp = (t.transpose(1, 2) for t in (packed, k, v))
    found["cudnn_packed"] = with_cudnn(lambda: F.scaled_dot_product_attention(qp, kp, vp))
    if "fa3" in peers and dtype == torch.bfloat16:
        found["fa3_packed"] = lambda: peers["fa3"].flash_attn_func(packed, k, v)
    standard = (candidates, seeds, dim) == (CANDIDATES, SEEDS, DIM)
    if "tlx" in peers and standard:
        grid = torch.arange(0, candidates, 2, device="cuda", dtype=torch.int32)
        flat = lambda t: t.view(-1, heads, dim)
        found["tlx"] = lambda: peers["tlx"](flat(q), flat(k), flat(v), index, seeds, length, grid)
    if standard and length in (1024, 2048) and peers:
        chosen = index.long()
        copy = lambda t: t.index_select(0, chosen).transpose(1, 2)
        qs = q.transpose(1, 2)
        found["broadcast_cudnn"] = with_cudnn(lambda: F.scaled_dot_product_attention(qs, copy(k), copy(v)))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(qp[:1, :, :2048].double(), kp[:1].double(), vp[:1].double())
    found["ikbo"]()
    of = lambda out: out.view(users, each * seeds, heads, dim)[0, :2048].transpose(0, 1).double()
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        theirs = F.scaled_dot_product_attention(qp, kp, vp)[0, :, :2048].double()
    errors = {"ikbo": of(found["ikbo"].out) - exact[0], "cudnn": theirs - exact[0]}
    print("  error rms, max:", {n: (f"{e.square().mean().sqrt():.4e}", f"{e.abs().max():.4e}") for n, e in errors.items()})
    return found, 4 * candidates * seeds * heads * dim * length


def uneven(peers, dtype, length):
    """1 to 127 candidates a user, lengths 0 to twice the mean, unsorted."""
    counts = torch.randint(1, 128, (USERS,), device="cuda")
    lengths = torch.randint(0, 2 * length + 1, (USERS,), device="cuda", dtype=torch.int32)
    index = torch.repeat_interleave(torch.arange(USERS, device="cuda"), counts)
    order = torch.randperm(index.numel(), device="cuda")
    index = index[order].int().contiguous()
    q = torch.randn(index.numel(), SEEDS, HEADS, DIM, device="cuda", dtype=dtype)
    k, v = (torch.randn(USERS, 2 * length, HEADS, DIM, device="cuda", dtype=dtype) for _ in range(2))
    ours = Ours(q, k, v, index, lengths=lengths)
    found = {"ikbo": ours}
    if "fa3" in peers and dtype == torch.bfloat16:
        valid = torch.arange(2 * length, device="cuda")[None] < lengths[:, None]
        kp, vp = k[valid], v[valid]
        qp = q[index.sort(stable=True).indices].view(-1, HEADS, DIM)
        ends = lambda t: F.pad(t.cumsum(0), (1, 0)).int()
        cq, ck = ends(counts * SEEDS), ends(lengths)
        most_q, most_k = int(counts.max()) * SEEDS, int(lengths.max())
        found["fa3_varlen"] = lambda: peers["fa3"].flash_attn_varlen_func(qp, kp, vp, cq, ck, most_q, most_k)
    return found, 4 * SEEDS * HEADS * DIM * int(lengths[index.long()].long().sum())


def with_self(peers, dtype, length):
    """The even case, and beside it every row of the histories over its own: in one launch and in two."""
    q = torch.randn(CANDIDATES, SEEDS, HEADS, DIM, device="cuda", dtype=dtype)
    q_self, k, v = (torch.randn(USERS, length, HEADS, DIM, device="cuda", dtype=dtype) for _ in range(3))
    users = torch.arange(USERS, device="cuda", dtype=torch.int32)
    index = users.repeat_interleave(CANDIDATES // USERS)
    target, alone = Ours(q, k, v, index), Ours(q_self, k, v, users)
    found = {"ikbo": Ours(q, k, v, index, q_self=q_self), "two_launches": lambda: (target(), alone())}
    for call in found.values():
        call()
    assert torch.equal(found["ikbo"].out, target.out) and torch.equal(found["ikbo"].self_out, alone.out)
    return found, 4 * (CANDIDATES * SEEDS + USERS * length) * HEADS * DIM * length


def cases_of(kinds, lengths):
    """Case name, its description, and what makes its contestants."""
    base = {"B": CANDIDATES, "users": USERS, "n_seed": SEEDS, "H": HEADS, "D": DIM}
    for length in lengths:
        if "even" in kinds:
            yield "even", {**base, "L": length}, lambda peers, dtype, l=length: even(peers, dtype, l)
        if "uneven" in kinds:
            yield "uneven", {**base, "L": length}, lambda peers, dtype, l=length: uneven(peers, dtype, l)
        if "self" in kinds:
            yield "self", {**base, "L": length}, lambda peers, dtype, l=length: with_self(peers, dtype, l)
    shapes = []
    if "seeds" in kinds:
        shapes += [(CANDIDATES * SEEDS // s // USERS * USERS, USERS, s, 1024, 2, 128) for s in (1, 4, 16, 32, 48, 100)]
    if "shapes" in kinds:
        shapes += [(10, 1, 64, 16384, 2, 128), (10000, 1, 64, 1024, 2, 128), (80, 8, 64, 256, 2, 128)]
        shapes += [(2048, 32, 64, 1024, 4, 64), (2048, 32, 64, 1024, 1, 256)]
    for candidates, users, seeds, length, heads, dim in shapes:
        case = {"B": candidates, "users": users, "n_seed": seeds, "H": heads, "D": dim, "L": length}
        make = lambda peers, dtype, a=(length, candidates, users, seeds, heads, dim): even(peers, dtype, *a)
        yield "shapes", case, make


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", dest="kernels", required=True)
    parser.add_argument("--peers", default="")
    parser.add_argument("--json", required=True)
    parser.add_argument("--cases", default="even,uneven,self,seeds,shapes")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--types", default="bf16,fp16")
    parser.add_argument("--checks", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    Ours.kernels = ctypes.CDLL(options.kernels)
    Ours.kernels.ikbo_attention.restype, Ours.kernels.ikbo_attention_error.restype = ctypes.c_int64, ctypes.c_char_p
    check(options.checks)
    peers = load_peers(options.peers) if options.peers else {}
    result = {
        **origin("attention"),
        "floor": floor(),
        "rows": [],
    }
    print(json.dumps(result["floor"]), flush=True)
    for kind, case, make in cases_of(options.cases.split(","), [int(l) for l in options.lengths.split(",")]):
        for name in options.types.split(","):
            contestants, operations = make(peers, TYPES[name])
            times = measure({n: lambda i, call=call: call() for n, call in contestants.items()}, ROUNDS)
            rates = {contestant: operations / time * 1e-6 for contestant, time in times.items()}
            for contestant, time in times.items():
                result["rows"].append({
                    "case": {**case, "dtype": name, "kind": kind},
                    "name": contestant,
                    "kind": {"ikbo": "ours", "two_launches": "stage"}.get(contestant, "peer"),
                    "us": round(time, 2),
                    "useful_tflops": round(rates[contestant], 1),
                })
            print(kind, name, case, {c: (round(times[c], 1), round(r)) for c, r in rates.items()}, flush=True)
            with open(options.json, "w") as file:
                file.write(json.dumps(result, indent=1) + "\n")
            del contestants
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
