"""ikbo::target_attention against plain attention a candidate, in float64: values, bits, gradients, shapes, errors."""

import dataclasses
import itertools
import re
from typing import Optional

import pytest
import torch

import ikbo
from attention_checks import attend_inputs, check_export
from conftest import DEVICE, cpu_only

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
if DEVICE != "cpu":  # the matrix unit takes the weights rounded to 16 bits, which costs as much again
    TOLERANCE.update({torch.bfloat16: 2**-7, torch.float16: 2**-10})


@dataclasses.dataclass
class Case:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    candidate_to_user: torch.Tensor
    kv_lengths: Optional[torch.Tensor] = None
    kv_offsets: Optional[torch.Tensor] = None
    scale: Optional[float] = None

    @property
    def options(self):
        return {"kv_lengths": self.kv_lengths, "kv_offsets": self.kv_offsets, "scale": self.scale}

    @property
    def args(self):
        return (self.q, self.k, self.v, self.candidate_to_user)

    @property
    def float_tensors(self):
        return (self.q, self.k, self.v)

    def run(self):
        return torch.ops.ikbo.target_attention(*self.args, **self.options)

    def run_lse(self):
        return torch.ops.ikbo.target_attention_lse(*self.args, **self.options)

    def history(self, user):
        if self.kv_offsets is not None:
            begin, end = self.kv_offsets[user : user + 2].tolist()
            return self.k[begin:end], self.v[begin:end]
        length = self.k.shape[1] if self.kv_lengths is None else int(self.kv_lengths[user])
        return self.k[user, :length], self.v[user, :length]

    def plain(self):
        """Attention of each candidate alone, written out, in float64: (out, logsumexp)."""
        outs, sums = [], []
        scale = self.q.shape[3] ** -0.5 if self.scale is None else self.scale
        for row, user in zip(self.q.double(), self.candidate_to_user.tolist()):
            k, v = (t.double().repeat_interleave(self.q.shape[2] // self.k.shape[-2], 1) for t in self.history(user))
            logits = torch.einsum("shd,lhd->shl", row, k) * scale
            sums.append(logits.logsumexp(-1))
            outs.append(torch.einsum("shl,lhd->shd", logits.softmax(-1), v))
        empty = self.q.double()[:0]
        return torch.stack(outs) if outs else empty, torch.stack(sums) if sums else empty[..., 0]

    def in_float64(self):
        """The same values, as leaves of their own."""
        return dataclasses.replace(self, **{name: getattr(self, name).detach().double() for name in "qkv"})

    def select(self, candidates):
        return dataclasses.replace(self, q=self.q[candidates], candidate_to_user=self.candidate_to_user[candidates])

    def requires_grad(self):
        for tensor in self.float_tensors:
            tensor.requires_grad_()
        return self


def make_case(batch, users, seeds, length, heads=(2, 2), dim=8, dtype=torch.float64, lengths="padded"):
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype)  # noqa: E731
    index = torch.randint(users, (batch,), dtype=torch.int32) if batch else torch.zeros(0, dtype=torch.int32)
    q = random(batch, seeds, heads[0], dim)
    if lengths == "packed":
        sizes = torch.randint(length + 1, (users,))
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int() + 3
        rows = int(offsets[-1]) + 4  # rows of nobody in front and behind
        return Case(q, random(rows, heads[1], dim), random(rows, heads[1], dim), index, kv_offsets=offsets)
    kv_lengths = torch.randint(length + 1, (users,), dtype=torch.int32) if lengths == "padded" else None
    return Case(q, random(users, length, heads[1], dim), random(users, length, heads[1], dim), index, kv_lengths)


def assert_close(actual, expected, dtype, factor=1.0):
    assert actual.dtype == dtype and actual.shape == expected.shape
    same = (actual.double() == expected) | (actual.double() - expected).abs().le(
        TOLERANCE[dtype] * factor * 1.001 * expected.abs().clamp(min=1)
    )
    assert same.all(), (actual.double() - expected).abs().max()


SHAPES = [
    # batch, users, seeds, length, heads, dim
    (1, 1, 1, 1, (1, 1), 1),
    (13, 3, 8, 40, (2, 2), 32),
    (50, 4, 5, 700, (4, 2), 24),  # several blocks of keys; grouped heads
    (40, 2, 64, 33, (6, 1), 7),  # several blocks of rows
    (9, 9, 3, 257, (2, 2), 65),
    (5, 60, 2, 12, (1, 1), 16),  # more users than candidates
    (6, 2, 4, 0, (2, 2), 8),  # no history at all
]


@pytest.mark.parametrize("lengths", ["none", "padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_plain_attention(shape, dtype, lengths):
    case = make_case(*shape, dtype=dtype, lengths=lengths)
    out, logsumexp = case.run_lse()
    expected, expected_sum = case.plain()
    assert out.is_contiguous() and logsumexp.is_contiguous()
    assert_close(out, expected, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_close(logsumexp, expected_sum, wide, factor=4)
    assert torch.equal(case.run(), out)


@pytest.mark.parametrize("seeds,length,batch,users", list(itertools.product([1, 3], [1, 2], [0, 1, 4], [1, 2])))
def test_small_sizes(seeds, length, batch, users):
    for lengths in ("none", "padded", "packed"):
        case = make_case(batch, users, seeds, length, dim=3, lengths=lengths)
        out, logsumexp = case.run_lse()
        expected, expected_sum = case.plain()
        assert_close(out, expected, torch.float64)
        assert_close(logsumexp, expected_sum, torch.float64, factor=4)


def test_no_users_and_no_candidates():
    case = make_case(0, 2, 3, 5)
    none = Case(case.q, case.k[:0], case.v[:0], case.candidate_to_user)
    assert none.run().shape == (0, 3, 2, 8)
    packed = Case(case.q, case.k[0, :0], case.v[0, :0], case.candidate_to_user, kv_offsets=torch.zeros(1).int())
    assert packed.run().shape == (0, 3, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_users_without_history_give_zeros(dtype):
    case = make_case(20, 4, 3, 9, dtype=dtype)
    case.kv_lengths[:] = torch.tensor([0, 9, 0, 4])
    out, logsumexp = case.run_lse()
    empty = (case.candidate_to_user % 2) == 0
    assert (out[empty] == 0).all() and (logsumexp[empty] == -float("inf")).all()
    assert out[~empty].ne(0).any() and logsumexp[~empty].isfinite().all()
    case.kv_lengths[:] = 0
    assert (case.run() == 0).all()


@pytest.mark.parametrize("lengths", ["padded", "packed"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beyond_a_history_and_of_unused_users_are_never_read(lengths, poison, dtype):
    case = make_case(30, 6, 4, 300, dtype=dtype, lengths=lengths)
    case.candidate_to_user[:] = case.candidate_to_user % 3 + 1
    clean = case.run_lse()
    kept = torch.zeros(case.k.shape[:-2], dtype=torch.bool)
    for user in (1, 2, 3):
        if lengths == "packed":
            kept[int(case.kv_offsets[user]) : int(case.kv_offsets[user + 1])] = True
        else:
            kept[user, : int(case.kv_lengths[user])] = True
    case.k[~kept] = poison
    case.v[~kept] = poison
    for a, b in zip(clean, case.run_lse()):
        assert torch.equal(a, b)
    assert clean[0].isfinite().all()


def test_nan_of_one_candidate_or_user_stays_there():
    case = make_case(24, 4, 2, 10, lengths="none")
    case.q[3, 1, 0, 2] = float("nan")
    case.k[1, 4, 1, 0] = float("nan")
    out, expected = case.run(), case.plain()[0]
    assert torch.equal(out.isnan(), expected.isnan())
    assert out.isnan().any() and not out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e4, 1e5, -1e5])
def test_extreme_logits_give_the_limit_of_the_softmax(dtype, size):
    if dtype == torch.float16 and abs(size) > 6e4:
        size = size / 2  # the largest float16 is 65,504
    case = make_case(6, 2, 3, 600, heads=(1, 1), dim=4, dtype=dtype, lengths="none")
    case.scale = 1.0
    case.q[:] = 1
    case.k[:] = torch.tensor(size / 4)
    best = torch.tensor([5, 599])
    for user in range(2):
        case.k[user, best[user]] += abs(size) / 8
    out = case.run()
    expected = torch.stack([case.v[u, best[u]] for u in range(2)])[case.candidate_to_user.long()]
    if DEVICE == "cpu" or dtype in (torch.float64, torch.float32):
        assert torch.equal(out, expected[:, None].expand_as(out))
    else:  # the largest weight is 1 but for the rounding of its logit, and then rounded to 16 bits
        assert_close(out, expected[:, None].expand_as(out).double(), dtype)
    case.k[:] = torch.tensor(size / 4)  # all equal: the mean
    assert_close(case.run(), case.plain()[0], dtype)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.7, 3.5])
def test_scale(scale):
    case = make_case(12, 3, 4, 300)
    case.scale = scale
    out, logsumexp = case.run_lse()
    expected, expected_sum = case.plain()
    assert_close(out, expected, torch.float64, factor=10)
    assert_close(logsumexp, expected_sum, torch.float64, factor=10)


def test_lengths_and_offsets_of_the_same_histories_agree_bit_for_bit():
    case = make_case(40, 5, 6, 520, dtype=torch.float32)
    rows = [case.history(user) for user in range(5)]
    offsets = torch.cat([torch.zeros(1).int(), case.kv_lengths.cumsum(0).int()])
    k, v = (torch.cat([pair[i] for pair in rows]) for i in (0, 1))
    packed = Case(case.q, k, v, case.candidate_to_user, kv_offsets=offsets)
    for a, b in zip(case.run_lse(), packed.run_lse()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seeds,length,heads,dim", [(1, 40, (2, 2), 32), (8, 300, (4, 2), 20), (100, 33, (1, 1), 5)])
def test_a_candidate_has_the_same_bits_in_any_batch(threads, dtype, seeds, length, heads, dim):
    case = make_case(61, 5, seeds, length, heads, dim, dtype=dtype)
    whole = case.run_lse()
    order = torch.randperm(61)
    for size in (61, 1, 2, 7, 30):
        part = order[:size]
        for a, b in zip(case.select(part).run_lse(), whole):
            assert torch.equal(a, b[part]), size
    user = int(case.candidate_to_user[7])
    own = (case.candidate_to_user == user).nonzero()[:, 0]
    one = slice(user, user + 1)
    alone = Case(case.q[own], case.k[one], case.v[one], torch.zeros(len(own)).int(), case.kv_lengths[one])
    for a, b in zip(alone.run_lse(), whole):
        assert torch.equal(a, b[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_any_strides(dtype):
    case = make_case(14, 3, 5, 50, (4, 2), 12, dtype=dtype)
    expected = case.run()
    def views(tensor):
        yield tensor.transpose(1, 2).contiguous().transpose(1, 2)
        yield tensor.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        spaced = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), float("nan"), dtype=dtype)
        spaced[..., ::2] = tensor
        yield spaced[..., ::2]

    for position in range(3):
        for other in views(case.args[position]):
            args = list(case.args)
            args[position] = other
            assert torch.equal(torch.ops.ikbo.target_attention(*args, **case.options), expected)
    spaced = case.candidate_to_user.repeat_interleave(2)[::2]
    lengths = case.kv_lengths.repeat_interleave(3)[::3]
    assert torch.equal(torch.ops.ikbo.target_attention(*case.args[:3], spaced, kv_lengths=lengths), expected)
    one = case.k[:1].expand(3, -1, -1, -1)
    assert torch.equal(
        torch.ops.ikbo.target_attention(case.q, one, case.v, case.candidate_to_user),
        torch.ops.ikbo.target_attention(case.q, one.contiguous(), case.v, case.candidate_to_user),
    )


@pytest.mark.parametrize("lengths", ["none", "padded", "packed"])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
def test_gradcheck(lengths, heads):
    case = make_case(5, 3, 2, 4, heads, 3, lengths=lengths).requires_grad()
    run = lambda q, k, v: torch.ops.ikbo.target_attention_lse(  # noqa: E731
        q, k, v, case.candidate_to_user, **case.options
    )
    has_history = torch.tensor([len(case.history(u)[0]) > 0 for u in case.candidate_to_user.tolist()])
    assert torch.autograd.gradcheck(lambda *t: run(*t)[0], case.float_tensors)
    if has_history.any():  # the log-sum-exp of an empty history is −∞, which has no difference quotient
        assert torch.autograd.gradcheck(lambda *t: run(*t)[1][has_history], case.float_tensors)
        assert torch.autograd.gradcheck(
            lambda *t: (lambda o, s: (o[has_history].sum(-1) * s[has_history]))(*run(*t)), case.float_tensors
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_autograd_of_plain_attention(dtype):
    case = make_case(40, 4, 3, 30, (4, 2), 8, dtype=dtype).requires_grad()
    weights = torch.randn(40, 3, 4, 8, dtype=torch.float64).to(dtype)
    ours = torch.autograd.grad(case.run(), case.float_tensors, weights)
    # In float64 from the inputs on: else what candidates give to a history would be added in the history's type.
    wide = case.in_float64().requires_grad()
    expected = torch.autograd.grad(wide.plain()[0], wide.float_tensors, weights.double())
    # The backward pass starts from the rounded output.
    unit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}[dtype]
    for tensor, a, b in zip(case.float_tensors, ours, expected):
        assert a.shape == tensor.shape and a.dtype == dtype
        assert ((a.double() - b.double()).abs() / b.double().abs().clamp(min=1)).max() <= unit
        assert b.abs().max() > 0


def test_gradients_of_empty_and_unused_histories_are_zero():
    case = make_case(20, 5, 3, 6)
    case.kv_lengths[:] = torch.tensor([0, 6, 3, 5, 2])
    case.candidate_to_user[:] = case.candidate_to_user % 3
    with torch.no_grad():
        case.k[3:] = case.v[3:] = float("nan")
        case.k[2, 3:] = case.v[2, 3:] = float("nan")
    case.requires_grad()
    grad_q, grad_k, grad_v = torch.autograd.grad(case.run().square().sum(), case.float_tensors)
    assert (grad_q[case.candidate_to_user == 0] == 0).all()
    for grad in (grad_k, grad_v):
        assert (grad[[0, 3, 4]] == 0).all() and (grad[2, 3:] == 0).all() and grad[1].abs().max() > 0
    assert grad_q.isfinite().all()


def test_a_second_derivative_is_an_error():
    case = make_case(4, 2, 2, 3).requires_grad()
    (grad,) = torch.autograd.grad(case.run().sum(), case.q, create_graph=True)
    with pytest.raises(RuntimeError, match="ikbo::target_attention_backward"):
        grad.sum().backward()


@pytest.mark.parametrize("lengths", ["none", "padded", "packed"])
@pytest.mark.parametrize("batch,users,length", [(5, 3, 4), (4, 4, 4), (0, 2, 3), (1, 1, 1)])
def test_opcheck(batch, users, length, lengths):
    case = make_case(batch, users, 2, length, dim=4, lengths=lengths)
    for operator in (torch.ops.ikbo.target_attention.default, torch.ops.ikbo.target_attention_lse.default):
        torch.library.opcheck(operator, case.args, case.options)
    out, logsumexp = case.run_lse()
    index = case.candidate_to_user
    torch.library.opcheck(
        torch.ops.ikbo.target_attention_backward.default,
        (torch.randn_like(out), None, case.q, case.k, case.v, out, logsumexp, index, *case.options.values()),
    )
    case.requires_grad()
    torch.library.opcheck(torch.ops.ikbo.target_attention.default, case.args, case.options)


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 8)

    def forward(self, q, history, lengths, candidate_to_user):
        k = self.project(history).view(*history.shape[:2], 2, 4)
        return ikbo.target_attention(q, k, k, candidate_to_user, kv_lengths=lengths).flatten(2)


@pytest.mark.parametrize("example", [(4, 9, 6), (5, 5, 5)], ids=str)
def test_export_with_two_batch_sizes(example, tmp_path):
    check_export(Attend().eval(), example, tmp_path / "attend.pt2")


def test_compile_in_training():
    model = Attend()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for sizes in [(4, 9, 6), (6, 6, 6), (2, 30, 3)]:
        given = attend_inputs(*sizes)
        leaves = [*model.parameters(), given[0].requires_grad_(), given[1].requires_grad_()]
        ours = torch.autograd.grad(compiled(*given).square().sum(), leaves)
        expected = torch.autograd.grad(model(*given).square().sum(), leaves)
        for a, b in zip(ours, expected):
            torch.testing.assert_close(a, b)


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


PACKED = {"k": torch.randn(9, 2, 8), "v": torch.randn(9, 2, 8), "kv_lengths": None}
ERRORS = [
    (ValueError, "q has shape [5, 2, 8], expected (B_cand, n_seed, H_q, D)", {"q": torch.randn(5, 2, 8)}),
    (ValueError, "k has shape [9, 2, 8], expected (B_user, L, H_kv, D)", {"k": torch.randn(9, 2, 8)}),
    (ValueError, "k has shape [3, 4, 2, 8], expected (ΣL, H_kv, D), with kv_offsets",
     {"kv_lengths": None, "kv_offsets": integers(0, 1, 2, 3)}),
    (ValueError, "v has D=9 but q has D=8", {"v": torch.randn(3, 4, 2, 9)}),
    (ValueError, "v has shape [3, 5, 2, 8], expected [3, 4, 2, 8], the shape of k", {"v": torch.randn(3, 5, 2, 8)}),
    (ValueError, "q has 3 heads, expected a multiple of the 2 heads of k", {"q": torch.randn(5, 2, 3, 8)}),
    (TypeError, "k has dtype Double, expected Float, the dtype of q", {"k": torch.randn(3, 4, 2, 8).double()}),
    (ValueError, "kv_lengths and kv_offsets are both given", {"kv_offsets": integers(0, 1, 2, 3)}),
    (ValueError, "kv_lengths has 2 values, expected 3, the batch of k", {"kv_lengths": integers(1, 2)}),
    (ValueError, "kv_lengths[1] = 5, expected 0 to L = 4", {"kv_lengths": integers(1, 5, 2)}),
    (ValueError, "kv_lengths[2] = -1, expected 0 to L = 4", {"kv_lengths": integers(1, 2, -1)}),
    (TypeError, "kv_lengths has dtype Long, expected Int (int32)", {"kv_lengths": integers(1, 2, 3).long()}),
    (ValueError, "kv_offsets[2] = 1 is less than kv_offsets[1] = 4", {**PACKED, "kv_offsets": integers(0, 4, 1, 9)}),
    (ValueError, "kv_offsets[3] = 10, but k has 9 rows", {**PACKED, "kv_offsets": integers(0, 4, 5, 10)}),
    (ValueError, "kv_offsets[0] = -1, expected 0 or more", {**PACKED, "kv_offsets": integers(-1, 4, 5, 9)}),
    (ValueError, "kv_offsets is empty, expected B_user + 1 values", {**PACKED, "kv_offsets": integers()}),
    (IndexError, "candidate_to_user[1] = 3, but k has 3 rows", {"candidate_to_user": integers(0, 3, 1, 1, 1)}),
    (IndexError, "candidate_to_user[0] = 2, but kv_offsets has 2 rows",
     {**PACKED, "kv_offsets": integers(0, 4, 9), "candidate_to_user": integers(2, 1, 1, 1, 1)}),
    (ValueError, "candidate_to_user has 4 values, expected 5, the batch of q",
     {"candidate_to_user": integers(0, 1, 1, 1)}),
    (ValueError, "v is on meta, expected cpu", {"v": torch.randn(3, 4, 2, 8, device="meta")}),
    (ValueError, "q has D=0, expected at least 1",
     {"q": torch.randn(5, 2, 2, 0), "k": torch.randn(3, 4, 2, 0), "v": torch.randn(3, 4, 2, 0)}),
]  # fmt: skip


@cpu_only
@pytest.mark.parametrize("error,message,changes", ERRORS, ids=[e[1] for e in ERRORS])
@pytest.mark.parametrize("grad", [False, True])
def test_errors(error, message, changes, grad):
    arguments = {
        "q": torch.randn(5, 2, 2, 8), "k": torch.randn(3, 4, 2, 8), "v": torch.randn(3, 4, 2, 8),
        "candidate_to_user": integers(0, 2, 1, 1, 0), "kv_lengths": integers(4, 0, 2), "kv_offsets": None,
    }  # fmt: skip
    torch.ops.ikbo.target_attention(**arguments)
    arguments.update(changes)
    arguments["q"].requires_grad_(grad)
    name = "ikbo::target_attention_lse: " if grad else "ikbo::target_attention: "
    with pytest.raises(error, match=re.escape(name + message)):
        torch.ops.ikbo.target_attention(**arguments)


def test_functorch_transforms_are_refused():
    case = make_case(4, 2, 2, 3)
    with pytest.raises(NotImplementedError, match="ikbo::target_attention does not support torch.func transforms"):
        torch.func.grad(lambda q: torch.ops.ikbo.target_attention(q, *case.args[1:]).sum())(case.q)
@cpu_only
def test_peak_memory_holds_no_replicated_history():
    """2,000 candidates of one user with a long history: replicated, keys and values would take 1 GB."""
    case = make_case(2000, 1, 1, 2000, (1, 1), 32, dtype=torch.float32, lengths="none")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        case.run()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < 2 * 2000 * 32 * 4
