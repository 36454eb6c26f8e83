"""ikbo::linear_compression against the broadcast form in float64: values, bits, gradients, shape rules, errors."""

import dataclasses
import re

import pytest
import torch

import ikbo
from conftest import cpu_only

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# As for ikbo::linear: outputs are of order 1, sums are kept in a wider type and rounded once.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclasses.dataclass
class Case:
    w_cand: torch.Tensor
    e_cand: torch.Tensor
    w_bcast: list
    e_bcast: list
    index: list

    @property
    def args(self):
        return (self.w_cand, self.e_cand, self.w_bcast, self.e_bcast, self.index)

    @property
    def float_tensors(self):
        return [self.w_cand, self.e_cand, *self.w_bcast, *self.e_bcast]

    def run(self, **options):
        return torch.ops.ikbo.linear_compression(*self.args, **options)

    def broadcast_form(self, tensors=None, dtype=torch.float64):
        """Every embedding replicated, everything concatenated, one product."""
        tensors = [t.to(dtype) for t in (tensors or self.float_tensors)]
        terms = len(self.w_bcast)
        w = torch.cat([tensors[0], *tensors[2 : 2 + terms]], 1)
        rows = [e[i.long()] for e, i in zip(tensors[2 + terms :], self.index)]
        return w @ torch.cat([tensors[1], *rows], 1)

    def select(self, candidates):
        return dataclasses.replace(
            self, e_cand=self.e_cand[candidates], index=[index[candidates] for index in self.index]
        )

    def requires_grad(self):
        for tensor in self.float_tensors:
            tensor.requires_grad_()
        return self


def make_case(batch, m, k, n, users=(3,), k_users=None, dtype=torch.float64):
    k_users = k_users or [k + 1] * len(users)
    scale = 1 / max(1, k + sum(k_users)) ** 0.5
    random = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    return Case(
        (random(m, k) * scale).to(dtype),
        random(batch, k, n).to(dtype),
        [(random(m, ku) * scale).to(dtype) for ku in k_users],
        [random(u, ku, n).to(dtype) for u, ku in zip(users, k_users)],
        [torch.randint(u, (batch,), dtype=torch.int32) if batch else torch.zeros(0, dtype=torch.int32) for u in users],
    )


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype and actual.shape == expected.shape
    error = ((actual.double() - expected).abs() / expected.abs().clamp(min=1)).max().item() if actual.numel() else 0
    assert error <= TOLERANCE[dtype] * (1 + 1e-3), error


