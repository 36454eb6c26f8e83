"""torch-rechub 0.9.0: named inputs; sequence features carry the history, pooled or as they are."""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch_rechub.models.matching as matching
import torch_rechub.models.multi_task as multi_task
import torch_rechub.models.ranking as ranking
from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
from torch_rechub.models.generative.hstu import HSTUModel

from catalogue import HISTORY, Entry, Example, history, ids, numbers

WIDTH = 16
VOCABULARY = {"user_id": 1000, "gender": 3, "city": 200, "item_id": 5000, "cat": 100, "brand": 300}
USER = ("user_id", "gender", "city")
ITEM = ("item_id", "cat", "brand")
USER_NUMBERS = ("age",)
ITEM_NUMBERS = ("price",)
SHARED = {"hist_item": "item_id", "hist_cat": "cat"}
NEGATIVES = 5
TASKS = ["classification", "classification"]

Features = list[Any]


def sparse(*names: str, width: int = WIDTH, **options: Any) -> Features:
    return [SparseFeature(n, VOCABULARY[n], width, **options) for n in names]


def dense(*names: str) -> Features:
    return [DenseFeature(n) for n in names]


def sequences(*names: str, pooling: str = "mean", width: int = WIDTH) -> Features:
    shared = {n: SHARED[n] for n in names}
    return [SequenceFeature(n, VOCABULARY[s], width, pooling=pooling, shared_with=s, padding_idx=0) for n, s in shared.items()]


def fields() -> Features:
    """Everything that has an embedding, histories as means."""
    return sparse(*USER, *ITEM) + sequences("hist_item", "hist_cat")


def mixed() -> Features:
    return fields() + dense(*USER_NUMBERS, *ITEM_NUMBERS)


def mlp(*dims: int) -> dict[str, Any]:
    return {"dims": list(dims) or [256, 128], "dropout": 0.1}


def user_side() -> Features:
    return sparse(*USER) + sequences("hist_item", "hist_cat")


def user_side_one_history() -> Features:
    return sparse(*USER) + sequences("hist_item")


def inputs(*extra: str) -> dict[str, torch.Tensor]:
    x = {name: ids(VOCABULARY[name]) for name in USER}
    x |= {name: numbers() for name in USER_NUMBERS}
    x |= {name: history(VOCABULARY[shared]) for name, shared in SHARED.items()}
    x |= {name: ids(VOCABULARY[name]) for name in ITEM}
    x |= {name: numbers() for name in ITEM_NUMBERS}
    if "neg_hist" in extra:
        x |= {f"neg_{name}": history(VOCABULARY[shared]) for name, shared in SHARED.items()}
    if "neg_items" in extra:
        x["neg_items"] = ids(VOCABULARY["item_id"], NEGATIVES)
    return x


REQUEST_ONLY = [*USER, *USER_NUMBERS, *SHARED, *(f"neg_{name}" for name in SHARED)]


class Keep(torch.nn.Module):
    """The inputs as the argument of one name that all models of the package are exported with."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor]) -> Any:
        return self.model(x)


def entry(name: str, build: Callable[[], torch.nn.Module], *extra: str) -> Entry:
    def make() -> Example:
        model = build()
        x = inputs(*extra)
        used: set[str] = set()

        class Recorder(dict):  # type: ignore[type-arg]
            def __getitem__(self, key: str) -> torch.Tensor:
                used.add(key)
                return super().__getitem__(key)

        with torch.no_grad():
            model.eval()(Recorder(x))
        x = {k: v for k, v in x.items() if k in used}
        return Example(Keep(model), x, [n for n in REQUEST_ONLY if n in x])

    return Entry(name, make)


def target_and_history(width: int = WIDTH) -> tuple[Features, Features, Features]:
    return (
        sparse(*USER, width=width),
        sequences("hist_item", "hist_cat", pooling="concat", width=width),
        sparse("item_id", "cat", width=width, padding_idx=0),
    )


def _with_negatives() -> tuple[Features, Features, Features, Features]:
    features, past, target = target_and_history()
    negative = [
        SequenceFeature(f"neg_{f.name}", f.vocab_size, WIDTH, pooling="concat", shared_with=f.shared_with, padding_idx=0) for f in past
    ]
    return features, past, negative, target


def negatives(pooling: str = "concat") -> Features:
    return [SequenceFeature("neg_items", VOCABULARY["item_id"], WIDTH, pooling=pooling, shared_with="item_id")]


def item() -> Features:
    return sparse("item_id")


def item_history(pooling: str = "concat") -> Features:
    return sequences("hist_item", pooling=pooling)


def plain_history() -> Any:
    return SequenceFeature("hist_item", VOCABULARY["item_id"], WIDTH, pooling="concat", padding_idx=0)


class First(torch.nn.Module):
    """Prediction and training loss: the prediction."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(x)[0]


