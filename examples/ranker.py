"""A compute-heavy ranking model in plain PyTorch, and its export: a history encoder, target attention, linear compression
and Wukong-style blocks. It knows nothing of ikbo. `small` runs on a CPU, `full` wants a GPU.

    python examples/ranker.py --config small --out build/ranker

Weights are random and seeded: what the model ranks is meaningless, what it costs is not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

REQUESTS, CANDIDATES = 15, 70
ARCHIVE_FILE, REQUESTS_FILE = "ranker.pt2", "requests.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes. A stack of embeddings has rows of width N; where its rows come from:

    K_user = user fields + dense rows + 1 (mean of the encoded history)
    K_cand = item and category + candidate fields + dense rows + n_seed (target attention)
    """

    width: int  # N
    user_rows: int  # K_user
    candidate_rows: int  # K_cand
    compressed_rows: int  # M
    history: int  # L
    heads: int  # H
    head_width: int  # D
    seeds: int  # n_seed
    encoder_layers: int
    fm_rank: int  # columns of Y in X (X^T Y)
    fm_rows: int  # rows of a block that come from the factorisation machine; the others are linearly compressed
    fm_hidden: int
    tower_hidden: int
    blocks: int = 2
    dense: int = 16  # dense features a side
    dense_rows: int = 4  # rows of the stack that are made from them
    items: int = 20_000
    categories: int = 200
    field_values: int = 20_000  # values of all fields of a side, hashed into one table

    @property
    def model_width(self) -> int:
        return self.heads * self.head_width

    @property
    def user_fields(self) -> int:
        return self.user_rows - self.dense_rows - 1

    @property
    def candidate_fields(self) -> int:
        return self.candidate_rows - self.dense_rows - self.seeds - 2


CONFIGS = {
    "small": Config(width=32, user_rows=96, candidate_rows=64, compressed_rows=48, history=256, heads=2, head_width=32,
                    seeds=8, encoder_layers=1, fm_rank=8, fm_rows=16, fm_hidden=128, tower_hidden=64),
    "full": Config(width=256, user_rows=1178, candidate_rows=866, compressed_rows=433, history=1024, heads=2,
                   head_width=128, seeds=64, encoder_layers=2, fm_rank=32, fm_rows=64, fm_hidden=512, tower_hidden=256),
}  # fmt: skip


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, H * D) -> (B, H, S, D)"""
    return x.unflatten(2, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, S, D) -> (B, S, H * D)"""
    return x.transpose(1, 2).flatten(2)


