"""Every mistake is answered with one message that names the argument, what was given and what was expected."""

import re

import pytest
import torch

import ikbo  # noqa: F401  registers the operators

I32 = torch.int32


def index(*values):
    return torch.tensor(values, dtype=I32)


BROADCAST_ERRORS = [
    (IndexError, "ikbo::broadcast: candidate_to_user[3] = 9, but x_user has 5 rows",
     lambda: (torch.randn(5, 2), index(0, 4, 1, 9))),
    (IndexError, "ikbo::broadcast: candidate_to_user[1] = -1, but x_user has 5 rows",
     lambda: (torch.randn(5, 2), index(0, -1, 9))),
    (IndexError, "ikbo::broadcast: candidate_to_user[0] = 1, but x_user has 1 row",
     lambda: (torch.randn(1, 2), index(1))),
    (IndexError, "ikbo::broadcast: candidate_to_user[0] = 0, but x_user has 0 rows",
     lambda: (torch.randn(0, 2), index(0))),
    (TypeError, "ikbo::broadcast: candidate_to_user has dtype Long, expected Int (int32)",
     lambda: (torch.randn(5, 2), index(0).long())),
    (TypeError, "ikbo::broadcast: candidate_to_user has dtype Float, expected Int (int32)",
     lambda: (torch.randn(5, 2), index(0).float())),
    (ValueError, "ikbo::broadcast: candidate_to_user has shape [1, 1], expected (B_cand)",
     lambda: (torch.randn(5, 2), index(0)[None])),
    (ValueError, "ikbo::broadcast: candidate_to_user has shape [], expected (B_cand)",
     lambda: (torch.randn(5, 2), index(0)[0])),
    (ValueError, "ikbo::broadcast: x_user has no dimensions, expected (B_user, ...)",
     lambda: (torch.tensor(1.0), index(0))),
    (ValueError, "ikbo::broadcast: candidate_to_user is on meta, expected cpu, where x_user is",
     lambda: (torch.randn(5, 2), index(0).to("meta"))),
    (ValueError, "ikbo::broadcast: candidate_to_user is on cpu, expected meta, where x_user is",
     lambda: (torch.randn(5, 2, device="meta"), index(0))),
]


@pytest.mark.parametrize("error,message,arguments", BROADCAST_ERRORS, ids=[e[1] for e in BROADCAST_ERRORS])
@pytest.mark.parametrize("grad", [False, True])
def test_broadcast_errors(error, message, arguments, grad):
    x, candidate_to_user = arguments()
    with pytest.raises(error, match=re.escape(message)):
        torch.ops.ikbo.broadcast(x.requires_grad_(grad), candidate_to_user)


def test_sparse_operands_are_refused():
    sparse = torch.eye(3).to_sparse()
    with pytest.raises((TypeError, NotImplementedError), match="ikbo::broadcast"):
        torch.ops.ikbo.broadcast(sparse, index(0))
    # Straight to the CPU kernel: the dispatcher alone would send a sparse argument elsewhere.
    cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    message = "ikbo::broadcast: candidate_to_user has layout Sparse, expected a dense (strided) tensor"
    with pytest.raises(TypeError, match=re.escape(message)):
        torch.ops.ikbo.broadcast.default.redispatch(cpu, torch.eye(3), index(0).to_sparse())


def replaced(case, position, value, element=None):
    args = [list(a) if isinstance(a, list) else a for a in case.args]
    if element is None:
        args[position] = value(args[position]) if callable(value) else value
    else:
        args[position][element] = value(args[position][element])
    return args