class HistoryNextItem(torch.nn.Module):
    """HSTU gives the scores of all items at every position: the candidate's, at the last."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.model(x["hist_item"])
        return logits[:, -1].gather(1, x["item_id"].unsqueeze(1))


def tower() -> dict[str, Any]:
    return {"dims": [64]}


def towers() -> list[dict[str, Any]]:
    return [tower(), tower()]


def fields_of(width: int, times: int = 1) -> Features:
    return [SparseFeature(n, VOCABULARY[n] * times, width) for n in (*USER, *ITEM)]


def entries() -> list[Entry]:
    r, t, m = ranking, multi_task, matching
    found = [
        entry("WideDeep", lambda: r.WideDeep(fields(), mixed(), mlp())),
        entry("DeepFM", lambda: r.DeepFM(deep_features=mixed(), fm_features=fields(), mlp_params=mlp())),
        entry("DCN", lambda: r.DCN(mixed(), 3, mlp())),
        entry("DCNv2 mixture parallel", lambda: r.DCNv2(mixed(), 3, mlp())),
        entry("DCNv2 full stacked", lambda: r.DCNv2(mixed(), 3, mlp(), model_structure="stacked", use_low_rank_mixture=False)),
        entry("DCNv2 full crossnet", lambda: r.DCNv2(mixed(), 3, mlp(), model_structure="crossnet_only", use_low_rank_mixture=False)),
        entry("AFM", lambda: r.AFM(fields(), WIDTH)),
        entry("AutoInt", lambda: r.AutoInt(fields(), dense(*USER_NUMBERS, *ITEM_NUMBERS), mlp_params=mlp())),
        entry("AutoInt 4 heads", lambda: r.AutoInt(fields(), dense(*USER_NUMBERS, *ITEM_NUMBERS), 2, 4, mlp_params=mlp())),
        entry("DeepFFM", lambda: r.DeepFFM(fields_of(1), fields_of(WIDTH, 6), WIDTH, mlp())),
        entry("FatDeepFFM", lambda: r.FatDeepFFM(fields_of(1), fields_of(WIDTH, 6), WIDTH, 2, mlp())),
        entry("BST", lambda: r.BST(*target_and_history(), mlp(), nhead=4, dropout=0.1, max_seq_len=HISTORY + 1)),
        entry("BST 2 layers", lambda: r.BST(*target_and_history(), mlp(), nhead=4, dropout=0.1, num_layers=2, max_seq_len=HISTORY + 1)),
        entry("DIN", lambda: r.DIN(*target_and_history(), mlp(), {"dims": [64, 32], "activation": "dice"})),
        entry("DIN softmax", lambda: r.DIN(*target_and_history(), mlp(), {"dims": [64], "activation": "dice", "use_softmax": True})),
        entry("DIEN", lambda: First(r.DIEN(*_with_negatives(), mlp())), "neg_hist"),
        entry("SharedBottom", lambda: t.SharedBottom(mixed(), TASKS, {"dims": [128]}, towers())),
        entry("MMOE", lambda: t.MMOE(mixed(), TASKS, 3, {"dims": [64]}, towers())),
        entry("PLE", lambda: t.PLE(mixed(), TASKS, 2, 2, 1, {"dims": [64]}, towers())),
        entry("ESMM", lambda: t.ESMM(sparse(*USER), sparse(*ITEM), {"dims": [64]}, {"dims": [64]})),
        entry("AITM", lambda: t.AITM(mixed(), 2, {"dims": [128, 64]}, towers())),
        entry("DSSM", lambda: m.DSSM(user_side(), sparse(*ITEM), {"dims": [128, 64]}, {"dims": [128, 64]})),
        entry("FaceBookDSSM", lambda: m.FaceBookDSSM(user_side_one_history(), item(), negatives("mean"), {"dims": [64]}, {"dims": [64]}), "neg_items"),
        entry("YoutubeDNN", lambda: m.YoutubeDNN(user_side_one_history(), item(), negatives(), {"dims": [64, WIDTH]}), "neg_items"),
        entry("YoutubeSBC", lambda: m.YoutubeSBC(user_side(), sparse(*ITEM), dense("price"), {"dims": [64]}, {"dims": [64]}, 16)),
        entry("GRU4Rec", lambda: m.GRU4Rec(sparse(*USER), item_history(), item(), negatives(), {"dims": [64, WIDTH]}), "neg_items"),
        entry("MIND", lambda: m.MIND(sparse(*USER), item_history(), item(), negatives(), HISTORY), "neg_items"),
        entry("ComirecSA", lambda: m.ComirecSA(sparse(*USER), item_history(), item(), negatives()), "neg_items"),
        entry("ComirecDR", lambda: m.ComirecDR(sparse(*USER), item_history(), item(), negatives(), HISTORY), "neg_items"),
        entry("NARM", lambda: m.NARM(plain_history(), WIDTH, 0.1, 0.1, item()[0])),
        entry("STAMP", lambda: m.STAMP(plain_history(), 0.1, 0.1, item()[0])),
        entry("SINE", lambda: m.SINE(["hist_item"], ["item_id"], ["neg_items"], VOCABULARY["item_id"], 32, 32, 10, 4, HISTORY), "neg_items"),
        entry("HSTU", lambda: HistoryNextItem(HSTUModel(VOCABULARY["item_id"], d_model=64, n_heads=2, n_layers=2, dqk=32, dv=32, max_seq_len=HISTORY))),
    ]
    for kind in ("hadamard_product", "pointwise_addition", "concatenation", "attention_pooling"):
        found.append(entry(f"EDCN {kind}", lambda k=kind: r.EDCN(fields(), 2, {"dropout": 0.1}, bridge_type=k)))
    for kind in ("field_all", "field_each", "field_interaction"):
        found.append(entry(f"FiBiNet {kind}", lambda k=kind: r.FiBiNet(sparse(*USER, *ITEM), mlp(), bilinear_type=k)))
    return found
