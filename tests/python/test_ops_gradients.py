"""Gradients of the operators: against finite differences, against the broadcast form, and of second order."""

import pytest
import torch

import ikbo  # noqa: F401  registers the operators

ACTIVATIONS = ["none", "relu", "sigmoid", "tanh", "silu", "gelu"]


def with_float_tensors(case, tensors):
    """The case's operator as a function of its float tensors alone, in the order of LinearCase.float_tensors."""
    terms = len(case.x_bcast)
    x_cand, w_cand, *rest = tensors
    bias = rest[2 * terms] if case.bias is not None else None
    return torch.ops.ikbo.linear(
        x_cand, w_cand, list(rest[:terms]), list(rest[terms : 2 * terms]), case.index, bias, case.activation
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("users", [(), (3,), (4, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_gradcheck(linear_case, activation, users, bias):
    case = linear_case(6, 3, 4, users, activation=activation, bias=bias).requires_grad()
    assert torch.autograd.gradcheck(lambda *t: with_float_tensors(case, t), case.float_tensors)


@pytest.mark.parametrize("which", range(7))
def test_every_tensor_and_list_element_has_its_own_gradient(linear_case, which):
    """With one argument alone asking for a gradient, it gets the right one and the others get none."""
    case = linear_case(6, 3, 4, (4, 2), activation="silu")
    tensors = case.float_tensors
    assert len(tensors) == 7
    tensors[which].requires_grad_()
    case.run().square().sum().backward()
    expected = torch.autograd.grad(case.broadcast_form().square().sum(), tensors[which])[0]
    assert expected.abs().max() > 0
    torch.testing.assert_close(tensors[which].grad, expected)
    assert all(t.grad is None for i, t in enumerate(tensors) if i != which)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("users,k", [((7,), 6), ((40, 3), 9), ((5,), 0)], ids=str)
def test_linear_agrees_with_autograd_of_the_broadcast_form(linear_case, activation, dtype, users, k):
    case = linear_case(50, k, 20, users, dtype=dtype, activation=activation).requires_grad()
    weights = torch.randn(50, 20, dtype=torch.float64).to(dtype)
    ours = torch.autograd.grad(case.run(), case.float_tensors, weights)
    expected = torch.autograd.grad(case.broadcast_form(), case.float_tensors, weights.double())
    # One rounding of each gradient; sigmoid and tanh take their slope from the rounded result, as PyTorch does.
    unit = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    unit *= 8 if activation in ("sigmoid", "tanh") else 1
    for tensor, a, b in zip(case.float_tensors, ours, expected):
        assert a.shape == tensor.shape and a.dtype == dtype
        if a.numel():
            assert ((a.double() - b.double()).abs() / b.double().abs().clamp(min=1)).max() <= 2 * unit
    assert any(g.abs().max() > 0 for g in ours if g.numel())


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_rows_without_candidates_take_no_part_in_gradients(linear_case, activation):
    case = linear_case(30, 5, 7, (6,), activation=activation)
    case.index[0] = case.index[0] % 3 + 1
    case.requires_grad()
    clean = torch.autograd.grad(case.run().sum(), case.float_tensors)
    with torch.no_grad():
        case.x_bcast[0][[0, 4, 5]] = float("nan")
    for create_graph in (False, True):
        poisoned = torch.autograd.grad(case.run().sum(), case.float_tensors, create_graph=create_graph)
        for a, b in zip(clean, poisoned):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
        assert (poisoned[2][[0, 4, 5]] == 0).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_gradgradcheck(linear_case, activation):
    case = linear_case(5, 3, 4, (3, 2), activation=activation).requires_grad()
    assert torch.autograd.gradgradcheck(lambda *t: with_float_tensors(case, t), case.float_tensors)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_with_and_without_a_graph_are_the_same(linear_case, activation):
    case = linear_case(40, 6, 8, (5, 9), activation=activation).requires_grad()
    plain = torch.autograd.grad(case.run().sum(), case.float_tensors)
    graph = torch.autograd.grad(case.run().sum(), case.float_tensors, create_graph=True)
    for a, b in zip(plain, graph):
        torch.testing.assert_close(a, b)


def test_differentiating_linear_backward_itself_is_an_error(linear_case):
    case = linear_case(5, 3, 4, (3,))
    grad = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    results = torch.ops.ikbo.linear_backward(grad, None, *case.args, [True] * 5)
    with pytest.raises(RuntimeError, match="derivative for ikbo::linear_backward is not implemented"):
        results[0].sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row", [(), (3,), (2, 4)], ids=str)
def test_broadcast_gradient_is_the_sum_over_candidates(dtype, row):
    x = torch.randn(6, *row).to(dtype).requires_grad_()
    index = torch.randint(5, (300,), dtype=torch.int32)  # user 5 has no candidate
    weights = torch.randn(300, *row).to(dtype)
    ours = torch.autograd.grad(torch.ops.ikbo.broadcast(x, index), x, weights)[0]
    exact = torch.zeros(6, *row, dtype=torch.float64).index_add_(0, index.long(), weights.double())
    # summed in a wider type and rounded once
    unit = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert ours.dtype == dtype
    assert ((ours.double() - exact).abs() <= unit * exact.abs() + 1e-5 * (dtype != torch.float64)).all()
    assert (ours[5] == 0).all()


def test_broadcast_gradcheck():
    x = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 0, 3, 2], dtype=torch.int32)
    assert torch.autograd.gradcheck(torch.ops.ikbo.broadcast, (x, index))
    assert torch.autograd.gradgradcheck(torch.ops.ikbo.broadcast, (x, index))
    grad = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(torch.ops.ikbo.broadcast_backward, (grad, index, 6))
    assert torch.autograd.gradgradcheck(torch.ops.ikbo.broadcast_backward, (grad, index, 6))


@pytest.mark.parametrize("batch,users", [(0, 0), (0, 3), (1, 1)])
def test_gradients_of_degenerate_batches(linear_case, batch, users):
    x = torch.randn(users, 4, requires_grad=True)
    index = torch.zeros(batch, dtype=torch.int32)
    torch.ops.ikbo.broadcast(x, index).sum().backward()
    assert torch.equal(x.grad, torch.full((users, 4), float(batch)))
    case = linear_case(batch, 3, 5, (max(users, 1),)).requires_grad()
    ours = torch.autograd.grad(case.run().sum(), case.float_tensors)
    expected = torch.autograd.grad(case.broadcast_form().sum(), case.float_tensors)
    for a, b in zip(ours, expected):
        torch.testing.assert_close(a, b)


def test_non_contiguous_gradients(linear_case):
    case = linear_case(8, 3, 6, (3,)).requires_grad()
    weights = torch.randn(6, 8, dtype=torch.float64).t()
    for g in (weights, weights[:1].expand(8, 6), torch.randn(8, 12, dtype=torch.float64)[:, ::2]):
        ours = torch.autograd.grad(case.run(), case.float_tensors, g)
        expected = torch.autograd.grad(case.broadcast_form(), case.float_tensors, g)
        for a, b in zip(ours, expected):
            torch.testing.assert_close(a, b)
        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        a = torch.autograd.grad(torch.ops.ikbo.broadcast(x, case.index[0]), x, g)[0]
        b = torch.autograd.grad(x[case.index[0].long()], x, g)[0]
        torch.testing.assert_close(a, b)


def test_gradients_are_the_same_in_every_run_and_for_any_number_of_threads(linear_case):
    case = linear_case(4000, 16, 32, (3,), dtype=torch.float32, activation="relu").requires_grad()
    before = torch.get_num_threads()
    runs = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        runs.append(torch.autograd.grad(case.run().square().sum(), case.float_tensors))
        x = case.x_bcast[0]
        runs[-1] += torch.autograd.grad(torch.ops.ikbo.broadcast(x, case.index[0]).square().sum(), x)
    torch.set_num_threads(before)
    for a, b in zip(runs[1], runs[2]):
        assert torch.equal(a, b)
    assert torch.equal(runs[0][-1], runs[1][-1])  # the sum over candidates, whatever the threads


def test_a_training_step_learns(linear_case):
    case = linear_case(200, 5, 3, (10,), dtype=torch.float32)
    target = case.run()
    parameters = [torch.zeros_like(w, requires_grad=True) for w in (case.w_cand, case.w_bcast[0], case.bias)]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    losses = []
    for _ in range(200):
        out = torch.ops.ikbo.linear(
            case.x_cand, parameters[0], case.x_bcast, [parameters[1]], case.index, parameters[2]
        )
        losses.append((out - target).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.01 * losses[0]