class EncoderLayer(nn.Module):
    """A pre-norm Transformer layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.model_width
        self.heads = config.heads
        self.attention_norm, self.network_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (split_heads(t, self.heads) for t in self.projection(self.attention_norm(x)).chunk(3, dim=2))
        x = x + self.output(merge_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)))
        return x + self.network(self.network_norm(x))


class HistoryEncoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input = nn.Linear(2 * config.width, config.model_width)
        self.positions = nn.Parameter(torch.randn(config.history, config.model_width) * 0.1)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(config.model_width)

    def forward(self, items: Tensor, categories: Tensor, mask: Tensor) -> Tensor:
        x = self.input(torch.cat([items, categories], dim=2)) + self.positions
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class TargetAttention(nn.Module):
    """`seeds` queries made from the candidate attend over the encoded history: as many rows of the embedding stack.
    A user without history gives rows that are the output's bias."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.model_width
        self.heads, self.seeds = config.heads, config.seeds
        self.query = nn.Linear(2 * config.width, config.seeds * width)
        self.key_value = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, config.width)

    def forward(self, item: Tensor, category: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        query = self.query(torch.cat([item, category], dim=1)).unflatten(1, (self.seeds, -1))
        key, value = self.key_value(history).chunk(2, dim=2)
        query, key, value = (split_heads(t, self.heads) for t in (query, key, value))
        return self.output(merge_heads(F.scaled_dot_product_attention(query, key, value, attn_mask=mask)))


class LinearCompression(nn.Module):
    """(B, K, N) -> (B, M, N): every row of the result is a weighted sum of the stack's rows."""

    def __init__(self, rows: int, compressed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(compressed, rows) / rows**0.5)

    def forward(self, stack: Tensor) -> Tensor:
        return torch.matmul(self.weight, stack)


class WukongBlock(nn.Module):
    """After Zhang et al., Wukong (2024): products of rows through a factorisation machine X (X^T Y) and a network, beside
    a linear compression; residual, layer norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        rows, width, rank = config.compressed_rows, config.width, config.fm_rank
        self.projection = nn.Parameter(torch.randn(rows, rank) / rows**0.5)
        self.fm_norm = nn.LayerNorm(rows * rank)
        self.network = nn.Sequential(
            nn.Linear(rows * rank, config.fm_hidden), nn.ReLU(), nn.Linear(config.fm_hidden, config.fm_rows * width)
        )
        self.compression = LinearCompression(rows, rows - config.fm_rows)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        products = x @ (x.transpose(1, 2) @ self.projection)  # (B, M, rank), and never the (M, M) products of all rows
        from_products = self.network(self.fm_norm(products.flatten(1))).unflatten(1, (-1, x.size(2)))
        return self.norm(x + torch.cat([from_products, self.compression(x)], dim=1))


class Ranker(nn.Module):
    """Scores (B,). Inputs named `user_*` and `hist_*` are of the request, the others of the candidate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.items, self.categories = nn.Embedding(config.items, width), nn.Embedding(config.categories, width)
        self.user_fields = nn.Embedding(config.field_values, width)
        self.item_fields = nn.Embedding(config.field_values, width)
        self.user_dense = nn.Linear(config.dense, config.dense_rows * width)
        self.item_dense = nn.Linear(config.dense, config.dense_rows * width)
        self.encoder = HistoryEncoder(config)
        self.history_row = nn.Linear(config.model_width, width)
        self.attention = TargetAttention(config)
        self.compression = LinearCompression(config.user_rows + config.candidate_rows, config.compressed_rows)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(WukongBlock(config) for _ in range(config.blocks))
        self.tower = nn.Sequential(
            nn.Linear(config.compressed_rows * width, config.tower_hidden), nn.ReLU(), nn.Linear(config.tower_hidden, 1)
        )

    def forward(self, x: dict[str, Tensor]) -> Tensor:
        width = self.config.width
        valid = torch.arange(self.config.history, device=x["hist_length"].device) < x["hist_length"].unsqueeze(1)  # (B, L)
        mask = valid[:, None, None, :]

        history = self.encoder(self.items(x["hist_item"]), self.categories(x["hist_category"]), mask)
        kept = history.masked_fill(~valid.unsqueeze(2), 0.0)
        mean = kept.sum(1) / x["hist_length"].clamp(min=1).unsqueeze(1).to(kept.dtype)
        user = [
            self.user_fields(x["user_fields"]),
            self.user_dense(x["user_dense"]).unflatten(1, (-1, width)),
            self.history_row(mean).unsqueeze(1),
        ]

        item, category = self.items(x["item"]), self.categories(x["item_category"])
        candidate = [
            torch.stack([item, category], dim=1),
            self.item_fields(x["item_fields"]),
            self.item_dense(x["item_dense"]).unflatten(1, (-1, width)),
            self.attention(item, category, history, mask),
        ]

        stack = self.norm(self.compression(torch.cat(user + candidate, dim=1)))
        for block in self.blocks:
            stack = block(stack)
        return self.tower(stack.flatten(1)).squeeze(1)


def draw_inputs(config: Config, users: int, candidates: int, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """Random rows of both sides; the first user has no history and the last one a full one."""

    def ids(values: int, *shape: int) -> Tensor:
        return torch.randint(values, shape, generator=generator)

    def dense(rows: int) -> Tensor:
        return torch.randn(rows, config.dense, generator=generator).to(dtype)

    length = ids(config.history + 1, users)
    length[0], length[-1] = 0, config.history
    padding = torch.arange(config.history) >= length.unsqueeze(1)
    return {
        "user_fields": ids(config.field_values, users, config.user_fields),
        "user_dense": dense(users),
        "hist_item": ids(config.items, users, config.history).masked_fill(padding, 0),
        "hist_category": ids(config.categories, users, config.history).masked_fill(padding, 0),
        "hist_length": length,
        "item": ids(config.items, candidates),
        "item_category": ids(config.categories, candidates),
        "item_fields": ids(config.field_values, candidates, config.candidate_fields),
        "item_dense": dense(candidates),
    }


def is_user(name: str) -> bool:
    return name.startswith(("user_", "hist_"))


def make_ranker(config: Config, dtype: torch.dtype = torch.float32, seed: int = 0) -> Ranker:
    torch.manual_seed(seed)
    return Ranker(config).to(dtype).eval()


def export(model: Ranker, example: dict[str, Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (example,), dynamic_shapes=({name: {0: batch} for name in example},))
    return program.run_decompositions({})  # no in-place operators; linear, matmul and attention stay whole


def write_requests(config: Config, dtype: torch.dtype, path: Path, seed: int) -> None:
    inputs = draw_inputs(config, REQUESTS, REQUESTS * CANDIDATES, dtype, torch.Generator().manual_seed(seed))
    # Dense values with four digits: short to read, and exact again once they are rounded to the model's type.
    values = {
        name: [[round(v, 4) for v in row] for row in t.tolist()] if t.is_floating_point() else t.tolist()
        for name, t in inputs.items()
    }
    requests = []
    for user in range(REQUESTS):
        rows = slice(user * CANDIDATES, (user + 1) * CANDIDATES)
        requests.append({
            "id": f"user {user}",
            "user": {name: v[user] for name, v in values.items() if is_user(name)},
            "candidates": {name: v[rows] for name, v in values.items() if not is_user(name)},
        })  # fmt: skip
    path.write_text('{"requests": [\n' + ",\n".join(map(json.dumps, requests)) + "\n]}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Exports the reference ranker and writes requests for the ikbo command.")
    parser.add_argument("--config", choices=CONFIGS, default="small")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--out", type=Path, default=Path("build/ranker"), help="folder for the archive and the requests")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the requests")
    options = parser.parse_args()
    config, dtype = CONFIGS[options.config], DTYPES[options.dtype]
    options.out.mkdir(parents=True, exist_ok=True)

    model = make_ranker(config, dtype, options.seed)
    example = draw_inputs(config, 4, 4, dtype, torch.Generator().manual_seed(options.seed + 1))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch about itself
        torch.export.save(export(model, example), options.out / ARCHIVE_FILE)
    write_requests(config, dtype, options.out / REQUESTS_FILE, options.seed + 2)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"  {options.out / ARCHIVE_FILE}: {parameters / 1e6:.1f} M parameters, {options.dtype}")
    print(f"  {options.out / REQUESTS_FILE}: {REQUESTS} requests of {CANDIDATES} candidates")


if __name__ == "__main__":
    main()