X_CAND, W_CAND, X_BCAST, W_BCAST, INDEX, BIAS, ACTIVATION = range(7)
# case: batch 6, K_cand 3, N 4, users (3, 2) with K 4 each, float64
LINEAR_ERRORS = [
    (ValueError, "w_cand has K=5 columns but x_cand has K=3 columns", W_CAND, torch.zeros(4, 5).double(), None),
    (ValueError, "x_cand has shape [3], expected (B_cand, K_cand)", X_CAND, lambda t: t[0], None),
    (ValueError, "w_cand has shape [1, 4, 3], expected (N, K_cand)", W_CAND, lambda t: t[None], None),
    (TypeError, "x_cand has dtype Long, expected Double, Float, BFloat16 or Half", X_CAND, lambda t: t.long(), None),
    (TypeError, "w_cand has dtype Float, expected Double, the dtype of x_cand", W_CAND, lambda t: t.float(), None),
    (ValueError, "x_bcast has 1 tensors, w_bcast has 2 and index has 2, expected one of each for every broadcast term",
     X_BCAST, lambda t: t[:1], None),
    (ValueError, "x_bcast has 2 tensors, w_bcast has 1 and index has 2, expected one of each for every broadcast term",
     W_BCAST, lambda t: t[:1], None),
    (ValueError, "x_bcast has 2 tensors, w_bcast has 2 and index has 0, expected one of each for every broadcast term",
     INDEX, lambda t: [], None),
    (ValueError, "x_bcast[1] has shape [2, 4, 1], expected (B_t, K_t)", X_BCAST, lambda t: t[..., None], 1),
    (TypeError, "x_bcast[0] has dtype Half, expected Double, the dtype of x_cand", X_BCAST, lambda t: t.half(), 0),
    (ValueError, "w_bcast[1] has shape [4], expected (N, K_t)", W_BCAST, lambda t: t[:, 0], 1),
    (ValueError, "w_bcast[1] has 3 rows, expected 4, the rows of w_cand", W_BCAST, lambda t: t[:3], 1),
    (ValueError, "w_bcast[0] has K=2 columns but x_bcast[0] has K=4 columns", W_BCAST, lambda t: t[:, :2], 0),
    (TypeError, "w_bcast[0] has dtype BFloat16, expected Double, the dtype of x_cand", W_BCAST,
     lambda t: t.bfloat16(), 0),
    (TypeError, "index[1] has dtype Long, expected Int (int32)", INDEX, lambda t: t.long(), 1),
    (ValueError, "index[0] has 5 values, expected 6, the rows of x_cand", INDEX, lambda t: t[:5], 0),
    (ValueError, "index[0] has shape [1, 6], expected (B_cand)", INDEX, lambda t: t[None], 0),
    (IndexError, "index[1][5] = 2, but x_bcast[1] has 2 rows", INDEX, lambda t: torch.cat([t[:5], index(2)]), 1),
    (IndexError, "index[0][2] = -7, but x_bcast[0] has 3 rows", INDEX, lambda t: torch.cat([t[:2], index(-7), t[3:]]),
     0),
    (ValueError, "bias has 5 values, expected 4, the rows of w_cand", BIAS, torch.zeros(5).double(), None),
    (ValueError, "bias has shape [1, 4], expected (N)", BIAS, lambda t: t[None], None),
    (TypeError, "bias has dtype Float, expected Double, the dtype of x_cand", BIAS, lambda t: t.float(), None),
    (ValueError, 'activation is "swish", expected none, relu, sigmoid, tanh, silu or gelu', ACTIVATION, "swish", None),
    (ValueError, "w_bcast[0] is on meta, expected cpu, where x_cand is", W_BCAST, lambda t: t.to("meta"), 0),
    (ValueError, "index[1] is on meta, expected cpu, where x_cand is", INDEX, lambda t: t.to("meta"), 1),
    (ValueError, "bias is on meta, expected cpu, where x_cand is", BIAS, lambda t: t.to("meta"), None),
]


@pytest.mark.parametrize("error,message,position,value,element", LINEAR_ERRORS, ids=[e[1] for e in LINEAR_ERRORS])
@pytest.mark.parametrize("grad", [False, True])
def test_linear_errors(linear_case, error, message, position, value, element, grad):
    case = linear_case(6, 3, 4, (3, 2))
    if grad:
        case.requires_grad()
    with pytest.raises(error, match="^" + re.escape("ikbo::linear: " + message)):
        torch.ops.ikbo.linear(*replaced(case, position, value, element))


# Values and devices are not known to shape rules.
SHAPE_ERRORS = [e for e in LINEAR_ERRORS if e[0] is not IndexError and "is on" not in e[1]]


@pytest.mark.parametrize("error,message,position,value,element", SHAPE_ERRORS, ids=[e[1] for e in SHAPE_ERRORS])
def test_shape_rules_find_the_same_mistakes(linear_case, error, message, position, value, element):
    args = replaced(linear_case(6, 3, 4, (3, 2)), position, value, element)
    to_meta = lambda a: a.to("meta") if isinstance(a, torch.Tensor) else a  # noqa: E731
    args = [[to_meta(e) for e in a] if isinstance(a, list) else to_meta(a) for a in args]
    with pytest.raises(error, match="^" + re.escape("ikbo::linear: " + message)):
        torch.ops.ikbo.linear(*args)


