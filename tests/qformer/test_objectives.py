import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from moe_zero.qformer.objectives import best_query_similarity, draw_negatives

_SCRIPT = Path(__file__).with_name("objectives_on_ranks.py")
_SPEC = importlib.util.spec_from_file_location("objectives_on_ranks", _SCRIPT)
on_ranks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(on_ranks)


@pytest.fixture(scope="module")
def alone():
    """Losses and gradients of the whole batch in one process."""
    model = on_ranks.make()
    losses = model(**on_ranks.batch())
    losses.total.backward()
    results = {f"loss.{name}": value.detach() for name, value in losses._asdict().items()}
    return results | {f"grad.{name}": parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_and_gradients_do_not_depend_on_the_number_of_ranks(ranks, alone, results_of_ranks):
    together = results_of_ranks(_SCRIPT, ranks)
    assert together.keys() == alone.keys()
    for name, expected in alone.items():
        # The gradient of a key's bias is 0 by nature (softmax does not see it): rounding is all there is of it.
        error = (together[name] - expected).norm()
        assert error < 1e-4 * expected.norm() + 1e-5, f"{name}: {error:.2e} of {expected.norm():.2e}"


def test_contrastive_loss_is_the_formula():
    """ITC written out: softmax over the batch of the best query's cosine, targets spread over a picture's captions."""
    model, batch = on_ranks.make(objectives=("itc",)), on_ranks.batch()
    queries = model(image_features=batch["image_features"], task="images").queries
    texts = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], task="texts")
    pairs = range(on_ranks.PAIRS)
    scores = torch.stack([torch.stack([(queries[i] @ texts[j]).max() for j in pairs]) for i in pairs]) / 0.07
    same = batch["image_ids"][:, None] == batch["image_ids"]
    target = same.float() / same.sum(1, keepdim=True)
    expected = (
        -(target * scores.log_softmax(1)).sum(1).mean() / 2 - (target * scores.T.log_softmax(1)).sum(1).mean() / 2
    )
    batch.pop("negative_draws")
    losses = model(**batch)
    torch.testing.assert_close(losses.itc, expected)
    assert losses.itm == 0 and losses.total.requires_grad


def test_matching_loss_takes_the_drawn_negatives():
    model, batch = on_ranks.make(), on_ranks.batch()
    losses = model(**batch)
    with torch.no_grad():
        queries = model(image_features=batch["image_features"], task="images").queries
        texts = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], task="texts")
        scores = best_query_similarity(queries, texts) / 0.07
        same = batch["image_ids"][:, None] == batch["image_ids"]
        texts_for = draw_negatives(scores, same, batch["negative_draws"][:, 0])
        images_for = draw_negatives(scores.T, same, batch["negative_draws"][:, 1])
        ids, mask, images = batch["input_ids"], batch["attention_mask"], batch["image_features"]
        margins = torch.cat(
            [
                model(images, ids, mask, task="match"),
                -model(images, ids[texts_for], mask[texts_for], task="match"),
                -model(images[images_for], ids, mask, task="match"),
            ]
        )
    torch.testing.assert_close(losses.itm, F.softplus(-margins).mean())
    torch.testing.assert_close(losses.itm_accuracy, (margins > 0).float().mean())


def test_negatives_are_never_positive_and_follow_the_scores():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(20000, 4)
    positive = torch.tensor([[True, False, False, False]]).expand(20000, 4)
    drawn = draw_negatives(scores, positive, torch.rand(20000))
    share = torch.bincount(drawn, minlength=4) / 20000
    expected = torch.cat([torch.zeros(1), torch.tensor([1.0, 0.0, -1.0]).softmax(0)])
    assert share[0] == 0
    torch.testing.assert_close(share, expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-24])
@pytest.mark.parametrize("right", [0, 3])
def test_extreme_draws_stay_off_the_positives(draw, right):
    scores = torch.randn(5, 4)
    positive = F.one_hot(torch.full((5,), right), 4).bool()
    assert (draw_negatives(scores, positive, torch.full((5,), draw)) != right).all()


def test_a_batch_of_one_picture_trains_without_negatives():
    model, batch = on_ranks.make(), on_ranks.batch()
    batch["image_ids"] = torch.zeros(on_ranks.PAIRS, dtype=torch.long)
    losses = model(**batch)
    losses.total.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_every_parameter_is_trained(alone):
    without = [name for name, value in alone.items() if name.startswith("grad.") and not value.abs().sum() > 0]
    assert without == []


def test_bf16_autocast_keeps_losses_in_fp32():
    model, batch = on_ranks.make(), on_ranks.batch()
    exact = model(**batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(**batch)
    assert rough.total.dtype == torch.float32
    assert abs(rough.itc - exact.itc) < 0.2 * exact.itc


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"task": "captions"}, "task is 'captions'"),
        ({"image_ids": None}, "task 'losses' needs image_ids"),
        ({"negative_draws": None}, "task 'losses' needs negative_draws"),
    ],
)
def test_wrong_calls_are_named(change, named):
    with pytest.raises(ValueError, match=named):
        on_ranks.make()(**{**on_ranks.batch(), **change})


def test_wrong_objectives_are_named():
    with pytest.raises(ValueError, match="objectives is"):
        on_ranks.make(objectives=("itm",))
    with pytest.raises(ValueError, match="needs a matching head"):
        batch = on_ranks.batch()
        on_ranks.make(objectives=("itc",))(
            batch["image_features"], batch["input_ids"], batch["attention_mask"], task="match"
        )
