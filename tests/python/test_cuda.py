"""What only a GPU shows: streams, CUDA graphs, indices that are wrong on the device, sizes beyond a grid's limits, two
GPUs, and the runtime on CUDA. The operators' own tests run on a GPU with IKBO_TEST_DEVICE=cuda."""

import json
import os
import subprocess

import pytest
import torch

import ikbo
from conftest import DEVICE, make_linear_case

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU and IKBO_TEST_DEVICE=cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def compression(batch, users, index, dtype, m=48, k=24, k_user=40, n=64):
    random = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    return (random(m, k), random(batch, k, n), [random(m, k_user)], [random(users, k_user, n)], [index])


def attention(batch, users, index, dtype, seeds=5, length=70, heads=2, dim=64):
    random = lambda *shape: torch.randn(*shape).to(dtype)  # noqa: E731
    return (random(batch, seeds, heads, dim), random(users, length, heads, dim), random(users, length, heads, dim), index)


def every_operator(index, users, dtype, lengths=None, offsets=None):
    """Operators on one mapping, as functions that read their inputs when called."""
    batch = len(index)
    x = torch.randn(users, 7).to(dtype)
    case = make_linear_case(batch, 24, 33, (users,), dtype=dtype, activation="silu")
    case.index[0] = index
    stack = compression(batch, users, index, dtype)
    history = attention(batch, users, index, dtype)
    q_self = torch.randn_like(history[1])
    calls = {
        "broadcast": lambda: torch.ops.ikbo.broadcast(x, index),
        "linear": case.run,
        "linear_compression": lambda: torch.ops.ikbo.linear_compression(*stack),
        "target_attention": lambda: torch.ops.ikbo.target_attention(*history, kv_lengths=lengths),
        "self_and_target_attention": lambda: torch.ops.ikbo.self_and_target_attention(
            q_self, *history, kv_lengths=lengths
        )[1],
    }
    if offsets is not None:
        q, k, v, _ = history
        calls["packed"] = lambda: torch.ops.ikbo.target_attention(
            q, k.flatten(0, 1), v.flatten(0, 1), index, kv_offsets=offsets
        )
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_index_gives_nan_for_its_candidate_alone(dtype):
    index = integers(0, 2, -1, 1, 3, 2, 2**31 - 1, 0, -(2**31))
    wrong = (index < 0) | (index >= 3)
    for name, call in every_operator(index, 3, dtype).items():
        out = call()
        assert out[wrong].isnan().all(), name
        assert out[~wrong].isfinite().all(), name
        index_before = index.clone()
        index.clamp_(0, 2)
        assert torch.equal(call()[~wrong], out[~wrong]), name
        index.copy_(index_before)
    torch.cuda.synchronize()
    whole = torch.ops.ikbo.broadcast(torch.arange(6).reshape(3, 2) + 5, index)
    assert (whole[wrong] == 0).all() and (whole[~wrong] >= 5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_wrong_lengths_and_offsets_read_nothing_outside(dtype):
    index = torch.randint(4, (30,), dtype=torch.int32)
    q, k, v, _ = attention(30, 4, index, dtype, length=6)
    lengths = integers(-3, 99, 2, 6)
    expected = torch.ops.ikbo.target_attention(q, k, v, index, kv_lengths=lengths.clamp(0, 6))
    assert torch.equal(torch.ops.ikbo.target_attention(q, k, v, index, kv_lengths=lengths), expected)
    out = torch.ops.ikbo.target_attention(
        q, k.flatten(0, 1), v.flatten(0, 1), index, kv_offsets=integers(-5, 3, 1, 1000, 7)
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_runs_on_the_callers_stream(dtype):
    index = torch.randint(4, (50,), dtype=torch.int32)
    other = index.clone()
    index.zero_()
    stream = torch.cuda.Stream()
    for name, call in every_operator(index, 4, dtype).items():
        index.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # 10 ms: whatever runs on another stream finds the index before this copy
            index.copy_(other)
            late = call()
        stream.synchronize()
        assert torch.equal(late, call()), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_serves_any_mapping_and_lengths(dtype):
    index = torch.randint(5, (60,), dtype=torch.int32)
    lengths = torch.randint(71, (5,), dtype=torch.int32)
    offsets = torch.zeros(6, dtype=torch.int32)

    def draw():
        index.copy_(torch.randint(5, (60,), dtype=torch.int32))
        lengths.copy_(torch.randint(71, (5,), dtype=torch.int32))
        offsets.copy_(torch.cat([integers(0), torch.randint(71, (5,)).cumsum(0).int()]))

    for name, call in every_operator(index, 5, dtype, lengths, offsets).items():
        draw()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            call()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for _ in range(5):
            draw()
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, call()), name


def test_nothing_is_read_on_the_host():
    index = torch.randint(4, (30,), dtype=torch.int32)
    lengths = torch.randint(71, (4,), dtype=torch.int32)
    offsets = integers(0, 10, 10, 100, 280)
    calls = every_operator(index, 4, torch.float32, lengths, offsets)
    x = torch.randn(4, 7, requires_grad=True)
    case = make_linear_case(30, 6, 5, (4,), dtype=torch.float32, activation="gelu").requires_grad()
    stack = [t.requires_grad_() if torch.is_tensor(t) else t for t in compression(30, 4, index, torch.float32)]
    history = [t.requires_grad_() for t in attention(30, 4, index, torch.float32)[:3]]
    sums = [
        lambda: torch.ops.ikbo.broadcast(x, index).sum(),
        lambda: torch.ops.ikbo.aligned_cat([x, x], 0).sum(),
        lambda: case.run().sum(),
        lambda: torch.ops.ikbo.linear_compression(*stack).sum(),
        lambda: torch.ops.ikbo.target_attention(*history, index, kv_lengths=lengths).sum(),
    ]
    for call in [*calls.values(), *sums]:
        call()  # libraries set themselves up
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls.values():
            call()
        for call in sums:
            call().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_candidates_users_and_tiles_than_a_grid_has_rows(dtype):
    batch, users = 70_000, 66_000
    index = torch.randint(users, (batch,), dtype=torch.int32)
    x = torch.randn(users, 3).to(dtype)
    assert torch.equal(torch.ops.ikbo.broadcast(x, index), x[index.long()])
    case = make_linear_case(batch, 3, 2, (users,), (2,), dtype=dtype)
    wanted = torch.cat([torch.arange(5), torch.arange(batch - 5, batch)])
    torch.testing.assert_close(case.run()[wanted].double(), case.select(wanted).broadcast_form(), rtol=1e-2, atol=1e-2)
    stack = compression(batch, users, index, dtype, 8, 3, 2, 8)
    out = torch.ops.ikbo.linear_compression(*stack)[wanted].double()
    w_cand, e_cand, (w_user,), (e_user,), _ = stack
    expected = w_cand.double() @ e_cand[wanted].double() + w_user.double() @ e_user[index[wanted].long()].double()
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    q, k, v, _ = attention(batch, users, index, dtype, 1, 3, 1, 8)
    out = torch.ops.ikbo.target_attention(q, k, v, index)[wanted].double()
    rows = [t[index[wanted].long()].double().transpose(1, 2) for t in (k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(q[wanted].double().transpose(1, 2), *rows)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad(torch.ops.ikbo.target_attention(*(t.requires_grad_() for t in (q, k, v)), index).sum(), v)
    assert grads[0].isfinite().all()


def launches(call):
    """Names of the kernels that a call runs."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [7, 10, 255])
def test_stacks_with_aligned_rows_are_read_in_place(dtype, n):
    index = torch.randint(3, (40,), dtype=torch.int32)
    w_cand, w_user = torch.randn(48, 24).to(dtype), torch.randn(48, 40).to(dtype)
    pieces = [torch.randn(40, 12, n).to(dtype) for _ in range(2)]
    pieces_user = [torch.randn(3, 20, n).to(dtype) for _ in range(2)]
    runs = {}
    for cat in (torch.cat, torch.ops.ikbo.aligned_cat):
        stacks = cat(pieces, 1), cat(pieces_user, 1)
        call = lambda: torch.ops.ikbo.linear_compression(w_cand, stacks[0], [w_user], [stacks[1]], [index])  # noqa: B023, E731
        runs[cat] = call(), launches(call)
    (plain, with_copy), (aligned, in_place) = runs.values()
    assert torch.equal(plain, aligned)
    assert any("align_rows" in name for name in with_copy), with_copy
    assert len(in_place) == 1, in_place
    assert len(launches(lambda: torch.ops.ikbo.aligned_cat(pieces, 1))) == 1


def test_aligned_cat_of_more_than_2_to_the_31_elements():
    pieces = [torch.randint(100, (70_000, k, 10_001), dtype=torch.int8) for k in (1, 3)]
    out = torch.ops.ikbo.aligned_cat(pieces, 1)
    assert out.numel() > 2**31 and out.stride() == (4 * 10_016, 10_016, 1)
    assert torch.equal(out[:, :1], pieces[0]) and torch.equal(out[:, 1:], pieces[1])


def test_more_than_2_to_the_31_elements():
    index = torch.randint(3, (70_000,), dtype=torch.int32)
    x = torch.randn(3, 32_768).bfloat16()
    out = torch.ops.ikbo.broadcast(x, index)
    assert out.numel() > 2**31
    for b in (0, 65_535, 65_536, 69_999):
        assert torch.equal(out[b], x[index[b]])
    del out
    w_cand, w_user = torch.randn(512, 2).bfloat16(), torch.randn(512, 3).bfloat16()
    e_cand, e_user = torch.randn(17_000, 2, 256).bfloat16(), torch.randn(3, 3, 256).bfloat16()
    index = index[:17_000].contiguous()
    out = torch.ops.ikbo.linear_compression(w_cand, e_cand, [w_user], [e_user], [index])
    assert out.numel() > 2**31
    for b in (0, 16_383, 16_384, 16_999):
        expected = w_cand.double() @ e_cand[b].double() + w_user.double() @ e_user[index[b]].double()
        torch.testing.assert_close(out[b].double(), expected, rtol=2e-2, atol=2e-2)


@two_gpus
@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_on_another_gpu_than_the_current_one(dtype):
    index = torch.randint(4, (50,), dtype=torch.int32)
    assert torch.cuda.current_device() == 0
    for name, call in every_operator(index, 4, dtype).items():
        torch.manual_seed(1)
        here = every_operator(index, 4, dtype)[name]()
        with torch.device("cuda:1"):
            torch.manual_seed(1)
            there = every_operator(index.to("cuda:1"), 4, dtype)[name]()
        assert there.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
        torch.testing.assert_close(there.cpu().isfinite(), torch.ones_like(there.cpu(), dtype=torch.bool))
        assert there.shape == here.shape, name
    on_both = make_linear_case(50, 24, 33, (4,), dtype=dtype)
    here = on_both.run()
    moved = [a.to("cuda:1") if torch.is_tensor(a) else a for a in on_both.args]
    moved = [[t.to("cuda:1") for t in a] if isinstance(a, list) else a for a in moved]
    assert torch.equal(torch.ops.ikbo.linear(*moved).to("cuda:0"), here)
    stack = compression(50, 4, index, dtype)
    moved = [[t.to("cuda:1") for t in a] if isinstance(a, list) else a.to("cuda:1") for a in stack]
    assert torch.equal(torch.ops.ikbo.linear_compression(*moved).to("cuda:0"), torch.ops.ikbo.linear_compression(*stack))
    history = attention(50, 4, index, dtype)
    moved = [t.to("cuda:1") for t in history]
    assert torch.equal(torch.ops.ikbo.target_attention(*moved).to("cuda:0"), torch.ops.ikbo.target_attention(*history))


@two_gpus
def test_inputs_on_different_gpus_are_refused():
    with pytest.raises(ValueError, match="candidate_to_user is on cuda:0, expected cuda:1, where x_user is"):
        torch.ops.ikbo.broadcast(torch.randn(3, 2, device="cuda:1"), integers(0, 1).to("cuda:0"))


def test_inputs_on_the_cpu_and_on_a_gpu_are_refused():
    with pytest.raises((ValueError, RuntimeError), match="is on cpu, expected cuda:0"):
        ikbo.broadcast(torch.randn(3, 2), integers(0, 1).cpu())


class Ranker(torch.nn.Module):
    """A made-up model of embeddings, a history and a tower."""

    def __init__(self):
        super().__init__()
        self.items = torch.nn.Embedding(50, 16)
        self.tower = torch.nn.Sequential(torch.nn.Linear(16 * 2 + 4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def forward(self, user_history, user_dense, item):
        mask = (user_history > 0).unsqueeze(-1)
        history = (self.items(user_history) * mask).sum(1) + torch.arange(16, dtype=torch.float32)
        return self.tower(torch.cat([history, user_dense, self.items(item)], 1)).squeeze(1).sigmoid()


@pytest.fixture
def archives(tmp_path):
    torch.set_default_device(None)
    model = Ranker().eval()
    example = (torch.randint(50, (4, 6)), torch.randn(4, 4), torch.randint(50, (4,)))
    batch = torch.export.Dim("batch")
    dynamic = {name: {0: batch} for name in ("user_history", "user_dense", "item")}
    program = torch.export.export(model, example, dynamic_shapes=dynamic)
    torch.export.save(program.run_decompositions({}), tmp_path / "ranker.pt2")
    command("transform", tmp_path / "ranker.pt2", "--request-only", "user_*", "-o", tmp_path / "ranker.ikbo.pt2")
    return tmp_path


def command(*arguments):
    done = subprocess.run([os.environ["IKBO"], *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_verify_and_score_on_a_gpu(archives):
    original, transformed = archives / "ranker.pt2", archives / "ranker.ikbo.pt2"
    shown = json.loads(command("verify", original, transformed, "--device", "cuda", "--json"))
    assert shown["passed"] and shown["float64"]
    requests = {"requests": [
        {"id": "a", "user": {"user_history": [3, 9, 0, 0, 0, 0], "user_dense": [0.5, 1, -1, 2]}, "candidates": {"item": [4, 5, 6]}},
        {"id": "b", "user": {"user_history": [1, 2, 3, 4, 5, 6], "user_dense": [0, 1, 0, 1]}, "candidates": {"item": [7]}},
    ]}  # fmt: skip
    (archives / "requests.json").write_text(json.dumps(requests))
    scores = {}
    for device in ("cpu", "cuda"):
        out = archives / f"{device}.json"
        command("score", transformed, "--requests", archives / "requests.json", "--device", device, "-o", out)
        scores[device] = [[x for x in torch.tensor(r["scores"]).flatten().tolist()] for r in json.loads(out.read_text())["requests"]]
    for a, b in zip(scores["cpu"], scores["cuda"]):
        assert a == pytest.approx(b, abs=1e-6)


def test_bench_on_a_gpu(archives):
    shown = command(
        "bench", "model", archives / "ranker.pt2", "--request-only", "user_*", "--device", "cuda", "--seconds", "0.2", "--json"
    )
    rows = json.loads(shown)["rows"]
    assert [row["name"] for row in rows] == ["broadcast", "split", "ikbo"] and all(row["us"] > 0 for row in rows)


def test_a_gpu_that_is_not_there_is_named(archives):
    done = subprocess.run(
        [os.environ["IKBO"], "verify", archives / "ranker.pt2", archives / "ranker.ikbo.pt2", "--device", "cuda:99"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "device 'cuda:99': there " in done.stderr
