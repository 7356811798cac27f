import math
from contextlib import nullcontext

import pytest
import torch

from moe_zero.qformer.objectives import ImageEmbedding
from moe_zero.recipes.processes import Processes
from moe_zero.recipes.retrieval import recall, retrieve

ALONE = Processes(0, 1, 0, 1, torch.device("cpu"))


def test_recall_counts_and_chance():
    #                        right is second              right is first
    scores = torch.tensor([[0.9, 0.8, 0.1, 0.0, -1, -2], [0.0, 0.1, 0.9, 0.2, 0, 0]])
    positive = torch.zeros(2, 6, dtype=torch.bool)
    positive[0, 1] = positive[1, 2] = positive[1, 5] = True
    found = recall(scores, positive)
    assert (found.r1, found.r5) == (0.5, 1.0)
    assert found.chance_r1 == pytest.approx((1 / 6 + 2 / 6) / 2)
    assert found.chance_r5 == pytest.approx((5 / 6 + 1) / 2)
    assert (found.queries, found.candidates) == (2, 6)


def test_equal_scores_are_no_success():
    """A model that gives everything the same score knows nothing."""
    found = recall(torch.zeros(4, 8), torch.eye(4, 8).bool())
    assert (found.r1, found.r5) == (0.0, 0.0)


def test_chance_is_what_random_scores_reach():
    positive = torch.zeros(3000, 12, dtype=torch.bool)
    positive[:, :2] = True
    found = recall(torch.rand(3000, 12), positive)
    assert found.r1 == pytest.approx(found.chance_r1, abs=0.03)
    assert found.r5 == pytest.approx(found.chance_r5, abs=0.03)
    assert found.chance_r5 == pytest.approx(1 - math.comb(10, 5) / math.comb(12, 5))


def test_a_search_without_right_candidate_is_an_error():
    with pytest.raises(ValueError, match="search 1 has no right candidate"):
        recall(torch.zeros(2, 2), torch.tensor([[True, False], [False, False]]))


class Oracle(torch.nn.Module):
    """Embeds picture features [P, W] and token numbers alike as the unit vector of the first number in them."""

    def forward(self, image_features=None, input_ids=None, attention_mask=None, *, task):
        if task == "match":
            return 10.0 * (image_features[:, 0, 0].long() == input_ids[:, 0]).float()
        if task == "texts":
            return torch.eye(8)[input_ids[:, 0]]
        owners = image_features[:, 0, 0].long()
        return ImageEmbedding(torch.eye(8)[owners][:, None].expand(-1, 3, -1), torch.stack([owners % 2, owners % 3], 1))


def search(model, image_numbers, **options):
    owner = torch.arange(5).repeat_interleave(4)
    text_owner = torch.arange(5).repeat_interleave(2)
    ids = text_owner[:, None].expand(-1, 6)
    return retrieve(
        model,
        lambda crop: torch.full((2, 3), float(image_numbers(owner[crop].item()))),
        owner,
        (ids, torch.ones_like(ids)),
        text_owner,
        ALONE,
        autocast=nullcontext,
        **options,
    )


def test_retrieve_end_to_end():
    found = search(Oracle(), lambda picture: picture)
    assert found.image_to_text.r1 == found.text_to_image.r1 == 1.0
    assert found.scores_IK.shape == (20, 10)
    assert torch.equal(found.routes_IL[:, 1], found.image_owner_I % 3)
    wrong = search(Oracle(), lambda picture: (picture + 1) % 5)
    assert wrong.image_to_text.r1 == wrong.text_to_image.r1 == 0.0


def test_reranking_decides_among_the_best():
    class Undecided(Oracle):
        """Two pictures look the same to the embedding; only the matching head tells them apart."""

        def forward(self, image_features=None, input_ids=None, attention_mask=None, *, task):
            if task == "texts":
                return super().forward(input_ids=input_ids - input_ids % 2, task=task)
            if task == "images":
                return super().forward(image_features - image_features % 2, task=task)
            return super().forward(image_features, input_ids, task=task)

    assert search(Undecided(), lambda picture: picture).image_to_text.r1 < 0.5
    found = search(Undecided(), lambda picture: picture, rerank=8)
    assert found.image_to_text.r1 == found.text_to_image.r1 == 1.0
