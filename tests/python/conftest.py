"""Makes the package of this source tree importable; one generator of fresh random inputs for all operator tests."""

import dataclasses
import os
import random
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Optional

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))

# The device that the operators' tests run on: their tensors are made there.
DEVICE = os.environ.get("IKBO_TEST_DEVICE", "cpu")
cpu_only = pytest.mark.skipif(DEVICE != "cpu", reason="on the CPU only")

ACTIVATIONS = {
    "none": lambda z: z,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}


def needs_inductor():
    """Skips a test where TorchInductor has no C++ compiler or no headers of Python."""
    if not (os.environ.get("CXX") or shutil.which("g++")):
        pytest.skip("needs a C++ compiler")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("needs Python.h")


def pytest_configure():
    _seed()  # before pytest-xdist starts its workers, which inherit it


def pytest_report_header():
    return f"ikbo random seed: {_seed()} (repeat with IKBO_TEST_SEED)"


def _seed():
    if "IKBO_TEST_SEED" not in os.environ:
        os.environ["IKBO_TEST_SEED"] = str(random.SystemRandom().randrange(2**31))
    return int(os.environ["IKBO_TEST_SEED"])


@pytest.fixture(autouse=True)
def _test_device():
    if DEVICE != "cpu":
        torch.set_default_device(DEVICE)
    yield
    if DEVICE != "cpu":
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _fresh_random_numbers(request):
    torch.manual_seed(_seed() + sum(request.node.name.encode()))


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclasses.dataclass
class LinearCase:
    """Arguments of ikbo::linear, and what the broadcast form makes of them."""

    x_cand: torch.Tensor
    w_cand: torch.Tensor
    x_bcast: list
    w_bcast: list
    index: list
    bias: Optional[torch.Tensor]
    activation: str = "none"

    @property
    def args(self):
        return (self.x_cand, self.w_cand, self.x_bcast, self.w_bcast, self.index, self.bias, self.activation)

    @property
    def float_tensors(self):
        tensors = [self.x_cand, self.w_cand, *self.x_bcast, *self.w_bcast]
        return tensors if self.bias is None else [*tensors, self.bias]

    def requires_grad(self):
        for tensor in self.float_tensors:
            tensor.requires_grad_()
        return self

    def run(self):
        return torch.ops.ikbo.linear(*self.args)

    def broadcast_form(self, dtype=None):
        """Every row replicated, everything concatenated, one linear layer; in float64 unless told otherwise."""
        dtype = dtype or torch.float64
        rows = [x.to(dtype)[i.long()] for x, i in zip(self.x_bcast, self.index)]
        x = torch.cat([self.x_cand.to(dtype), *rows], 1)
        w = torch.cat([self.w_cand.to(dtype), *(w.to(dtype) for w in self.w_bcast)], 1)
        bias = None if self.bias is None else self.bias.to(dtype)
        return ACTIVATIONS[self.activation](torch.nn.functional.linear(x, w, bias))

    def select(self, candidates):
        """The same case for some of its candidates; users stay."""
        return dataclasses.replace(
            self, x_cand=self.x_cand[candidates], index=[index[candidates] for index in self.index]
        )


def make_linear_case(batch, k, n, users=(3,), k_users=None, dtype=torch.float64, bias=True, activation="none"):
    """Weights are scaled so that outputs are of order 1; indices are unsorted and repeat."""
    k_users = k_users or [k + 1] * len(users)
    scale = 1 / max(1, k + sum(k_users)) ** 0.5
    random_tensor = lambda *shape: torch.randn(*shape, dtype=torch.float64).to(dtype)  # noqa: E731
    weight = lambda *shape: (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)  # noqa: E731
    return LinearCase(
        random_tensor(batch, k),
        weight(n, k),
        [random_tensor(u, ku) for u, ku in zip(users, k_users)],
        [weight(n, ku) for ku in k_users],
        [torch.randint(u, (batch,), dtype=torch.int32) if batch else torch.zeros(0, dtype=torch.int32) for u in users],
        random_tensor(n) if bias else None,
        activation,
    )


@pytest.fixture
def linear_case():
    return make_linear_case
