"""fuxictr 1.2.2: one float64 matrix of all features, and a label that inference never reads."""

from __future__ import annotations

import inspect
import tempfile
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from catalogue import HISTORY, Column, Entry, Example, history, ids, numbers, pack, stub_modules

# Written for NumPy and PyTorch of its day: aliases that are gone, and byte masks where bool is asked for today.
for _name, _type in (("float", float), ("int", int), ("bool", bool), ("object", object)):
    if _name not in np.__dict__:
        setattr(np, _name, _type)
_tensor_type = torch.Tensor.type
torch.Tensor.byte = lambda self, *a, **k: self.bool()  # type: ignore[method-assign,assignment]
torch.Tensor.type = (  # type: ignore[method-assign]
    lambda self, *a, **k: self.bool() if a and a[0] is torch.ByteTensor else _tensor_type(self, *a, **k)
)

stub_modules("h5py")  # reads data files only
import fuxictr.pytorch.models as models  # noqa: E402
from fuxictr.features import FeatureMap  # noqa: E402

ITEMS, CATEGORIES = 5000, 100
FOLDER = tempfile.gettempdir()


def feature_map(attends: bool, with_numbers: bool, with_history: bool) -> Any:
    encoder = None if attends else "MaskedAveragePooling"
    specs: dict[str, dict[str, Any]] = OrderedDict()
    specs["user_id"] = {"source": "user", "type": "categorical", "vocab_size": 1000}
    specs["gender"] = {"source": "user", "type": "categorical", "vocab_size": 4}
    specs["city"] = {"source": "user", "type": "categorical", "vocab_size": 200}
    if with_numbers:
        specs["age"] = {"source": "user", "type": "numeric"}
    specs["item_id"] = {"source": "item", "type": "categorical", "vocab_size": ITEMS, "padding_idx": ITEMS - 1}
    specs["cate_id"] = {"source": "item", "type": "categorical", "vocab_size": CATEGORIES, "padding_idx": CATEGORIES - 1}
    specs["brand"] = {"source": "item", "type": "categorical", "vocab_size": 300}
    specs["hour"] = {"source": "context", "type": "categorical", "vocab_size": 24}
    if with_history:
        for name, shared, size in (("click_history", "item_id", ITEMS), ("cate_history", "cate_id", CATEGORIES)):
            specs[name] = {
                "source": "user", "type": "sequence", "vocab_size": size, "padding_idx": size - 1, "max_len": HISTORY,
                "encoder": encoder, "share_embedding": shared,
            }  # fmt: skip
    features = FeatureMap("zoo", FOLDER)
    features.version = "pytorch"
    features.feature_specs = specs
    features.num_fields = len(specs)
    features.num_features = sum(s.get("vocab_size", 1) for s in specs.values())
    features.set_feature_index()
    return features


def columns(specs: dict[str, dict[str, Any]]) -> list[Column]:
    found = []
    for name, spec in specs.items():
        user = spec["source"] in ("user", "context")
        if spec["type"] == "numeric":
            found.append(Column(name, 1, user, lambda: numbers(1)))
        elif spec["type"] == "sequence":
            found.append(Column(name, HISTORY, user, lambda s=spec: history(s["vocab_size"], s["padding_idx"])))
        else:
            found.append(Column(name, 1, user, lambda s=spec: ids(s["vocab_size"] - 1, 1, first=0)))
    return found


class Scores(torch.nn.Module):
    """The package's models take [X, y] and return a dict; the label is not read for scores."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, X: torch.Tensor) -> torch.Tensor:  # noqa: N803
        return self.model([X, X[:, 0]])["y_pred"]


COMMON: dict[str, Any] = {
    "model_root": FOLDER, "metrics": ["AUC"], "verbose": 0, "optimizer": "adam", "loss": "binary_cross_entropy",
    "embedding_dim": 16, "gpu": -1,
}  # fmt: skip
ATTENTION = {"din_target_field": [("item_id", "cate_id")], "din_sequence_field": [("click_history", "cate_history")]}
OPTIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "DCNv2": [
        ("stacked and parallel", {"stacked_dnn_hidden_units": [64], "parallel_dnn_hidden_units": [64]}),
        ("low rank", {"use_low_rank_mixture": True, "stacked_dnn_hidden_units": [64], "parallel_dnn_hidden_units": [64]}),
    ],
    "DIN": [("", ATTENTION), ("softmax", {**ATTENTION, "din_use_softmax": True, "dnn_activations": "Dice", "batch_norm": True})],
}


def entry(name: str, label: str, options: dict[str, Any]) -> Entry:
    def make() -> Example:
        first_error: Exception | None = None
        # Not every model takes numbers or histories: the richest features that it runs with.
        for with_numbers, with_history in ((True, True), (False, True), (True, False), (False, False)):
            try:
                features = feature_map(name == "DIN", with_numbers, with_history)
                model = getattr(models, name)(features, **{**COMMON, **options}).eval()
                matrix, ranges = pack(columns(features.feature_specs), dtype=torch.float64)
                with torch.no_grad():
                    model([matrix, matrix[:, 0]])
                return Example(Scores(model), matrix, ranges)
            except Exception as error:  # noqa: BLE001
                first_error = first_error or error
        assert first_error is not None
        raise first_error

    return Entry(f"{name} {label}".strip(), make)


def entries() -> list[Entry]:
    names = sorted(n for n in dir(models) if inspect.isclass(getattr(models, n)) and n != "BaseModel")
    return [entry(n, label, options) for n in names for label, options in OPTIONS.get(n, [("", {})])]
