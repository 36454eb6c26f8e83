"""deepctr-torch 0.3.0: one float32 matrix, whose columns the model slices and casts to ids."""

from __future__ import annotations

from typing import Any, Callable

import torch

from catalogue import HISTORY, Column, Entry, Example, history, ids, numbers, pack, stub_modules


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("no network here")


# At import the package asks PyPI for its newest version, in a thread.
stub_modules("requests", get=_refuse)

import deepctr_torch.models as models  # noqa: E402
from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat, build_input_features  # noqa: E402

WIDTH = 8
VOCABULARY = {"user_id": 1000, "gender": 4, "city": 200, "item_id": 5000, "cat": 100, "brand": 300}
USER_COLUMNS = {"user_id", "gender", "city", "age", "hist_pool", "hist_item_id", "hist_cat", "seq_length"}


def sparse(*names: str) -> list[Any]:
    return [SparseFeat(n, VOCABULARY[n], WIDTH) for n in names]


SPARSE = sparse("user_id", "gender", "city", "item_id", "cat", "brand")
DENSE = [DenseFeat("age", 1), DenseFeat("price", 1)]
POOLED = [VarLenSparseFeat(SparseFeat("hist_pool", VOCABULARY["item_id"], WIDTH), maxlen=HISTORY, combiner="mean")]
ALL = SPARSE + DENSE + POOLED
BEHAVIOUR = ["item_id", "cat"]


def behaviour(prefix: str = "") -> list[Any]:
    return [
        VarLenSparseFeat(SparseFeat(f"{prefix}hist_{n}", VOCABULARY[n], WIDTH, embedding_name=n), HISTORY, length_name="seq_length")
        for n in BEHAVIOUR
    ]


DIN_FEATURES = SPARSE + DENSE + behaviour()


def column(name: str, width: int) -> Column:
    if name in ("age", "price"):
        return Column(name, width, name in USER_COLUMNS, lambda: numbers(width))
    if name == "seq_length":
        return Column(name, width, True, lambda: ids(HISTORY + 1, width))
    if "hist" in name:
        vocabulary = VOCABULARY["cat" if name.endswith("cat") else "item_id"]
        return Column(name, width, True, lambda: history(vocabulary, length=width))
    return Column(name, width, name in USER_COLUMNS, lambda: ids(VOCABULARY[name], width, first=0))


def entry(name: str, build: Callable[[], torch.nn.Module], features: list[Any] = ALL) -> Entry:
    def make() -> Example:
        spans = build_input_features(features)
        matrix, ranges = pack([column(n, end - start) for n, (start, end) in spans.items()])
        return Example(build(), matrix, ranges)

    return Entry(name, make)


def entries() -> list[Entry]:
    found = [
        entry(name, lambda n=name: getattr(models, n)(ALL, ALL))
        for name in ("WDL", "DeepFM", "xDeepFM", "DIFM", "IFM", "AutoInt", "DCN", "DCNMix", "NFM", "ONN")
    ]
    found += [
        entry("WDL batch norm", lambda: models.WDL(ALL, ALL, dnn_use_bn=True)),
        entry("DCN matrix", lambda: models.DCN(ALL, ALL, cross_parameterization="matrix")),
        entry("CCPM", lambda: models.CCPM(SPARSE + POOLED, SPARSE + POOLED), SPARSE + POOLED),
        entry("AFM", lambda: models.AFM(ALL, SPARSE + POOLED)),
        entry("AFM no attention", lambda: models.AFM(ALL, SPARSE + POOLED, use_attention=False)),
        entry("AFN", lambda: models.AFN(SPARSE, SPARSE), SPARSE),
        entry("MLR", lambda: models.MLR(SPARSE + DENSE, base_feature_columns=SPARSE), SPARSE + DENSE),
        entry("PNN inner", lambda: models.PNN(ALL)),
        entry("PNN both", lambda: models.PNN(ALL, use_outter=True)),
        entry("DIN Dice", lambda: models.DIN(DIN_FEATURES, BEHAVIOUR, dnn_use_bn=True), DIN_FEATURES),
        entry("DIN softmax", lambda: models.DIN(DIN_FEATURES, BEHAVIOUR, att_weight_normalization=True), DIN_FEATURES),
        entry("SharedBottom", lambda: models.SharedBottom(ALL, **_tasks())),
        entry("MMOE", lambda: models.MMOE(ALL, **_tasks())),
        entry("PLE", lambda: models.PLE(ALL, **_tasks())),
        entry("ESMM", lambda: models.ESMM(ALL)),
    ]
    found += [entry(f"FiBiNET {k}", lambda k=k: models.FiBiNET(ALL, ALL, bilinear_type=k)) for k in ("interaction", "all", "each")]
    found += [
        entry(f"PNN outer {k}", lambda k=k: models.PNN(ALL, use_inner=False, use_outter=True, kernel_type=k))
        for k in ("mat", "vec", "num")
    ]
    found += [
        entry(f"DIEN {k}", lambda k=k: models.DIEN(DIN_FEATURES, BEHAVIOUR, gru_type=k), DIN_FEATURES)
        for k in ("GRU", "AIGRU", "AGRU", "AUGRU")
    ]
    return found


def _tasks() -> dict[str, Any]:
    return {"task_types": ["binary", "binary"], "task_names": ["click", "like"]}