@pytest.mark.parametrize(
    "error,message,change",
    [
        (ValueError, "grad has 5 rows, expected 6, the rows of x_cand", {"grad": torch.zeros(5, 4).double()}),
        (ValueError, "grad has 5 columns, expected 4, the rows of w_cand", {"grad": torch.zeros(6, 5).double()}),
        (ValueError, "output has shape [4], expected (B_cand, N)", {"output": torch.zeros(4).double()}),
        (TypeError, "grad has dtype Float, expected Double, the dtype of x_cand", {"grad": torch.zeros(6, 4)}),
        (ValueError, "output is missing", {"output": None}),
        (ValueError, "output_mask has 2 values, expected 7", {"mask": [True, True]}),
        (ValueError, "output_mask asks for the gradient of bias", {"bias": None}),
        (IndexError, "index[0][0] = 3, but x_bcast[0] has 3 rows", {"index": [index(3, 0, 0, 0, 0, 0)] * 2}),
    ],
    ids=str,
)
def test_linear_backward_errors(linear_case, error, message, change):
    case = linear_case(6, 3, 4, (3, 2), activation="relu")
    given = {"grad": torch.zeros(6, 4).double(), "output": torch.zeros(6, 4).double(), "bias": case.bias,
             "index": case.index, "mask": [True] * 7, **change}
    with pytest.raises(error, match="^" + re.escape("ikbo::linear_backward: " + message)):
        torch.ops.ikbo.linear_backward(given["grad"], given["output"], *case.args[:4], given["index"], given["bias"],
                                       "relu", given["mask"])


def test_broadcast_backward_errors():
    grad = torch.zeros(3, 2)
    for error, message, args in [
        (ValueError, "candidate_to_user has 2 values, expected 3, the rows of grad", (grad, index(0, 1), 2)),
        (IndexError, "candidate_to_user[2] = 2, but the result has 2 rows", (grad, index(0, 1, 2), 2)),
        (ValueError, "num_users is -1, expected 0 or more", (grad, index(0, 1, 1), -1)),
        (TypeError, "grad has dtype Long, expected Double, Float, BFloat16 or Half", (grad.long(), index(0, 0, 0), 1)),
        (ValueError, "grad has no dimensions, expected (B_cand, ...)", (torch.tensor(0.0), index(), 1)),
        (IndexError, "candidate_to_user[0] = 0, but the result has 0 rows", (grad, index(0, 0, 0), 0)),
    ]:
        with pytest.raises(error, match="^" + re.escape("ikbo::broadcast_backward: " + message)):
            torch.ops.ikbo.broadcast_backward(*args)


FUNCTORCH = {
    "vmap": lambda f: torch.func.vmap(f)(torch.randn(2, 3, 4)),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(torch.randn(3, 4)),
    "jacrev": lambda f: torch.func.jacrev(f)(torch.randn(3, 4)),
    "jvp": lambda f: torch.func.jvp(f, (torch.randn(3, 4),), (torch.randn(3, 4),)),
    "vjp": lambda f: torch.func.vjp(f, torch.randn(3, 4)),
}


@pytest.mark.parametrize("transform", FUNCTORCH)
@pytest.mark.parametrize("operator", ["broadcast", "broadcast_backward", "linear", "linear_backward"])
def test_functorch_transforms_are_refused(transform, operator):
    rows = index(0, 2, 1)
    w = torch.randn(5, 4)
    call = {
        "broadcast": lambda x: torch.ops.ikbo.broadcast(x, rows),
        "broadcast_backward": lambda x: torch.ops.ikbo.broadcast_backward(x, rows, 3),
        "linear": lambda x: torch.ops.ikbo.linear(x, w, [x], [w], [rows]),
        "linear_backward": lambda x: torch.ops.ikbo.linear_backward(
            torch.zeros(3, 5), None, x, w, [], [], [], None, "none", [True, True, False])[0],
    }[operator]
    with pytest.raises(NotImplementedError, match=f"ikbo::{operator} does not support torch.func transforms"):
        FUNCTORCH[transform](call)


def test_forward_mode_is_refused_and_not_silently_zero():
    import torch.autograd.forward_ad as forward_ad

    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(3, 4), torch.randn(3, 4))
        with pytest.raises(RuntimeError):
            torch.ops.ikbo.broadcast(x, index(0, 1))
        with pytest.raises(RuntimeError):
            torch.ops.ikbo.linear(x, torch.randn(2, 4), [], [], [])


def test_a_graph_in_use_is_not_broken_by_an_error(linear_case):
    """An error leaves nothing behind: the same tensors still work."""
    case = linear_case(6, 3, 4, (3, 2))
    expected = case.run()
    with pytest.raises(IndexError):
        torch.ops.ikbo.linear(*replaced(case, INDEX, lambda t: t + 100, 0))
    assert torch.equal(case.run(), expected)
