"""The arithmetic built for each instruction set, chosen as PyTorch chooses its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = """
import sys
import torch
from conftest import make_linear_case
import ikbo

print(torch.backends.cpu.get_cpu_capability())
for dtype, tolerance in [(torch.float64, 1e-14), (torch.float32, 4e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)]:
    for activation in ["none", "relu", "sigmoid", "tanh", "silu", "gelu"]:
        for batch, k, n in [(101, 19, 65), (7, 300, 5), (50, 16, 130), (3, 1, 1)]:
            case = make_linear_case(batch, k, n, (4, 9), dtype=dtype, activation=activation)
            out, expected = case.run(), case.broadcast_form()
            assert ((out.double() - expected).abs() / expected.abs().clamp(min=1)).max() <= tolerance * 1.001
            for part in [torch.arange(1), torch.arange(batch // 2, batch), torch.randperm(batch)]:
                assert torch.equal(case.select(part).run(), out[part])
            strided = torch.randn(batch, 2 * k).to(dtype)[:, ::2]
            assert torch.equal(torch.ops.ikbo.linear(strided, *case.args[1:]),
                               torch.ops.ikbo.linear(strided.contiguous(), *case.args[1:]))
"""


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_every_instruction_set(capability):
    order = ["DEFAULT", "AVX2", "AVX512"]
    here = torch.backends.cpu.get_cpu_capability()
    if here not in order or order.index(capability.upper()) > order.index(here):
        pytest.skip(f"this machine offers {here}")
    folder = Path(__file__).resolve().parent
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    result = subprocess.run([sys.executable, "-c", CHECK], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == capability.upper()
