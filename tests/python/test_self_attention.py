"""ikbo::self_and_target_attention: its target part against ikbo::target_attention, its self part against the same
operator with every user as a candidate whose seeds are the rows of the history; bits, gradients, shapes, errors."""

import dataclasses
import re
from typing import Optional

import pytest
import torch

import ikbo
from attention_checks import attend_inputs, check_export
from conftest import DEVICE, cpu_only
from test_attention import DTYPES, SHAPES, TOLERANCE, Case, assert_close, integers, make_case

LENGTHS = ["none", "padded", "packed"]
gpu_only = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU and IKBO_TEST_DEVICE=cuda")


@dataclasses.dataclass
class BothCase(Case):
    q_self: Optional[torch.Tensor] = None

    def in_float64(self):
        return dataclasses.replace(super().in_float64(), q_self=self.q_self.detach().double())

    @property
    def args(self):
        return (self.q_self, *super().args)

    @property
    def float_tensors(self):
        return (self.q_self, *super().float_tensors)

    def run(self):
        return torch.ops.ikbo.self_and_target_attention(*self.args, **self.options)

    def run_lse(self):
        return torch.ops.ikbo.self_and_target_attention_lse(*self.args, **self.options)

    def target(self):
        return torch.ops.ikbo.target_attention_lse(*self.args[1:], **self.options)

    def rows(self, user, tensor):
        """A user's rows of a tensor that has a row for each of k's."""
        if self.kv_offsets is not None:
            return tensor[int(self.kv_offsets[user]) : int(self.kv_offsets[user + 1])]
        return tensor[user, : len(self.history(user)[0])]

    @property
    def users(self):
        return len(self.k) if self.kv_offsets is None else len(self.kv_offsets) - 1

    def self_plain(self):
        """Self-attention of each user alone, written out, in float64: (out, logsumexp), zeros and -inf elsewhere."""
        out = torch.zeros(self.q_self.shape, dtype=torch.float64)
        sums = torch.full(self.q_self.shape[:-1], -float("inf"), dtype=torch.float64)
        for user in range(self.users):
            rows = self.rows(user, self.q_self)[None]
            k, v = self.history(user)
            alone = Case(rows, k[None], v[None], torch.zeros(1).int(), scale=self.scale)
            if len(k):
                plain = alone.plain()
                self.rows(user, out).copy_(plain[0][0])
                self.rows(user, sums).copy_(plain[1][0])
        return out, sums

    def nobody(self):
        """Of the rows of k, those of no history."""
        mask = torch.ones(self.k.shape[:-2], dtype=torch.bool)
        for user in range(self.users):
            self.rows(user, mask).fill_(False)
        return mask


