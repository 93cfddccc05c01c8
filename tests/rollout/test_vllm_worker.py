"""What runs inside vLLM, on a model that is scripted; a real one is in tests/with_vllm."""

import json
from types import SimpleNamespace

import torch

from reframe_vl.rollout.vllm_worker import WeightSync


class Head:
    """Gives every token of a vocabulary of 6 the logit 0."""

    def compute_logits(self, hidden):
        return torch.zeros(len(hidden), 6)


class Graphs:
    """Stands before a model as vLLM's wrapper for CUDA graphs does: its class has no methods."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)


def shaped(banned, vocab_size):
    model, worker = Head(), WeightSync()
    wrapped = Graphs(model)
    worker.model_runner = SimpleNamespace(
        model=wrapped, get_model=lambda: model, device=torch.device("cpu")
    )
    # Each time anew: a server is asked before every step.
    for _ in range(2):
        worker.shape_logits("0.5", json.dumps(banned), str(vocab_size))
    return wrapped.compute_logits(torch.zeros(2, 3))


def test_a_teacher_cannot_draw_what_its_student_cannot():
    drawn = shaped([1], vocab_size=5)[0].isfinite().tolist()
    assert drawn == [True, False, True, True, True, False]


def test_c19_a_teacher_may_have_fewer_padded_rows_than_its_student():
    drawn = shaped([1, 6, 7], vocab_size=8)[0].isfinite().tolist()
    assert drawn == [True, False, True, True, True, True]
