"""Results of ikbo::broadcast and ikbo::linear against the broadcast form in float64."""

import pytest
import torch

import ikbo
from conftest import cpu_only

ACTIVATIONS = ["none", "relu", "sigmoid", "tanh", "silu", "gelu"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Outputs are of order 1 and sums are kept in a wider type, so one rounding of the result (half a unit in the last place)
# and, for the types that sums are kept in, a few roundings of the sum remain.
TOLERANCE = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SHAPES = [
    # batch, k, n, users, k_users
    (1, 1, 1, (1,), (1,)),
    (5, 16, 32, (2,), (30,)),
    (101, 7, 65, (9,), (3,)),
    (49, 300, 129, (3,), (513,)),
    (64, 33, 16, (64,), (8,)),  # as many users as candidates
    (100, 12, 20, (4, 25, 60), (5, 6, 7)),  # user, vendor, item
    (7, 19, 1, (2,), (3,)),
    (300, 0, 24, (5,), (16,)),  # no candidate columns
    (13, 5, 8, (2,), (0,)),
    (31, 40, 70, (), ()),  # no broadcast term
]


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    error = ((actual.double() - expected).abs() / expected.abs().clamp(min=1)).max().item() if actual.numel() else 0
    assert error <= TOLERANCE[dtype] * (1 + 1e-3), error  # NaN fails too


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_agrees_with_broadcast_form(linear_case, shape, activation, dtype):
    batch, k, n, users, k_users = shape
    case = linear_case(batch, k, n, users, k_users, dtype=dtype, activation=activation, bias=batch != 49)
    out = case.run()
    assert out.is_contiguous()
    assert_close(out, case.broadcast_form(), dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_linear_sums_long_rows_as_well_as_the_library(linear_case, dtype):
    case = linear_case(40, 3000, 50, (4,), (5000,), dtype=dtype)
    expected = case.broadcast_form()
    ours = (case.run().double() - expected).abs().max()
    library = (case.broadcast_form(dtype).double() - expected).abs().max()
    assert ours <= 2 * library


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_rounds_16_bit_results_once(linear_case, dtype):
    case = linear_case(200, 40, 33, (5,), (50,), dtype=dtype)
    exact = case.broadcast_form()
    rounded = exact.to(dtype)
    # Sums in float32 may fall on the other side of a tie of the 16-bit type, rarely; a second rounding would show often.
    assert (case.run() == rounded).double().mean() > 0.99


def test_activations_at_extreme_values():
    z = torch.tensor([[-1e30, -200.0, -20.0, -0.0, 0.0, 1e-30, 20.0, 200.0, 1e30]]).t()
    for name in ACTIVATIONS:
        out = torch.ops.ikbo.linear(z, torch.ones(1, 1), [], [], [], None, name)
        expected = {"none": lambda v: v, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu}.get(
            name, getattr(torch, name, None)
        )(z.double())
        torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_and_inf_of_a_candidate_propagate_as_in_the_broadcast_form(linear_case, activation):
    case = linear_case(20, 6, 40, activation=activation)
    case.x_cand[3, 2] = float("nan")
    case.x_cand[11, 0] = float("inf")
    case.x_bcast[0][1] = float("nan")
    out, expected = case.run(), case.broadcast_form()
    assert torch.equal(out.isnan(), expected.isnan())
    touched = out.isnan().any(1) | out.isinf().any(1) | (torch.arange(20) == 11)
    torch.testing.assert_close(out[~touched], expected[~touched])
    assert bool((~touched).any()) and bool(out.isnan().any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_rows_of_users_without_candidates_are_never_read(linear_case, dtype, poison):
    case = linear_case(30, 5, 37, (6, 8), dtype=dtype)
    case.index[0] = case.index[0] % 3 + 1  # users 1, 2, 3
    case.index[1] = case.index[1] % 2 * 7  # users 0, 7
    clean = case.run()
    case.x_bcast[0][[0, 4, 5]] = poison
    case.x_bcast[1][1:7] = poison
    assert torch.equal(case.run(), clean)
    x = torch.randn(6, 4).to(dtype)
    x[[0, 4, 5]] = poison
    assert torch.ops.ikbo.broadcast(x, case.index[0]).isfinite().all()


@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 17])
@pytest.mark.parametrize("users", [(), (1,), (1, 4)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_degenerate_sizes(linear_case, batch, k, n, users, dtype):
    case = linear_case(batch, k, n, users, dtype=dtype)
    assert_close(case.run(), case.broadcast_form(), dtype)


def test_no_users_and_no_candidates(linear_case):
    case = linear_case(0, 4, 6, (3,))
    case.x_bcast[0] = case.x_bcast[0][:0]
    assert case.run().shape == (0, 6)
    empty = torch.zeros(0, dtype=torch.int32)
    assert torch.ops.ikbo.broadcast(torch.randn(0, 5), empty).shape == (0, 5)
    assert torch.ops.ikbo.broadcast(torch.randn(3, 0), torch.tensor([2, 2], dtype=torch.int32)).shape == (2, 0)


def layouts(tensor):
    """The same values behind other strides."""
    rows, columns = tensor.shape
    yield "transposed", tensor.t().contiguous().t()
    padded = torch.full((rows, columns + 5), float("nan"), dtype=tensor.dtype)
    padded[:, 2 : 2 + columns] = tensor
    yield "sliced columns", padded[:, 2 : 2 + columns]
    spaced = torch.full((2 * rows, 3 * columns), float("nan"), dtype=tensor.dtype)
    spaced[::2, ::3] = tensor
    yield "steps", spaced[::2, ::3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_reads_any_strides(linear_case, dtype):
    case = linear_case(50, 20, 34, (5,), (18,), dtype=dtype)
    expected = case.run()
    for name, other in layouts(case.x_cand):
        assert torch.equal(torch.ops.ikbo.linear(other, *case.args[1:]), expected), name
    for name, other in layouts(case.w_cand):
        assert torch.equal(torch.ops.ikbo.linear(case.x_cand, other, *case.args[2:]), expected), name
    for name, other in layouts(case.x_bcast[0]):
        assert torch.equal(torch.ops.ikbo.linear(*case.args[:2], [other], *case.args[3:]), expected), name
    for name, other in layouts(case.w_bcast[0]):
        assert torch.equal(torch.ops.ikbo.linear(*case.args[:3], [other], *case.args[4:]), expected), name
    index, bias = case.index[0].repeat_interleave(2)[::2], case.bias.repeat_interleave(3)[::3]
    assert torch.equal(torch.ops.ikbo.linear(*case.args[:4], [index], bias), expected)


def test_linear_reads_expanded_operands(linear_case):
    case = linear_case(20, 6, 9, (4,))
    one = case.x_cand[:1].clone()
    expanded = torch.ops.ikbo.linear(one.expand(20, 6), *case.args[1:])
    assert torch.equal(expanded, torch.ops.ikbo.linear(one.repeat(20, 1), *case.args[1:]))
    user = case.index[0][:1].clone()
    assert torch.equal(
        torch.ops.ikbo.linear(*case.args[:4], [user.expand(20)], case.bias[:1].expand(9)),
        torch.ops.ikbo.linear(*case.args[:4], [user.repeat(20)], case.bias[:1].repeat(9)),
    )


ANY_DTYPE = DTYPES + [torch.int64, torch.int32, torch.int8, torch.bool, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", ANY_DTYPE)
@pytest.mark.parametrize("row", [(), (1,), (7,), (3, 5), (2, 1, 3, 2)], ids=str)
def test_broadcast_is_a_row_lookup(dtype, row):
    x = (torch.randn(6, *row) * 50).to(dtype)
    index = torch.randint(6, (200,), dtype=torch.int32)
    out = torch.ops.ikbo.broadcast(x, index)
    assert out.is_contiguous() and out.dtype == dtype
    assert torch.equal(out, x[index.long()])


def test_broadcast_reads_any_strides():
    index = torch.randint(6, (40,), dtype=torch.int32)
    base = torch.randn(6, 4, 5)
    views = [
        base.transpose(1, 2),
        base.permute(2, 0, 1)[:, :, :4].permute(1, 0, 2),
        base[:, 1:3],
        base[:, :, ::2],
        base[::1, ::2, 1:],
        base.flip(1),
        torch.randn(1, 3).expand(6, 3),
        torch.randn(6, 1).expand(6, 3),
        torch.randn(12, 3)[::2],
    ]
    for x in views:
        assert torch.equal(torch.ops.ikbo.broadcast(x, index), x[index.long()]), x.stride()
    every_other = torch.randint(6, (80,), dtype=torch.int32)[::2]
    assert torch.equal(torch.ops.ikbo.broadcast(base, every_other), base[every_other.long()])
    user = torch.tensor([3], dtype=torch.int32).expand(9)
    assert torch.equal(torch.ops.ikbo.broadcast(base, user), base[3].expand(9, 4, 5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n,k", [(1, 64), (32, 16), (100, 33), (7, 5), (130, 600)])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_a_candidate_has_the_same_bits_in_any_batch(linear_case, threads, dtype, n, k, activation):
    case = linear_case(257, k, n, (20, 3), dtype=dtype, activation=activation)
    whole = case.run()
    order = torch.randperm(257)
    assert torch.equal(case.select(order).run(), whole[order])
    for size in (1, 2, 3, 5, 6, 7, 48, 49, 96, 200):
        start = int(torch.randint(257 - size, (1,)))
        part = torch.arange(start, start + size)
        assert torch.equal(case.select(part).run(), whole[part]), size
    # users alone with their own candidates, as one request would send them
    user = int(case.index[0][5])
    own = (case.index[0] == user).nonzero()[:, 0]
    alone = case.select(own)
    alone.x_bcast[0] = alone.x_bcast[0][user : user + 1]
    alone.index[0] = torch.zeros_like(alone.index[0])
    assert torch.equal(alone.run(), whole[own])


@cpu_only
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(linear_case, dtype):
    case = linear_case(3000, 40, 70, (200,), (60,), dtype=dtype, activation="silu")
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        grad = torch.ops.ikbo.broadcast_backward(case.run(), case.index[0], 200)
        results.append((case.run(), torch.ops.ikbo.broadcast(case.x_bcast[0], case.index[0]), grad))
    torch.set_num_threads(before)
    for other in results[1:]:
        for a, b in zip(results[0], other):
            assert torch.equal(a, b)


def test_python_functions_call_the_operators(linear_case):
    case = linear_case(9, 4, 5, (2, 3), activation="relu")
    assert torch.equal(ikbo.linear(*case.args), case.run())
    torch.testing.assert_close(ikbo.linear(*case.args[:2], (), (), ()), case.x_cand @ case.w_cand.t())
    x = torch.randn(2, 3)
    assert torch.equal(ikbo.broadcast(x, case.index[0]), x[case.index[0].long()])
    assert ikbo.library_path().endswith("libikbo_ops.so")