def make_both(*args, **options):
    case = make_case(*args, **options)
    shape = (*case.k.shape[:-2], *case.q.shape[-2:])
    q_self = torch.randn(shape, dtype=torch.float64).to(case.q.dtype)
    return BothCase(**vars(case), q_self=q_self)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_plain_attention(shape, dtype, lengths):
    case = make_both(*shape, dtype=dtype, lengths=lengths)
    self_out, self_sums, out, sums = case.run_lse()
    assert self_out.is_contiguous() and self_sums.is_contiguous()
    for a, b in zip(case.run(), (self_out, out)):
        assert torch.equal(a, b)
    expected, expected_sums = case.self_plain()
    assert_close(self_out, expected, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_close(self_sums, expected_sums, wide, factor=4)
    for a, b in zip((out, sums), case.target()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("batch,users,seeds,length", [(0, 2, 3, 5), (0, 1, 1, 1), (4, 2, 0, 3), (1, 1, 1, 1), (3, 2, 1, 0)])
def test_small_sizes(batch, users, seeds, length, lengths):
    case = make_both(batch, users, seeds, length, dim=3, lengths=lengths)
    self_out, self_sums, out, _ = case.run_lse()
    assert_close(self_out, case.self_plain()[0], torch.float64)
    assert out.shape == case.q.shape and self_sums.shape == case.q_self.shape[:-1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_users(dtype):
    case = make_both(0, 2, 3, 5, dtype=dtype)
    none = case.candidate_to_user
    out = torch.ops.ikbo.self_and_target_attention(case.q_self[:0], case.q, case.k[:0], case.v[:0], none)
    assert out[0].shape == (0, 5, 2, 8) and out[1].shape == (0, 3, 2, 8)
    rows = [t[0].clone().requires_grad_() for t in (case.q_self, case.k, case.v)]
    nobody = torch.ops.ikbo.self_and_target_attention(rows[0], case.q, *rows[1:], none, kv_offsets=integers(2))[0]
    assert (nobody == 0).all()
    for grad in torch.autograd.grad(nobody.sum(), rows):
        assert (grad == 0).all()


@pytest.mark.parametrize("lengths", ["padded", "packed"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_of_no_history_are_never_read_and_become_zeros(lengths, poison, dtype):
    case = make_both(30, 6, 4, 300, dtype=dtype, lengths=lengths)
    clean = case.run_lse()
    nobody = case.nobody()
    for tensor in (case.q_self, case.k, case.v):
        tensor[nobody] = poison
    for a, b in zip(clean, case.run_lse()):
        assert torch.equal(a, b)
    assert (clean[0][nobody] == 0).all() and (clean[1][nobody] == -float("inf")).all()
    assert clean[0].isfinite().all() and clean[0][~nobody].ne(0).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_of_a_row_or_a_user_stays_there(dtype):
    case = make_both(24, 4, 2, 10, lengths="none", dtype=dtype)
    case.q_self[2, 3, 0, 1] = float("nan")
    case.q[3, 1, 1, 2] = float("nan")
    case.k[1, 4, 1, 0] = float("nan")
    self_out, out = case.run()
    assert torch.equal(self_out.isnan(), case.self_plain()[0].isnan())
    assert torch.equal(out.isnan(), case.plain()[0].isnan())
    assert self_out.isnan().any() and not self_out.isnan().all()


@pytest.mark.parametrize("lengths", ["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length,heads,dim", [(40, (2, 2), 32), (300, (4, 2), 20), (260, (1, 1), 5)])
def test_a_row_has_the_same_bits_in_any_batch(threads, dtype, lengths, length, heads, dim):
    case = make_both(31, 5, 3, length, heads, dim, dtype=dtype, lengths=lengths)
    whole = case.run_lse()
    for user in range(5):
        k, v = case.history(user)
        own = case.candidate_to_user == user
        rows = case.rows(user, case.q_self)
        alone = BothCase(case.q[own], k[None], v[None], torch.zeros(int(own.sum())).int(), q_self=rows[None])
        results = alone.run_lse()
        for a, b in zip(results[:2], whole[:2]):
            assert torch.equal(a[0], case.rows(user, b))
        for a, b in zip(results[2:], whole[2:]):
            assert torch.equal(a, b[own])
        # A row of q_self gets what a candidate with that query gets.
        as_candidate = torch.ops.ikbo.target_attention_lse(rows[None], k[None], v[None], torch.zeros(1).int())
        for a, b in zip(as_candidate, whole):
            assert torch.equal(a[0], case.rows(user, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_any_strides(dtype):
    case = make_both(14, 3, 5, 50, (4, 2), 12, dtype=dtype)
    expected = case.run_lse()
    spaced = torch.full((*case.q_self.shape[:-1], 24), float("nan"), dtype=dtype)
    spaced[..., ::2] = case.q_self
    for other in (
        case.q_self.transpose(1, 2).contiguous().transpose(1, 2),
        case.q_self.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        spaced[..., ::2],
    ):
        for a, b in zip(dataclasses.replace(case, q_self=other).run_lse(), expected):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, -0.7, 3.5])
def test_scale(scale, dtype):
    case = make_both(12, 3, 4, 300, dtype=dtype)
    case.scale = scale
    assert_close(case.run()[0], case.self_plain()[0], dtype, factor=10)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 2)], ids=str)
def test_gradcheck(lengths, heads):
    case = make_both(5, 3, 2, 4, heads, 3, lengths=lengths).requires_grad()
    has_history = torch.tensor([len(case.history(u)[0]) > 0 for u in case.candidate_to_user.tolist()])
    of_somebody = ~case.nobody()

    def run(*tensors):
        results = torch.ops.ikbo.self_and_target_attention_lse(*tensors, case.candidate_to_user, **case.options)
        return results[0], results[1][of_somebody], results[2], results[3][has_history]

    for chosen in ([0], [1], [2], [3], [0, 1, 2, 3]):
        # The log-sum-exp of an empty history is −∞, which has no difference quotient.
        wanted = lambda *tensors: tuple(r for i, r in enumerate(run(*tensors)) if i in chosen and r.numel())  # noqa: E731
        if wanted(*case.float_tensors):
            assert torch.autograd.gradcheck(wanted, case.float_tensors)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_autograd_of_plain_attention(dtype, lengths):
    case = make_both(40, 4, 3, 30, (4, 2), 8, dtype=dtype, lengths=lengths).requires_grad()
    weights = [torch.randn(t.shape, dtype=torch.float64).to(dtype) for t in (case.q_self, case.q)]
    ours = torch.autograd.grad(case.run(), case.float_tensors, weights)
    wide = case.in_float64().requires_grad()
    plain = (wide.self_plain()[0], wide.plain()[0])
    expected = torch.autograd.grad(plain, wide.float_tensors, [w.double() for w in weights])
    # The backward pass starts from the rounded outputs, and rounds what each of them gives to keys and values.
    unit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-4, torch.float16: 2**-7}[dtype]
    for tensor, a, b in zip(case.float_tensors, ours, expected):
        assert a.shape == tensor.shape and a.dtype == dtype
        assert ((a.double() - b).abs() / b.abs().clamp(min=1)).max() <= unit
        assert b.abs().max() > 0


@pytest.mark.parametrize("lengths", ["padded", "packed"])
def test_gradients_of_rows_of_no_history_are_zero(lengths):
    case = make_both(20, 5, 3, 6, lengths=lengths)
    nobody = case.nobody()
    for tensor in (case.q_self, case.k, case.v):
        tensor[nobody] = float("nan")
    case.requires_grad()
    self_out, out = case.run()
    grads = torch.autograd.grad(self_out.sin().sum() + out.square().sum(), case.float_tensors)
    for grad in (grads[0], *grads[2:]):
        assert (grad[nobody] == 0).all() and grad.isfinite().all() and grad[~nobody].abs().max() > 0


def test_a_second_derivative_is_an_error():
    case = make_both(4, 2, 2, 3).requires_grad()
    (grad,) = torch.autograd.grad(sum(t.sum() for t in case.run()), case.q_self, create_graph=True)
    with pytest.raises(RuntimeError, match="ikbo::self_and_target_attention_backward"):
        grad.sum().backward()


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("batch,users,length", [(5, 3, 4), (4, 4, 4), (0, 2, 3), (1, 1, 1)])
def test_opcheck(batch, users, length, lengths):
    case = make_both(batch, users, 2, length, dim=4, lengths=lengths)
    operators = torch.ops.ikbo
    for operator in (operators.self_and_target_attention.default, operators.self_and_target_attention_lse.default):
        torch.library.opcheck(operator, case.args, case.options)
    self_out, self_sums, out, sums = case.run_lse()
    torch.library.opcheck(
        operators.self_and_target_attention_backward.default,
        (torch.randn_like(self_out), torch.randn_like(self_sums), torch.randn_like(out), None, *case.args[:4],
         self_out, self_sums, out, sums, case.candidate_to_user, *case.options.values()),
    )  # fmt: skip
    case.requires_grad()
    torch.library.opcheck(operators.self_and_target_attention.default, case.args, case.options)


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(4, 8)

    def forward(self, q, history, lengths, candidate_to_user):
        k = self.project(history).view(*history.shape[:2], 2, 4)
        mixed, out = ikbo.self_and_target_attention(k.tanh(), q, k, k, candidate_to_user, kv_lengths=lengths)
        return mixed.flatten(2), out.flatten(2)


@pytest.mark.parametrize("example", [(4, 9, 6), (5, 5, 5)], ids=str)
def test_export_with_two_batch_sizes(example, tmp_path):
    check_export(Attend().eval(), example, tmp_path / "attend.pt2")


def test_compile_in_training():
    model = Attend()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for sizes in [(4, 9, 6), (6, 6, 6), (2, 30, 3)]:
        given = attend_inputs(*sizes)
        leaves = [*model.parameters(), given[0].requires_grad_(), given[1].requires_grad_()]
        loss = lambda results: sum(t.square().sum() for t in results)  # noqa: E731
        ours = torch.autograd.grad(loss(compiled(*given)), leaves)
        expected = torch.autograd.grad(loss(model(*given)), leaves)
        for a, b in zip(ours, expected):
            torch.testing.assert_close(a, b)


PACKED = {"k": torch.randn(9, 2, 8), "v": torch.randn(9, 2, 8), "kv_lengths": None, "kv_offsets": integers(0, 4, 5, 9)}
ERRORS = [
    (ValueError, "q_self has shape [3, 4, 8], expected (B_user, L, H_q, D)", {"q_self": torch.randn(3, 4, 8)}),
    (ValueError, "q_self has shape [3, 4, 2, 8], expected (ΣL, H_q, D), with kv_offsets", PACKED),
    (ValueError, "q_self has shape [8, 2, 8] but k has shape [9, 2, 8], expected a row for each of its rows",
     {**PACKED, "q_self": torch.randn(8, 2, 8)}),
    (ValueError, "q_self has shape [2, 4, 2, 8] but k has shape [3, 4, 2, 8], expected a row for each of its rows",
     {"q_self": torch.randn(2, 4, 2, 8)}),
    (ValueError, "q_self has D=7 but q has D=8", {"q_self": torch.randn(3, 4, 2, 7)}),
    (ValueError, "q_self has 1 heads, expected 2, the heads of q", {"q_self": torch.randn(3, 4, 1, 8)}),
    (TypeError, "q_self has dtype Double, expected Float, the dtype of q", {"q_self": torch.randn(3, 4, 2, 8).double()}),
    (ValueError, "q_self is on meta, expected cpu", {"q_self": torch.randn(3, 4, 2, 8, device="meta")}),
    (ValueError, "kv_lengths[1] = 5, expected 0 to L = 4", {"kv_lengths": integers(1, 5, 2)}),
    (IndexError, "candidate_to_user[1] = 3, but k has 3 rows", {"candidate_to_user": integers(0, 3, 1, 1, 1)}),
]  # fmt: skip


@cpu_only
@pytest.mark.parametrize("error,message,changes", ERRORS, ids=[e[1] for e in ERRORS])
@pytest.mark.parametrize("grad", [False, True])
def test_errors(error, message, changes, grad):
    arguments = {
        "q_self": torch.randn(3, 4, 2, 8), "q": torch.randn(5, 2, 2, 8), "k": torch.randn(3, 4, 2, 8),
        "v": torch.randn(3, 4, 2, 8), "candidate_to_user": integers(0, 2, 1, 1, 0), "kv_lengths": integers(4, 0, 2),
        "kv_offsets": None,
    }  # fmt: skip
    torch.ops.ikbo.self_and_target_attention(**arguments)
    arguments.update(changes)
    arguments["q"] = arguments["q"].clone().requires_grad_(grad)
    name = "ikbo::self_and_target_attention_lse: " if grad else "ikbo::self_and_target_attention: "
    with pytest.raises(error, match=re.escape(name + message)):
        torch.ops.ikbo.self_and_target_attention(**arguments)


def test_functorch_transforms_are_refused():
    case = make_both(4, 2, 2, 3)
    run = lambda q: torch.ops.ikbo.self_and_target_attention(q, *case.args[1:])[0].sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="ikbo::self_and_target_attention does not support torch.func"):
        torch.func.grad(run)(case.q_self)


def redraw(case):
    """Other values, mapping and histories in the same buffers; NaN wherever nothing may be read."""
    for tensor in case.float_tensors:
        tensor.normal_()
    case.candidate_to_user.copy_(torch.randint(case.users, case.candidate_to_user.shape))
    if case.kv_offsets is None:
        case.kv_lengths.copy_(torch.randint(case.k.shape[1] + 1, (case.users,)))
    else:
        case.kv_offsets.copy_(torch.randint(len(case.k) + 1, (case.users + 1,)).sort().values)
    for tensor in (case.q_self, case.k, case.v):
        tensor[case.nobody()] = float("nan")


@gpu_only
@pytest.mark.parametrize("lengths", ["padded", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_graph_serves_any_mapping_and_lengths(dtype, lengths):
    case = make_both(60, 5, 7, 290, (4, 2), 64, dtype=dtype, lengths=lengths)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        case.run_lse()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = case.run_lse()
    for _ in range(5):
        redraw(case)
        for result in results:
            result.fill_(12345)
        graph.replay()
        for a, b in zip(results, case.run_lse()):
            assert torch.equal(a, b)
        assert_close(results[0], case.self_plain()[0], dtype)
        assert_close(results[2], case.plain()[0], dtype)


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_index_gives_nan_for_its_candidate_alone(dtype):
    case = make_both(9, 3, 5, 70, dim=64, dtype=dtype)
    case.candidate_to_user[:] = integers(0, 2, -1, 1, 3, 2, 2**31 - 1, 0, -(2**31))
    wrong = (case.candidate_to_user < 0) | (case.candidate_to_user >= 3)
    self_out, out = case.run()
    assert out[wrong].isnan().all() and out[~wrong].isfinite().all()
    assert_close(self_out, case.self_plain()[0], dtype)


@gpu_only
@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_wrong_lengths_and_offsets_read_and_write_nothing_outside(dtype):
    case = make_both(30, 4, 3, 160, dim=64, dtype=dtype, lengths="none")
    case.kv_lengths = integers(-3, 99, 2000, 6)
    inside = dataclasses.replace(case, kv_lengths=case.kv_lengths.clamp(0, 160))
    for a, b in zip(case.run_lse(), inside.run_lse()):
        assert torch.equal(a, b)
    q_self, k, v = (t.flatten(0, 1) for t in (case.q_self, case.k, case.v))
    packed = BothCase(case.q, k, v, case.candidate_to_user, kv_offsets=integers(-5, 3, 3, 1000, 2000), q_self=q_self)
    inside = dataclasses.replace(packed, kv_offsets=packed.kv_offsets.clamp(0, 640))
    for a, b in zip(packed.run_lse(), inside.run_lse()):
        assert torch.equal(a, b)
    packed.kv_offsets = integers(0, 640, 0, 640, 0)  # whose is a row?
    self_out, self_sums, out, _ = packed.run_lse()
    assert self_out.isnan().all() and self_sums.isnan().all()
    assert torch.equal(out, packed.target()[0])


@gpu_only
@pytest.mark.parametrize("lengths", LENGTHS)
def test_nothing_is_read_on_the_host(lengths):
    for dtype in DTYPES:
        case = make_both(30, 4, 3, 70, dim=64, dtype=dtype, lengths=lengths).requires_grad()
        for mode in ("default", "error"):  # libraries set themselves up first
            torch.cuda.set_sync_debug_mode(mode)
            try:
                sum(t.sum() for t in case.run()).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@gpu_only
@pytest.mark.parametrize("lengths", ["padded", "packed"])
def test_more_users_than_one_block_sets_up(lengths):
    for candidates, users in [(3_000, 2_100), (20_000, 300), (70_000, 66_000)]:
        case = make_both(candidates, users, 1, 5, (1, 1), 8, dtype=torch.bfloat16, lengths=lengths)
        self_out, _, out, _ = case.run_lse()
        assert torch.equal(out, case.target()[0])
        assert_close(self_out, case.in_float64().run()[0], torch.bfloat16)
