"""What callers pass by mistake: errors name the argument and its value, and say what would be right."""

import pytest
import torch

import moe_zero
from moe_zero.layers import TokenMoE
from moe_zero.ops.beam_step import beam_step
from moe_zero.ops.combine import combine
from moe_zero.ops.flat import FlatPlan, pack, pack_reference, unpack_reference
from moe_zero.ops.gate import gate
from moe_zero.ops.gelu_ffn import gelu_ffn

X, ROUTER, IDS = torch.zeros(4, 8), torch.zeros(3, 8), torch.zeros(4, 1, dtype=torch.int64)
W1, B1, W2, B2 = (torch.zeros(shape) for shape in ((2, 6, 8), (2, 6), (2, 8, 6), (2, 8)))
PLAN = FlatPlan([2], ["float32"], [True], 1)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gate([1.0], ROUTER, 1), TypeError, "x is a list; it must be a tensor"),
        (lambda: gate(X, None, 1), TypeError, "router is None"),
        (lambda: gate(X, ROUTER, 1.5), TypeError, "k is 1.5; it must be an integer"),
        (lambda: combine([1]), TypeError, "y is a list"),
        (lambda: beam_step(None, [[0.5]], 2), TypeError, "probs is a list"),
        (
            lambda: beam_step(torch.ones(2, 2), torch.ones(4, 3), 2, torch.zeros(2, 2, 1)),
            TypeError,
            "routes have dtype torch.float32; they must be integers",
        ),
        (
            lambda: beam_step(torch.ones(2, 0), torch.ones(0, 3), 2, torch.zeros(2, 0, 1).long()),
            ValueError,
            r"parent_scores have shape \(2, 0\); at least one beam",
        ),
        (lambda: beam_step(None, torch.ones(4, 3), 2**60), ValueError, "k is 1152921504606846976; it must be between"),
        (lambda: gelu_ffn(X, IDS, None, None, None, W2, None), TypeError, "w1 is None; only biases"),
        (lambda: gelu_ffn(X, IDS, None, W1, None, None, None), TypeError, "w2 is None; only biases"),
        (lambda: gelu_ffn(X, IDS, None, [[1.0]], None, W2, None), TypeError, r"w1\[0\] is a list"),
        (lambda: gelu_ffn(X, [0], None, W1, B1, W2, B2), TypeError, "ids is a list"),
        (lambda: TokenMoE(8, 16.0, 2, 1), TypeError, "intermediate_size is 16.0; it must be an integer"),
        (lambda: TokenMoE(8, 16, "2", 1), TypeError, "num_experts is '2'"),
        (lambda: TokenMoE(8, 16, 4, 1)(torch.zeros(3, 9)), ValueError, r"x has shape \(3, 9\), but .* hidden size 8"),
        (lambda: FlatPlan([2.5], ["float32"], [True], 1), TypeError, r"sizes\[0\] is 2.5; it must be an integer"),
        (lambda: FlatPlan([2], ["float32"], [True], 1.0), TypeError, "world_size is 1.0; it must be an integer"),
        (lambda: FlatPlan([2], ["float32"], [True], 2**40), ValueError, "world_size is .* between 1 and 16777216"),
        (lambda: FlatPlan([2], ["float32"], [True], 1, [0.5]), TypeError, r"tags\[0\] is 0.5"),
        (lambda: pack([[1.0, 2.0]], PLAN), TypeError, r"tensors\[0\] is a list"),
        (lambda: pack([torch.zeros(2)], PLAN, [0]), TypeError, "out is a list; it must be a tensor"),
        (lambda: pack(torch.zeros(2), PLAN), TypeError, "tensors is a single tensor"),
        (lambda: moe_zero.patch([1]), TypeError, "model is a list"),
        (lambda: moe_zero.patch(torch.nn.Sequential(), names=[3]), TypeError, "names holds a int"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_references_refuse_shared_memory_as_the_operators_do():
    flat = torch.zeros(16)
    with pytest.raises(ValueError, match=r"tensors\[0\] shares memory with the flat buffer"):
        pack_reference([flat[:2]], PLAN, flat)
    with pytest.raises(ValueError, match=r"tensors\[0\] shares memory with the flat buffer"):
        unpack_reference(flat, PLAN, [flat[:2]])
    with pytest.raises(ValueError, match=r"tensors\[0\] shares memory with itself"):
        unpack_reference(flat, PLAN, [torch.zeros(1).expand(2)])
    two, target = FlatPlan([2, 2], ["float32"] * 2, [True] * 2, 1), torch.zeros(3)
    with pytest.raises(ValueError, match=r"tensors\[0\] and tensors\[1\] share memory"):
        unpack_reference(torch.zeros(16), two, [target[:2], target[1:]])


def test_patch_names_the_pattern_that_matches_nothing():
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4)))
    with pytest.raises(ValueError, match=r"'nope.\*' matches none of the model's feed-forwards; these are 0"):
        moe_zero.patch(model, names=["0", "nope.*"])


def test_patch_says_why_a_whole_layer_is_left_alone():
    report = moe_zero.patch(torch.nn.TransformerEncoderLayer(8, 2, 16, activation="gelu"))
    assert not report.replaced and "wrap it" in report.left["the model itself"]
