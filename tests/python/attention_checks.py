"""What the tests of both attention operators share: a model's inputs, and its export with two batch sizes."""

import torch


def attend_inputs(users, candidates, length):
    lengths = torch.randint(length + 1, (users,), dtype=torch.int32)
    index = torch.randint(users, (candidates,), dtype=torch.int32)
    return torch.randn(candidates, 3, 2, 4), torch.randn(users, length, 4), lengths, index


def check_export(model, example, path):
    """Exports a model of (q, history, lengths, candidate_to_user) at the sizes of `example`; at others it must give the
    same bits."""
    users, candidates, length = (torch.export.Dim(name, min=0) for name in ("users", "candidates", "length"))
    program = torch.export.export(
        model, attend_inputs(*example),
        dynamic_shapes={"q": {0: candidates}, "history": {0: users, 1: length}, "lengths": {0: users},
                        "candidate_to_user": {0: candidates}},
    )  # fmt: skip
    torch.export.save(program, path)
    loaded = torch.export.load(path).module()
    for sizes in [(4, 9, 6), (9, 4, 2), (6, 6, 6), (1, 1, 1), (2, 3, 40)]:
        given = attend_inputs(*sizes)
        found, expected = (r if isinstance(r, tuple) else (r,) for r in (loaded(*given), model(*given)))
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), sizes