SHAPES = [
    # batch, m, k, n, users, k_users
    (1, 1, 1, 1, (1,), (1,)),
    (9, 48, 30, 32, (2,), (50,)),
    (21, 7, 13, 65, (5,), (3,)),
    (6, 130, 200, 17, (3,), (301,)),
    (12, 16, 8, 24, (12,), (8,)),  # as many users as candidates
    (20, 12, 10, 9, (4, 7, 11), (5, 6, 7)),  # user, vendor, item
    (30, 9, 0, 8, (5,), (16,)),  # no candidate rows
    (7, 5, 6, 8, (2,), (0,)),
    (8, 33, 40, 10, (), ()),  # no broadcast term
    (3, 5, 4, 6, (40,), (3,)),  # more users than candidates
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_broadcast_form(shape, dtype):
    case = make_case(*shape, dtype=dtype)
    out = case.run()
    assert out.is_contiguous()
    assert_close(out, case.broadcast_form(), dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert_close(case.run(out_dtype=wide), case.broadcast_form(), wide)
    assert torch.equal(case.run(out_dtype=wide).to(dtype), out)  # one rounding, of the same sum


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("m,k,n", [(0, 2, 3), (1, 0, 3), (2, 1, 0), (1, 1, 1)])
@pytest.mark.parametrize("users", [(), (1,), (1, 4)])
def test_degenerate_sizes(batch, m, k, n, users):
    case = make_case(batch, m, k, n, users)
    assert_close(case.run(), case.broadcast_form(), torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m,k,n", [(48, 64, 32), (33, 19, 7), (1, 130, 65), (100, 5, 1)])
def test_a_candidate_has_the_same_bits_in_any_batch(threads, dtype, m, k, n):
    case = make_case(41, m, k, n, (6, 3), dtype=dtype)
    whole = case.run()
    order = torch.randperm(41)
    assert torch.equal(case.select(order).run(), whole[order])
    for size in (1, 2, 3, 4, 5, 17):
        part = torch.randperm(41)[:size]
        assert torch.equal(case.select(part).run(), whole[part]), size
    own = (case.index[0] == case.index[0][5]).nonzero()[:, 0]
    alone = case.select(own)
    alone.e_bcast[0] = alone.e_bcast[0][case.index[0][5]][None]
    alone.index[0] = torch.zeros_like(alone.index[0])
    assert torch.equal(alone.run(), whole[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_users_without_candidates_are_never_read(dtype):
    case = make_case(30, 11, 5, 37, (6, 8), dtype=dtype)
    case.index[0] = case.index[0] % 3 + 1
    case.index[1] = case.index[1] % 2 * 7
    clean = case.run()
    case.e_bcast[0][[0, 4, 5]] = float("nan")
    case.e_bcast[1][1:7] = float("inf")
    assert torch.equal(case.run(), clean)


def test_nan_of_one_candidate_or_user_stays_there():
    case = make_case(20, 13, 6, 40, (5,))
    case.e_cand[3, 2, 7] = float("nan")
    case.e_bcast[0][1, 0, 3] = float("inf")
    out, expected = case.run(), case.broadcast_form()
    assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf())
    finite = expected.isfinite()
    torch.testing.assert_close(out[finite], expected[finite])
    assert not finite.all() and finite.any()


def strided(tensor):
    """The same values behind other strides, among NaN."""
    yield "transposed", tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), float("nan"), dtype=tensor.dtype)
    padded[..., 2 : 2 + tensor.shape[-1]] = tensor
    yield "sliced columns", padded[..., 2 : 2 + tensor.shape[-1]]
    spaced = torch.full([2 * size for size in tensor.shape], float("nan"), dtype=tensor.dtype)
    inner = spaced[tuple(slice(None, None, 2) for _ in tensor.shape)]
    inner.copy_(tensor)
    yield "steps", inner


@pytest.mark.parametrize("dtype", DTYPES)
def test_reads_any_strides(dtype):
    case = make_case(10, 20, 18, 34, (5,), (9,), dtype=dtype)
    expected = case.run()
    for position in (0, 1):
        for name, other in strided(case.args[position]):
            args = list(case.args)
            args[position] = other
            assert torch.equal(torch.ops.ikbo.linear_compression(*args), expected), name
    for position in (2, 3):
        for name, other in strided(case.args[position][0]):
            args = list(case.args)
            args[position] = [other]
            assert torch.equal(torch.ops.ikbo.linear_compression(*args), expected), name
    one = case.e_cand[:1]
    expanded = torch.ops.ikbo.linear_compression(case.w_cand, one.expand(10, 18, 34), *case.args[2:])
    assert torch.equal(
        expanded, torch.ops.ikbo.linear_compression(case.w_cand, one.repeat(10, 1, 1), *case.args[2:])
    )


@pytest.mark.parametrize("users", [(), (3,), (2, 4)], ids=str)
def test_gradcheck_of_every_tensor(users):
    case = make_case(5, 3, 4, 2, users).requires_grad()
    terms = len(users)
    run = lambda *t: torch.ops.ikbo.linear_compression(  # noqa: E731
        t[0], t[1], list(t[2 : 2 + terms]), list(t[2 + terms :]), case.index
    )
    assert torch.autograd.gradcheck(run, case.float_tensors)
    assert torch.autograd.gradgradcheck(run, case.float_tensors)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_agree_with_autograd_of_the_broadcast_form(dtype):
    case = make_case(40, 9, 7, 12, (7, 3), (5, 6), dtype=dtype).requires_grad()
    weights = torch.randn(40, 9, 12, dtype=torch.float64).to(dtype)
    ours = torch.autograd.grad(case.run(), case.float_tensors, weights)
    expected = torch.autograd.grad(case.broadcast_form(), case.float_tensors, weights.double())
    unit = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for tensor, a, b in zip(case.float_tensors, ours, expected):
        assert a.shape == tensor.shape and a.dtype == dtype
        assert ((a.double() - b.double()).abs() / b.double().abs().clamp(min=1)).max() <= 2 * unit
        assert b.abs().max() > 0


def test_users_without_candidates_take_no_part_in_gradients():
    case = make_case(30, 6, 5, 7, (6,))
    case.index[0] = case.index[0] % 3 + 1
    case.requires_grad()
    clean = torch.autograd.grad(case.run().sum(), case.float_tensors)
    with torch.no_grad():
        case.e_bcast[0][[0, 4, 5]] = float("nan")
    for create_graph in (False, True):
        poisoned = torch.autograd.grad(case.run().sum(), case.float_tensors, create_graph=create_graph)
        for a, b in zip(clean, poisoned):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        assert (poisoned[3][[0, 4, 5]] == 0).all()


@pytest.mark.parametrize("batch,users", [(5, (2,)), (4, (4, 4)), (0, (1,)), (3, ())], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_opcheck(batch, users, dtype):
    case = make_case(batch, 3, 2, 4, users, dtype=dtype)
    operator = torch.ops.ikbo.linear_compression.default
    torch.library.opcheck(operator, case.args)
    torch.library.opcheck(operator, case.args, {"out_dtype": torch.float32 if dtype == torch.bfloat16 else None})
    mask = [True, False] + [True] * len(users) + [False] * len(users)
    backward = torch.ops.ikbo.linear_compression_backward.default
    torch.library.opcheck(backward, (torch.randn(batch, 3, 4).to(dtype), *case.args, mask))
    if dtype == torch.float64:
        torch.library.opcheck(operator, case.requires_grad().args)


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w_user = torch.nn.Parameter(torch.randn(6, 5))
        self.w_cand = torch.nn.Parameter(torch.randn(6, 3))

    def forward(self, e_user, e_cand, candidate_to_user):
        return ikbo.linear_compression(self.w_cand, e_cand, [self.w_user], [e_user], [candidate_to_user]).sum(2)


def stack_inputs(users, candidates):
    index = torch.randint(users, (candidates,), dtype=torch.int32)
    return torch.randn(users, 5, 4), torch.randn(candidates, 3, 4), index


@pytest.mark.parametrize("example", [(4, 9), (5, 5)], ids=str)
def test_export_with_two_batch_sizes(example, tmp_path):
    users, candidates = torch.export.Dim("users", min=1), torch.export.Dim("candidates", min=0)
    model = Stack().eval()
    program = torch.export.export(
        model, stack_inputs(*example),
        dynamic_shapes={"e_user": {0: users}, "e_cand": {0: candidates}, "candidate_to_user": {0: candidates}},
    )
    torch.export.save(program, tmp_path / "stack.pt2")
    loaded = torch.export.load(tmp_path / "stack.pt2").module()
    for sizes in [(4, 9), (9, 4), (6, 6), (1, 1), (3, 0)]:
        given = stack_inputs(*sizes)
        assert torch.equal(loaded(*given), model(*given))


def test_compile_in_training():
    model = Stack()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for sizes in [(4, 9), (6, 6), (2, 30)]:
        given = stack_inputs(*sizes)
        leaves = [*model.parameters(), given[0].requires_grad_(), given[1].requires_grad_()]
        ours = torch.autograd.grad(compiled(*given).square().sum(), leaves)
        expected = torch.autograd.grad(model(*given).square().sum(), leaves)
        for a, b in zip(ours, expected):
            torch.testing.assert_close(a, b)


ERRORS = [
    (ValueError, "w_cand has K=4 columns but e_cand has K=3 rows", {"w_cand": torch.randn(2, 4)}),
    (ValueError, "w_bcast[0] has M=5 rows but w_cand has M=2 rows", {"w_bcast": [torch.randn(5, 6)]}),
    (ValueError, "w_bcast[0] has K=7 columns but e_bcast[0] has K=6 rows", {"w_bcast": [torch.randn(2, 7)]}),
    (ValueError, "e_bcast[0] has N=9 columns but e_cand has N=4 columns", {"e_bcast": [torch.randn(3, 6, 9)]}),
    (ValueError, "e_cand has shape [5, 3], expected (B_cand, K_cand, N)", {"e_cand": torch.randn(5, 3)}),
    (ValueError, "w_bcast has 2 tensors, e_bcast has 1 and index has 1", {"w_bcast": [torch.randn(2, 6)] * 2}),
    (ValueError, "index[0] has 4 values, expected 5, the batch of e_cand",
     {"index": [torch.zeros(4, dtype=torch.int32)]}),
    (IndexError, "index[0][2] = 3, but e_bcast[0] has 3 rows",
     {"index": [torch.tensor([0, 1, 3, -1, 0], dtype=torch.int32)]}),
    (IndexError, "index[0][0] = -1, but e_bcast[0] has 3 rows",
     {"index": [torch.tensor([-1, 1, 2, 0, 0], dtype=torch.int32)]}),
    (TypeError, "index[0] has dtype Long, expected Int (int32)", {"index": [torch.zeros(5, dtype=torch.int64)]}),
    (TypeError, "w_bcast[0] has dtype Double, expected Float", {"w_bcast": [torch.randn(2, 6).double()]}),
    (TypeError, "out_dtype is Half, expected Float", {"out_dtype": torch.half}),
    (ValueError, "w_cand is on meta, expected cpu", {"w_cand": torch.randn(2, 3, device="meta")}),
]


@cpu_only
@pytest.mark.parametrize("error,message,changes", ERRORS, ids=[e[1] for e in ERRORS])
@pytest.mark.parametrize("grad", [False, True])
def test_errors(error, message, changes, grad):
    arguments = {
        "w_cand": torch.randn(2, 3), "e_cand": torch.randn(5, 3, 4).requires_grad_(grad),
        "w_bcast": [torch.randn(2, 6)], "e_bcast": [torch.randn(3, 6, 4)],
        "index": [torch.tensor([0, 2, 1, 1, 0], dtype=torch.int32)], "out_dtype": None,
    }  # fmt: skip
    torch.ops.ikbo.linear_compression(**arguments)
    with pytest.raises(error, match=re.escape("ikbo::linear_compression: " + message)):
        torch.ops.ikbo.linear_compression(**{**arguments, **changes})


def test_functorch_transforms_are_refused():
    case = make_case(4, 2, 3, 2)
    with pytest.raises(NotImplementedError, match="ikbo::linear_compression does not support torch.func transforms"):
        torch.func.grad(lambda w: torch.ops.ikbo.linear_compression(w, *case.args[1:]).sum())(case.w_cand)
@cpu_only
def test_peak_memory_holds_no_replicated_tensor():
    """4,000 candidates of one user with 30 times as many user rows: replicated, these alone would take 480 MB."""
    case = make_case(4000, 2, 4, 32, (1,), (960,), dtype=torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        case.run()
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < 4 * 4000 * 2 * 32 * 2
