"""recbole 1.2.1: models are made from a configuration and a data set (the MovieLens-100K that its wheel carries)."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from catalogue import BATCH, HISTORY, Entry, Example, stub_modules

stub_modules("thop", "thop.vision", "ray", "ray.tune", profile=None)
stub_modules("torch.utils.tensorboard", SummaryWriter=type("SummaryWriter", (), {}))
for _name, _type in (("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_), ("bool8", np.bool_)):
    if not hasattr(np, _name):
        setattr(np, _name, _type)
# The package unpickles what it wrote itself.
_load = torch.load
torch.load = lambda *a, **k: _load(*a, **{"weights_only": False, **k})

import recbole  # noqa: E402
from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset  # noqa: E402
from recbole.data.interaction import Interaction  # noqa: E402
from recbole.utils import get_model  # noqa: E402

DATA = Path(recbole.__file__).parent / "dataset_example"
FOLDER = Path(tempfile.gettempdir()) / "ikbo-zoo-recbole"
# Of the candidate; everything else is known when the request comes, the time of the request included.
CANDIDATE = {"item_id", "release_year", "class", "neg_item_id"}

CONTEXT = (
    "LR", "FM", "FFM", "FwFM", "FNN", "NFM", "AFM", "PNN", "DeepFM", "xDeepFM", "WideDeep", "DCN", "DCNV2", "AutoInt", "DSSM",
    "FiGNN", "EulerNet", "KD_DAGFM",
)  # fmt: skip
SEQUENTIAL = (
    "DIN", "DIEN", "SASRec", "GRU4Rec", "BERT4Rec", "NARM", "STAMP", "Caser", "NextItNet", "SASRecF", "GRU4RecF", "FDSA", "FPMC",
    "HRM", "HGN", "NPE", "SHAN", "TransRec", "LightSANs", "SINE", "CORE", "SRGNN", "GCSAN", "FOSSIL", "RepeatNet", "S3Rec",
    "FEARec", "GRU4RecCPR", "SASRecCPR",
)  # fmt: skip
GENERAL = ("BPR", "NeuMF", "DMF", "ConvNCF", "NAIS", "FISM")
OPTIONS: dict[str, dict[str, Any]] = {
    "FFM": {"fields": None},
    "DSSM": {"double_tower": True},
    "KD_DAGFM": {"phase": "teacher_training"},
    "DIEN": {"train_neg_sample_args": {"distribution": "uniform", "sample_num": 1, "dynamic": False, "candidate_num": 0}},
    **{n: {"selected_features": ["class", "release_year"]} for n in ("SASRecF", "GRU4RecF", "FDSA")},
}


class Predict(torch.nn.Module):
    """Named tensors, as the package's Interaction."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.predict(Interaction(dict(x)))


class Recorder(Interaction):
    """Notes which columns a model reads."""

    used: set[str]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            self.used.add(key)
        return super().__getitem__(key)


def make(name: str) -> Example:
    sys.argv = sys.argv[:1]  # which the package would read as its own options
    FOLDER.mkdir(exist_ok=True)
    os.chdir(FOLDER)
    settings: dict[str, Any] = {
        "data_path": str(DATA), "use_gpu": False, "state": "ERROR", "show_progress": False, "benchmark_filename": None,
        "train_neg_sample_args": None, "MAX_ITEM_LIST_LENGTH": HISTORY, "checkpoint_dir": str(FOLDER), "save_dataset": False,
        "load_col": {
            "inter": ["user_id", "item_id", "rating", "timestamp"],
            "user": ["user_id", "age", "gender", "occupation"],
            "item": ["item_id", "release_year", "class"],
        },
    }  # fmt: skip
    if name not in SEQUENTIAL:
        settings |= {"threshold": {"rating": 4}, "numerical_features": ["timestamp"], "normalize_all": True}
    settings |= OPTIONS.get(name, {})
    config = Config(model=name, dataset="ml-100k", config_dict=settings, config_file_list=[])
    logging.disable(logging.CRITICAL)
    config["device"] = torch.device("cpu")
    data = create_dataset(config).build()[0]
    model = get_model(name)(config, data).eval()
    if not isinstance(data.inter_feat, Interaction):
        data._change_feat_format()
    # Rows far apart, so that histories of many lengths are among them.
    rows = torch.linspace(0, len(data.inter_feat) - 1, BATCH).long()
    batch = data.join(data.inter_feat[rows])
    recorder = Recorder(batch.interaction)
    recorder.used = set()
    with torch.no_grad():
        model.predict(recorder)
    x = {k: v for k, v in batch.interaction.items() if k in recorder.used}
    return Example(Predict(model), x, [k for k in x if k not in CANDIDATE])


def entries() -> list[Entry]:
    return [Entry(n, lambda n=n: make(n)) for n in (*CONTEXT, *SEQUENTIAL, *GENERAL)]
